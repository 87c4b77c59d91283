"""Experts with weights in tensor subclasses: torchao's are read, others are refused."""

from __future__ import annotations

from typing import Any

import torch

from moe_core.formats import FP8_CHANNEL, INT8_CHANNEL, Format, QuantizedSpec, QuantizedTensor, quantized_shapes
from moe_core.specs.operands import ExpertWeights
from moe_torch.bridge.arrays import align, package_of
from moe_torch.transformers.activations import unsupported

#: torchao's classes, the dtype of their values, and ours with one scale per row of a matrix.
_READ: dict[str, tuple[torch.dtype, Format]] = {
    "Int8Tensor": (torch.int8, INT8_CHANNEL),
    "Float8Tensor": (torch.float8_e4m3fn, FP8_CHANNEL),
}
_REQUIRED = (
    "torchao's int8 or float8 weights alone, with one scale per row (Int8WeightOnlyConfig, Float8WeightOnlyConfig)"
)


def subclass_weights(experts: Any) -> ExpertWeights:
    """The frozen weights of experts on torchao's own bytes. Raises Unsupported for all others."""
    if experts.is_transposed or experts.has_bias:
        raise unsupported(experts, "has quantised weights that are transposed or have a bias")
    first = "gate_up_proj" if experts.has_gate else "up_proj"
    return ExpertWeights(_matrix(experts, first), _matrix(experts, "down_proj"))


def _matrix(experts: Any, name: str) -> QuantizedTensor:
    weight: Any = getattr(experts, name)
    kind = type(weight)
    if package_of(weight) == "torch":
        raise unsupported(experts, f"has {name} as a plain tensor beside a quantised one; quantise both, or none")
    dtype, format = _READ.get(kind.__name__, (None, None))
    values: Any = getattr(weight, "qdata", None)
    scales: Any = getattr(weight, "scale", None)
    # Of hidden states: scales, zero points and factors.
    others = ("act_quant_scale", "act_quant_zero_point", "act_pre_scale", "act_quant_kwargs")
    more = [other for other in others if getattr(weight, other, None) is not None]
    more += ["zero_point"] if not _is_zero(getattr(weight, "zero_point", None)) else []
    if package_of(weight) != "torchao" or format is None or values is None or values.dtype != dtype or more:
        options = f" with {', '.join(more)}" if more else ""
        raise unsupported(experts, f"has {name} in {kind.__module__}.{kind.__qualname__}{options}, not {_REQUIRED}")
    spec = QuantizedSpec(format, "out_in")
    wanted = quantized_shapes(spec, tuple(weight.shape)).scales
    if tuple(scales.shape) != wanted:
        raise unsupported(experts, f"has scales {list(scales.shape)} of {name}, not {list(wanted)}: {_REQUIRED}")
    if values.device.type == "cpu":
        align(name, values)
    return QuantizedTensor(spec, values, scales.float())


def _is_zero(zero_point: Any) -> bool:
    """None, or all zeros as torchao stores symmetric weights. Read from the device once."""
    if zero_point is None:
        return True
    if not hasattr(zero_point, "moebius_is_zero"):
        zero_point.moebius_is_zero = not bool(zero_point.any())
    return zero_point.moebius_is_zero
