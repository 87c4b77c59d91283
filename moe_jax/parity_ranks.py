"""Run a case on JAX's host devices and on one device, for `moe-parity --ranks`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from moe_core.parallel import ExchangeSpec, ParallelOutput
from moe_core.parity.devices import describe
from moe_core.parity.gradients import arguments_of
from moe_core.parity.ranks import Part, RanksRun, leaves_of
from moe_jax import ops
from moe_jax.parallel.forward import Group, run

_NAMES = ("ids", "weights", "tokens_per_expert", "output", "received_per_expert")


def _results(found: Any, gradients: Mapping[str, Any]) -> dict[str, np.ndarray]:
    results = {name: np.asarray(getattr(found, name)) for name in _NAMES if hasattr(found, name)}
    return results | {f"d_{name}": np.asarray(array) for name, array in gradients.items()}


def _alone(part: Part) -> tuple[str, dict[str, np.ndarray]]:
    put = jax.numpy.asarray

    @jax.jit
    def step(leaves: dict[str, Any], d_output: Any) -> Any:
        def forward(leaves: dict[str, Any]) -> Any:
            arguments, options = arguments_of(part.case, leaves, put)
            result = ops.moe(*arguments, **options)
            return result.output, result

        _, pull, result = jax.vjp(forward, leaves, has_aux=True)
        return result, pull(d_output)[0]

    leaves = leaves_of(part.case, put)
    arguments, options = arguments_of(part.case, leaves, put)
    device, _ = describe(("cpu", 0), ops.explain_moe(*arguments, **options, training=True))
    return device, _results(*step(leaves, put(part.d_output)))


def run_ranks(whole: Part, parts: Sequence[Part]) -> RanksRun:
    mesh = jax.make_mesh((len(parts),), ("ep",), axis_types=(AxisType.Auto,))
    placement, ranks = parts[0].placement, P("ep")
    assert placement is not None

    def stacked(arrays: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        return {name: np.stack([one[name] for one in arrays]) for name in arrays[0]}

    def step(leaves: dict[str, Any], mask: Any, d_output: Any) -> Any:
        local = {name: array[0] for name, array in leaves.items()}

        def forward(leaves: dict[str, Any]) -> Any:
            (x, experts, routing, spec), options = arguments_of(parts[0].case, leaves, jax.numpy.asarray)
            group = Group("ep", placement, ExchangeSpec())
            result = run(x, experts, routing, spec, group, mask, options["shared"])
            return result.output, result

        _, pull, result = jax.vjp(forward, local, has_aux=True)
        gradients = pull(d_output)[0]
        return result, {name: array[None] for name, array in gradients.items()}

    fields = {name: P() if name == "overflow" else ranks for name in ParallelOutput._fields}
    specs = {"mesh": mesh, "in_specs": (ranks, ranks, ranks), "out_specs": (ParallelOutput(**fields), ranks)}
    call = jax.jit(jax.shard_map(step, **specs))
    leaves = stacked([leaves_of(part.case, np.asarray) for part in parts])
    mask = whole.case.token_mask
    result, gradients = jax.block_until_ready(call(leaves, mask, whole.d_output))
    everything = _results(result, gradients)

    def of_rank(rank: int) -> dict[str, np.ndarray]:
        # Gradients have an axis of ranks. Other arrays are concatenated.
        return {
            name: array[rank] if name.startswith("d_") else np.split(array, len(parts))[rank]
            for name, array in everything.items()
        }

    return RanksRun(*_alone(whole), [of_rank(rank) for rank in range(len(parts))])
