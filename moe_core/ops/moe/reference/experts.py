"""NumPy twin of both products of the experts: a block of an expert's rows takes the way through both in one thread."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from moe_core.base.threads import spread
from moe_core.ops.matmul.reference.forward import Product
from moe_core.specs.matmul import MatmulSpec
from moe_core.specs.routing import LayoutSpec

_GROUPS = ("group_sizes", "group_start", "slot_of_row")


def both_products(
    *,
    layout: LayoutSpec | None,
    first: MatmulSpec,
    second: MatmulSpec,
    outputs: tuple[str, ...],
    places: tuple[np.ndarray, ...],
    **arrays: np.ndarray,
) -> tuple[np.ndarray, ...]:
    """What `matmul_ogs_keeping` with outputs (`y`, `pre`) writes, then what `matmul_ogs` makes of y by row.

    arrays: their inputs as `first.x`, `first.weight`, ..., `second.weight`, and the layout's. places: memory for the
    results. Threads wake once where there are blocks for all of them; the bits are those of one product at a time.
    """
    made, layer_index = dict(zip(outputs, places, strict=False)), arrays.get("layer_index")

    def product(name: str, x: np.ndarray, spec: MatmulSpec, rows: Any, y: np.ndarray, pre: Any = None) -> Product:
        weights = tuple(arrays.get(f"{name}.{part}") for part in ("weight", "up", "bias", "up_bias"))
        where = layout, rows, tuple(arrays.get(part) for part in _GROUPS)
        return Product(x, weights, arrays.get(f"{name}.row_weight"), layer_index, where, spec, y, pre)

    one = product("first", arrays["first.x"], first, None, made["y"], made.get("pre"))
    two = product("second", made["y"], second, one.rows, places[-1])
    work = one.nanoseconds + two.nanoseconds
    pieces = one.pieces(work)
    if pieces is None:
        one.run()
        two.run()
        return places

    # What of Python can be done ahead is, by this thread: others would wait for its lock.
    chains = [(one.chain(piece), two.chain(piece)) for piece in pieces]

    def compute(chain: tuple[Callable[[], Any], Callable[[], Any]]) -> None:
        for each in chain:
            each()

    with np.errstate(all="ignore"):
        spread(compute, chains, work)
    return places
