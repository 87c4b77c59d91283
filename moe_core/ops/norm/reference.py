"""NumPy twins of row normalisation and its backward."""

from __future__ import annotations

import numpy as np

from moe_core.ops.common.rounding import round_to, to_float32
from moe_core.specs import NormSpec


def _factors(x: np.ndarray, spec: NormSpec) -> np.ndarray:
    kind = x.dtype.type
    return kind(1) / np.sqrt(np.square(x).mean(axis=-1, keepdims=True) + kind(spec.epsilon))


def _weights(weight: np.ndarray, spec: NormSpec) -> np.ndarray:
    factors = to_float32(weight)
    return factors.dtype.type(1) + factors if spec.centred else factors


def rms_norm(x: np.ndarray, weight: np.ndarray, *, spec: NormSpec) -> np.ndarray:
    """y `[R, D]` of x `[R, D]` and weight `[D]`: `NormSpec` in fp32, one cast to the dtype of x."""
    rows, factors = to_float32(x), _weights(weight, spec)
    with np.errstate(all="ignore"):
        if spec.weight_first:
            rows = rows * factors
        y = rows * _factors(rows, spec)
        y = (y if spec.weight_first else y * factors) * rows.dtype.type(spec.scale)
    return round_to(y, x.dtype)


def rms_norm_backward(
    d_y: np.ndarray, x: np.ndarray, weight: np.ndarray, *, spec: NormSpec, wanted: tuple[str, ...]
) -> tuple[np.ndarray, ...]:
    """The wanted gradients d_x `[R, D]` and d_weight `[D]`, each in the dtype of its array, with fp32 sums.

    f = (mean(x ** 2) + epsilon) ** -0.5, g = d_y * factor * scale: d_x = f * (g - x * f ** 2 * mean(g * x)), d_weight =
    sum over rows of d_y * x * f * scale. With weight_first and z = x * factor: g = d_y * scale, d_z = f * (g - z * f **
    2 * mean(g * z)), d_x = d_z * factor, d_weight = sum over rows of d_z * x.
    """
    rows, upstream, factors = to_float32(x), to_float32(d_y), _weights(weight, spec)
    scale = rows.dtype.type(spec.scale)
    with np.errstate(all="ignore"):
        normed = rows * factors if spec.weight_first else rows
        factor = _factors(normed, spec)
        gradient = upstream * scale if spec.weight_first else upstream * factors * scale
        mean = (gradient * normed).mean(axis=-1, keepdims=True)
        d_x = factor * (gradient - normed * (np.square(factor) * mean))
        products = d_x * rows if spec.weight_first else upstream * (rows * factor) * scale
        made = {
            "d_x": round_to(d_x * factors if spec.weight_first else d_x, x.dtype),
            "d_weight": round_to(products.sum(axis=0), weight.dtype),
        }
    return tuple(made[name] for name in wanted)
