"""NumPy twin of both expert products."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from moe_core.base.threads import spread
from moe_core.ops.common.bundles import bundle_of
from moe_core.ops.matmul.reference.forward import Product
from moe_core.ops.matmul.reference.rows import planned_rows
from moe_core.specs import LayoutSpec, MatmulOperands, MatmulSpec


def both_products(
    arrays: Mapping[str, np.ndarray],
    *,
    layout: LayoutSpec | None,
    first: MatmulSpec,
    second: MatmulSpec,
    outputs: tuple[str, ...],
    places: tuple[np.ndarray, ...],
) -> tuple[np.ndarray, ...]:
    """Write the outputs of `matmul_ogs_plan`, then the second product of y by row, with the bits of separate products.
    arrays: `first.x`, `first.weight`, ..., `second.weight`, and the layout's. Threads take blocks through both."""
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

    # This thread does Python work ahead: other threads would wait for the GIL.
    chains = [(one.chain(piece), two.chain(piece)) for piece in pieces]

    def compute(chain: tuple[Callable[[], Any], Callable[[], Any]]) -> None:
        for each in chain:
            each()

    with np.errstate(all="ignore"):
        spread(compute, chains, work)
    return places
