"""Data parallelism with the Flax NNX layer: every device holds the weights and routes its own part of the batch.

The layer runs on one device at a time, so it is called inside `jax.shard_map`: XLA would otherwise gather the batch on
each. Outputs stay where they are computed. Counts are summed over the devices. Losses are averaged: of equal parts that
is exact for the z-loss, and for the load-balancing loss the mean over the parts, as data-parallel training has it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from moe_jax.nnx import MoE, RouterSpec, update_correction_bias

BATCH, LENGTH, D, F, E, K = 8, 16, 64, 48, 8, 2


class Statistics(NamedTuple):
    """Of the whole batch, the same on every device."""

    tokens_per_expert: jax.Array
    load_balance_loss: jax.Array
    z_loss: jax.Array


def make_layer() -> MoE:
    """Routed as DeepSeek-V3: sigmoid scores and a correction bias that counts of tokens move."""
    router = RouterSpec(scoring="sigmoid", renormalize=True)
    return MoE(D, F, E, K, router=router, correction_bias=True, rngs=nnx.Rngs(0))


def make_batch() -> jax.Array:
    """x `[BATCH, LENGTH, D]`."""
    return jax.random.normal(jax.random.key(1), (BATCH, LENGTH, D))


def parallel_forward(mesh: Mesh) -> Callable[[MoE, jax.Array], tuple[jax.Array, Statistics]]:
    """The layer on a batch whose first axis is split over the mesh axis `data`."""

    @jax.jit
    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(P(), P("data")), out_specs=(P("data"), P()))
    def forward(layer: MoE, x: jax.Array) -> tuple[jax.Array, Statistics]:
        y, aux = layer(x, return_aux=True)
        mean: Any = functools.partial(jax.lax.pmean, axis_name="data")
        counts = jax.lax.psum(aux.tokens_per_expert, "data")
        return y, Statistics(counts, mean(aux.load_balance_loss), mean(aux.z_loss))

    return forward


def main() -> None:
    """Balance the router for a few steps."""
    mesh = jax.make_mesh((jax.device_count(),), ("data",))
    forward = parallel_forward(mesh)
    layer, x = make_layer(), jax.device_put(make_batch(), NamedSharding(mesh, P("data")))
    bias = layer.gate.correction_bias
    for step in range(4):
        y, statistics = forward(layer, x)
        assert y.shape == x.shape and int(statistics.tokens_per_expert.sum()) == BATCH * LENGTH * K
        busiest = int(np.asarray(statistics.tokens_per_expert).max())
        print(f"step {step}: busiest expert {busiest} slots, load balance {float(statistics.load_balance_loss):.4f}")
        bias.set_value(update_correction_bias(bias.get_value(), statistics.tokens_per_expert, rate=0.01))
    print(f"y {y.dtype}{list(y.shape)} on {len(y.sharding.device_set)} devices")


if __name__ == "__main__":
    # A CPU counts as one device unless told otherwise, before the first use of JAX.
    jax.config.update("jax_num_cpu_devices", 4)
    main()
