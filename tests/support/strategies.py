"""Hypothesis strategies shared by all tests, and the hard cases they draw from by name.

Arrays are drawn as a seed for NumPy's generator: fast, and a failing example prints as a few small numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import strategies as st

from moe_core.base.arrays import WEIGHT_LAYOUTS
from moe_core.base.dtypes import MATMUL_DTYPES, numpy_dtype
from moe_core.ops.routing import reference
from moe_core.specs.matmul import ACTIVATIONS, ALWAYS_GATED, GATE_LAYOUTS, Activation
from moe_core.specs.routing import LayoutSpec, RouterSpec

#: Widths around and between tile sizes; most are no multiple of a tile.
WIDTHS = (1, 3, 16, 17, 31, 48, 65, 100, 128)
#: Widths for rows whose rms must mean something.
WIDE_WIDTHS = tuple(width for width in WIDTHS if width >= 16)
LOGIT_KINDS = ("normal", "ties", "all_equal", "signed_zeros", "some_nan", "all_nan", "infinite", "spread")


def seeds() -> st.SearchStrategy[int]:
    """Seeds of `np.random.default_rng`."""
    return st.integers(0, 2**32 - 1)


def draw_array(
    rng: np.random.Generator, shape: tuple[int, ...], dtype: str = "float32", rms: float = 1.0
) -> np.ndarray:
    """Normal numbers of the given rms, rounded to dtype."""
    return (rng.standard_normal(shape) * rms).astype(np.float32).astype(numpy_dtype(dtype))


def matmul_dtypes() -> st.SearchStrategy[str]:
    return st.sampled_from(MATMUL_DTYPES)


def weight_layouts() -> st.SearchStrategy[str]:
    return st.sampled_from(WEIGHT_LAYOUTS)


def widths() -> st.SearchStrategy[int]:
    return st.sampled_from(WIDTHS)


def wide_widths() -> st.SearchStrategy[int]:
    return st.sampled_from(WIDE_WIDTHS)


def all_activations() -> tuple[Activation, ...]:
    """Every activation with every gate layout, the ungated variants, and every kind of limit."""
    found = []
    for name in ACTIVATIONS:
        found += [Activation(name, True, layout) for layout in GATE_LAYOUTS]
        if name not in ALWAYS_GATED:
            found.append(Activation(name, False))
    found += [Activation("swiglu_oai", limit=None), Activation("swiglu_oai", True, "interleaved", 1.5, 0.75)]
    found += [Activation("silu", limit=0.75), Activation("gelu_tanh", True, "interleaved", limit=1.0)]
    found += [Activation("clamped_silu", True, "separate", limit=0.75)]
    found += [Activation("softcapped_silu", True, "interleaved", alpha=1.5, limit=0.75)]
    found += [Activation("softcapped_silu", alpha=1.5, limit=None)]
    return tuple(found)


def activations() -> st.SearchStrategy[Activation]:
    return st.sampled_from(all_activations())


@dataclass(frozen=True, eq=False)
class RoutingCase:
    """ids int32 `[T, K]` and weights fp32 `[T, K]` for num_experts local experts, with what goes beside them."""

    ids: np.ndarray
    weights: np.ndarray
    num_experts: int
    expert_map: np.ndarray | None = None
    token_mask: np.ndarray | None = None

    @property
    def num_tokens(self) -> int:
        return self.ids.shape[0]

    @property
    def top_k(self) -> int:
        return self.ids.shape[1]

    def layout(self, alignment: int = 1, max_rows: int | None = None) -> LayoutSpec:
        return LayoutSpec(self.num_tokens, self.top_k, self.num_experts, alignment, max_rows)

    def __repr__(self) -> str:
        extras = [name for name in ("expert_map", "token_mask") if getattr(self, name) is not None]
        return (
            f"RoutingCase(T={self.num_tokens}, K={self.top_k}, E={self.num_experts}, {extras}, ids={self.ids.tolist()})"
        )


def distinct_ids(rng: np.random.Generator, num_tokens: int, top_k: int, num_experts: int) -> np.ndarray:
    """int32 `[T, K]`, no id twice in a token, in random order."""
    return np.argsort(rng.random((num_tokens, num_experts)), axis=1)[:, :top_k].astype(np.int32)


def _case(rng: np.random.Generator, ids: np.ndarray, num_experts: int, **extras: np.ndarray) -> RoutingCase:
    weights = rng.uniform(0.05, 1.0, ids.shape).astype(np.float32)
    return RoutingCase(ids.astype(np.int32), weights, num_experts, **extras)


def _holes(rng: np.random.Generator, ids: np.ndarray, value: float | np.ndarray, share: float = 0.3) -> np.ndarray:
    return np.where(rng.random(ids.shape) < share, value, ids)


def _mapped(rng: np.random.Generator, num_global: int, num_local: int) -> np.ndarray:
    """num_local of num_global experts are local, in shuffled order; the others -1."""
    expert_map = np.full(num_global, -1, np.int32)
    expert_map[rng.permutation(num_global)[:num_local]] = np.arange(num_local)
    return expert_map


_Maker = Callable[[np.random.Generator], RoutingCase]
_OUT_OF_RANGE = np.array([-2, 6, 7, 1000, 2**31 - 1, -(2**31)])
_HARD: dict[str, _Maker] = {
    "empty_experts": lambda rng: _case(rng, distinct_ids(rng, 20, 2, 4) * 3 + 1, 16),
    "one_expert": lambda rng: _case(rng, np.full((37, 1), 2), 5),
    "last_expert": lambda rng: _case(rng, np.full((19, 1), 4), 5),
    "no_expert": lambda rng: _case(rng, np.full((9, 3), -1), 4),
    "missing_ids": lambda rng: _case(rng, _holes(rng, distinct_ids(rng, 33, 3, 7), -1), 7),
    "out_of_range": lambda rng: _case(rng, _holes(rng, distinct_ids(rng, 21, 4, 6), rng.choice(_OUT_OF_RANGE, (21, 4))),
        6),
    "duplicates": lambda rng: _case(rng, rng.integers(0, 3, (18, 4)), 8),
    "top_1": lambda rng: _case(rng, distinct_ids(rng, 40, 1, 6), 6),
    "all_experts": lambda rng: _case(rng, distinct_ids(rng, 11, 5, 5), 5),
    "one_of_one": lambda rng: _case(rng, np.zeros((6, 1)), 1),
    "no_tokens": lambda rng: _case(rng, np.zeros((0, 2)), 4),
    "one_token": lambda rng: _case(rng, distinct_ids(rng, 1, 2, 8), 8),
    "many_experts": lambda rng: _case(rng, distinct_ids(rng, 23, 6, 384), 384),
    "token_mask": lambda rng: _case(rng, _holes(rng, distinct_ids(rng, 30, 2, 6), 99, 0.1), 6,
        token_mask=rng.random(30) < 0.6),
    "all_masked": lambda rng: _case(rng, distinct_ids(rng, 8, 2, 4), 4, token_mask=np.zeros(8, bool)),
    "expert_map": lambda rng: _case(rng, _holes(rng, distinct_ids(rng, 26, 3, 12), -1, 0.1), 5,
        expert_map=_mapped(rng, 12, 5)),
    "nothing_local": lambda rng: _case(rng, distinct_ids(rng, 10, 2, 8), 3, expert_map=np.full(8, -1, np.int32)),
    "map_mask_and_bad_ids": lambda rng: _case(rng, _holes(rng, distinct_ids(rng, 29, 3, 9), 12, 0.2), 4,
        expert_map=_mapped(rng, 9, 4), token_mask=rng.random(29) < 0.7),
}  # fmt: skip
#: Every hard routing by name, for `pytest.mark.parametrize`.
HARD_ROUTINGS = tuple(_HARD)


def hard_routing(name: str, seed: int = 0) -> RoutingCase:
    """The hard case of that name."""
    return _HARD[name](np.random.default_rng(seed))


@st.composite
def random_routings(draw: st.DrawFn, max_tokens: int = 48, max_experts: int = 20) -> RoutingCase:
    """Any T, K and E; ids skewed towards few experts, some -1; sometimes a token mask or an expert map."""
    num_experts = draw(st.integers(1, max_experts))
    top_k = draw(st.integers(1, min(num_experts, 8)))
    num_tokens = draw(st.integers(0, max_tokens))
    rng = np.random.default_rng(draw(seeds()))
    favour = np.exp(draw(st.sampled_from((0.0, 2.0))) * rng.standard_normal(num_experts))
    ids = np.argsort(rng.exponential(1.0, (num_tokens, num_experts)) / favour, axis=1)[:, :top_k]
    ids = _holes(rng, ids, -1, draw(st.sampled_from((0.0, 0.2))))
    extras = {}
    if draw(st.booleans()):
        extras["token_mask"] = rng.random(num_tokens) < 0.7
    num_local = num_experts
    if draw(st.booleans()):
        num_local = draw(st.integers(1, num_experts))
        extras["expert_map"] = _mapped(rng, num_experts, num_local)
    return _case(rng, ids, num_local, **extras)


def routings(max_tokens: int = 48, max_experts: int = 20) -> st.SearchStrategy[RoutingCase]:
    """Hard cases by name and random ones."""
    hard = st.builds(hard_routing, st.sampled_from(HARD_ROUTINGS), seeds())
    return st.one_of(hard, random_routings(max_tokens, max_experts))


@st.composite
def layouts(draw: st.DrawFn, case: RoutingCase) -> LayoutSpec:
    """A layout for the case: contiguous, aligned, or batched with room for all or too few rows."""
    if draw(st.booleans()):
        return case.layout(alignment=draw(st.sampled_from((1, 1, 4, 16, 128))))
    return case.layout(max_rows=draw(st.sampled_from((1, 3, 16, max(case.num_tokens * case.top_k, 1)))))


def draw_logits(rng: np.random.Generator, kind: str, num_tokens: int, num_experts: int) -> np.ndarray:
    """fp32 logits `[T, E]` of a kind of `LOGIT_KINDS`."""
    shape = (num_tokens, num_experts)
    normal = rng.standard_normal(shape).astype(np.float32)
    if kind == "ties":
        return np.round(normal)
    if kind == "all_equal":
        return np.full(shape, 0.5, np.float32)
    if kind == "signed_zeros":
        return rng.choice(np.array([-0.0, 0.0, -0.0, 1.0, -1.0], np.float32), shape)
    if kind == "some_nan":
        return _holes(rng, normal, np.nan).astype(np.float32)
    if kind == "all_nan":
        return np.full(shape, np.nan, np.float32)
    if kind == "infinite":
        return _holes(rng, normal, rng.choice([np.inf, -np.inf], shape)).astype(np.float32)
    if kind == "spread":
        return normal * np.float32(12)
    assert kind == "normal", kind
    return normal


@dataclass(frozen=True)
class RouterCase:
    """A routing rule with sizes it is legal for; draw its logits with `draw_logits`."""

    spec: RouterSpec
    num_tokens: int
    num_experts: int
    has_bias: bool
    logit_kind: str
    masked: bool
    seed: int

    def arrays(self) -> tuple[np.ndarray, np.ndarray | None, np.ndarray | None]:
        """logits `[T, E]`, correction_bias fp32 `[E]` or None, token_mask bool `[T]` or None."""
        rng = np.random.default_rng(self.seed)
        logits = draw_logits(rng, self.logit_kind, self.num_tokens, self.num_experts)
        bias = draw_array(rng, (self.num_experts,), rms=0.2) if self.has_bias else None
        return logits, bias, rng.random(self.num_tokens) < 0.7 if self.masked else None


@st.composite
def router_specs(draw: st.DrawFn, num_experts: int, has_bias: bool, bounds: bool = False) -> RouterSpec:
    """A routing rule legal for E experts, with or without a correction bias. bounds: also of bounded logits, with an
    epsilon, other group scores and a bias of the logits."""
    scoring = draw(st.sampled_from(("softmax", "sigmoid", "sqrt_softplus")))
    order = draw(st.sampled_from(("softmax_then_topk", "topk_then_softmax"))) if scoring == "softmax" else None
    legal = [n for n in range(1, num_experts + 1) if num_experts % n == 0 and (n == 1 or num_experts // n > has_bias)]
    group_score = draw(st.sampled_from((None, "best", "pair"))) if bounds else None
    if group_score is not None:
        legal = [n for n in legal if n == 1 or num_experts // n > 1]
    num_groups = draw(st.sampled_from(legal))
    renormalize = draw(st.booleans())
    topk_group = draw(st.integers(1, num_groups))
    chosen_from = topk_group * num_experts // num_groups
    more: dict[str, Any] = {}
    if bounds:
        more["epsilon"] = draw(st.sampled_from((0.0, 0.25))) if renormalize and scoring != "softmax" else 0.0
        more |= {"logit_scale": draw(st.sampled_from((1.0, 0.5))), "softcap": draw(st.sampled_from((None, None, 3.0)))}
        more["bias_on"] = draw(st.sampled_from(("scores", "logits")))
    return RouterSpec(
        top_k=draw(st.one_of(st.integers(1, min(chosen_from, 8)), st.just(chosen_from))),
        scoring=scoring,
        order=order,
        renormalize=renormalize,
        scale=draw(st.sampled_from((1.0, 2.5))),
        num_groups=num_groups,
        topk_group=topk_group,
        slot_order=draw(st.sampled_from(("score", "expert"))),
        group_score=group_score,
        **more,
    )


@st.composite
def router_cases(
    draw: st.DrawFn, kinds: tuple[str, ...] = LOGIT_KINDS, max_tokens: int = 24, bounds: bool = False
) -> RouterCase:
    """Every scoring, order, grouping, bias, mask and kind of logits, for any T, K and E."""
    num_experts = draw(st.one_of(st.integers(1, 40), st.sampled_from((48, 64, 384))))
    has_bias = draw(st.booleans())
    return RouterCase(
        spec=draw(router_specs(num_experts, has_bias, bounds)),
        num_tokens=draw(st.integers(0, max_tokens)),
        num_experts=num_experts,
        has_bias=has_bias,
        logit_kind=draw(st.sampled_from(kinds)),
        masked=draw(st.booleans()),
        seed=draw(seeds()),
    )


#: How ids are drawn, hard cases on purpose.
ID_KINDS = ("uniform", "one_expert", "some_absent", "all_absent", "first_half")


def draw_ids(kind: str, num_tokens: int, top_k: int, num_experts: int, seed: int) -> np.ndarray:
    """ids int32 `[T, K]` of one of ID_KINDS; duplicates within a token are legal."""
    rng = np.random.default_rng(seed)
    shape = (num_tokens, top_k)
    if kind == "one_expert":
        return np.full(shape, num_experts - 1, np.int32)
    if kind == "all_absent":
        return np.full(shape, -1, np.int32)
    ids = rng.integers(0, max(1, num_experts // 2) if kind == "first_half" else num_experts, shape)
    if kind == "some_absent":
        ids = np.where(rng.random(shape) < 0.3, -1, ids)
    return ids.astype(np.int32)


def layout_arrays(ids: np.ndarray, spec: LayoutSpec) -> dict[str, np.ndarray]:
    """group_sizes, group_start, slot_of_row and row_of_slot of ids."""
    sizes, start, slot_of_row, row_of_slot, _ = reference.layout(ids, layout=spec)
    return {"group_sizes": sizes, "group_start": start, "slot_of_row": slot_of_row, "row_of_slot": row_of_slot}


def low_logits(low: float) -> np.ndarray:
    """fp32 logits `[3, 5]` whose first token is near `low`, a number at which scores underflow."""
    logits = np.random.default_rng(0).standard_normal((3, 5)).astype(np.float32)
    logits[0] += np.float32(low)
    return logits
