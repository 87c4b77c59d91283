"""Routing, logits to ids and weights, against its NumPy twin, and how it is planned."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from moe_core import Unsupported
from moe_core.base.arrays import ArraySpec
from moe_core.base.target import Target
from moe_core.ops.routing import reference
from moe_core.ops.routing.layout import MAX_EXPERTS
from moe_core.ops.routing.rounding import plan_candidates
from moe_core.ops.routing.topk import plan_routing
from moe_core.parity.tolerance import assert_close, routing_weights_tolerance
from moe_core.plan.steps import Constant, KernelLaunch
from moe_core.specs.routing import RouterSpec, TokenRounding
from tests.support import strategies
from tests.support.exact import has_near_tie
from tests.support.harness import H200, engine_target, run_plan, spec_of
from tests.support.strategies import RouterCase

F32 = np.float32
#: Weights below this are what underflow leaves of exp, which no two implementations share.
SMALLEST_WEIGHT = 1e-30
#: DeepSeek-V3's rule and one for every other combination of options that share no code.
RULES = (
    RouterSpec(2),
    RouterSpec(2, order="topk_then_softmax", scale=0.5),
    RouterSpec(2, renormalize=True, slot_order="expert"),
    RouterSpec(2, "sigmoid", renormalize=True, scale=2.5, num_groups=4, topk_group=2),
    RouterSpec(2, "sqrt_softplus", slot_order="expert"),
    RouterSpec(2, "sigmoid", renormalize=True, epsilon=0.5, softcap=2.0, logit_scale=0.5, bias_on="logits"),
    RouterSpec(2, num_groups=4, topk_group=2, group_score="pair"),
    RouterSpec(2, "sigmoid", num_groups=4, topk_group=2, group_score="best"),
)


def route(
    logits: np.ndarray,
    spec: RouterSpec,
    bias: np.ndarray | None = None,
    mask: np.ndarray | None = None,
    with_bitmatrix: bool = False,
    target: Target | None = None,
) -> tuple[np.ndarray, ...]:
    """ids, weights (and the bitmatrix) by the engine's kernels."""
    optional = {"correction_bias": bias, "token_mask": mask}
    given_arrays = {name: array for name, array in optional.items() if array is not None}
    specs = {name: ArraySpec(array.shape, array.dtype.name) for name, array in given_arrays.items()}
    plan = plan_routing(
        ArraySpec(logits.shape, "float32"), spec, target or engine_target(), with_bitmatrix=with_bitmatrix, **specs
    )
    outputs = run_plan(plan, {"logits": logits, **given_arrays})
    return tuple(outputs[buffer.name] for buffer in plan.outputs)


@pytest.mark.parametrize("tokens", [1, 3, 64, 200])
@pytest.mark.parametrize("top_k", [2, 3, 6, 8])
def test_weights_are_sums_in_one_order(top_k: int, tokens: int) -> None:
    """`topk.row_sum` adds neighbours first, whatever the number of tokens and the tile and warps that come with it."""
    logits = np.random.default_rng(0).standard_normal((tokens, 64), F32)
    _, scores = route(logits, RouterSpec(top_k, "sigmoid"))
    _, weights = route(logits, RouterSpec(top_k, "sigmoid", renormalize=True))
    sums = np.pad(scores, ((0, 0), (0, (1 << (top_k - 1).bit_length()) - top_k)))
    while sums.shape[1] > 1:
        sums = sums[:, ::2] + sums[:, 1::2]
    assert (scores / sums).tobytes() == weights.tobytes()
    if top_k > 3 and tokens > 3:
        one_by_one = np.add.accumulate(scores, axis=1)[:, -1:]
        assert (scores / one_by_one).tobytes() != weights.tobytes(), "another order shows"


def assert_matches_reference(case: RouterCase) -> None:
    logits, bias, mask = case.arrays()
    ids, weights, bitmatrix = route(logits, case.spec, bias, mask, with_bitmatrix=True)
    expected_ids, expected_weights = reference.route(logits, bias, mask, spec=case.spec)
    agree = (ids == expected_ids).all(axis=1)
    if bias is not None or case.spec.group_score == "pair":
        # Scores are fp32 roundings of exp: those that differ in their last bits only may swap.
        flips, added = np.flatnonzero(~agree), [0.0] * case.num_experts if bias is None else bias.tolist()
        agree[[t for t in flips if has_near_tie(logits[t].tolist(), added, case.spec)]] = True
    assert agree.all(), f"tokens {np.flatnonzero(~agree)} are routed differently"
    same = (ids == expected_ids).all(axis=1)
    scale = np.full_like(expected_weights, SMALLEST_WEIGHT)
    tolerance = routing_weights_tolerance(case.num_experts)
    assert_close(weights[same], expected_weights[same], tolerance, "weights", scale[same])
    assert (bitmatrix == reference.pack_bitmatrix(ids, num_experts=case.num_experts)[0]).all()


@given(strategies.router_cases(bounds=True))
@example(RouterCase(RouterSpec(384, "sigmoid", renormalize=True), 1, 384, False, "ties", False, 0))
def test_matches_the_reference(case: RouterCase) -> None:
    assert_matches_reference(case)


@pytest.mark.parametrize("kind", strategies.LOGIT_KINDS)
@pytest.mark.parametrize("rule", RULES, ids=range(len(RULES)))
@pytest.mark.parametrize("has_bias", [False, True])
def test_every_kind_of_logits(rule: RouterSpec, kind: str, has_bias: bool) -> None:
    assert_matches_reference(RouterCase(rule, 16, 16, has_bias, kind, True, seed=1))


@pytest.mark.parametrize(
    ("num_experts", "top_k"), [(1, 1), (2, 2), (33, 1), (60, 4), (384, 6), (384, 384), (512, 10), (1000, 7), (1024, 40)]
)
def test_any_number_of_experts_and_choices(num_experts: int, top_k: int) -> None:
    assert_matches_reference(RouterCase(RouterSpec(top_k, renormalize=True), 3, num_experts, False, "ties", False, 2))


@pytest.mark.skipif(engine_target().kind != "interpreter", reason="a GPU loads every row in pieces")
@pytest.mark.parametrize("rule", [RULES[0], RULES[3]], ids=str)
def test_rows_joined_of_pieces_have_the_bits_of_whole_ones(rule: RouterSpec) -> None:
    """The interpreter loads rows whole, a GPU in pieces of SPAN columns."""
    logits = np.random.default_rng(0).standard_normal((3, 60), F32)
    plan = plan_routing(ArraySpec(logits.shape, "float32"), rule, Target("interpreter"))
    (step,) = plan.steps
    assert isinstance(step, KernelLaunch) and ("SPAN", Constant(64)) in step.arguments
    pieces = dataclasses.replace(step, arguments=tuple((dict(step.arguments) | {"SPAN": Constant(16)}).items()))
    found = run_plan(dataclasses.replace(plan, steps=(pieces,)), {"logits": logits})
    for name, value in run_plan(plan, {"logits": logits}).items():
        assert found[name].tobytes() == value.tobytes(), name


def test_ties_go_to_the_lower_id_and_zeros_tie() -> None:
    logits = np.array([[1, 3, 3, 2], [-0.0, 0.0, -0.0, 0.0], [0.0, -0.0, -1.0, 0.0]], F32)
    assert route(logits, RouterSpec(3))[0].tolist() == [[1, 2, 3], [0, 1, 2], [0, 1, 3]]


def test_ties_of_groups_go_to_the_lower_group() -> None:
    logits = np.array([[0, 1, 1, 0, 1, 0], [-0.0, -5, 0.0, 0.0, 0, 0]], F32)
    spec = RouterSpec(2, "sigmoid", num_groups=3, topk_group=1)
    assert route(logits, spec)[0].tolist() == [[1, 0], [0, 1]]


def test_nan_ranks_below_numbers_above_masked_groups_and_stays_visible() -> None:
    logits = np.array([[np.nan, -np.inf, 1.0, np.nan]], F32)
    ids, weights = route(logits, RouterSpec(3, "sigmoid"))
    assert ids.tolist() == [[2, 1, 0]]
    assert weights[0, 1] == 0 and np.isnan(weights[0, 2]) and np.isfinite(weights[0, 0])
    assert route(logits, RouterSpec(1, order="topk_then_softmax"))[1].tolist() == [[1.0]]
    grouped = RouterSpec(2, "sigmoid", num_groups=2, topk_group=1)
    assert route(np.array([[5.0, np.nan, 1.0, 2.0]], F32), grouped)[0].tolist() == [[0, 1]]
    # Masked experts have the lower ids: a tie with NaN would be theirs.
    assert route(np.array([[1.0, 2.0, 5.0, np.nan]], F32), grouped)[0].tolist() == [[2, 3]]


def test_given_ids_are_masked_where_invalid_and_where_the_mask_says() -> None:
    given_ids = np.array([[0, 1], [0, 3], [1, 2], [9, 0]], np.int32)
    mask = np.array([True, True, False, False])
    ids, weights = reference.route(np.ones((4, 3), F32), None, mask, given_ids, spec=RouterSpec(2))
    assert (ids >= 0).all(axis=1).tolist() == [True, False, False, False]
    arrays = {"logits": np.ones((4, 3), F32), "token_mask": mask, "given": given_ids}
    logits, token_mask, given_spec = (ArraySpec(array.shape, array.dtype.name) for array in arrays.values())
    plan = plan_routing(logits, RouterSpec(2), engine_target(), token_mask=token_mask, given=given_spec)
    np.testing.assert_array_equal(run_plan(plan, arrays)["ids"], ids)
    assert (weights != 0).all(axis=1).tolist() == [True, False, False, False]


def test_groups_with_a_bias_compare_negative_sums() -> None:
    logits, bias = np.zeros((1, 6), F32), np.array([-3, -4, -9, -2, -5, -5], F32)
    spec = RouterSpec(2, "sigmoid", num_groups=3, topk_group=1)
    assert route(logits, spec, bias)[0].tolist() == [[0, 1]], "-6 is above -10 and -9"


def test_saturated_scores_make_no_ties_without_a_bias() -> None:
    ids, weights = route(np.array([[30.0, 40.0, 35.0]], F32), RouterSpec(2, "sigmoid"))
    assert ids.tolist() == [[1, 2]] and weights.tolist() == [[1.0, 1.0]]


def test_a_zero_sum_renormalises_to_zeros() -> None:
    _, weights = route(np.array([[-200.0, -300.0, -np.inf]], F32), RouterSpec(2, "sigmoid", renormalize=True, scale=2))
    assert weights.tolist() == [[0.0, 0.0]]


def test_three_logits_far_below_zero_share_one() -> None:
    """A fourth slot pads them, with no logit above theirs."""
    ids, weights = route(np.array([[-200.0, -400.0, -200.0]], F32), RouterSpec(3, order="topk_then_softmax"))
    assert ids.tolist() == [[0, 2, 1]] and weights.tolist() == [[0.5, 0.5, 0.0]]


def test_scores_keep_their_precision_far_below_zero() -> None:
    """exp(-85) and log(1 + exp(-30)) are small, not inexact."""
    logits = np.array([[-85.0, -30.0, -5.0, 0.0, 5.0, 85.0]], F32)
    for scoring in ("sigmoid", "sqrt_softplus"):
        ids, weights = route(logits, RouterSpec(6, scoring))
        exact = 1 / (1 + np.exp(-logits.astype(np.float64)))
        if scoring == "sqrt_softplus":
            exact = np.sqrt(np.logaddexp(0, logits.astype(np.float64)))
        np.testing.assert_allclose(weights[0], exact[0, ids[0]], rtol=7e-7)


def test_ascending_ids_carry_the_weights_of_descending_scores() -> None:
    logits = strategies.draw_logits(np.random.default_rng(0), "normal", 20, 24)
    spec = RouterSpec(5, renormalize=True)
    ids, weights = route(logits, spec)
    by_expert_ids, by_expert_weights = route(logits, dataclasses.replace(spec, slot_order="expert"))
    order = np.argsort(ids, axis=1)
    assert (by_expert_ids == np.take_along_axis(ids, order, axis=1)).all()
    assert (by_expert_weights == np.take_along_axis(weights, order, axis=1)).all()


def test_a_token_does_not_depend_on_its_batch() -> None:
    logits = strategies.draw_logits(np.random.default_rng(0), "normal", 50, 40)
    ids, weights = route(logits, RouterSpec(4, renormalize=True))
    for first, last in ((0, 1), (7, 20), (49, 50)):
        part = route(logits[first:last].copy(), RouterSpec(4, renormalize=True))
        assert (part[0] == ids[first:last]).all() and (part[1] == weights[first:last]).all()


def test_several_programs() -> None:
    assert_matches_reference(RouterCase(RouterSpec(3), 150, 1024, False, "normal", True, 3))


@pytest.mark.gpu
def test_more_tokens_than_programs() -> None:
    assert_matches_reference(RouterCase(RouterSpec(8, renormalize=True), 20001, 128, False, "normal", True, 4))


def test_no_tokens() -> None:
    ids, weights = route(np.zeros((0, 8), F32), RouterSpec(2))
    assert ids.shape == weights.shape == (0, 2)


def test_reference_engine_is_the_twin() -> None:
    logits = strategies.draw_logits(np.random.default_rng(0), "normal", 6, 40)
    found = route(logits, RouterSpec(3), with_bitmatrix=True, target=Target("reference"))
    expected = reference.route(logits, spec=RouterSpec(3), with_bitmatrix=True)
    assert all((left == right).all() for left, right in zip(found, expected, strict=True))


def test_the_number_of_tokens_is_no_constant() -> None:
    plans = [plan_routing(ArraySpec((tokens, 128), "float32"), RouterSpec(8), H200) for tokens in (1, 64, 16384)]
    launches = [launch for plan in plans for launch in plan.steps if isinstance(launch, KernelLaunch)]
    found = set()
    for launch in launches:
        found.add((tuple(pair for pair in launch.arguments if isinstance(pair[1], Constant)), launch.num_warps))
    assert len(found) == 1
    assert len({plan.summation for plan in plans}) == 1
    # 4 tokens each, so that no more programs than the device holds at once share out the tokens.
    assert [launch.grid[0] for launch in launches] == [1, 64, 4096]


def test_too_many_experts_are_refused_by_the_kernels_only() -> None:
    logits = ArraySpec((2, MAX_EXPERTS + 1), "float32")
    with pytest.raises(Unsupported, match=f"at most {MAX_EXPERTS}, got {MAX_EXPERTS + 1}; use the NumPy"):
        plan_routing(logits, RouterSpec(2), H200)
    assert plan_routing(logits, RouterSpec(2), Target("reference")).steps


@pytest.mark.parametrize("target", (engine_target(), Target("reference")), ids=lambda target: target.kind)
@pytest.mark.parametrize("rule", RULES, ids=str)
@given(st.booleans(), st.booleans(), st.integers(0, 10**6))
def test_candidates_begin_with_the_bits_of_plain_routing(
    rule: RouterSpec, target: Target, biased: bool, masked: bool, seed: int
) -> None:
    """Those of token rounding: the first K columns as `plan_routing` makes them, the others as their own rule does."""
    random, rounding, rule = (
        np.random.default_rng(seed),
        TokenRounding(16),
        dataclasses.replace(rule, slot_order="score"),
    )
    logits = random.integers(-3, 4, (20, 16)) * random.choice((0.5, 0.7, 40.0), (20, 1))
    logits[random.random(logits.shape) < 0.02] = random.choice((np.nan, np.inf, -np.inf))
    arrays = {"logits": logits.astype(F32)}
    arrays |= {"correction_bias": random.standard_normal(16).astype(F32)} if biased else {}
    arrays |= {"token_mask": random.random(20) < 0.8} if masked else {}
    specs = {name: spec_of(array) for name, array in arrays.items()}
    found = run_plan(plan_candidates(spec=rule, rounding=rounding, target=target, **specs), arrays)
    plain = run_plan(plan_routing(spec=rule, target=target, **specs), arrays)
    wide = run_plan(plan_routing(spec=rounding.wide(rule, 16, biased), target=target, **specs), arrays)
    for name, array in found.items():
        expected = np.concatenate([plain[name], wide[name][:, 2:]], axis=1)
        np.testing.assert_array_equal(array.view(np.int32), expected.view(np.int32), err_msg=name)


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_a_bias_of_each_token_selects_as_its_row_alone(rule: RouterSpec) -> None:
    random = np.random.default_rng(2)
    logits, bias = (random.standard_normal((9, 16)).astype(F32) for _ in range(2))
    found = route(logits, rule, bias)
    expected = [route(logits[t : t + 1], rule, bias[t]) for t in range(9)]
    for result, rows in zip(found, zip(*expected, strict=True), strict=True):
        np.testing.assert_array_equal(result, np.concatenate(rows))
    np.testing.assert_array_equal(found[0], reference.route(logits, bias, spec=rule)[0])
