"""RMS normalisation as an op on JAX arrays."""

from __future__ import annotations

import jax

from moe_core.ops.norm.forward import plan_rms_norm
from moe_core.specs.norm import NormSpec
from moe_jax.autodiff.stages import run_stage
from moe_jax.bridge.calls import Array, OpCall, require_type

_PLAIN_NORM = NormSpec()


def rms_norm(x: Array, weight: Array, spec: NormSpec = _PLAIN_NORM) -> jax.Array:
    """Divide rows of x `[R, D]` by their root mean square in fp32, as `moe_torch.rms_norm`."""
    call = OpCall("rms_norm")
    require_type("spec", spec, NormSpec)
    return run_stage(call, plan_rms_norm, call.array("x", x), call.array("weight", weight), spec)[0]
