"""The routing's backward against its NumPy twin."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_core import InvalidInput
from moe_core.base.arrays import ArraySpec
from moe_core.base.target import Target
from moe_core.ops.routing import reference, reference_backward
from moe_core.ops.routing.backward import plan_routing_backward
from moe_core.ops.routing.reference import bounded, route, through_bounds
from moe_core.parity.tolerance import Tolerance, assert_close
from moe_core.specs.operands import RoutingGradients, map_arrays, named_arrays
from moe_core.specs.routing import RouterSpec
from tests.support import strategies
from tests.support.harness import engine_target, run_plan, spec_of

F32 = np.float32
#: exp, sums over experts and slots and a few roundings, relative to the largest terms of the token.
CLOSE = Tolerance(3e-6, 1e-5)
PARTS = ("weights", "logits", "load_balance", "z")


def draw_gradients(rng: np.random.Generator, ids: np.ndarray, num_experts: int, parts: tuple[str, ...]):
    """A RoutingGradients of fp32 arrays with the parts named."""
    drawn = {
        "weights": strategies.draw_array(rng, ids.shape),
        "logits": strategies.draw_array(rng, (len(ids), num_experts), rms=0.1),
        "load_balance": np.array([1.5], F32),
        "z": np.array([-0.25], F32),
    }
    given = {name: drawn[name] for name in parts}
    if "load_balance" in given:
        given["tokens_per_expert"] = np.bincount(ids[ids >= 0], minlength=num_experts).astype(np.int32)
    return RoutingGradients(**given)


def run_both(
    gradients: RoutingGradients, logits: np.ndarray, ids: np.ndarray, spec: RouterSpec, mask: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray]:
    """(actual, expected)."""
    has_ids = gradients.weights is not None
    plan = plan_routing_backward(
        map_arrays(gradients, spec_of), spec_of(logits), spec_of(ids) if has_ids else None, spec, engine_target(),
        token_mask=spec_of(mask),
    )  # fmt: skip
    arrays = {"logits": logits} | dict(named_arrays(gradients, "gradients."))
    arrays |= {"ids": ids} if has_ids else {}
    arrays |= {} if mask is None else {"token_mask": mask}
    expected = reference_backward.routing_backward(gradients, logits, ids, mask, spec=spec)
    return run_plan(plan, arrays)["d_logits"], expected


def term_sizes(
    gradients: RoutingGradients, logits: np.ndarray, ids: np.ndarray, spec: RouterSpec, mask: np.ndarray | None
) -> np.ndarray:
    """The d_logits of `routing_backward` with plus signs alone, in float64: where terms cancel, what is left of them is
    as wrong as they are."""
    mask = np.ones(len(logits), bool) if mask is None else mask
    logits = np.where(mask[:, None], logits, 0.0).astype(np.float64)
    x, count, slots = bounded(logits, spec), max(mask.sum(), 1), np.maximum(ids, 0).astype(np.int64)
    with np.errstate(all="ignore"):
        scores, softmax = reference.scores_of(x, spec.scoring), reference.scores_of(x, "softmax")
        is_softmax, last = spec.scoring == "softmax", spec.order == "topk_then_softmax"
        derivative = np.ones_like(x) if is_softmax else reference_backward.log_score_derivative(x, spec.scoring)
        total = np.zeros_like(x)
        if gradients.weights is not None:
            given = np.abs(gradients.weights.astype(np.float64)) * spec.scale
            picked = np.take_along_axis(x, slots, axis=-1)
            shares = reference.scores_of(picked, "softmax") if last else np.take_along_axis(scores, slots, axis=-1)
            if spec.renormalize:
                shares = reference.shares_of(shares, spec.epsilon)
            mean = (shares * given).sum(axis=-1, keepdims=True) * (is_softmax or spec.renormalize)
            if is_softmax and not last and not spec.renormalize:
                total += softmax * mean
            np.put_along_axis(total, slots, shares * (given + mean), axis=-1)
            total = np.where((ids >= 0).all(axis=-1, keepdims=True), total * derivative, 0.0)
        if gradients.load_balance is not None:
            share = reference.shares_of(scores)
            slope = np.abs(gradients.load_balance) * x.shape[1] / count * gradients.tokens_per_expert
            slope = slope / (count * spec.require_top_k())
            total += share * derivative * (slope + (share * slope).sum(axis=-1, keepdims=True))
        if gradients.z is not None:
            log_sum = np.abs(x.max(axis=-1, keepdims=True)) + np.log(x.shape[1])
            total += 2 * np.abs(gradients.z) / count * log_sum * softmax
        total = through_bounds(total, logits, spec)
        if gradients.logits is not None:
            total = total + np.abs(gradients.logits)
    return np.where(mask[:, None], total, 0.0)


def assert_rows_close(actual: np.ndarray, expected: np.ndarray, sizes: np.ndarray, label: str) -> None:
    """Compare with the largest of each row's term sizes as the scale."""
    zeros = ~sizes.any(axis=-1)
    assert not actual[zeros].any(), f"{label}: rows that must be exact zeros"
    scale = np.max(np.nan_to_num(sizes, posinf=0.0), axis=-1, keepdims=True, initial=0.0)
    assert_close(actual, expected, CLOSE, label, scale=scale)


@given(strategies.router_cases(max_tokens=12, bounds=True), st.data())
def test_every_rule(case: strategies.RouterCase, data: st.DataObject) -> None:
    logits, bias, mask = case.arrays()
    parts = data.draw(st.sets(st.sampled_from(PARTS), min_size=1).map(lambda names: tuple(sorted(names))))
    ids, _ = route(logits, bias, mask, spec=case.spec)
    gradients = draw_gradients(np.random.default_rng(case.seed), ids, case.num_experts, parts)
    if mask is not None:
        logits[~mask] = np.nan
        for name in ("weights", "logits"):
            if getattr(gradients, name) is not None:
                getattr(gradients, name)[~mask] = np.nan
    actual, expected = run_both(gradients, logits, ids, case.spec, mask)
    assert_rows_close(actual, expected, term_sizes(gradients, logits, ids, case.spec, mask), str(case.spec))


RULES = [
    RouterSpec(6),
    RouterSpec(6, renormalize=True),
    RouterSpec(6, order="topk_then_softmax"),
    RouterSpec(6, order="topk_then_softmax", renormalize=True, scale=0.5),
    RouterSpec(6, logit_scale=0.5, softcap=4.0),
    RouterSpec(6, "sigmoid", renormalize=True, epsilon=0.5, softcap=3.0),
    RouterSpec(6, "sigmoid", scale=2.5),
    RouterSpec(6, "sigmoid", renormalize=True, slot_order="expert"),
    RouterSpec(6, "sqrt_softplus"),
    RouterSpec(6, "sqrt_softplus", renormalize=True),
]


@pytest.mark.parametrize("spec", RULES, ids=str)
@pytest.mark.parametrize("masked", [False, True])
def test_six_of_384_with_everything(spec: RouterSpec, masked: bool) -> None:
    rng = np.random.default_rng(0)
    logits = strategies.draw_array(rng, (70, 384), rms=2)
    mask = rng.random(70) < 0.7 if masked else None
    ids, _ = route(logits, None, mask, spec=spec)
    gradients = draw_gradients(rng, ids, 384, PARTS)
    actual, expected = run_both(gradients, logits, ids, spec, mask)
    assert_rows_close(actual, expected, term_sizes(gradients, logits, ids, spec, mask), str(spec))


@pytest.mark.parametrize("spec", RULES, ids=str)
def test_only_the_chosen_have_a_gradient(spec: RouterSpec) -> None:
    rng = np.random.default_rng(1)
    logits = strategies.draw_array(rng, (9, 40))
    ids, _ = route(logits, spec=spec)
    actual, _ = run_both(draw_gradients(rng, ids, 40, ("weights",)), logits, ids, spec, None)
    others = np.ones(logits.shape, bool)
    np.put_along_axis(others, ids.astype(np.int64), False, axis=-1)
    dense = spec.scoring == "softmax" and spec.order == "softmax_then_topk" and not spec.renormalize
    assert actual[others].any() == dense


@pytest.mark.parametrize("scoring", ["sigmoid", "sqrt_softplus"])
@pytest.mark.parametrize("renormalize", [False, True])
def test_far_logits(scoring: str, renormalize: bool) -> None:
    logits = np.array([[-40, -41, -80, 0], [-16.9, -17.1, 3, 3], [60, 59, 1, 2], [-85, -86, 0, 0]], F32)
    ids = np.tile(np.array([0, 1], np.int32), (4, 1))
    gradients = RoutingGradients(np.array([[1.0, -2.0]] * 4, F32))
    actual, expected = run_both(gradients, logits, ids, RouterSpec(2, scoring, renormalize=renormalize), None)
    np.testing.assert_allclose(actual, expected, rtol=3e-5, atol=1e-36)


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid", "sqrt_softplus"])
def test_a_zero_sum_has_no_gradient(scoring: str) -> None:
    logits = np.array([[-1000.0, -2000.0, 0.0], [1.0, 0.5, 0.0]], F32)
    ids, spec = np.array([[0, 1], [0, 1]], np.int32), RouterSpec(2, scoring, renormalize=True)
    gradients = RoutingGradients(np.array([[1, 2], [3, 4]], F32))
    actual, expected = run_both(gradients, logits, ids, spec, None)
    assert not actual[0].any() and not expected[0].any()
    assert actual[1].any()
    assert_rows_close(actual, expected, term_sizes(gradients, logits, ids, spec, None), scoring)


def test_two_runs_are_bitwise_equal() -> None:
    rng = np.random.default_rng(2)
    logits = strategies.draw_array(rng, (33, 48))
    ids, _ = route(logits, spec=RULES[0])
    gradients = draw_gradients(rng, ids, 48, PARTS)
    first, second = (run_both(gradients, logits, ids, RULES[0], None)[0] for _ in range(2))
    np.testing.assert_array_equal(first.view(np.int32), second.view(np.int32))


def test_reference_plan() -> None:
    rng = np.random.default_rng(3)
    logits, mask = strategies.draw_array(rng, (5, 8)), np.array([True, False, True, True, True])
    spec = RouterSpec(2)
    ids, _ = route(logits, None, mask, spec=spec)
    gradients = draw_gradients(rng, ids, 8, PARTS)
    plan = plan_routing_backward(
        map_arrays(gradients, spec_of), spec_of(logits), spec_of(ids), spec, Target("reference"),
        token_mask=spec_of(mask),
    )  # fmt: skip
    arrays = {"logits": logits, "ids": ids, "token_mask": mask} | dict(named_arrays(gradients, "gradients."))
    expected = run_both(gradients, logits, ids, spec, mask)[1]
    np.testing.assert_array_equal(run_plan(plan, arrays)["d_logits"], expected)


LOGITS, IDS, WEIGHTS = ArraySpec((4, 8), "float32"), ArraySpec((4, 2), "int32"), ArraySpec((4, 2), "float32")
ONE, COUNTS = ArraySpec((1,), "float32"), ArraySpec((8,), "int32")


@pytest.mark.parametrize(
    ("gradients", "ids", "message"),
    [
        (RoutingGradients(), None, "gradients must hold at least one of"),
        (RoutingGradients(tokens_per_expert=COUNTS), None, "gradients must hold at least one of"),
        (RoutingGradients(WEIGHTS), None, "ids must be .*got None"),
        (RoutingGradients(z=ONE), IDS, r"ids must be None without gradients\.weights"),
        (RoutingGradients(IDS), IDS, r"gradients\.weights must be float32, got int32"),
        (RoutingGradients(LOGITS), IDS, r"gradients\.weights must be \[4, 2\], got \(4, 8\)"),
        (RoutingGradients(load_balance=ONE), None, r"gradients\.tokens_per_expert must be given with"),
        (RoutingGradients(z=ONE, tokens_per_expert=COUNTS), None, "and only then"),
    ],
)
def test_bad_input(gradients: RoutingGradients, ids: ArraySpec | None, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        plan_routing_backward(gradients, LOGITS, ids, RouterSpec(2), Target("interpreter"))
