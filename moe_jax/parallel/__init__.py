"""Expert parallelism in JAX: functions for `jax.shard_map` over a mesh axis of ranks that share the experts."""

from moe_core.parallel import ExchangeSpec, ParallelOutput, Placement
from moe_jax.parallel.axis import ExpertAxis
from moe_jax.parallel.forward import moe
from moe_jax.parallel.stages import Arrived, combine, dispatch

__all__ = ["Arrived", "ExchangeSpec", "ExpertAxis", "ParallelOutput", "Placement", "combine", "dispatch", "moe"]
