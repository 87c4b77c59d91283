"""NumPy twin of the ragged grouped matmul."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from moe_core.base.threads import Later, column_blocks, elements, products, row_blocks, spread, threads_for
from moe_core.errors import InvalidInput
from moe_core.formats import QuantizedSpec, QuantizedTensor
from moe_core.ops.activation.reference import apply, split
from moe_core.ops.common.bundles import bundle_of, quantized_from
from moe_core.ops.common.product import narrow_columns, operands, product
from moe_core.ops.common.rounding import result_dtype, round_to, to_float32, working_dtype
from moe_core.ops.lora.adapters import Adapters
from moe_core.ops.lora.reference import TailArrays, add_tail
from moe_core.ops.matmul.reference.quantized import quantized_product
from moe_core.ops.matmul.reference.rows import FEWEST_ROWS, Piece, Rows, dense_rows, in_slot_order, planned_rows
from moe_core.specs import LayoutSpec, MatmulOperands, MatmulSpec, map_arrays

Matrix = np.ndarray | QuantizedTensor
_ALL = (slice(None),)
#: Least time of a piece with elementwise operations, between which a thread may wait for the GIL.
_PIECE_NANOSECONDS = 250_000
#: Most extra elements of a product to prepare its pieces before threads begin.
_AHEAD_ELEMENTS = 1 << 20


def pick(array: Any, index: int) -> Any:
    return map_arrays(array, lambda part: part[index]) if isinstance(array, QuantizedTensor) else array[index]


def pick_layer(array: Any, layer_index: np.ndarray | None) -> Any:
    """`array[layer_index[0]]`, or `array` without a layer axis. Raises InvalidInput."""
    if array is None or layer_index is None:
        return array
    index, count = int(layer_index[0]), array.shape[0]
    if not 0 <= index < count:
        raise InvalidInput(f"layer_index must be in [0, {count}), got {index}; pass the index of a stacked layer")
    return pick(array, index)


def take_rows(x: Matrix, rows: Any) -> Matrix:
    if isinstance(x, QuantizedTensor):
        scales = x.scales if x.format.group_rows is None else x.scales[rows]
        return QuantizedTensor(x.spec, x.values[rows], scales)
    return x[rows]


def _call(ready: Callable[[], Any]) -> None:
    ready()


def _invariant(spec: MatmulSpec) -> bool:
    return spec.tuning is not None and spec.tuning.batch_invariant


def _multiply(x: Matrix, weight: Matrix, spec: MatmulSpec, out: np.ndarray) -> None:
    if isinstance(weight, QuantizedTensor):
        out[...] = quantized_product(x, weight, _invariant(spec))
    elif isinstance(x, QuantizedTensor):
        raise InvalidInput(f"weight must be quantised where x is, got a plain one beside {x}; quantise it")
    else:
        product(x, weight, spec.weight_layout, _invariant(spec), out)


def _out_dtype(x: Matrix, spec: MatmulSpec) -> np.dtype:
    if spec.out_dtype is not None:
        return result_dtype(spec.out_dtype, x)
    if isinstance(x, QuantizedTensor):
        raise InvalidInput(
            "spec.out_dtype must be given where x is quantised, got None; pass MatmulSpec(out_dtype=...)"
        )
    return x.dtype


def matmul_ogs(
    operands: MatmulOperands,
    spec: MatmulSpec,
    rows: Rows | None = None,
    *,
    places: tuple[np.ndarray, ...] = (),
    later: Later | None = None,
    then: Callable[[slice], None] | None = None,
) -> np.ndarray:
    """y of `plan_matmul_ogs`. Rows without an expert are exact zeros, and sums are always IEEE fp32. A quantised x
    needs spec.out_dtype. rows None: dense. places: memory for y. later: computes y, and runs `then`, if nothing follows
    its sums. then: called for each finished slice of y, if all rows have an expert."""
    rows = dense_rows(operands.x.shape[0]) if rows is None else rows
    y = places[0] if places else _empty(operands, spec, rows)
    Product(operands, spec, rows, y).run(later, then)
    return y


def _empty(operands: MatmulOperands, spec: MatmulSpec, rows: Rows) -> np.ndarray:
    layout, width = rows.layout, operands.weight.shape[-1 if spec.weight_layout == "in_out" else -2]
    gated = spec.activation is not None and spec.activation.gated and operands.up is None
    count = rows.count if layout is None else layout.capacity if spec.scatter == "row" else layout.num_slots
    return np.empty((count, width // 2 if gated else width), _out_dtype(operands.x, spec))


class Product:
    """One product of a layout's rows, which fills y and any pre. `run` computes all of it, `chain` one piece with its
    epilogue, so that pieces of two products can follow each other in one thread. nanoseconds: of the whole product."""

    def __init__(
        self,
        operands: MatmulOperands,
        spec: MatmulSpec,
        rows: Rows,
        y: np.ndarray,
        pre: np.ndarray | None = None,
        tail: TailArrays | None = None,
    ) -> None:
        x, arrays = operands.x, (operands.weight, operands.up, operands.bias, operands.up_bias)
        weight, up, bias, up_bias = (pick_layer(array, operands.layer_index) for array in arrays)
        self.layout, self.rows, self.spec, self.y, self.pre = rows.layout, rows, spec, y, pre
        self.tail = tail
        self.of, self.to = self.rows.index[spec.gather], self.rows.index[spec.scatter]
        self.x, self.widens = x, isinstance(x, np.ndarray) and isinstance(weight, np.ndarray)
        dtypes_of = {getattr(x, "dtype", None), getattr(weight, "dtype", None)}
        self.direct = self.widens and not _invariant(spec) and dtypes_of == {working_dtype(x)}
        if self.rows.count < len(y):
            for target in (y,) if pre is None else (y, pre):
                target[...] = 0
        self.width = weight.shape[-1 if spec.weight_layout == "in_out" else -2]
        self.sides = [(weight, bias)] if up is None else [(weight, bias), (up, up_bias)]
        # Gate, then up, as in pre, and whether they fit in the result's memory.
        self.shape = self.rows.count, len(self.sides) * self.width
        self.dtype = working_dtype(x)
        destination = pre if spec.activation is not None else y
        fits = (
            isinstance(self.to, slice)
            and destination is not None
            and (destination.shape, destination.dtype) == (self.shape, self.dtype)
        )
        self.sums = destination if fits else None
        row_weight = operands.row_weight
        self.row_weight = None if row_weight is None else row_weight.reshape(-1)[self.rows.index["slot"], None]
        self.columns = _ALL if isinstance(weight, QuantizedTensor) else column_blocks(self.width)
        self.finished = (
            self.sums is y and row_weight is None and tail is None and all(added is None for _, added in self.sides)
        )
        counted = max(self.rows.count, FEWEST_ROWS * len(self.rows.parts))
        self.nanoseconds = products(counted, x.shape[1], self.shape[1])

    def pieces(self, nanoseconds: float) -> list[Piece] | None:
        """Pieces for `chain`, or None if most threads would be idle."""
        threads = threads_for(nanoseconds)
        pieces = self.rows.pieces(max(1, min(threads, int(nanoseconds / _PIECE_NANOSECONDS))), self.shape[1])
        return pieces if 2 * sum(map(len, pieces)) >= threads else None

    def _rows(self, rows: Any) -> Matrix:
        """x may be written after construction."""
        selected = take_rows(self.x, rows)
        return to_float32(selected) if self.widens and isinstance(selected, np.ndarray) else selected

    def _ready(self, left: Matrix, sums: np.ndarray, expert: int, side: int, columns: slice) -> Callable[[], Any]:
        matrix = self.sides[side][0]
        columns_of_expert = matrix if self.layout is None else pick(matrix, expert)
        if isinstance(columns_of_expert, np.ndarray):
            columns_of_expert = (
                columns_of_expert[:, columns] if self.spec.weight_layout == "in_out" else columns_of_expert[columns]
            )
        first = side * self.width
        out = sums[:, first : first + self.width][:, columns]
        if self.direct and isinstance(left, np.ndarray) and isinstance(columns_of_expert, np.ndarray):
            transposed = self.spec.weight_layout == "out_in"
            return functools.partial(
                np.matmul, *operands(left, columns_of_expert.T if transposed else columns_of_expert, out, transposed)
            )
        return functools.partial(_multiply, left, columns_of_expert, self.spec, out)

    def _finish(self, block: slice, sums: np.ndarray) -> None:
        if self.tail is not None:
            rows, arrays = self.rows.index["row"], self.tail.arrays
            slots = np.asarray(self.rows.index["slot"])[block]
            add_tail(sums, block if isinstance(rows, slice) else rows[block], slots, arrays, self.tail.adapters)
        halves = [sums[:, side * self.width : (side + 1) * self.width] for side in range(len(self.sides))]
        for values, (_, added) in zip(halves, self.sides, strict=True):
            if added is not None:
                values += to_float32(added if self.layout is None else added[self.rows.experts[block]])
        destination = block if isinstance(self.to, slice) else self.to[block]
        y, pre, result = self.y, self.pre, halves[0]
        direct = (
            y[destination] if isinstance(self.to, slice) and self.row_weight is None and y.dtype == self.dtype else None
        )
        if self.spec.activation is not None:
            gate_up = (result, halves[1]) if len(halves) > 1 else split(result, self.spec.activation)
            if pre is not None and self.sums is not pre:
                pre[destination] = round_to(sums, pre.dtype)
            result = apply(*gate_up, self.spec.activation, direct)
        if self.row_weight is not None:
            result = np.multiply(result, self.row_weight[block], out=result)
        if self.sums is not y and result is not direct:
            y[destination] = round_to(result, y.dtype)

    def _calls(self, piece: Piece, block: slice) -> tuple[np.ndarray, list[Callable[[], Any]]]:
        num_rows, calls = block.stop - block.start, []
        sums = np.empty((num_rows, self.shape[1]), self.dtype) if self.sums is None else self.sums[block]
        rows = block if isinstance(self.of, slice) else self.of[block]
        if self.direct and isinstance(self.x, np.ndarray) and not isinstance(rows, slice):
            left: Matrix = np.empty((num_rows, self.x.shape[1]), self.dtype)
            calls.append(functools.partial(self.x.take, rows, 0, left, "clip"))
        else:
            left = self._rows(rows)
        for expert, rows_of_expert in piece:
            part = slice(rows_of_expert.start - block.start, rows_of_expert.stop - block.start)
            mine = take_rows(left, part)
            for side, (matrix, _) in enumerate(self.sides):
                narrow = not _invariant(self.spec) and narrow_columns(mine, matrix, self.spec.weight_layout)
                for columns in _ALL if narrow else self.columns:
                    calls.append(self._ready(mine, sums[part], expert, side, columns))
        return sums, calls

    def chain(self, piece: Piece) -> Callable[[], slice]:
        """A call that computes a piece's rows and returns them. Python work is done ahead, because of the GIL."""
        block = slice(piece[0][1].start, piece[-1][1].stop)
        small = self.rows.count * max(self.x.shape[1], self.shape[1]) <= _AHEAD_ELEMENTS
        ahead = self._calls(piece, block) if self.direct and small else None

        def compute() -> slice:
            sums, calls = self._calls(piece, block) if ahead is None else ahead
            for call in calls:
                call()
            if not self.finished:
                self._finish(block, sums)
            return block

        return compute

    def run(self, later: Later | None = None, then: Callable[[slice], None] | None = None) -> None:
        work = self.nanoseconds
        with np.errstate(all="ignore"):
            # The other two gradients add at least as much work.
            whole = work if later is None else 3 * work
            if not (self.finished and then is None) and (pieces := self.pieces(whole)) is not None:

                def chain(compute: Callable[[], slice]) -> None:
                    block = compute()
                    if then is not None:
                        then(block)

                ready = [self.chain(piece) for piece in pieces]
                if later is not None:
                    experts = [tuple(expert for expert, _ in piece) for piece in pieces]
                    later.first(chain, zip(experts, ready, strict=True), work)
                else:
                    spread(chain, ready, work)
                return
            gathered = self._rows(self.of)
            sums = np.empty(self.shape, self.dtype) if self.sums is None else self.sums

            blocks = [block for piece in self.rows.pieces(1 << 30, 0) for block in piece]
            parts = [
                (expert, self._ready(take_rows(gathered, block), sums[block], expert, side, part))
                for expert, block in blocks
                for side in range(len(self.sides))
                for part in self.columns
            ]
            if later is not None and self.finished and then is None:
                later.add(_call, parts, work)
                return
            spread(_call, [part for _, part in parts], work)
            steps = [] if self.finished else [lambda block: self._finish(block, sums[block])]
            for step in steps if then is None else [*steps, then]:
                spread(step, row_blocks(*self.shape), elements(*self.shape))


def matmul_ogs_plan(
    arrays: Mapping[str, np.ndarray],
    *,
    layout: LayoutSpec | None,
    spec: MatmulSpec,
    outputs: tuple[str, ...],
    tensors: tuple[tuple[str, QuantizedSpec], ...] = (),
    adapters: Adapters | None = None,
    places: tuple[np.ndarray, ...],
) -> tuple[np.ndarray, ...]:
    """`matmul_ogs` with a plan's inputs by name, written to places."""
    tail = None if adapters is None else TailArrays.of(arrays, adapters)
    operands = bundle_of(MatmulOperands, quantized_from(arrays, tensors))
    rows, made = planned_rows(layout, arrays, operands.x.shape[0]), dict(zip(outputs, places, strict=True))
    rows = rows if adapters is None else in_slot_order(rows)
    y = made["y"] if "y" in made else _empty(operands, spec, rows)
    Product(operands, spec, rows, y, made.get("pre"), tail).run()
    return places
