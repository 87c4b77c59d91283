"""Moebius on JAX: Mixture-of-Experts ops on Triton kernels, for jit, scan, vmap, shard_map and export."""

from moe_core import __version__
from moe_core.base.target import Target
from moe_core.errors import InvalidInput, Unsupported
from moe_core.layers import LoRA
from moe_core.plan.registry import export_plans
from moe_jax import ops
from moe_jax.autodiff.moe import SAVED_NAMES
from moe_jax.bridge.dlpack import from_dlpack
from moe_jax.bridge.placement import replicated
from moe_jax.bridge.platforms import cpu_engine, export_target, load_plans
from moe_jax.buckets import export_buckets, load_buckets
from moe_jax.ops import *  # noqa: F403 - its `__all__`
from moe_jax.spread import moe as moe
from moe_jax.warmup import warmup

__all__ = [
    "SAVED_NAMES", "InvalidInput", "LoRA", "Target", "Unsupported", "__version__", "cpu_engine", "export_buckets",
    "export_plans", "export_target", "from_dlpack", "load_buckets", "load_plans", "replicated", "warmup",
]  # fmt: skip
__all__ += ops.__all__
