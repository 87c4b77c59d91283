"""`cost` of layers against XLA's count of the same products written out densely, and against torch's layer."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from moe_core.errors import InvalidInput
from moe_core.formats import scheme_named
from moe_core.layers import MAXTEXT, ExpertsSpec, MoELayerSpec, SharedExpertsSpec, layer_cost
from moe_core.specs import Activation, NormSpec
from moe_jax import linen
from moe_jax import nnx as layers
from tests.support.jax import running_on

T, D, F, E = 64, 256, 128, 4
#: Every expert is chosen, so that dense products do the same work.
ALL = MoELayerSpec(D, F, E, E)
SPECS = {
    "gated": ALL,
    "ungated": dataclasses.replace(ALL, experts=ExpertsSpec(Activation("relu2"))),
    "shared": dataclasses.replace(ALL, shared_experts=SharedExpertsSpec(192, gate=True)),
}


def abstract(spec: MoELayerSpec) -> layers.MoE:
    """A layer without arrays."""
    return nnx.eval_shape(lambda: layers.MoE.from_spec(spec, rngs=nnx.Rngs(0)))


def dense(parameters: Any, x: jax.Array) -> jax.Array:
    """All experts of every token, and nothing but their products counts much."""
    shares = x @ parameters["gate"]["kernel"]
    first = parameters["wi_0"] if "wi_0" in parameters else parameters["wi"]
    hidden = jnp.maximum(jnp.einsum("td,edf->etf", x, first), 0)
    if "wi_1" in parameters:
        hidden = hidden * jnp.einsum("td,edf->etf", x, parameters["wi_1"])
    y = jnp.einsum("etf,efd->etd", hidden, parameters["wo"])
    out = (y * shares.T[..., None]).sum(axis=0)
    if "shared_experts" in parameters:
        shared = {name: value["kernel"] for name, value in parameters["shared_experts"].items()}
        hidden = jnp.maximum(x @ shared["wi_0"], 0) * (x @ shared["wi_1"])
        out = out + (x @ shared["gate"]) * (hidden @ shared["wo"])
    return out


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_flops_are_what_xla_counts_of_dense_products(spec: MoELayerSpec, training: bool) -> None:
    layer = abstract(spec)
    parameters, x = layer.parameters(), jax.ShapeDtypeStruct((T, D), jnp.float32)
    function: Any = jax.grad(lambda *given: jnp.square(dense(*given)).sum(), argnums=(0, 1)) if training else dense
    counted = jax.jit(function).lower(parameters, x).compile().cost_analysis()
    cost = layer.cost(x.shape, training=training)
    assert cost.flops == pytest.approx(counted["flops"], rel=0.02)
    assert cost == linen.MoE.from_spec(spec).cost(T, training=training)


def test_xla_counts_nothing_of_our_calls() -> None:
    """Why layers count themselves: XLA takes every custom call that it does not know for unknown."""
    layer = abstract(ALL)
    with running_on("reference"):
        program = jax.jit(lambda layer, x: layer(x)).lower(layer, jax.ShapeDtypeStruct((T, D), jnp.float32)).compile()
    assert program.cost_analysis()["flops"] < layer.cost(T).flops / 100


def test_cost_of_what_dense_products_do_not_show() -> None:
    few = MoELayerSpec(D, F, E, 2)
    router, expert = 2 * D * E, 2 * 3 * D * F
    assert layer_cost(few, MAXTEXT, T, "float32").flops == T * (router + 2 * expert)
    # Half of the slots have a place.
    limited = dataclasses.replace(few, capacity_factor=0.5)
    assert layer_cost(limited, MAXTEXT, T, "float32").flops == T * (router + expert)
    # The experts' first product once more; and no gradient of frozen weights.
    again = dataclasses.replace(few, recompute=True)
    assert layer_cost(again, MAXTEXT, T, "float32", training=True).flops == T * (3 * router + 6 * expert + 8 * D * F)
    normalised = dataclasses.replace(few, router_norm=NormSpec())
    for training, passes in ((False, 1), (True, 3)):
        flops = [layer_cost(spec, MAXTEXT, T, "float32", training=training).flops for spec in (few, normalised)]
        assert flops[1] - flops[0] == passes * 4 * T * D
    quantized = dataclasses.replace(few, experts=ExpertsSpec(scheme=scheme_named("mxfp4_w4a16")))
    assert layer_cost(quantized, MAXTEXT, T, "float32", training=True).flops == T * (3 * router + 4 * expert)


def test_bytes() -> None:
    """One token reads the experts that it chooses; many read all, once."""
    spec = MoELayerSpec(D, F, E, 2)
    expert, router = 3 * D * F, D * E
    assert layer_cost(spec, MAXTEXT, 1, "bfloat16").bytes == 2 * (2 * expert + router + 2 * D)
    assert layer_cost(spec, MAXTEXT, T, "float32").bytes == 4 * (E * expert + router + 2 * T * D)
    trained = layer_cost(spec, MAXTEXT, T, "float32", training=True)
    assert trained.bytes == 4 * (3 * (E * expert + router) + 5 * T * D)


def test_torch_layers_cost_the_same() -> None:
    torch = pytest.importorskip("torch", reason="needs torch beside jax")
    from moe_torch import MoE

    spec = dataclasses.replace(SPECS["shared"], recompute=True)
    for training in (False, True):
        ours = MoE.from_spec(spec, dtype=torch.float32).cost((2, 8, D), training=training)
        assert ours == abstract(spec).cost(16, training=training)


@pytest.mark.parametrize("tokens", [-1, (T, D + 1), ()])
def test_wrong_tokens(tokens: Any) -> None:
    with pytest.raises(InvalidInput, match=r"tokens must be .*pass x.shape"):
        abstract(ALL).cost(tokens)
