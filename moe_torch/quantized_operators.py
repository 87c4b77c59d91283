"""The operators of quantised matrices: those of plain ones, with the scales and zero points of each matrix beside it.

They are operators of their own, so that plain calls carry no empty arguments. Formats travel in the options. A matrix
that is plain, beside quantised ones, has neither scales nor a format. Their gradients: `moe_torch.gradients`,
`moe_torch.stage_gradients`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from moe_core.arrays import ArraySpec
from moe_core.formats import Format, QuantizedSpec, QuantizedTensor
from moe_core.operands import RouterLogits, RouterWeights, TopK
from moe_core.plan import LaunchPlan
from moe_core.quantize_rows import plan_quantize_rows
from moe_core.target import Target
from moe_torch import operators
from moe_torch.dispatch import Operator
from moe_torch.operators import Outputs
from moe_torch.options import TORCH_DTYPES

#: What a quantised matrix has beside its values.
_PARTS = ("scales", "zero_points")
#: The operands of a product, and the experts' matrices, that may be quantised.
PRODUCT_MATRICES = ("x", "weight", "up")
EXPERT_MATRICES = ("experts_gate_up", "experts_down", "experts_up")
#: What quantised experts may have beside the arrays of plain ones.
INPUT_SCALES = ("experts_gate_up_input_scale", "experts_down_input_scale")


class QuantizedOperator(Operator):
    """An operator whose `matrices` may be quantised.

    tensors: the schema of the plain operator; more: names of further, optional tensors. Options: those of the plain
    operator, then the QuantizedSpec of each matrix, None of a plain one. plan(*arrays, *more, *options, target): arrays
    of the plain operator, quantised ones as one `QuantizedTensor`. shapes and bundles: of the plain operator. returns:
    as in a schema.
    """

    def __init__(
        self,
        name: str,
        tensors: str,
        matrices: tuple[str, ...],
        plan: Callable[..., LaunchPlan],
        shapes: Callable[..., Outputs],
        *,
        more: tuple[str, ...] = (),
        returns: str = "Tensor",
        bundles: tuple[str, ...] = operators.MOE_BUNDLES,
    ) -> None:
        names = [tensor.split()[-1] for tensor in tensors.split(", ")]
        self._is_matrix = tuple(name in matrices for name in names)
        self._plan_arrays, self._shapes_of_plain = plan, shapes
        schema = []
        for tensor, argument in zip(tensors.split(", "), names, strict=True):
            schema.append(tensor)
            schema += [f"Tensor? {argument}_{part}" for part in _PARTS if argument in matrices]
        schema += [f"Tensor? {argument}" for argument in more]
        super().__init__(
            f"{name}({', '.join(schema)}, str options) -> {returns}",
            self._plan_joined,
            self._output_shapes,
            bundles=bundles,
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

    def joined(
        self,
        tensors: Sequence[Any],
        formats: Sequence[QuantizedSpec | None],
        build: Callable[..., QuantizedTensor] = QuantizedTensor,
    ) -> tuple[list[Any], list[Any]]:
        """The inverse of `arguments`: (tensors of the plain operator, further ones).

        build: `QuantizedTensor.unchecked` for tensors of transformations or of symbolic shape, which a check would fix.
        """
        given, chosen, arrays = iter(tensors), iter(formats), []
        for is_matrix in self._is_matrix:
            array = next(given)
            if is_matrix:
                scales, zero_points, format = next(given), next(given), next(chosen)
                array = array if format is None else build(format, array, scales, zero_points)
            arrays.append(array)
        return arrays, list(given)

    def _plan_joined(self, *request: Any) -> LaunchPlan:
        tensors, (*options, formats, target) = request[: self.count], request[self.count :]
        arrays, more = self.joined(tensors, formats)
        return self._plan_arrays(*arrays, *more, *options, target)

    def _output_shapes(self, *request: Any) -> Outputs:
        """Shapes are read from axes that no format packs: values stand for their matrices, unless they are tiled."""
        tensors, (*options, formats) = request[: self.count], request[self.count :]
        tiled = [None if format is None or format.tiling is None else format for format in formats]
        values, _ = self.joined(tensors, tiled, QuantizedTensor.unchecked)
        return self._shapes_of_plain(*values, *options)


def _format(array: Any) -> QuantizedSpec | None:
    return array.spec if isinstance(array, QuantizedTensor) else None


def _dotted(name: str) -> str:
    for part in _PARTS:
        if name.endswith(f"_{part}"):
            return f"{name.removesuffix(f'_{part}')}.{part}"
    return name


#: Options (MatmulSpec, sizes of the layout or None, formats).
MATMUL_OGS_QUANTIZED = QuantizedOperator(
    "matmul_ogs_quantized",
    operators.MATMUL_TENSORS,
    PRODUCT_MATRICES,
    operators.plan_matmul_ogs_arrays,
    operators.matmul_ogs_shapes,
)


def plan_quantized_moe(kind: type, *request: Any, keep: bool = False) -> LaunchPlan:
    """The plan of a forward of quantised experts, from the arrays of a plain one, input scales, options and target."""
    *arrays, gate_up_scale, down_scale, spec, target = request
    given = operators.moe_operands(kind, arrays, (gate_up_scale, down_scale))
    return operators.plan_moe_of(given, spec, target, keep=keep)


def _moe_quantized(overload: str, kind: type) -> QuantizedOperator:
    returns = ", ".join(["Tensor"] * len(operators.MOE[kind].overload._schema.returns))
    return QuantizedOperator(
        f"moe_quantized.{overload}",
        operators.MOE_TENSORS[kind],
        EXPERT_MATRICES,
        functools.partial(plan_quantized_moe, kind),
        functools.partial(operators.moe_shapes, kind),
        more=INPUT_SCALES,
        returns=f"({returns})",
    )


#: Options (MoESpec, formats). The results are those of `operators.MOE`.
MOE_QUANTIZED: dict[type, QuantizedOperator] = {
    TopK: _moe_quantized("top_k", TopK),
    RouterLogits: _moe_quantized("router_logits", RouterLogits),
    RouterWeights: _moe_quantized("router_weights", RouterWeights),
}


# quantize_rows: options (Format,); returns values, scales
def _plan_quantize_rows(
    x: ArraySpec, static_scale: ArraySpec | None, used_by: ArraySpec | None, format: Format, target: Target
) -> LaunchPlan:
    return plan_quantize_rows(x, format, target, scales=static_scale, used_by=used_by)


def _quantize_rows_shapes(x: torch.Tensor, static_scale: Any, used_by: Any, format: Format) -> Outputs:
    rows, columns = x.shape
    groups = [
        1 if group is None else -(-size // group)
        for size, group in ((rows, format.group_rows), (columns, format.group_columns))
    ]
    element = format.own_element
    values = ((rows, columns // element.per_byte), TORCH_DTYPES[element.dtype])
    return [values, ((groups[0], groups[1]), TORCH_DTYPES[format.scale_dtypes[0]])]


QUANTIZE_ROWS = Operator(
    "quantize_rows(Tensor x, Tensor? static_scale, Tensor? used_by, str options) -> (Tensor, Tensor)",
    _plan_quantize_rows,
    _quantize_rows_shapes,
)
