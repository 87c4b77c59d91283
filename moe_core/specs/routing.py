"""Options of the router and of routing, and sizes of a ragged layout."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from moe_core.base import INT32_LIMIT, WEIGHT_LAYOUTS, plan_type
from moe_core.base.checks import finite_float, require_choice, require_flags, set_integer, set_matmul_dtype
from moe_core.errors import InvalidInput, Unsupported

SCORINGS = ("softmax", "sigmoid", "sqrt_softplus")
ORDERS = ("softmax_then_topk", "topk_then_softmax")
SLOT_ORDERS = ("score", "expert")
ROUNDING_MODES = ("nearest", "up", "down")
#: Every tile has a multiple of this many rows.
_ROWS_OF_TILES = 16


@plan_type
@dataclass(frozen=True)
class LogitsSpec:
    """Options of the router product `x [T, D] @ weight -> logits fp32 [T, E]`.

    weight_layout: `in_out` `[D, E]` or `out_in` `[E, D]`. logits_dtype: rounds the logits, which stay fp32 arrays.
    batch_invariant: one summation order for every T. expected_tokens: see `Tuning`.
    """

    weight_layout: str = "in_out"
    logits_dtype: str = "float32"
    allow_tf32: bool = False
    batch_invariant: bool = False
    expected_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.expected_tokens is not None:
            set_integer(self, "expected_tokens", 1, INT32_LIMIT)
        require_choice("weight_layout", self.weight_layout, WEIGHT_LAYOUTS)
        require_flags(self, "allow_tf32", "batch_invariant")
        set_matmul_dtype(self, "logits_dtype")


@plan_type
@dataclass(frozen=True)
class RouterSpec:
    """How logits `[T, E]` become ids and weights `[T, K]`.

    Args:
        top_k: K. None: the layer's. Ops need the number.
        scoring: `softmax`, `sigmoid` or `sqrt_softplus` (sqrt(log(1 + exp(x)))).
        order: for softmax, `softmax_then_topk` (the default) or `topk_then_softmax`.
        renormalize: divide by the sum of the chosen weights (a zero sum gives zeros).
        scale: multiplies the weights last.
        num_groups: equal groups of experts; the topk_group best survive. 1: off.
        slot_order: `score` (descending selection score, ties to the lower id) or `expert` (ascending ids).
        epsilon: added to the sum of renormalize, for sigmoid and sqrt_softplus.
        softcap, logit_scale: score softcap * tanh(logits * logit_scale / softcap), or logits * logit_scale.
        bias_on: add the correction bias to `scores` or to those `logits`.
        group_score: a group's `best` score, or the sum of its two best (`pair`). None: `pair` with a correction bias,
            else `best`.
    """

    top_k: int | None = None
    scoring: str = "softmax"
    order: str | None = None
    renormalize: bool = False
    scale: float = 1.0
    num_groups: int = 1
    topk_group: int = 1
    slot_order: str = "score"
    epsilon: float = 0.0
    logit_scale: float = 1.0
    softcap: float | None = None
    bias_on: str = "scores"
    group_score: str | None = None

    def __post_init__(self) -> None:
        if self.top_k is not None:
            set_integer(self, "top_k", 1)
        require_choice("scoring", self.scoring, SCORINGS)
        require_choice("slot_order", self.slot_order, SLOT_ORDERS)
        if self.scoring == "softmax":
            object.__setattr__(self, "order", ORDERS[0] if self.order is None else self.order)
            require_choice("order", self.order, ORDERS)
        elif self.order is not None:
            raise InvalidInput(
                f"order must be None for scoring={self.scoring!r}, which scores each expert by itself, "
                f"got {self.order!r}; leave it out"
            )
        require_flags(self, "renormalize")
        for name in ("epsilon", "logit_scale", *(() if self.softcap is None else ("softcap",))):
            object.__setattr__(self, name, finite_float(name, getattr(self, name)))
        if self.epsilon < 0 or (self.epsilon and (not self.renormalize or self.scoring == "softmax")):
            raise InvalidInput(
                f"epsilon must be 0, or above 0 with renormalize and a scoring other than softmax, got {self.epsilon} "
                f"with {self.scoring!r}; leave it out: the chosen shares of a softmax sum to at least K / E"
            )
        for name in ("logit_scale", "softcap"):
            if (value := getattr(self, name)) is not None and value <= 0:
                raise InvalidInput(f"{name} must be above 0, got {value}; leave it out")
        require_choice("bias_on", self.bias_on, ("scores", "logits"))
        if self.group_score is not None:
            require_choice("group_score", self.group_score, ("best", "pair"))
        object.__setattr__(self, "scale", finite_float("scale", self.scale))
        set_integer(self, "num_groups", 1)
        set_integer(self, "topk_group", 1)
        if self.topk_group > self.num_groups:
            raise InvalidInput(
                f"topk_group must be at most num_groups = {self.num_groups}, got {self.topk_group}; lower it"
            )

    def require_top_k(self) -> int:
        """Return K. Raises InvalidInput if a layer's."""
        if self.top_k is None:
            raise InvalidInput(
                "top_k must be an integer of at least 1, got None (a layer's own); pass RouterSpec(top_k=...)"
            )
        return self.top_k

    def validate_experts(self, num_experts: int, has_bias: bool) -> None:
        """Check K <= E, that groups divide E and leave K experts, and no groups of one with a correction bias."""
        top_k = self.require_top_k()
        if top_k > num_experts:
            raise InvalidInput(f"top_k must be at most num_experts = {num_experts}, got {top_k}; lower top_k")
        if self.num_groups == 1:
            return
        if num_experts % self.num_groups:
            raise InvalidInput(
                f"num_groups must divide num_experts = {num_experts}, got {self.num_groups}; choose a divisor"
            )
        group = num_experts // self.num_groups
        if top_k > self.topk_group * group:
            raise InvalidInput(
                f"top_k must be at most topk_group * num_experts / num_groups = {self.topk_group * group}, "
                f"got {top_k}; keep more groups or lower top_k"
            )
        pairs = has_bias if self.group_score is None else self.group_score == "pair"
        if pairs and group == 1:
            when = "when a correction bias is given" if self.group_score is None else "with group_score='pair'"
            raise InvalidInput(
                f"num_groups must leave at least two experts per group {when}, got {self.num_groups} groups of 1; "
                "lower num_groups"
            )


@plan_type
@dataclass(frozen=True)
class RowLimit:
    """A bound on the experts in ids with many -1: at most per_token * T + per_expert * E, with T tokens and E experts.

    Memory and tiles follow it. Slots past it have no row and count as invalid ids. per_token: also the mean that tiles
    are chosen for. multiple: each expert has a multiple of this many rows, and tiles that divide it are preferred.
    """

    per_token: int
    per_expert: int = 0
    multiple: int = 1

    def __post_init__(self) -> None:
        for name, least in (("per_token", 1), ("per_expert", 0), ("multiple", 1)):
            set_integer(self, name, least, INT32_LIMIT)


@plan_type
@dataclass(frozen=True)
class TokenRounding:
    """Token rounding: the number of tokens of each expert becomes a multiple of `tile`. It changes the model.

    After top-K, an expert with n tokens keeps or gets n rounded to a multiple of tile: `nearest` (a half goes to the
    even multiple), `up` or `down`. It drops the tokens with the lowest weights, or adds tokens with the highest scores
    that did not choose it. If too few tokens qualify, it rounds down.

    Args:
        tile: a multiple of 16.
        candidates: an expert adds only tokens that rank it among their `candidates` best experts, the columns of the
            ids. None: 2 K, at most E (for `down` K).

    With candidates = E it is the token rounding of SonicMoE (Guo et al. 2025, arXiv 2512.14080). For training:
    validation and inference take plain top-K.
    """

    tile: int = 128
    mode: str = "nearest"
    candidates: int | None = None

    def __post_init__(self) -> None:
        set_integer(self, "tile", _ROWS_OF_TILES, INT32_LIMIT)
        if self.tile % _ROWS_OF_TILES:
            raise InvalidInput(
                f"tile must be a multiple of {_ROWS_OF_TILES}, as tiles of kernels are, got {self.tile}; pass 64, 128 "
                "or 192"
            )
        require_choice("mode", self.mode, ROUNDING_MODES)
        if self.candidates is not None:
            set_integer(self, "candidates", 1)
            if self.mode == "down":
                raise InvalidInput(
                    f"candidates must be None with mode='down', which adds no token, got {self.candidates}; leave it "
                    "out"
                )

    def width(self, top_k: int, num_experts: int) -> int:
        """W, the columns of the ids."""
        if self.candidates is None:
            return top_k if self.mode == "down" else min(2 * top_k, num_experts)
        if not top_k <= self.candidates <= num_experts:
            raise InvalidInput(
                f"candidates must be from top_k = {top_k} to num_experts = {num_experts}, got {self.candidates}; pass "
                "None for twice top_k"
            )
        return self.candidates

    def row_limit(self, top_k: int) -> RowLimit:
        """The most rows of all experts."""
        more = {"down": 0, "nearest": self.tile // 2, "up": self.tile - 1}[self.mode]
        return RowLimit(top_k, more, self.tile)

    def wide(self, spec: RouterSpec, num_experts: int, has_bias: bool) -> RouterSpec:
        """The rule of the W candidates. Raises InvalidInput and Unsupported for rules that cannot be rounded."""
        spec.validate_experts(num_experts, has_bias)
        width = self.width(spec.require_top_k(), num_experts)
        if spec.scale <= 0:
            raise InvalidInput(f"scale must be above 0 with token rounding, got {spec.scale}; leave it out")
        if spec.slot_order != "score":
            raise Unsupported(
                f"token rounding keeps slots by score, got slot_order={spec.slot_order!r}; leave slot_order out"
            )
        last = spec.order == "topk_then_softmax"
        if last and spec.num_groups > 1:
            raise Unsupported(
                "token rounding takes order='topk_then_softmax' without groups alone, got "
                f"num_groups={spec.num_groups}; use softmax_then_topk with renormalize=True"
            )
        bias_on = "logits" if last and has_bias else spec.bias_on
        order = None if spec.scoring != "softmax" else ORDERS[0]
        wide = dataclasses.replace(spec, top_k=width, order=order, renormalize=False, epsilon=0.0, bias_on=bias_on)
        wide.validate_experts(num_experts, has_bias)
        return wide


@plan_type
@dataclass(frozen=True)
class LayoutSpec:
    """Sizes of a ragged layout: rows grouped by expert, capacity static.

    Args:
        num_experts: local groups.
        alignment: every expert's rows start at a multiple of it (1 = contiguous).
        max_rows: rows of every expert (`[E, max_rows, D]`, the batched form), or None. Rows past it are dropped.
        rows: the most rows of all experts together, for ids with many -1, or None. Slots past it, in the order of rows,
            have no row, and the layout's `overflow` counts them.
        limit: the limit that made rows, or None.
    """

    num_tokens: int
    top_k: int
    num_experts: int
    alignment: int = 1
    max_rows: int | None = None
    rows: int | None = None
    limit: RowLimit | None = None

    def __post_init__(self) -> None:
        if self.limit is not None:
            most = self.num_tokens * self.limit.per_token + self.num_experts * self.limit.per_expert
            object.__setattr__(self, "rows", min(most, self.num_tokens * self.top_k))
        for name, least in (("num_tokens", 0), ("top_k", 1), ("num_experts", 1), ("alignment", 1)):
            set_integer(self, name, least, INT32_LIMIT)
        if self.max_rows is not None:
            set_integer(self, "max_rows", 1, INT32_LIMIT)
            if self.alignment != 1:
                raise InvalidInput(
                    f"alignment must be 1 when max_rows is given, got {self.alignment}; round max_rows up instead"
                )
        if self.rows is not None:
            set_integer(self, "rows", 0, INT32_LIMIT)
            if self.alignment != 1 or self.max_rows is not None:
                raise InvalidInput(
                    f"rows must be None unless alignment is 1 and max_rows None, got {self.rows}, {self.alignment} and "
                    f"{self.max_rows}; leave it out"
                )
        if self.num_slots >= INT32_LIMIT:
            raise InvalidInput(
                f"num_tokens * top_k must stay below 2**31, got {self.num_tokens} * {self.top_k}; split the batch"
            )
        if self.capacity >= INT32_LIMIT:
            name = "alignment" if self.max_rows is None else "max_rows"
            raise InvalidInput(
                f"{name} must leave fewer than 2**31 rows for {self.num_experts} experts, got "
                f"{getattr(self, name)}, which makes {self.capacity}; lower it"
            )

    @property
    def num_slots(self) -> int:
        return self.num_tokens * self.top_k

    @property
    def placed_slots(self) -> int:
        return self.num_slots if self.rows is None else min(self.num_slots, self.rows)

    @property
    def capacity(self) -> int:
        """Rows of the layout, an upper bound."""
        if self.max_rows is not None:
            return self.num_experts * self.max_rows
        if self.rows is not None:
            return self.placed_slots
        return self.num_slots + (self.num_experts * (self.alignment - 1) if self.num_slots else 0)

    def max_blocks(self, block_m: int) -> int:
        """The most row blocks of height block_m that any routing needs. The batched form (max_rows) has all of them.

        n nonempty experts sharing S slots need sum(ceil(size / block_m)) <= n + (S - n) // block_m blocks, and n <=
        min(E, S). Example: 10 slots, 4 experts, block_m 4: 4 + 6 // 4 = 5.
        """
        if self.max_rows is not None:
            return self.num_experts * -(-self.max_rows // block_m)
        nonempty = min(self.num_experts, self.placed_slots)
        return nonempty + (self.placed_slots - nonempty) // block_m
