"""The options of every op: frozen, hashable, checked when made, independent of any framework.

Letters: T tokens, K top-k, E experts, D d_model, F d_ff per expert (after gating). Slot `s = t * K + k`.
"""

from __future__ import annotations

from dataclasses import dataclass

from moe_core import dtypes
from moe_core.arrays import WEIGHT_LAYOUTS
from moe_core.checks import finite_float, require_at_least, require_choice, require_flag, require_kind
from moe_core.codec import plan_type
from moe_core.errors import InvalidInput
from moe_core.formats.format import Format
from moe_core.tile_table import TileTable
from moe_core.tuning import TileConfig

SCORINGS = ("softmax", "sigmoid", "sqrt_softplus")
ORDERS = ("softmax_then_topk", "topk_then_softmax")
SLOT_ORDERS = ("score", "expert")
ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu2", "swiglu_oai")
GATE_LAYOUTS = ("halves", "interleaved", "separate")
INT32_LIMIT = 2**31


def _require_tunable(table: object, batch_invariant: object) -> None:
    """Check the two options of every kind of tuning."""
    require_kind("table", table, TileTable, optional=True)
    require_flag("batch_invariant", batch_invariant)
    if batch_invariant and table is not None:
        raise InvalidInput(
            "table must be None with batch_invariant, which takes one configuration for every number of rows, got a "
            "TileTable; leave it out, or give the configurations themselves"
        )


@plan_type
@dataclass(frozen=True)
class MatmulTuning:
    """How the tile configuration of one grouped matmul is chosen.

    config: this one, None = chosen. table: looked up before the one that is shipped, and that before the heuristics.
    batch_invariant: choose without looking at the number of rows, so that a row's result does not depend on the others.
    """

    config: TileConfig | None = None
    table: TileTable | None = None
    batch_invariant: bool = False

    def __post_init__(self) -> None:
        require_kind("config", self.config, TileConfig, optional=True)
        _require_tunable(self.table, self.batch_invariant)


@plan_type
@dataclass(frozen=True)
class Tuning:
    """How the tile configurations of a whole forward are chosen.

    matmul_1, matmul_2: those of the experts' products, None = chosen. table: looked up before the one that is shipped.
    batch_invariant: one summation order for every number of tokens, so that a token's result is the same, bit by bit,
    alone, in any batch and in chunks of it; it costs speed (docs/tuning.md).
    """

    matmul_1: TileConfig | None = None
    matmul_2: TileConfig | None = None
    table: TileTable | None = None
    batch_invariant: bool = False

    def __post_init__(self) -> None:
        require_kind("matmul_1", self.matmul_1, TileConfig, optional=True)
        require_kind("matmul_2", self.matmul_2, TileConfig, optional=True)
        _require_tunable(self.table, self.batch_invariant)

    def of_product(self, number: int | None = None) -> MatmulTuning:
        """That of the experts' product 1 or 2; None: of the shared expert's products."""
        config = {1: self.matmul_1, 2: self.matmul_2, None: None}[number]
        return MatmulTuning(config, self.table, self.batch_invariant)


@plan_type
@dataclass(frozen=True)
class LogitsSpec:
    """Options of the router product `x [T, D] @ weight -> logits fp32 [T, E]`.

    weight_layout: `in_out` `[D, E]` or `out_in` `[E, D]`. logits_dtype: rounds the logits (which stay fp32 arrays).
    batch_invariant: one summation order for every T.
    """

    weight_layout: str = "in_out"
    logits_dtype: str = "float32"
    allow_tf32: bool = False
    batch_invariant: bool = False

    def __post_init__(self) -> None:
        require_choice("weight_layout", self.weight_layout, WEIGHT_LAYOUTS)
        require_flag("allow_tf32", self.allow_tf32)
        require_flag("batch_invariant", self.batch_invariant)
        object.__setattr__(self, "logits_dtype", dtypes.canonical(self.logits_dtype))
        require_choice("logits_dtype", self.logits_dtype, dtypes.MATMUL_DTYPES)


@plan_type
@dataclass(frozen=True)
class RouterSpec:
    """How logits `[T, E]` become ids and weights `[T, K]`.

    top_k: K; None = the layer's that is given this spec (ops need the number). scoring: `softmax`, `sigmoid` or
    `sqrt_softplus` (sqrt(log(1 + exp(x)))).
    order: for softmax, `softmax_then_topk` (the default) or `topk_then_softmax`; the others act per expert and take
    None. renormalize: divide by the sum of the chosen weights (a zero sum gives zeros). scale multiplies last.
    num_groups, topk_group: grouped top-k (1 and 1 = off): E splits into num_groups equal groups, the topk_group best
    survive. slot_order: `score` (descending selection score, ties to the lower id) or `expert` (ascending ids).
    """

    top_k: int | None = None
    scoring: str = "softmax"
    order: str | None = None
    renormalize: bool = False
    scale: float = 1.0
    num_groups: int = 1
    topk_group: int = 1
    slot_order: str = "score"

    def __post_init__(self) -> None:
        if self.top_k is not None:
            require_at_least("top_k", self.top_k, 1)
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
        require_flag("renormalize", self.renormalize)
        object.__setattr__(self, "scale", finite_float("scale", self.scale))
        require_at_least("num_groups", self.num_groups, 1)
        require_at_least("topk_group", self.topk_group, 1)
        if self.topk_group > self.num_groups:
            raise InvalidInput(
                f"topk_group must be at most num_groups = {self.num_groups}, got {self.topk_group}; lower it"
            )

    def require_top_k(self) -> int:
        """K; InvalidInput where it was left to a layer."""
        if self.top_k is None:
            raise InvalidInput(
                "top_k must be an integer of at least 1, got None (a layer's own); pass RouterSpec(top_k=...)"
            )
        return self.top_k

    def validate_experts(self, num_experts: int, has_bias: bool) -> None:
        """Check against E: K <= E, groups divide E and leave K experts, no groups of one with a correction bias."""
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
        if has_bias and group == 1:
            raise InvalidInput(
                f"num_groups must leave at least two experts per group when a correction bias is given, "
                f"got {self.num_groups} groups of 1; lower num_groups"
            )


@plan_type
@dataclass(frozen=True)
class Activation:
    """An activation in fp32. gated: `act(gate) * up`, input 2F wide; else `act(x)`, input F wide.

    gate_layout: `halves` (gate columns first), `interleaved` (gate even columns, up odd) or `separate` (two buffers);
    an ungated activation has none (the default counts as not stated). alpha and limit belong to swiglu_oai
    (always gated): `g = min(gate, limit); u = clamp(up, -limit, limit); g * sigmoid(alpha * g) * (u + 1)`;
    limit None = no clamp.
    """

    name: str
    gated: bool = True
    gate_layout: str | None = "halves"
    alpha: float = 1.702
    limit: float | None = 7.0

    def __post_init__(self) -> None:
        if self.name == "swigluoai":
            object.__setattr__(self, "name", "swiglu_oai")
        require_choice("activation", self.name, ACTIVATIONS)
        require_flag("gated", self.gated)
        if self.name == "swiglu_oai":
            if not self.gated:
                raise InvalidInput("gated must be True for swiglu_oai, got False; it has no ungated form")
            object.__setattr__(self, "alpha", finite_float("alpha", self.alpha))
            if self.limit is not None:
                object.__setattr__(self, "limit", finite_float("limit", self.limit))
                if self.limit <= 0:
                    raise InvalidInput(f"limit must be positive or None, got {self.limit}; pass None for no clamp")
        elif (self.alpha, self.limit) != (1.702, 7.0):
            raise InvalidInput(
                f"alpha and limit belong to swiglu_oai, got alpha={self.alpha}, limit={self.limit} for {self.name}; "
                "leave them out"
            )
        if self.gated:
            require_choice("gate_layout", self.gate_layout, GATE_LAYOUTS)
        elif self.gate_layout in ("halves", None):  # the default: not stated
            object.__setattr__(self, "gate_layout", None)
        else:
            raise InvalidInput(f"gate_layout must be None where gated=False, got {self.gate_layout!r}; leave it out")

    def input_width(self, width: int) -> int:
        """Columns of the matmul output that `width` activated columns need."""
        return 2 * width if self.gated else width


@plan_type
@dataclass(frozen=True)
class LayoutSpec:
    """Sizes of a ragged layout: rows grouped by expert, capacity static.

    num_experts: local groups. alignment: every expert's rows start at a multiple of it (1 = contiguous).
    max_rows: None, or the rows every expert owns (`[E, max_rows, D]`, the batched form); rows past it are dropped.
    """

    num_tokens: int
    top_k: int
    num_experts: int
    alignment: int = 1
    max_rows: int | None = None

    def __post_init__(self) -> None:
        require_at_least("num_tokens", self.num_tokens, 0)
        require_at_least("top_k", self.top_k, 1)
        require_at_least("num_experts", self.num_experts, 1)
        require_at_least("alignment", self.alignment, 1)
        if self.max_rows is not None:
            require_at_least("max_rows", self.max_rows, 1)
            if self.alignment != 1:
                raise InvalidInput(
                    f"alignment must be 1 when max_rows is given, got {self.alignment}; round max_rows up instead"
                )
        if max(self.num_slots, self.capacity) >= INT32_LIMIT:
            raise InvalidInput(
                f"num_tokens * top_k must stay below 2**31, got {self.num_tokens} * {self.top_k}; split the batch"
            )

    @property
    def num_slots(self) -> int:
        return self.num_tokens * self.top_k

    @property
    def capacity(self) -> int:
        """Rows of the layout: an upper bound for every routing."""
        if self.max_rows is not None:
            return self.num_experts * self.max_rows
        return self.num_slots + (self.num_experts * (self.alignment - 1) if self.num_slots else 0)

    def max_blocks(self, block_m: int) -> int:
        """Row blocks of height block_m that any routing can need: of the batched form (max_rows), all there are.

        n nonempty experts sharing S slots need sum(ceil(size / block_m)) <= n + (S - n) // block_m blocks, and n <=
        min(E, S). Example: 10 slots, 4 experts, block_m 4: 4 + 6 // 4 = 5.
        """
        if self.max_rows is not None:
            return self.num_experts * -(-self.max_rows // block_m)
        nonempty = min(self.num_experts, self.num_slots)
        return nonempty + (self.num_slots - nonempty) // block_m


@plan_type
@dataclass(frozen=True)
class MatmulSpec:
    """Options of one ragged grouped matmul, `y[row] = epilogue(x[row] @ w[expert of row])`.

    weight_layout: `in_out` `[E, D, N]` or `out_in` `[E, N, D]`.
    gather: which row of x feeds a layout row: `row` (x is in layout order), `token` (slot // K) or `slot`.
    scatter: where a layout row is written: `row` (layout order) or `slot`.
    activation: fused after the bias, or None. out_dtype: None = the dtype of x (which a quantised x does not name).
    allow_tf32: fp32 inputs may use TF32 (else IEEE fp32). tuning: how tiles are chosen, None = by the defaults.
    fast_accumulate: products of fp8 with fp8 may add up in the tensor cores over more than 128 columns.
    """

    weight_layout: str
    gather: str = "row"
    scatter: str = "row"
    activation: Activation | None = None
    out_dtype: str | None = None
    allow_tf32: bool = False
    tuning: MatmulTuning | None = None
    fast_accumulate: bool = False

    def __post_init__(self) -> None:
        require_choice("weight_layout", self.weight_layout, WEIGHT_LAYOUTS)
        require_kind("tuning", self.tuning, MatmulTuning, optional=True)
        require_flag("fast_accumulate", self.fast_accumulate)
        require_choice("gather", self.gather, ("row", "token", "slot"))
        require_choice("scatter", self.scatter, ("row", "slot"))
        require_kind("activation", self.activation, Activation, optional=True)
        require_flag("allow_tf32", self.allow_tf32)
        if self.out_dtype is not None:
            object.__setattr__(self, "out_dtype", dtypes.canonical(self.out_dtype))
            require_choice("out_dtype", self.out_dtype, dtypes.MATMUL_DTYPES)


@plan_type
@dataclass(frozen=True)
class MoESpec:
    """Options of one whole MoE forward.

    router: how logits become ids and weights; None when ids and weights are given. weight_layout of the experts;
    router_weight_layout of the router matrix (`in_out` `[D, E]` or `out_in` `[E, D]`).
    apply_router_weight_on_input: weight x (in fp32, cast back) before matmul 1 instead of the slots after matmul 2;
    K must be 1. out_dtype: None = the dtype of x. logits_dtype rounds the logits (then kept as fp32), to reproduce
    checkpoints whose router does. tuning: how tiles are chosen, None = by the defaults.

    Of quantised experts (docs/quantization.md). activations: the format that x and the hidden rows are quantised to
    before each product, None = as they are. fast_accumulate: see `MatmulSpec`; of fp8 activations.

    Of training (docs/training.md). recompute: the forward keeps no pre-activation, and the backward runs matmul 1 again
    for it, to the same bits. main_grad (torch only): the backward adds the gradients of the matrices of experts and
    shared expert, in fp32, to the tensors that these hold as their attribute `main_grad`, and returns none for them.
    """

    activation: Activation
    router: RouterSpec | None = None
    weight_layout: str = "in_out"
    router_weight_layout: str = "in_out"
    apply_router_weight_on_input: bool = False
    logits_dtype: str = "float32"
    out_dtype: str | None = None
    allow_tf32: bool = False
    tuning: Tuning | None = None
    recompute: bool = False
    main_grad: bool = False
    activations: Format | None = None
    fast_accumulate: bool = False

    def __post_init__(self) -> None:
        require_kind("activations", self.activations, Format, optional=True)
        require_flag("fast_accumulate", self.fast_accumulate)
        if self.fast_accumulate and (self.activations is None or self.activations.element != "e4m3"):
            raise InvalidInput(
                f"fast_accumulate must be False unless activations are fp8, got True with {self.activations}; it is "
                "about products of fp8 with fp8"
            )
        require_kind("tuning", self.tuning, Tuning, optional=True)
        require_flag("recompute", self.recompute)
        require_flag("main_grad", self.main_grad)
        require_choice("weight_layout", self.weight_layout, WEIGHT_LAYOUTS)
        require_choice("router_weight_layout", self.router_weight_layout, WEIGHT_LAYOUTS)
        require_kind("activation", self.activation, Activation)
        require_kind("router", self.router, RouterSpec, optional=True)
        require_flag("apply_router_weight_on_input", self.apply_router_weight_on_input)
        require_flag("allow_tf32", self.allow_tf32)
        object.__setattr__(self, "logits_dtype", dtypes.canonical(self.logits_dtype))
        require_choice("logits_dtype", self.logits_dtype, dtypes.MATMUL_DTYPES)
        if self.out_dtype is not None:
            object.__setattr__(self, "out_dtype", dtypes.canonical(self.out_dtype))
            require_choice("out_dtype", self.out_dtype, dtypes.MATMUL_DTYPES)
        if self.router is not None and self.router.require_top_k() != 1 and self.apply_router_weight_on_input:
            raise InvalidInput(
                f"top_k must be 1 with apply_router_weight_on_input, got {self.router.top_k}; weight the output instead"
            )

    @property
    def batch_invariant(self) -> bool:
        """Whether every sum has one order for every number of tokens."""
        return self.tuning is not None and self.tuning.batch_invariant

    def logits_spec(self) -> LogitsSpec:
        """The router product's options."""
        return LogitsSpec(self.router_weight_layout, self.logits_dtype, self.allow_tf32, self.batch_invariant)

    def matmul_tuning(self, number: int | None = None) -> MatmulTuning | None:
        """That of the experts' product 1 or 2, or (None) of the shared expert's products."""
        return None if self.tuning is None else self.tuning.of_product(number)
