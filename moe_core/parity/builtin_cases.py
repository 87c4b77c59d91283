"""Built-in cases: the MoE layers of public models, scaled down, with drawn weights and inputs.

Kept: scoring, order of softmax and top-k, grouping, correction bias, renormalisation, scale, activation with its
constants, gate and weight layout, biases, shared experts and their gate. Scaled: experts, K, widths, tokens. `small`
suits Triton's interpreter, `large` a GPU. Widths avoid powers of two if the model's do.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from moe_core.base import dtypes, require_choice
from moe_core.formats import Scheme, scheme_named
from moe_core.ops.quantize.reference import quantize
from moe_core.parity.case import Case, token_count
from moe_core.specs import Activation, ExpertWeights, MoESpec, RouterSpec, RouterWeights, SharedExpert


@dataclass(frozen=True)
class Sizes:
    num_experts: int
    top_k: int
    d_model: int
    d_ff: int
    num_tokens: int


@dataclass(frozen=True)
class BuiltInCase:
    """A model's MoE layer. gain: standard deviation before the activation, to reach clamps. shared_width: d_ff of the
    shared expert as a multiple of d_ff, 0 = none. masked_tokens: padding at the end. scheme: formats of weights and
    activations.
    """

    description: str
    small: Sizes
    large: Sizes
    router: Callable[[Sizes], RouterSpec]
    activation: Activation
    weight_layout: str
    biases: bool = False
    correction_bias: bool = False
    weight_on_input: bool = False
    shared_width: int = 0
    shared_gate: bool = False
    masked_tokens: int = 0
    gain: float = 1.0
    scheme: Scheme | None = None


def _softmax(**options: Any) -> Callable[[Sizes], RouterSpec]:
    return lambda sizes: RouterSpec(sizes.top_k, "softmax", **options)


def _deepseek(sizes: Sizes) -> RouterSpec:
    # The model keeps 4 of 8 groups of 32 experts; scaled down, groups keep at least 4 experts.
    groups = min(8, sizes.num_experts // 4)
    return RouterSpec(sizes.top_k, "sigmoid", renormalize=True, scale=2.5, num_groups=groups, topk_group=groups // 2)


_SILU = Activation("silu", gate_layout="halves")

BUILT_IN: dict[str, BuiltInCase] = {
    "mixtral": BuiltInCase(
        "Mixtral 8x7B: 8 experts, 2 chosen, softmax then top-k renormalised, gate and up in two buffers [E, F, D]",
        Sizes(8, 2, 128, 224, 160),
        Sizes(8, 2, 1024, 3584, 512),
        _softmax(order="softmax_then_topk", renormalize=True),
        Activation("silu", gate_layout="separate"),
        "out_in",
    ),
    "qwen3_moe": BuiltInCase(
        "Qwen3-30B-A3B: 128 experts, 8 chosen, softmax then top-k renormalised, fused weights [E, D, 2F]",
        Sizes(32, 8, 96, 48, 96),
        Sizes(128, 8, 512, 384, 512),
        _softmax(order="softmax_then_topk", renormalize=True),
        _SILU,
        "in_out",
    ),
    "gpt_oss": BuiltInCase(
        "gpt-oss-20b: 32 experts, 4 chosen, top-k then softmax, biases, clamped swiglu on interleaved weights",
        Sizes(32, 4, 180, 180, 96),
        Sizes(32, 4, 720, 720, 512),
        _softmax(order="topk_then_softmax"),
        Activation("swiglu_oai", gate_layout="interleaved", alpha=1.702, limit=7.0),
        "in_out",
        biases=True,
        gain=4.0,
    ),
    "deepseek_v3": BuiltInCase(
        "DeepSeek-V3: 256 experts, 8 chosen from 4 of 8 groups, biased sigmoid, renormalised x 2.5, a shared expert",
        Sizes(64, 8, 112, 64, 48),
        Sizes(256, 8, 896, 128, 256),
        _deepseek,
        _SILU,
        "out_in",
        correction_bias=True,
        shared_width=1,
    ),
    "deepseek_v4": BuiltInCase(
        "DeepSeek-V4: biased sqrt-softplus, renormalised x 1.5, gate and up clamped before silu, a shared expert",
        Sizes(16, 6, 112, 80, 48),
        Sizes(256, 6, 896, 256, 256),
        lambda sizes: RouterSpec(sizes.top_k, "sqrt_softplus", renormalize=True, scale=1.5),
        Activation("silu", limit=10.0),
        "out_in",
        correction_bias=True,
        shared_width=1,
        gain=6.0,
    ),
    "qwen2_moe": BuiltInCase(
        "Qwen2-57B-A14B: 64 experts, 8 chosen, softmax then top-k, gated shared expert; padded batch",
        Sizes(16, 3, 112, 80, 64),
        Sizes(64, 8, 448, 320, 256),
        _softmax(order="softmax_then_topk"),
        _SILU,
        "out_in",
        shared_width=2,
        shared_gate=True,
        masked_tokens=3,
    ),
    "llama4": BuiltInCase(
        "Llama 4 Scout: 16 experts, 1 chosen, sigmoid weight on the input, a shared expert",
        Sizes(16, 1, 160, 128, 64),
        Sizes(16, 1, 640, 1024, 256),
        lambda sizes: RouterSpec(sizes.top_k, "sigmoid"),
        _SILU,
        "in_out",
        weight_on_input=True,
        shared_width=1,
    ),
}
BUILT_IN |= {
    "gpt_oss_mxfp4": dataclasses.replace(
        BUILT_IN["gpt_oss"],
        description="gpt-oss-20b as published: the experts of gpt_oss in mxfp4, rows of inputs [E, 2F, D]",
        small=Sizes(4, 2, 160, 96, 16),
        large=Sizes(32, 4, 768, 768, 512),
        weight_layout="out_in",
        scheme=scheme_named("mxfp4_w4a16"),
    ),
    "deepseek_v3_fp8_block": dataclasses.replace(
        BUILT_IN["deepseek_v3"],
        description="DeepSeek-V3 as published: experts in fp8 blocks of 128 x 128, activations in groups of 128",
        small=Sizes(8, 2, 200, 136, 12),
        large=Sizes(256, 8, 896, 192, 256),
        scheme=scheme_named("fp8_block"),
    ),
    "qwen3_moe_int4": dataclasses.replace(
        BUILT_IN["qwen3_moe"],
        description="Qwen3-30B-A3B in int4: groups of 128 with zero points, as compressed-tensors stores them",
        small=Sizes(4, 2, 256, 128, 12),
        weight_layout="out_in",
        scheme=scheme_named("int4_w4a16_zp"),
    ),
}


@dataclass(frozen=True)
class Draw:
    """num_tokens None: the case's own."""

    dtype: str = "bfloat16"
    seed: int = 0
    num_tokens: int | None = None
    large: bool = False


class _Generator:
    def __init__(self, name: str, draw: Draw) -> None:
        self._random, self._dtype = np.random.default_rng([draw.seed, *name.encode()]), draw.dtype

    def normal(self, deviation: float, *shape: int, dtype: str | None = None) -> np.ndarray:
        values = self._random.standard_normal(shape, dtype=np.float32) * np.float32(deviation)
        return values.astype(dtypes.numpy_dtype(dtype or self._dtype))

    def weight(self, layout: str, gain: float, *shape: int) -> np.ndarray:
        """A matrix `[..., inputs, outputs]` that multiplies standard deviations by `gain`."""
        *leading, inputs, outputs = shape
        stored = (inputs, outputs) if layout == "in_out" else (outputs, inputs)
        return self.normal(gain / math.sqrt(inputs), *leading, *stored)


def built_in_case(name: str, draw: Draw = Draw()) -> Case:
    """Make the built-in case `name` (`mixtral`, ...). Raises InvalidInput."""
    require_choice("case", name, tuple(BUILT_IN))
    require_choice("dtype", draw.dtype, dtypes.MATMUL_DTYPES)
    model = BUILT_IN[name]
    sizes = model.large if draw.large else model.small
    num_tokens = token_count(draw.num_tokens, sizes.num_tokens)
    generator, router_layout = _Generator(name, draw), "out_in"
    mask = np.arange(num_tokens) < max(1, num_tokens - model.masked_tokens) if model.masked_tokens else None
    x, experts = generator.normal(1.0, num_tokens, sizes.d_model), _experts(model, sizes, generator)
    routing = RouterWeights(
        # Standard deviation 2: scores neither flat nor saturated.
        generator.weight(router_layout, 2.0, sizes.d_model, sizes.num_experts),
        generator.normal(0.5, sizes.num_experts) if model.biases else None,
        generator.normal(0.1, sizes.num_experts, dtype="float32") if model.correction_bias else None,
    )
    spec = MoESpec(model.activation, model.router(sizes), model.weight_layout, router_layout, model.weight_on_input)
    spec = dataclasses.replace(spec, activations=model.scheme and model.scheme.activations)
    shared = _shared(model, sizes, generator)
    return Case(name, model.description, x, experts, routing, spec, shared, mask)


def _experts(model: BuiltInCase, sizes: Sizes, generator: _Generator) -> ExpertWeights:
    experts, width, hidden = sizes.num_experts, sizes.d_model, sizes.d_ff
    layout, scheme, separate = model.weight_layout, model.scheme, model.activation.gate_layout == "separate"
    columns = hidden if separate else 2 * hidden

    def weight(gain: float, inputs: int, outputs: int) -> Any:
        plain = generator.weight(layout, gain, experts, inputs, outputs)
        return plain if scheme is None else quantize(plain, scheme.weights, layout=layout)

    return ExpertWeights(
        gate_up=weight(model.gain, width, columns),
        down=weight(1.0, hidden, width),
        up=weight(model.gain, width, columns) if separate else None,
        gate_up_bias=generator.normal(0.5, experts, columns) if model.biases else None,
        down_bias=generator.normal(0.5, experts, width) if model.biases else None,
    )


def _shared(model: BuiltInCase, sizes: Sizes, generator: _Generator) -> SharedExpert | None:
    if not model.shared_width:
        return None
    width, hidden, layout = sizes.d_model, sizes.d_ff * model.shared_width, model.weight_layout
    return SharedExpert(
        gate_up=generator.weight(layout, model.gain, width, 2 * hidden),
        down=generator.weight(layout, 1.0, hidden, width),
        gate=generator.weight(layout, 1.0, width, 1) if model.shared_gate else None,
    )
