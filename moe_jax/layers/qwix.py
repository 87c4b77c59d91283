"""Translate Qwix's rules (for the product `gmm`) to schemes and adapters of a layer's experts. Needs no Qwix."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from moe_core.errors import InvalidInput, Unsupported
from moe_core.formats import Format, Scheme, format_named, format_names, known_scheme, scheme_named
from moe_core.layers import LoRA, MoELayerSpec
from moe_core.specs.operands import LoRAFactors

#: Types without a tile size, or with a fixed one.
_FORMATS = {
    ("int8", None): "int8_row",
    ("int4", None): "int4_row",
    ("float8_e4m3fn", None): "fp8_channel",
    ("mxfp8", 32): "mxfp8",
    ("mxfp4", 32): "mxfp4",
}
#: (format of weights, type of activations): the schemes that quantise both.
_BOTH = {
    ("int8_row", "int8"): "int8_w8a8",
    ("fp8_channel", "float8_e4m3fn"): "fp8_channel",
    ("mxfp8", "mxfp8"): "mxfp8",
    ("mxfp4", "mxfp8"): "mxfp4_w4a8",
    ("mxfp4", "mxfp4"): "mxfp4_w4a4",
}
_LEAVE_OUT = "give the rule a module_path that leaves this layer out"


def current_rule() -> Any:
    """Qwix's rule for the experts of the called layer, or None. Qwix searches Python's frames for the layer."""
    if "qwix" not in sys.modules:
        return None
    from qwix.pallas import get_current_rule

    return get_current_rule("gmm")


def is_training(rule: Any) -> bool:
    """True for a rule of quantised training (`qwix.QtProvider`)."""
    import qwix

    return isinstance(rule, qwix.QtRule)


def scheme_of_rule(rule: Any) -> Scheme | None:
    """The scheme of a `qwix.QuantizationRule`, or None if it quantises no weights.

    Of a `qwix.QtRule`, for quantised training: the scheme for `fake_quantized`, of symmetric weights only.

    Weights only: int8 and int4 in one group per output or in groups of a tile_size of 32, 64 or 128 inputs (with zero
    points for the calibration `minmax`), float8_e4m3fn per output, mxfp8, mxfp4. Weights and activations: int8,
    float8_e4m3fn or mxfp8 with itself, mxfp4 with mxfp8 or mxfp4. Raises InvalidInput for no rule, and Unsupported for
    other types and calibrations.
    """
    import qwix

    if not isinstance(rule, qwix.QuantizationRule):
        raise InvalidInput(f"rule must be a qwix.QuantizationRule, got {type(rule).__name__}; pass one rule")
    weights = _type(rule.weight_qtype)
    if weights is None:
        if rule.act_qtype is not None or rule.tile_size is not None:
            raise Unsupported(
                "act_qtype and tile_size of a rule need a weight_qtype for the experts of a MoE layer, got "
                f"{rule.act_qtype} and {rule.tile_size} without one; name one, or {_LEAVE_OUT}"
            )
        return None
    if isinstance(rule, qwix.QtRule):
        plain = {"act_qtype": None, "bwd_qtype": None, "disable_channelwise_axes": False, "additional_qt_config": None}
        plain["weight_calibration_method"] = "absmax"
        for name, value in plain.items():
            if getattr(rule, name) != value:
                raise Unsupported(
                    f"{name} of a QtRule must be {value!r} for the experts of a MoE layer, whose weights alone are "
                    f"trained quantised, got {getattr(rule, name)!r}; leave it out, or {_LEAVE_OUT}"
                )
    activations, method, tile = _type(rule.act_qtype), rule.weight_calibration_method, rule.tile_size
    if rule.act_static_scale or rule.act_calibration_method not in (None, "absmax"):
        raise Unsupported(
            "act_static_scale and act_calibration_method of a rule must be left out for the experts of a MoE layer, "
            f"whose rows get scales of their own (absmax), got {rule.act_static_scale} and "
            f"{rule.act_calibration_method!r}; leave them out, or {_LEAVE_OUT}"
        )
    format = _format(weights, tile, method)
    if format is None:
        raise Unsupported(
            "experts must be quantised to int8, int4 (tile_size None, 32, 64, 128; absmax or minmax), float8_e4m3fn, "
            f"mxfp8 or mxfp4, got {weights} with tile_size={tile!r} and {method!r}; choose one of these, or "
            f"{_LEAVE_OUT}"
        )
    if activations is None:
        return known_scheme(format, None) or Scheme(f"{format.name}_weights", format)
    if (format.name, activations) not in _BOTH:
        possible = ", ".join(f"{ours} with {theirs}" for ours, theirs in _BOTH)
        raise Unsupported(
            f"weights and activations of experts must be {possible}, got {format.name} with {activations}; choose one "
            f"of these, leave act_qtype out, or {_LEAVE_OUT}"
        )
    return scheme_named(_BOTH[format.name, activations])


def lora_of_rule(rule: Any) -> LoRA | None:
    """The adapters of a `qwix.LoraRule`, else None. Raises InvalidInput for options out of range."""
    if rule is None or not isinstance(rule, sys.modules["qwix"].LoraRule):
        return None
    return LoRA(rule.rank, alpha=rule.alpha, dropout=rule.dropout)


def factors_of_rule(rule: Any, spec: MoELayerSpec, draw: Callable[[], Any], dtype: Any) -> LoRAFactors:
    """A new adapter, drawn by the initialisers of a `qwix.LoraRule`. draw: returns a new key."""
    made: dict[str, Any] = {}
    for name, (_, experts, inside, outside) in LoRA(rule.rank).shapes(spec).items():
        shape = (experts, inside, rule.rank) if name[0] == "a" else (experts, rule.rank, outside)
        initializer = rule.lora_a_initializer if name[0] == "a" else rule.lora_b_initializer
        made[name] = initializer(draw(), shape, dtype)
    return LoRAFactors(**made)


def require_same_lora(held: LoRA, rule: Any) -> None:
    """Raise InvalidInput if a rule has other adapters than the layer."""
    asked = lora_of_rule(rule)
    if asked not in (None, held):
        raise InvalidInput(
            f"the layer's adapters must be those of Qwix's rule, {asked}, got {held}; keep one of both, or {_LEAVE_OUT}"
        )


def _type(qtype: Any) -> str | None:
    return qtype if qtype is None or isinstance(qtype, str) else jnp.dtype(qtype).name


def _format(weights: str, tile: Any, method: str) -> Format | None:
    name = _FORMATS.get((weights, tile))
    if name is None and weights in ("int8", "int4"):
        name = f"{weights}_g{tile}"
    if method == "minmax" and weights in ("int8", "int4"):
        name = f"{name}_zp"
    elif method != "absmax":
        return None
    return format_named(name) if name in format_names() else None
