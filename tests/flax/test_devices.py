"""Flax layers on several devices: outside shard_map, and weights that are loaded where logical rules say."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from jax import export
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import moe_jax
from moe_core.layers import MAXTEXT, MoELayerSpec, SharedExpertsSpec
from moe_jax import linen
from moe_jax import nnx as layers
from tests.support.flax import draw_tokens, draw_weights
from tests.support.jax import cpu_mesh, running_on

SIZES = (8, 6, 5, 2)
#: Compiles faster than what draws matrices.
ZEROS = jax.nn.initializers.zeros


@pytest.mark.parametrize("capacity_factor", [None, 1.0])
def test_layers_on_an_auto_mesh_split_tokens_or_are_replicated(capacity_factor: float | None) -> None:
    with running_on("reference"):
        x = jax.random.normal(jax.random.key(0), (8, 8))
        split = jax.device_put(x, NamedSharding(cpu_mesh(), P("data")))
        layer = layers.MoE(*SIZES, capacity_factor=capacity_factor, rngs=nnx.Rngs(0))
        module = linen.MoE(*SIZES, capacity_factor=capacity_factor)
        # The forward of `init` is dead code in a program that returns only the variables.
        init = jax.jit(lambda key, x: nn.unbox(module.init(key, x)), out_shardings=NamedSharding(cpu_mesh(), P()))
        variables = init(jax.random.key(1), split)
        calls = ((nnx.jit(lambda layer, x: layer(x)), layer), (jax.jit(module.apply), variables))
        for call, parameters in calls:
            y = call(parameters, split)
            with moe_jax.replicated():
                whole = call(parameters, split)
            one = jax.tree.map(lambda array: jnp.asarray(np.asarray(array)), parameters)
            np.testing.assert_array_equal(np.asarray(whole), np.asarray(call(one, x)))
            np.testing.assert_allclose(y, whole, 1e-5, 1e-6)
            assert whole.sharding.is_fully_replicated and y.sharding.is_equivalent_to(split.sharding, 2)


#: MaxText's, of its pure-fsdp.yml and of experts beside fsdp.
FSDP = (("activation_batch", ("fsdp",)), ("embed", ("fsdp",)), ("embed_moe", ("fsdp",)), ("embed_router", ("fsdp",)))
EXPERTS = (
    ("activation_batch", ("data", "fsdp", "expert")),
    ("exp", "expert"),
    ("mlp_moe", ("tensor",)),
    ("embed_moe", ("fsdp",)),
    ("embed_router", ("fsdp", "expert")),
    ("mlp", ("tensor",)),
    ("embed", ("fsdp", "expert")),
)


@pytest.mark.parametrize(("rules", "axes", "kind"), [(FSDP, {"fsdp": 4}, AxisType.Auto),
    *((EXPERTS, {"fsdp": 2, "expert": 2, "tensor": 1}, kind) for kind in (AxisType.Auto, AxisType.Explicit)),
])  # fmt: skip
def test_layers_on_rules_of_maxtext(rules: Any, axes: dict[str, int], kind: AxisType) -> None:
    """Parameters are made split, gathered along fsdp in the call, and their gradients are split again."""
    kinds, devices = (kind,) * len(axes), jax.devices("cpu")[:4]
    mesh = jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=kinds, devices=devices)
    spec = MoELayerSpec(8, 12, 4, 2, shared_experts=SharedExpertsSpec(4))
    x = draw_tokens(spec, "float32", 8)

    def loss(layer: layers.MoE, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        y, aux = layer(x, return_aux=True)
        return jnp.sin(y).sum() + aux.load_balance_loss, y

    step = nnx.jit(nnx.value_and_grad(loss, has_aux=True), graph_updates=False)
    with running_on("reference"):
        with jax.set_mesh(mesh), nnx.logical_axis_rules(rules):
            layer = layers.MoE.from_spec(spec, kernel_init=ZEROS, rngs=nnx.Rngs(0))
            layer.load_weights(draw_weights(spec))
            module, variables = linen.MoE.from_spec(spec), {"params": layer.parameters()}
            applied = jax.jit(module.apply)(variables, jax.device_put(x, NamedSharding(mesh, P(tuple(axes)))))
            text = layer.explain((8, 8))
        with jax.set_mesh(mesh):  # the layer knows the rules that it was made by
            tokens = jax.device_put(x, NamedSharding(mesh, P(tuple(axes))))
            (found, _), gradients = step(layer, tokens)
        weights: Any = layer.export_weights()
        (expected, y), wanted = step(layers.MoE.from_weights(weights), x)
        np.testing.assert_allclose(applied, y, 1e-5, 1e-6)
    assert "wi_0 is gathered over fsdp" in text and ("rows travel over expert" in text) == (len(axes) > 1)
    np.testing.assert_allclose(found, expected, 1e-5)
    for name in ("wi_0", "wo"):
        held, whole = gradients[name].get_value(), wanted[name].get_value()
        np.testing.assert_allclose(held, whole, 1e-4, 1e-6)
        assert held.sharding.is_equivalent_to(getattr(layer, name).get_value().sharding, held.ndim)


@pytest.mark.parametrize("capacity_factor", [None, 1.0])
def test_symbolic_numbers_of_tokens_are_refused(capacity_factor: float | None) -> None:
    batch, length = export.symbolic_shape("batch, length")
    layer = layers.MoE(*SIZES, capacity_factor=capacity_factor, rngs=nnx.Rngs(0))
    module = linen.MoE(*SIZES, capacity_factor=capacity_factor)
    with running_on("reference"):
        variables = module.init(jax.random.key(0), jnp.ones((4, 8)))
        for call in (layer, lambda x: module.apply(variables, x)):
            for shape in ((batch, 8), (batch, length, 8)):
                with pytest.raises(moe_jax.Unsupported, match=r"x has the symbolic shape .*export_buckets, which pads"):
                    export.export(jax.jit(call))(jax.ShapeDtypeStruct(shape, jnp.float32))


SPEC = MoELayerSpec(8, 12, 4, 2, correction_bias=True, shared_experts=SharedExpertsSpec(4))
RULES = (("exp", "data"), ("embed_moe", "model"), ("mlp_moe", None), ("embed_router", "model"), ("mlp", "data"),
         ("embed", None), ("layers", None))  # fmt: skip


def mesh_of(kind: AxisType) -> Mesh:
    return jax.make_mesh((2, 2), ("data", "model"), axis_types=(kind,) * 2, devices=jax.devices("cpu")[:4])


def abstract(num_layers: int | None = None) -> layers.MoE:
    return nnx.eval_shape(lambda: layers.MoE.from_spec(SPEC, num_layers=num_layers, rngs=nnx.Rngs(0)))


@pytest.mark.parametrize(("way", "kind"), [("from_weights", AxisType.Auto), ("without a copy", AxisType.Explicit),
    ("eval_shape", AxisType.Auto), ("stack", AxisType.Explicit)])  # fmt: skip
def test_weights_are_loaded_where_logical_rules_say(way: str, kind: AxisType) -> None:
    num_layers = 2 if way == "stack" else None
    weights = draw_weights(SPEC, storage=MAXTEXT)
    with running_on("reference"), jax.set_mesh(mesh_of(kind)), nnx.logical_axis_rules(RULES):
        made = layers.MoE.from_spec(SPEC, num_layers=num_layers, kernel_init=ZEROS, rngs=nnx.Rngs(0))
        if way in ("eval_shape", "stack"):
            layer = abstract(num_layers)
            layer.load_weights(weights if num_layers is None else [weights] * 2)
        else:
            layer = layers.MoE.from_weights(weights, copy=way == "from_weights")
        places = jax.tree.map(lambda one, other: one.sharding == other.sharding, layer.parameters(), made.parameters())
        assert all(jax.tree.leaves(places)), places
        assert layer.parameters()["wi_0"].sharding.spec[-3:] == ("data", "model", None)
        wi_0 = np.asarray(layer.parameters()["wi_0"])
    wanted = weights.experts.gate_up
    np.testing.assert_array_equal(wi_0.reshape(-1, *wanted.shape)[-1], wanted)


def test_weights_of_a_layer_made_abstract_under_a_mesh_need_it() -> None:
    with running_on("reference"):
        with jax.set_mesh(mesh_of(AxisType.Auto)), nnx.logical_axis_rules(RULES):
            layer = abstract()
        message = r"made abstract under a mesh of \{'data': 2, 'model': 2\}, got weights to load under none; load them"
        with pytest.raises(moe_jax.InvalidInput, match=message):
            layer.load_weights(draw_weights(SPEC))
