"""NumPy twins of the activation op and its backward. As in torch relu2' is 0 at 0, and a clamp passes at its limit."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping

import numpy as np

from moe_core.base.threads import elements, row_blocks, spread
from moe_core.ops.common.bundles import bundle_of
from moe_core.ops.common.rounding import round_to, to_float32, working_dtype
from moe_core.specs import Activation
from moe_core.specs.operands import ExpertActivationOperands

#: erfc beyond this argument times x is below the smallest fp32 number.
_ERFC_LARGEST = 10.5
_ERFC_LOWEST = 1 / (1 + _ERFC_LARGEST / 2)
#: Relative error near 1e-12, far below fp32's 6e-8.
_ERFC_TERMS = 17
#: Beyond this |x| the fp32 derivative is constant and taken here, so no infinity meets a zero.
_SATURATED = {"silu": 128.0, "gelu": 16.0, "gelu_tanh": 16.0}
_NORMAL_DENSITY = 1 / math.sqrt(2 * math.pi)


def sigmoid(x: np.ndarray) -> np.ndarray:
    """1 / (1 + exp(-x)), as exp(min(x, 0)) / (1 + exp(-|x|)) against overflow."""
    with np.errstate(all="ignore"):
        share, total = np.minimum(x, 0), -np.abs(x)
        np.exp(share, out=share)
        np.exp(total, out=total)
        total += 1
        share /= total
        return share


@functools.cache
def _erfc_polynomial() -> np.ndarray:
    """Coefficients (highest power first, in s) of P in erfc(z) = t exp(-z^2 + P(s)), t = 1 / (1 + z / 2).

    s in [-1, 1] maps to t in [1 / (1 + _ERFC_LARGEST / 2), 1]. W. H. Press et al., Numerical Recipes, section 6.2.2;
    interpolated at Chebyshev points.
    """
    points = np.polynomial.chebyshev.chebpts1(_ERFC_TERMS)
    t = _ERFC_LOWEST + (1 - _ERFC_LOWEST) * (points + 1) / 2
    z = 2 * (1 - t) / t
    logarithm = [math.log(math.erfc(value) / scale) + value * value for value, scale in zip(z, t, strict=True)]
    series = np.polynomial.chebyshev.chebfit(points, logarithm, _ERFC_TERMS - 1)
    return np.polynomial.chebyshev.cheb2poly(series)[::-1].copy()


def normal_cdf(x: np.ndarray) -> np.ndarray:
    """(1 + erf(x / sqrt(2))) / 2 in float64, relative error near 1e-12 in both tails."""
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


def softcap(x: np.ndarray, limit: float | None) -> np.ndarray:
    return x if limit is None else limit * np.tanh(x / limit)


def softcap_derivative(x: np.ndarray, limit: float | None) -> np.ndarray:
    """1 - tanh(x / limit)^2 in fp32, as 4 e / (1 + e)^2 with e = exp(-2 |x / limit|) against cancellation."""
    if limit is None:
        return np.ones_like(x)
    power = np.exp(np.abs(x) * (-2 / limit))
    return 4 * power / np.square(1 + power)


def _silu_and_slope(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(x s, s (1 + x s(-x))), s the sigmoid. s(-x) = exp(-x) s avoids cancellation."""
    slope = np.negative(x)
    np.exp(slope, out=slope)
    share = slope + 1
    np.reciprocal(share, out=share)
    np.clip(slope, 0, np.finfo(slope.dtype).max, out=slope)  # no infinity meets a zero
    slope *= share
    value = np.clip(x, -_SATURATED["silu"], _SATURATED["silu"])
    slope *= value
    slope += 1
    slope *= share
    return np.multiply(x, share, out=value), slope


def split(values: np.ndarray, activation: Activation) -> tuple[np.ndarray, np.ndarray | None]:
    """The gate and up columns `[R, F]` of `[R, 2F]`, or (values, None) if ungated."""
    if not activation.gated:
        return values, None
    if activation.gate_layout == "interleaved":
        return values[..., 0::2], values[..., 1::2]
    half = values.shape[-1] // 2
    return values[..., :half], values[..., half:]


def apply(gate: np.ndarray, up: np.ndarray | None, activation: Activation, out: np.ndarray | None = None) -> np.ndarray:
    """`activation` of fp32 `[R, F]`, possibly in the memory `out`. up is None if ungated."""
    with np.errstate(all="ignore"):
        if activation.name == "softcapped_silu":
            assert up is not None
            return softcap(gate, activation.alpha) * sigmoid(gate) * softcap(up, activation.limit)
        limit = activation.limit
        if limit is not None:
            assert up is not None
            up = np.clip(up, -limit, limit)
            if activation.name != "clamped_silu":
                gate = np.minimum(gate, limit)
        if activation.name == "swiglu_oai":
            assert up is not None and activation.alpha is not None
            return gate * sigmoid(activation.alpha * gate) * (up + 1)
        if activation.name in ("silu", "clamped_silu"):
            divisor = np.negative(gate)
            np.exp(divisor, out=divisor)
            divisor += 1
            activated = np.divide(gate, divisor, out=divisor)
            if limit is not None and activation.name == "clamped_silu":
                activated = np.minimum(activated, limit)
        elif activation.name == "gelu":
            activated = (gate * normal_cdf(gate)).astype(gate.dtype)
        elif activation.name == "gelu_tanh":
            # (1 + tanh(u)) / 2 = sigmoid(2u), without cancellation for negative u.
            inner = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate * gate * gate)
            activated = gate * sigmoid(2 * inner)
        else:
            assert activation.name == "relu2"
            activated = np.square(np.maximum(gate, 0))
        return activated if up is None else np.multiply(activated, up, out=activated if out is None else out)


def _split_wide(x: np.ndarray, up: np.ndarray | None, activation: Activation) -> tuple[np.ndarray, np.ndarray | None]:
    return split(to_float32(x), activation) if up is None else (to_float32(x), to_float32(up))


def activation(
    x: np.ndarray, up: np.ndarray | None = None, *, activation: Activation, out_dtype: str | None = None
) -> np.ndarray:
    gate_values, up_values = _split_wide(x, up, activation)
    return round_to(apply(gate_values, up_values, activation), out_dtype or x.dtype)


def activation_derivative(x: np.ndarray, name: str) -> np.ndarray:
    """d act(x) / dx in fp32 of `silu`, `gelu`, `gelu_tanh` or `relu2`. NaN stays NaN.

    silu: s(x) (1 + x s(-x)), s the sigmoid; 1 - s(x) would cancel. gelu: Phi(x) + x phi(x). gelu_tanh = x s(v), v = 2
    sqrt(2/pi) (x + 0.044715 x^3): s(v) (1 + x s(-v) dv/dx). relu2: 2 max(x, 0).
    """
    with np.errstate(all="ignore"):
        if name == "relu2":
            return 2 * np.maximum(x, 0)
        if name == "silu":
            return _silu_and_slope(x)[1]
        bound = _SATURATED[name]
        x = np.clip(x, -bound, bound)
        if name == "gelu":
            density = _NORMAL_DENSITY * np.exp(-0.5 * x * x)
            return normal_cdf(x).astype(x.dtype) + x * density
        assert name == "gelu_tanh"
        scale, cubic = x.dtype.type(2 * math.sqrt(2 / math.pi)), x.dtype.type(0.044715)
        inner = scale * (x + cubic * x * x * x)
        slope = scale * (1 + 3 * cubic * x * x)
        return sigmoid(inner) * (1 + x * sigmoid(-inner) * slope)


def _value_and_gradients(
    d_y: np.ndarray,
    gate: np.ndarray,
    up: np.ndarray | None,
    activation: Activation,
    places: tuple[np.ndarray | None, np.ndarray | None] = (None, None),
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """(y, d_gate, d_up) of `apply` as fp32 arrays `[R, F]`. d_up is None if ungated.

    Ungated: d_gate = d_y * act'(gate). Gated: d_gate = (d_y * up) * act'(gate), d_up = d_y * act(gate), with clamped
    gate and up, and exactly 0 where a clamp holds. swiglu_oai, a = alpha: act(g) = g s(a g), act'(g) = s(a g) (1 + a g
    s(-a g)) and up + 1 for up. softcapped_silu, c(x) = limit tanh(x / limit): act'(g) = c'(g) s(g) + c(g) s(g) s(-g),
    and d_up is times c'(up).
    """
    with np.errstate(all="ignore"):
        if up is None:
            value, slope = _value_and_slope(gate, activation.name)
            return value, np.multiply(d_y, slope, out=slope), None
        if activation.name == "softcapped_silu":
            share, second = sigmoid(gate), softcap(up, activation.limit)
            activated = softcap(gate, activation.alpha) * share
            derivative = softcap_derivative(gate, activation.alpha) * share + activated * sigmoid(-gate)
            d_up = d_y * activated * softcap_derivative(up, activation.limit)
            return activated * second, d_y * second * derivative, d_up
        limit = activation.limit
        inner, bounded = gate, up
        if limit is not None:
            bounded = np.clip(up, -limit, limit)
            inner = gate if activation.name == "clamped_silu" else np.minimum(gate, limit)
        name = "silu" if activation.name in ("swiglu_oai", "clamped_silu") else activation.name
        if activation.name == "swiglu_oai":
            assert activation.alpha is not None
            scaled = activation.alpha * inner
            activated, derivative = inner * sigmoid(scaled), _silu_and_slope(scaled)[1]
            bounded = bounded + 1
        else:
            activated, derivative = _value_and_slope(inner, name)
        d_gate = np.multiply(d_y, bounded, out=places[0])
        d_gate *= derivative
        if limit is not None:
            beyond = gate > limit
            if activation.name == "clamped_silu":
                beyond = activated > limit
                activated = np.minimum(activated, limit)
            d_gate[beyond] = 0.0
        d_up = np.multiply(d_y, activated, out=derivative if places[1] is None else places[1])
        if limit is not None:
            d_up[np.abs(up) > limit] = 0.0
        return np.multiply(activated, bounded, out=activated), d_gate, d_up


def _value_and_slope(x: np.ndarray, name: str) -> tuple[np.ndarray, np.ndarray]:
    if name == "silu":
        return _silu_and_slope(x)
    return apply(x, None, Activation(name, gated=False)), activation_derivative(x, name)


def join(gate: np.ndarray, up: np.ndarray | None, activation: Activation) -> np.ndarray:
    """The inverse of `split`. `separate` joins like `halves`."""
    if up is None:
        return gate
    if activation.gate_layout == "interleaved":
        return np.stack([gate, up], axis=-1).reshape(*gate.shape[:-1], 2 * gate.shape[-1])
    return np.concatenate([gate, up], axis=-1)


def activation_backward(
    d_y: np.ndarray, x: np.ndarray, up: np.ndarray | None = None, *, activation: Activation
) -> np.ndarray | tuple[np.ndarray, np.ndarray]:
    gate_values, up_values = _split_wide(x, up, activation)
    d_gate, d_up = _value_and_gradients(to_float32(d_y), gate_values, up_values, activation)[1:]
    if up is None:
        return round_to(join(d_gate, d_up, activation), x.dtype)
    assert d_up is not None
    return round_to(d_gate, x.dtype), round_to(d_up, x.dtype)


def expert_activation_backward(
    operands: ExpertActivationOperands,
    *,
    activation: Activation,
    outputs: tuple[str, ...] = ("d_pre", "weighted_hidden", "d_weight"),
    fill: Callable[[Callable[[slice], None] | None], object] | None = None,
) -> tuple[np.ndarray, ...]:
    """The activation's backward between the two matmuls, fused with the gradient of the row weight.

    z = d_hidden `[R, F]` is the unweighted gradient of `hidden @ W_down + b_down` with respect to hidden, h =
    activation(pre) `[R, F]`, and w = row_weight fp32 `[T * K]` by slot (None: 1):

        d_pre = activation'(pre) (w z)        weighted_hidden = w h        d_weight[slot] = <z, h> + bias_product

    bias_product fp32 `[T * K]` is <d_out[token], b_down[expert]>, so that <z, h> + bias_product = <d_out, y> without
    the expert output y. h is recomputed from pre in fp32, <z, h> summed in fp32, d_pre and weighted_hidden rounded
    once. For arrays and outputs see `plan_expert_activation_backward`. A slot without a row does not read its
    row_weight. Rows without a slot become exact zeros. fill: writes d_hidden, and calls its argument (unless None) with
    each slice of rows it has written.
    """
    d_hidden, pre, row_of_slot = operands.d_hidden, operands.pre, operands.row_of_slot
    row_weight, bias_product = operands.row_weight, operands.bias_product
    places = np.arange(len(pre)) if row_of_slot is None else row_of_slot
    slots = np.flatnonzero(places >= 0)
    rows = places[slots]
    dense = len(rows) == len(pre)
    if row_of_slot is not None:
        if dense:
            by_row = np.empty_like(slots)
            by_row[rows] = slots
            slots = by_row
        else:
            ascending = np.argsort(rows)
            slots, rows = slots[ascending], rows[ascending]
    make = np.empty if dense else np.zeros
    d_weight = np.zeros(len(places), working_dtype(pre))
    d_pre, weighted = make(pre.shape, pre.dtype), make(d_hidden.shape, pre.dtype)
    weights = None if row_weight is None else row_weight.reshape(-1)[slots, None]

    def back(block: slice) -> None:
        own_rows, own_slots = block if dense else rows[block], slots[block]
        z = to_float32(d_hidden[own_rows])
        gate, up = split(to_float32(pre[own_rows]), activation)
        with np.errstate(all="ignore"):
            d_y = z if weights is None else weights[block] * z
            to_gate, to_up = split(d_pre[block], activation) if dense else (None, None)
            direct = to_gate is not None and pre.dtype == z.dtype
            hidden, d_gate, d_up = _value_and_gradients(
                d_y, gate, up, activation, (to_gate, to_up) if direct else (None, None)
            )
            d_weight[own_slots] = (z * hidden).sum(axis=-1)
            if bias_product is not None:
                d_weight[own_slots] += bias_product[own_slots]
            if direct and weights is not None:
                np.multiply(weights[block], hidden, out=weighted[block])
            else:
                weighted[own_rows] = round_to(hidden if weights is None else weights[block] * hidden, pre.dtype)
            if to_gate is None:
                d_pre[own_rows] = round_to(join(d_gate, d_up, activation), pre.dtype)
            else:
                for destination, gradient in ((to_gate, d_gate), (to_up, d_up)):
                    if destination is not None and gradient is not destination:
                        destination[...] = gradient

    if fill is not None:
        fill(back if dense else None)
    if fill is None or not dense:
        spread(back, row_blocks(*pre.shape), elements(*pre.shape))
    made = {"d_pre": d_pre, "weighted_hidden": weighted, "d_weight": d_weight}
    return tuple(made[name] for name in outputs)


def expert_activation_backward_plan(
    arrays: Mapping[str, np.ndarray], *, activation: Activation, outputs: tuple[str, ...]
) -> tuple[np.ndarray, ...]:
    operands = bundle_of(ExpertActivationOperands, arrays)
    return expert_activation_backward(operands, activation=activation, outputs=outputs)
