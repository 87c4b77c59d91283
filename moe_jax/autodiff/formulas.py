"""Ops in JAX's own operations, for forward mode and second derivatives. Values may differ in the last bits."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.lax import Precision

from moe_core.specs.matmul import Activation
from moe_core.specs.norm import NormSpec
from moe_core.specs.routing import LogitsSpec, RouterSpec

#: The reason why an op with quantised weights has none.
QUANTIZED = (
    "{} with quantised weights has reverse-mode gradients alone, since forward mode and second derivatives would "
    "dequantise them all; use plain weights, as moe_jax.dequantize makes them, or jax.grad once"
)
#: Beyond this |x| an activation is x or 0, so that no infinity meets a zero in a derivative.
_SATURATED = {"silu": 128.0, "gelu": 16.0, "gelu_tanh": 16.0}
_CURVES: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": lambda x: x * jax.nn.sigmoid(x),
    "gelu": lambda x: x * jax.scipy.stats.norm.cdf(x),
    "gelu_tanh": lambda x: x * jax.nn.sigmoid(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)),
}


def wide(array: Any) -> jax.Array:
    return array if array.dtype == jnp.float64 else array.astype(jnp.float32)


def take(rows: jax.Array, index: jax.Array) -> jax.Array:
    """Zeros for -1."""
    return jnp.where((index >= 0)[:, None], rows[jnp.maximum(index, 0)], 0)


def dot(x: jax.Array, weight: jax.Array, layout: str) -> jax.Array:
    """x `[R, D]` times weight `[D, N]` (`in_out`) or `[N, D]`."""
    matrix = wide(weight)
    return jnp.dot(wide(x), matrix if layout == "in_out" else matrix.T, precision=Precision.HIGHEST)


def in_value_of(value: jax.Array, array: jax.Array) -> jax.Array:
    """value with the derivative of `array`."""
    return array + jax.lax.stop_gradient(value.astype(array.dtype) - array)


def logits_of(x: jax.Array, weight: jax.Array, bias: jax.Array | None, spec: LogitsSpec) -> jax.Array:
    logits = dot(x, weight, spec.weight_layout)
    logits = logits if bias is None else logits + wide(bias)
    return in_value_of(logits.astype(spec.logits_dtype), logits) if spec.logits_dtype != "float32" else logits


def weights_of(logits: jax.Array, ids: jax.Array, spec: RouterSpec) -> jax.Array:
    """The weights `[T, K]` of ids, 0 for -1."""
    chosen = ids >= 0
    # Masked logits may be NaN.
    scored = jnp.where(chosen.any(axis=-1, keepdims=True), wide(logits), 0) * spec.logit_scale
    if spec.softcap is not None:
        scored = spec.softcap * jnp.tanh(scored / spec.softcap)
    picked = jnp.take_along_axis(scored, jnp.maximum(ids, 0), axis=-1)
    if spec.scoring == "softmax":
        if spec.renormalize or spec.order == "topk_then_softmax":
            weights = jax.nn.softmax(picked, axis=-1)
        else:
            weights = jnp.take_along_axis(jax.nn.softmax(scored, axis=-1), jnp.maximum(ids, 0), axis=-1)
    else:
        weights = jax.nn.sigmoid(picked) if spec.scoring == "sigmoid" else jnp.sqrt(jax.nn.softplus(picked))
        if spec.renormalize:
            total = weights.sum(axis=-1, keepdims=True) + spec.epsilon
            weights = jnp.where(total == 0, 0, weights / jnp.where(total == 0, 1, total))
    return jnp.where(chosen, weights * spec.scale, 0)


def norm_of(x: jax.Array, weight: jax.Array, spec: NormSpec) -> jax.Array:
    rows, factors = wide(x), wide(weight) + (1 if spec.centred else 0)
    rows = rows * factors if spec.weight_first else rows
    y = rows * jax.lax.rsqrt(jnp.square(rows).mean(axis=-1, keepdims=True) + spec.epsilon)
    return ((y if spec.weight_first else y * factors) * spec.scale).astype(x.dtype)


def activation_of(x: jax.Array, up: jax.Array | None, activation: Activation) -> jax.Array:
    """fp32 `[R, F]`. up: of gate_layout `separate`."""
    gate = wide(x)
    if activation.gated:
        if activation.gate_layout == "interleaved":
            gate, up = gate[..., 0::2], gate[..., 1::2]
        elif activation.gate_layout == "halves":
            gate, up = jnp.split(gate, 2, axis=-1)
        assert up is not None
        up = wide(up)
    name, limit, alpha = activation.name, activation.limit, activation.alpha
    if up is None:
        return _curve(gate, name)
    if name == "softcapped_silu":
        assert alpha is not None
        up = up if limit is None else limit * jnp.tanh(up / limit)
        return alpha * jnp.tanh(gate / alpha) * jax.nn.sigmoid(gate) * up
    if limit is not None:
        up = _at_most(-_at_most(-up, limit), limit)
        gate = gate if name == "clamped_silu" else _at_most(gate, limit)
    if name == "swiglu_oai":
        assert alpha is not None
        return gate * jax.nn.sigmoid(alpha * gate) * (up + 1)
    if name == "clamped_silu":
        assert limit is not None
        return _at_most(_curve(gate, "silu"), limit) * up
    return _curve(gate, name) * up


def _at_most(x: jax.Array, limit: float) -> jax.Array:
    """The derivative at the limit is 1."""
    return jnp.where(x > limit, limit, x)


def _curve(x: jax.Array, name: str) -> jax.Array:
    if name == "relu2":
        return jnp.square(jnp.where(x > 0, x, jnp.where(jnp.isnan(x), x, 0)))
    bound = _SATURATED[name]
    value = _CURVES[name](jnp.where(jnp.abs(x) > bound, 0, x))
    return jnp.where(x > bound, x, jnp.where(x < -bound, 0, value))
