"""Flax layers on several devices outside shard_map."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import moe_jax
from moe_jax import linen
from moe_jax import nnx as layers
from tests.support.jax import NUM_DEVICES, cpu_mesh, running_on

SIZES = (8, 6, 5, 2)
REFUSED = "one device at a time, got a program for 4 devices outside jax.shard_map"


@pytest.mark.parametrize("capacity_factor", [None, 1.0])
def test_layers_on_an_auto_mesh_are_refused_or_replicated(capacity_factor: float | None) -> None:
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
            with pytest.raises(moe_jax.Unsupported, match=REFUSED):
                call(parameters, split)
            with moe_jax.replicated():
                y = call(parameters, split)
            one = jax.tree.map(lambda array: jnp.asarray(np.asarray(array)), parameters)
            np.testing.assert_array_equal(np.asarray(y), np.asarray(call(one, x)))
            assert len(y.sharding.device_set) == NUM_DEVICES
