"""The routing reference against per-token loops in float64 and the worked examples of its contract."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_core.ops.router import reference as router_reference
from moe_core.ops.router.reference import router_backward
from moe_core.ops.routing import reference
from moe_core.ops.routing import reference as routing
from moe_core.ops.routing.reference_backward import router_losses
from moe_core.parity.tolerance import assert_close, router_tolerance, routing_weights_tolerance
from moe_core.specs.routing import LayoutSpec, LogitsSpec, RouterSpec
from tests.support import strategies
from tests.support.exact import bounded_logits, exact_scores, has_near_tie
from tests.support.strategies import HARD_ROUTINGS, RouterCase, RoutingCase, hard_routing

F32 = np.float32


def ranking(scores: list[float], candidates: list[int]) -> list[int]:
    """Candidates from the best: numbers in descending order, then NaN, ties to the lower id."""
    return sorted(candidates, key=lambda e: (math.isnan(scores[e]), 0.0 if math.isnan(scores[e]) else -scores[e], e))


def expected_route(logits: list[float], bias: list[float] | None, spec: RouterSpec) -> tuple[list[int], list[float]]:
    """ids and weights of one token, from the text of the contract."""
    last = spec.order == "topk_then_softmax"
    raw, logits = logits, bounded_logits(logits, spec)
    scores = exact_scores(logits, spec.scoring)
    by_pair = bias is not None if spec.group_score is None else spec.group_score == "pair"
    if bias is not None:
        ranked = [s + b for s, b in zip(logits if last or spec.bias_on == "logits" else scores, bias, strict=True)]
    else:
        ranked = (logits if last else scores) if by_pair and spec.num_groups > 1 else raw
    width = len(logits) // spec.num_groups
    groups = [list(range(g * width, (g + 1) * width)) for g in range(spec.num_groups)]
    best = [ranking(ranked, group)[: 2 if by_pair else 1] for group in groups]
    group_scores = [ranked[pair[0]] + ranked[pair[1]] if len(pair) == 2 else ranked[pair[0]] for pair in best]
    kept = ranking(group_scores, list(range(spec.num_groups)))[: spec.topk_group]
    ids = ranking(ranked, sorted(e for g in kept for e in groups[g]))[: spec.top_k]
    weights = exact_scores([logits[e] for e in ids], "softmax") if last else [scores[e] for e in ids]
    if spec.renormalize:
        total = sum(weights) + spec.epsilon
        weights = [0.0 if total == 0 else w / total for w in weights]
    pairs = list(zip(ids, (w * spec.scale for w in weights), strict=True))
    if spec.slot_order == "expert":
        pairs.sort()
    return [e for e, _ in pairs], [w for _, w in pairs]


def expected_arrays(case: RouterCase) -> tuple[np.ndarray, np.ndarray]:
    logits, bias, mask = case.arrays()
    ids = np.full((case.num_tokens, case.spec.top_k), -1, np.int32)
    weights = np.zeros((case.num_tokens, case.spec.top_k))
    for token in range(case.num_tokens):
        if mask is None or mask[token]:
            row = [float(value) for value in logits[token]]
            ids[token], weights[token] = expected_route(row, None if bias is None else bias.tolist(), case.spec)
    return ids, weights


@given(strategies.router_cases(bounds=True))
def test_routing_follows_the_contract_token_by_token(case: RouterCase):
    logits, bias, mask = case.arrays()
    ids, weights = routing.route(logits, bias, mask, spec=case.spec)
    assert ids.dtype == np.int32 and weights.dtype == np.float32
    expected_ids, expected_weights = expected_arrays(case)
    agree = (ids == expected_ids).all(axis=1)
    if bias is None and case.spec.group_score != "pair":
        assert agree.all()
    else:
        # fp32 scores may tie or swap where float64 scores (or sums of two of them) differ in their last bits only.
        added = np.zeros(case.num_experts) if bias is None else bias
        assert all(has_near_tie(logits[token].tolist(), added.tolist(), case.spec) for token in np.flatnonzero(~agree))
    # exp(-inf) and its neighbours underflow in fp32 only: such weights are zero next to the scale of a weight.
    scale = np.full_like(expected_weights, 1e-30)
    tolerance = routing_weights_tolerance(case.num_experts)
    assert_close(weights[agree], expected_weights[agree].astype(F32), tolerance, "weights", scale[agree])


@given(strategies.router_cases(kinds=("normal", "spread")))
def test_every_chosen_expert_outranks_every_other_one(case: RouterCase):
    logits, bias, mask = case.arrays()
    ids, weights = routing.route(logits, bias, mask, spec=case.spec)
    live = np.ones(case.num_tokens, bool) if mask is None else mask
    assert (ids[~live] == -1).all() and (weights[~live] == 0).all()
    assert ((ids[live] >= 0) & (ids[live] < case.num_experts)).all()
    assert all(len(set(row)) == case.spec.top_k for row in ids[live].tolist())
    if case.spec.renormalize and not case.spec.epsilon and live.any():
        np.testing.assert_allclose(weights[live].sum(axis=1), case.spec.scale, rtol=1e-5)
    if case.spec.num_groups == 1 and bias is None:
        chosen = np.take_along_axis(logits[live], ids[live], axis=1)
        rest = logits[live].copy()
        np.put_along_axis(rest, ids[live], -np.inf, axis=1)
        assert (chosen.min(axis=1) >= rest.max(axis=1)).all()


def test_ties_go_to_the_lower_id_and_zeros_tie():
    logits = np.array([[1, 3, 3, 2], [-0.0, 0.0, -0.0, 0.0], [0.0, -0.0, -1.0, 0.0]], F32)
    ids, _ = routing.route(logits, spec=RouterSpec(3))
    assert ids.tolist() == [[1, 2, 3], [0, 1, 2], [0, 1, 3]]


def test_nan_ranks_below_every_number_and_stays_visible():
    logits = np.array([[np.nan, -np.inf, 1.0, np.nan]], F32)
    ids, weights = routing.route(logits, spec=RouterSpec(3, "sigmoid"))
    assert ids.tolist() == [[2, 1, 0]]
    assert weights[0, 1] == 0 and np.isnan(weights[0, 2]) and np.isfinite(weights[0, 0])
    ids, weights = routing.route(logits, spec=RouterSpec(1, order="topk_then_softmax"))
    assert ids.tolist() == [[2]] and weights.tolist() == [[1.0]]


def test_nan_ranks_above_experts_of_masked_groups():
    logits = np.array([[5.0, np.nan, 1.0, 2.0]], F32)
    ids, _ = routing.route(logits, spec=RouterSpec(2, "sigmoid", num_groups=2, topk_group=1))
    assert ids.tolist() == [[0, 1]]


def test_fp32_saturation_makes_no_ties_without_a_bias():
    logits = np.array([[30.0, 40.0, 35.0]], F32)
    ids, weights = routing.route(logits, spec=RouterSpec(2, "sigmoid"))
    assert ids.tolist() == [[1, 2]] and weights.tolist() == [[1.0, 1.0]]


def test_correction_bias_moves_the_selection_but_not_the_weights():
    logits = np.array([[2.0, 1.0, 0.0, -1.0]], F32)
    bias = np.array([0, 0, 0, 5], F32)
    ids, weights = routing.route(logits, bias, spec=RouterSpec(2, "sigmoid"))
    assert ids.tolist() == [[3, 0]]
    np.testing.assert_allclose(weights, [[1 / (1 + math.e), 1 / (1 + math.exp(-2))]], rtol=1e-6)
    ids, weights = routing.route(logits, bias, spec=RouterSpec(2, order="topk_then_softmax"))
    assert ids.tolist() == [[3, 0]]
    np.testing.assert_allclose(weights, [[1 / (1 + math.exp(3)), 1 / (1 + math.exp(-3))]], rtol=1e-6)


def test_group_score_is_the_best_without_and_the_two_best_with_a_bias():
    logits = np.array([[3.0, -9.0, 2.0, 1.9]], F32)
    spec = RouterSpec(2, "sigmoid", num_groups=2, topk_group=1)
    assert routing.route(logits, spec=spec)[0].tolist() == [[0, 1]]
    assert routing.route(logits, np.zeros(4, F32), spec=spec)[0].tolist() == [[2, 3]]


def test_zero_sum_renormalises_to_zeros_and_scale_comes_last():
    dead = np.full((1, 3), -np.inf, F32)
    _, weights = routing.route(dead, spec=RouterSpec(2, "sigmoid", renormalize=True, scale=2.5))
    assert weights.tolist() == [[0.0, 0.0]]
    _, weights = routing.route(np.zeros((1, 4), F32), spec=RouterSpec(2, renormalize=True, scale=2.5))
    assert weights.tolist() == [[1.25, 1.25]]


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid", "sqrt_softplus"])
def test_losses_of_very_negative_logits_warn_of_nothing(scoring: str):
    """Of two tokens one has no share of any expert."""
    logits = np.array([[-200, -300], [-np.inf, -np.inf]], np.float32)
    balance, _ = router_losses(logits, np.array([2, 0], np.int32), spec=RouterSpec(1, scoring=scoring))
    assert balance == 1.0


def test_a_token_routes_alike_alone_and_in_a_large_batch():
    logits = strategies.draw_logits(np.random.default_rng(3), "ties", 2000, 384)
    spec = RouterSpec(6, "sqrt_softplus", num_groups=8, topk_group=3, slot_order="expert")
    ids, weights = routing.route(logits, spec=spec)
    for token in (0, 7, 1999):
        alone = routing.route(logits[token : token + 1], spec=spec)
        assert np.array_equal(alone[0][0], ids[token]) and np.array_equal(alone[1][0], weights[token])


def test_float64_logits_are_ranked_by_all_their_bits() -> None:
    """More experts than are sorted whole, with ties, NaN and differences that fp32 has not."""
    random = np.random.default_rng(0)
    logits = 1 + random.permuted(np.tile(np.arange(20) // 2, (4, 1)), axis=1) * 2.0**-40
    logits[1, ::3] = logits[2, 2:] = np.nan
    ids, _ = routing.route(logits, spec=RouterSpec(5))
    assert ids.tolist() == [ranking(row, list(range(20)))[:5] for row in logits.tolist()]


@pytest.mark.parametrize("layout", ["in_out", "out_in"])
@pytest.mark.parametrize("dtypes", [("float32", "float32"), ("bfloat16", "float32"), ("float16", "bfloat16")])
def test_router_keeps_fp32_logits(layout: str, dtypes: tuple[str, str]):
    rng = np.random.default_rng(0)
    x = strategies.draw_array(rng, (19, 70), dtypes[0])
    weight = strategies.draw_array(rng, (70, 33), dtypes[1])
    bias = strategies.draw_array(rng, (33,), dtypes[1])
    given_weight = weight if layout == "in_out" else np.ascontiguousarray(weight.T)
    logits = router_reference.router(x, given_weight, bias, spec=LogitsSpec(layout))
    exact = np.array(
        [[math.fsum(float(a) * float(b) for a, b in zip(r, c, strict=True)) for c in weight.T] for r in x]
    ) + bias.astype(np.float64)
    assert logits.dtype == np.float32
    assert_close(logits, exact, router_tolerance(70), "logits")
    rounded = router_reference.router(x, given_weight, bias, spec=LogitsSpec(layout, "bfloat16"))
    assert np.array_equal(rounded, logits.astype(strategies.numpy_dtype("bfloat16")).astype(F32))


def expected_layout(case: RoutingCase, layout: LayoutSpec) -> tuple[list[list[int]], int]:
    """The slots of every local expert in slot order, before any is dropped, and the number of invalid ids."""
    members: list[list[int]] = [[] for _ in range(case.num_experts)]
    num_global = case.num_experts if case.expert_map is None else len(case.expert_map)
    invalid = 0
    for token in range(case.num_tokens):
        if case.token_mask is not None and not case.token_mask[token]:
            continue
        for k in range(case.top_k):
            expert = int(case.ids[token, k])
            if expert < -1 or expert >= num_global:
                invalid += 1
            elif expert >= 0:
                local = expert if case.expert_map is None else int(case.expert_map[expert])
                if local >= 0:
                    members[local].append(token * case.top_k + k)
    return members, invalid


def check_layout(case: RoutingCase, layout: LayoutSpec) -> None:
    members, invalid = expected_layout(case, layout)
    sizes, start, slot_of_row, row_of_slot, invalid_ids, schedule = routing.layout(
        case.ids, case.expert_map, case.token_mask, layout=layout, block_ms=(16,)
    )
    assert all(array.dtype == np.int32 for array in (sizes, start, slot_of_row, row_of_slot, invalid_ids, schedule))
    assert invalid_ids.tolist() == [invalid]
    assert slot_of_row.shape == (layout.capacity,) and row_of_slot.shape == (layout.num_slots,)
    rows, position, blocks = {}, 0, []
    for expert, slots in enumerate(members):
        assert start[expert] == position
        kept = slots if layout.max_rows is None else slots[: layout.max_rows]
        assert sizes[expert] == len(kept)
        rows |= {position + rank: slot for rank, slot in enumerate(kept)}
        blocks += [[block, expert] for block in range(-(-len(kept) // 16))]
        position += layout.max_rows or -(-len(kept) // layout.alignment) * layout.alignment
    assert start[-1] == position
    assert slot_of_row.tolist() == [rows.get(row, -1) for row in range(layout.capacity)]
    inverse = {slot: row for row, slot in rows.items()}
    assert row_of_slot.tolist() == [inverse.get(slot, -1) for slot in range(layout.num_slots)]
    idle = [[-1, -1]] * (layout.max_blocks(16) - len(blocks))
    assert schedule.tolist() == blocks + idle
    assert np.array_equal(routing.schedule(sizes, layout=layout, block_m=16), schedule)


@pytest.mark.parametrize("name", HARD_ROUTINGS)
def test_layout_of_hard_routings(name: str):
    case = hard_routing(name)
    for layout in (case.layout(), case.layout(alignment=16), case.layout(max_rows=3)):
        check_layout(case, layout)


@given(st.data())
def test_layout_groups_slots_stably(data: st.DataObject):
    case = data.draw(strategies.routings())
    check_layout(case, data.draw(strategies.layouts(case)))


def test_layout_and_schedule_worked_examples():
    ids = np.array([[2, 0], [0, -1]], np.int32)
    found = routing.layout(ids, layout=LayoutSpec(2, 2, 3), block_ms=(1,))
    assert [array.tolist() for array in found] == [
        [2, 0, 1],
        [0, 2, 2, 3],
        [1, 2, 0, -1],
        [2, 0, 1, -1],
        [0],
        [[0, 0], [1, 0], [0, 2], [-1, -1]],
    ]
    aligned = routing.layout(ids, layout=LayoutSpec(2, 2, 3, alignment=4))
    assert aligned[1].tolist() == [0, 4, 4, 8]
    table = routing.schedule(np.array([3, 0, 2], np.int32), layout=LayoutSpec(5, 1, 3), block_m=2)
    assert table.tolist() == [[0, 0], [1, 0], [0, 2], [-1, -1]]


def test_map_entries_outside_the_local_experts_mean_not_here():
    ids = np.array([[0, 1, 2, 3]], np.int32)
    expert_map = np.array([1, 7, -5, 0], np.int32)
    sizes, _, slot_of_row, _, invalid = routing.layout(ids, expert_map, layout=LayoutSpec(1, 4, 2))
    assert sizes.tolist() == [1, 1] and slot_of_row.tolist() == [3, 0, -1, -1] and invalid.tolist() == [0]


@given(strategies.routings())
def test_bitmatrix_holds_the_distinct_valid_ids(case: RoutingCase):
    num_experts = case.num_experts if case.expert_map is None else len(case.expert_map)
    packed, duplicates, invalid = reference.pack_bitmatrix(case.ids, num_experts=num_experts)
    assert packed.shape == (case.num_tokens, -(-num_experts // 32)) and packed.dtype == np.uint32
    rows = case.ids.tolist()
    valid = [[e for e in row if 0 <= e < num_experts] for row in rows]
    assert invalid.tolist() == [sum(e < -1 or e >= num_experts for row in rows for e in row)]
    assert duplicates.tolist() == [sum(len(row) - len(set(row)) for row in valid)]
    for words, row in zip(packed.tolist(), valid, strict=True):
        assert {e for e in range(len(words) * 32) if words[e // 32] >> (e % 32) & 1} == set(row)
    for top_k in {case.top_k, 1}:
        ids = reference.unpack_bitmatrix(packed, num_experts=num_experts, top_k=top_k)
        assert ids.dtype == np.int32
        padded = [sorted(set(row))[:top_k] for row in valid]
        assert ids.tolist() == [row + [-1] * (top_k - len(row)) for row in padded]


def test_unpacking_ignores_bits_past_the_last_expert():
    words = np.array([[0xFFFFFFFF]], np.uint32)
    assert reference.unpack_bitmatrix(words, num_experts=3, top_k=5).tolist() == [[0, 1, 2, -1, -1]]


def test_routing_gives_the_bitmatrix_of_its_ids():
    logits = strategies.draw_logits(np.random.default_rng(5), "normal", 9, 70)
    mask = np.arange(9) % 3 > 0
    ids, _, packed = routing.route(logits, None, mask, spec=RouterSpec(4), with_bitmatrix=True)
    assert np.array_equal(reference.unpack_bitmatrix(packed, num_experts=70, top_k=4), np.sort(ids, axis=1))


@given(strategies.router_cases())
def test_inputs_are_left_alone(case: RouterCase):
    arrays = case.arrays()
    for array in arrays:
        if array is not None:
            array.flags.writeable = False
    ids, *_ = routing.route(*arrays, spec=case.spec)
    ids.flags.writeable = False
    routing.layout(ids, layout=LayoutSpec(len(ids), ids.shape[1], case.num_experts))


def test_the_storage_of_a_router_changes_no_bit():
    random = np.random.default_rng(0)
    x, d_logits, weight = (random.standard_normal(size).astype(F32) for size in ((512, 64), (512, 8), (64, 8)))
    stored = ((weight, LogitsSpec("in_out")), (np.ascontiguousarray(weight.T), LogitsSpec("out_in")))
    one, other = (router_reference.router(x, matrix, spec=spec) for matrix, spec in stored)
    assert one.tobytes() == other.tobytes()
    one, other = (router_backward(d_logits, x, matrix, spec=spec) for matrix, spec in stored)
    assert np.array_equal(one.x, other.x) and np.array_equal(one.weight, other.weight.T)
