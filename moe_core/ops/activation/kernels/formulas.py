"""Activations and their derivatives in fp32."""

import triton
import triton.language as tl


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def sigmoid_ptx(x):
    """The bits of `sigmoid` on NVIDIA in half its instructions, because no branch for tiny numbers is needed: a
    subnormal exp(-x) is lost in the sum, and a quarter of 1 + exp(-x) has a normal reciprocal."""
    return tl.inline_asm_elementwise(
        "{ .reg .f32 e; neg.f32 e, $1; mul.rn.f32 e, e, 0f3FB8AA3B; ex2.approx.ftz.f32 e, e;"
        " fma.rn.f32 e, e, 0f3E800000, 0f3E800000; rcp.approx.ftz.f32 e, e; mul.rn.f32 $0, e, 0f3E800000; }",
        "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def activate(x, NAME: tl.constexpr, SIGMOID: tl.constexpr = sigmoid):
    """act(x), ungated. Comparisons with NaN are false, so `where` keeps NaN."""
    if NAME == "silu":
        return x * SIGMOID(x)
    elif NAME == "gelu":
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif NAME == "gelu_tanh":
        # 0.5 * x * (1 + tanh(u)) = x * sigmoid(2 * u)
        return x * SIGMOID(1.5957691216057308 * (x + 0.044715 * x * x * x))
    else:
        tl.static_assert(NAME == "relu2", "unknown activation")
        positive = tl.where(x < 0.0, 0.0, x)
        return positive * positive


@triton.jit
def activate_gated(
    gate, up, NAME: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr, SIGMOID: tl.constexpr = sigmoid
):
    """act(gate) * up with its bounds. Formulas: `moe_core.specs.matmul.Activation`."""
    if NAME == "softcapped_silu":
        if LIMIT is not None:
            up = softcap(up, LIMIT)
        return softcap(gate, ALPHA) * SIGMOID(gate) * up
    else:
        if LIMIT is not None:
            up = clamp(up, LIMIT)
            if NAME != "clamped_silu":
                gate = tl.where(gate > LIMIT, LIMIT, gate)
        if NAME == "swiglu_oai":
            return gate * SIGMOID(ALPHA * gate) * (up + 1.0)
        elif NAME == "clamped_silu":
            activated = activate(gate, "silu", SIGMOID)
            return tl.where(activated > LIMIT, LIMIT, activated) * up
        else:
            return activate(gate, NAME, SIGMOID) * up


@triton.jit
def clamp(x, LIMIT: tl.constexpr):
    return tl.where(x > LIMIT, LIMIT, tl.where(x < -LIMIT, -LIMIT, x))


@triton.jit
def softcap(x, LIMIT: tl.constexpr):
    """LIMIT * tanh(x / LIMIT). A polynomial near 0, where 1 - 2 / (1 + exp(2z)) would cancel."""
    z = x * (1.0 / LIMIT)
    square = z * z
    rest = (((-0.00610495 * square + 0.02100364) * square - 0.0538525) * square + 0.13332782) * square - 0.33333329
    small = z + z * square * rest
    size = tl.abs(z)
    large = 1.0 - 2.0 / (1.0 + tl.exp(2.0 * size))
    return LIMIT * tl.where(size < 0.625, small, tl.where(z < 0.0, -large, large))


@triton.jit
def softcap_slope(x, LIMIT: tl.constexpr):
    """1 - tanh(x / LIMIT)^2 without its cancellation: 4 e / (1 + e)^2 with e = exp(-2 |x / LIMIT|)."""
    power = tl.exp(tl.abs(x) * (-2.0 / LIMIT))
    return 4.0 * power / ((1.0 + power) * (1.0 + power))


@triton.jit
def value_and_slope(x, NAME: tl.constexpr):
    """(act(x), d act(x) / dx), ungated. At a bound the slope is constant, so that no infinity meets a zero."""
    if NAME == "silu":
        bounded = clamp(x, 128.0)
        share = sigmoid(bounded)
        return x * share, share * (1.0 + bounded * (1.0 - share))
    elif NAME == "gelu":
        bounded = clamp(x, 16.0)
        twice = 1.0 + tl.erf(bounded * 0.7071067811865476)
        density = 0.3989422804014327 * tl.exp(-0.5 * bounded * bounded)
        return 0.5 * x * twice, 0.5 * twice + bounded * density
    elif NAME == "gelu_tanh":
        bounded = clamp(x, 16.0)
        square = bounded * bounded
        share = sigmoid(1.5957691216057308 * (bounded + 0.044715 * square * bounded))
        slope = 1.5957691216057308 * (1.0 + 0.134145 * square)
        return x * share, share * (1.0 + bounded * (1.0 - share) * slope)
    else:
        tl.static_assert(NAME == "relu2", "unknown activation")
        positive = tl.where(x < 0.0, 0.0, x)
        return positive * positive, 2.0 * positive


@triton.jit
def gated_backward(d_y, gate, up, NAME: tl.constexpr, ALPHA: tl.constexpr, LIMIT: tl.constexpr):
    """(y, d_gate, d_up) of `activate_gated`, exact zeros where a factor is clamped."""
    if NAME == "softcapped_silu":
        share = sigmoid(gate)
        activated = softcap(gate, ALPHA) * share
        slope = softcap_slope(gate, ALPHA) * share + activated * (1.0 - share)
        d_up = d_y * activated
        if LIMIT is not None:
            d_up = d_up * softcap_slope(up, LIMIT)
            up = softcap(up, LIMIT)
        return activated * up, d_y * up * slope, d_up
    else:
        g, u = gate, up
        if LIMIT is not None:
            u = clamp(up, LIMIT)
            if NAME != "clamped_silu":
                g = tl.where(gate > LIMIT, LIMIT, gate)
        if NAME == "swiglu_oai":
            # With s the sigmoid, g s(a g) is silu(a g) / a: its slope is silu's at a g, its value is s(a g) g.
            _, slope = value_and_slope(ALPHA * g, "silu")
            activated = g * sigmoid(ALPHA * g)
            u += 1.0
        elif NAME == "clamped_silu":
            activated, slope = value_and_slope(gate, "silu")
        else:
            activated, slope = value_and_slope(g, NAME)
        d_gate = d_y * u * slope
        if NAME == "clamped_silu":
            d_gate = tl.where(activated > LIMIT, 0.0, d_gate)
            activated = tl.where(activated > LIMIT, LIMIT, activated)
        elif LIMIT is not None:
            d_gate = tl.where(gate > LIMIT, 0.0, d_gate)
        d_up = d_y * activated
        if LIMIT is not None:
            d_up = tl.where((up > LIMIT) | (up < -LIMIT), 0.0, d_up)
        return activated * u, d_gate, d_up
