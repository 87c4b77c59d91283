"""mxfp4 and mxfp8: 32 elements along an axis share a power of two."""

from __future__ import annotations

import torch

from moe_core.errors import InvalidInput, Unsupported
from moe_torch.compat.triton_kernels.matmul_ogs_details.options import FnName
from moe_torch.compat.triton_kernels.numerics_details import mxfp
from moe_torch.compat.triton_kernels.numerics_details.mxfp import MXFP_BLOCK_SIZE, BlockSize, DequantScaleRoundingMode
from moe_torch.compat.triton_kernels.tensor import Tensor
from moe_torch.compat.triton_kernels_38.tensor import DataType, dtype_to_torch_dtype

__all__ = [
    "MXFP_BLOCK_SIZE", "NVFP_BLOCK_SIZE", "DequantScaleRoundingMode", "downcast_to_mxfp", "downcast_to_mxfp_torch",
    "quantize_mxfp4_fn", "quantize_mxfp8_fn", "quantize_nvfp4_fn", "upcast_from_mxfp", "upcast_from_mxfp_torch",
]  # fmt: skip

NVFP_BLOCK_SIZE = BlockSize.NVFP
#: The `fn` of epilogues. `matmul` refuses the last one.
quantize_mxfp8_fn, quantize_mxfp4_fn, quantize_nvfp4_fn = FnName
_ROUND_UP = DequantScaleRoundingMode.ROUND_UP


def downcast_to_mxfp(
    x: Tensor | torch.Tensor,
    out_dtype: torch.dtype | DataType,
    axis: int,
    scale_dtype: torch.dtype = torch.uint8,
    microblock_size: int = MXFP_BLOCK_SIZE,
    DEQUANT_SCALE_ROUNDING_MODE: DequantScaleRoundingMode = _ROUND_UP,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise x to (values, scales) as Triton 3.5's function, but ROUND_DOWN is OCP's rule, which may saturate.

    Raises InvalidInput, and Unsupported for other types, sizes and scales.
    """
    require_mx("scales", scale_dtype, microblock_size)
    source = x.data if isinstance(x, Tensor) else x
    kind = dtype_to_torch_dtype(out_dtype)
    return mxfp.downcast(source, kind, axis, DEQUANT_SCALE_ROUNDING_MODE, mxfp.POWERS)


def downcast_to_mxfp_torch(
    src_tensor: torch.Tensor,
    out_quant_type: torch.dtype,
    axis: int,
    scale_dtype: torch.dtype = torch.uint8,
    microblock_size: int = MXFP_BLOCK_SIZE,
    expected_scale: torch.Tensor | None = None,
    DEQUANT_SCALE_ROUNDING_MODE: DequantScaleRoundingMode = _ROUND_UP,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`downcast_to_mxfp` of src_tensor, divided by expected_scale `[1]`, or `[B]` for `[B, M, N]`."""
    if expected_scale is not None:
        src_tensor = src_tensor.float() / per_matrix("expected_scale", expected_scale, src_tensor.shape)
    mode = DEQUANT_SCALE_ROUNDING_MODE
    return downcast_to_mxfp(src_tensor, out_quant_type, axis, scale_dtype, microblock_size, mode)


def upcast_from_mxfp(
    tensor: torch.Tensor,
    scale: torch.Tensor,
    target_dtype: torch.dtype,
    axis: int,
    tensor_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """Dequantise results of `downcast_to_mxfp` to bf16, fp16 or fp32, contiguous. Scale byte 255 gives NaN."""
    require_mx("scale", scale.dtype, MXFP_BLOCK_SIZE)
    if tensor_scale is not None:
        raise Unsupported("tensor_scale must be None: it belongs to NVFP4, which has no kernel; multiply the result")
    return mxfp.upcast_from_mxfp(tensor, scale, target_dtype, axis)


def upcast_from_mxfp_torch(
    tensor: torch.Tensor, scale: torch.Tensor, target_dtype: torch.dtype, axis: int
) -> torch.Tensor:
    return upcast_from_mxfp(tensor, scale, target_dtype, axis)


def require_mx(name: str, dtype: torch.dtype, size: int) -> None:
    if dtype != torch.uint8 or size != MXFP_BLOCK_SIZE:
        raise Unsupported(
            f"{name} must be bytes (e8m0), one for {int(MXFP_BLOCK_SIZE)} elements, got {dtype} for {int(size)}: NVFP4 "
            "has no kernel; use mxfp4"
        )


def per_matrix(name: str, scale: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """A scale `[1]`, or `[B]` for `[B, M, N]`, to multiply with numbers of a shape."""
    if scale.numel() == 1:
        return scale.reshape(())
    if len(shape) != 3 or tuple(scale.shape) != (shape[0],):
        raise InvalidInput(
            f"{name} must be [1], or one per matrix of {list(shape)}, got {list(scale.shape)}; reshape it"
        )
    return scale[:, None, None]
