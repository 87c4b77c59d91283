"""What the tests of the JAX front-end share: engines, small layers, arrays there and back."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import moe_jax
from moe_core.cuda import cuda_available
from moe_core.dtypes import numpy_dtype
from moe_core.errors import InvalidInput
from moe_core.operands import ExpertWeights, RouterWeights
from moe_core.specs import Activation, MoESpec, RouterSpec

REAL_KERNELS = "cuda" if cuda_available() and os.environ.get("TRITON_INTERPRET", "0") != "1" else "interpreter"
ENGINES = (REAL_KERNELS, "reference")
on_engines = pytest.mark.parametrize("engine", ENGINES)


@contextlib.contextmanager
def running_on(engine: str) -> Iterator[None]:
    """New arrays, and ops on them, use this engine."""
    if engine == "cuda":
        with jax.default_device(jax.devices("cuda")[0]):
            yield
    else:
        with jax.default_device(jax.devices("cpu")[0]), moe_jax.cpu_engine(engine):
            yield


def to_jax(tree: Any) -> Any:
    """NumPy arrays in any bundle as JAX arrays on the default device."""
    return jax.tree.map(jnp.asarray, tree)


def to_numpy(tree: Any) -> Any:
    """JAX arrays in any bundle as NumPy arrays."""
    return jax.tree.map(np.asarray, tree)


class Layer(NamedTuple):
    """The arguments of a whole MoE forward, in NumPy."""

    x: np.ndarray
    experts: ExpertWeights
    routing: Any
    spec: MoESpec


def draw(random: np.random.Generator, *shape: int, dtype: str = "float32") -> np.ndarray:
    """Normal numbers whose products over the second to last axis keep an rms of about 1."""
    scale = 1.0 if len(shape) < 2 else shape[-2] ** -0.5
    return (random.standard_normal(shape) * scale).astype(np.float32).astype(numpy_dtype(dtype))


def small_layer(
    dtype: str = "float32", *, num_tokens: int = 9, num_experts: int = 5, top_k: int = 2, seed: int = 0
) -> Layer:
    """A gated layer with d_model 48 and d_ff 32, routed from x."""
    random = np.random.default_rng(seed)
    d_model, d_ff = 48, 32
    x = random.standard_normal((num_tokens, d_model)).astype(np.float32).astype(numpy_dtype(dtype))
    experts = ExpertWeights(
        draw(random, num_experts, d_model, 2 * d_ff, dtype=dtype), draw(random, num_experts, d_ff, d_model, dtype=dtype)
    )
    routing = RouterWeights(draw(random, d_model, num_experts))
    return Layer(x, experts, routing, MoESpec(Activation("silu"), RouterSpec(top_k)))


#: Sizes of the wrong calls: tokens, choices, experts, d_model, d_ff.
T, K, E, D, F = 6, 2, 4, 16, 8


def floats(*shape: int, dtype: Any = jnp.float32) -> jax.Array:
    return jnp.ones(shape, dtype)


def integers(*shape: int, dtype: Any = jnp.int32) -> jax.Array:
    return jnp.zeros(shape, dtype)


class Case(NamedTuple):
    """A wrong call: `call(*arrays)` must raise `error` with a message that matches `message`."""

    name: str
    call: Callable[..., Any]
    arrays: tuple[Any, ...]
    message: str
    error: type[Exception] = InvalidInput


def untyped(value: Any) -> Any:
    """A value of a wrong type on purpose, which a type checker shall let pass."""
    return value


def check_error(case: Case, jitted: bool) -> None:
    """A wrong call raises its error, eagerly or while it is traced."""
    call = jax.jit(case.call) if jitted else case.call
    with running_on("reference"), pytest.raises(case.error, match=case.message):
        call(*case.arrays)
