"""The gather from tokens to rows of a layout, and its way back."""

from __future__ import annotations

import numpy as np
import pytest

from moe_core import InvalidInput
from moe_core.base.arrays import ArraySpec
from moe_core.base.dtypes import numpy_dtype
from moe_core.base.target import Target
from moe_core.ops.reduction.reduce import plan_reduce
from moe_core.ops.reduction.rowwise import plan_gather_rows
from moe_core.ops.routing import reference as routing
from moe_core.specs.exchange import packed_row
from moe_core.specs.routing import LayoutSpec
from tests.support.harness import engine_target, run_plan, spec_of

ENGINES = (engine_target(), Target("reference"))
on_engines = pytest.mark.parametrize("target", ENGINES, ids=lambda target: target.kind)
TOKENS, K, E, D = 37, 3, 5, 72


@on_engines
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("options", [{}, {"alignment": 8}, {"max_rows": 6}, {"rows": 30}, {"rows": 0}], ids=str)
def test_rows_of_tokens(target: Target, dtype: str, options: dict[str, int]) -> None:
    """By the definition; back, in the order k = 0..K-1, sums of fp32. Wider rows of x are read where they lie."""
    random, layout = np.random.default_rng(0), LayoutSpec(TOKENS, K, E, **options)
    ids = random.integers(-1, E, (TOKENS, K)).astype(np.int32)
    arrays = routing.layout(ids, layout=layout)
    slot_of_row, row_of_slot = arrays[2], arrays[3]
    wide = random.standard_normal((TOKENS, D + 8), np.float32).astype(numpy_dtype(dtype))
    x = wide[:, 8:]
    strided = ArraySpec((TOKENS, D), dtype, (D + 8, 1))
    indices = spec_of(slot_of_row), spec_of(row_of_slot)
    plan = plan_gather_rows(strided, *indices, layout, target)
    found = run_plan(plan, {"x": x, "slot_of_row": slot_of_row})["y"]
    expected = np.zeros((layout.capacity, D), x.dtype)
    for row, slot in enumerate(slot_of_row):
        if slot >= 0:
            expected[row] = x[slot // K]
    assert found.tobytes() == expected.tobytes()
    numbers = random.integers(-9, 9, (layout.capacity, 3)).astype(np.int32)
    plan = plan_gather_rows(strided, *indices, layout, target, table=spec_of(numbers))
    packed = run_plan(plan, {"x": x, "slot_of_row": slot_of_row, "table": numbers})["y"]
    elements, first = packed_row(D, dtype, 3)
    assert packed.shape[1] == elements and packed[:, :D].tobytes() == expected.tobytes()
    np.testing.assert_array_equal(packed.view(np.int32)[:, first : first + 3], numbers)
    plan = plan_reduce(spec_of(found), spec_of(row_of_slot), layout, target, order="row", out_dtype="float32")
    total = run_plan(plan, {"y": found, "row_of_slot": row_of_slot})["out"]
    placed = (row_of_slot >= 0).reshape(TOKENS, K)
    wanted = np.zeros((TOKENS, D), np.float32)
    for k in range(K):
        wanted += np.where(placed[:, k, None], x.astype(np.float32), np.float32(0))
    np.testing.assert_array_equal(total, wanted)


def test_wrong_arguments() -> None:
    layout, x = LayoutSpec(TOKENS, K, E), ArraySpec((TOKENS, D), "bfloat16")
    slots = ArraySpec((TOKENS * K,), "int32")
    for changes, message in (
        ({"x": ArraySpec((TOKENS + 1, D), "bfloat16")}, r"x must be \[37, d_model\], got \(38, 72\)"),
        ({"slot_of_row": ArraySpec((5,), "int32")}, r"layout.slot_of_row must be \[111\], got \(5,\)"),
        ({"row_of_slot": ArraySpec((5,), "int32")}, r"layout.row_of_slot must be \[111\], got \(5,\)"),
        ({"wide": x}, "wide must be float32, got bfloat16"),
        ({"table": ArraySpec((5, 3), "int32")}, r"table must be \[111, numbers\], got \(5, 3\)"),
        ({"wide": ArraySpec((TOKENS, D + 1), "float32")}, r"wide must be \[37, 72\], got \(37, 73\)"),
    ):
        given = {"x": x, "slot_of_row": slots, "row_of_slot": slots} | changes
        with pytest.raises(InvalidInput, match=message):
            plan_gather_rows(**given, layout=layout, target=engine_target())
