"""Checks of a composed MoE's weights."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from moe_core.base import ArraySpec, dtypes, require_spec
from moe_core.errors import InvalidInput, Unsupported
from moe_core.formats import Format, QuantizedSpec, QuantizedTensor, quantized_specs
from moe_core.ops.matmul import operands as matmul
from moe_core.specs import MoESpec
from moe_core.specs.operands import ExpertWeights, LayerRouter, SharedExpert, named_fields


def check_weights(x: ArraySpec, experts: ExpertWeights, shared: SharedExpert | None, spec: MoESpec) -> int:
    """Check the weights against x `[T, D]`. Returns the number of local experts. Raises InvalidInput."""
    d_model, dtype = x.shape[1], x.dtype
    stacked = experts.layer_index is not None
    free = ("num_layers", "num_experts") if stacked else ("num_experts",)
    matmul.check_tiling(experts.gate_up, spec.activation, "experts.gate_up")
    matmul.check_tiling(experts.down, None, "experts.down")
    if isinstance(experts.gate_up, ArraySpec) and (stored := experts.gate_up.dtype) != dtype:
        raise InvalidInput(
            f"experts.gate_up must be {dtype} like x, got {stored}; cast it to {dtype}, or cast x to {stored}"
        )
    gate_up = _matrix("experts.gate_up", experts.gate_up, (*free, *_axes(d_model, "width", spec)), dtype, spec)
    lead = gate_up.shape[:-2]
    if 0 in gate_up.shape:
        raise InvalidInput(f"experts.gate_up must have no empty axis, got {gate_up.shape}; pass the full array")
    width = _check_pair("experts", experts, lead, d_model, dtype, spec)
    columns = gate_up.shape[-1 if spec.weight_layout == "in_out" else -2]
    biases = (("gate_up_bias", columns), ("up_bias", width), ("down_bias", d_model))
    for name, size in biases:
        if (bias := getattr(experts, name)) is not None:
            require_spec(f"experts.{name}", bias, (*lead, size), ("float32", dtype))
    if experts.up_bias is not None and experts.up is None:
        raise InvalidInput("experts.up_bias must be None without experts.up; put both halves into gate_up_bias")
    if stacked:
        require_spec("experts.layer_index", experts.layer_index, (1,), "int32")
    _check_activations(experts, spec)
    if shared is None and spec.shared_activation is not None:
        raise InvalidInput(
            f"spec.shared_activation must be None without a shared expert, got {spec.shared_activation}; pass shared "
            "or leave it out"
        )
    if shared is not None:
        lead = lead[:1] if shared_is_stacked(experts, shared) else ()
        require_spec("shared.gate_up", shared.gate_up, (*lead, *_axes(d_model, "width", spec)), dtype)
        _check_pair("shared", shared, lead, d_model, dtype, spec)
        if shared.gate is not None:
            require_spec("shared.gate", shared.gate, _axes(d_model, 1, spec), dtypes.MATMUL_DTYPES)
    return gate_up.shape[-3]


def require_op_router(routing: Any) -> None:
    """Raise Unsupported for a layer's router: no op reads its further arrays."""
    if isinstance(routing, LayerRouter):
        raise Unsupported(
            "routing must be plain RouterWeights, got a layer's router with a norm or expert scales, which no op "
            "applies; make a layer with from_weights, or call router, route and moe with a TopK"
        )


def shared_is_stacked(experts: ExpertWeights, shared: SharedExpert) -> bool:
    """True if the shared expert has a layer axis, too."""
    return experts.layer_index is not None and len(shared.gate_up.shape) == 3


def quantized_experts(experts: ExpertWeights) -> dict[str, QuantizedTensor]:
    return {name: value for name, value in named_fields(experts, "experts.") if isinstance(value, QuantizedTensor)}


def why_no_moe_gradient(experts: ExpertWeights, spec: MoESpec, names: Iterable[str]) -> str | None:
    """The reason why a layer has no gradients of arrays of these names (`x`, `experts.gate_up.scales`), or None."""
    if spec.activations is not None:
        return (
            f"moe has no gradient with activations {spec.activations}: what rounds x and the hidden rows has none; "
            "leave activations out, which trains through quantised weights, or dequantise the experts"
        )
    quantized = quantized_experts(experts)
    return matmul.why_prepacked(quantized) or matmul.why_frozen(names, quantized)


def quantized_rows(rows: ArraySpec, activations: Format) -> QuantizedTensor:
    """Specs of rows `[R, D]` in spec.activations."""
    return quantized_specs(QuantizedSpec(activations), rows.shape)


def _axes(inside: int | str, outside: int | str, spec: MoESpec) -> tuple[int | str, int | str]:
    return (inside, outside) if spec.weight_layout == "in_out" else (outside, inside)


def _matrix(name: str, weight: Any, shape: tuple[int | str, ...], dtype: str, spec: MoESpec) -> ArraySpec:
    """Returns the plain array that the weight is or stands for."""
    if isinstance(weight, QuantizedTensor):
        matmul.require_weight(name, weight, spec.weight_layout)
    return require_spec(name, matmul.logical_spec(weight, dtype), shape, dtype)


def _check_pair(
    name: str, bundle: ExpertWeights | SharedExpert, lead: tuple[int, ...], d_model: int, dtype: str, spec: MoESpec
) -> int:
    """Returns F."""
    activation = spec.activation
    width = bundle.gate_up.shape[-1 if spec.weight_layout == "in_out" else -2]
    if activation.gate_layout in ("halves", "interleaved"):
        if width % 2:
            raise InvalidInput(f"{name}.gate_up must have an even width (gate and up), got {width}; pass both")
        width //= 2
    if activation.gate_layout == "separate":
        matmul.require_like(f"{name}.up", bundle.up, f"{name}.gate_up", bundle.gate_up)
    elif bundle.up is not None:
        raise InvalidInput(
            f"{name}.up must be None for gate_layout={activation.gate_layout!r}, got {bundle.up}; "
            "set gate_layout='separate' or leave it out"
        )
    axes = (*lead, *_axes(width, d_model, spec))
    if isinstance(bundle, ExpertWeights):
        _matrix(f"{name}.down", bundle.down, axes, dtype, spec)
    else:
        require_spec(f"{name}.down", bundle.down, axes, dtype)
    return width


def _check_activations(experts: ExpertWeights, spec: MoESpec) -> None:
    activations = spec.activations
    per_tensor = activations is not None and activations.group_rows is None and activations.group_columns is None
    for name in ("gate_up_input_scale", "down_input_scale"):
        if (scale := getattr(experts, name)) is None:
            if per_tensor and spec.batch_invariant:
                raise InvalidInput(
                    f"experts.{name} must be given with batch_invariant and activations {activations}, got None: one "
                    "scale found from all rows makes each depend on the others; pass it, or quantise by token"
                )
            continue
        require_spec(f"experts.{name}", scale, (1,), "float32")
        if not per_tensor or activations is None or activations.has_e8m0_scales:
            raise InvalidInput(
                f"experts.{name} must be None unless activations have one fp32 scale per tensor, got an array with "
                f"activations {activations}; leave it out"
            )
    if activations is None:
        return
    for name in ("gate_up", "down"):
        weight = getattr(experts, name)
        if not isinstance(weight, QuantizedTensor):
            raise InvalidInput(
                f"experts.{name} must be quantised where activations are, got {weight} with activations "
                f"{activations}; quantise it, or leave activations out"
            )
        if (reason := matmul.why_not_together(activations, weight.format)) is not None:
            raise InvalidInput(
                f"activations must be a format that goes with {weight.format} of experts.{name}, got {activations}: "
                f"{reason}; choose another"
            )
        if spec.fast_accumulate and weight.format.element != "e4m3":
            raise InvalidInput(
                f"fast_accumulate must be False unless experts.{name} is fp8, got True with {weight.format}; leave it "
                "out"
            )
