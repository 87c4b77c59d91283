"""What the tests of the torch front-end share: engines, small layers, arrays there and back."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest
import torch

import moe_torch
from moe_core.base.dtypes import numpy_dtype
from moe_core.runtime.cuda import cuda_available
from moe_core.specs.matmul import Activation
from moe_core.specs.moe import MoESpec
from moe_core.specs.operands import ExpertWeights, RouterLogits, RouterWeights, SharedExpert, TopK, map_arrays
from moe_core.specs.routing import RouterSpec

REAL_KERNELS = "cuda" if cuda_available() and os.environ.get("TRITON_INTERPRET", "0") != "1" else "interpreter"
ENGINES = (REAL_KERNELS, "reference")
on_engines = pytest.mark.parametrize("engine", ENGINES)
D_MODEL, D_FF, NUM_EXPERTS = 48, 32, 5


@contextlib.contextmanager
def running_on(engine: str) -> Iterator[torch.device]:
    """The device whose tensors run on this engine."""
    if engine == "cuda":
        yield torch.device("cuda", 0)
    else:
        with moe_torch.cpu_engine(engine):
            yield torch.device("cpu")


def to_torch(tree: Any, device: torch.device | str = "cpu") -> Any:
    """NumPy (or ml_dtypes) arrays, alone or in a bundle, as tensors of their own."""
    if tree is None:
        return None
    if isinstance(tree, np.ndarray):
        tree = np.ascontiguousarray(tree)
        if tree.dtype == ml_dtypes.bfloat16:
            return torch.tensor(tree.view(np.int16), device=device).view(torch.bfloat16)
        return torch.tensor(tree, device=device)
    if isinstance(tree, tuple):
        return tuple(to_torch(item, device) for item in tree)
    return map_arrays(tree, lambda array: to_torch(array, device))


def to_numpy(tensor: torch.Tensor) -> np.ndarray:
    """A tensor as a NumPy (or ml_dtypes) array."""
    tensor = tensor.detach().cpu().contiguous()
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()


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


def small_layer(dtype: str = "float32", *, num_tokens: int = 9, top_k: int = 2, seed: int = 0) -> Layer:
    """A gated layer of NUM_EXPERTS experts in NumPy, routed from x."""
    random = np.random.default_rng(seed)
    x = random.standard_normal((num_tokens, D_MODEL)).astype(np.float32).astype(numpy_dtype(dtype))
    experts = ExpertWeights(
        draw(random, NUM_EXPERTS, D_MODEL, 2 * D_FF, dtype=dtype), draw(random, NUM_EXPERTS, D_FF, D_MODEL, dtype=dtype)
    )
    routing = RouterWeights(draw(random, D_MODEL, NUM_EXPERTS))
    return Layer(x, experts, routing, MoESpec(Activation("silu"), RouterSpec(top_k)))


def torch_layer(device: torch.device | str = "cpu", **options: Any) -> Layer:
    """`small_layer` as tensors."""
    layer = small_layer(**options)
    return Layer(*to_torch(tuple(layer[:3]), device), layer.spec)


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


def require_equal(first: Any, second: Any, label: str) -> None:
    """Raise AssertionError unless two tensors, or tuples of tensors and None, have equal shapes, dtypes and bits."""
    if isinstance(first, tuple):
        assert len(first) == len(second), label
        for number, (one, other) in enumerate(zip(first, second, strict=True)):
            require_equal(one, other, f"{label}[{number}]")
        return
    assert (first is None) == (second is None), label
    if first is not None:
        assert (first.dtype, first.shape) == (second.dtype, second.shape), f"{label}: {first.dtype} {second.dtype}"
        same = torch.equal(first.contiguous().view(torch.uint8), second.contiguous().view(torch.uint8))
        assert same, f"{label} differs:\n{first}\n{second}"


TOKEN_COUNTS = (5, 9, 6, 33)
