"""The forward from logits with quantised experts, beside the bf16 op of the same weights dequantised.

    python -m benchmarks.quantized --cells gptoss120b:mxfp4,mixtral:fp8_block --output record.json
    python -m benchmarks.quantized --cells gptoss120b:int4_g64,qwen3:int4_g128,qwen3:int8_g128 --tokens 16,64,256

Parity comes first: torch and JAX must agree bitwise, and the output with that of the dequantised weights, or nothing is
timed. Weights whose format has a tiling are prepared (`prepare_weights`) unless --published is given. Codes and scales
are random, with the rms of real weights. Both products are timed apart too, beside the time that the bytes of their
weights take at the fastest streaming: codes, scales and zero points, as they are published, of the experts that have
tokens. benchmarks/README.md describes the record.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import torch

import moe_jax
import moe_torch
from benchmarks.draws import SEED, draw_logits, load_of
from benchmarks.peers import dense_forward
from benchmarks.problem import relative_error
from benchmarks.provenance import provenance
from benchmarks.record import STREAMING_BYTES_PER_US, table
from benchmarks.shapes import SHAPES, TOKENS, Shape
from benchmarks.timing import GraphTimer, KernelSpan, free_memory
from moe_core import dtypes
from moe_core.formats import (
    Format,
    QuantizedSpec,
    QuantizedTensor,
    Scheme,
    format_named,
    quantized_specs,
    scheme_named,
    why_not_tileable,
)
from moe_core.operands import ExpertWeights, RouterLogits, map_arrays
from moe_core.specs import MoESpec

SCHEMA = 2
#: The e8m0 byte of 1.
_E8M0_ONE = 127
#: Largest relative Frobenius error of an output: of bf16 rows, and of rows that are quantised to e4m3 too.
TOLERANCES = {False: 1e-2, True: 8e-2}
#: Integers of 4 and 8 bits beside rows as they are.
INTEGERS = ("int4_g32", "int4_g64", "int4_g128", "int4_g128_zp", "int8_g64", "int8_g128", "int8_channel")
SCHEMES = {
    "mxfp4": (scheme_named("mxfp4_w4a16"), False),
    "fp8_block": (scheme_named("fp8_block"), False),
    "fp8_tensor": (scheme_named("fp8_tensor"), True),
    **{name: (Scheme(name, format_named(name)), False) for name in INTEGERS},
}
CELLS = (
    "gptoss120b:mxfp4,qwen3:mxfp4,qwen3:fp8_block,mixtral:fp8_block,gptoss120b:fp8_tensor,mixtral:fp8_tensor,"
    "gptoss120b:int4_g64,qwen3:int4_g128,qwen3:int4_g128_zp,gptoss120b:int8_g64,qwen3:int8_g128,qwen3:int8_channel"
)
COLUMNS = {
    "shape": "shape", "scheme": "scheme", "prepared": "prepared", "tokens": "tokens", "active_experts": "active",
    "torch_us": "torch", "bf16_us": "bf16", "bound_streaming_us": "stream bound", "dense_us": "dense bf16",
    "matmul1_us": "matmul 1", "matmul1_of_bound": "of its bound", "matmul2_us": "matmul 2",
    "matmul2_of_bound": "of its bound",
}  # fmt: skip


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


def product_times(replays: Sequence[Sequence[KernelSpan]]) -> dict[str, float]:
    """Median us of both products of a forward, from the end of the kernel ahead where launches overlap."""
    times: dict[str, list[float]] = {"matmul1": [], "matmul2": []}
    for spans in replays:
        found = []
        for place, span in enumerate(spans):
            if "matmul_" in span.name:
                ahead = max((other.end for other in spans[:place]), default=span.start)
                found.append(span.end - max(span.start, ahead))
        for name, time in zip(times, found, strict=True):
            times[name].append(time)
    return {name: statistics.median(found) for name, found in times.items()}


def measure(
    cell: Cell, tokens: int, experts: tuple[ExpertWeights, ExpertWeights], stored: dict[str, int], timer: Any
) -> dict[str, Any]:
    """The figures of one cell; exits where parity is red. experts: quantised, and the same in bf16; stored: bytes of
    both matrices in the published layout."""
    shape, (quantised, plain) = cell.shape, experts
    device = plain.down.device
    generator = torch.Generator(device).manual_seed(SEED + tokens)
    x = torch.randn(tokens, shape.d_model, device=device, generator=generator).bfloat16()
    logits = torch.from_numpy(draw_logits("balanced", tokens, shape.num_experts)).to(device)
    bf16 = MoESpec(shape.activation, shape.router, weight_layout="out_in")
    spec = dataclasses.replace(bf16, activations=cell.scheme.activations, fast_accumulate=cell.fast_accumulate)

    def forward(weights: ExpertWeights, spec: MoESpec) -> Any:
        return moe_torch.moe(x, weights, RouterLogits(logits), spec)

    ours, expected = forward(quantised, spec), forward(plain, bf16)
    theirs = jax.jit(lambda x, logits, weights: moe_jax.moe(x, weights, RouterLogits(logits), spec).output)(
        moe_jax.from_dlpack(x), moe_jax.from_dlpack(logits), map_arrays(quantised, moe_jax.from_dlpack)
    )
    same = torch.equal(moe_torch.from_dlpack(theirs), ours.output)
    error = relative_error(ours.output, expected.output)
    if not same or not error < TOLERANCES[cell.scheme.activations is not None]:
        sys.exit(
            f"parity is red for {shape.name} {cell.name} {tokens}: bitwise {same}, error {error}; nothing was timed"
        )
    active = load_of(ours.tokens_per_expert.cpu().numpy()).active
    bounds = {name: size * active / shape.num_experts / STREAMING_BYTES_PER_US for name, size in stored.items()}
    products = product_times(timer.kernels(lambda: forward(quantised, spec)))
    return {
        "shape": shape.name, "scheme": cell.name, "tokens": tokens, "active_experts": active,
        "prepared": quantised.down.spec.tiling is not None, "bitwise_torch_jax": same, "error_dequantized": error,
        "torch_us": timer.time(lambda: forward(quantised, spec)),
        "bf16_us": timer.time(lambda: forward(plain, bf16)),
        "bound_streaming_us": sum(bounds.values()),
        "dense_us": timer.time(dense_forward(shape, tokens, device)),
        "scale_dtype": str(quantised.down.scales.dtype).removeprefix("torch."),
        **{f"{name}_us": time for name, time in products.items()},
        **{f"{name}_of_bound": bounds[name] / time for name, time in products.items()},
    }  # fmt: skip


def run(options: argparse.Namespace, timer: Any, device: str) -> list[dict[str, Any]]:
    """The rows of every cell; the record, where an output is named, is written after each of them."""
    rows: list[dict[str, Any]] = []
    record = {"schema": SCHEMA, "provenance": provenance("benchmarks.quantized"), "seed": SEED, "rows": rows}
    for cell in options.cells:
        experts = draw_experts(cell, torch.Generator(device).manual_seed(SEED))
        plain = dequantized(experts)
        stored = stored_bytes(experts)
        if why_not_tileable(cell.scheme.weights) is None and not options.published:
            spec = MoESpec(cell.shape.activation, weight_layout="out_in")
            experts = moe_torch.prepare_weights(experts, spec)
        for count in options.tokens:
            with torch.no_grad():
                rows.append(measure(cell, count, (experts, plain), stored, timer))
            print(f"{cell.shape.name} {cell.name} {count}: {rows[-1]['torch_us']:.1f} us", file=sys.stderr, flush=True)
            if options.output is not None:
                options.output.parent.mkdir(parents=True, exist_ok=True)
                options.output.write_text(json.dumps(record, indent=1) + "\n")
        del experts, plain
        jax.clear_caches()
        free_memory()
    return rows


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line; exits with a message where it makes no sense."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", default=CELLS, help="of shape:scheme (default: %(default)s)")
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)), help="numbers of tokens (default: %(default)s)")
    parser.add_argument("--published", action="store_true", help="leave weights in their published layout")
    scales = ("bfloat16", "float16", "float32")
    parser.add_argument("--scales", choices=scales, default=scales[0], help="of grouped integers (default: bfloat16)")
    parser.add_argument("--output", type=Path, help="write the record here")
    found = parser.parse_args(arguments)
    cells = []
    for text in found.cells.split(","):
        shape, _, scheme = text.partition(":")
        if shape not in SHAPES or scheme not in SCHEMES:
            parser.error(f"--cells must be of {', '.join(SHAPES)} and {', '.join(SCHEMES)}, got {text!r}")
        cells.append(Cell(SHAPES[shape], scheme, *SCHEMES[scheme], found.scales))
    found.cells, found.tokens = cells, [int(count) for count in found.tokens.split(",")]
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    print(table(run(options, GraphTimer(), "cuda"), COLUMNS))
    return 0


if __name__ == "__main__":
    sys.exit(main())
