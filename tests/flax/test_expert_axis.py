"""Flax layers with their experts over a mesh axis, and their checkpoints on fewer devices."""

from __future__ import annotations

import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint
import pytest
from flax import nnx

from moe_core.errors import InvalidInput
from moe_core.layers import MAXTEXT, MoELayerSpec, SharedExpertsSpec
from moe_jax import layers
from moe_jax.nnx import MoE
from tests.support.flax import draw_tokens, draw_weights
from tests.support.jax import running_on
from tests.support.parallel.jax import ep_mesh

SPEC = MoELayerSpec(8, 12, 8, 2, correction_bias=True, shared_experts=SharedExpertsSpec(4))
RULES = (("exp", "ep"), ("embed_moe", None), ("mlp_moe", None), ("embed_router", None), ("mlp", None), ("embed", None))


def tokens() -> jax.Array:
    return jnp.asarray(draw_tokens(SPEC, "float32", 8))


def test_nnx_layers_follow_logical_rules() -> None:
    """Made, called and differentiated under a mesh as on one device, and called as such without one."""

    def loss(layer: MoE, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        y, aux = layer(x, return_aux=True)
        return jnp.sin(y).sum() + aux.load_balance_loss, y

    gradient = nnx.jit(nnx.grad(loss, has_aux=True), graph_updates=False)
    x = tokens()
    with running_on("reference"):
        with jax.set_mesh(ep_mesh(4)), nnx.logical_axis_rules(RULES):
            layer = MoE.from_spec(SPEC, rngs=nnx.Rngs(0), expert_axis="ep", kernel_init=jax.nn.initializers.zeros)
            layer.load_weights(draw_weights(SPEC))
            assert layer.parameters()["wi_0"].sharding.spec[0] == "ep"
            found, output = gradient(layer, x)
        weights: Any = layer.export_weights()
        alone = MoE.from_weights(weights)
        expected, plain = gradient(alone, x)
        np.testing.assert_array_equal(output, plain)
        alone.expert_axis = "ep"
        np.testing.assert_array_equal(output, alone(x))
    for name in ("wi_0", "wi_1", "wo"):
        own, other = (np.asarray(state[name].get_value()) for state in (found, expected))
        np.testing.assert_array_equal(own, other, name)
    np.testing.assert_allclose(found.gate.kernel.get_value(), expected.gate.kernel.get_value(), 1e-5, 1e-6)


def test_nnx_layers_are_parallelized_in_place() -> None:
    """Made and loaded first, also under the mesh, or abstract and loaded in parts: no device ever has all experts."""
    mesh, x = ep_mesh(4), tokens()
    with running_on("reference"):
        weights = draw_weights(SPEC, storage=MAXTEXT)
        layer = MoE.from_weights(weights)
        expected = np.asarray(layer(x))
        abstract: MoE = nnx.eval_shape(lambda: MoE.from_spec(SPEC, rngs=nnx.Rngs(0)))
        with jax.set_mesh(mesh):
            under_the_mesh = MoE.from_weights(weights)
        for own in (layer, under_the_mesh, abstract):
            own.parallelize(mesh)
            if own is abstract:
                own.load_weights(weights)
            parts = own.parameters()["wo"].addressable_shards
            assert [part.data.shape for part in parts] == [(2, 12, 8)] * 4
        with jax.set_mesh(mesh):
            found = nnx.jit(lambda layer, x: layer(x), graph_updates=False)(abstract, x)
        np.testing.assert_array_equal(found, expected)
        with pytest.raises(InvalidInput, match="expert_axis must name an axis of the mesh, got None; pass 'ep'"):
            layer.parallelize(mesh, None)


def test_checkpoints_move_between_numbers_of_devices(tmp_path: pathlib.Path) -> None:
    """Saved by four, loaded by two and by one, each rank reading its own experts, and by four again."""
    x = tokens()
    with running_on("reference"):
        layer = MoE.from_weights(draw_weights(SPEC, storage=MAXTEXT))
        layer.parallelize(ep_mesh(4))
        with jax.set_mesh(ep_mesh(4)):
            expected = np.asarray(jax.jit(lambda layer, x: layer(x))(layer, x))
            with orbax.checkpoint.StandardCheckpointer() as checkpointer:
                checkpointer.save(tmp_path / "layer", layer.parameters())
        for ranks in (2, 1, 4):
            mesh = ep_mesh(ranks)
            places = layers.expert_sharding(SPEC, mesh)
            wanted = jax.tree.map(
                lambda array, place: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=place),
                layer.parameters(), places,
            )  # fmt: skip
            with orbax.checkpoint.StandardCheckpointer() as checkpointer:
                loaded = checkpointer.restore(tmp_path / "layer", wanted)
            assert loaded["wi_0"].addressable_shards[0].data.shape == (8 // ranks, 8, 12)
            with jax.set_mesh(mesh):
                found = jax.jit(lambda parameters, x: layers.forward(parameters, x, SPEC, expert_axis="ep"))(loaded, x)
            np.testing.assert_array_equal(found, expected, f"{ranks} devices")
