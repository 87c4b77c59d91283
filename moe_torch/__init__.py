"""Moebius on torch tensors: Mixture-of-Experts ops on the kernels of `moe_core`."""

from moe_core import __version__
from moe_core.base.target import cpu_engine
from moe_core.errors import InvalidInput, Unsupported
from moe_torch import layers, ops
from moe_torch.autograd.moe import define_moe_gradients
from moe_torch.autograd.stages import define_stage_gradients
from moe_torch.bridge.dlpack import from_dlpack
from moe_torch.bridge.pytrees import register_pytrees
from moe_torch.launcher import MoELauncher, prepare_moe
from moe_torch.layers import *  # noqa: F403 - its `__all__`
from moe_torch.operators.flops import register_when_imported
from moe_torch.ops import *  # noqa: F403 - its `__all__`
from moe_torch.warmup import warmup

define_moe_gradients()
define_stage_gradients()
register_pytrees()
register_when_imported()

__all__ = [
    "InvalidInput", "MoELauncher", "Unsupported", "__version__", "cpu_engine", "from_dlpack", "prepare_moe", "warmup",
]  # fmt: skip
__all__ += layers.__all__
__all__ += ops.__all__
