"""Adapters of experts over the same layer without them: forwards and training steps, beside the goals of both.

    python -m benchmarks.adapters --output record.json
    python -m benchmarks.adapters --cells qwen3:bf16 --tokens 1 --steps none --breakdown

Parity comes first: forwards of some tokens agree with fp32 arithmetic, or their variant is not timed. Kernels are
compiled ahead by processes. benchmarks/README.md describes the record.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from typing import Any, NamedTuple

import torch

import moe_torch
from benchmarks.breakdown import summarize
from benchmarks.compile_time import compile_one, load_compiler
from benchmarks.draws import SEED
from benchmarks.options import numbers_of_tokens
from benchmarks.problem import Problem, checked_tokens, draw_problem, expected, relative_error, spec_of
from benchmarks.provenance import provenance
from benchmarks.quantized_problem import SCHEMES, Cell, dequantized, draw_experts, draw_rows, stored_bytes
from benchmarks.record import command, reason_of, table, write_record
from benchmarks.shapes import SHAPES, Shape
from benchmarks.timing import GraphTimer, free_memory
from benchmarks.weights import draw_weights
from moe_core.base.target import Target
from moe_core.ops.moe.backward import plan_moe_backward
from moe_core.ops.moe.forward import plan_moe
from moe_core.ops.moe.options import BackwardOptions, ForwardOptions
from moe_core.plan.steps import LaunchPlan
from moe_core.runtime.cuda import cuda_target
from moe_core.runtime.warmup import distinct_kernels, kernel_identity
from moe_core.specs.moe import MoESpec
from moe_core.specs.operands import (
    ExpertWeights,
    LoRAFactors,
    MoEOperands,
    OutputGradients,
    RouterLogits,
    RouterWeights,
    SharedExpert,
    TopK,
    map_arrays,
)

CELLS = tuple(
    f"{shape}:{weights}" for weights in ("prepacked", "mxfp4", "bf16") for shape in ("gptoss20b", "qwen3", "gptoss120b")
)
TOLERANCE = 2e-2
#: Most of a step with adapters over one with frozen experts.
_STEP_GOALS = {("qwen3", False): 1.25, ("qwen3", True): 1.40, ("gptoss", False): 1.10, ("gptoss", True): 1.18}
_FACTORS = ("a1", "b1", "a2", "b2")
_FIELDS = ("shape", "scheme", "mode", "tokens", "variant", "base_us", "us", "over", "goal", "met")
_COLUMNS = {name: name.replace("_", " ") for name in (*_FIELDS, "peak_mb", "base_peak_mb", "error")}
Functions = dict[str, Callable[[], Any]]


class Variant(NamedTuple):
    """rank: of every adapter. adapters: in the batch, by turns of its tokens."""

    rank: int
    adapters: int

    def __str__(self) -> str:
        return f"rank {self.rank} x {self.adapters}"


@dataclasses.dataclass(frozen=True)
class Layer:
    """experts: as they are multiplied. plain: in bf16. spec: from logits."""

    name: str
    shape: Shape
    experts: ExpertWeights
    plain: ExpertWeights
    spec: MoESpec

    def problem(self, tokens: int) -> Problem:
        if self.experts is self.plain:
            return draw_problem(self.shape, "balanced", tokens, self.plain)
        return draw_rows(Cell(self.shape, "mxfp4", *SCHEMES["mxfp4"]), tokens, self.plain)


def draw_layer(name: str, device: str) -> Layer:
    shape, _, weights = name.partition(":")
    generator, of = torch.Generator(device).manual_seed(SEED), SHAPES[shape]
    layout = of.weight_layout if weights == "bf16" else "out_in"
    spec = MoESpec(of.activation, of.router, weight_layout=layout)
    if weights == "bf16":
        experts = plain = draw_weights(of, generator)
    else:
        experts = draw_experts(Cell(of, "mxfp4", *SCHEMES["mxfp4"]), generator)
        plain = dequantized(experts)
        if weights == "prepacked":
            experts = moe_torch.prepack_weights(experts, spec)
    return Layer(name, of, experts, plain, spec)


def draw_adapters(shape: Shape, variant: Variant, device: Any) -> LoRAFactors:
    """Random adapters of all experts, padded to 16 ranks."""
    rank, wide = -(-variant.rank // 16) * 16, 2 * shape.d_ff
    sizes = {"a1": (shape.d_model, rank), "b1": (rank, wide), "a2": (shape.d_ff, rank), "b2": (rank, shape.d_model)}
    by_expert = variant.adapters, shape.num_experts
    generator = None if device == "meta" else torch.Generator(device).manual_seed(SEED)
    like: dict[str, Any] = {"generator": generator, "device": device, "dtype": torch.bfloat16}
    factors = {n: torch.randn(*by_expert, *size, **like).mul_(size[0] ** -0.5) for n, size in sizes.items()}
    scale = torch.full(by_expert, 0.5, device=device)
    return LoRAFactors(**factors, scale=scale, ranks=torch.full_like(scale, variant.rank, dtype=torch.int32))


def ids_of(variant: Variant, tokens: int, device: Any) -> torch.Tensor:
    return (torch.arange(tokens, device=device) % variant.adapters).int()


def forwards(layer: Layer, problem: Problem, adapters: dict[Variant, LoRAFactors]) -> Functions:
    """By variant, `base` ahead."""
    x, logits = problem.x, RouterLogits(problem.logits)
    made: Functions = {"base": functools.partial(moe_torch.moe, x, layer.experts, logits, layer.spec)}
    for variant, lora in adapters.items():
        ids = ids_of(variant, problem.tokens, x.device)
        made[str(variant)] = functools.partial(
            moe_torch.moe, x, layer.experts, logits, layer.spec, lora=lora, adapter_ids=ids
        )
    return made


def steps(layer: Layer, problem: Problem, adapters: dict[Variant, LoRAFactors]) -> Functions:
    """Forward and backward, to x and factors."""
    routing, spec = TopK(*problem.top_k), dataclasses.replace(layer.spec, router=None)
    upstream = torch.randn_like(problem.x)

    def step(variant: Variant | None) -> Any:
        leaves = {"x": problem.x.detach().requires_grad_()}
        more: dict[str, Any] = {}
        if variant is not None:
            lora = adapters[variant]
            leaves |= {name: getattr(lora, name).detach().requires_grad_() for name in _FACTORS}
            lora = dataclasses.replace(lora, **{name: leaves[name] for name in _FACTORS})
            more = {"lora": lora, "adapter_ids": ids_of(variant, problem.tokens, problem.x.device)}
        output = moe_torch.moe(leaves["x"], layer.experts, routing, spec, **more).output
        return torch.autograd.grad(output, list(leaves.values()), upstream)

    return {str(variant or "base"): functools.partial(step, variant) for variant in (None, *adapters)}


def layers(layer: Layer, problem: Problem, lora: LoRAFactors) -> Functions:
    """Forwards of a layer with its router and a gated shared expert, without adapters, with some, and with all."""
    shape, x = layer.shape, problem.x
    generator = torch.Generator(x.device).manual_seed(SEED)

    def draw(*size: int) -> torch.Tensor:
        drawn = torch.randn(size, generator=generator, device=x.device, dtype=torch.bfloat16)
        return drawn.mul_(shape.d_model**-0.5)

    d, f, (slots, _, _, rank) = shape.d_model, shape.d_ff, lora.a1.shape
    shared = SharedExpert(draw(2 * f, d), draw(d, f), gate=draw(1, d))
    routing = RouterWeights(draw(d, shape.num_experts))
    sides = {"_router": (d, shape.num_experts), "1_shared": (d, 2 * f), "2_shared": (f, d)}
    beyond = {f"a{name}": draw(slots, 1, inside, rank) for name, (inside, _) in sides.items()}
    beyond |= {f"b{name}": draw(slots, 1, rank, outside) for name, (_, outside) in sides.items()}
    ids = torch.zeros(problem.tokens, dtype=torch.int32, device=x.device)
    call = functools.partial(moe_torch.moe, x, layer.experts, routing, layer.spec, shared=shared)
    every = dataclasses.replace(lora, **beyond)
    return {
        "base": call,
        "experts": functools.partial(call, lora=lora, adapter_ids=ids),
        "all": functools.partial(call, lora=every, adapter_ids=ids),
    }


def goal_of(layer: Layer, problem: Problem, variant: Variant) -> float:
    """Most of a forward over its base, by bytes; see the page's head for one token."""
    shape, ids = layer.shape, problem.top_k[0].long()
    slots = ids_of(variant, problem.tokens, ids.device).long()
    pairs = (ids * variant.adapters + slots[:, None]).unique().numel()
    factors = pairs * variant.rank * (2 * shape.d_model + 3 * shape.d_ff) * 2
    whole = sum(stored_bytes(layer.experts).values())
    return 1.04 + factors / (whole * ids.unique().numel() / shape.num_experts)


def error_of(layer: Layer, problem: Problem, variant: Variant, lora: LoRAFactors) -> float:
    """Of some tokens of a forward, to fp32 arithmetic."""
    tokens = checked_tokens(problem.tokens).to(problem.x.device)
    ids = ids_of(variant, problem.tokens, problem.x.device)
    found = moe_torch.moe(
        problem.x, layer.experts, RouterLogits(problem.logits), layer.spec, lora=lora, adapter_ids=ids
    )

    def change(number: int, rows: torch.Tensor, expert: int, token: torch.Tensor) -> torch.Tensor:
        slots = ids[tokens][token].long()
        a, b = (getattr(lora, f"{side}{number}")[slots, expert].float() for side in "ab")
        low = (rows.float()[:, None] @ a[..., : variant.rank]) * lora.scale[slots, expert, None, None]
        return (low.to(rows.dtype).float() @ b[:, : variant.rank])[:, 0]

    return relative_error(found.output[tokens], expected(problem, tokens, change=change))


def plans_of(layer: Layer, tokens: int, variants: Sequence[Variant], target: Target, kind: str) -> list[LaunchPlan]:
    """What forwards or steps run."""
    problem, shape = layer.problem(1), layer.shape
    x = dataclasses.replace(spec_of(problem.x), shape=(tokens, shape.d_model))
    ids = spec_of(ids_of(Variant(1, 1), tokens, "meta"))
    lows = [None, *(map_arrays(draw_adapters(shape, one, "meta"), spec_of) for one in variants)]
    made = []
    of = map_arrays(layer.experts, spec_of)
    for lora in lows:
        more = {} if lora is None else {"lora": lora, "adapter_ids": ids}
        if kind == "forward":
            logits = dataclasses.replace(spec_of(problem.logits), shape=(tokens, shape.num_experts))
            made.append(plan_moe(x, of, RouterLogits(logits), layer.spec, target, options=ForwardOptions(**more)))
            continue
        pair = [dataclasses.replace(spec_of(one), shape=(tokens, shape.top_k)) for one in problem.top_k]
        routing, spec = TopK(*pair), dataclasses.replace(layer.spec, router=None)
        made.append(plan_moe(x, of, routing, spec, target, options=ForwardOptions(**more, save=True)))
        wanted = ("d_x", *(() if lora is None else [f"d_lora.{name}" for name in _FACTORS]))
        operands = MoEOperands(x, of, routing, **more)
        made.append(plan_moe_backward(OutputGradients(x), operands, spec, target, options=BackwardOptions(wanted)))
    return made


class Compiled:
    """Compiles kernels of cells in processes, in the order of their cells."""

    def __init__(self, processes: int) -> None:
        self._pool = ProcessPoolExecutor(processes, multiprocessing.get_context("spawn"), load_compiler)
        self._kernels: dict[Any, Future[Any]] = {}

    def start(self, plans: Sequence[LaunchPlan]) -> list[Future[Any]]:
        kernels = {kernel_identity(*kernel): kernel for kernel in distinct_kernels(plans)}
        for name, kernel in kernels.items():
            if name not in self._kernels:
                self._kernels[name] = self._pool.submit(compile_one, kernel)
        return [self._kernels[name] for name in kernels]

    def stop(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


def timed(functions: Functions, timer: Any, options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """By name {"us", "over"} of calls by turns; over: the base, in the same rounds."""
    rounds = timer.rounds(functions, options.repeats, options.cell_seconds)
    return {
        name: {
            "us": statistics.median(times),
            "over": statistics.median(time / base for time, base in zip(times, rounds["base"], strict=True)),
        }
        for name, times in rounds.items()
    }


def forward_rows(layer: Layer, tokens: int, timer: Any, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    problem = layer.problem(tokens)
    adapters = {one: draw_adapters(layer.shape, one, problem.x.device) for one in options.variants}
    errors = {one: error_of(layer, problem, one, lora) for one, lora in adapters.items()}
    sound = {one: lora for one, lora in adapters.items() if errors[one] < TOLERANCE}
    functions = forwards(layer, problem, sound)
    found = timed(functions, timer, options)
    base, breakdown = found["base"]["us"], {}
    if options.breakdown:
        breakdown = {name: summarize(timer.kernels(function)) for name, function in functions.items()}
    for variant in options.variants:
        row = {"variant": str(variant), "base_us": base, "error": errors[variant], "goal": (base + 3) / base}
        if tokens > 1:
            row["goal"] = goal_of(layer, problem, variant)
        if variant in sound:
            row |= found[str(variant)]
            row["met"] = row["over"] <= row["goal"]
        if breakdown:
            row["breakdown"] = {name: breakdown[name] for name in ("base", str(variant)) if name in breakdown}
        yield row


def step_rows(layer: Layer, tokens: int, timer: Any, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    problem = layer.problem(tokens)
    adapters = {one: draw_adapters(layer.shape, one, problem.x.device) for one in options.variants}
    functions = steps(layer, problem, adapters)
    peaks = {name: peak_mb(function) for name, function in functions.items()}
    found = timed(functions, timer, options)
    for variant in options.variants:
        family = "qwen3" if layer.shape.name == "qwen3" else "gptoss"
        row = {"variant": str(variant), "base_us": found["base"]["us"], **found[str(variant)]}
        row |= {"peak_mb": peaks[str(variant)], "base_peak_mb": peaks["base"]}
        row["goal"] = _STEP_GOALS[family, variant.rank > 16]
        yield row | {"met": row["over"] <= row["goal"]}


def layer_rows(layer: Layer, tokens: int, timer: Any, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    problem, variant = layer.problem(tokens), Variant(16, 1)
    found = timed(layers(layer, problem, draw_adapters(layer.shape, variant, problem.x.device)), timer, options)
    for name in ("experts", "all"):
        yield {"variant": f"{name}, {variant}", "base_us": found["base"]["us"], **found[name]}


def peak_mb(function: Callable[[], Any]) -> float:
    """MB that a call takes at most beyond what is there, results included."""
    function()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    function()
    return (torch.cuda.max_memory_allocated() - before) / 1e6


ROWS = {"forward": forward_rows, "step": step_rows, "layer": layer_rows}


def run(options: argparse.Namespace, timer: Any, device: str, target: Target) -> dict[str, Any]:
    """The record, written after every cell where an output is named."""
    stop, rows = time.monotonic() + options.limit, list[dict[str, Any]]()
    record = {"schema": "adapters/1", "provenance": provenance("benchmarks.adapters"), "seed": SEED, "rows": rows}
    compiled, made = Compiled(options.processes), {name: draw_layer(name, device) for name in options.cells}
    cells = [(kind, name, tokens) for kind in ROWS for name in options.cells for tokens in getattr(options, kind)]
    # Prepacked weights do not train.
    cells = [one for one in cells if one[0] != "layer" or one[1] == "qwen3:bf16"]
    cells = [one for one in cells if one[0] != "step" or not one[1].endswith(":prepacked")]
    waits = [
        [] if kind == "layer" else compiled.start(plans_of(made[name], tokens, options.variants, target, kind))
        for kind, name, tokens in cells
    ]
    print(f"{options.limit - stop + time.monotonic():.0f} s: kernels are being compiled", file=sys.stderr, flush=True)
    for (kind, name, tokens), kernels in zip(cells, waits, strict=True):
        shape, _, scheme = name.partition(":")
        common = {"shape": shape, "scheme": scheme, "mode": kind, "tokens": tokens}
        try:
            for kernel in kernels:
                kernel.result(max(0.0, stop - time.monotonic()))
            if time.monotonic() > stop:
                raise TimeoutError(f"{options.limit:g} s were over")
            new = [common | row for row in ROWS[kind](made[name], tokens, timer, options)]
            rows += new
            print(json.dumps(new), file=sys.stderr, flush=True)
        except Exception as error:  # one cell must not take the others' figures with it
            rows.append(common | {"refused": reason_of(error)})
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
        free_memory()
        write_record(options.output, record)
    compiled.stop()
    return record


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line; exits with a message where it makes no sense."""
    parser = command(__doc__, cells=CELLS, limit=3600.0, cell_seconds=1.0, processes=os.cpu_count() or 1, repeats=31)
    numbers = {"ranks": (8, 16, 64), "adapters": (1, 8), "tokens": (1, 64, 1024, 4096), "steps": (4096, 16384)}
    for name, default in (numbers | {"layers": (1, 64, 4096)}).items():
        text = "numbers, with commas between them, or none (default: %(default)s)"
        parser.add_argument(f"--{name}", default=",".join(map(str, default)), help=text)
    parser.add_argument("--breakdown", action="store_true", help="device time of forwards by kernel")
    found = parser.parse_args(arguments)
    found.cells = found.cells.split(",")
    if not set(found.cells) <= set(CELLS):
        parser.error(f"--cells must be of {', '.join(CELLS)}, got {','.join(found.cells)}")
    for name in ("ranks", "adapters", "tokens", "steps", "layers"):
        text = getattr(found, name)
        setattr(found, name, () if text == "none" else numbers_of_tokens(parser, text, f"--{name}"))
    found.variants = [Variant(rank, adapters) for adapters in found.adapters for rank in found.ranks]
    found.forward, found.step, found.layer = found.tokens, found.steps, found.layers
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run and print; 1 where a cell has no figures or its parity was red."""
    rows = run(parse(arguments), GraphTimer(), "cuda", cuda_target(0))["rows"]
    print(table(rows, _COLUMNS))
    wrong = [row for row in rows if "us" not in row]
    for row in wrong:
        print(f"not timed: {row}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
