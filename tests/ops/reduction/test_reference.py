"""The reduction reference: order, skipped slots, shared experts, one rounding."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given

from moe_core.ops.reduction.reference import reduce, scale_rows
from moe_core.ops.routing.reference import layout as make_layout
from moe_core.parity.tolerance import assert_close
from tests.support import strategies
from tests.support.exact import against_exact, reduce_tolerance
from tests.support.strategies import RoutingCase, draw_array, numpy_dtype

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
