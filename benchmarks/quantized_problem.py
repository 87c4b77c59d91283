"""What benchmarks.quantized measures: layers, their schemes, random codes and scales, rows and logits."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import torch

import moe_torch
from benchmarks.draws import SEED, draw_logits
from benchmarks.problem import Problem
from benchmarks.shapes import Shape
from moe_core.base import dtypes
from moe_core.formats import Format, QuantizedSpec, QuantizedTensor, Scheme, format_named, quantized_specs, scheme_named
from moe_core.specs.moe import MoESpec
from moe_core.specs.operands import ExpertWeights

#: The e8m0 byte of 1.
_E8M0_ONE = 127
#: Integers of 4 and 8 bits beside rows as they are.
INTEGERS = ("int4_g32", "int4_g64", "int4_g128", "int4_g128_zp", "int8_g64", "int8_g128", "int8_channel")
SCHEMES = {
    "mxfp4": (scheme_named("mxfp4_w4a16"), False),
    "fp8_block": (scheme_named("fp8_block"), False),
    "fp8_tensor": (scheme_named("fp8_tensor"), True),
    **{name: (Scheme(name, format_named(name)), False) for name in INTEGERS},
}


class Cell(NamedTuple):
    """A layer and how it is quantised. fast_accumulate: sums stay in the tensor cores' own precision; scale_dtype: of
    grouped integers' scales."""

    shape: Shape
    name: str
    scheme: Scheme
    fast_accumulate: bool
    scale_dtype: str = "bfloat16"


def draw_matrix(cell: Cell, shape: tuple[int, int, int], generator: torch.Generator) -> QuantizedTensor:
    """Random codes `[E, N, D]` whose numbers have an rms of about D^-1/2."""
    format = cell.scheme.weights
    if "int" in format.element:
        return draw_integers(format, cell.scale_dtype, shape, generator)
    described = quantized_specs(QuantizedSpec(format), shape)
    device, rms = generator.device, shape[-1] ** -0.5
    if format.has_e8m0_scales:
        values = torch.randint(0, 256, described.values.shape, dtype=torch.uint8, device=device, generator=generator)
        # e2m1 codes have an rms of about 3.
        middle = _E8M0_ONE + round(torch.log2(torch.tensor(rms / 3)).item())
        scales = torch.randint(
            middle - 1, middle + 2, described.scales.shape, dtype=torch.uint8, device=device, generator=generator
        )
        return QuantizedTensor(described.spec, values, scales)
    values = torch.empty(described.values.shape, dtype=torch.float8_e4m3fn, device=device)
    for expert in range(shape[0]):
        numbers = torch.randn(values.shape[1:], device=device, generator=generator) * 100
        values[expert] = numbers.clamp(-448, 448).to(torch.float8_e4m3fn)
    scales = (0.5 + torch.rand(described.scales.shape, device=device, generator=generator)) * (rms / 100)
    return QuantizedTensor(described.spec, values, scales)


def draw_integers(
    format: Format, scale_dtype: str, shape: tuple[int, int, int], generator: torch.Generator
) -> QuantizedTensor:
    """As `draw_matrix`, any codes; stored zero points are those in the middle and their neighbours."""
    element, device = format.own_element, generator.device
    described = quantized_specs(QuantizedSpec(format), shape, scale_dtype if element.max_code is not None else None)

    def integers(low: int, high: int, sizes: tuple[int, ...]) -> torch.Tensor:
        return torch.randint(low, high, sizes, dtype=torch.uint8, device=device, generator=generator)

    values = integers(0, 256, described.values.shape)
    # The rms of that many equally likely codes.
    rms = shape[-1] ** -0.5 / (2**format.bits_per_element / 12**0.5)
    scales = (0.5 + torch.rand(described.scales.shape, device=device, generator=generator)) * rms
    points = None
    if described.zero_points is not None:
        middle, sizes = element.zero_point or 0, described.zero_points.shape
        points = integers(middle - 1, middle + 2, sizes)
        if element.per_byte == 2:
            points |= integers(middle - 1, middle + 2, sizes) << 4
    kind = getattr(torch, dtypes.canonical(described.scales.dtype))
    return QuantizedTensor(described.spec, values.view(getattr(torch, element.dtype)), scales.to(kind), points)


def draw_experts(cell: Cell, generator: torch.Generator) -> ExpertWeights:
    """Both matrices, and biases where the layer has them."""
    shape, device = cell.shape, generator.device
    width = shape.activation.input_width(shape.d_ff)
    biases: dict[str, Any] = {}
    if shape.biased:
        biases = {
            "gate_up_bias": torch.randn(shape.num_experts, width, device=device, generator=generator),
            "down_bias": torch.randn(shape.num_experts, shape.d_model, device=device, generator=generator),
        }
    return ExpertWeights(
        draw_matrix(cell, (shape.num_experts, width, shape.d_model), generator),
        draw_matrix(cell, (shape.num_experts, shape.d_model, shape.d_ff), generator),
        **biases,
    )


def dequantized(experts: ExpertWeights) -> ExpertWeights:
    """The same experts in bf16."""
    matrices = {name: moe_torch.dequantize(getattr(experts, name), torch.bfloat16) for name in ("gate_up", "down")}
    return dataclasses.replace(experts, **matrices)


def stored_bytes(experts: ExpertWeights) -> dict[str, int]:
    """Bytes of codes, scales and zero points of both matrices, as they are given."""
    return {"matmul1": experts.gate_up.nbytes, "matmul2": experts.down.nbytes}


def draw_rows(cell: Cell, tokens: int, plain: ExpertWeights) -> Problem:
    """Random rows and logits of so many tokens. plain: the experts in bf16, `out_in`."""
    device = plain.down.device
    generator = torch.Generator(device).manual_seed(SEED + tokens)
    x = torch.randn(tokens, cell.shape.d_model, device=device, generator=generator).bfloat16()
    logits = torch.from_numpy(draw_logits("balanced", tokens, cell.shape.num_experts)).to(device)
    return Problem(dataclasses.replace(cell.shape, weight_layout="out_in"), "balanced", x, logits, plain)


def specs_of(cell: Cell) -> tuple[MoESpec, MoESpec]:
    """Of the quantised forward and of the bf16 op."""
    bf16 = MoESpec(cell.shape.activation, cell.shape.router, weight_layout="out_in")
    return dataclasses.replace(bf16, activations=cell.scheme.activations, fast_accumulate=cell.fast_accumulate), bf16


def with_static_scales(cell: Cell, experts: ExpertWeights) -> ExpertWeights | None:
    """The same experts with the scales of both products' rows given: 1. None where a scale is not for all rows."""
    if cell.scheme.activations != format_named("fp8_tensor"):
        return None
    scales = {name: torch.ones(1, device=experts.down.values.device) for name in ("gate_up", "down")}
    return dataclasses.replace(experts, **{f"{name}_input_scale": scale for name, scale in scales.items()})
