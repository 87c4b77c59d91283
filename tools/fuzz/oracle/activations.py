"""Activations and their derivatives, from the table of docs/user/layers.md."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from tools.fuzz.oracle.real import Real, Tensor

#: name -> (alpha, limit) where none is stated.
DEFAULTS = {"swiglu_oai": (1.702, 7.0), "clamped_silu": (None, 7.0), "softcapped_silu": (4.0, 25.0)}
_ROOT = math.sqrt(2.0 / math.pi)
_CUBE = 0.044715


class Rule(NamedTuple):
    """alpha None: the activation has none. limit None: no bound."""

    name: str
    gated: bool
    alpha: float | None
    limit: float | None


def _base(name: str, x: Tensor) -> tuple[Tensor, Tensor]:
    """(act(x), act'(x)) of an ungated function."""
    if name == "silu":
        s = torch.sigmoid(x)
        return torch.where(x == -math.inf, torch.zeros_like(x), x * s), s + _times(x, s * torch.sigmoid(-x))
    if name == "gelu":
        half = 0.5 * torch.erfc(-x / math.sqrt(2.0))
        density = torch.exp(-0.5 * x * x) / math.sqrt(2.0 * math.pi)
        return _times(x, half), half + _times(x, density)
    if name == "gelu_tanh":
        inner = _ROOT * (x + _CUBE * x * x * x)
        # 0.5 (1 + tanh(y)) = sigmoid(2 y)
        half, slope = torch.sigmoid(2 * inner), torch.sigmoid(2 * inner) * torch.sigmoid(-2 * inner)
        return _times(x, half), half + _times(x * 2 * _ROOT * (1 + 3 * _CUBE * x * x), slope)
    positive = torch.where(x > 0, x, torch.where(torch.isnan(x), x, 0.0))
    return positive * positive, 2 * positive


def _times(x: Tensor, factor: Tensor) -> Tensor:
    """x * factor, and 0 for an infinite x whose factor vanishes: the limit of the function."""
    return torch.where(torch.isinf(x) & (factor == 0), torch.zeros_like(x), x * factor)


def _at_most(x: Tensor, limit: float | None) -> tuple[Tensor, Tensor]:
    """(min(x, limit), its derivative): NaN passes, and the gradient passes at the limit."""
    if limit is None:
        return x, torch.ones_like(x)
    return torch.where(x > limit, limit, x), torch.where(x > limit, 0.0, 1.0)


def _clamped(x: Tensor, limit: float | None) -> tuple[Tensor, Tensor]:
    if limit is None:
        return x, torch.ones_like(x)
    outside = x.abs() > limit
    return torch.where(outside, torch.copysign(torch.full_like(x, limit), x), x), torch.where(outside, 0.0, 1.0)


def evaluate(rule: Rule, gate: Tensor, up: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """(value, derivative by gate, derivative by up); up is None for an ungated rule."""
    if up is None:
        value, slope = _base(rule.name, gate)
        return value, slope, None
    if rule.name == "softcapped_silu":
        assert rule.alpha is not None and rule.limit is not None
        t, s = torch.tanh(gate / rule.alpha), torch.sigmoid(gate)
        left, d_left = rule.alpha * t * s, (1 - t * t) * s + rule.alpha * t * s * torch.sigmoid(-gate)
        v = torch.tanh(up / rule.limit)
        right, d_right = rule.limit * v, 1 - v * v
        return left * right, d_left * right, left * d_right
    right, d_right = _clamped(up, rule.limit)
    if rule.name == "clamped_silu":
        inner, slope = _base("silu", gate)
        left, passes = _at_most(inner, rule.limit)
        return left * right, slope * passes * right, left * d_right
    bounded, passes = _at_most(gate, rule.limit)
    if rule.name == "swiglu_oai":
        assert rule.alpha is not None
        s = torch.sigmoid(rule.alpha * bounded)
        left = _times(bounded, s)
        d_left = (s + _times(rule.alpha * bounded, s * torch.sigmoid(-rule.alpha * bounded))) * passes
        return left * (right + 1), d_left * (right + 1), left * d_right
    left, slope = _base(rule.name, bounded)
    return left * right, slope * passes * right, left * d_right


def activate(rule: Rule, gate: Real, up: Real | None) -> Real:
    value, by_gate, by_up = evaluate(rule, gate.value, None if up is None else up.value)
    error = by_gate.abs() * gate.error + _curvature(rule, gate, up) * gate.error**2
    size = gate.value.abs()
    if up is not None and by_up is not None:
        error = error + by_up.abs() * up.error + 2 * (1 + size) * gate.error * up.error
        # 1 + erf and tanh are exact to u of 1, whatever is left of them.
        size = size * (1 + up.value.abs())
        if rule.name == "softcapped_silu":
            assert rule.alpha is not None and rule.limit is not None
            size = size + rule.alpha * (1 + up.value.abs()) + rule.limit * (1 + gate.value.abs())
    # gelu in float64 knows erfc to 1e-12 (`_erfc_polynomial` of the reference), far below what float32 needs.
    absolute = max(8 * gate.unit, 4e-12 if rule.name == "gelu" else 0.0) * _known(size)
    if rule.name in ("silu", "relu2", "swiglu_oai", "clamped_silu"):
        absolute = torch.zeros_like(value)
    # The limit of x * sigmoid(x) at -inf is 0 and the product is NaN: the documents do not choose.
    absolute = torch.where(torch.isinf(gate.value) | (up is not None and torch.isinf(up.value)), math.inf, absolute)
    return gate.own(value, _carried(error, gate, up) + absolute, 8 + 4 * _known(gate.value.abs()).clamp(max=90.0))


def differentiate(rule: Rule, gate: Real, up: Real | None) -> tuple[Real, Real | None]:
    """The derivatives by gate and by up."""
    _, by_gate, by_up = evaluate(rule, gate.value, None if up is None else up.value)
    other = torch.zeros_like(gate.value) if up is None else up.error
    curvature = _curvature(rule, gate, up)
    # d2 / (d gate d up) is the slope of the gate's function: below 1.2 alpha, but of relu2, whose slope is 2 x.
    cross = 2 + 2 * _known(gate.value.abs()) if rule.name == "relu2" else 2.0 * max(1.0, abs(rule.alpha or 1.0))
    error = curvature * gate.error + cross * other
    kink = _on_kink(rule, gate, up)
    # The two terms of a derivative may cancel: its roundings are measured against their size.
    size = (1 + _known(gate.value.abs())) * (1 if up is None else 2 + _known(up.value.abs()))
    unit = max(gate.unit, 1e-12 if rule.name == "gelu" else 0.0)
    rounding = (16 + 8 * _known(gate.value.abs()).clamp(max=90.0)) * unit * size
    rounding = torch.where(by_gate == 0, 0.0, rounding) if rule.name == "relu2" else rounding
    d_gate = gate.of(by_gate, torch.where(kink, math.inf, _carried(error, gate, up) + rounding))
    if by_up is None or up is None:
        return d_gate, None
    own = (8 + 4 * _known(gate.value.abs()).clamp(max=90.0)) * unit * (_known(by_up.abs()) + _known(gate.value.abs()))
    error = cross * gate.error + curvature * other
    return d_gate, gate.of(by_up, torch.where(kink, math.inf, _carried(error, gate, up) + own))


def _curvature(rule: Rule, gate: Real, up: Real | None) -> Tensor:
    """A bound of every second derivative: all functions here bend by less than 3 alpha where |up| is 1."""
    bend = 3 * max(1.0, abs(rule.alpha or 1.0))
    return torch.full_like(gate.value, bend) if up is None else bend * (2 + _known(up.value.abs()))


def _on_kink(rule: Rule, gate: Real, up: Real | None) -> Tensor:
    """Where an uncertain value may lie on either side of a bound."""
    found = torch.zeros_like(gate.value, dtype=torch.bool)
    if rule.limit is None or up is None or rule.name == "softcapped_silu":
        return found
    inner = _base("silu", gate.value)[0] if rule.name == "clamped_silu" else gate.value
    # silu is rounded before it is compared.
    blur = 2 * gate.error + (16 * gate.unit * inner.abs() if rule.name == "clamped_silu" else 0.0)
    found = found | (((inner - rule.limit).abs() <= blur) & (blur > 0))
    return found | (((up.value.abs() - rule.limit).abs() <= up.error) & (up.error > 0))


def _carried(error: Tensor, gate: Real, up: Real | None) -> Tensor:
    """What the arguments' errors make, none where these are exact (an infinite derivative times 0 included)."""
    exact = (gate.error == 0) if up is None else (gate.error == 0) & (up.error == 0)
    return torch.where(exact, 0.0, error)


def _known(value: Tensor) -> Tensor:
    return torch.nan_to_num(value, nan=0.0, posinf=0.0, neginf=0.0) if not value.isfinite().all() else value
