"""Logical axes of the Flax layers under rules: MaxText's names by default, others by argument, no sharding lost."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx as flax_nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from moe_core.layers import ExpertsSpec, MoELayerSpec, SharedExpertsSpec
from moe_jax import InvalidInput, linen, nnx
from moe_jax.nnx import LogicalAxes
from tests.support.flax import draw_weights
from tests.support.jax import running_on

D, F, E = 32, 24, 4
SPEC = MoELayerSpec(D, F, E, 2)
#: As MaxText's base.yml maps these names: one of several axes for a name, which may come twice, a second rule taking
#: what the first cannot have. `tools.upstream maxtext` runs its own files.
RULES = (
    ("exp", "expert"),
    ("mlp_moe", ("tensor",)),
    ("embed_moe", ("fsdp", "tensor")),
    ("embed_moe", ("fsdp",)),
    ("embed_router", ("fsdp", "expert")),
    ("mlp", ("tensor",)),
    ("embed", ("fsdp", "expert")),
)
OLDER = LogicalAxes(("embed", None), ("exp", "embed_no_exp", "mlp"), ("exp", "mlp", "embed_no_exp"))


def mesh(kind: AxisType = AxisType.Auto) -> Any:
    devices = jax.devices("cpu")[:4]
    return jax.make_mesh((2, 2, 1), ("fsdp", "expert", "tensor"), axis_types=(kind,) * 3, devices=devices)


def made(spec: MoELayerSpec = SPEC, **options: Any) -> nnx.MoE:
    """Of zeros, which compile fast."""
    return nnx.MoE.from_spec(spec, kernel_init=jax.nn.initializers.zeros, **options, rngs=flax_nnx.Rngs(0))


def linen_places(rules: Any, **options: Any) -> Any:
    module = linen.MoE.from_spec(SPEC, **options)
    x = jax.ShapeDtypeStruct((4, D), jnp.float32)
    with jax.set_mesh(mesh()), nn.logical_axis_rules(rules):
        variables = jax.eval_shape(module.init, jax.random.key(0), x)
        places = nn.logical_to_mesh_sharding(nn.get_partition_spec(variables), mesh(), rules)["params"]
    return {name: places[name].spec for name in ("wi_0", "wo")}


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_nnx_parameters_are_made_as_rules_of_maxtext_say(kind: AxisType) -> None:
    with running_on("reference"), jax.set_mesh(mesh(kind)):
        assert made().wi_0.get_value().sharding.is_fully_replicated, "no rules: nothing is split"
        with flax_nnx.logical_axis_rules(RULES):
            layer = made()
            assert layer.wi_0.get_value().sharding.spec == P("expert", "fsdp", "tensor")
            assert layer.wo.get_value().sharding.spec == P("expert", "tensor", "fsdp")
            assert layer.gate.kernel.get_value().sharding.spec == P(("fsdp", "expert"), None)
            layer.load_weights(draw_weights(SPEC))
            assert layer.wi_0.get_value().sharding.spec == P("expert", "fsdp", "tensor"), "weights go where they were"
        with flax_nnx.logical_axis_rules((*RULES, ("activation_batch", ("data", "fsdp")))):
            assert [layer._on_mesh((n, 6, D))["token_axes"] for n in (4, 3)] == [P(("fsdp",), ()), P(None, ())]
            assert "token_axes" not in layer._on_mesh((D,)), "a token alone"


def test_linen_parameters_are_named_as_rules_of_maxtext_say() -> None:
    assert linen_places(RULES) == {"wi_0": P("expert", "fsdp", "tensor"), "wo": P("expert", "tensor", "fsdp")}


def test_other_names() -> None:
    """Those of older MaxText, and the axes of its shard_exp_on_fsdp; a storage takes its names along."""
    older = (("exp", "expert"), ("embed_no_exp", "fsdp"), ("mlp", None), ("embed", None))
    with running_on("reference"), jax.set_mesh(mesh()), flax_nnx.logical_axis_rules(older):
        assert made(logical_axes=OLDER).wi_0.get_value().sharding.spec == P("expert", "fsdp", None)
        turned = MoELayerSpec(D, F, E, 2, experts=ExpertsSpec(weight_layout="out_in", gate_layout="halves"))
        layer = made(turned, logical_axes=OLDER, num_layers=2)
        assert layer.wi.get_metadata("out_sharding") == ("layers", "exp", "mlp", "embed_no_exp")
    assert linen_places(older, logical_axes=OLDER)["wi_0"] == P("expert", "fsdp", None)
    on_fsdp = LogicalAxes(wi=("embed_moe", None, "mlp_moe"), wo=("embed_moe", "mlp_moe", None))
    assert linen_places(RULES, logical_axes=on_fsdp)["wo"][2] is None


def test_rules_that_leave_out_what_they_do_not_split() -> None:
    """As MaxText's pure-fsdp.yml does."""
    rules = (("embed", "fsdp"), ("embed_moe", "fsdp"), ("embed_router", "fsdp"))
    spec = MoELayerSpec(D, F, E, 2, experts=ExpertsSpec(bias=True), shared_experts=SharedExpertsSpec(16, gate=True))
    with running_on("reference"), jax.set_mesh(mesh()), flax_nnx.logical_axis_rules(rules):
        layer = made(spec)
        assert layer.wi_0.get_value().sharding.spec == P(None, "fsdp", None)
        assert layer.shared_experts.wo.kernel.get_value().sharding.spec == P(None, "fsdp")
    assert linen_places(rules)["wi_0"] == P(None, "fsdp", None)


LOSING = {
    r"must map embed_moe, an axis of wi_0, got rules for embed_no_exp, .*add \('embed_moe', None\).*\(embed_no_exp\)": (
        (("exp", "expert"), ("embed_no_exp", "fsdp"), ("mlp", None), ("embed_router", None))
    ),
    r"must map mlp_moe, an axis of wi_0, .*names of your rules \(mlp\) with logical_axes=LogicalAxes": (
        (("exp", "expert"), ("embed_moe", None), ("mlp", "fsdp"), ("embed_router", None))
    ),
    r"must map exp, an axis of wi_0": (("expert", "expert"), ("embed_moe", "fsdp"), ("embed_router", None)),
    r"must map embed_router, an axis of gate/kernel, got rules for batch": (("batch", "fsdp"),),
}


@pytest.mark.parametrize("message", LOSING)
def test_rules_that_would_lose_a_sharding_are_refused(message: str) -> None:
    rules = LOSING[message]
    with running_on("reference"), jax.set_mesh(mesh()):
        with flax_nnx.logical_axis_rules(rules), pytest.raises(InvalidInput, match=message):
            made()
        with pytest.raises(InvalidInput, match=message):
            linen_places(rules)


def test_wrong_names_are_refused() -> None:
    with pytest.raises(InvalidInput, match=r"wi must be 3 names or None, of the axes experts, d_model, d_ff, got"):
        LogicalAxes(wi=("a", "b"))
    with pytest.raises(InvalidInput, match=r"stack must be one name or None, got 3"):
        LogicalAxes(stack=3)  # type: ignore[arg-type]
