"""RMS normalisation of a router's rows and its gradients: docs/user/layers.md and training.md."""

from __future__ import annotations

from typing import Any

import torch

from tools.fuzz.oracle.real import Real, Tensor


def _factor(x: Real, epsilon: float) -> Real:
    """(mean(x ** 2) + epsilon) ** -0.5 of every row, as wide as x."""
    mean = (x * x).sum(1, True).scaled(1 / x.value.shape[1])
    inside = mean + Real.exact(torch.full_like(mean.value, epsilon), x.unit)
    value = inside.value**-0.5
    room = (inside.value - inside.error).clamp(min=0.0)
    result = x.own(value, 0.5 * inside.error * room**-1.5, 4)
    return result.map(lambda part: part.expand_as(x.value))


def rms_norm(x: Real, weight: Tensor, case: Any) -> Real:
    wide = Real.exact(weight.expand_as(x.value), x.unit)
    return (x * _factor(x, case.norm_epsilon) * wide).scaled(case.router_norm).cast(case.dtype)


def rms_norm_gradient(d_y: Real, x: Real, weight: Tensor, case: Any) -> tuple[Real, Real]:
    """(d_x before its cast, d_weight before its cast)."""
    factor, wide = _factor(x, case.norm_epsilon), Real.exact(weight.expand_as(x.value), x.unit)
    g = (d_y * wide).scaled(case.router_norm)
    mean = (g * x).sum(1, True, "truncated").scaled(1 / x.value.shape[1]).map(lambda part: part.expand_as(x.value))
    d_x = factor * (g - x * (factor * factor * mean))
    return d_x, (d_y * x * factor).scaled(case.router_norm).sum(0, kind="truncated")
