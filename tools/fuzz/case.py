"""One fuzzed case: every choice that makes it, as a line of text that makes it again."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

KINDS = ("moe", "layer", "route", "layout", "stages", "norm", "exchange")
DTYPES = ("float32", "bfloat16", "float16", "float64")
ID_DTYPES, ROUTER_WEIGHT_DTYPES = ("int32", "int64"), ("float32", "bfloat16", "float16")
#: What x holds; drawn anew for every set of values, as the kinds of logits and ids are.
X_KINDS = ("normal", "nan", "inf", "zeros", "large", "tiny", "one_hot")
LOGIT_KINDS = ("normal", "ties", "all_equal", "signed_zeros", "some_nan", "infinite", "spread")
ID_KINDS = ("distinct", "duplicates", "missing", "invalid", "one_expert", "all_missing", "first_half")
#: How rows travel between ranks, the bounds of the rows that one takes, and fields of exchanges alone.
MODES = ("peer", "direct", "all_to_all", "padded", "all_gather")
BOUNDS = ("", "0", "1", "less", "all")
EXCHANGE_FIELDS = ("ranks", "spare", "mode", "by_token", "replicas", "bound", "programs", "rows_format")
#: What adapters are of.
EXPERT_TARGETS = ("gate_up", "down")
TARGETS = (*EXPERT_TARGETS, "router", "shared_gate_up", "shared_down")
#: Fields that change values only: cases that agree in all others run the same kernels.
VALUE_FIELDS = ("seed", "x_kind", "logit_kind", "id_kind")
#: Formats of activations, by format of weights, where a product quantises both sides.
ACTIVATION_FORMATS = {
    "fp8_block": ("fp8_group", "fp8_token"),
    "fp8_block_pow2": ("fp8_group_pow2",),
    "fp8_channel": ("fp8_token", "fp8_tensor"),
    "fp8_channel_pow2": ("fp8_token_pow2",),
    "fp8_tensor": ("fp8_tensor", "fp8_token"),
    "fp8_tensor_pow2": ("fp8_tensor_pow2",),
    "int8_channel": ("int8_token",),
    "mxfp4": ("mxfp8", "mxfp4"),
    "mxfp8": ("mxfp8",),
}
WEIGHT_FORMATS = (
    *(f"fp8_{group}{rule}" for group in ("block", "channel", "tensor") for rule in ("", "_pow2")),
    *(f"int{n}_{group}{zp}" for n in (8, 4) for group in ("g32", "g64", "g128", "row") for zp in ("", "_zp")),
    *("int8_channel", "mxfp4", "mxfp4_ceil", "mxfp8", "mxfp8_ceil"),
)
#: Rules of routing beside top_k and biases.
ROUTER_FIELDS = (
    *("scoring", "order", "renormalize", "scale", "num_groups", "topk_group", "slot_order"),
    *("epsilon", "logit_scale", "softcap", "bias_on", "group_score"),
)
ALWAYS_GATED = ("swiglu_oai", "clamped_silu", "softcapped_silu")


@dataclass(frozen=True)
class Case:
    """The defaults are the simplest choices: a failing case is shrunk towards them.

    kind: `moe` (the composed op), `layer` (torch's and Flax's), `route`, `layout` (with the bitmatrix), `stages`
    (router, matmul_ogs, activation, matmul_ogs, reduce one by one), `norm` or `exchange` (between ranks). T K E D F:
    tokens, choices, local experts, widths. ids_dtype, router_weight_dtype: of given ids and their weights. gate_inputs,
    given_ids: of a layer. row_order: rows, not slots, are what stages reduce. packs: so many independent problems of T
    tokens and E experts each in one call. source: what routes, `ids`, `logits` or `x`. mapped: number of global
    experts, 0 = no map. stack: number of stacked layers, 0 = none. shared: width of the shared expert, 0 = none. alpha,
    limit: 0 = the default. weights, activations: formats, "" = plain. balance, z: factors of the losses in the
    objective of a layer's gradient. router_norm: the norm's constant factor, 0 = no norm. norm_epsilon, centred,
    weight_first: of every norm. latent: width between projections, 0 = none. out_norm: `sum`, `experts` or none. table:
    rows of a token table. mixer: SparseMixer's epsilon, 0 = none. static_scales: activations have a scale each that the
    caller gives. alignment, max_rows: of a layout. Of an exchange ranks: how many; spare: places of each beyond ceil(E
    / ranks), with replicas: of experts that are elsewhere; mode: how rows travel, `peer` and `direct`, where each token
    has its place, by stores and loads, else the tables that they go by; by_token: a token goes to a rank once; bound:
    of the rows that a rank takes, one less than there are or all, "" = none; programs: of a launch, 0 = as many as
    wanted; rows_format: of rows that travel; D: their width, in pieces of 16 bytes. tile: of token rounding, 0 = none;
    rounding: its mode; candidates: 0 = the default. adapters: slots of LoRA factors, 0 = none: one serves all tokens of
    a layer and is trained with all else, several are chosen by ids and trained alone. targets: of them, divided by
    commas. shared_factors: by all experts.
    """

    kind: str = "moe"
    T: int = 1
    K: int = 1
    E: int = 1
    D: int = 1
    F: int = 1
    packs: int = 1
    dtype: str = "float32"
    out_dtype: str = ""
    source: str = "ids"
    ids_dtype: str = "int32"
    router_weight_dtype: str = "float32"
    scoring: str = "softmax"
    order: str = ""
    renormalize: bool = False
    scale: float = 1.0
    num_groups: int = 1
    topk_group: int = 1
    slot_order: str = "score"
    epsilon: float = 0.0
    logit_scale: float = 1.0
    softcap: float = 0.0
    bias_on: str = "scores"
    group_score: str = ""
    router_bias: bool = False
    correction_bias: bool = False
    router_norm: float = 0.0
    norm_epsilon: float = 1e-6
    centred: bool = False
    weight_first: bool = False
    latent: int = 0
    latent_norm: bool = False
    out_norm: str = ""
    out_scale: float = 1.0
    out_bias: bool = False
    table: int = 0
    mixer: float = 0.0
    gate_inputs: bool = False
    given_ids: bool = False
    row_order: bool = False
    expert_scale: bool = False
    logits_dtype: str = "float32"
    on_input: bool = False
    activation: str = "silu"
    gated: bool = True
    gate_layout: str = "halves"
    alpha: float = 0.0
    limit: float = 0.0
    weight_layout: str = "in_out"
    router_layout: str = "in_out"
    bias: bool = False
    masked: bool = False
    mapped: int = 0
    stack: int = 0
    shared: int = 0
    shared_gate: bool = False
    shared_activation: str = ""
    capacity: float = 0.0
    weights: str = ""
    activations: str = ""
    static_scales: bool = False
    prepacked: bool = False
    tf32: bool = False
    main_grad: bool = False
    gradient: bool = False
    recompute: bool = False
    batch_invariant: bool = False
    balance: float = 0.0
    z: float = 0.0
    alignment: int = 1
    max_rows: int = 0
    ranks: int = 1
    spare: int = 0
    mode: str = ""
    by_token: bool = False
    replicas: bool = False
    bound: str = ""
    programs: int = 0
    rows_format: str = ""
    tile: int = 0
    rounding: str = ""
    candidates: int = 0
    adapters: int = 0
    targets: str = ",".join(EXPERT_TARGETS)
    shared_factors: bool = False
    x_kind: str = "normal"
    logit_kind: str = "normal"
    id_kind: str = "distinct"
    seed: int = 0

    def __str__(self) -> str:
        stated = ((field.name, getattr(self, field.name), field.default) for field in dataclasses.fields(self))
        return " ".join(f"{name}={value}" for name, value, default in stated if value != default) or "seed=0"

    @property
    def static(self) -> Case:
        """The same choices without the values."""
        plain = {field.name: field.default for field in dataclasses.fields(self) if field.name in VALUE_FIELDS}
        return dataclasses.replace(self, **plain)

    @property
    def num_tokens(self) -> int:
        return self.T * self.packs

    @property
    def num_ids(self) -> int:
        """Experts that ids name: the global ones where there is a map, and with mode `peer` all places."""
        if self.mode == "peer":
            return self.ranks * self.per_rank
        return self.mapped or self.E * self.packs

    @property
    def per_rank(self) -> int:
        """Places of a rank."""
        return -(-self.E // self.ranks) + self.spare

    @property
    def width(self) -> int:
        """Columns of what product 1 makes, gate and up together."""
        return 2 * self.F if self.gated else self.F

    @property
    def inner(self) -> int:
        """Columns of the rows that experts take and give."""
        return self.latent or self.D

    @property
    def choices(self) -> int:
        """Columns of ids and weights: K, or those of token rounding."""
        if not self.tile or self.rounding == "down":
            return self.K
        return self.candidates or min(2 * self.K, self.E)

    @property
    def between(self) -> bool:
        """Whether a layer has something between its experts and what is before or behind them."""
        return self.latent > 0 or self.out_norm == "experts"

    @property
    def targeted(self) -> tuple[str, ...]:
        return tuple(self.targets.split(",")) if self.adapters else ()

    @property
    def beyond(self) -> bool:
        """Whether adapters are of more than experts."""
        return not {*self.targeted} <= {*EXPERT_TARGETS}

    @property
    def apart(self) -> bool:
        """Whether experts and shared experts run one by one."""
        return self.between or not {"shared_gate_up", "shared_down"}.isdisjoint(self.targeted)

    @property
    def is_differentiable(self) -> bool:
        undifferentiable = self.activations or self.prepacked or self.row_order or self.kind in ("layout", "exchange")
        return not undifferentiable and (self.kind != "stages" or not self.on_input)


def has_any(case: Case, names: list[str]) -> bool:
    """Whether a case differs from the simplest one in a field of these names; True without names."""
    return not names or any(getattr(case, name) != getattr(Case, name) for name in names)
