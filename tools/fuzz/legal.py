"""Which cases there are: what the documents say is refused, or has no meaning, is none."""

from __future__ import annotations

import dataclasses
from typing import Any

from tools.fuzz.case import (
    ACTIVATION_FORMATS,
    ALWAYS_GATED,
    BOUNDS,
    EXCHANGE_FIELDS,
    EXPERT_TARGETS,
    ID_DTYPES,
    MODES,
    ROUTER_FIELDS,
    ROUTER_WEIGHT_DTYPES,
    TARGETS,
    VALUE_FIELDS,
    Case,
    has_any,
)


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
        "no adapters to share factors": case.shared_factors and not {*EXPERT_TARGETS} & {*case.targeted},
        "no adapters to have targets": case.adapters == 0 and case.targets != Case.targets,
        "adapters have no such target": case.adapters > 0 and _not_adapted(case),
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
    known = [name for name in TARGETS if name in case.targeted]
    wrong = [*case.targeted] != known or ("router" in known and case.source != "x")
    wrong |= not case.shared and case.apart and not case.between
    wrong |= (
        case.kind not in ("moe", "layer")
        or case.packs > 1
        or case.main_grad
        or (case.kind == "layer" and case.stack > 0)
    )
    of_experts = any(name in EXPERT_TARGETS for name in known)
    return wrong or (
        of_experts and bool(case.activations or case.stack or case.prepacked or case.out_norm == "experts")
    )


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
