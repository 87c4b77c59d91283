"""Expert parallelism in JAX: functions for `jax.shard_map` over a mesh axis of ranks that share the experts."""

from moe_core.parallel import ExchangeSpec, ParallelOutput, Placement
from moe_jax.parallel.axis import ExpertAxis
from moe_jax.parallel.forward import moe

__all__ = ["ExchangeSpec", "ExpertAxis", "ParallelOutput", "Placement", "moe"]
