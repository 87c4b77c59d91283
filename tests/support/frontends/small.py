"""Small layers in NumPy and the engines of tests, without a framework."""

from __future__ import annotations

import os
from typing import Any, NamedTuple

import numpy as np
import pytest

from moe_core.base.dtypes import numpy_dtype
from moe_core.runtime.cuda import cuda_available
from moe_core.specs import Activation, MoESpec, RouterSpec
from moe_core.specs.operands import ExpertWeights, RouterLogits, RouterWeights, SharedExpert, TopK

REAL_KERNELS = "cuda" if cuda_available() and os.environ.get("TRITON_INTERPRET", "0") != "1" else "interpreter"
ENGINES = (REAL_KERNELS, "reference")
on_engines = pytest.mark.parametrize("engine", ENGINES)
D_MODEL, D_FF, NUM_EXPERTS = 48, 32, 5


class Layer(NamedTuple):
    """The arguments of a whole MoE forward."""

    x: Any
    experts: ExpertWeights
    routing: RouterWeights | RouterLogits | TopK
    spec: MoESpec


def draw(random: np.random.Generator, *shape: int, dtype: str = "float32") -> np.ndarray:
    """Normal numbers whose products over the second to last axis keep an rms of about 1."""
    scale = 1.0 if len(shape) < 2 else shape[-2] ** -0.5
    return (random.standard_normal(shape) * scale).astype(np.float32).astype(numpy_dtype(dtype))


def small_layer(
    dtype: str = "float32", *, num_tokens: int = 9, num_experts: int = NUM_EXPERTS, top_k: int = 2, seed: int = 0
) -> Layer:
    """A gated layer in NumPy, routed from x."""
    random = np.random.default_rng(seed)
    x = random.standard_normal((num_tokens, D_MODEL)).astype(np.float32).astype(numpy_dtype(dtype))
    experts = ExpertWeights(
        draw(random, num_experts, D_MODEL, 2 * D_FF, dtype=dtype), draw(random, num_experts, D_FF, D_MODEL, dtype=dtype)
    )
    routing = RouterWeights(draw(random, D_MODEL, num_experts))
    return Layer(x, experts, routing, MoESpec(Activation("silu"), RouterSpec(top_k)))


def full_layer(seed: int = 7, num_tokens: int = 7) -> tuple[Layer, dict[str, Any]]:
    """A layer with every optional array: separate buffers, biases, map, mask, gated shared expert; in NumPy."""
    random = np.random.default_rng(seed)
    num_local, num_global = 3, 4
    x = random.standard_normal((num_tokens, D_MODEL)).astype(np.float32)
    experts = ExpertWeights(
        draw(random, num_local, D_FF, D_MODEL),
        draw(random, num_local, D_MODEL, D_FF),
        up=draw(random, num_local, D_FF, D_MODEL),
        gate_up_bias=draw(random, num_local, D_FF),
        up_bias=draw(random, num_local, D_FF),
        down_bias=draw(random, num_local, D_MODEL),
    )
    shared = SharedExpert(
        draw(random, D_FF, D_MODEL),
        draw(random, D_MODEL, D_FF),
        up=draw(random, D_FF, D_MODEL),
        gate=draw(random, 1, D_MODEL),
    )
    routing = RouterWeights(
        draw(random, num_global, D_MODEL), bias=draw(random, num_global), correction_bias=draw(random, num_global)
    )
    spec = MoESpec(
        Activation("swiglu_oai", gate_layout="separate"),
        RouterSpec(2, "sigmoid", renormalize=True, scale=2.5),
        weight_layout="out_in",
        router_weight_layout="out_in",
    )
    options = {
        "token_mask": np.arange(num_tokens) < num_tokens - 2,
        "expert_map": np.array([0, -1, 2, 1], np.int32),
        "shared": shared,
    }
    return Layer(x, experts, routing, spec), options
