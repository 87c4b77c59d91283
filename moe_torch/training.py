"""The operators of a training step: a whole MoE forward that keeps what its backward reads, and that backward.

Each is one plan; what is kept and what is computed: docs/training.md. `moe_torch.gradients` calls them.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from moe_core.arrays import ALIGNMENT, ArraySpec
from moe_core.moe import plan_moe
from moe_core.moe_backward import plan_moe_backward
from moe_core.operands import MoEOperands, OutputGradients, RouterLogits, RouterWeights, TopK
from moe_core.plan import LaunchPlan
from moe_core.specs import MoESpec
from moe_torch.dispatch import Operator
from moe_torch.main_grad import MATRICES
from moe_torch.operators import MOE, MOE_BUNDLES, MOE_TENSORS, Outputs, moe_shapes, split_moe
from moe_torch.options import decode

_OVERLOADS = {TopK: "top_k", RouterLogits: "router_logits", RouterWeights: "router_weights"}
#: The results of a forward after `output`, in order, by the names under which its backward reads them. With ids and
#: weights given these are what the forward used: a replay may have put others in the place of the caller's.
RESULTS = {
    TopK: ("tokens_per_expert", "invalid_ids", "routing.ids", "routing.weights"),
    RouterLogits: ("tokens_per_expert", "invalid_ids", "ids", "weights"),
    RouterWeights: ("tokens_per_expert", "invalid_ids", "ids", "weights", "logits"),
}


def kept_names(spec: MoESpec, shared_gate_up: Any, shared_gate: Any) -> tuple[str, ...]:
    """The buffers kept, which follow the results; arrays: of the shared expert, None where absent."""
    names = ["kept.group_start", "kept.slot_of_row", "kept.row_of_slot"]
    if not spec.recompute:
        names.insert(0, "kept.pre_activation")
        if shared_gate_up is not None:
            names.append("kept.shared_pre_activation")
    if shared_gate is not None:
        names.append("kept.shared_gate")
    return tuple(names)


# moe_training: tensors and options of moe
def _plan_training(kind: type, x: ArraySpec, *request: Any) -> LaunchPlan:
    *arrays, spec, target = request
    experts, routing, token_mask, expert_map, shared = split_moe(kind, arrays)
    options = {"token_mask": token_mask, "expert_map": expert_map, "shared": shared}
    return plan_moe(x, experts, routing, spec, target, keep=True, **options)


def _training_shapes(kind: type, x: torch.Tensor, *request: Any) -> Outputs:
    *arrays, spec = request
    experts, routing, _, _, shared = split_moe(kind, arrays)
    outputs = moe_shapes(kind, x, *request)
    if kind is TopK:
        outputs += [(tuple(routing.ids.shape), torch.int32), (tuple(routing.weights.shape), torch.float32)]
    tokens, inside = x.shape[0], -2 if spec.weight_layout == "in_out" else -1
    slots = tokens * (routing.ids.shape[1] if kind is TopK else spec.router.top_k)
    num_experts = experts.gate_up.shape[0 if experts.layer is None else 1]

    def pre_activation(rows: Any, bundle: Any) -> tuple[tuple[Any, ...], torch.dtype]:
        return (rows, spec.activation.input_width(bundle.down.shape[inside])), x.dtype

    shapes = {
        "kept.pre_activation": pre_activation(slots, experts),
        "kept.group_start": ((num_experts + 1,), torch.int32),
        "kept.slot_of_row": ((slots,), torch.int32),
        "kept.row_of_slot": ((slots,), torch.int32),
        "kept.shared_gate": ((tokens, 1), torch.float32),
    }
    if shared is not None:
        shapes["kept.shared_pre_activation"] = pre_activation(tokens, shared)
    parts = (None, None) if shared is None else (shared.gate_up, shared.gate)
    return outputs + [shapes[name] for name in kept_names(spec, *parts)]


class _Training(Operator):
    """Results: output, tokens_per_expert, invalid_ids, ids, weights, then logits if routed from x, then what is kept.

    Given ids and weights are copied: an operator returns no alias.
    """

    def __init__(self, kind: type) -> None:
        super().__init__(
            f"moe_training.{_OVERLOADS[kind]}({MOE_TENSORS[kind]}, str options) -> Tensor[]",
            functools.partial(_plan_training, kind),
            functools.partial(_training_shapes, kind),
            bundles=MOE_BUNDLES,
        )
        self._copied = tuple(self.names.index(name) for name in RESULTS[kind] if name in self.names)

    def _run(self, key: tuple[Any, ...], arguments: tuple[Any, ...]) -> list[torch.Tensor]:
        outputs = super()._run(key, arguments)
        outputs[3:3] = [arguments[place].clone() for place in self._copied]
        return outputs


# moe_backward: gradients of outputs, tensors of moe, results of the forward, kept buffers; options (MoESpec, wanted)
_UPSTREAM = {
    TopK: "Tensor gradients_output",
    RouterLogits: "Tensor gradients_output, Tensor? gradients_weights",
    RouterWeights: "Tensor gradients_output, Tensor? gradients_weights, Tensor? gradients_logits",
}
_FOUND = {
    TopK: "Tensor tokens_per_expert",
    RouterLogits: "Tensor tokens_per_expert, Tensor ids, Tensor weights",
    RouterWeights: "Tensor tokens_per_expert, Tensor ids, Tensor weights, Tensor logits",
}
_KEPT_TENSORS = (
    "Tensor? kept_pre_activation, Tensor kept_group_start, Tensor kept_slot_of_row, Tensor kept_row_of_slot, "
    "Tensor? kept_shared_pre_activation, Tensor? kept_shared_gate"
)


class _Backward(Operator):
    """Results: the gradients that the options name, in that order."""

    def __init__(self, kind: type, packet: str = "moe_backward", more: str = "") -> None:
        self._kind = kind
        super().__init__(
            f"{packet}.{_OVERLOADS[kind]}({_UPSTREAM[kind]}, {MOE_TENSORS[kind]}, {_FOUND[kind]}, {_KEPT_TENSORS}, "
            f"{more}str options) -> Tensor[]",
            self._backward_plan,
            self._gradient_shapes,
            bundles=("gradients", *MOE_BUNDLES, "kept", "into"),
        )
        self._num_upstream = sum(name.startswith("gradients.") for name in self.names)

    def _named(self, values: Sequence[Any]) -> dict[str, Any]:
        return dict(zip(self.names, values, strict=True))

    def _backward_plan(self, *request: Any) -> LaunchPlan:
        *specs, spec, wanted, target = request
        given = self._named(specs)
        x, *arrays = [given[name] for name in MOE[self._kind].names]
        upstream = (given.get(f"gradients.{name}") for name in ("output", "weights", "logits"))
        operands = MoEOperands(x, *split_moe(self._kind, arrays))
        options = {"wanted": wanted, "accumulate": _accumulated(wanted, given)}
        return plan_moe_backward(OutputGradients(*upstream), operands, spec, target, **options)

    def _gradient_shapes(self, *request: Any) -> Outputs:
        *tensors, _, wanted = request
        given = self._named(tensors)
        added = _accumulated(wanted, given)
        arrays = [given[name.removeprefix("d_")] for name in wanted if name not in added]
        return [(tuple(array.shape), array.dtype) for array in arrays]

    def _run(self, key: tuple[Any, ...], arguments: tuple[Any, ...]) -> list[torch.Tensor]:
        return super()._run(key, self._with_aligned(arguments))

    def _with_aligned(self, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        upstream = [_aligned(gradient) for gradient in arguments[: self._num_upstream]]
        return (*upstream, *arguments[self._num_upstream :])


def _accumulated(wanted: tuple[str, ...], given: dict[str, Any]) -> tuple[str, ...]:
    """Those of the gradients wanted that are added to a tensor."""
    return tuple(name for name in wanted if given.get(f"into.{name.removeprefix('d_')}") is not None)


class _BackwardInto(_Backward):
    """The gradients of matrices for which there is a tensor `into` are added to it; results: the others."""

    def __init__(self, kind: type) -> None:
        letters = zip("abcdef", MATRICES, strict=True)
        into = [f"Tensor({letter}!)? into_{name.replace('.', '_')}, " for letter, name in letters]
        super().__init__(kind, "moe_backward_into", "".join(into))
        self.names = (*self.names[: -len(MATRICES)], *[f"into.{name}" for name in MATRICES])

    def _run(self, key: tuple[Any, ...], arguments: tuple[Any, ...]) -> list[torch.Tensor]:
        arguments = self._with_aligned(arguments)
        ready = self._cache.get(key) or self._remember(key, arguments)
        given, (_, wanted) = self._named(arguments[:-1]), decode(arguments[-1])
        into = {name: given[f"into.{name.removeprefix('d_')}"] for name in _accumulated(wanted, given)}
        torch.autograd.graph.increment_version(list(into.values()))
        places = [into.get(name) for name in wanted]
        outputs = ready.run([arguments[index].data_ptr() for index in ready.selection], places)
        return [output for name, output in zip(wanted, outputs, strict=True) if name not in into]


def _aligned(gradient: torch.Tensor | None) -> torch.Tensor | None:
    """A gradient may be a slice that starts anywhere; kernels take addresses that are multiples of ALIGNMENT."""
    return gradient.clone() if gradient is not None and gradient.data_ptr() % ALIGNMENT else gradient


TRAINING: dict[type, Operator] = {kind: _Training(kind) for kind in _OVERLOADS}
BACKWARD: dict[type, Operator] = {kind: _Backward(kind) for kind in _OVERLOADS}
#: With tensors that take the sum of what they hold and a gradient.
BACKWARD_INTO: dict[type, Operator] = {kind: _BackwardInto(kind) for kind in _OVERLOADS}
