"""The gradients of the ops `matmul_ogs`, `activation` and `reduce`, for layers that are built of stages.

Each op's autograd layer keeps the op's own arguments and later runs one operator, `moebius::matmul_ogs_backward` or
`moebius::activation_backward`, for the gradients asked for and no others; that of `reduce` copies rows, in torch's own
operations. What has no gradient, and why: `moe_core.matmul_backward.why_no_gradient`, and `_refuse` below. A product
with quantised weights has those of its other operands, by `moebius::matmul_ogs_quantized_backward`.
"""

from __future__ import annotations

import functools
from typing import Any, NoReturn

import torch

from moe_core.activation_backward import plan_activation_backward
from moe_core.arrays import ArraySpec, require_spec
from moe_core.errors import Unsupported
from moe_core.formats import QuantizedTensor
from moe_core.matmul_backward import DIFFERENTIABLE, plan_matmul_ogs_backward, why_no_gradient
from moe_core.operands import MatmulOperands
from moe_core.plan import LaunchPlan
from moe_core.specs import Activation, LayoutSpec
from moe_core.target import Target
from moe_torch.backward_operator import BackwardOperator
from moe_torch.dispatch import Operator, call
from moe_torch.operators import ACTIVATION, MATMUL_OGS, MATMUL_TENSORS, REDUCE, Outputs
from moe_torch.options import decode, encode
from moe_torch.quantized_operators import MATMUL_OGS_QUANTIZED, PRODUCT_MATRICES, QuantizedOperator

_LAYOUT = ("group_sizes", "group_start", "slot_of_row", "row_of_slot")
_NUM_OPERANDS = len(MATMUL_OGS.names) - len(_LAYOUT)
#: By op: the arguments that may be asked for a gradient; where one cannot be had `_refuse` says so.
_GRADIENTS = {
    "matmul_ogs": (*DIFFERENTIABLE, "up", "up_bias"),
    "matmul_ogs_quantized": tuple(name for name in MATMUL_OGS_QUANTIZED.names if name not in ("layer", *_LAYOUT)),
    "activation": ("x", "up"),
    "reduce": ("y", "shared", "shared_gate"),
}
_OPERATORS = {
    "matmul_ogs": MATMUL_OGS,
    "matmul_ogs_quantized": MATMUL_OGS_QUANTIZED,
    "activation": ACTIVATION,
    "reduce": REDUCE,
}


# matmul_ogs_backward: options are those of matmul_ogs, then the gradients wanted
def _plan_matmul_backward(d_y: ArraySpec, *request: Any) -> LaunchPlan:
    *arrays, spec, sizes, wanted, target = request
    layout = None
    if sizes is not None:
        row_of_slot = require_spec("row_of_slot", arrays[-1], ("num_tokens * top_k",), "int32")
        layout = LayoutSpec(row_of_slot.shape[0] // sizes[0], *sizes)
    operands = MatmulOperands(*arrays[:_NUM_OPERANDS])
    return plan_matmul_ogs_backward(d_y, operands, layout, spec, target, wanted=wanted)


def _matmul_backward_shapes(d_y: torch.Tensor, *request: Any) -> Outputs:
    *arrays, _, _, wanted = request
    given = dict(zip(MATMUL_OGS.names, arrays, strict=True))
    found = [given[name.removeprefix("d_")] for name in wanted]
    return [(tuple(array.shape), array.dtype) for array in found]


_BACKWARD_TENSORS = f"Tensor d_y, {MATMUL_TENSORS}"
_MATMUL_OGS_BACKWARD = BackwardOperator(
    f"matmul_ogs_backward({_BACKWARD_TENSORS}, str options) -> Tensor[]",
    _plan_matmul_backward,
    _matmul_backward_shapes,
)


class _QuantizedBackward(BackwardOperator, QuantizedOperator):
    """That of a product with quantised weights, whose formats follow in the options."""


_MATMUL_OGS_QUANTIZED_BACKWARD = _QuantizedBackward(
    "matmul_ogs_quantized_backward",
    _BACKWARD_TENSORS,
    PRODUCT_MATRICES,
    _plan_matmul_backward,
    _matmul_backward_shapes,
    returns="Tensor[]",
)


# activation_backward: options (Activation,)
def _plan_activation_backward(
    d_y: ArraySpec, x: ArraySpec, up: ArraySpec | None, activation: Activation, target: Target
) -> LaunchPlan:
    return plan_activation_backward(d_y, x, activation, target, up=up)


def _activation_backward_shapes(d_y: torch.Tensor, x: torch.Tensor, up: torch.Tensor | None, _: Any) -> Outputs:
    return [(tuple(array.shape), array.dtype) for array in (x, up) if array is not None]


_ACTIVATION_BACKWARD = BackwardOperator(
    "activation_backward(Tensor d_y, Tensor x, Tensor? up, str options) -> Tensor[]",
    _plan_activation_backward,
    _activation_backward_shapes,
)


def _matmul_gradients(gradient: torch.Tensor, given: dict[str, Any], text: str, asked: list[str]) -> dict[str, Any]:
    spec, sizes, *formats = decode(text)
    operator = _MATMUL_OGS_QUANTIZED_BACKWARD if formats else _MATMUL_OGS_BACKWARD
    options = encode(spec, sizes, tuple(f"d_{name}" for name in asked), *formats)
    return dict(zip(asked, call(operator, gradient, *given.values(), options), strict=True))


def _activation_gradients(gradient: torch.Tensor, given: dict[str, Any], text: str, asked: list[str]) -> dict[str, Any]:
    activation, _ = decode(text)
    found = call(_ACTIVATION_BACKWARD, gradient, *given.values(), encode(activation))
    return dict(zip(("x", "up"), found, strict=False))


def _reduce_gradients(gradient: torch.Tensor, given: dict[str, Any], text: str, asked: list[str]) -> dict[str, Any]:
    """A slot's row is that of its token; slots and rows without each other get zeros."""
    found = {}
    if "shared" in asked:
        found["shared"] = gradient.to(given["shared"].dtype)
    if "y" in asked:
        top_k, order, _ = decode(text)
        y, row_of_slot = given["y"], given["row_of_slot"]
        rows = gradient.to(y.dtype).repeat_interleave(top_k, 0)
        if order == "slot":
            found["y"] = torch.where(row_of_slot[:, None] >= 0, rows, 0)
        else:
            # Slots without a row write to one row more, which is cut off.
            places = torch.where(row_of_slot >= 0, row_of_slot, y.shape[0]).long()
            found["y"] = rows.new_zeros(y.shape[0] + 1, y.shape[1]).index_copy(0, places, rows)[:-1]
    return found


_BACKWARDS = {
    "matmul_ogs": _matmul_gradients,
    "matmul_ogs_quantized": _matmul_gradients,
    "activation": _activation_gradients,
    "reduce": _reduce_gradients,
}


def _refuse(op: str, given: dict[str, Any], text: str, asked: set[str]) -> None:
    """Raise Unsupported where this call of an op has no gradient."""
    if op in ("matmul_ogs", "matmul_ogs_quantized"):
        spec, sizes, *formats = decode(text)
        arrays = list(given.values())
        for chosen in formats:
            arrays, _ = MATMUL_OGS_QUANTIZED.joined(arrays, chosen, QuantizedTensor.unchecked)
        operands = MatmulOperands(*arrays[:_NUM_OPERANDS])
        reason = why_no_gradient(operands, sizes, spec, asked)
        if reason is not None:
            raise Unsupported(reason)
    if op == "reduce" and asked & {"shared", "shared_gate"} and given["shared_gate"] is not None:
        raise Unsupported(
            "shared or shared_gate requires a gradient, and reduce with a shared_gate has none for these; add "
            "sigmoid(shared_gate) * shared in torch, or detach() them"
        )


class _Stage(torch.autograd.Function):
    """`(op, its tensors, options) -> its result`."""

    @staticmethod
    def forward(op: str, *arguments: Any) -> torch.Tensor:
        return call(_OPERATORS[op], *arguments)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        ctx.op, *tensors, ctx.options = inputs
        names = _OPERATORS[ctx.op].names
        asked = {name for name, needed in zip(names, ctx.needs_input_grad[1:], strict=False) if needed}
        _refuse(ctx.op, dict(zip(names, tensors, strict=True)), ctx.options, asked)
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        names = _OPERATORS[ctx.op].names
        given = dict(zip(names, ctx.saved_tensors, strict=True))
        asked = [
            name
            for name, needed in zip(names, ctx.needs_input_grad[1:], strict=False)
            if needed and name in _GRADIENTS[ctx.op]
        ]
        found = _BACKWARDS[ctx.op](gradients[0].contiguous(), given, ctx.options, asked)
        return (None, *[found.get(name) if name in asked else None for name in names], None)

    @staticmethod
    def vmap(info: Any, in_dims: Any, op: str, *arguments: Any) -> NoReturn:
        raise Unsupported(f"{op} has no gradient inside of torch.func.vmap; take that of the whole batch, or loop")


class _StageBackward(torch.autograd.Function):
    """A backward where its gradients may be differentiated again, as with create_graph=True: that is refused."""

    @staticmethod
    def forward(operator: Operator, *arguments: Any) -> tuple[torch.Tensor, ...]:
        return tuple(call(operator, *arguments))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
        ctx.name = inputs[0].name.removesuffix("_backward").removesuffix("_quantized")

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> NoReturn:
        raise Unsupported(
            f"{ctx.name} has a gradient, and no gradient of that one; leave second derivatives out, or detach() the "
            "gradients"
        )

    @staticmethod
    def vmap(info: Any, in_dims: Any, operator: Operator, *arguments: Any) -> NoReturn:
        raise Unsupported(f"{operator.name} cannot run inside of torch.func.vmap; loop over the batch")


def _second_gradient(operator: Operator, *arguments: Any) -> list[torch.Tensor]:
    return list(_StageBackward.apply(operator, *arguments))


def define_stage_gradients() -> None:
    """Give the three ops their gradients."""
    for backward in (_MATMUL_OGS_BACKWARD, _MATMUL_OGS_QUANTIZED_BACKWARD, _ACTIVATION_BACKWARD):
        backward.define_gradient(frozenset(backward.names), functools.partial(_second_gradient, backward))
    for op, operator in _OPERATORS.items():
        operator.define_gradient(_GRADIENTS[op], functools.partial(_Stage.apply, op))
