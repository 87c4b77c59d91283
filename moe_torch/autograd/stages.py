"""The gradients of the stage ops. Each saves its arguments and runs one operator for the requested gradients."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch

from moe_core.base.arrays import TRANSPOSED
from moe_core.errors import Unsupported
from moe_core.formats import QuantizedTensor
from moe_core.ops.matmul.backward import why_no_gradient
from moe_core.specs.matmul import MatmulSpec
from moe_core.specs.operands import MatmulOperands, RoutingGradients, array_fields
from moe_torch.autograd.function import Rule, define_gradient
from moe_torch.bridge.operator import Operator, call
from moe_torch.bridge.options import DTYPE_NAMES, decode
from moe_torch.operators import stages
from moe_torch.operators.grouped import GROUPED_CONTRACTION, GROUPED_MM
from moe_torch.operators.stages import ROUTE_ROUNDED, ROUTE_ROUNDED_BACKWARD


class _Rows(Rule):
    """A backward whose options have the wanted gradients behind the first ones of the forward."""

    upstream, first = "d_y", 1

    def __init__(self, operator: Operator, differentiable: Collection[str], backward: Operator) -> None:
        super().__init__(operator, differentiable)
        self._backward = backward

    def saved(self, ctx: Any, tensors: dict[str, Any], results: tuple[torch.Tensor, ...]) -> dict[str, Any]:
        # The gradient of x needs no value of wide.
        return {name: tensor for name, tensor in tensors.items() if name != "wide"}

    def gradients(self, ctx: Any, saved: Any, upstream: Any, asked: list[str]) -> dict[str, torch.Tensor]:
        options, known = decode(ctx.options), {**saved, self.upstream: upstream[0]}
        options = *options[: self.first], tuple(f"d_{name}" for name in asked), *options[self.first :]
        return dict(zip(asked, call(self._backward, self._backward.by_name(known, *options)), strict=True))


class _Router(_Rows):
    upstream = "d_logits"


class _Route(Rule):
    flowing = (1,)

    def saved(self, ctx: Any, tensors: dict[str, Any], results: tuple[torch.Tensor, ...]) -> dict[str, Any]:
        return {"logits": tensors["logits"], "ids": results[0], "token_mask": tensors["token_mask"]}

    def gradients(self, ctx: Any, saved: Any, upstream: Any, asked: list[str]) -> dict[str, torch.Tensor]:
        gradients, (spec,) = RoutingGradients(weights=upstream[0]), decode(ctx.options)
        return {"logits": stages.ROUTE_BACKWARD.call(gradients=gradients, spec=spec, **saved)}


class _RouteRounded(Rule):
    flowing = (1,)

    def saved(self, ctx: Any, tensors: dict[str, Any], results: tuple[torch.Tensor, ...]) -> dict[str, Any]:
        return {"logits": tensors["logits"], "ids": results[0], "candidates": results[3]}

    def gradients(self, ctx: Any, saved: Any, upstream: Any, asked: list[str]) -> dict[str, torch.Tensor]:
        spec, rounding = decode(ctx.options)
        arguments = {"d_weights": upstream[0], **saved}
        return {"logits": ROUTE_ROUNDED_BACKWARD.call(spec=spec, rounding=rounding, **arguments)}


class _Product(_Rows):
    first = 2

    def refuse(self, tensors: dict[str, Any], options: str, asked: list[str]) -> None:
        keywords = self.operator.signature.keywords(list(tensors.values()), decode(options), QuantizedTensor.unchecked)
        operands = MatmulOperands(**{name: keywords[name] for name, _ in array_fields(MatmulOperands)})
        reason = why_no_gradient(operands, keywords["sizes"], keywords["spec"], set(asked))
        if reason is not None:
            raise Unsupported(reason)


class _Gather(Rule):
    def saved(self, ctx: Any, tensors: dict[str, Any], results: tuple[torch.Tensor, ...]) -> dict[str, Any]:
        return {"row_of_slot": tensors["row_of_slot"]}

    def gradients(self, ctx: Any, saved: Any, upstream: Any, asked: list[str]) -> dict[str, torch.Tensor]:
        (sizes,), (d_y,) = decode(ctx.options), upstream

        def total(dtype: str | None) -> torch.Tensor:
            return stages.REDUCE.call(
                y=d_y, row_of_slot=saved["row_of_slot"], shared=None, shared_gate=None, sizes=sizes, order="row",
                out_dtype=dtype,
            )  # fmt: skip

        return {name: total("float32" if name == "wide" else None) for name in asked}


class _Activation(Rule):
    def gradients(self, ctx: Any, saved: Any, upstream: Any, asked: list[str]) -> dict[str, torch.Tensor]:
        activation, _ = decode(ctx.options)
        gradients = stages.ACTIVATION_BACKWARD.call(
            d_y=upstream[0], x=saved["x"], up=saved["up"], activation=activation
        )
        return dict(zip(("x", "up"), gradients, strict=False))


class _Reduce(Rule):
    def refuse(self, tensors: dict[str, Any], options: str, asked: list[str]) -> None:
        if tensors["shared_gate"] is not None and {"shared", "shared_gate"} & set(asked):
            raise Unsupported(
                "shared or shared_gate requires a gradient, and reduce with a shared_gate has none for these; add "
                "sigmoid(shared_gate) * shared in torch, or detach() them"
            )

    def gradients(self, ctx: Any, saved: Any, upstream: Any, asked: list[str]) -> dict[str, torch.Tensor]:
        """Slots and rows without each other get zeros."""
        (gradient,), gradients = upstream, {}
        if "shared" in asked:
            gradients["shared"] = gradient.to(saved["shared"].dtype)
        if "y" in asked:
            (_, top_k, *_), order, _ = decode(ctx.options)
            y, row_of_slot = saved["y"], saved["row_of_slot"]
            rows = gradient.to(y.dtype).repeat_interleave(top_k, 0)
            if order == "slot":
                gradients["y"] = torch.where(row_of_slot[:, None] >= 0, rows, 0)
            else:
                # Slots without a row write to one extra row, which is cut off.
                targets = torch.where(row_of_slot >= 0, row_of_slot, y.shape[0]).long()
                gradients["y"] = rows.new_zeros(y.shape[0] + 1, y.shape[1]).index_copy(0, targets, rows)[:-1]
        return gradients


#: Made once, because every call encodes one.
_BACK = {layout: MatmulSpec(back) for layout, back in TRANSPOSED.items()}


class _GroupedMM(Rule):
    """The gradients are grouped matmuls, which have gradients too."""

    def gradients(self, ctx: Any, saved: Any, upstream: Any, asked: list[str]) -> dict[str, torch.Tensor]:
        (spec,), made = decode(ctx.options), {}
        x, bias, offs = saved["x"], saved["bias"], saved["offs"]
        d_y = upstream[0].to(x.dtype)
        if "x" in asked:
            back = _BACK[spec.weight_layout]
            made["x"] = GROUPED_MM.call(x=d_y, weight=saved["weight"], bias=None, offs=offs, spec=back)
        if "weight" in asked:
            left, right = (x, d_y) if spec.weight_layout == "in_out" else (d_y, x)
            made["weight"] = GROUPED_CONTRACTION.call(left=left, right=right, offs=offs, out_dtype=None)
        if "bias" in asked:
            ones, dtype = d_y.new_ones(d_y.shape[0], 1), DTYPE_NAMES[bias.dtype]
            sums = GROUPED_CONTRACTION.call(left=ones, right=d_y, offs=offs, out_dtype=dtype)
            made["bias"] = sums.squeeze(1)
        return made


class _GroupedContraction(Rule):
    def gradients(self, ctx: Any, saved: Any, upstream: Any, asked: list[str]) -> dict[str, torch.Tensor]:
        weight = upstream[0].to(saved["left"].dtype)
        sides = {"left": ("right", "out_in"), "right": ("left", "in_out")}
        return {
            name: GROUPED_MM.call(x=saved[other], weight=weight, bias=None, offs=saved["offs"], spec=MatmulSpec(layout))
            for name, (other, layout) in sides.items()
            if name in asked
        }


def define_stage_gradients() -> None:
    define_gradient(_GroupedMM(GROUPED_MM, ("x", "weight", "bias")))
    define_gradient(_GroupedContraction(GROUPED_CONTRACTION, ("left", "right")))
    for kind, forward, backward in (
        (_Router, stages.ROUTER, stages.ROUTER_BACKWARD),
        (_Rows, stages.RMS_NORM, stages.RMS_NORM_BACKWARD),
    ):
        define_gradient(kind(forward, forward.names, backward), backward)
    define_gradient(_Route(stages.ROUTE, ("logits",)), stages.ROUTE_BACKWARD)
    define_gradient(_RouteRounded(ROUTE_ROUNDED, ("logits",)), ROUTE_ROUNDED_BACKWARD)
    products = (
        (stages.MATMUL_OGS, stages.MATMUL_OGS_BACKWARD),
        (stages.MATMUL_OGS_QUANTIZED, stages.MATMUL_OGS_QUANTIZED_BACKWARD),
    )
    for forward, backward in products:
        # `refuse` says which tensors cannot have a gradient.
        differentiable = set(forward.names) - {"layer_index", *stages.LAYOUT}
        define_gradient(_Product(forward, differentiable, backward), backward)
    define_gradient(_Gather(stages.GATHER_ROWS, ("x", "wide")))
    define_gradient(_Activation(stages.ACTIVATION, ("x", "up")), stages.ACTIVATION_BACKWARD)
    define_gradient(_Reduce(stages.REDUCE, ("y", "shared", "shared_gate")))
