"""`moebius-tune --links`: time messages for the cost model."""

from __future__ import annotations

import argparse
import functools
import importlib
import importlib.util
import sys
from collections.abc import Sequence
from typing import Any

from moe_core.base import command
from moe_core.errors import InvalidInput, Unsupported
from moe_core.parallel.machine import VARIABLE, MachineRecord
from moe_core.runtime.cuda import cuda_available
from moe_core.tools.tune.provenance import provenance

#: Senders of messages. The core imports neither by name.
_TORCH, _JAX = "moe_torch.parallel.links", "moe_jax.parallel.links"
_SECONDS = 30.0
WRITTEN, FAILED = 0, command.COULD_NOT_RUN


def add_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("links (alone, or under torchrun for several hosts)")
    group.add_argument("--links", action="store_true", help="time messages between ranks, no products of layers")
    group.add_argument("--backend", choices=("nccl", "gloo"), help="default: nccl where there is a GPU")
    group.add_argument("--ranks", type=int, metavar="N", help="processes to start (the GPUs; with gloo 2)")
    sizes = functools.partial(integers, "bytes of at least 1, as 1024,1048576")
    group.add_argument("--bytes", type=sizes, metavar="N,N,...", help="that a rank sends (powers of 4 from 1 KiB on)")
    group.add_argument("--link-seconds", type=float, default=_SECONDS, metavar="S", help=f"for all ({_SECONDS:g})")
    group.add_argument("--no-jax", action="store_true", help="leave out XLA's ragged all-to-all")


def integers(what: str, text: str) -> tuple[int, ...]:
    """Read an option of comma-separated integers of at least 1. what: names them, with an example."""
    try:
        numbers = tuple(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError:
        numbers = ()
    if not numbers or min(numbers) < 1:
        raise argparse.ArgumentTypeError(f"must be {what}, got {text!r}")
    return numbers


def measure(options: argparse.Namespace, given: Sequence[str]) -> int:
    if options.output is None:
        raise InvalidInput("--output must name the record to write, got none; add --output machine.json")
    if importlib.util.find_spec("torch") is None:
        raise Unsupported("links are measured by torch.distributed, and torch is not installed; pip install torch")
    torch_links = importlib.import_module(_TORCH)
    backend = options.backend or ("nccl" if cuda_available() else "gloo")
    sizes = options.bytes or tuple(torch_links.SIZES[backend])
    setting = torch_links.Setting(backend, options.ranks, sizes, options.link_seconds)
    try:
        measured = torch_links.measure(setting)
    except Unsupported:
        raise
    except RuntimeError as error:
        print(f"moebius-tune: a measurement failed: {error}", file=sys.stderr)
        return FAILED
    if measured is None:
        # Not the first rank of torchrun.
        return WRITTEN
    more, missing = _of_jax(options, sizes)
    packages = ["torch", *(["jax"] if more else [])]
    record = MachineRecord.of(
        [*measured.timings, *more],
        provenance(0 if backend == "nccl" else None, given, packages),
        domain=measured.domain,
        tflops=measured.tflops,
        memory=measured.memory,
        not_measured=[*measured.not_measured, *missing],
    )
    record.save(options.output)
    print(report(record))
    print(f"{options.output}: set {VARIABLE} to this path, or pass it as machine")
    return WRITTEN


def _of_jax(options: argparse.Namespace, sizes: Sequence[int]) -> tuple[Sequence[Any], list[tuple[str, str]]]:
    kind = "ragged_all_to_all"
    if options.no_jax:
        return (), [(kind, "--no-jax")]
    if options.backend == "gloo":
        return (), [(kind, "--backend gloo is of CPUs, where XLA has none")]
    if importlib.util.find_spec("jax") is None:
        return (), [(kind, "jax is not installed")]
    timings, why = importlib.import_module(_JAX).measure(sizes)
    return timings, [(kind, why)] if why else []


def report(record: MachineRecord) -> str:
    lines = [f"{'message':18} {'backend':7} {'where':8} {'ranks':>5} {'bytes':>10} {'us':>9} {'GB/s':>8}"]
    for one in record.timings:
        lines.append(
            f"{one.kind:18} {one.backend:7} {one.where:8} {one.ranks:5} {one.bytes:10} {one.us:9.1f} {one.gb_s:8.2f}"
        )
    machine = record.machine
    for kind, link in (*machine.measured, *([("network", machine.network)] if machine.network else [])):
        lines.append(f"{kind}: {link.latency_us:.1f} us and {link.bandwidth:.2f} GB/s")
    lines += [f"{kind}: not measured, {why}" for kind, why in record.not_measured]
    lines.append(
        f"products: {machine.tflops:.2f} TFLOP/s, memory {machine.memory:.0f} GB/s, {machine.domain} ranks a host"
    )
    return "\n".join(lines)
