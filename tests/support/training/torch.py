"""Training steps of torch's op: problems, steps, and what is seen of them."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import moe_torch
from moe_core.specs import Activation, MoESpec, RouterSpec
from moe_core.specs.operands import ExpertWeights, MoEOutput, SharedExpert, named_arrays
from moe_torch.layers.losses import router_losses
from tests.support.strategies import hard_routing
from tests.support.torch import to_torch
from tests.support.training.loop import CONSTANTS, ROUTERS, Problem, draw_problem, routed

SILU = Activation("silu")


class Step:
    """A problem as a training step: leaves by name, a forward of them, and the value whose gradients are wanted."""

    def __init__(self, problem: Problem, device: Any = "cpu", frozen: tuple[str, ...] = ()) -> None:
        self.problem, self.device = problem, device
        arrays = {"x": problem.x, **dict(named_arrays(problem.experts, "experts."))}
        arrays |= dict(named_arrays(problem.routing, "routing."))
        arrays |= {} if problem.shared is None else dict(named_arrays(problem.shared, "shared."))
        self.tensors = {name: to_torch(array, device) for name, array in arrays.items()}
        names = [name for name in arrays if name not in CONSTANTS and name not in frozen]
        self.leaves = {name: self.tensors[name].requires_grad_() for name in names}
        self.given = {name: to_torch(array, device) for name, array in named_arrays(problem.gradients)}
        self.mask, self.map = (to_torch(array, device) for array in (problem.token_mask, problem.expert_map))

    def forward(self, leaves: dict[str, Any] | None = None) -> MoEOutput:
        tensors = self.tensors if leaves is None else self.tensors | leaves

        def bundle(kind: type, prefix: str) -> Any:
            own = {name: tensor for name, tensor in tensors.items() if name.startswith(prefix)}
            return kind(**{name.removeprefix(prefix): tensor for name, tensor in own.items()})

        shared = None if self.problem.shared is None else bundle(SharedExpert, "shared.")
        experts, routing = bundle(ExpertWeights, "experts."), bundle(type(self.problem.routing), "routing.")
        options = {"token_mask": self.mask, "expert_map": self.map, "shared": shared}
        return moe_torch.moe(tensors["x"], experts, routing, self.problem.spec, **options)

    def value(self, leaves: dict[str, Any] | None = None) -> Any:
        found, given = self.forward(leaves), self.given
        # Rows that nothing reads hold NaN or infinities on both sides.
        total = flow(found.output, given["output"])
        for name in ("weights", "logits"):
            if name in given:
                total = total + flow(getattr(found, name), given[name])
        if "load_balance" in given:
            chosen = found.ids.flatten().long()
            counts = torch.zeros(found.logits.shape[1] + 1, device=self.device).index_add(
                0, chosen + 1, torch.ones(chosen.shape, device=self.device)
            )
            router = self.problem.spec.router
            assert router is not None
            balance, z = router_losses(found.logits, counts[1:], self.mask, router)
            total = total + given["load_balance"][0] * balance + given["z"][0] * z
        return total

    def gradients(self, leaves: dict[str, Any] | None = None) -> dict[str, Any]:
        leaves = self.leaves if leaves is None else leaves
        return dict(zip(leaves, torch.autograd.grad(self.value(leaves), list(leaves.values())), strict=True))


class _Flow(torch.autograd.Function):
    """A scalar whose gradient by an output is exactly what is given, whatever numbers both hold."""

    @staticmethod
    def forward(output: Any, gradient: Any) -> Any:
        return output.new_zeros((), dtype=torch.float32)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, Any], output: Any) -> None:
        ctx.save_for_backward(inputs[1])

    @staticmethod
    def backward(ctx: Any, scale: Any) -> Any:
        return ctx.saved_tensors[0], None


def flow(output: Any, gradient: Any) -> Any:
    return _Flow.apply(output, gradient.to(output.dtype))


def routed_problem(router: RouterSpec = ROUTERS[1], *, dtype: str = "float32", **options: Any) -> Problem:
    """Experts with biases, a gated shared expert, a map, a mask, and gradients into every output."""
    spec = MoESpec(SILU, weight_layout="out_in", router_weight_layout="out_in")
    case = hard_routing("expert_map")
    problem = draw_problem(case, spec, d_model=16, d_ff=8, dtype=dtype, with_shared=True, poison=False)
    num_experts = case.num_experts if case.expert_map is None else len(case.expert_map)
    return routed(problem, router, num_experts, **options)


class Seen(TorchDispatchMode):
    """The operators of a block: (name, arguments by name, results)."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, dict[str, Any], Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        if func.namespace == "moebius":
            names = [argument.name for argument in func._schema.arguments]
            self.calls.append((func._schema.name.partition("::")[2], dict(zip(names, args, strict=True)), results))
        return results

    def backward(self) -> tuple[dict[str, Any], list[Any]]:
        """Arguments and results of the one backward there was."""
        found = [(arguments, results) for name, arguments, results in self.calls if name.startswith("moe_backward")]
        assert len(found) == 1
        return found[0]
