"""Float64 on the reference engine: `jax.test_util.check_grads` of ops and layers under x64, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

import moe_jax
from moe_core.layers import ExpertsSpec, SharedExpertsSpec
from moe_jax import (
    Activation,
    ExpertWeights,
    InvalidInput,
    MoESpec,
    RouterLogits,
    RouterSpec,
    RouterWeights,
    Unsupported,
)
from moe_jax.layers import load_balance_loss
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


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "swiglu_oai"])
def test_moe(activation: str) -> None:
    def outputs(x: Any, experts: Any, routing: Any) -> Any:
        found = moe_jax.moe(x, experts, routing, MoESpec(Activation(activation), RouterSpec(K, renormalize=True)))
        return found.output, found.weights, found.logits

    experts = ExpertWeights(draw(E, D, 2 * F), draw(E, F, D), gate_up_bias=draw(E, 2 * F), down_bias=draw(E, D))
    check(outputs, draw(T, D), experts, RouterWeights(draw(D, E), draw(E)))


@pytest.mark.parametrize("scoring", ["sigmoid", "sqrt_softplus"])
def test_routers(scoring: str) -> None:
    router = RouterSpec(K, scoring)
    experts, spec = ExpertWeights(draw(E, D, 2 * F), draw(E, F, D)), MoESpec(Activation("silu"), router)

    def outputs(x: Any, logits: Any) -> Any:
        return moe_jax.moe(x, experts, RouterLogits(logits), spec).output

    check(outputs, draw(T, D), draw(T, E))
    check(lambda logits: moe_jax.route(logits, router).weights, draw(T, E))
    check(moe_jax.router, draw(T, D), draw(D, E))


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


def test_equal_to_torch() -> None:
    torch = pytest.importorskip("torch")
    moe_torch = pytest.importorskip("moe_torch")
    x, experts, router = draw(T, D), (draw(E, D, 2 * F), draw(E, F, D)), draw(D, E)
    spec = MoESpec(Activation("silu"), RouterSpec(K))
    found = moe_jax.moe(x, ExpertWeights(*experts), RouterWeights(router), spec).output
    x, first, second, router = (torch.from_numpy(np.array(one)) for one in (x, *experts, router))
    wanted = moe_torch.moe(x, ExpertWeights(first, second), RouterWeights(router), spec).output
    np.testing.assert_array_equal(found, wanted)


def test_what_is_refused() -> None:
    x, experts, routing = draw(T, D), ExpertWeights(draw(E, D, 2 * F), draw(E, F, D)), RouterWeights(draw(D, E))
    spec = MoESpec(Activation("silu"), RouterSpec(K))
    with (
        running_on("interpreter"),
        pytest.raises(Unsupported, match="float64 runs on the CPU's reference engine alone"),
    ):
        moe_jax.moe(x, experts, routing, spec)
    with pytest.raises(
        InvalidInput, match=r"routing.weight must be float64 like x, got float32; cast every array or none"
    ):
        moe_jax.moe(x, experts, RouterWeights(draw(D, E).astype(jnp.float32)), spec)
    assert moe_jax.moe(
        x.astype(jnp.float32), *jax.tree.map(lambda one: one.astype(jnp.float32), (experts, routing)), spec
    )


def test_losses_are_computed_in_float64() -> None:
    with jax.enable_x64(True):
        logits = jnp.array([[-34.0, -20.0, 25.0], [-30.0, -33.0, -18.0]])
        scores = jnp.sqrt(jnp.log1p(jnp.exp(logits)))
        wanted = 3 * jnp.sum(jnp.array([0.5, 0.5, 0.0]) * (scores / scores.sum(1, keepdims=True)).mean(0))
        ids = jnp.array([[0], [1]], jnp.int32)
        found = load_balance_loss(logits, ids, scoring="sqrt_softplus")
    np.testing.assert_allclose(found, wanted, rtol=1e-13)
