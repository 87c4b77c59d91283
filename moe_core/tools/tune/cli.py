"""The command `moebius-tune`. Exit status: 0 table written, 1 with a wrong result, 2 not measured."""

from __future__ import annotations

import argparse
import functools
import os
import pathlib
import sys
from collections.abc import Sequence

import moe_core
from moe_core.base import WEIGHT_LAYOUTS, Target, command
from moe_core.base.dtypes import MATMUL_DTYPES
from moe_core.checkpoint.config import settings_of
from moe_core.checkpoint.families import architecture_of, text_model
from moe_core.errors import InvalidInput, Unsupported
from moe_core.layers import HUGGING_FACE, ExpertsSpec, MoELayerSpec, Storage
from moe_core.runtime.cuda import cuda_available, cuda_target, why_no_gpu
from moe_core.specs.matmul import ACTIVATIONS, GATE_LAYOUTS, Activation
from moe_core.specs.tile_table import read_measurements, write_measurements
from moe_core.tools.tune import links
from moe_core.tools.tune.bench import GpuBench
from moe_core.tools.tune.device import Device
from moe_core.tools.tune.products import PRESETS, Product, distinct_products, products_of
from moe_core.tools.tune.provenance import joined, provenance
from moe_core.tools.tune.search import Limits, Result, candidates, search

WRITTEN, WRONG, NOTHING_MEASURED = 0, 1, command.COULD_NOT_RUN
_TOKENS = tuple(2**exponent for exponent in range(15))
_SIZES = (("d-model", "D"), ("d-ff", "F, of one expert"), ("experts", "E"), ("top-k", "K"))
_DRY_TARGET = Target("cuda", 90, 132)
_DESCRIPTION = """\
Time tile configurations of the grouped matmuls of MoE layers on this machine's GPU, and write the fastest to a table:
`MoESpec(..., tuning=Tuning(table=TileTable.load("table.json")))` uses it. Every candidate's result is compared with
that of the built-in choice before it is timed.

With --links: time messages between ranks instead, and write what `moe_core.parallel` predicts and chooses modes by.
"""
_EPILOG = "exit status: 0 written, 1 written, but a configuration was wrong (not in the table), 2 could not measure"


def main(arguments: Sequence[str] | None = None) -> int:
    command_line = list(sys.argv[1:] if arguments is None else arguments)
    parser = _parser()
    options = parser.parse_args(command_line)
    return command.run("moebius-tune", lambda: _tune(options, command_line))


def _tune(options: argparse.Namespace, command_line: Sequence[str]) -> int:
    if options.output is not None and not options.dry_run:
        command.require_writable("--output", options.output)
    if options.links:
        return links.measure(options, command_line)
    products = _products(options)
    if options.dry_run:
        target = cuda_target(0) if cuda_available() else _DRY_TARGET
        print(f"candidates on {target}, the built-in choice first; nothing is timed")
        for product in products:
            configs = candidates(product.problem(target), options.candidates)
            print(f"{product.name}, {product.num_tokens} tokens: {product.key}, {len(configs)} candidates")
            for config in configs:
                print(f"  {config}")
        return WRITTEN
    if not cuda_available():
        raise Unsupported(
            f"moebius-tune times kernels on a CUDA GPU, and there is none ({why_no_gpu()}); run it on the machine that "
            "has it, or list the candidates with --dry-run"
        )
    if options.output is None:
        raise InvalidInput("--output must name the table to write, got none; add --output table.json")
    return _measure(products, options, command_line)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "moebius-tune", description=_DESCRIPTION, epilog=_EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    layers = parser.add_argument_group("layers (any number of presets and configs, and one by its sizes)")
    names = sorted(PRESETS)
    known = f"one of {', '.join(names)}"
    layers.add_argument("--preset", action="append", default=[], choices=names, metavar="NAME", help=known)
    layers.add_argument("--config", action="append", default=[], metavar="PATH", help="a Hugging Face config.json")
    for name, meaning in _SIZES:
        layers.add_argument(f"--{name}", type=int, metavar="N", help=meaning)
    layers.add_argument("--activation", choices=ACTIVATIONS, default="silu", help="of the layer given by its sizes")
    data = parser.add_argument_group("data")
    data.add_argument("--dtype", action="append", choices=MATMUL_DTYPES, help="default: bfloat16")
    data.add_argument("--weight-layout", choices=WEIGHT_LAYOUTS, default=HUGGING_FACE.weight_layout)
    data.add_argument("--gate-layout", choices=GATE_LAYOUTS, default=HUGGING_FACE.gate_layout)
    tokens = functools.partial(links.integers, "numbers of tokens of at least 1, as 1,64,4096")
    data.add_argument(
        "--tokens", type=tokens, default=_TOKENS, metavar="N,N,...", help="default: the powers of two up to 16384"
    )
    run = parser.add_argument_group("run")
    run.add_argument("--output", type=pathlib.Path, metavar="PATH", help="the table, or with --links the record")
    run.add_argument("--extend", action="store_true", help="keep what the table has and measure only what it lacks")
    run.add_argument("--candidates", type=int, default=40, metavar="N", help="configurations per product (40)")
    run.add_argument("--seconds", type=float, default=1800.0, metavar="S", help="begin no product after them (1800)")
    workers = min(16, os.cpu_count() or 1)
    run.add_argument("--workers", type=int, default=workers, metavar="N", help="kernels compiled at the same time")
    run.add_argument("--device", type=int, default=0, metavar="INDEX")
    links.add_options(parser)
    run.add_argument("--dry-run", action="store_true", help="list the candidates; needs no GPU and times nothing")
    parser.add_argument("--version", action="version", version=f"%(prog)s {moe_core.__version__}")
    return parser


def _products(options: argparse.Namespace) -> Sequence[Product]:
    given = (options.candidates, 1), (options.workers, 1), (options.seconds, 0)
    for name, (value, least) in zip(("--candidates", "--workers", "--seconds"), given, strict=True):
        if not value >= least:  # NaN too
            raise InvalidInput(f"{name} must be at least {least}, got {value}; pass a larger number")
    storage = Storage(options.weight_layout, options.gate_layout, HUGGING_FACE.router_weight_layout)
    products = [
        product
        for layer in _layers(options)
        for dtype in options.dtype or ["bfloat16"]
        for num_tokens in options.tokens
        for product in products_of(layer, storage, dtype, num_tokens)
    ]
    return distinct_products(products)


def _layers(options: argparse.Namespace) -> list[MoELayerSpec]:
    layers = [PRESETS[name] for name in options.preset]
    for path in options.config:
        architecture = architecture_of(text_model(settings_of(path)))
        layers.extend({architecture.layer_spec(layer): None for layer in architecture.moe_layers})
    sizes = {f"--{name}": getattr(options, name.replace("-", "_")) for name, _ in _SIZES}
    missing = [name for name, size in sizes.items() if size is None]
    if len(missing) < len(sizes):
        if missing:
            raise InvalidInput(f"{', '.join(missing)} must be given with the other sizes of a layer, got none; add it")
        layers.append(MoELayerSpec(*sizes.values(), experts=ExpertsSpec(Activation(options.activation))))
    if not layers:
        raise InvalidInput(
            "a layer must be named, got none; add --preset, --config, or --d-model, --d-ff, --experts and --top-k"
        )
    return layers


def _measure(products: Sequence[Product], options: argparse.Namespace, given: Sequence[str]) -> int:
    target = cuda_target(options.device)
    origin, kept = provenance(options.device, given), ()
    if options.extend and options.output.exists():
        known, kept = read_measurements(options.output)
        origin = joined(known, origin)
    measured = {(measurement.entry.arch, measurement.entry.problem) for measurement in kept}
    wanted = [product for product in products if (target.arch, product.bucket) not in measured]
    print(f"{origin['gpu']} ({target}): {len(wanted)} products to measure, {len(products) - len(wanted)} in the table")
    print(_HEADER)
    limits = Limits(options.candidates, options.seconds)
    results: list[Result] = []

    def write() -> None:
        write_measurements(options.output, origin, [*kept, *(result.measurement for result in results)])

    def report(result: Result) -> None:
        results.append(result)
        print(_row(result), flush=True)
        # An interruption loses nothing.
        write()

    try:
        with Device(options.device) as device:
            _, left = search(wanted, target, GpuBench(device, target, options.workers), limits, report)
    except RuntimeError as error:
        print(f"moebius-tune: a measurement failed: {error}", file=sys.stderr)
        return NOTHING_MEASURED
    write()
    status = WRITTEN
    for product, timing in [(result.product, timing) for result in results for timing in result.refused]:
        if "wrong result" in timing.reason:
            status = WRONG
            print(f"wrong: {product.name}, {product.num_tokens} tokens, {timing.config}: {timing.reason}")
    if left:
        names = ", ".join(f"{product.name} at {product.num_tokens} tokens" for product in left)
        print(f"not measured, {options.seconds:g} seconds are over: {names}; run again with --extend")
    print(f"{options.output}: {len(results)} entries measured now")
    return status


_HEADER = f"{'product':16} {'tokens':>6} {'built in':>9} {'best':>9} {'gain':>6} {'invariant':>9}  winner (us; refused)"


def _row(result: Result) -> str:
    invariant = "slow" if result.invariant is None else f"{result.invariant:.1f}"
    winner = "the built-in choice" if result.best[0] == result.heuristic[0] else str(result.best[0])
    product = result.product
    return (
        f"{product.name:16} {product.num_tokens:6} {result.heuristic[1]:9.1f} {result.best[1]:9.1f} "
        f"{100 * result.gain:5.1f}% {invariant:>9}  {winner} ({len(result.refused)} of {result.tried} refused)"
    )
