"""Float64 on the reference engine: `jax.test_util.check_grads` of layers under x64."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from moe_core.layers import ExpertsSpec, LatentSpec, MoELayerSpec, OutputSpec, SharedExpertsSpec
from moe_jax import InvalidInput, NormSpec, RouterSpec, layers
from tests.support.jax import running_on

T, D, F, E, K = 3, 4, 3, 6, 2


@pytest.fixture(autouse=True)
def x64() -> Iterator[None]:
    with jax.enable_x64(True), running_on("reference"):
        yield


def draw(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng([sum(shape), seed]).standard_normal(shape))


def check(function: Any, *arguments: Any) -> None:
    check_grads(function, arguments, order=1, modes=["rev"], eps=1e-6, atol=1e-8, rtol=1e-6)


@pytest.mark.parametrize("capacity_factor", [None, 1.0])
def test_layer(capacity_factor: float | None) -> None:
    nnx = pytest.importorskip("flax.nnx")
    from moe_jax.nnx import MoE

    layer = MoE(
        D, F, E, K,
        router=RouterSpec(scoring="sigmoid", renormalize=True), experts=ExpertsSpec(bias=True), router_bias=True,
        shared_experts=SharedExpertsSpec(2, gate=True), correction_bias=True, capacity_factor=capacity_factor,
        param_dtype=jnp.float64, rngs=nnx.Rngs(0),
    )  # fmt: skip
    graph, parameters, rest = nnx.split(layer, nnx.Param, ...)

    def outputs(parameters: Any, x: Any) -> Any:
        y, aux = nnx.merge(graph, parameters, rest)(x, return_aux=True)
        return y, aux.load_balance_loss, aux.z_loss

    y, balance, _ = outputs(parameters, draw(T, D))
    assert y.dtype == balance.dtype == jnp.float64
    check(outputs, parameters, draw(T, D))


@pytest.mark.parametrize(("of_x", "of_layer"), [(jnp.float64, jnp.float32), (jnp.float32, jnp.float64)])
def test_float64_is_never_promoted(of_x: Any, of_layer: Any) -> None:
    nnx = pytest.importorskip("flax.nnx")
    from moe_jax.nnx import MoE

    x, options = draw(T, D).astype(of_x), {"param_dtype": of_layer, "rngs": nnx.Rngs(0)}
    with pytest.raises(InvalidInput, match=f"x must be {of_layer.__name__} like the experts, got {of_x.__name__}"):
        MoE(D, F, E, K, **options)(x)
    assert MoE(D, F, E, K, dtype=jnp.float64, **options)(x).dtype == jnp.float64


@pytest.mark.parametrize(
    "options",
    [
        {"capacity_factor": 1.0, "correction_bias": True, "shared_experts": SharedExpertsSpec(2, gate=True)},
        {"router_norm": NormSpec(), "expert_scale": True, "latent": LatentSpec(3, NormSpec())},
        {"output": OutputSpec(NormSpec(), of="experts", scale=0.5, bias=True)},
        {"sparse_mixer": 0.01},
    ],
    ids=lambda options: next(iter(options)),
)
def test_x64_promotes_nothing_of_a_float32_layer(options: Any) -> None:
    spec = MoELayerSpec(D, F, E, K, **options)
    parameters, x = layers.initialize(spec, jax.random.key(0)), draw(T, D).astype(jnp.float32)

    def loss(parameters: Any, x: jax.Array) -> Any:
        y, aux = layers.forward(parameters, x, spec, return_aux=True)
        return jnp.square(y).sum() + aux.load_balance_loss + aux.z_loss, (y, aux)

    made = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))(parameters, x)
    wide = {jnp.dtype(jnp.float64), jnp.dtype(jnp.int64)}
    assert not [path for path, one in jax.tree_util.tree_leaves_with_path((parameters, made)) if one.dtype in wide]
