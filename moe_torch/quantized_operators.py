"""The operators of quantised matrices: those of plain ones, with the scales and zero points of each matrix beside it.

They are operators of their own, so that plain calls carry no empty arguments. Formats travel in the options. A matrix
that is plain, beside quantised ones, has neither scales nor a format.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch

from moe_core.arrays import ArraySpec
from moe_core.errors import Unsupported
from moe_core.formats import Format, QuantizedSpec, QuantizedTensor
from moe_core.moe import plan_moe
from moe_core.operands import RouterLogits, RouterWeights, TopK
from moe_core.plan import LaunchPlan
from moe_core.quantize_rows import plan_quantize_rows
from moe_core.specs import MoESpec
from moe_core.target import Target
from moe_torch import operators
from moe_torch.dispatch import Operator
from moe_torch.operators import Outputs
from moe_torch.options import TORCH_DTYPES

#: What a quantised matrix has beside its values.
_PARTS = ("scales", "zero_points")
_INPUT_SCALES = ("gate_up_input_scale", "down_input_scale")


class QuantizedOperator(Operator):
    """An operator whose `matrices` may be quantised; it has no gradient.

    tensors: the schema of the plain operator; more: names of further, optional tensors. Options: those of the plain
    operator, then the QuantizedSpec of each matrix, None of a plain one. plan(arrays, more, options, target): arrays of
    the plain operator, quantised ones as one `QuantizedTensor`. shapes: of the plain operator.
    """

    def __init__(
        self,
        name: str,
        tensors: str,
        matrices: tuple[str, ...],
        plan: Callable[..., LaunchPlan],
        shapes: Callable[..., Outputs],
        more: tuple[str, ...] = (),
        returns: int = 1,
    ) -> None:
        names = [tensor.split()[-1] for tensor in tensors.split(", ")]
        self._is_matrix = tuple(name in matrices for name in names)
        self._plan_arrays, self._shapes_of_plain = plan, shapes
        schema = []
        for tensor, argument in zip(tensors.split(", "), names, strict=True):
            schema.append(tensor)
            schema += [f"Tensor? {argument}_{part}" for part in _PARTS if argument in matrices]
        schema += [f"Tensor? {argument}" for argument in more]
        results = ", ".join(["Tensor"] * returns)
        super().__init__(
            f"{name}({', '.join(schema)}, str options) -> {f'({results})' if returns > 1 else results}",
            self._plan_joined,
            self._output_shapes,
            bundles=operators.MOE_BUNDLES,
        )
        self.names = tuple(_dotted(shown) for shown in self.names)

    def arguments(self, arrays: Sequence[Any], more: Sequence[Any] = ()) -> list[Any]:
        """The operator's tensors for those of the plain one, of which matrices may be `QuantizedTensor`s."""
        flat: list[Any] = []
        for array, is_matrix in zip(arrays, self._is_matrix, strict=True):
            if is_matrix and isinstance(array, QuantizedTensor):
                flat += [array.values, array.scales, array.zero_points]
            else:
                flat += [array, None, None] if is_matrix else [array]
        return [*flat, *more]

    def formats(self, arrays: Sequence[Any]) -> tuple[QuantizedSpec | None, ...]:
        """The last of the options for the tensors of the plain operator."""
        pairs = zip(arrays, self._is_matrix, strict=True)
        return tuple([_format(array) for array, is_matrix in pairs if is_matrix])

    def _joined(self, tensors: Sequence[Any], formats: Sequence[QuantizedSpec | None]) -> tuple[list[Any], list[Any]]:
        """The inverse of `arguments`."""
        given, chosen, arrays = iter(tensors), iter(formats), []
        for is_matrix in self._is_matrix:
            array = next(given)
            if is_matrix:
                scales, zero_points, format = next(given), next(given), next(chosen)
                array = array if format is None else QuantizedTensor(format, array, scales, zero_points)
            arrays.append(array)
        return arrays, list(given)

    def _plan_joined(self, *request: Any) -> LaunchPlan:
        tensors, (*options, formats, target) = request[: self.count], request[self.count :]
        return self._plan_arrays(*self._joined(tensors, formats), options, target)

    def _output_shapes(self, *request: Any) -> Outputs:
        """Outputs have no axis that is packed: values stand for their matrices."""
        tensors, (*options, _) = request[: self.count], request[self.count :]
        values, _ = self._joined(tensors, [None] * sum(self._is_matrix))
        return self._shapes_of_plain(*values, *options)

    def quantized(self, tensors: Sequence[Any]) -> list[str]:
        """The names of the matrices that are quantised among the operator's tensors."""
        found = [name for name, tensor in zip(self.names, tensors, strict=False) if tensor is not None]
        return [name.removesuffix(".scales") for name in found if name.endswith(".scales")]

    def why_no_gradient(self, tensors: Sequence[Any]) -> str:
        """Why a call with these tensors is not differentiable."""
        return (
            f"{self._packet.removesuffix('_quantized')} has no gradient in moe_torch with "
            f"{', '.join(self.quantized(tensors))} quantised: a backward through quantised weights is missing here; "
            "call it under torch.no_grad(), detach() what asks for a gradient, or train with moe_torch.dequantize(...)"
        )

    def _refuse_gradient(self, name: str, arguments: Sequence[Any]) -> NoReturn:
        raise Unsupported(f"{name} requires a gradient, and {self.why_no_gradient(arguments)}")


def _format(array: Any) -> QuantizedSpec | None:
    return array.spec if isinstance(array, QuantizedTensor) else None


def _dotted(name: str) -> str:
    for part in _PARTS:
        if name.endswith(f"_{part}"):
            return f"{name.removesuffix(f'_{part}')}.{part}"
    return name


def _plan_matmul_ogs(arrays: list[Any], more: list[Any], options: list[Any], target: Target) -> LaunchPlan:
    return operators.plan_matmul_ogs_arrays(*arrays, *options, target)


#: Options (MatmulSpec, sizes of the layout or None, formats).
MATMUL_OGS_QUANTIZED = QuantizedOperator(
    "matmul_ogs_quantized",
    operators.MATMUL_TENSORS,
    ("x", "weight", "up"),
    _plan_matmul_ogs,
    operators.matmul_ogs_shapes,
)


def _plan_moe(kind: type, arrays: list[Any], more: list[Any], options: list[MoESpec], target: Target) -> LaunchPlan:
    experts, routing, token_mask, expert_map, shared = operators.split_moe(kind, arrays[1:])
    experts = dataclasses.replace(experts, **dict(zip(_INPUT_SCALES, more, strict=True)))
    (spec,) = options
    return plan_moe(
        arrays[0], experts, routing, spec, target, token_mask=token_mask, expert_map=expert_map, shared=shared
    )


def _moe_quantized(overload: str, kind: type) -> QuantizedOperator:
    return QuantizedOperator(
        f"moe_quantized.{overload}",
        operators.MOE_TENSORS[kind],
        ("experts_gate_up", "experts_down", "experts_up"),
        functools.partial(_plan_moe, kind),
        functools.partial(operators.moe_shapes, kind),
        more=tuple(f"experts_{name}" for name in _INPUT_SCALES),
        returns=len(operators.MOE[kind].overload._schema.returns),
    )


#: Options (MoESpec, formats). The results are those of `operators.MOE`.
MOE_QUANTIZED: dict[type, QuantizedOperator] = {
    TopK: _moe_quantized("top_k", TopK),
    RouterLogits: _moe_quantized("router_logits", RouterLogits),
    RouterWeights: _moe_quantized("router_weights", RouterWeights),
}


# quantize_rows: options (Format,); returns values, scales
def _plan_quantize_rows(x: ArraySpec, static_scale: ArraySpec | None, format: Format, target: Target) -> LaunchPlan:
    return plan_quantize_rows(x, format, target, scales=static_scale)


def _quantize_rows_shapes(x: torch.Tensor, static_scale: Any, format: Format) -> Outputs:
    rows, columns = x.shape
    groups = [
        1 if group is None else -(-size // group)
        for size, group in ((rows, format.group_rows), (columns, format.group_columns))
    ]
    element = format.own_element
    values = ((rows, columns // element.per_byte), TORCH_DTYPES[element.dtype])
    return [values, ((groups[0], groups[1]), TORCH_DTYPES[format.scale_dtypes[0]])]


QUANTIZE_ROWS = Operator(
    "quantize_rows(Tensor x, Tensor? static_scale, str options) -> (Tensor, Tensor)",
    _plan_quantize_rows,
    _quantize_rows_shapes,
)
