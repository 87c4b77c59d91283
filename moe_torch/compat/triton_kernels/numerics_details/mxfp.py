"""mxfp4 (pairs, the even index low) and mxfp8: 32 elements along an axis share 2^(b - 127), stored as byte b."""

from __future__ import annotations

from enum import Enum, IntEnum

import torch
from torch.nn.functional import pad

from moe_core.errors import InvalidInput, Unsupported
from moe_core.formats import MXFP4, MXFP4_CEIL, MXFP8, MXFP8_CEIL, QuantizedSpec, QuantizedTensor
from moe_core.formats.mx import GROUP
from moe_torch.quantize import dequantize, quantize


class BlockSize(IntEnum):
    """Elements that share a scale. Ported code reads the number as `int(size)` or `size.value`."""

    MXFP = GROUP
    NVFP = GROUP // 2


MXFP_BLOCK_SIZE = BlockSize.MXFP
_LARGEST = {torch.uint8: 6.0, torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
_TYPES = ", ".join(map(str, _LARGEST))
#: The largest powers of two of a type, which OCP's rule scales the largest number's to.
POWERS = {torch.uint8: 4.0, torch.float8_e4m3fn: 256.0, torch.float8_e5m2: 32768.0}
_MANTISSA_BITS, _ONE, _NAN = 23, 127, 255


class DequantScaleRoundingMode(Enum):
    """ROUND_UP: the smallest power of two without saturation. ROUND_DOWN: the largest one with which a group's largest
    number fills its type, and may saturate."""

    ROUND_UP = 0
    ROUND_DOWN = 1


def downcast_to_mxfp(
    src_tensor: torch.Tensor,
    out_quant_type: torch.dtype,
    axis: int,
    DEQUANT_SCALE_ROUNDING_MODE: DequantScaleRoundingMode = DequantScaleRoundingMode.ROUND_UP,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise src_tensor (bf16, fp16 or fp32) to (values, scales uint8), both contiguous along axis.

    out_quant_type: torch.uint8 (mxfp4, an even axis, halved), torch.float8_e4m3fn or float8_e5m2. An axis of K has
    `ceil(K / 32)` groups. Ties go to the even code, too large numbers saturate, and a group of zeros has the scale 1.
    Raises InvalidInput, and Unsupported for other types.
    """
    return downcast(src_tensor, out_quant_type, axis, DEQUANT_SCALE_ROUNDING_MODE, _LARGEST)


def downcast(
    src_tensor: torch.Tensor,
    out_quant_type: torch.dtype,
    axis: int,
    mode: DequantScaleRoundingMode,
    down_to: dict[torch.dtype, float],
) -> tuple[torch.Tensor, torch.Tensor]:
    """down_to: the number that ROUND_DOWN scales a group's largest one to, before it rounds the scale down."""
    if not isinstance(mode, DequantScaleRoundingMode):
        raise InvalidInput(
            f"DEQUANT_SCALE_ROUNDING_MODE must be ROUND_UP or ROUND_DOWN of DequantScaleRoundingMode, got {mode!r}; "
            "leave it out for ROUND_UP"
        )
    if out_quant_type not in _LARGEST:
        raise Unsupported(f"out_quant_type must be one of {_TYPES}, got {out_quant_type}; choose one")
    _require_dtype("src_tensor", src_tensor.dtype)
    axis = _axis(axis, src_tensor)
    columns = src_tensor.shape[axis]
    per_byte = 2 if out_quant_type == torch.uint8 else 1
    if columns % per_byte:
        raise InvalidInput(
            f"src_tensor must have an even axis {axis} for mxfp4, two codes to a byte, got {list(src_tensor.shape)}; "
            "pad it with zeros"
        )
    groups = pad(src_tensor.transpose(axis, -1), (0, -columns % GROUP))
    if mode is DequantScaleRoundingMode.ROUND_UP and out_quant_type != torch.float8_e5m2:
        quantized = quantize(groups, MXFP4_CEIL if per_byte == 2 else MXFP8_CEIL)
        values, scales = quantized.values, quantized.scales
    else:
        values, scales = _scaled(groups, out_quant_type, mode, down_to[out_quant_type])
    values = values[..., : columns // per_byte].contiguous()
    return values.transpose(axis, -1), scales.transpose(axis, -1)


def upcast_from_mxfp(tensor: torch.Tensor, scale: torch.Tensor, target_dtype: torch.dtype, axis: int) -> torch.Tensor:
    """Dequantise results of `downcast_to_mxfp` to bf16, fp16 or fp32, contiguous. Scale byte 255 gives NaN.

    Raises InvalidInput, and Unsupported for elements other than mxfp4 (bytes) and fp8.
    """
    if tensor.dtype not in _LARGEST:
        raise Unsupported(f"tensor must be of one of {_TYPES}, got {tensor.dtype}; cast it")
    _require_dtype("target_dtype", target_dtype)
    axis = _axis(axis, tensor)
    values = tensor.transpose(axis, -1)
    per_byte = 2 if tensor.dtype == torch.uint8 else 1
    columns = values.shape[-1] * per_byte
    wanted = [*tensor.shape]
    wanted[axis] = -(-columns // GROUP)
    if list(scale.shape) != wanted:
        raise InvalidInput(
            f"scale must be {wanted}, one for {GROUP} elements along axis {axis}, got {list(scale.shape)}; pass that "
            "of downcast_to_mxfp"
        )
    scales = scale.transpose(axis, -1).contiguous()
    missing = -columns % GROUP
    if tensor.dtype == torch.float8_e5m2:
        ones = torch.ones((*values.shape[:-1], columns + missing), device=tensor.device).to(torch.float8_e4m3fn)
        factors = dequantize(QuantizedTensor(QuantizedSpec(MXFP8), ones, scales))
        whole = (values.float() * factors[..., :columns]).to(target_dtype)
    else:
        held = pad(values.contiguous().view(torch.uint8), (0, missing // per_byte)).view(tensor.dtype)
        format = MXFP4 if per_byte == 2 else MXFP8
        whole = dequantize(QuantizedTensor(QuantizedSpec(format), held, scales), target_dtype)[..., :columns]
    return whole.transpose(axis, -1).contiguous()


downcast_to_mxfp_torch, upcast_from_mxfp_torch = downcast_to_mxfp, upcast_from_mxfp


@torch.no_grad()
def _scaled(
    numbers: torch.Tensor, kind: torch.dtype, mode: DequantScaleRoundingMode, down_to: float
) -> tuple[torch.Tensor, torch.Tensor]:
    groups = numbers.float().unflatten(-1, (-1, GROUP))
    amax = groups.abs().amax(-1, keepdim=True)
    finite, largest = amax.isfinite(), _LARGEST[kind]
    # A GPU multiplies with the reciprocal of a number.
    divisor = largest if mode is DequantScaleRoundingMode.ROUND_UP else down_to
    bits = (torch.where(finite, amax, 0.0) / amax.new_full((), divisor)).view(torch.int32)
    if mode is DequantScaleRoundingMode.ROUND_UP:
        bits = bits + (2**_MANTISSA_BITS - 1)
    exponent = bits >> _MANTISSA_BITS
    # The smallest groups get no normal scale and become zeros.
    quotients = groups / (exponent.clamp(min=1) << _MANTISSA_BITS).view(torch.float32)
    quotients = torch.where(exponent > 0, quotients, 0.0).clamp(-largest, largest).flatten(-2)
    scales = torch.where(finite, torch.where(amax == 0, _ONE, exponent), _NAN).to(torch.uint8).squeeze(-1)
    if kind == torch.float8_e5m2:
        return quotients.to(kind), scales
    # Every group's scale is 1: its largest number is more than half of the type's.
    return quantize(quotients, MXFP4_CEIL if kind == torch.uint8 else MXFP8_CEIL).values, scales


def _require_dtype(name: str, dtype: torch.dtype) -> None:
    if dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise InvalidInput(f"{name} must be bf16, fp16 or fp32, got {dtype}; convert it")


def _axis(axis: int, tensor: torch.Tensor) -> int:
    if tensor.ndim < 2 or not -tensor.ndim <= axis < tensor.ndim:
        raise InvalidInput(
            f"axis must be one of a tensor of at least 2, got {axis} of {list(tensor.shape)}; name one of its axes"
        )
    return axis % tensor.ndim
