"""NumPy twins of the normalisation of rows and of its backward."""

from __future__ import annotations

import numpy as np

from moe_core.ops.common.rounding import round_to, to_float32
from moe_core.specs.norm import NormSpec


def _factors(x: np.ndarray, spec: NormSpec) -> np.ndarray:
    """(mean(x ** 2) + epsilon) ** -0.5 of every row, `[R, 1]`."""
    kind = x.dtype.type
    return kind(1) / np.sqrt(np.square(x).mean(axis=-1, keepdims=True) + kind(spec.epsilon))


def rms_norm(x: np.ndarray, weight: np.ndarray, *, spec: NormSpec) -> np.ndarray:
    """y `[R, D]` of x `[R, D]` and weight `[D]` by the formula of `NormSpec`, in fp32, one cast to the dtype of x."""
    rows = to_float32(x)
    with np.errstate(all="ignore"):
        y = rows * _factors(rows, spec) * to_float32(weight) * rows.dtype.type(spec.scale)
    return round_to(y, x.dtype)


def rms_norm_backward(
    d_y: np.ndarray, x: np.ndarray, weight: np.ndarray, *, spec: NormSpec, wanted: tuple[str, ...]
) -> tuple[np.ndarray, ...]:
    """d_x `[R, D]` and d_weight `[D]`, those wanted, each in the dtype of what it is the gradient of.

    f = (mean(x ** 2) + epsilon) ** -0.5, g = d_y * weight * scale, sums in fp32:
    d_x = f * (g - x * f ** 2 * mean(g * x)); d_weight = sum over rows of d_y * x * f * scale.
    """
    rows, upstream, factors = to_float32(x), to_float32(d_y), to_float32(weight)
    scale = rows.dtype.type(spec.scale)
    with np.errstate(all="ignore"):
        factor, gradient = _factors(rows, spec), upstream * factors * scale
        mean = (gradient * rows).mean(axis=-1, keepdims=True)
        made = {
            "d_x": round_to(factor * (gradient - rows * (np.square(factor) * mean)), x.dtype),
            "d_weight": round_to((upstream * (rows * factor) * scale).sum(axis=0), weight.dtype),
        }
    return tuple(made[name] for name in wanted)
