"""ids and weights as routers give them in JAX: the results and gradients of casting them first, and torch's bits."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import moe_jax
from moe_core.base.dtypes import numpy_dtype
from moe_core.specs.operands import TopK
from moe_jax import trace
from moe_jax.autodiff.moe import plain_top_k
from tests.support.jax import Layer, on_engines, running_on, small_layer, to_jax, to_numpy

FAR = [2**32 + 3, -(2**40), 2**31, -1, 5]
on_dtypes = pytest.mark.parametrize("dtype", ["bfloat16", "float16"])


def given(dtype: str, *, x64: bool) -> tuple[Layer, TopK]:
    """A layer whose ids are int64 where there is x64, and whose weights have the dtype; both cast first."""
    layer, random = small_layer(), np.random.default_rng(1)
    ids = np.stack([random.permutation(5)[:2] for _ in range(9)])
    if x64:
        ids.reshape(-1)[: len(FAR)] = FAR
    weights = random.random((9, 2), np.float32).astype(numpy_dtype(dtype))
    own = TopK(ids if x64 else ids.astype(np.int32), weights)
    spec = dataclasses.replace(layer.spec, router=None)
    cast = TopK(np.clip(ids, -2, 5).astype(np.int32), weights.astype(np.float32))
    x, experts, own = to_jax((layer.x, layer.experts, own))
    return Layer(x, experts, own, spec), to_jax(cast)


def require_equal(found: Any, wanted: Any) -> None:
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert one.dtype == other.dtype and np.asarray(one).tobytes() == np.asarray(other).tobytes()


@on_engines
@on_dtypes
@pytest.mark.parametrize("x64", [False, True])
def test_results_are_those_of_casting_first(engine: str, dtype: str, x64: bool) -> None:
    with jax.enable_x64(x64), running_on(engine):
        (x, experts, own, spec), cast = given(dtype, x64=x64)
        found, wanted = (moe_jax.moe(x, experts, one, spec) for one in (own, cast))
        assert found.ids is own.ids and found.weights is own.weights
        require_equal([found.output, found.invalid_ids, found.tokens_per_expert], [*wanted[:1], *wanted[5:], wanted[4]])
        assert int(wanted.invalid_ids[0]) == (4 if x64 else 0)
        require_equal(*(moe_jax.make_layout(one.ids, 5) for one in (own, cast)))


def test_ids_that_int32_cannot_hold_stay_out_of_range() -> None:
    """None becomes -1, which marks a slot without an expert."""
    with jax.enable_x64(True):
        ids, _ = plain_top_k(jnp.asarray(FAR), jnp.ones(len(FAR)))
    assert ids.dtype == jnp.int32 and ids.tolist() == [2**31 - 1, -2, 2**31 - 1, -1, 5]


@on_engines
@on_dtypes
def test_gradients_are_those_of_casting_first(engine: str, dtype: str) -> None:
    with jax.enable_x64(True), running_on(engine):
        (x, experts, own, spec), cast = given(dtype, x64=True)

        factors = jnp.linspace(-1, 1, x.size, dtype=jnp.float32).reshape(x.shape)

        def loss(x: Any, weights: Any, ids: Any) -> Any:
            output = moe_jax.moe(x, experts, TopK(ids, weights), spec).output
            return (output * factors).sum()

        found = jax.jit(jax.grad(loss, (0, 1)))(x, own.weights, own.ids)
        wanted = jax.grad(lambda x, weights: loss(x, weights.astype(jnp.float32), cast.ids), (0, 1))(x, own.weights)
        assert found[1].dtype == dtype and found[1].any()
        require_equal(found, wanted)


@on_dtypes
def test_traces_hold_int32_and_fp32(dtype: str) -> None:
    with jax.enable_x64(True), running_on("reference"):
        (x, experts, own, spec), _ = given(dtype, x64=True)
        own = TopK(jnp.clip(own.ids, -1, 4), own.weights)

        def output(routing: Any) -> Any:
            return moe_jax.moe(x, experts, routing, spec).output

        wanted, (layer,) = trace.capture(output)(own)
        assert (layer.ids.dtype, layer.weights.dtype) == (jnp.int32, jnp.float32)
        other = TopK(jnp.zeros_like(own.ids), jnp.zeros_like(own.weights))
        replayed = functools.partial(trace.replay(output), trace.RoutingTrace((layer,)))
        require_equal(replayed(other), wanted)

        def gradient(output: Any, routing: TopK) -> Any:
            return jax.grad(lambda weights: output(TopK(routing.ids, weights)).sum())(routing.weights)

        require_equal(gradient(replayed, other), gradient(output, own))


@on_engines
@on_dtypes
def test_torch_gives_the_same_bits(engine: str, dtype: str) -> None:
    torch = pytest.importorskip("torch")
    import moe_torch
    from tests.support import torch as torch_support

    with jax.enable_x64(True), running_on(engine):
        (x, experts, own, spec), _ = given(dtype, x64=True)
        found = np.asarray(moe_jax.moe(x, experts, own, spec).output)
    with torch_support.running_on(engine) as device, torch.no_grad():
        x, experts, own = (torch_support.to_torch(to_numpy(one), device) for one in (x, experts, own))
        output = moe_torch.moe(x, experts, own, spec).output
    assert torch_support.to_numpy(output).tobytes() == found.tobytes()
