"""RMS normalisation of rows and its gradients: docs/user/layers.md and training.md."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from tools.fuzz.oracle.real import Real, Tensor


class Norm(NamedTuple):
    """A norm's options, its factors' parameters, and the dtype of its result."""

    epsilon: float
    scale: float
    centred: bool
    weight_first: bool
    weight: Tensor
    dtype: str


def norm_of(case: Any, weight: Tensor, scale: float = 1.0) -> Norm:
    return Norm(case.norm_epsilon, scale, case.centred, case.weight_first, weight, case.dtype)


def _root(x: Real, epsilon: float) -> Real:
    """(mean(x ** 2) + epsilon) ** -0.5 of every row, as wide as x."""
    mean = (x * x).sum(1, True).scaled(1 / x.value.shape[1])
    inside = mean + Real.exact(torch.full_like(mean.value, epsilon), x.unit)
    value = inside.value**-0.5
    room = (inside.value - inside.error).clamp(min=0.0)
    result = x.own(value, 0.5 * inside.error * room**-1.5, 4)
    return result.map(lambda part: part.expand_as(x.value))


def _factors(norm: Norm, x: Real) -> Real:
    wide = Real.exact(norm.weight.expand_as(x.value), x.unit)
    return wide + Real.exact(torch.ones_like(x.value), x.unit) if norm.centred else wide


def rms_norm(x: Real, norm: Norm) -> Real:
    factors = _factors(norm, x)
    if norm.weight_first:
        x = x * factors
        return (x * _root(x, norm.epsilon)).scaled(norm.scale).cast(norm.dtype)
    return (x * _root(x, norm.epsilon) * factors).scaled(norm.scale).cast(norm.dtype)


def rms_norm_gradient(d_y: Real, x: Real, norm: Norm) -> tuple[Real, Real]:
    """(d_x, d_weight), both before their casts."""
    factors, rows = _factors(norm, x), x
    if norm.weight_first:
        rows = x * factors
    g = (d_y if norm.weight_first else d_y * factors).scaled(norm.scale)
    root = _root(rows, norm.epsilon)
    mean = (g * rows).sum(1, True, "truncated").scaled(1 / x.value.shape[1]).map(lambda part: part.expand_as(x.value))
    d_rows = root * (g - rows * (root * root * mean))
    if norm.weight_first:
        return d_rows * factors, (d_rows * x).sum(0, kind="truncated")
    return d_rows, (d_y * x * root).scaled(norm.scale).sum(0, kind="truncated")
