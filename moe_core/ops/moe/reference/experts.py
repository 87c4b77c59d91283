"""NumPy twin of both products of the experts: a block of an expert's rows takes the way through both in one thread."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from moe_core.base.threads import spread
from moe_core.ops.common.bundles import bundle_of
from moe_core.ops.matmul.reference.forward import Product
from moe_core.ops.matmul.reference.rows import planned_rows
from moe_core.specs.matmul import MatmulSpec
from moe_core.specs.operands import MatmulOperands
from moe_core.specs.routing import LayoutSpec


def both_products(
    arrays: Mapping[str, np.ndarray],
    *,
    layout: LayoutSpec | None,
    first: MatmulSpec,
    second: MatmulSpec,
    outputs: tuple[str, ...],
    places: tuple[np.ndarray, ...],
) -> tuple[np.ndarray, ...]:
    """Write what `matmul_ogs_plan` makes with outputs (`y`, `pre`), then the product of y by row.

    arrays: their inputs as `first.x`, `first.weight`, ..., `second.weight`, and the layout's. places: memory for the
    results. Threads wake once where there are blocks for all of them; the bits are those of one product at a time.
    """
    made, common = dict(zip(outputs, places, strict=False)), {"layer_index": arrays.get("layer_index")}
    y, rows = made["y"], planned_rows(layout, arrays, len(arrays["first.x"]))
    one, two = (
        dataclasses.replace(bundle_of(MatmulOperands, {"second.x": y, **arrays}, prefix), **common)
        for prefix in ("first.", "second.")
    )
    one, two = Product(one, first, rows, y, made.get("pre")), Product(two, second, rows, places[-1])
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
