"""Scores at the ends of the fp32 range, and columns and groups that only pad, against float64."""

from __future__ import annotations

import numpy as np
import pytest

from moe_core.base.arrays import ArraySpec
from moe_core.base.target import Target
from moe_core.ops.routing.topk import plan_routing
from moe_core.specs.routing import RouterSpec
from tests.support.harness import engine_target, run_plan

ENGINES = ("kernels", "reference")


def route(logits: np.ndarray, spec: RouterSpec, engine: str, **extras: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    target = engine_target() if engine == "kernels" else Target("reference")
    specs = {name: ArraySpec(array.shape, array.dtype.name) for name, array in extras.items()}
    plan = plan_routing(ArraySpec(logits.shape, "float32"), spec, target, **specs)
    found = run_plan(plan, {"logits": logits} | extras)
    return found["ids"], found["weights"]


def scores(logits: np.ndarray, scoring: str) -> np.ndarray:
    """In float64, of numbers of any size."""
    wide = logits.astype(np.float64)
    if scoring == "sigmoid":
        return np.exp(-np.logaddexp(0, -wide))
    return np.sqrt(np.logaddexp(0, wide))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("scoring", ["sigmoid", "sqrt_softplus"])
def test_scores_from_end_to_end(scoring: str, engine: str) -> None:
    """Every score, whatever the logit: within a few ulp, also where exp would overflow or 1 + u lose u."""
    sweep = np.concatenate([np.linspace(-86, 86, 311), np.linspace(-20, 20, 200), 10.0 ** np.arange(-38, 38.5, 0.5)])
    logits = np.concatenate([sweep, -(10.0 ** np.arange(-38, 1.9, 0.5)), [0.0, 3.4e38]]).astype(np.float32)
    logits = np.unique(logits)[None]
    spec = RouterSpec(logits.size, scoring)
    ids, weights = route(logits, spec, engine)
    wanted = np.take_along_axis(scores(logits, scoring), ids, axis=1)
    np.testing.assert_allclose(weights, wanted, rtol=8 * 2.0**-24, atol=0)
    np.testing.assert_array_equal(np.sort(ids[0]), np.arange(logits.size))
    ids, weights = route(
        np.array([[-np.inf, -1e30, -104.5, -103.0, np.inf]], np.float32), RouterSpec(5, scoring), engine
    )
    assert ids[0].tolist() == [4, 3, 2, 1, 0]
    ends = scores(np.array([np.inf, -103.0, -104.5, -1e30, -np.inf]), scoring)
    np.testing.assert_allclose(weights[0], ends, rtol=0.2, atol=1e-30 if scoring == "sigmoid" else 4e-23)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("low", [-1e30, -300.0, -1.0, 0.0, 300.0, 1e30])
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid", "sqrt_softplus"])
@pytest.mark.parametrize(("num_experts", "num_groups"), [(5, 1), (6, 3), (33, 3), (7, 1), (1, 1), (96, 6)])
def test_padding_is_never_chosen_nor_counted(
    num_experts: int, num_groups: int, scoring: str, low: float, engine: str
) -> None:
    """Sizes that are no powers of two: however low or high the logits, every expert is a real one, and probabilities
    are those of the real ones alone."""
    random = np.random.default_rng(num_experts)
    logits = (low + random.standard_normal((9, num_experts))).astype(np.float32)
    kept = max(1, num_groups - 1)
    top_k = kept * num_experts // num_groups
    ids, weights = route(logits, RouterSpec(top_k, scoring, num_groups=num_groups, topk_group=kept), engine)
    assert ids.min() >= 0 and ids.max() < num_experts
    assert all(len(set(row)) == top_k for row in ids.tolist())
    if scoring == "softmax":
        wide = np.exp(logits.astype(np.float64) - logits.max(1, keepdims=True))
        every = wide / wide.sum(1, keepdims=True)
    else:
        every = scores(logits, scoring)
    np.testing.assert_allclose(weights, np.take_along_axis(every, ids, axis=1), rtol=2e-6, atol=1e-37)
    members = num_experts // num_groups
    best = np.sort(logits.reshape(9, num_groups, members).max(2), axis=1)
    chosen = np.take_along_axis(logits, ids, axis=1).max(1)
    np.testing.assert_array_equal(chosen, best[:, -1])
    assert all(len({expert // members for expert in row}) == kept for row in ids.tolist())


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid", "sqrt_softplus"])
def test_experts_without_a_number_come_before_padding(scoring: str, engine: str) -> None:
    logits = np.array([[np.nan] * 5, [np.nan, -np.inf, np.nan, -np.inf, np.nan]], np.float32)
    ids, _ = route(logits, RouterSpec(5, scoring), engine)
    assert ids.tolist() == [[0, 1, 2, 3, 4], [1, 3, 0, 2, 4]]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("scale", [1.0, 2.0])
def test_padding_has_no_share_behind_a_cap(scale: float, engine: str) -> None:
    """A cap makes a number of -inf, which padding holds."""
    logits = np.array([[-1.0, 2.0, -3.0, 0.5, 1.0]], np.float32)
    ids, weights = route(logits, RouterSpec(5, logit_scale=scale, softcap=2.0), engine)
    capped = 2.0 * np.tanh(logits.astype(np.float64) * scale / 2.0)
    shares = np.exp(capped) / np.exp(capped).sum()
    np.testing.assert_allclose(weights, np.take_along_axis(shares, ids, axis=1), rtol=2e-6)
    assert weights.sum() == pytest.approx(1.0)
