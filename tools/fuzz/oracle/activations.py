"""Activations and their derivatives, from the table of docs/user/layers.md."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from tools.fuzz.oracle.real import TINY, Real, Tensor

#: name -> (alpha, limit) where none is stated.
DEFAULTS = {"swiglu_oai": (1.702, 7.0), "clamped_silu": (None, 7.0), "softcapped_silu": (4.0, 25.0)}


class Rule(NamedTuple):
    """alpha None: the activation has none. limit None: no bound."""

    name: str
    gated: bool
    alpha: float | None
    limit: float | None


def _base(name: str, x: Tensor) -> Tensor:
    """An ungated function."""
    if name == "silu":
        return _times(x, torch.sigmoid(x))
    if name == "gelu":
        return _times(x, 0.5 * torch.erfc(-x / math.sqrt(2.0)))
    if name == "gelu_tanh":  # 0.5 (1 + tanh(y)) = sigmoid(2 y)
        return _times(x, torch.sigmoid(2 * math.sqrt(2.0 / math.pi) * (x + 0.044715 * x * x * x)))
    positive = torch.where((x > 0) | torch.isnan(x), x, 0.0)
    return positive * positive


def _times(x: Tensor, factor: Tensor) -> Tensor:
    """x * factor, and 0 for an infinite x whose factor vanishes: the limit of the function."""
    return torch.where(torch.isinf(x) & (factor == 0), torch.zeros_like(x), x * factor)


def _at_most(x: Tensor, limit: float | None) -> Tensor:
    """min(x, limit): NaN passes, and the gradient passes at the limit."""
    return x if limit is None else torch.where(x > limit, limit, x)


def _formula(rule: Rule, gate: Tensor, up: Tensor | None) -> Tensor:
    """up is None for an ungated rule."""
    if up is None:
        return _base(rule.name, gate)
    if rule.name == "softcapped_silu":
        assert rule.alpha is not None and rule.limit is not None
        left = rule.alpha * torch.tanh(gate / rule.alpha) * torch.sigmoid(gate)
        return left * rule.limit * torch.tanh(up / rule.limit)
    right = -_at_most(-_at_most(up, rule.limit), rule.limit)
    if rule.name == "clamped_silu":
        return _at_most(_base("silu", gate), rule.limit) * right
    bounded = _at_most(gate, rule.limit)
    if rule.name == "swiglu_oai":
        assert rule.alpha is not None
        return _times(bounded, torch.sigmoid(rule.alpha * bounded)) * (right + 1)
    return _base(rule.name, bounded) * right


def evaluate(rule: Rule, gate: Tensor, up: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """(value, derivative by gate, derivative by up): torch's, in float64."""
    with torch.enable_grad():
        inputs = [one.detach().requires_grad_() for one in (gate, up) if one is not None]
        value = _formula(rule, inputs[0], None if up is None else inputs[1])
        slopes = torch.autograd.grad(value.sum(), inputs)
    return value.detach(), slopes[0], None if up is None else slopes[1]


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
    # A sigmoid below the smallest number becomes 0, before it is multiplied.
    faint = (
        1 + _known(gate.value.abs()) if up is None else (1 + _known(gate.value.abs())) * (2 + _known(up.value.abs()))
    )
    absolute = absolute + 4 * TINY[gate.unit] * faint
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
    inner = _base("silu", gate.value) if rule.name == "clamped_silu" else gate.value
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
