"""The clamped SwiGLU on interleaved columns: `s = g * sigmoid(alpha * g)`, `s * (u + 1)`, g even columns, u odd."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moe_core.errors import InvalidInput, Unsupported
from moe_core.specs.matmul import Activation
from moe_torch import ops
from moe_torch.bridge.options import require_instance
from moe_torch.compat.triton_kernels import numerics
from moe_torch.compat.triton_kernels.routing import RoutingData


@dataclass(frozen=True, eq=False)
class FlexCtx:
    out_data: numerics.OutFlexData = numerics.PLAIN_OUTPUT
    inp_data: numerics.InFlexData = numerics.PLAIN_INPUT
    saturate_inf: bool = False


PLAIN_FLEX = FlexCtx()


@dataclass(frozen=True, eq=False)
class PrecisionConfig:
    """limit: upper bound of g, and bound of u on both sides."""

    limit: float | None
    flex_ctx: FlexCtx = PLAIN_FLEX


def swiglu_activation(alpha: float, limit: float | None) -> Activation:
    return Activation("swiglu_oai", gate_layout="interleaved", alpha=alpha, limit=limit)


def swiglu_fn(input: torch.Tensor, alpha: float, limit: float | None) -> torch.Tensor:
    """`[R, F]` in the dtype of input `[R, 2F]`. As `FnSpecs.fn` it is fused into `matmul_ogs`."""
    return ops.activation(input, swiglu_activation(alpha, limit))


def swiglu(
    a: torch.Tensor, alpha: float, precision_config: PrecisionConfig, routing_data: RoutingData | None = None
) -> torch.Tensor:
    """`[..., F]` of a `[..., 2F]`, in its dtype, for all rows. Raises Unsupported for flex data, which concerns fp8."""
    require_instance("precision_config", precision_config, PrecisionConfig)
    if routing_data is not None:
        require_instance("routing_data", routing_data, RoutingData)
    flex = precision_config.flex_ctx
    reason = numerics.why_not_plain_output(flex.out_data, flex.saturate_inf)
    if reason is None and (flex.inp_data.dtype is not None or flex.inp_data.scale is not None):
        reason = "activations are bf16, fp16 or fp32 and have no scale, so inp_data must be InFlexData()"
    if reason is not None:
        raise Unsupported(reason)
    if a.ndim < 2:
        raise InvalidInput(f"a must be [..., 2F], got {list(a.shape)}; add an axis of rows")
    out = swiglu_fn(a.reshape(-1, a.shape[-1]), alpha, precision_config.limit)
    return out.reshape(*a.shape[:-1], out.shape[-1])
