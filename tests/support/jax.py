"""What the tests of the JAX front-end share: engines, small layers, arrays there and back."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

import moe_jax
from moe_core.errors import InvalidInput
from moe_core.specs.operands import named_arrays
from tests.support.frontends.small import (
    D_FF,
    D_MODEL,
    ENGINES,
    NUM_EXPERTS,
    REAL_KERNELS,
    Layer,
    draw,
    on_engines,
    small_layer,
)

__all__ = ["D_FF", "D_MODEL", "ENGINES", "NUM_EXPERTS", "REAL_KERNELS", "Layer", "draw", "on_engines", "small_layer"]


@contextlib.contextmanager
def running_on(engine: str) -> Iterator[None]:
    """New arrays, and ops on them, use this engine."""
    if engine == "cuda":
        with jax.default_device(jax.devices("cuda")[0]):
            yield
    else:
        with jax.default_device(jax.devices("cpu")[0]), moe_jax.cpu_engine(engine):
            yield


@pytest.fixture(autouse=True)
def on_a_cpu() -> Iterator[None]:
    """Of modules that import it: both frameworks are on one device, whose bits are compared."""
    with jax.default_device(jax.devices("cpu")[0]):
        yield


def to_jax(tree: Any) -> Any:
    """NumPy arrays in any bundle as JAX arrays on the default device."""
    return jax.tree.map(jnp.asarray, tree)


def to_numpy(tree: Any) -> Any:
    """JAX arrays in any bundle as NumPy arrays."""
    return jax.tree.map(np.asarray, tree)


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


NUM_DEVICES = 4


def cpu_mesh(axis_type: AxisType = AxisType.Auto) -> Mesh:
    return jax.make_mesh((NUM_DEVICES,), ("data",), axis_types=(axis_type,), devices=jax.devices("cpu")[:NUM_DEVICES])


NUM_LAYERS = 3


#: What a compiled program may do with a weight: take it, hand it on, run the custom call on it.
HANDING_ON = {"parameter", "get-tuple-element", "tuple", "while", "bitcast", "custom-call", "call", "opt-barrier"}


def stacked_weights() -> moe_jax.ExpertWeights:
    """The experts of several layers, stacked."""
    layers = [small_layer(seed=seed).experts for seed in range(NUM_LAYERS)]
    return jax.tree.map(lambda *arrays: jnp.stack([jnp.asarray(array) for array in arrays]), *layers)


def run_stack(
    x: jax.Array, stacked: moe_jax.ExpertWeights, routing: moe_jax.RouterWeights, spec: moe_jax.MoESpec
) -> jax.Array:
    """Residual layers in a scan; the weights stay where they are, and each layer says which part it reads."""

    def layer(carry: jax.Array, index: jax.Array) -> tuple[jax.Array, None]:
        experts = dataclasses.replace(stacked, layer_index=index.reshape(1))
        return carry + moe_jax.moe(carry, experts, routing, spec).output, None

    return jax.lax.scan(layer, x, jnp.arange(NUM_LAYERS, dtype=jnp.int32))[0]


def program_text(lowered: Any) -> str:
    """The optimised program of a lowered function, as users get it: without a GPU conftest.py saves XLA fusing."""
    is_off = "xla_cpu_use_fusion_emitters=false" in os.environ.get("XLA_FLAGS", "")
    options = {"xla_cpu_use_fusion_emitters": True} if is_off else {}
    text = lowered.compile(options).as_text()
    assert text is not None
    return text


#: What programs call the dtypes of weights.
HLO_DTYPES = {"float32": "f32", "bfloat16": "bf16", "uint8": "u8", "int8": "s8", "float8_e4m3fn": "f8e4m3fn"}


def weight_copies(compiled: str, stacked: moe_jax.ExpertWeights) -> list[str]:
    """The instructions of a compiled program that make an array as large as a weight, stacked or of one layer."""
    shapes = set()
    for _, array in named_arrays(stacked):
        for shape in (array.shape, array.shape[1:], (1, *array.shape[1:])):
            shapes.add(f"{HLO_DTYPES[array.dtype.name]}[{','.join(map(str, shape))}]")
    found = []
    for line in compiled.splitlines():
        match = re.search(r"= (\S+\[[\d,]*\])\S* ([\w-]+)\(", line)
        if match and match[1] in shapes and match[2] not in HANDING_ON:
            found.append(line.strip())
    return found
