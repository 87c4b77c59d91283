"""transformers' fp8 experts (`FP8Experts`)."""

from __future__ import annotations

import math
from typing import Any

import torch

from moe_core.formats import (
    FP8_BLOCK,
    FP8_CHANNEL,
    FP8_GROUP,
    FP8_TOKEN,
    MXFP4,
    MXFP8,
    Format,
    QuantizedSpec,
    QuantizedTensor,
    quantized_shapes,
)
from moe_core.specs.operands import ExpertWeights
from moe_torch.transformers.activations import unsupported

#: Block (rows, columns) -> (format of the weights, of the hidden states).
_BLOCKS = {(128, 128): (FP8_BLOCK, FP8_GROUP), (1, 32): (MXFP8, MXFP8)}


def fp8_weights(experts: Any) -> tuple[ExpertWeights, Format | None]:
    """(weights, format of the quantised hidden states or None).

    Only scales that are stored shorter than ours are copied. No gradient reaches weights or scales. Raises Unsupported
    for static activation scales, blocks other than 128 x 128 and 1 x 32, and blocks with rows of both gate and up.
    """
    if experts.activation_scheme != "dynamic":
        raise unsupported(experts, f"quantises hidden states by {experts.activation_scheme} scales of each expert")
    block = None if experts.block_size is None else tuple(experts.block_size)
    name = "gate_up_proj" if experts.has_gate else "up_proj"
    first = getattr(experts, name)
    if first.dtype == torch.int8:
        weights, activations = MXFP4, None
    elif block is None:
        weights, activations = FP8_CHANNEL, FP8_TOKEN
    elif block in _BLOCKS:
        weights, activations = _BLOCKS[block]
    else:
        raise unsupported(experts, f"has weights in blocks of {block}, not of 128 x 128 or 1 x 32")
    return ExpertWeights(_matrix(experts, name, weights), _matrix(experts, "down_proj", weights)), activations


def _matrix(experts: Any, name: str, format: Format) -> QuantizedTensor:
    values, scales = getattr(experts, name).detach(), getattr(experts, f"{name}_scale_inv").detach()
    if values.dtype == torch.int8:
        values = values.view(torch.uint8)
    elif values.dtype != torch.float8_e4m3fn:
        raise unsupported(experts, f"has weights of {values.dtype}, not of torch.float8_e4m3fn")
    spec = QuantizedSpec(format, "out_in")
    num_experts, rows, columns = values.shape
    shape = (num_experts, rows, columns * format.own_element.per_byte)
    wanted = quantized_shapes(spec, shape).scales
    if format is FP8_CHANNEL:
        # Each row of the matrix gets its own scale.
        scales = scales.float().repeat_interleave(rows // scales.shape[1], dim=1)
    elif format.has_e8m0_scales:
        if scales.dtype.itemsize != 1:
            raise unsupported(experts, f"has scales of {scales.dtype} in groups of 32, not of 8-bit exponents")
        scales = scales.view(torch.uint8)
    else:
        scales = scales.float()
    if scales.numel() != math.prod(wanted):
        raise unsupported(
            experts, f"has scales {list(scales.shape)} of {name}, not {list(wanted)}: blocks with rows of gate and up"
        )
    return QuantizedTensor(spec, values, scales.reshape(wanted))
