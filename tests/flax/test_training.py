"""Gradients of the Flax layers and of their losses, against jax.grad of a plain loop in float32."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx as flax_nnx

import moe_jax
from moe_core.layers import MAXTEXT, MoEAux, MoELayerSpec
from moe_core.specs.operands import ExpertWeights, RouterWeights, SharedExpert
from moe_jax import layers, nnx
from tests.support.flax import draw_tokens, draw_weights, linen_layer, nnx_layer, preset
from tests.support.jax import REAL_KERNELS, on_engines, running_on
from tests.support.layers import drop_slots
from tests.support.training.jax import Problem, compile_quickly, plain, plans_in
from tests.support.training.jax import _expert as expert
from tests.support.training.jax import _weights as slot_weights

FAMILIES = ["mixtral", "gpt_oss", "deepseek_v3", "qwen2_moe"]
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


def layer_value(result: tuple[jax.Array, MoEAux]) -> jax.Array:
    y, aux = result
    return value_of(y, aux.load_balance_loss, aux.z_loss)


def plain_gradients(parameters: Any, x: jax.Array, spec: MoELayerSpec, aux: MoEAux) -> tuple[Any, jax.Array]:
    def loss(parameters: Any, x: jax.Array) -> jax.Array:
        output, _, logits = plain(problem_of(parameters, x, spec), np.asarray(aux.ids), spec.moe_spec(MAXTEXT))
        assert logits is not None
        return value_of(output, *layers.router_losses(logits, aux.tokens_per_expert, spec=spec.router))

    return compile_quickly(jax.grad(loss, argnums=(0, 1)))(parameters, x)


def require_close(ours: Any, wanted: Any) -> None:
    """Trees of gradients, alike; where ours lacks state that is not trained the loop's is not looked at."""
    expected = dict(jax.tree_util.tree_flatten_with_path(wanted)[0])
    for path, gradient in jax.tree_util.tree_flatten_with_path(ours)[0]:
        value = np.asarray(expected[path])
        atol = 3e-5 * max(float(np.abs(value).max()), 1e-3)
        np.testing.assert_allclose(np.asarray(gradient), value, rtol=1e-4, atol=atol, err_msg=str(path))


@on_engines
@pytest.mark.parametrize("family", FAMILIES)
def test_nnx_layers_train(engine: str, family: str) -> None:
    spec = preset(family)
    with running_on(engine):
        layer, x = nnx_layer(draw_weights(spec), spec), jnp.asarray(draw_tokens(spec, "float32", NUM_TOKENS))
        _, aux = layer(x, return_aux=True)
        gradient = flax_nnx.jit(flax_nnx.grad(lambda layer, x: layer_value(layer(x, return_aux=True)), argnums=(0, 1)))
        of_layer, of_x = gradient(layer, x)
        wanted, wanted_x = plain_gradients(layer.parameters(), x, spec, aux)
        found = jax.tree.map(np.asarray, flax_nnx.to_pure_dict(of_layer))
        require_close((found, of_x), (wanted, wanted_x))
        trained = sum(not leaf.is_state for leaf in layers.leaves(spec))
        assert len(jax.tree.leaves(found)) == trained


@on_engines
@pytest.mark.parametrize("family", FAMILIES)
def test_linen_layers_train(engine: str, family: str) -> None:
    spec = preset(family)
    with running_on(engine):
        layer, variables = linen_layer(draw_weights(spec), spec)
        x = jnp.asarray(draw_tokens(spec, "float32", NUM_TOKENS))

        def run(variables: Any, x: jax.Array) -> Any:
            return layer.apply(variables, x, return_aux=True)

        _, aux = run(variables, x)

        def loss(params: Any) -> jax.Array:
            return layer_value(run({**variables, "params": params}, x))

        found = jax.jit(jax.grad(loss))(variables["params"])
        parameters = nnx_layer(draw_weights(spec), spec).parameters()
        require_close(found, plain_gradients(parameters, x, spec, aux)[0])


@on_engines
def test_a_scan_over_an_nnx_stack_trains_it(engine: str) -> None:
    """The stack's gradients are those of layers by themselves; every layer's are there."""
    spec = preset("deepseek_v3")
    with running_on(engine):
        weights = [draw_weights(spec, seed=seed) for seed in range(3)]
        stack = nnx_layer(weights, spec, num_layers=3)
        singles = [nnx_layer(one, spec) for one in weights]
        x = jnp.asarray(draw_tokens(spec, "float32", NUM_TOKENS))

        def scanned(stack: nnx.MoE, x: jax.Array) -> jax.Array:
            def step(x: jax.Array, index: jax.Array) -> tuple[jax.Array, None]:
                return x + stack(x, layer_index=index), None

            return (jax.lax.scan(step, x, jnp.arange(3))[0] ** 2).mean()

        def looped(singles: list[nnx.MoE], x: jax.Array) -> jax.Array:
            for layer in singles:
                x = x + layer(x)
            return (x**2).mean()

        step = jax.jit(jax.grad(scanned))
        found = flax_nnx.to_pure_dict(flax_nnx.state(step(stack, x), flax_nnx.Param))
        wanted = [flax_nnx.to_pure_dict(flax_nnx.state(one, flax_nnx.Param)) for one in jax.grad(looped)(singles, x)]
        require_close(found, jax.tree.map(lambda *arrays: jnp.stack(arrays), *wanted))
        assert [plan.name for plan in plans_in(step.lower(stack, x))] == ["moe", "moe_backward"]


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


@jax.default_matmul_precision("highest")
def limited_gradients(parameters: Any, x: jax.Array, spec: MoELayerSpec, mask: Any, ids: np.ndarray) -> Any:
    """Those of plain experts that take slots one after the other, as many as they may; ids: all that were chosen.

    The value is that of `test_layers_with_a_capacity_limit_train`.
    """
    kept = drop_slots(ids, spec.capacity(x.shape[0]))
    moe_spec, chosen = spec.moe_spec(MAXTEXT), jnp.maximum(ids, 0)

    def loss(parameters: Any, x: jax.Array) -> jax.Array:
        problem = problem_of(parameters, x, spec)
        logits = x @ problem.routing.weight
        weights = jax.vmap(lambda row, of: slot_weights(row, of, spec.router))(logits, chosen)
        output = jnp.zeros(x.shape)
        for number in range(spec.num_experts):
            share = jnp.where(kept == number, weights, 0).sum(1, keepdims=True)
            output += share * jax.vmap(lambda row, number=number: expert(row, problem.experts, number, moe_spec))(x)
        if problem.shared is not None:
            output += jax.vmap(lambda row: expert(row, problem.shared, None, moe_spec))(x)
        counts = jnp.asarray(np.bincount(ids[ids >= 0], minlength=spec.num_experts), jnp.int32)
        return value_of(output, *layers.router_losses(logits, counts, mask, spec=spec.router))

    return jax.jit(jax.grad(loss, argnums=(0, 1)))(parameters, x)


@pytest.mark.parametrize(
    ("engine", "family", "masked"), [("reference", "mixtral", False), (REAL_KERNELS, "deepseek_v3", True)]
)
def test_layers_with_a_capacity_limit_train(engine: str, family: str, masked: bool) -> None:
    """Dropped slots get nothing; the slots beside them were normalised with them."""
    free = preset(family)
    spec = dataclasses.replace(free, capacity_factor=0.5, recompute=masked)
    with running_on(engine):
        layer, x = nnx_layer(draw_weights(spec), spec), jnp.asarray(draw_tokens(spec, "float32", 9))
        mask = jnp.arange(9) % 4 != 1 if masked else None
        parameters = layer.parameters()
        _, aux = layers.forward(parameters, x, free, token_mask=mask, return_aux=True)

        def loss(parameters: Any, x: jax.Array) -> jax.Array:
            return layer_value(layers.forward(parameters, x, spec, token_mask=mask, return_aux=True))

        found = jax.jit(jax.grad(loss, argnums=(0, 1)))(parameters, x)
        wanted = limited_gradients(parameters, x, spec, mask, np.asarray(aux.ids))
        state = [leaf.path for leaf in layers.leaves(spec) if leaf.is_state]
        for path in state:
            assert not np.asarray(found[0][path[0]][path[1]]).any()
            wanted[0][path[0]][path[1]] = found[0][path[0]][path[1]]
        require_close(found, wanted)
        _, limited = layers.forward(parameters, x, spec, token_mask=mask, return_aux=True)
        assert (np.asarray(limited.ids) < 0).sum() > (np.asarray(aux.ids) < 0).sum()


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
