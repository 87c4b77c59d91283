"""mxfp4 and mxfp8: 32 elements along an axis share a power of two, a byte b that means 2^(b - 127).

mxfp4 codes are packed in pairs along that axis, the even index in the low nibble.
"""

from __future__ import annotations

from enum import Enum

import torch

from moe_core.errors import InvalidInput, Unsupported
from moe_core.formats import MXFP4, MXFP4_CEIL, MXFP8, MXFP8_CEIL, QuantizedSpec, QuantizedTensor
from moe_core.formats.mx import GROUP
from moe_torch.quantize import dequantize, quantize

MXFP_BLOCK_SIZE = GROUP


class DequantScaleRoundingMode(Enum):
    """ROUND_UP: the smallest power of two with which nothing saturates. ROUND_DOWN is not supported."""

    ROUND_UP = 0
    ROUND_DOWN = 1


def downcast_to_mxfp(
    src_tensor: torch.Tensor,
    out_quant_type: torch.dtype,
    axis: int,
    DEQUANT_SCALE_ROUNDING_MODE: DequantScaleRoundingMode = DequantScaleRoundingMode.ROUND_UP,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(values, scales uint8) of src_tensor (bf16, fp16 or fp32), both contiguous along axis.

    out_quant_type: torch.uint8 (mxfp4, the axis halved) or torch.float8_e4m3fn; the axis must be a multiple of 32. Ties
    go to the even code, and a group of zeros has the scale 1. Raises InvalidInput, and Unsupported for other types and
    another rounding of scales.
    """
    if DEQUANT_SCALE_ROUNDING_MODE is not DequantScaleRoundingMode.ROUND_UP:
        raise Unsupported(
            f"DEQUANT_SCALE_ROUNDING_MODE must be ROUND_UP, got {DEQUANT_SCALE_ROUNDING_MODE}: no format has it; "
            "moe_torch.quantize with MXFP4 or MXFP8 rounds scales down as OCP does"
        )
    formats = {torch.uint8: MXFP4_CEIL, torch.float8_e4m3fn: MXFP8_CEIL}
    if out_quant_type not in formats:
        raise Unsupported(f"out_quant_type must be torch.uint8 or torch.float8_e4m3fn, got {out_quant_type}")
    axis = _axis(axis, src_tensor)
    quantized = quantize(src_tensor.transpose(axis, -1), formats[out_quant_type])
    return quantized.values.transpose(axis, -1), quantized.scales.transpose(axis, -1)


def upcast_from_mxfp(tensor: torch.Tensor, scale: torch.Tensor, target_dtype: torch.dtype, axis: int) -> torch.Tensor:
    """The numbers of what `downcast_to_mxfp` gives, contiguous, in bf16, fp16 or fp32; scale byte 255 gives NaN.

    Raises InvalidInput, and Unsupported for elements other than mxfp4 (bytes) and fp8 e4m3.
    """
    formats = {torch.uint8: MXFP4, torch.float8_e4m3fn: MXFP8}
    if tensor.dtype not in formats:
        raise Unsupported(f"tensor must be torch.uint8 or torch.float8_e4m3fn, got {tensor.dtype}")
    axis = _axis(axis, tensor)
    held = [array.transpose(axis, -1).contiguous() for array in (tensor, scale)]
    whole = dequantize(QuantizedTensor(QuantizedSpec(formats[tensor.dtype]), *held), target_dtype)
    return whole.transpose(axis, -1).contiguous()


def _axis(axis: int, tensor: torch.Tensor) -> int:
    if tensor.ndim < 2 or not -tensor.ndim <= axis < tensor.ndim:
        raise InvalidInput(f"axis must be one of a tensor of at least 2, got {axis} of {list(tensor.shape)}")
    return axis % tensor.ndim
