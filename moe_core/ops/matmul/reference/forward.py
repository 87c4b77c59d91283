"""NumPy twin of the ragged grouped matmul: fp32 BLAS products of blocks of each expert's rows."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np

from moe_core.base import dtypes
from moe_core.base.threads import Later, column_blocks, elements, products, row_blocks, spread, threads_for
from moe_core.errors import InvalidInput
from moe_core.formats import QuantizedSpec, QuantizedTensor
from moe_core.ops.activation.reference import apply, split
from moe_core.ops.common.product import product
from moe_core.ops.common.rounding import result_dtype, round_to, to_float32, working_dtype
from moe_core.ops.matmul.reference.quantized import quantized_product
from moe_core.ops.matmul.reference.rows import rows_of
from moe_core.specs.matmul import MatmulSpec
from moe_core.specs.operands import map_arrays
from moe_core.specs.routing import LayoutSpec

Matrix = np.ndarray | QuantizedTensor
_ALL = (slice(None),)
_FEWEST_ROWS = 16
#: Elements of a piece that are worth an activation of its own: threads wait for Python's lock between its operations.
_PIECE_ELEMENTS = 65536


def pick(array: Any, index: int) -> Any:
    """`array[index]` of an array, or of every array of a quantised tensor."""
    return map_arrays(array, lambda part: part[index]) if isinstance(array, QuantizedTensor) else array[index]


def pick_layer(array: Any, layer_index: np.ndarray | None) -> Any:
    """`array[layer_index[0]]`, or `array` where there is no layer axis; a layer outside the array raises InvalidInput.

    array: None, an array or a quantised tensor.
    """
    if array is None or layer_index is None:
        return array
    index, count = int(layer_index[0]), array.shape[0]
    if not 0 <= index < count:
        raise InvalidInput(f"layer_index must be in [0, {count}), got {index}; pass the index of a stacked layer")
    return pick(array, index)


def _rows(x: Matrix, rows: Any) -> Matrix:
    """Rows of x; a scale of all rows stays what it is."""
    if isinstance(x, QuantizedTensor):
        scales = x.scales if x.format.group_rows is None else x.scales[rows]
        return QuantizedTensor(x.spec, x.values[rows], scales)
    return x[rows]


def _multiply(x: Matrix, weight: Matrix, spec: MatmulSpec, out: np.ndarray) -> None:
    """The fp32 product of one expert's rows."""
    invariant = spec.tuning is not None and spec.tuning.batch_invariant
    if isinstance(weight, QuantizedTensor):
        out[...] = quantized_product(x, weight, invariant)
    elif isinstance(x, QuantizedTensor):
        raise InvalidInput(f"weight must be quantised where x is, got a plain one beside {x}; quantise it")
    else:
        product(x, weight, spec.weight_layout, invariant, out)


def _out_dtype(x: Matrix, spec: MatmulSpec) -> np.dtype:
    if spec.out_dtype is not None:
        return result_dtype(spec.out_dtype, x)
    if isinstance(x, QuantizedTensor):
        raise InvalidInput(
            "spec.out_dtype must be given where x is quantised, got None; pass MatmulSpec(out_dtype=...)"
        )
    return x.dtype


def matmul_ogs(
    x: Matrix,
    weight: Matrix,
    group_sizes: np.ndarray | None = None,
    group_start: np.ndarray | None = None,
    slot_of_row: np.ndarray | None = None,
    up: Matrix | None = None,
    bias: np.ndarray | None = None,
    up_bias: np.ndarray | None = None,
    row_weight: np.ndarray | None = None,
    layer_index: np.ndarray | None = None,
    *,
    layout: LayoutSpec | None,
    spec: MatmulSpec,
    places: tuple[np.ndarray, ...] = (),
    later: Later | None = None,
    then: Callable[[slice], None] | None = None,
) -> np.ndarray:
    """y of `moe_core.ops.matmul.forward.plan_matmul_ogs`; rows without an expert are exact zeros.

    allow_tf32 and fast_accumulate permit less, so nothing changes here: sums are always IEEE fp32. A quantised x needs
    spec.out_dtype. places: memory for y, none = a new array. later: what y may be computed by, without
    row_weight, bias and activation. then: called for each slice of rows that y has, where all of them have an expert.
    """
    weights, groups = (weight, up, bias, up_bias), (group_sizes, group_start, slot_of_row)
    y = places[0] if places else _empty(x, weight, up, layout, spec, _out_dtype(x, spec))
    return _matmul(x, weights, row_weight, layer_index, layout, groups, spec, y, later=later, then=then)


def _empty(
    x: Matrix, weight: Matrix, up: Any, layout: LayoutSpec | None, spec: MatmulSpec, dtype: np.dtype
) -> np.ndarray:
    """Memory for y."""
    width = weight.shape[-1 if spec.weight_layout == "in_out" else -2]
    gated = spec.activation is not None and spec.activation.gated and up is None
    return np.empty((_num_rows(x, layout, spec), width // 2 if gated else width), dtype)


def _num_rows(x: Matrix, layout: LayoutSpec | None, spec: MatmulSpec) -> int:
    """Rows of the result."""
    if layout is None:
        return x.shape[0]
    return layout.capacity if spec.scatter == "row" else layout.num_slots


def _matmul(
    x: Matrix,
    weights: tuple[Any, ...],
    row_weight: np.ndarray | None,
    layer_index: np.ndarray | None,
    layout: LayoutSpec | None,
    groups: tuple[Any, ...],
    spec: MatmulSpec,
    y: np.ndarray,
    pre: np.ndarray | None = None,
    later: Later | None = None,
    then: Callable[[slice], None] | None = None,
) -> np.ndarray:
    """y, filled; what the activation is applied to is written to pre, where given."""
    weight, up, bias, up_bias = (pick_layer(array, layer_index) for array in weights)
    width = weight.shape[-1 if spec.weight_layout == "in_out" else -2]
    rows = rows_of(layout, x.shape[0], *groups)
    of, to = rows.index[spec.gather], rows.index[spec.scatter]
    source = to_float32(x) if isinstance(x, np.ndarray) and isinstance(weight, np.ndarray) else x
    if rows.count < len(y):
        for target in (y,) if pre is None else (y, pre):
            target[...] = 0
    # Gate and up behind each other, as pre has them, and if they can be in the place of a result.
    shape, dtype = (rows.count, width if up is None else 2 * width), working_dtype(source)
    before = pre if spec.activation is not None else y
    if before is None or not isinstance(to, slice) or (before.shape, before.dtype) != (shape, dtype):
        before = np.empty(shape, dtype)
    sides = [(before[:, :width], weight, bias)]
    if up is not None:
        sides.append((before[:, width:], up, up_bias))
    row_weight = None if row_weight is None else row_weight.reshape(-1)[rows.index["slot"], None]

    columns = _ALL if isinstance(weight, QuantizedTensor) else column_blocks(width)
    blocks = rows.blocks()

    def multiply(left: Matrix, expert: int, block: slice, side: int, columns: slice) -> None:
        values, matrix, _ = sides[side]
        own = matrix if layout is None else pick(matrix, expert)
        if isinstance(own, np.ndarray):
            own = own[:, columns] if spec.weight_layout == "in_out" else own[columns]
        _multiply(left, own, spec, values[block, columns])

    def finish(block: slice) -> None:
        for values, _, added in sides:
            if added is not None:
                values[block] += to_float32(added if layout is None else added[rows.experts[block]])
        place = block if isinstance(to, slice) else to[block]
        result = sides[0][0][block]
        direct = y[place] if isinstance(to, slice) and row_weight is None and y.dtype == before.dtype else None
        if spec.activation is not None:
            gate_up = (result, sides[1][0][block]) if up is not None else split(result, spec.activation)
            if pre is not None and before is not pre:
                pre[place] = round_to(before[block], pre.dtype)
            result = apply(*gate_up, spec.activation, direct)
        if row_weight is not None:
            result = np.multiply(result, row_weight[block], out=result)
        if before is not y and result is not direct:
            y[place] = round_to(result, y.dtype)

    finished = before is y and row_weight is None and all(added is None for *_, added in sides)
    steps = [step for step in (None if finished else finish, then) if step is not None]

    def chain(piece: tuple[int, slice]) -> None:
        expert, block = piece
        left = _rows(source, block if isinstance(of, slice) else of[block])
        for side, part in itertools.product(range(len(sides)), columns):
            multiply(left, expert, block, side, part)
        for step in steps:
            step(block)

    # Fewer rows of an expert take about as long: its matrix is read.
    work = products(max(rows.count, _FEWEST_ROWS * len(blocks)), x.shape[1], len(sides) * width)
    with np.errstate(all="ignore"):
        worth_while = before.size >= _PIECE_ELEMENTS * len(blocks)
        if steps and len(blocks) >= threads_for(work) and (worth_while or threads_for(work) == 1):
            spread(chain, blocks, work)
            return y
        gathered = _rows(source, of)

        def alone(piece: tuple[tuple[int, slice], int, slice]) -> None:
            (expert, block), side, part = piece
            multiply(_rows(gathered, block), expert, block, side, part)

        pieces = list(itertools.product(blocks, range(len(sides)), columns))
        if later is not None and not steps:
            later.add(alone, pieces, work)
            return y
        spread(alone, pieces, work)
        for step in steps:
            spread(step, row_blocks(*before.shape), elements(*before.shape))
    return y


def quantized_from(arrays: dict[str, np.ndarray], tensors: tuple[tuple[str, QuantizedSpec], ...]) -> dict[str, Any]:
    """Arrays by the names of a plan's inputs, those of quantised tensors (`weight.values`, `weight.scales`, ...) put
    together. tensors: (name, what its arrays mean) of each."""
    parts, rest = ("values", "scales", "zero_points"), dict(arrays)
    built = {
        name: QuantizedTensor(meaning, *(rest.pop(f"{name}.{part}", None) for part in parts))
        for name, meaning in tensors
    }
    return rest | built


def matmul_ogs_quantized(
    *, tensors: tuple[tuple[str, QuantizedSpec], ...], outputs: tuple[str, ...] = ("y",), **arguments: Any
) -> np.ndarray | tuple[np.ndarray, ...]:
    """`matmul_ogs`, or with other outputs `matmul_ogs_keeping`, whose quantised operands come as their arrays: see
    `quantized_from`."""
    arguments = quantized_from(arguments, tensors)
    return matmul_ogs(**arguments) if outputs == ("y",) else matmul_ogs_keeping(**arguments, outputs=outputs)


def matmul_ogs_keeping(
    x: np.ndarray,
    weight: Matrix,
    up: Matrix | None = None,
    bias: np.ndarray | None = None,
    up_bias: np.ndarray | None = None,
    group_sizes: np.ndarray | None = None,
    group_start: np.ndarray | None = None,
    slot_of_row: np.ndarray | None = None,
    layer_index: np.ndarray | None = None,
    *,
    layout: LayoutSpec | None,
    spec: MatmulSpec,
    outputs: tuple[str, ...],
    places: tuple[np.ndarray, ...] = (),
) -> tuple[np.ndarray, ...]:
    """What outputs names of y, as `matmul_ogs` has it, and pre: what the activation is applied to, cast to the dtype of
    x, `[*, 2N]` (ungated N); gate_layout `separate`: gate columns, then up. places: memory for them, none = new arrays.
    """
    assert spec.activation is not None
    found = dict(zip(outputs, places, strict=False))
    if "y" not in found:
        dtype = x.dtype if spec.out_dtype is None else dtypes.numpy_dtype(spec.out_dtype)
        found["y"] = _empty(x, weight, up, layout, spec, dtype)
    if "pre" not in found:
        width = weight.shape[-1 if spec.weight_layout == "in_out" else -2]
        found["pre"] = np.empty((_num_rows(x, layout, spec), width if up is None else 2 * width), x.dtype)
    groups, weights = (group_sizes, group_start, slot_of_row), (weight, up, bias, up_bias)
    _matmul(x, weights, None, layer_index, layout, groups, spec, found["y"], found["pre"])
    return tuple(found[name] for name in outputs)
