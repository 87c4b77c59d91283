"""NumPy twin of the activation op: everything in fp32, NaN through every clamp, one cast at the end."""

from __future__ import annotations

import functools
import math

import numpy as np

from moe_core.reference.rounding import round_to, to_float32
from moe_core.specs import Activation

#: Beyond this argument erfc times any x that leads here is below the smallest fp32 number.
_ERFC_LARGEST = 10.5
_ERFC_LOWEST = 1 / (1 + _ERFC_LARGEST / 2)
#: Terms of the polynomial in `_erfc_polynomial`: a relative error near 1e-12, far below fp32's 6e-8.
_ERFC_TERMS = 17


def sigmoid(x: np.ndarray) -> np.ndarray:
    """1 / (1 + exp(-x)) elementwise, without overflow: exp(min(x, 0)) / (1 + exp(-|x|)); NaN stays NaN."""
    with np.errstate(all="ignore"):
        return np.exp(np.minimum(x, 0)) / (1 + np.exp(-np.abs(x)))


@functools.cache
def _erfc_polynomial() -> np.ndarray:
    """Coefficients (highest power first, in s) of P in erfc(z) = t exp(-z^2 + P(s)), z >= 0, t = 1 / (1 + z / 2).

    s in [-1, 1] runs over t in [1 / (1 + _ERFC_LARGEST / 2), 1]. The form is that of W. H. Press et al., Numerical
    Recipes, section 6.2.2; the coefficients are interpolated at Chebyshev points from `math.erfc`.
    """
    points = np.polynomial.chebyshev.chebpts1(_ERFC_TERMS)
    t = _ERFC_LOWEST + (1 - _ERFC_LOWEST) * (points + 1) / 2
    z = 2 * (1 - t) / t
    logarithm = [math.log(math.erfc(value) / scale) + value * value for value, scale in zip(z, t, strict=True)]
    series = np.polynomial.chebyshev.chebfit(points, logarithm, _ERFC_TERMS - 1)
    return np.polynomial.chebyshev.cheb2poly(series)[::-1].copy()


def normal_cdf(x: np.ndarray) -> np.ndarray:
    """(1 + erf(x / sqrt(2))) / 2 of an fp32 array, computed in float64, with fp32 relative accuracy in both tails."""
    wide = np.asarray(x, np.float64)
    z = np.abs(wide) * math.sqrt(0.5)
    t = 1 / (1 + np.minimum(z, _ERFC_LARGEST) / 2)
    s = (t - _ERFC_LOWEST) * (2 / (1 - _ERFC_LOWEST)) - 1
    polynomial = np.zeros_like(s)
    for coefficient in _erfc_polynomial():
        polynomial *= s
        polynomial += coefficient
    with np.errstate(all="ignore"):
        tail = 0.5 * t * np.exp(polynomial - z * z)
    return np.where(wide > 0, 1 - tail, tail)


def split(values: np.ndarray, activation: Activation) -> tuple[np.ndarray, np.ndarray | None]:
    """The gate and up columns `[R, F]` of `[R, 2F]` (halves, interleaved); (values, None) for ungated activations."""
    if not activation.gated:
        return values, None
    if activation.gate_layout == "interleaved":
        return values[..., 0::2], values[..., 1::2]
    half = values.shape[-1] // 2
    return values[..., :half], values[..., half:]


def apply(gate: np.ndarray, up: np.ndarray | None, activation: Activation) -> np.ndarray:
    """The formula of `activation` on fp32 arrays `[R, F]`; up is None for ungated activations."""
    with np.errstate(all="ignore"):
        if activation.name == "swiglu_oai":
            assert up is not None
            if activation.limit is not None:
                limit = np.float32(activation.limit)
                gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
            return gate * sigmoid(np.float32(activation.alpha) * gate) * (up + np.float32(1))
        if activation.name == "silu":
            activated = gate * sigmoid(gate)
        elif activation.name == "gelu":
            activated = (gate * normal_cdf(gate)).astype(np.float32)
        elif activation.name == "gelu_tanh":
            # (1 + tanh(u)) / 2 = sigmoid(2u): the same function without the cancellation for negative u.
            inner = np.float32(math.sqrt(2 / math.pi)) * (gate + np.float32(0.044715) * gate * gate * gate)
            activated = gate * sigmoid(2 * inner)
        else:
            assert activation.name == "relu2"
            activated = np.square(np.maximum(gate, np.float32(0)))
        return activated if up is None else activated * up


def activation(
    x: np.ndarray, up: np.ndarray | None = None, *, activation: Activation, out_dtype: str | None = None
) -> np.ndarray:
    """y `[R, F]` from x `[R, 2F]` (gated: halves, interleaved) or `[R, F]` (ungated, or the gate beside `up` `[R, F]`).

    bf16, fp16 or fp32 in; fp32 arithmetic; one cast to out_dtype (None = the dtype of x).
    """
    if up is None:
        gate_values, up_values = split(to_float32(x), activation)
    else:
        gate_values, up_values = to_float32(x), to_float32(up)
    return round_to(apply(gate_values, up_values, activation), out_dtype or x.dtype)
