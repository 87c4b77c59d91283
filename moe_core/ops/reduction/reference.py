"""NumPy twins of the reductions and of row scaling."""

from __future__ import annotations

import numpy as np

from moe_core.base.threads import elements, row_blocks, spread
from moe_core.ops.activation.reference import sigmoid
from moe_core.ops.common.rounding import result_dtype, round_to, to_float32, working_dtype


def reduce(
    y: np.ndarray,
    row_of_slot: np.ndarray,
    shared: np.ndarray | None = None,
    shared_gate: np.ndarray | None = None,
    *,
    top_k: int,
    order: str = "slot",
    out_dtype: str | None = None,
    places: tuple[np.ndarray, ...] = (),
) -> np.ndarray:
    """`plan_reduce`. Slots with -1 are not read. places: memory for the result (empty: a new array)."""
    rows = row_of_slot.reshape(-1, top_k)
    complete = row_of_slot.min(initial=0) >= 0
    sources = rows if order == "row" else np.arange(rows.size).reshape(rows.shape)
    shape = len(rows), y.shape[1]
    out = places[0] if places else np.empty(shape, result_dtype(out_dtype, y) if out_dtype else y.dtype)

    def add(block: slice) -> None:
        rows_of_block, sources_of_block = rows[block], sources[block]
        wide = working_dtype(y)
        total = out[block] if out.dtype == wide else np.empty((len(rows_of_block), y.shape[1]), wide)
        with np.errstate(all="ignore"):
            if not complete:
                total[...] = 0
            for k in range(top_k):
                if complete:
                    values = to_float32(y[k::top_k][block] if order == "slot" else y[sources_of_block[:, k]])
                    # Sums start at 0, so a single negative zero becomes positive.
                    np.add(total if k else 0, values, out=total)
                else:
                    tokens = np.flatnonzero(rows_of_block[:, k] >= 0)
                    total[tokens] += to_float32(y[sources_of_block[tokens, k]])
            if shared is not None:
                visited = to_float32(shared[block])
                total += visited if shared_gate is None else visited * sigmoid(shared_gate[block])
        if out.dtype != wide:
            out[block] = round_to(total, out.dtype)

    spread(add, row_blocks(len(rows), 2 * y.shape[1]), elements(*rows.shape, y.shape[1]))
    return out


def gather_rows(
    x: np.ndarray, slot_of_row: np.ndarray, table: np.ndarray | None = None, *, top_k: int, stride: int, first: int
) -> np.ndarray:
    y, rows = np.zeros((len(slot_of_row), stride), x.dtype), np.flatnonzero(slot_of_row >= 0)
    y[rows, : x.shape[1]] = x[slot_of_row[rows] // top_k]
    if table is not None:
        y.view(np.int32)[:, first : first + table.shape[1]] = table
    return y


def scale_rows(x: np.ndarray, weights: np.ndarray) -> np.ndarray:
    with np.errstate(all="ignore"):
        return round_to(to_float32(x) * weights, x.dtype)
