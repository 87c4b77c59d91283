"""One fuzzed case: every choice that makes it, as a line of text that makes it again."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

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
    a layer and is trained with all else, several are chosen by ids and trained alone. shared_factors: by all experts.
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
    def is_differentiable(self) -> bool:
        undifferentiable = self.activations or self.prepacked or self.row_order or self.kind in ("layout", "exchange")
        return not undifferentiable and (self.kind != "stages" or not self.on_input)


def has_any(case: Case, names: list[str]) -> bool:
    """Whether a case differs from the simplest one in a field of these names; True without names."""
    return not names or any(getattr(case, name) != getattr(Case, name) for name in names)


def parse(text: str) -> Case:
    """The case that `str` printed. Raises ValueError for a field or value that no case has."""
    fields = {field.name: field.default for field in dataclasses.fields(Case)}
    given: dict[str, Any] = {}
    for pair in text.split():
        name, _, value = pair.partition("=")
        if name not in fields:
            raise ValueError(f"a case has no field {name!r}; it has {', '.join(fields)}")
        kind = type(fields[name])
        given[name] = value == "True" if kind is bool else kind(value)
    case = Case(**given)
    reason = why_illegal(case)
    if reason is not None:
        raise ValueError(f"{case}: {reason}")
    return case


def why_illegal(case: Case) -> str | None:
    """Why no such case exists, None where it does: what the documents say is refused, or has no meaning here."""
    experts = case.num_ids if case.kind in ("moe", "layout") and case.source == "ids" and case.packs == 1 else case.E
    experts = case.mapped or experts
    routes = case.source != "ids" or case.kind in ("layer", "route")
    group = experts // max(case.num_groups, 1)
    checks = {
        "K must be at most E": experts < case.K,
        "sizes must be positive": min(case.K, case.E, case.D, case.F, case.packs) < 1 or case.T < 0,
        "an order is softmax's": bool(case.order) and case.scoring != "softmax",
        "groups divide E": experts % case.num_groups != 0 or case.topk_group > case.num_groups,
        "groups leave K experts": case.topk_group * group < case.K,
        "groups of one have no pairs": case.num_groups > 1 and group == 1 and _pairs(case),
        "an epsilon is for sums of scores": case.epsilon != 0 and (not case.renormalize or case.scoring == "softmax"),
        "nothing is added to logits": case.bias_on != "scores" and not case.correction_bias,
        "on_input needs K = 1": case.on_input and case.K != 1,
        "a gated activation": case.activation in ALWAYS_GATED and not case.gated,
        "no gate layout without a gate": not case.gated and case.gate_layout != "halves",
        "no limit without a gate": not case.gated and case.limit != 0,
        "no alpha": case.alpha != 0 and case.activation not in ("swiglu_oai", "softcapped_silu"),
        "a map has room for E": 0 < case.mapped < case.E,
        "a map is of moe and layout": case.mapped > 0 and case.kind not in ("moe", "layout"),
        "a layer routes from x": case.kind in ("layer", "stages") and case.source != "x",
        "a norm routes nothing": case.kind == "norm" and case.source != "ids",
        "route takes logits or ids": case.kind == "route" and case.source == "x",
        "only layers have losses": case.kind != "layer" and (case.balance != 0 or case.z != 0 or case.capacity != 0),
        "packs are of moe with ids or logits": case.packs > 1
        and (case.kind != "moe" or case.source == "x" or case.mapped > 0 or case.correction_bias or case.stack > 0),
        "only layers have these": case.kind != "layer" and (case.expert_scale or case.gate_inputs or case.given_ids),
        "a norm is of layers or alone": case.router_norm != 0 and case.kind not in ("layer", "norm"),
        "a norm has a factor": case.router_norm == 0 and case.kind == "norm",
        "no norm": not (case.router_norm or case.latent_norm or case.out_norm)
        and (case.norm_epsilon, case.centred, case.weight_first) != (1e-6, False, False),
        "only layers have something around": case.kind != "layer" and (case.between or _around(case)),
        "a latent norm is of latent rows": case.latent_norm and not case.latent,
        "nothing weighs what is between": case.between and (case.on_input or case.main_grad),
        "a norm of each result": case.out_norm == "experts" and (case.recompute or bool(case.activations)),
        "int64 ids are given ones": case.ids_dtype != "int32"
        and (case.kind not in ("moe", "layout") or case.source != "ids" or case.ids_dtype not in ID_DTYPES),
        "16-bit weights are given ones": case.router_weight_dtype != "float32"
        and (
            (case.kind, case.source, case.dtype == "float64") != ("moe", "ids", False)
            or case.router_weight_dtype not in ROUTER_WEIGHT_DTYPES
        ),
        "ids come from one place": case.given_ids and case.table > 0,
        "a mixer chooses two by logits alone": case.mixer != 0
        and any((case.K != 2, _has_rules(case), case.correction_bias, case.capacity, case.given_ids, case.table)),
        "TF32 is of plain float32": case.tf32
        and (case.dtype != "float32" or bool(case.weights) or case.kind not in ("moe", "layer", "stages")),
        "main_grad is of trained matrices": case.main_grad
        and (not case.gradient or case.kind not in ("moe", "layer") or bool(case.weights)),
        "main_grad is float32, and of one problem": case.main_grad and (case.dtype == "float64" or case.packs > 1),
        "static scales are of tensors": case.static_scales
        and (case.kind != "moe" or not case.activations.startswith("fp8_tensor")),
        "prepacked": case.prepacked and not is_prepackable(case),
        "the order of rows is that of stages": case.row_order and case.kind != "stages",
        "no experts in a norm": case.kind == "norm"
        and (case.F, case.K, case.E, case.bias, case.masked) != (1, 1, 1, False, False),
        "a stack is of moe and layers": case.stack > 0 and case.kind not in ("moe", "layer"),
        "nothing to gate": case.shared == 0 and (case.shared_gate or bool(case.shared_activation)),
        "no shared expert here": case.shared > 0 and case.kind not in ("moe", "layer", "exchange"),
        "the shared expert is gated alike": case.shared_activation in ALWAYS_GATED and not case.gated,
        "no such gradient": case.gradient and not case.is_differentiable,
        "recompute is of training": case.recompute and (not case.gradient or case.kind not in ("moe", "layer")),
        "batch_invariant and capacity": case.batch_invariant and case.capacity != 0,
        "one scale for all rows varies with the batch": case.activations.startswith("fp8_tensor")
        and not case.static_scales
        and (case.batch_invariant or case.packs > 1),
        "batch_invariant is of moe and layer": case.batch_invariant and case.kind not in ("moe", "layer"),
        "float64 is plain": case.dtype == "float64" and bool(case.weights or case.out_dtype),
        "float64 logits are float64": case.dtype == "float64" and case.logits_dtype != "float32",
        "formats are of experts": bool(case.weights) and case.kind not in ("moe", "layer"),
        "activations go with weights": bool(case.activations)
        and case.activations not in ACTIVATION_FORMATS.get(case.weights, ()),
        "a layer's out_dtype is that of x": bool(case.out_dtype) and case.kind not in ("moe", "exchange"),
        "rules belong to a router": not routes and _has_rules(case),
        "biases belong to a router": (case.router_bias and case.source != "x")
        or (case.correction_bias and case.source == "ids"),
        "logits are computed from x": case.logits_dtype != "float32" and (case.source != "x" or case.kind == "stages"),
        "no layout": (case.alignment != 1 or case.max_rows != 0) and case.kind not in ("layout", "stages"),
        "one form of layout": case.alignment != 1 and case.max_rows != 0,
        "no experts in these": case.kind in ("route", "layout") and (case.bias or case.D != 1 or case.F != 1),
        "masked float64": case.kind == "layout" and case.dtype != "float32",
        "distinct ids for route": case.kind == "route" and case.source == "ids" and case.num_groups > 1,
        "token rounding": _not_rounded(case) is not None,
        "no adapters to share factors": case.shared_factors and case.adapters == 0,
        "adapters are of experts in one op": case.adapters > 0 and _not_adapted(case),
        "exchanges alone have these": case.kind != "exchange" and has_any(case, [*EXCHANGE_FIELDS]),
    }
    if case.kind == "exchange":
        checks |= _exchange_checks(case)
    return next((reason for reason, wrong in checks.items() if wrong), why_no_groups(case))


def _exchange_checks(case: Case) -> dict[str, bool]:
    peer, direct = case.mode == "peer", case.mode == "direct"
    own = ("kind", "T", "K", "E", "dtype", *VALUE_FIELDS, *EXCHANGE_FIELDS)
    own += ("D",) if peer or direct else ()
    own += ("shared", "shared_gate", "out_dtype") if direct else ()
    own += () if peer else ("masked",)
    others = [field.name for field in dataclasses.fields(Case) if field.name not in own]
    return {
        "an exchange has a mode": case.mode not in MODES,
        "an exchange has ranks and no more": case.ranks < 1 or case.spare < 0 or has_any(case, others),
        "peers store no float64": case.dtype == "float64",
        "all-gathers send tokens": case.mode == "all_gather" and not case.by_token,
        "peers store to places": peer and case.replicas,
        "formats are of the mode peer": not peer and bool(case.rows_format),
        "rows are of peers": not (peer or direct) and bool(case.programs or case.dtype != "float32"),
        "an unknown bound": case.bound not in BOUNDS,
    }


def _not_rounded(case: Case) -> str | None:
    """Why a case cannot have its token rounding, None where it can, or has none."""
    if not case.tile:
        return "nothing is rounded" if case.rounding or case.candidates else None
    plain = (layer := case.kind == "layer") or (case.kind, case.source) == ("route", "logits")
    no = "given_ids table mixer on_input batch_invariant capacity activations between" if layer else "correction_bias"
    plain = plain and not any(getattr(case, name) for name in no.split())
    groups = layer and not case.order and case.choices <= case.topk_group * case.E // case.num_groups
    rule = case.slot_order == "score" and case.scale > 0 and (groups or case.num_groups == 1)
    columns = not case.candidates or (case.rounding != "down" and case.K <= case.candidates <= case.E)
    fits = case.tile % 16 == 0 and case.T not in range(1, case.tile) and bool(case.rounding)
    return None if plain and rule and columns and fits else "not what rounding takes"


def _not_adapted(case: Case) -> bool:
    apart = any(getattr(case, name) for name in ("activations", "stack", "prepacked", "main_grad"))
    return case.kind not in ("moe", "layer") or case.packs > 1 or case.out_norm == "experts" or apart


def _has_rules(case: Case) -> bool:
    return any(getattr(case, name) != getattr(Case, name) for name in ROUTER_FIELDS)


def _around(case: Case) -> bool:
    """Whether a layer has something before its experts or behind their sum."""
    return bool(case.out_norm or case.out_scale != 1 or case.out_bias or case.table or case.mixer)


def is_prepackable(case: Case) -> bool:
    """What kernels of prepacked weights take."""
    packed = case.weights.startswith(("mxfp4", "int4", "int8")) and not case.activations
    sizes = case.D % 32 == 0 and case.F % 32 == 0 and case.weight_layout == "out_in" and case.gate_layout != "separate"
    return packed and sizes and (case.kind, case.dtype) == ("moe", "bfloat16")


def _pairs(case: Case) -> bool:
    return case.group_score == "pair" or (case.correction_bias and not case.group_score)


def unit_of(format: str) -> int:
    """What the widths of a format's matrices are multiples of."""
    if format.startswith("mx"):
        return 32
    if "_g" in format and not format.startswith("fp8"):
        return int(format.split("_g")[1].split("_")[0])
    return 2 if format.startswith("int4") else 1


def why_no_groups(case: Case) -> str | None:
    """Why a format cannot hold matrices of these widths."""
    for format in filter(None, (case.weights, case.activations)):
        if case.inner % unit_of(format) or case.F % unit_of(format):
            return f"{format} needs widths that are multiples of {unit_of(format)}"
    return None
