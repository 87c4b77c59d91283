"""Sums along an axis, with masks, factors, a fused activation and quantised results."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from moe_core.errors import InvalidInput, Unsupported
from moe_torch import ops
from moe_torch.bridge.options import layout_spec, require_instance
from moe_torch.compat.triton_kernels.matmul_ogs_details.options import fused_function
from moe_torch.compat.triton_kernels.matmul_ogs_details.product import delivered
from moe_torch.compat.triton_kernels.numerics import PLAIN_INPUT, PLAIN_OUTPUT, InFlexData, OutFlexData
from moe_torch.compat.triton_kernels_38.mxfp import MXFP_BLOCK_SIZE, require_mx, upcast_from_mxfp
from moe_torch.compat.triton_kernels_38.options import NO_FUNCTION, FnSpecs, require_output, to_fp8, to_microscaled

__all__ = ["FnSpecs", "PostprocessFn", "reduce"]


@dataclass(frozen=True)
class PostprocessFn:
    """specs: of `swiglu_fn`, or none."""

    specs: FnSpecs = NO_FUNCTION
    fn_args: tuple[Any, ...] = ()


_NONE, _MICROSCALED = PostprocessFn(), (torch.float8_e4m3fn, torch.uint8)


def reduce(
    x: torch.Tensor,
    dim: int,
    mask: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    x_mxscale: torch.Tensor | None = None,
    x_flex: InFlexData | None = PLAIN_INPUT,
    x_global_scale: torch.Tensor | None = None,
    y: torch.Tensor | None = None,
    y_dtype: torch.dtype | None = None,
    y_flex: OutFlexData | None = PLAIN_OUTPUT,
    y_flex_saturate_inf: bool = False,
    y_has_mx: bool | None = None,
    y_mx_scale_dtype: torch.dtype | None = None,
    y_microblock_size: int = MXFP_BLOCK_SIZE,
    y_value_pack_factor: int = 1,
    postprocess_fn1: PostprocessFn | None = None,
    postprocess_fn2: PostprocessFn | None = None,
    unpadded_batch_size: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return (y, its microscales or None), y = global_scale * postprocess(sum over dim of x * scale where mask != 0).

    x: 3-D, plain, fp8 with x_flex.scale, or mxfp8 with x_mxscale along the last axis. mask, scale: broadcast to x. Sums
    are in fp32. y_dtype None: x's. y_has_mx None: as x. fp8 results have y_flex. unpadded_batch_size: an integer
    tensor of one. Later rows keep the memory of y, or are zeros. Raises InvalidInput, and Unsupported for other
    functions and formats.
    """
    if x.ndim != 3 or dim not in range(-3, 3):
        raise InvalidInput(f"x must be 3-D and dim one of its axes, got {list(x.shape)} and {dim}; reshape x")
    dim, flex = dim % 3, PLAIN_OUTPUT if y_flex is None else y_flex
    microscaled = x_mxscale is not None if y_has_mx is None else y_has_mx
    dtype = x.dtype if y_dtype is None else y_dtype
    require_mx("y's scales", y_mx_scale_dtype or torch.uint8, y_microblock_size)
    require_output("y_flex", flex, dtype, microscaled, y_flex_saturate_inf)
    if y_value_pack_factor != (2 if dtype == torch.uint8 else 1) or (microscaled and dtype not in _MICROSCALED):
        raise InvalidInput(
            f"y_dtype must be fp8 e4m3 or bytes with microscales, and y_value_pack_factor 2 for bytes and else 1, got "
            f"{dtype} and {y_value_pack_factor}; pass those of one format"
        )
    if postprocess_fn2 is not None and postprocess_fn2.specs.fn is not None:
        raise Unsupported(f"postprocess_fn2 {postprocess_fn2.specs.name!r} has no kernel; apply it to the result")
    if x_mxscale is not None:
        if dim == 2:
            raise InvalidInput("dim must be 0 or 1 where x has microscales along the last axis, got 2; dequantise x")
        x = upcast_from_mxfp(x, x_mxscale, torch.float32, -1)
    factors = [one for one in (None if x_flex is None else x_flex.scale, x_global_scale) if one is not None]
    sums = _sums(x, dim, mask, scale, wide=microscaled or dtype != x.dtype or bool(factors))
    if x_flex is not None and x_flex.scale is not None:
        sums = sums * x_flex.scale
    fused = postprocess_fn1 or _NONE
    require_instance("postprocess_fn1", fused, PostprocessFn)
    activation = fused_function(fused.specs.name, fused.specs.fn, fused.fn_args, fused.specs.reduction_n)
    sums = sums if activation is None else ops.activation(sums, activation)
    sums = sums if x_global_scale is None else sums * x_global_scale
    scales = None
    if microscaled:
        result, scales = to_microscaled(sums.float(), dtype)
    else:
        result = to_fp8(sums, dtype, flex) if dtype.itemsize == 1 else sums.to(dtype)
    shape = result.shape
    if unpadded_batch_size is not None:
        kept = torch.arange(result.shape[0], device=x.device)[:, None] < unpadded_batch_size
        result = torch.where(kept, result.float(), 0 if y is None else y.float()).to(result.dtype)
    return delivered("y", y, result, shape), scales


def _sums(
    x: torch.Tensor, dim: int, mask: torch.Tensor | None, scale: torch.Tensor | None, *, wide: bool
) -> torch.Tensor:
    """`[S0, S1]`, in fp32 if wide or for fp8, else perhaps in the dtype of x."""
    mask, scale = (None if one is None else one.expand(x.shape) for one in (mask, scale))
    by_rows = mask is None or mask.stride(2) == 0 or x.shape[2] == 1
    if dim == 2 or scale is not None or not by_rows or x.itemsize == 1 or not x.numel():
        numbers = x if x.dtype == torch.float64 else x.float()
        numbers = numbers if scale is None else numbers * scale
        return (numbers if mask is None else torch.where(mask != 0, numbers, 0)).sum(dim)
    # A sum's rows of x are its slots.
    count, number = x.shape[1 - dim], x.shape[dim]
    rows = torch.arange(x.shape[0] * x.shape[1], dtype=torch.int32, device=x.device).reshape(x.shape[:2])
    rows = rows if mask is None else torch.where(mask[..., 0] != 0, rows, -1)
    row_of_slot = (rows.T if dim == 0 else rows).reshape(-1)
    layout = ops.RaggedLayout(layout_spec(count, number, 1, 1, None), None, None, row_of_slot, row_of_slot, None)
    return ops.reduce(x.reshape(-1, x.shape[2]), layout, order="row", out_dtype=torch.float32 if wide else None)
