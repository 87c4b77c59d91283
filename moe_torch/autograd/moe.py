"""The gradient of the composed operator `moe`. Refusals: `moe_core.ops.moe.checks.why_no_moe_gradient`."""

from __future__ import annotations

from typing import Any

import torch

from moe_core.errors import Unsupported
from moe_core.formats import QuantizedTensor
from moe_core.ops.moe.checks import why_no_moe_gradient
from moe_core.ops.moe.names import CONSTANTS, FLOWING, result_names, saved_names
from moe_core.specs.operands import LoRAFactors, SharedExpert, TopK
from moe_torch.autograd.function import Rule, define_gradient
from moe_torch.autograd.main_grad import destination, main_grads, require_eager
from moe_torch.bridge import eager, private
from moe_torch.bridge.operator import Operator, call
from moe_torch.bridge.options import TORCH_DTYPES, decode
from moe_torch.operators import pushed, table
from moe_torch.operators.kinds import MATRICES


def _read_last() -> bool:
    """Return True in eager code if no later backward reads what the forward saved."""
    traced = torch.compiler.is_compiling() or private.transforming() is not False
    return not traced and not torch.is_grad_enabled() and not private.keeps_graph()


class _MoE(Rule):
    """kind: of the routing. backward_into adds gradients to tensors."""

    def __init__(
        self, kind: type, moe: Operator, training: Operator, backward: Operator, backward_into: Operator
    ) -> None:
        # Arrays of quantised matrices count as differentiable, so that `refuse` sees them.
        super().__init__(moe, set(moe.names) - set(CONSTANTS), training)
        self._backward, self._backward_into = backward, backward_into
        #: Ids and weights are those that the forward used: a replay may have replaced the caller's.
        names = result_names(kind)
        self._results = (*names, "routing.ids", "routing.weights") if kind is TopK else names
        self.flowing = [index for index, name in enumerate(names) if name in FLOWING]
        self._upstream = [f"gradients.{names[index]}" for index in self.flowing]

    def refuse(self, tensors: dict[str, Any], options: str, asked: list[str]) -> None:
        spec, *formats = decode(options)
        if formats:
            signature = self.operator.signature
            keywords = signature.keywords(list(tensors.values()), (spec, *formats), QuantizedTensor.unchecked)
            reason = why_no_moe_gradient(keywords["experts"], spec, asked)
            if reason is not None:
                raise Unsupported(
                    f"{reason}; or detach() what requires a gradient ({', '.join(asked)}), or call moe under "
                    "torch.no_grad()"
                )
        if spec.main_grad:
            require_eager(list(tensors.values()))
            # Also checked here, where the error shows the caller.
            main_grads({name: tensors[name] for name in MATRICES if name in asked})

    def saved(self, ctx: Any, tensors: dict[str, Any], results: tuple[torch.Tensor, ...]) -> dict[str, Any]:
        spec, *_ = decode(ctx.options)
        present = [name for name, tensor in tensors.items() if tensor is not None]
        # Saved tensors come back without their attributes.
        ctx.holders, ctx.edges = {}, {}
        if spec.main_grad:
            ctx.edges = {name: index for index, name in enumerate(present)}
            ctx.holders = {name: tensors[name] for name in MATRICES if name in present and tensors[name].requires_grad}
        gate_up, gate = tensors["shared.gate_up"], tensors["shared.gate"]
        shared = None if gate_up is None else SharedExpert(gate_up, tensors["shared.down"], gate=gate)
        lora = None
        if "lora.scale" in tensors:
            lora = LoRAFactors(a1=tensors["lora.a1"], a2=tensors["lora.a2"])
        names = (*self._results, *saved_names(spec, shared, lora))
        return tensors | dict(list(zip(names, results, strict=True))[1:])

    def backwards(self, known: dict[str, Any]) -> tuple[Operator, Operator]:
        """The operators for the gradients. The second one adds to tensors."""
        return self._backward, self._backward_into

    def gradients(
        self, ctx: Any, saved: dict[str, Any], upstream: list[torch.Tensor | None], asked: list[str]
    ) -> dict[str, torch.Tensor]:
        spec, *formats = decode(ctx.options)
        if upstream[0] is None:
            x = saved["x"]
            dtype = x.dtype if spec.out_dtype is None else TORCH_DTYPES[spec.out_dtype]
            upstream[0] = torch.zeros_like(x, dtype=dtype, memory_format=torch.contiguous_format)
        flows = {name: destination(ctx.next_functions[ctx.edges[name]][0]) for name in asked if name in ctx.holders}
        asked = [name for name in asked if flows.get(name) != "nowhere"]
        into = main_grads({name: ctx.holders[name] for name in asked if flows.get(name) == "weight"})
        known = saved | dict(zip(self._upstream, upstream, strict=True))
        known |= {f"into.{name}": buffer for name, buffer in into.items()}
        pre, alone = saved.get("saved.pre_activation"), _read_last()
        if into and pre is not None and not alone:
            known["saved.pre_activation"] = pre.clone()
        # Modes that look at written arguments, as of `allow_mutation_on_saved_tensors`, take no absent ones.
        plain = eager.plain_thread()
        overwrites = alone and plain and pre is not None and eager.plain_tensor(pre)
        operator = self.backwards(known)[bool(into or overwrites)]
        arguments = operator.by_name(known, spec, tuple(f"d_{name}" for name in asked), *formats)
        try:
            gradients = call(operator, arguments)
        except AttributeError as error:
            if plain or not into:
                raise
            raise Unsupported(
                "main_grad=True writes gradients in place, which a mode of this thread refuses, such as "
                f"torch.autograd.graph.allow_mutation_on_saved_tensors (it said: {error}); leave one of the two out"
            ) from error
        return dict(zip([name for name in asked if name not in into], gradients, strict=True))


def _stand_in(x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return x.new_zeros(1).expand(like.shape)


class _Pushed(_MoE):
    """The gradient of `experts_push`, an output with a shape and no memory. pushing: the backwards that store the rows
    of the gradient of x at addresses."""

    named = False

    def __init__(self, kind: type, *operators: Operator, pushing: tuple[Operator, Operator]) -> None:
        super().__init__(kind, *operators)
        self._pushing = pushing

    def saved(self, ctx: Any, tensors: dict[str, Any], results: tuple[torch.Tensor, ...]) -> dict[str, Any]:
        # Addresses may be written when a backward begins: no hook may copy them, and no checkpoint make others.
        ctx.gradients_at = tensors["gradients_at"]
        return super().saved(ctx, tensors | {"gradients_at": None}, results)

    def backwards(self, known: dict[str, Any]) -> tuple[Operator, Operator]:
        known["results_at"] = known["gradients_at"]
        return super().backwards(known) if known["gradients_at"] is None else self._pushing

    def gradients(
        self, ctx: Any, saved: dict[str, Any], upstream: list[torch.Tensor | None], asked: list[str]
    ) -> dict[str, torch.Tensor]:
        saved |= {"gradients_at": ctx.gradients_at}
        gradients = super().gradients(ctx, saved, upstream, asked)
        if "x" in gradients and ctx.gradients_at is not None:
            gradients["x"] = _stand_in(gradients["x"], saved["x"])
        return gradients

    def run(self, arguments: tuple[Any, ...]) -> tuple[torch.Tensor, ...]:
        output, *others = super().run(arguments)
        return _stand_in(output, arguments[0]), *others


def define_moe_gradients() -> None:
    plain = (table.MOE, table.TRAINING), (table.BACKWARD, table.BACKWARD_INTO)
    quantized = (
        (table.MOE_QUANTIZED, table.QUANTIZED_TRAINING),
        (table.QUANTIZED_BACKWARD, table.QUANTIZED_BACKWARD_INTO),
    )
    for kind in table.LORA:
        of_kind = [operators[kind] for operators in (table.LORA_BACKWARD, table.LORA_BACKWARD_INTO)]
        define_gradient(_MoE(kind, table.LORA[kind], table.LORA_TRAINING[kind], *of_kind), *of_kind)
    push = pushed.EXPERTS_PUSH, pushed.EXPERTS_PUSH_TRAINING
    push_quantized = pushed.EXPERTS_PUSH_QUANTIZED, pushed.EXPERTS_PUSH_QUANTIZED_TRAINING
    for (forwards, backwards), pushes, pushing in (
        (plain, push, pushed.BACKWARDS),
        (quantized, push_quantized, pushed.QUANTIZED_BACKWARDS),
    ):
        for kind in table.MOE:
            of_kind = [operators[kind] for operators in backwards]
            define_gradient(_MoE(kind, *(operators[kind] for operators in forwards), *of_kind), *of_kind)
        define_gradient(_Pushed(TopK, *pushes, *(one[TopK] for one in backwards), pushing=pushing), *pushing)
