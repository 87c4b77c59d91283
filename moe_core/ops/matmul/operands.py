"""Checks of a grouped matmul's operands."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from moe_core.base import INT32_LIMIT, ArraySpec, dtypes, require_spec, row_stride
from moe_core.errors import InvalidInput, Unsupported
from moe_core.formats import Format, QuantizedTensor
from moe_core.specs import Activation, LayoutSpec, MatmulOperands, MatmulSpec, named_fields

#: For weights only: their grid is not centred.
_UNSIGNED = ("uint8", "uint4")
_INT8_PRODUCT = 128 * 128


@dataclass(frozen=True)
class MatmulSizes:
    """d: reduction length, n: output columns, weight_n: columns of one weight buffer."""

    d: int
    n: int
    weight_n: int
    num_layers: int
    rows: int
    out_rows: int


def quantized_operands(operands: MatmulOperands) -> dict[str, QuantizedTensor]:
    return {name: value for name, value in named_fields(operands) if isinstance(value, QuantizedTensor)}


def check_operands(operands: MatmulOperands, layout: LayoutSpec | None, spec: MatmulSpec, joined: bool) -> MatmulSizes:
    """Raises InvalidInput, and Unsupported if sizes overflow."""
    x, weight = operands.x, operands.weight
    dtype = _check_formats(operands, spec)
    x_shape = require_spec("x", logical_spec(x, dtype), ("num_rows", "d"), dtype, contiguous=False).shape
    row_stride("x", logical_spec(x, dtype))
    columns = x_shape[1]
    if columns < (2 if joined else 1) or (joined and columns % 2):
        need = "an even number of columns" if joined else "at least one column"
        raise InvalidInput(f"x must have {need}, got {x_shape}; pass a wider array")
    d = columns // 2 if joined else columns
    axes = (0 if layout is None else 1) + (1 if operands.layer_index is not None else 0)
    names = ("num_layers",) * (operands.layer_index is not None) + ((layout.num_experts,) if layout is not None else ())
    matrix = (d, "n") if spec.weight_layout == "in_out" else ("n", d)
    weight_shape = require_spec("weight", logical_spec(weight, dtype), (*names, *matrix), dtype).shape
    weight_n = weight_shape[-1] if spec.weight_layout == "in_out" else weight_shape[-2]
    num_layers = weight_shape[0] if operands.layer_index is not None else 1
    if weight_n < 1 or num_layers < 1:
        raise InvalidInput(f"weight must have no empty axis, got {weight_shape}; pass the full array")
    if d * weight_n >= INT32_LIMIT:
        raise Unsupported(
            f"one expert's weight must have fewer than 2**31 elements, got {d} x {weight_n}"
            "; split the experts with a tensor axis"
        )
    if isinstance(x, QuantizedTensor) and x.format.element == "int8" and d * _INT8_PRODUCT >= INT32_LIMIT:
        raise Unsupported(
            f"d must be below {INT32_LIMIT // _INT8_PRODUCT} for products of int8 with int8, whose sums fill 32 bits, "
            f"got {d}; quantise to fp8, or split the reduction"
        )
    n = _check_epilogue(operands, spec, weight_shape[:axes], weight_n, dtype, joined)

    if layout is None:
        if (spec.gather, spec.scatter) != ("row", "row"):
            raise InvalidInput(
                f"gather and scatter must be 'row' without a layout, got {spec.gather!r} and {spec.scatter!r}; "
                "pass a layout"
            )
        rows = out_rows = slots = x_shape[0]
    else:
        expected = {"row": layout.capacity, "token": layout.num_tokens, "slot": layout.num_slots}[spec.gather]
        require_spec("x", logical_spec(x, dtype), (expected, columns), dtype, contiguous=False)
        rows, slots = layout.capacity, layout.num_slots
        out_rows = slots if spec.scatter == "slot" else rows
    if operands.row_weight is not None:
        by_token = layout is not None and operands.row_weight.rank == 2
        shape = (layout.num_tokens, layout.top_k) if layout is not None and by_token else (slots,)
        require_spec("row_weight", operands.row_weight, shape, "float32")
    return MatmulSizes(d, n, weight_n, num_layers, rows, out_rows)


def _check_epilogue(
    operands: MatmulOperands, spec: MatmulSpec, lead: tuple[int, ...], weight_n: int, dtype: str, joined: bool
) -> int:
    """Returns the output columns. lead: the weight's axes before the matrix."""
    activation, weight = spec.activation, operands.weight
    separate = activation is not None and activation.gate_layout == "separate"
    one_buffer = activation is not None and activation.gated and not separate
    if one_buffer and weight_n % 2:
        raise InvalidInput(f"weight must have an even width (gate and up), got {weight_n}; pass both halves")
    if joined and (activation is not None or operands.bias is not None):
        raise InvalidInput("joined must be False with an activation or a bias, got True; leave them out")
    if separate or joined:
        require_like("up", operands.up, "weight", weight)
    elif operands.up is not None:
        raise InvalidInput("up must be None unless a gate_layout='separate' activation is fused; leave it out")
    for name in ("bias", "up_bias"):
        bias: ArraySpec | None = getattr(operands, name)
        if bias is not None:
            require_spec(name, bias, (*lead, weight_n), ("float32", dtype))
    if operands.up_bias is not None and not separate:
        raise InvalidInput("up_bias must be None unless up is given; put both halves into bias")
    if operands.layer_index is not None:
        require_spec("layer_index", operands.layer_index, (1,), "int32")
    return weight_n // 2 if one_buffer else weight_n


def why_not_together(activations: Format, weights: Format) -> str | None:
    if activations.element in _UNSIGNED:
        return f"{activations.element} codes are of weights; activations are e4m3, e2m1 or int8"
    if activations.group_rows not in (None, 1):
        return f"its scales must be of one row or of all, not of {activations.group_rows}"
    if "int" in weights.element and weights.element != "int8":
        return f"weights of {weights.element} are multiplied with plain rows"
    if (activations.element == "int8") != (weights.element == "int8"):
        return "int8 is multiplied with int8"
    if activations.group_columns not in (None, weights.group_columns):
        return f"its groups must have {weights.group_columns} columns, like the weight's, or all"
    return None


def check_tiling(weight: object, activation: Activation | None, name: str) -> None:
    """Raise InvalidInput if a prepacked weight's row order does not fit the fused activation."""
    tiling = weight.spec.tiling if isinstance(weight, QuantizedTensor) else None
    if tiling is None:
        return
    gate_layout = activation.gate_layout if activation is not None and activation.gated else None
    if gate_layout == "separate":
        raise InvalidInput(
            f"{name} must be in its published layout where gate and up are two buffers (gate_layout 'separate'), got "
            f"{weight}; call restore_weights, or store both in one buffer before prepack_weights"
        )
    wanted = "rows" if gate_layout is None else gate_layout
    if tiling.order != wanted:
        raise InvalidInput(
            f"{name} must be tiled in order {wanted!r} for "
            f"{'a product without gates' if gate_layout is None else f'gate_layout {gate_layout!r}'}, got {weight}; "
            f"call restore_weights, then prepack_weights with gate_layout={gate_layout!r}"
        )


def why_prepacked(matrices: Mapping[str, QuantizedTensor]) -> str | None:
    """The reason why products with these matrices have no gradients, or None."""
    for name, matrix in matrices.items():
        if matrix.spec.tiling is not None:
            return (
                f"{name} is {matrix}, and there is no product with the transpose of prepacked weights; train with the "
                "weights that restore_weights gives"
            )
    return None


def why_frozen(names: Iterable[str], quantized: Iterable[str]) -> str | None:
    """The reason why arrays of these names have no gradient, or None."""
    matrices = set(quantized)
    frozen = sorted(name for name in names if name in matrices or name.rpartition(".")[0] in matrices)
    if not frozen:
        return None
    return (
        f"{frozen[0]} has no gradient: quantised weights are frozen, gradients go through them and neither codes nor "
        "scales have one; dequantise the weight to train it"
    )


def logical_spec(array: Any, dtype: str) -> ArraySpec:
    """A quantised tensor as a row-major array of `dtype`; plain ones unchanged."""
    return ArraySpec(array.shape, dtype) if isinstance(array, QuantizedTensor) else array


def require_like(name: str, array: Any, other_name: str, other: Any) -> None:
    """Check that an operand matches another in format, shapes and dtypes."""
    if not isinstance(other, QuantizedTensor):
        require_spec(name, array, other.shape, other.dtype)
    elif not isinstance(array, QuantizedTensor) or array != other:
        got = "None" if array is None else str(array)
        raise InvalidInput(
            f"{name} must be {other} like {other_name}, with scales of {other.scales.dtype}, got {got}; quantise both "
            "alike"
        )


def require_weight(name: str, weight: QuantizedTensor, weight_layout: str) -> None:
    if weight.layout != weight_layout:
        raise InvalidInput(
            f"{name} must be {weight_layout} like weight_layout, got {weight}; quantise it in that layout, or change "
            "weight_layout"
        )
    _require_contiguous(name, weight)


def _require_contiguous(name: str, tensor: QuantizedTensor) -> None:
    for field, array in named_fields(tensor, f"{name}."):
        require_spec(field, array, array.shape, array.dtype)


def _check_formats(operands: MatmulOperands, spec: MatmulSpec) -> str:
    """Returns the dtype of plain operands."""
    x, weight = operands.x, operands.weight
    both_fp8 = all(isinstance(side, QuantizedTensor) and side.format.element == "e4m3" for side in (x, weight))
    if spec.fast_accumulate and not both_fp8:
        raise InvalidInput(
            "fast_accumulate must be False unless x and weight are both fp8, got True for "
            f"{x} and {weight}; leave it out"
        )
    if isinstance(weight, QuantizedTensor):
        require_weight("weight", weight, spec.weight_layout)
        check_tiling(weight, spec.activation, "weight")
    if not isinstance(x, QuantizedTensor):
        return require_spec("x", x, ("num_rows", "d"), dtypes.MATMUL_DTYPES, contiguous=False).dtype
    if not isinstance(weight, QuantizedTensor):
        raise InvalidInput(
            f"weight must be quantised where x is, got {weight} beside {x}; dequantise x, or quantise weight"
        )
    if x.layout != "out_in":
        raise InvalidInput(f"x must be out_in, its rows along the reduction, got {x}; quantise it in that layout")
    if x.spec.tiling is not None:
        raise InvalidInput(f"x must not be tiled, which weights alone may be, got {x}; call restore_weights")
    _require_contiguous("x", x)
    if (reason := why_not_together(x.format, weight.format)) is not None:
        raise InvalidInput(
            f"x must be in a format that goes with {weight.format}, got {x.format}: {reason}; quantise x to another"
        )
    if spec.out_dtype is None:
        raise InvalidInput(
            f"out_dtype must be given where x is quantised, got None for {x}; pass MatmulSpec(out_dtype=...)"
        )
    return spec.out_dtype
