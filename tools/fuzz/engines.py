"""Runs a case: translates it into the specs of the packages, and calls torch's and JAX's front-end on one engine."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

import moe_torch
from moe_core.formats import QuantizedSpec, QuantizedTensor, Scheme, format_named
from moe_core.layers import ExpertsSpec, LayerWeights, LoRA, MoELayerSpec, SharedExpertsSpec, Storage
from moe_core.layers.around import LatentSpec, OutputSpec
from moe_core.runtime.cuda import cuda_available
from moe_core.specs import Activation, MatmulSpec, MoESpec, RouterSpec
from moe_core.specs.norm import NormSpec
from moe_core.specs.operands import ExpertWeights, LoRAFactors, RouterLogits, RouterWeights, SharedExpert, TopK
from moe_core.specs.routing import LogitsSpec, TokenRounding
from moe_core.specs.tuning import Tuning
from tools.fuzz.case import ROUTER_FIELDS, Case
from tools.fuzz.data import Arrays, is_parameter

Results = dict[str, torch.Tensor]


def engines() -> tuple[str, ...]:
    """The engines of this process: `TRITON_INTERPRET` decides between the GPU and the interpreter."""
    interpreted = os.environ.get("TRITON_INTERPRET", "0") == "1"
    if interpreted:
        return ("reference", "interpreter")
    return ("reference", "cuda") if cuda_available() else ("reference",)


def device_of(engine: str) -> str:
    return "cuda" if engine == "cuda" else "cpu"


@contextlib.contextmanager
def running_on(engine: str) -> Iterator[None]:
    if engine == "cuda":
        yield
    else:
        with moe_torch.cpu_engine(engine):
            yield


def router_spec(case: Case) -> RouterSpec:
    options: dict[str, Any] = {name: getattr(case, name) for name in ROUTER_FIELDS}
    for name in ("order", "softcap", "group_score"):
        options[name] = options[name] or None
    return RouterSpec(case.K, **options)


def activation_spec(case: Case, name: str = "") -> Activation:
    options: dict[str, Any] = {"gate_layout": case.gate_layout} if case.gated else {}
    if not name:
        options |= {field: getattr(case, field) for field in ("alpha", "limit") if getattr(case, field)}
    return Activation(name or case.activation, case.gated, **options)


def norm_spec(case: Case, scale: float = 1.0) -> NormSpec:
    return NormSpec(case.norm_epsilon, scale, case.centred, case.weight_first)


def token_rounding(case: Case) -> TokenRounding:
    return TokenRounding(case.tile, case.rounding, case.candidates or None)


def moe_spec(case: Case) -> MoESpec:
    return MoESpec(
        activation_spec(case),
        None if case.source == "ids" else router_spec(case),
        weight_layout=case.weight_layout,
        router_weight_layout=case.router_layout,
        apply_router_weight_on_input=case.on_input,
        logits_dtype=case.logits_dtype,
        allow_tf32=case.tf32,
        main_grad=case.main_grad,
        out_dtype=case.out_dtype or None,
        tuning=Tuning(batch_invariant=True) if case.batch_invariant else None,
        recompute=case.recompute,
        activations=format_named(case.activations) if case.activations else None,
        shared_activation=activation_spec(case, case.shared_activation) if case.shared_activation else None,
    )


def layer_spec(case: Case) -> MoELayerSpec:
    scheme = None
    if case.weights:
        activations = format_named(case.activations) if case.activations else None
        scheme = Scheme(f"fuzz_{case.weights}_{case.activations}", format_named(case.weights), activations)
    activation = activation_spec(case)
    if case.gated:
        activation = dataclasses.replace(activation, gate_layout="halves")
    layout = case.gate_layout if case.gated else None
    shared = None
    if case.shared:
        plain = dataclasses.replace(case, gate_layout="halves")
        other = activation_spec(plain, case.shared_activation) if case.shared_activation else None
        shared = SharedExpertsSpec(case.shared, case.shared_gate, other)
    output = None
    if case.out_norm or case.out_scale != 1 or case.out_bias:
        norm = norm_spec(case) if case.out_norm else None
        output = OutputSpec(norm, case.out_norm or "sum", case.out_scale, case.out_bias)
    return MoELayerSpec(
        case.D,
        case.F,
        case.E,
        case.K,
        router_spec(case),
        ExpertsSpec(activation, case.bias, case.weight_layout, layout, scheme),
        shared,
        router_bias=case.router_bias,
        correction_bias=case.correction_bias,
        router_norm=norm_spec(case, case.router_norm) if case.router_norm else None,
        expert_scale=case.expert_scale,
        apply_router_weight_on_input=case.on_input,
        logits_dtype=case.logits_dtype,
        allow_tf32=case.tf32,
        main_grad=case.main_grad,
        output=output,
        latent=LatentSpec(case.latent, norm_spec(case) if case.latent_norm else None) if case.latent else None,
        token_table=case.table,
        sparse_mixer=case.mixer or None,
        capacity_factor=case.capacity or None,
        tuning=Tuning(batch_invariant=True) if case.batch_invariant else None,
        recompute=case.recompute,
        token_rounding=token_rounding(case) if case.tile else None,
    )


def lora_of(case: Case) -> LoRA | None:
    """The options of a layer's adapters."""
    options: dict[str, Any] = {"slots": case.adapters, "targets": case.targeted, "shared": case.shared_factors}
    return LoRA(3, max_rank=16, **options) if case.adapters else None


def storage_of(case: Case) -> Storage:
    return Storage(case.weight_layout, case.gate_layout, case.router_layout)


class Bundles:
    """The ops' bundles from a case's arrays of either framework, looked up by name."""

    def __init__(self, case: Case, arrays: Mapping[str, Any]) -> None:
        self.case, self.arrays = case, arrays

    def fields(self, prefix: str) -> dict[str, Any]:
        found: dict[str, Any] = {}
        parts: dict[str, dict[str, Any]] = {}
        for name, array in self.arrays.items():
            if name.startswith(prefix):
                field, _, part = name.removeprefix(prefix).partition(".")
                if part:
                    parts.setdefault(field, {})[part] = array
                else:
                    found[field] = array
        for field, own in parts.items():
            spec = QuantizedSpec(format_named(self.case.weights), self.case.weight_layout)
            found[field] = QuantizedTensor.unchecked(spec, own["values"], own["scales"], own.get("zero_points"))
        return found

    def experts(self) -> ExpertWeights:
        return ExpertWeights(**self.fields("experts."))

    def shared(self) -> SharedExpert | None:
        fields = self.fields("shared.")
        return SharedExpert(**fields) if fields else None

    def routing(self) -> RouterWeights | RouterLogits | TopK:
        bias = self.arrays.get("correction_bias")
        if self.case.source == "x":
            return RouterWeights(self.arrays["routing.weight"], self.arrays.get("routing.bias"), bias)
        if self.case.source == "logits":
            return RouterLogits(self.arrays["logits"], bias)
        return TopK(self.arrays["ids"], self.arrays["weights"])

    def mask(self) -> dict[str, Any]:
        return {"token_mask": self.arrays.get("token_mask")}


def call_arrays(arrays: Arrays) -> dict[str, torch.Tensor]:
    """Every array that a call takes, quantised matrices by their parts."""
    found = {name: array for name, array in arrays.plain.items() if name not in arrays.quantized}
    for name, quantized in arrays.quantized.items():
        parts = quantized._asdict().items()
        found |= {f"{name}.{part}": array for part, array in parts if array is not None}
    return found


_TRAINED = ("x", "gate_inputs", "logits", "weights")


def trained(case: Case, names: Mapping[str, Any]) -> list[str]:
    """The names of the arrays with a gradient, in order: all floats that are no format's, no bias of a selection and no
    incoming gradient."""
    if case.kind in ("route", "norm"):
        return ["logits"] if case.kind == "route" else ["x", "weight"]
    no = ("correction_bias", "experts.layer_index", "routing.table", "lora.scale", "lora.ranks")
    plain = (name for name in names if is_trained(case, name))
    return [name for name in plain if name not in no and not name.endswith((".values", ".scales", ".zero_points"))]


def is_trained(case: Case, name: str) -> bool:
    """Whether an array may have a gradient: beside several adapters all other parameters are frozen."""
    frozen = case.adapters > 1 and is_parameter(name) and not name.startswith("lora.")
    return not frozen and (name in _TRAINED or is_parameter(name))


def run_moe(case: Case, ops: Any, arrays: Mapping[str, Any]) -> dict[str, Any]:
    bundles = Bundles(case, arrays)
    spec, extras = moe_spec(case), {"expert_map": arrays.get("expert_map"), "shared": bundles.shared()}
    if case.adapters:
        extras |= {"lora": LoRAFactors(**bundles.fields("lora.")), "adapter_ids": arrays["adapter_ids"]}
    experts = bundles.experts()
    if case.prepacked:
        experts = ops.prepack_weights(experts, spec)
    if case.packs > 1 and case.source == "logits":
        routed = ops.route(arrays["logits"], router_spec(case), token_mask=arrays.get("token_mask"))
        first = arrays["pack_start"]
        ids = routed.ids + first * (routed.ids >= 0)
        spec = dataclasses.replace(spec, router=None)
        out = ops.moe(arrays["x"], experts, TopK(ids, routed.weights), spec, **extras)
        return {"output": out.output, "ids": routed.ids, "weights": routed.weights} | _counts(out)
    out = ops.moe(arrays["x"], experts, bundles.routing(), spec, **bundles.mask(), **extras)
    found = {"output": out.output} | _counts(out)
    if case.source != "ids":
        found |= {"ids": out.ids, "weights": out.weights, "logits": out.logits}
    return found


def _counts(out: Any) -> dict[str, Any]:
    return {"tokens_per_expert": out.tokens_per_expert, "invalid_ids": out.invalid_ids}


def run_route(case: Case, ops: Any, arrays: Mapping[str, Any]) -> dict[str, Any]:
    options = {name: arrays.get(name) for name in ("correction_bias", "token_mask", "ids")}
    if case.tile:
        found = ops.route_rounded(
            arrays["logits"], router_spec(case), token_rounding(case), token_mask=options["token_mask"]
        )
        return {"ids": found.ids, "weights": found.weights, "tokens_per_expert": found.tokens_per_expert}
    found = ops.route(arrays["logits"], router_spec(case), **options)
    return {"ids": found.ids, "weights": found.weights}


def routed_ids(case: Case, ops: Any, arrays: Mapping[str, Any], logits: Any) -> Any:
    """The ids of a layer before its capacity or its token rounding drops some: the same op on the same logits."""
    rule = router_spec(case)
    if case.tile:
        rule = token_rounding(case).wide(rule, case.E, case.correction_bias)
    options = {name: arrays.get(name) for name in ("token_mask", "ids" if case.given_ids else "correction_bias")}
    return ops.route(logits, rule, **options).ids


def run_layout(case: Case, ops: Any, arrays: Mapping[str, Any]) -> dict[str, Any]:
    ids, E = arrays["ids"], case.E
    options: dict[str, Any] = {"expert_map": arrays.get("expert_map"), "token_mask": arrays.get("token_mask")}
    options |= {"alignment": case.alignment, "max_rows": case.max_rows or None}
    layout = ops.make_layout(ids, E, **options)
    names = ("group_sizes", "group_start", "slot_of_row", "row_of_slot", "invalid_ids")
    found = {name: getattr(layout, name) for name in names}
    if case.ids_dtype != "int32":  # which bitmatrices take alone
        return found
    packed = ops.pack_bitmatrix(ids, case.num_ids)
    return found | {"bitmatrix": packed, "unpacked": ops.unpack_bitmatrix(packed, case.num_ids, case.K)}


def run_stages(case: Case, ops: Any, arrays: Mapping[str, Any]) -> dict[str, Any]:
    """The layer out of its stage ops, with rows in expert order between the products."""
    bundles = Bundles(case, arrays)
    experts, activation = bundles.experts(), activation_spec(case)
    logits = ops.router(arrays["x"], arrays["routing.weight"], bias=arrays.get("routing.bias"), spec=_logits_spec(case))
    options = {"correction_bias": arrays.get("correction_bias"), "token_mask": arrays.get("token_mask")}
    ids, weights = ops.route(logits, router_spec(case), **options)
    layout = ops.make_layout(ids, case.E, alignment=case.alignment, max_rows=case.max_rows or None)
    first = MatmulSpec(case.weight_layout, gather="token", allow_tf32=case.tf32)
    x = ops.scale_rows(arrays["x"], weights) if case.on_input else arrays["x"]

    def multiply(x: Any, weight: Any, bias: Any, spec: MatmulSpec, row_weight: Any = None) -> Any:
        return ops.matmul_ogs(ops.MatmulOperands(x, weight, bias=bias, row_weight=row_weight), layout, spec)

    gate = multiply(x, experts.gate_up, experts.gate_up_bias, first)
    up = None if experts.up is None else multiply(x, experts.up, experts.up_bias, first)
    hidden = ops.activation(gate, activation, up=up)
    order = "row" if case.row_order else "slot"
    second = MatmulSpec(case.weight_layout, scatter=order, allow_tf32=case.tf32)
    slots = multiply(hidden, experts.down, experts.down_bias, second, None if case.on_input else weights)
    return {"output": ops.reduce(slots, layout, order=order), "ids": ids, "weights": weights, "logits": logits}


def run_norm(case: Case, ops: Any, arrays: Mapping[str, Any]) -> dict[str, Any]:
    return {"output": ops.rms_norm(arrays["x"], arrays["weight"], norm_spec(case, case.router_norm))}


def _logits_spec(case: Case) -> LogitsSpec:
    return LogitsSpec(case.router_layout, allow_tf32=case.tf32)


OPS: dict[str, Callable[..., dict[str, Any]]] = {
    "moe": run_moe,
    "route": run_route,
    "layout": run_layout,
    "stages": run_stages,
    "norm": run_norm,
}
#: (case field's array, name of a layer's parameter) by prefix.
LAYER_NAMES = {"routing.": "router.", "shared.": "shared_experts."}


def layer_name(name: str) -> str:
    """The parameter of a layer that an op's argument is."""
    if name == "correction_bias":
        return "router.correction_bias"
    for own, other in LAYER_NAMES.items():
        if name.startswith(own):
            return other + name.removeprefix(own)
    return name


def layer_weights(case: Case, arrays: Mapping[str, Any]) -> LayerWeights:
    """NumPy arrays as the canonical weights of the case's layer."""
    named = {layer_name(n): one for n, one in arrays.items() if is_parameter(n) and not n.startswith("lora.")}
    return LayerWeights.from_named(named, layer_spec(case), storage_of(case))
