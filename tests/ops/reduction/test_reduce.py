"""The reduction's kernels and its reference: order, skipped slots, shared experts, one rounding."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_core import InvalidInput
from moe_core.base import dtypes
from moe_core.base.arrays import ArraySpec
from moe_core.base.target import Target
from moe_core.ops.reduction import reference
from moe_core.ops.reduction.reduce import plan_reduce, plan_scale_rows, unrolled
from moe_core.ops.reduction.reference import reduce, scale_rows
from moe_core.ops.routing.reference import layout as make_layout
from moe_core.parity.tolerance import EXACT, assert_close
from moe_core.specs.routing import LayoutSpec
from tests.support import strategies
from tests.support.exact import against_exact, reduce_tolerance
from tests.support.harness import engine_target, run_plan
from tests.support.strategies import ID_KINDS, RoutingCase, draw_array, draw_ids, layout_arrays, numpy_dtype


@given(
    num_tokens=st.sampled_from([0, 1, 5, 37]),
    top_k=st.sampled_from([1, 2, 5, 20]),
    width=st.sampled_from([1, 16, 40]),
    kind=st.sampled_from(ID_KINDS),
    order=st.sampled_from(["slot", "row"]),
    dtype=st.sampled_from(dtypes.MATMUL_DTYPES),
    out_dtype=st.sampled_from([None, "float32"]),
    extras=st.sampled_from([None, "shared", "gated"]),
    seed=st.integers(0, 9),
)
def test_matches_the_reference(num_tokens, top_k, width, kind, order, dtype, out_dtype, extras, seed) -> None:
    random = np.random.default_rng(seed)
    layout = LayoutSpec(num_tokens, top_k, 6, alignment=4 if order == "row" else 1)
    row_of_slot = layout_arrays(draw_ids(kind, num_tokens, top_k, 6, seed), layout)["row_of_slot"]
    rows = layout.num_slots if order == "slot" else layout.capacity
    y = random.standard_normal((rows, width), np.float32).astype(dtypes.numpy_dtype(dtype))
    unread = np.ones(rows, bool)
    present = np.flatnonzero(row_of_slot >= 0)
    unread[present if order == "slot" else row_of_slot[present]] = False
    y[unread] = np.nan
    arrays = {"y": y, "row_of_slot": row_of_slot}
    if extras:
        arrays["shared"] = random.standard_normal((num_tokens, width), np.float32)
    if extras == "gated":
        arrays["shared_gate"] = random.standard_normal((num_tokens, 1), np.float32)
    specs = {name: ArraySpec(array.shape, array.dtype.name) for name, array in arrays.items()}
    plan = plan_reduce(
        specs.pop("y"), specs.pop("row_of_slot"), layout, engine_target(), order=order, out_dtype=out_dtype, **specs
    )
    actual = run_plan(plan, arrays)["out"]
    expected = reference.reduce(**arrays, top_k=top_k, order=order, out_dtype=out_dtype or dtype)
    assert np.isfinite(actual.astype(np.float32)).all()
    assert_close(actual, expected, reduce_tolerance(out_dtype or dtype, top_k), label="out")
    if not extras:
        absent = (row_of_slot.reshape(num_tokens, top_k) < 0).all(axis=1)
        assert not actual[absent].astype(np.float32).any()


@pytest.mark.parametrize("engine", [None, "reference"])
@pytest.mark.parametrize("order", ["slot", "row"])
@pytest.mark.parametrize("top_k", [3, 5, 16, 17, 20])  # loops are unrolled up to 16
def test_sums_in_slot_order_bit_by_bit(top_k: int, order: str, engine: str | None) -> None:
    """Against a sum one by one. No other order, the reverse one neither, gives these bits."""
    assert unrolled(top_k) is (top_k <= 16)
    random, layout, width = np.random.default_rng(top_k), LayoutSpec(7, top_k, 20), 40
    y = (
        random.standard_normal((layout.num_slots, width), np.float32)
        * 10.0 ** random.integers(-3, 4, layout.num_slots)[:, None]
    )
    y = y.astype(np.float32)
    row_of_slot = random.permutation(layout.num_slots).astype(np.int32)
    slots = y[row_of_slot] if order == "row" else y

    def total(choices: list[int]) -> np.ndarray:
        found = np.zeros((layout.num_tokens, width), np.float32)
        for k in choices:
            found += slots.reshape(layout.num_tokens, top_k, width)[:, k]
        return found

    forwards, backwards = total(list(range(top_k))), total(list(reversed(range(top_k))))
    assert (forwards != backwards).mean() > 0.2, "the test can tell orders apart"
    target = engine_target() if engine is None else Target(engine)
    plan = plan_reduce(
        ArraySpec(y.shape, "float32"), ArraySpec(row_of_slot.shape, "int32"), layout, target, order=order
    )
    actual = run_plan(plan, {"y": y, "row_of_slot": row_of_slot})["out"]
    np.testing.assert_array_equal(actual.view(np.int32), forwards.view(np.int32))


@pytest.mark.parametrize("engine", [None, "reference"])
@pytest.mark.parametrize("order", ["slot", "row"])
@pytest.mark.parametrize("top_k", [3, 17])
def test_slots_without_a_row_add_nothing(top_k: int, order: str, engine: str | None) -> None:
    layout = LayoutSpec(4, top_k, 20)
    y = np.arange(1, layout.num_slots + 1, dtype=np.float32)[:, None].repeat(24, 1)
    row_of_slot = np.arange(layout.num_slots, dtype=np.int32)
    absent = np.array([0, top_k + 1, *range(2 * top_k, 3 * top_k), layout.num_slots - 1])
    row_of_slot[absent] = -1
    sums = np.where(row_of_slot >= 0, y[:, 0], 0).reshape(4, top_k).sum(1)
    y[absent] = np.nan
    target = engine_target() if engine is None else Target(engine)
    plan = plan_reduce(
        ArraySpec(y.shape, "float32"), ArraySpec(row_of_slot.shape, "int32"), layout, target, order=order
    )
    found = run_plan(plan, {"y": y, "row_of_slot": row_of_slot})["out"]
    np.testing.assert_array_equal(found, sums[:, None].repeat(24, 1))


@pytest.mark.parametrize("dtype", dtypes.MATMUL_DTYPES)
@pytest.mark.parametrize("num_tokens", [0, 1, 37])
def test_scale_rows(dtype: str, num_tokens: int) -> None:
    random = np.random.default_rng(0)
    x = random.standard_normal((num_tokens, 40), np.float32).astype(dtypes.numpy_dtype(dtype))
    weights = random.standard_normal((num_tokens, 1), np.float32)
    plan = plan_scale_rows(ArraySpec(x.shape, dtype), ArraySpec(weights.shape, "float32"), engine_target())
    actual = run_plan(plan, {"x": x, "weights": weights})["y"]
    assert_close(actual, reference.scale_rows(x, weights), EXACT, label="y")


@pytest.mark.parametrize(
    ("slots", "message"),
    [
        (ArraySpec((5,), "int32"), r"layout\.row_of_slot must be \[6\], got \(5,\)"),
        (ArraySpec((6,), "int64"), r"layout\.row_of_slot must be int32, got int64"),
    ],
)
def test_slots_of_another_layout(slots: ArraySpec, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        plan_reduce(ArraySpec((6, 8), "float32"), slots, LayoutSpec(3, 2, 4), Target("interpreter"))


F32 = np.float32


@given(strategies.routings(), strategies.matmul_dtypes(), strategies.matmul_dtypes(), strategies.seeds())
def test_reduce_sums_slots_in_order(case: RoutingCase, dtype: str, out_dtype: str, seed: int):
    rng = np.random.default_rng(seed)
    _, _, slot_of_row, row_of_slot, _ = make_layout(
        case.ids, case.expert_map, case.token_mask, layout=case.layout(alignment=4)
    )
    slots = draw_array(rng, (case.num_tokens * case.top_k, 20), dtype)
    slots[row_of_slot < 0] = np.nan  # never read
    rows = np.full((len(slot_of_row), 20), np.nan, slots.dtype)
    rows[slot_of_row >= 0] = slots[slot_of_row[slot_of_row >= 0]]
    wanted = np.zeros((case.num_tokens, 20), F32)
    for token in range(case.num_tokens):
        for slot in range(token * case.top_k, (token + 1) * case.top_k):
            if row_of_slot[slot] >= 0:
                wanted[token] = wanted[token] + slots[slot].astype(F32)
    by_slot = reduce(slots, row_of_slot, top_k=case.top_k, out_dtype=out_dtype)
    by_row = reduce(rows, row_of_slot, top_k=case.top_k, order="row", out_dtype=out_dtype)
    assert by_slot.dtype == numpy_dtype(out_dtype)
    assert np.array_equal(by_slot, wanted.astype(numpy_dtype(out_dtype)))
    assert np.array_equal(by_row, by_slot)


@pytest.mark.parametrize("shared_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("gated", [False, True])
def test_shared_expert_is_added_in_fp32(shared_dtype: str, gated: bool):
    rng = np.random.default_rng(1)
    y = draw_array(rng, (14, 32), "bfloat16")
    row_of_slot = np.arange(14, dtype=np.int32)
    row_of_slot[[0, 1, 9]] = -1
    shared, gate = draw_array(rng, (7, 32), shared_dtype), draw_array(rng, (7, 1)) if gated else None
    wanted = np.where(row_of_slot[:, None] < 0, 0.0, y.astype(np.float64)).reshape(7, 2, 32).sum(axis=1)
    wanted += shared.astype(np.float64) * (1 if gate is None else 1 / (1 + np.exp(-gate.astype(np.float64))))
    for out_dtype in ("float32", "bfloat16"):
        out = reduce(y, row_of_slot, shared, gate, top_k=2, out_dtype=out_dtype)
        assert_close(out, wanted, against_exact(reduce_tolerance(out_dtype, 2), out_dtype), f"shared {out_dtype}")


def test_order_of_the_sum_decides_the_last_bit():
    y = np.array([[1.0], [2.0**-24], [2.0**-24]], F32)
    rows = np.arange(3, dtype=np.int32)
    assert reduce(y, rows, top_k=3)[0, 0] == 1.0
    assert reduce(y[::-1], rows, top_k=3)[0, 0] == 1.0 + 2.0**-23


def test_many_narrow_rows_are_all_added_up():
    y = np.arange(2000, dtype=F32).reshape(2000, 1)
    np.testing.assert_array_equal(reduce(y, np.arange(2000, dtype=np.int32), top_k=2), y[::2] + y[1::2])


def test_tokens_without_experts_are_exact_zeros():
    y = np.full((4, 3), np.nan, numpy_dtype("bfloat16"))
    assert not reduce(y, np.full(4, -1, np.int32), top_k=2).any()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_scale_rows_rounds_once(dtype: str):
    rng = np.random.default_rng(2)
    x, weights = draw_array(rng, (9, 5), dtype), rng.random((9, 1)).astype(F32)
    wanted = [[F32(value) * weight[0] for value in row] for row, weight in zip(x.tolist(), weights, strict=True)]
    assert np.array_equal(scale_rows(x, weights), np.array(wanted, F32).astype(numpy_dtype(dtype)))
