"""Token rounding: the kernels and the twin against a rule written out expert by expert, and its gradient."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from moe_core import InvalidInput, Unsupported
from moe_core.base.arrays import ArraySpec
from moe_core.base.target import Target
from moe_core.ops.routing import reference
from moe_core.ops.routing.rounding import plan_keep_candidates, plan_route_rounded, plan_route_rounded_backward
from moe_core.plan.steps import Constant, KernelLaunch
from moe_core.specs.routing import LayoutSpec, RouterSpec, TokenRounding
from tests.support.harness import H200, engine_target, run_plan, spec_of

ENGINES = (engine_target(), Target("reference"))
on_engines = pytest.mark.parametrize("target", ENGINES, ids=lambda target: target.kind)
MODES = ("nearest", "up", "down")

pytestmark = pytest.mark.usefixtures("visible_poison")


def rounded_count(count: int, found: int, rounding: TokenRounding) -> int:
    whole, rest = divmod(count, rounding.tile)
    up = {
        "up": rest > 0,
        "down": False,
        "nearest": rest > rounding.tile / 2 or (rest == rounding.tile / 2 and whole % 2 == 1),
    }[rounding.mode]
    more = (whole + 1) * rounding.tile
    return more if up and more <= found else whole * rounding.tile


def kept_by_hand(
    candidates: np.ndarray, own: np.ndarray, top_k: int, num_experts: int, rounding: TokenRounding
) -> dict[str, np.ndarray]:
    """By the definition, expert by expert, with Python's stable sort. own: the candidates' weights."""
    ids = np.full(candidates.shape, -1, np.int32)
    values, counts = np.zeros(candidates.shape, np.float32), np.zeros(num_experts, np.int32)
    for expert in range(num_experts):
        pairs = [(int(token), int(column)) for token, column in np.argwhere(candidates == expert)]

        def rank(pair: tuple[int, int]) -> tuple[object, ...]:
            value = own[pair]
            return pair[1] >= top_k, bool(np.isnan(value)), 0.0 if np.isnan(value) else -float(value), pair[0]

        counts[expert] = sum(column < top_k for _, column in pairs)
        for pair in sorted(pairs, key=rank)[: rounded_count(int(counts[expert]), len(pairs), rounding)]:
            ids[pair], values[pair] = expert, own[pair]
    return {"ids": ids, "weights": values, "tokens_per_expert": counts}


def check_kept(
    arrays: Sequence[np.ndarray], top_k: int, num_experts: int, rounding: TokenRounding, target: Target
) -> dict[str, np.ndarray]:
    """Run the plan on candidates and their weights; its results, once they are those of the definition."""
    candidates, weights = arrays
    plan = plan_keep_candidates(spec_of(candidates), top_k, num_experts, rounding, target)
    found = run_plan(plan, {"candidates": candidates, "candidate_weights": weights})
    expected = kept_by_hand(candidates, weights, top_k, num_experts, rounding)
    assert set(found) == set(expected)
    for name, wanted in expected.items():
        np.testing.assert_array_equal(found[name], wanted, err_msg=name, strict=True)
    sizes = np.bincount(found["ids"][found["ids"] >= 0], minlength=num_experts)
    assert not (sizes % rounding.tile).any()
    return found


def drawn(tokens: int, width: int, num_experts: int, seed: int, *, skew: float = 0.0) -> list[np.ndarray]:
    """Candidates and weights with many equal ones, some zero, infinite or NaN, and some tokens masked."""
    random = np.random.default_rng(seed)
    liked = random.standard_normal((tokens, num_experts)) + skew * np.arange(num_experts)
    candidates = np.argsort(-liked, axis=1)[:, :width].astype(np.int32)
    candidates[random.random(tokens) < 0.1] = -1
    values = random.integers(0, 6, (tokens, width)).astype(np.float32) / 4
    values[random.random(values.shape) < 0.2] = np.nan
    values[random.random(values.shape) < 0.1] = -0.0
    values[random.random(values.shape) < 0.05] = np.inf
    return [candidates, values]


@on_engines
@given(st.data())
def test_any_candidates(target: Target, data: st.DataObject) -> None:
    num_experts = data.draw(st.integers(1, 9))
    top_k = data.draw(st.integers(1, num_experts))
    mode = data.draw(st.sampled_from(MODES))
    width = top_k if mode == "down" else data.draw(st.integers(top_k, num_experts))
    rounding = TokenRounding(data.draw(st.sampled_from((16, 32, 48))), mode, None if mode == "down" else width)
    tokens, seed = data.draw(st.sampled_from((0, 1, 15, 40, 90, 150))), data.draw(st.integers(0, 10**6))
    arrays = drawn(tokens, width, num_experts, seed, skew=data.draw(st.sampled_from((0.0, 0.5, 5.0))))
    check_kept(arrays, top_k, num_experts, rounding, target)


@on_engines
@pytest.mark.parametrize("mode", MODES)
def test_equal_weights_keep_the_first_tokens(target: Target, mode: str) -> None:
    """All to one expert, all weights equal: the tokens with the lowest numbers stay."""
    tokens, rounding = 100, TokenRounding(48, mode)
    candidates = np.stack([np.ones(tokens, np.int32), np.zeros(tokens, np.int32)], 1)
    candidates = candidates if mode != "down" else candidates[:, :1].copy()
    weights = np.full(candidates.shape, 0.25, np.float32)
    found = check_kept((candidates, weights), 1, 3, rounding, target)
    np.testing.assert_array_equal(np.flatnonzero(found["ids"][:, 0] == 1), np.arange(96))
    assert found["tokens_per_expert"].tolist() == [0, 100, 0]


@on_engines
@pytest.mark.parametrize("chosen, kept", [(8, 0), (24, 32), (40, 32), (56, 64), (41, 48), (39, 32)])
def test_half_a_tile_goes_to_the_even_multiple(target: Target, chosen: int, kept: int) -> None:
    first = (np.arange(80) >= chosen).astype(np.int32)
    arrays = [np.stack([first, 1 - first], axis=1), np.ones((80, 2), np.float32)]
    found = check_kept(arrays, 1, 2, TokenRounding(16, "nearest", 2), target)
    assert (found["ids"] == 0).sum() == kept


@on_engines
def test_bits_of_every_digit_decide(target: Target) -> None:
    """Weights that differ in one byte of their bits alone, in either order, and NaN, which comes last."""
    rounding, tokens = TokenRounding(16, "down"), 24
    for shift in (0, 8, 16, 23):
        bits = np.float32(0.75).view(np.uint32) + (np.arange(tokens, dtype=np.uint32)[::-1] << np.uint32(shift))
        weights = bits.view(np.float32)[:, None].copy()
        candidates = np.zeros((tokens, 1), np.int32)
        missing = np.where(np.arange(tokens)[:, None] % 3 == 0, np.float32(np.nan), weights)
        for values in (weights, weights[::-1].copy(), missing):
            check_kept((candidates, values), 1, 1, rounding, target)


RULES = (
    lambda top_k: RouterSpec(top_k, renormalize=True),
    lambda top_k: RouterSpec(top_k, order="topk_then_softmax"),
    lambda top_k: RouterSpec(top_k, "sigmoid", renormalize=True, epsilon=1e-6, scale=2.5),
)
SIZES = ((1, 5, "nearest", 0), (1, 5, "up", 1), (5, 5, "nearest", 2), (6, 384, "nearest", 0), (2, 8, "down", 1))


@pytest.mark.parametrize("top_k, num_experts, mode, rule", (*SIZES, (2, 8, "nearest", 1), (2, 8, "up", 2)))
def test_routing_end_to_end(top_k: int, num_experts: int, mode: str, rule: int) -> None:
    """On each engine: top-K weights of `plan_routing`, scores without renormalising, then the rule by hand."""
    tokens, rounding, spec = 64, TokenRounding(16, mode), RULES[rule](top_k)
    logits = np.random.default_rng(3).standard_normal((tokens, num_experts), np.float32)
    logits[:, : num_experts // 3] += 1.5
    mask = np.arange(tokens) % 7 != 3
    for target in ENGINES:
        plan = plan_route_rounded(spec_of(logits), spec, rounding, target, token_mask=ArraySpec(mask.shape, "bool"))
        found = run_plan(plan, {"logits": logits, "token_mask": mask})
        ids, weights = reference.route(logits, None, mask, spec=spec)[:2]
        candidates, scores = reference.route(logits, None, mask, spec=rounding.wide(spec, num_experts, False))[:2]
        np.testing.assert_array_equal(candidates[:, :top_k], ids)
        np.testing.assert_array_equal(found["candidates"], candidates)
        weights = np.concatenate([weights, scores[:, top_k:]], axis=1)
        expected = kept_by_hand(candidates, weights, top_k, num_experts, rounding)
        np.testing.assert_array_equal(found["ids"], expected["ids"])
        np.testing.assert_array_equal(found["tokens_per_expert"], expected["tokens_per_expert"])
        np.testing.assert_allclose(found["weights"], expected["weights"], rtol=1e-5)
        assert (found["ids"][~mask] == -1).all() and (found["weights"][~mask] == 0).all()


@on_engines
@pytest.mark.parametrize("mode", ["nearest", "up"])
def test_all_experts_as_candidates_is_the_published_rule(target: Target, mode: str) -> None:
    """Per expert, a sort of all tokens by (chosen, score), of which the first rounded(n) stay."""
    tokens, num_experts, top_k = 80, 12, 2
    logits = np.random.default_rng(5).standard_normal((tokens, num_experts), np.float32) * 2
    rounding = TokenRounding(16, mode, candidates=num_experts)
    spec = RouterSpec(top_k, renormalize=True)
    found = run_plan(plan_route_rounded(spec_of(logits), spec, rounding, target), {"logits": logits})
    shares = np.exp(logits.astype(np.float64))
    shares /= shares.sum(1, keepdims=True)
    best = np.argsort(-shares, axis=1)[:, :top_k]
    combined, weights = shares - 1, shares.copy()
    top = np.take_along_axis(shares, best, 1)
    np.put_along_axis(combined, best, top / top.sum(1, keepdims=True), 1)
    np.put_along_axis(weights, best, top / top.sum(1, keepdims=True), 1)
    visits = np.zeros((tokens, num_experts), bool)
    for expert in range(num_experts):
        count = int((best == expert).sum())
        visits[np.argsort(-combined[:, expert])[: rounded_count(count, tokens, rounding)], expert] = True
    dense, dense_weights = np.zeros_like(visits), np.zeros_like(weights)
    for token, column in np.argwhere(found["ids"] >= 0):
        dense[token, found["ids"][token, column]] = True
        dense_weights[token, found["ids"][token, column]] = found["weights"][token, column]
    np.testing.assert_array_equal(dense, visits)
    np.testing.assert_allclose(dense_weights, np.where(visits, weights, 0), rtol=1e-5)


@on_engines
@pytest.mark.parametrize("spec, mode", [
    (RouterSpec(2, renormalize=True), "nearest"),
    (RouterSpec(2, renormalize=True), "down"),
    (RouterSpec(2), "up"),
    (RouterSpec(2, order="topk_then_softmax", scale=1.5), "nearest"),
    (RouterSpec(2, "sigmoid", renormalize=True), "nearest"),
    (RouterSpec(2, "sqrt_softplus", softcap=4.0), "up"),
], ids=str)  # fmt: skip
def test_gradient_is_that_of_the_weights_kept(target: Target, spec: RouterSpec, mode: str) -> None:
    """Against differences of the weights in float64 at fixed choices."""
    tokens, num_experts, rounding = 48, 6, TokenRounding(16, mode)
    random = np.random.default_rng(11)
    logits = random.standard_normal((tokens, num_experts), np.float32)
    given, options = spec_of(logits), {"token_mask": ArraySpec((tokens,), "bool")}
    mask = np.arange(tokens) != 5
    plan = plan_route_rounded(given, spec, rounding, target, **options)
    found = run_plan(plan, {"logits": logits, "token_mask": mask})
    d_weights = random.standard_normal(found["weights"].shape, np.float32)
    specs = [spec_of(array) for array in (d_weights, logits, found["ids"], found["candidates"])]
    plan = plan_route_rounded_backward(*specs, spec, rounding, target)
    inputs = {"d_weights": d_weights, "logits": logits, "ids": found["ids"], "candidates": found["candidates"]}
    d_logits = run_plan(plan, inputs)["d_logits"]

    def loss(values: np.ndarray) -> np.ndarray:
        """Per token, of its weights at the candidates and the slots kept."""
        wide = rounding.wide(spec, num_experts, False)
        kept = np.where(found["ids"] >= 0, d_weights, 0).astype(np.float64)
        first = reference.route(values, given=found["candidates"][:, : spec.require_top_k()], spec=spec)[1]
        weights = reference.route(values, given=found["candidates"], spec=wide)[1].copy()
        weights[:, : spec.require_top_k()] = first
        return (weights * kept).sum(1)

    wide_logits, step = logits.astype(np.float64), 1e-6
    expected = np.zeros_like(wide_logits)
    for expert in range(num_experts):
        moved = wide_logits.copy()
        moved[:, expert] += step
        lower = wide_logits.copy()
        lower[:, expert] -= step
        expected[:, expert] = (loss(moved) - loss(lower)) / (2 * step)
    expected[~mask] = 0
    np.testing.assert_allclose(d_logits, expected, atol=3e-6)
    assert (found["ids"] < 0).any() and (mode == "down" or (found["ids"][:, 2:] >= 0).any())


def test_correction_bias_and_groups() -> None:
    """A bias moves who is chosen and who is a candidate, never the weights."""
    tokens, num_experts, rounding = 64, 16, TokenRounding(16)
    random = np.random.default_rng(2)
    logits = random.standard_normal((tokens, num_experts), np.float32)
    bias = random.standard_normal(num_experts).astype(np.float32)
    for spec in (
        RouterSpec(3, "sigmoid", renormalize=True, num_groups=4, topk_group=2),
        RouterSpec(3, order="topk_then_softmax"),
    ):
        for target in ENGINES:
            plan = plan_route_rounded(spec_of(logits), spec, rounding, target, correction_bias=spec_of(bias))
            found = run_plan(plan, {"logits": logits, "correction_bias": bias})
            ids, weights = reference.route(logits, bias, spec=spec)[:2]
            np.testing.assert_array_equal(found["candidates"][:, :3], ids)
            kept = found["ids"][:, :3] >= 0
            np.testing.assert_allclose(found["weights"][:, :3][kept], weights[kept], rtol=1e-5)
            assert not (np.bincount(found["ids"][found["ids"] >= 0], minlength=num_experts) % 16).any()


@example(tokens=0)
@given(st.sampled_from((0, 16, 1000, 4096, 16384)))
def test_rows_stay_within_the_bound(tokens: int) -> None:
    """`row_limit` is what the worst counts reach."""
    for mode in MODES:
        rounding = TokenRounding(64, mode)
        counts = np.full(8, tokens * 2 // 8)
        counts[:4] += np.minimum(33, counts[4:])
        counts[4:] -= np.minimum(33, counts[4:])
        rows = sum(rounded_count(int(count), tokens, rounding) for count in counts)
        assert rows <= LayoutSpec(tokens, rounding.width(2, 8), 8, limit=rounding.row_limit(2)).capacity


def test_a_changing_number_of_tokens_compiles_nothing() -> None:
    def constants(tokens: int) -> list[tuple[object, ...]]:
        plan = plan_keep_candidates(ArraySpec((tokens, 16), "int32"), 8, 128, TokenRounding(), H200)
        step = plan.steps[-1]
        assert isinstance(step, KernelLaunch)
        return [(name, value) for name, value in step.arguments if isinstance(value, Constant)]

    assert constants(4096) == constants(16384) == constants(5000)


def test_refusals() -> None:
    logits, here = ArraySpec((64, 8), "float32"), engine_target()
    with pytest.raises(InvalidInput, match=r"tile must be a multiple of 16, as tiles of kernels are, got 100; pass 64"):
        TokenRounding(100)
    with pytest.raises(InvalidInput, match=r"tile must be an integer of at least 16"):
        TokenRounding(0)
    with pytest.raises(InvalidInput, match=r"mode must be"):
        TokenRounding(mode="stochastic")
    with pytest.raises(InvalidInput, match=r"candidates must be None with mode='down'"):
        TokenRounding(mode="down", candidates=4)
    with pytest.raises(InvalidInput, match=r"candidates must be from top_k = 2 to num_experts = 8, got 9"):
        plan_route_rounded(logits, RouterSpec(2), TokenRounding(16, candidates=9), here)
    with pytest.raises(InvalidInput, match=r"candidates must be from top_k = 2 to num_experts = 8, got 1"):
        plan_route_rounded(logits, RouterSpec(2), TokenRounding(16, candidates=1), here)
    with pytest.raises(InvalidInput, match=r"tile must be at most num_tokens = 64, got 128: no expert could keep"):
        plan_route_rounded(logits, RouterSpec(2), TokenRounding(128), here)
    for name, wrong in (("correction_bias", ArraySpec((7,), "float32")), ("token_mask", ArraySpec((63,), "bool"))):
        with pytest.raises(InvalidInput, match=name):
            plan_route_rounded(logits, RouterSpec(2, "sigmoid"), TokenRounding(16), here, **{name: wrong})
    with pytest.raises(InvalidInput, match=r"scale must be above 0 with token rounding, got -1.0"):
        plan_route_rounded(logits, RouterSpec(2, scale=-1.0), TokenRounding(16), here)
    with pytest.raises(Unsupported, match=r"token rounding keeps slots by score, got slot_order='expert'"):
        plan_route_rounded(logits, RouterSpec(2, slot_order="expert"), TokenRounding(16), here)
    with pytest.raises(Unsupported, match=r"topk_then_softmax' without groups alone"):
        spec = RouterSpec(2, order="topk_then_softmax", num_groups=2)
        plan_route_rounded(logits, spec, TokenRounding(16), here)
    with pytest.raises(InvalidInput, match=r"top_k must be at most topk_group \* num_experts / num_groups = 4, got 6"):
        spec = RouterSpec(3, "sigmoid", num_groups=2)
        plan_route_rounded(logits, spec, TokenRounding(16), here)


def test_layouts_take_the_table() -> None:
    """The ids are a table of T rows whose layout has no padding at tiles of the rounding's height."""
    logits = np.random.default_rng(0).standard_normal((96, 8), np.float32)
    found = run_plan(
        plan_route_rounded(spec_of(logits), RouterSpec(2), TokenRounding(32), ENGINES[0]), {"logits": logits}
    )
    layout = LayoutSpec(96, 4, 8, limit=TokenRounding(32).row_limit(2))
    sizes, _, _, _, invalid, overflow, _ = reference.layout(found["ids"], layout=layout, block_ms=(32,))
    assert not (sizes % 32).any() and invalid.tolist() == overflow.tolist() == [0]
