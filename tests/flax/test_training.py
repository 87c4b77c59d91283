"""Gradients of the Flax layers and of their losses, against jax.grad of a plain loop in float32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx as flax_nnx

import moe_jax
from moe_core.layers import MAXTEXT, MoEAux, MoELayerSpec
from moe_core.specs.operands import ExpertWeights, RouterWeights, SharedExpert
from moe_jax import layers
from tests.support.flax import draw_tokens, draw_weights, nnx_layer, preset
from tests.support.jax import REAL_KERNELS, on_engines, running_on
from tests.support.training.jax import Problem, compile_quickly, plain, plans_in

NUM_TOKENS = 6


def problem_of(parameters: Any, x: jax.Array, spec: MoELayerSpec) -> Problem:
    """A layer's parameters as the op takes them."""
    arrays: dict[str, dict[str, Any]] = {"experts": {}, "router": {}, "shared_experts": {}}
    for leaf in layers.leaves(spec):
        value = parameters
        for key in leaf.path:
            value = value[key]
        group, _, field = leaf.parameter.name.partition(".")
        arrays[group][field] = value
    shared = SharedExpert(**arrays["shared_experts"]) if arrays["shared_experts"] else None
    return Problem(x, ExpertWeights(**arrays["experts"]), RouterWeights(**arrays["router"]), shared)


def value_of(y: jax.Array, balance: jax.Array, z: jax.Array) -> jax.Array:
    """A loss as a training step has it: of the output, with both auxiliary losses."""
    target = jnp.asarray(np.random.default_rng(7).standard_normal(y.shape).astype(np.float32))
    return ((y - target) ** 2).mean() + 0.1 * balance + 0.01 * z


def layer_value(layer: Any, x: jax.Array) -> tuple[jax.Array, MoEAux]:
    y, aux = layer(x, return_aux=True)
    return value_of(y, aux.load_balance_loss, aux.z_loss), aux


def plainly(spec: MoELayerSpec) -> Callable[..., tuple[Any, jax.Array]]:
    """(parameters, x, ids, tokens_per_expert) -> gradients of the first two in the loop."""

    def loss(parameters: Any, x: jax.Array, ids: jax.Array, tokens_per_expert: jax.Array) -> jax.Array:
        output, _, logits = plain(problem_of(parameters, x, spec), ids, spec.moe_spec(MAXTEXT))
        assert logits is not None
        return value_of(output, *layers.router_losses(logits, tokens_per_expert, spec=spec.router))

    return compile_quickly(jax.grad(loss, argnums=(0, 1)))


def require_close(ours: Any, wanted: Any) -> None:
    """Trees of gradients, alike; where ours lacks state that is not trained the loop's is not looked at."""
    expected = dict(jax.tree_util.tree_flatten_with_path(wanted)[0])
    for path, gradient in jax.tree_util.tree_flatten_with_path(ours)[0]:
        value = np.asarray(expected[path])
        atol = 3e-5 * max(float(np.abs(value).max()), 1e-3)
        np.testing.assert_allclose(np.asarray(gradient), value, rtol=1e-4, atol=atol, err_msg=str(path))


@pytest.mark.parametrize(("family", "engine"), [("mixtral", "reference"), ("qwen2_moe", "reference"),
    ("gpt_oss", REAL_KERNELS), ("deepseek_v3", REAL_KERNELS)])  # fmt: skip
def test_nnx_layers_train(engine: str, family: str) -> None:
    spec = preset(family)
    with running_on(engine):
        layer, x = nnx_layer(draw_weights(spec), spec), jnp.asarray(draw_tokens(spec, "float32", NUM_TOKENS))
        gradient = flax_nnx.jit(flax_nnx.grad(layer_value, argnums=(0, 1), has_aux=True))
        (of_layer, of_x), aux = gradient(layer, x)
        wanted, wanted_x = plainly(spec)(layer.parameters(), x, aux.ids, aux.tokens_per_expert)
        found = jax.tree.map(np.asarray, flax_nnx.to_pure_dict(of_layer))
        require_close((found, of_x), (wanted, wanted_x))
        trained = sum(not leaf.is_state for leaf in layers.leaves(spec))
        assert len(jax.tree.leaves(found)) == trained


def test_frozen_experts_cost_nothing() -> None:
    spec = preset("mixtral")
    with running_on("reference"):
        layer, x = nnx_layer(draw_weights(spec), spec), jnp.asarray(draw_tokens(spec, "float32", NUM_TOKENS))
        parameters = layer.parameters()

        def loss(gate: Any) -> jax.Array:
            return layers.forward({**parameters, "gate": gate}, x, spec).sum()

        *_, plan = plans_in(jax.jit(jax.grad(loss)).lower(parameters["gate"]))
        assert [buffer.name for buffer in plan.outputs] == ["d_routing.weight"]


def test_mixed_precision_trains_float32_parameters() -> None:
    spec = preset("mixtral")
    with running_on("reference"):
        layer = nnx_layer(draw_weights(spec), spec, dtype=jnp.bfloat16)
        x = jnp.asarray(draw_tokens(spec, "bfloat16", NUM_TOKENS))
        found = jax.jit(jax.grad(lambda layer: layer(x).astype(jnp.float32).sum()))(layer)
        for gradient in jax.tree.leaves(found):
            assert gradient.dtype == jnp.float32 and np.isfinite(gradient).all()


@on_engines
def test_the_router_alone_has_gradients(engine: str) -> None:
    """One plan with what is asked for, and in a vmap. Those of both ops are in tests/frontends/test_options.py."""
    spec = preset("mixtral")
    with running_on(engine):
        x = jnp.asarray(draw_tokens(spec, "float32", NUM_TOKENS))
        weight = problem_of(nnx_layer(draw_weights(spec), spec).parameters(), x, spec).routing.weight
        *_, plan = plans_in(jax.jit(jax.grad(lambda weight: moe_jax.router(x, weight).sum())).lower(weight))
        assert plan.name == "router_backward" and [buffer.name for buffer in plan.outputs] == ["d_weight"]
        rows = jnp.stack([x, 2 * x])
        found = jax.vmap(jax.grad(lambda x: moe_jax.router(x, weight).sum()))(rows)
        with jax.default_matmul_precision("highest"):
            wanted = jax.vmap(jax.grad(lambda x: (x @ weight).sum()))(rows)
        require_close(found, wanted)
