"""Measure XLA's ragged all-to-all, the JAX part of `moebius-tune --links`."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, PartitionSpec

from moe_core.parallel.machine import LinkTiming

#: Chained calls in a program, and programs for the median.
_CALLS, _BATCHES = 8, 5
_COLUMNS = 256


def measure(sizes: Sequence[int]) -> tuple[tuple[LinkTiming, ...], str]:
    """Timings of `jax.lax.ragged_all_to_all` for bytes sent by each local device, and the reason for none."""
    devices = jax.local_devices()
    if devices[0].platform == "cpu":
        return (), "XLA has no ragged all-to-all on CPUs"
    if len(devices) < 2:
        return (), f"it needs two devices in this process, got {len(devices)}"
    return tuple(_timing(len(devices), size) for size in sizes), ""


def _timing(ranks: int, size: int) -> LinkTiming:
    each = max(1, -(-size // (ranks - 1) // _COLUMNS))
    mesh = jax.make_mesh((ranks,), ("ep",), axis_types=(AxisType.Auto,))

    def exchanged(rows: jax.Array) -> jax.Array:
        offsets = each * jnp.arange(ranks, dtype=jnp.int32)
        counts = jnp.full(ranks, each, jnp.int32)
        begins = jnp.full(ranks, each, jnp.int32) * jax.lax.axis_index("ep")
        for _ in range(_CALLS):
            into = jnp.zeros_like(rows)
            rows = jax.lax.ragged_all_to_all(rows, into, offsets, counts, begins, counts, axis_name="ep")
        return rows

    part = PartitionSpec("ep")
    call = jax.jit(jax.shard_map(exchanged, mesh=mesh, in_specs=part, out_specs=part, check_vma=False))
    rows = jax.device_put(np.zeros((ranks * ranks * each, _COLUMNS), np.int8), jax.NamedSharding(mesh, part))
    call(rows).block_until_ready()
    times = []
    for _ in range(_BATCHES):
        start = time.perf_counter()
        call(rows).block_until_ready()
        times.append((time.perf_counter() - start) * 1e6 / _CALLS)
    sent = each * _COLUMNS * (ranks - 1)
    return LinkTiming("ragged_all_to_all", "xla", "domain", ranks, sent, statistics.median(times))
