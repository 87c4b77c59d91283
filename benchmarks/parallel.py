"""Expert parallelism on the GPUs of one host: every mode beside one GPU, beside plain all-to-all, and its memory.

    python -m benchmarks.parallel --output record.json                       # starts a process for each GPU

Parity comes first: a cell whose output is not that of one device, bit by bit, is not timed; with rows in fp8 it has to
be close. A cell that fails has its error in the record, and new ranks go on after one that fails or hangs.
benchmarks/README.md describes the record.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import json
import multiprocessing
import multiprocessing.connection
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks import parallel_ahead
from benchmarks.draws import SEED
from benchmarks.options import chosen_names, numbers_of_tokens
from benchmarks.parallel_cell import EXCHANGES, Cell, Setting, fitting, predicted
from benchmarks.parallel_serve import serve
from benchmarks.provenance import provenance
from benchmarks.record import table
from benchmarks.shapes import ALL_SHAPES, Shape
from moe_core.parallel.machine import H200
from moe_core.specs.matmul import Activation

# torch does not export all of what it documents.
_nccl: Any = importlib.import_module("torch.cuda.nccl")

SCHEMA = 1
MODES = tuple(EXCHANGES)
#: Tokens of a rank up to which all_gather is measured: every rank takes those of all.
_FEW_TOKENS = 1024
_SHAPES = {name: ALL_SHAPES[name] for name in ("gptoss120b", "qwen3", "mixtral", "dsv3", "glm45air")}
#: What stands for them on a CPU.
_TINY = {
    "tiny": Shape("tiny", 32, 16, 8, 2, Activation("silu"), False),
    "tiny_biased": Shape("tiny_biased", 32, 16, 4, 2, Activation("swiglu_oai", gate_layout="interleaved"), True),
}
#: Until all ranks have started.
_START_SECONDS = 120.0
#: What a GPU is taken to have where ranks have none.
_MEMORY = 80e9
COLUMNS = {
    "shape": "shape", "tokens": "tokens", "mode": "mode", "rows": "rows", "what": "what", "us": "us",
    "alone_us": "one GPU", "scaling": "scaling", "graph_us": "graph", "alone_graph_us": "one GPU, graph",
    "graph_scaling": "scaling, graph", "experts_us": "experts", "exchange_us": "exchange", "gb_s": "GB/s",
    "plain_us": "plain all-to-all", "plain_gb_s": "its GB/s", "imbalance": "imbalance",
    "predicted_us": "predicted", "error": "error",
}  # fmt: skip


@dataclass(frozen=True)
class Options:
    """What to run. seconds: no cell starts later. kernels: what becomes of them before ranks start."""

    cells: tuple[Cell, ...]
    setting: Setting
    seconds: float
    output: Path | None
    kernels: str = "compile"


def parse(arguments: Sequence[str] | None) -> Options:
    """Options from the command line; exits with a message that names the fix where they make no sense."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", help=f"of {', '.join(_SHAPES)}; on a CPU of {', '.join(_TINY)} (default: all)")
    parser.add_argument("--tokens", help="of a rank (default: 128,4096,16384; on a CPU 4,16)")
    parser.add_argument("--modes", default=",".join(MODES), help="(default: %(default)s)")
    parser.add_argument("--rows", default="tokens", help="what travels: tokens, slots (default: %(default)s)")
    parser.add_argument("--training", action="store_true", help="training steps instead of forwards")
    parser.add_argument("--shared", action="store_true", help="with a shared expert, as large as another one")
    parser.add_argument("--ranks", type=int, help="(default: the GPUs, at most 4; on a CPU 2)")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="cpu: tiny layers, over gloo")
    parser.add_argument("--seconds", type=float, default=150.0, help="no cell starts later (default: %(default)s)")
    parser.add_argument("--cell-seconds", type=float, default=0.2, help="of each median (default: %(default)s)")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds until a cell hangs (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--output", type=Path, help="write the record here, after every cell")
    ways = ("compile", "only", "ready")
    parser.add_argument(
        "--kernels", default=ways[0], choices=ways, help="only: compile, measure nothing; ready: they are"
    )
    found = parser.parse_args(arguments)
    on_cpu = found.device == "cpu"
    known, gpus = (_TINY, 0) if on_cpu else (_SHAPES, torch.cuda.device_count())
    ranks = found.ranks or (2 if on_cpu else min(gpus, 4))
    if ranks < 2 or (not on_cpu and ranks > gpus):
        parser.error(f"--ranks must be 2 or more, and as many GPUs, got {ranks} of {gpus}; or give --device cpu")
    names = chosen_names(parser, "--shapes", found.shapes or ",".join(known), list(known))
    tokens = numbers_of_tokens(parser, found.tokens or ("4,16" if on_cpu else "128,4096,16384"))
    modes = chosen_names(parser, "--modes", found.modes, MODES)
    rows = chosen_names(parser, "--rows", found.rows, ("tokens", "slots"))
    memory = _MEMORY if on_cpu else torch.cuda.get_device_properties(0).total_memory
    cells = [
        Cell(fitting(known[name], memory, found.training), count, mode, row, found.training, found.shared)
        for name in names
        for count in tokens
        for mode in modes
        for row in rows
        if mode != "all_gather" or (row == "tokens" and count <= _FEW_TOKENS)
        if not (found.training and {"chunks", "format"} & set(EXCHANGES[mode]))
    ]
    if not cells:
        parser.error(f"there is nothing to run; all_gather has rows of tokens, up to {_FEW_TOKENS} of them")
    setting = Setting(ranks, found.device, found.seed, found.cell_seconds, found.limit)
    return Options(tuple(cells), setting, found.seconds, found.output, found.kernels)


def merged(cell: Cell, ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One row of what every rank found.

    Times are medians over repeats of the slowest rank's. scaling: one GPU's time over that of all ranks, each with as
    many tokens. exchange_us: what a forward takes beside the experts' products; gb_s: rows of the busiest rank over it.
    """
    row: dict[str, Any] = dict(cell.named)
    for name in ranks[0]:
        if all(name in rank for rank in ranks):
            found = [rank[name] for rank in ranks]
            timed = name.endswith("_us") or name == "us"
            row[name] = statistics.median(map(max, zip(*found, strict=True))) if timed else max(found)
    slots = [rank["received_slots"] for rank in ranks]
    row["imbalance"] = max(slots) * len(slots) / sum(slots)
    row["scaling"] = row["alone_us"] / row["us"]
    row["plain_gb_s"] = row["plain_bytes"] / row["plain_us"] / 1e3
    if "graph_us" in row:
        row["graph_scaling"] = row["alone_graph_us"] / row["graph_us"]
    if cell.training:
        row["link_bytes"] *= 2
    beside = min(row["us"], row.get("graph_us", row["us"])) - row["experts_us"]
    if beside > 0:
        row["exchange_us"], row["gb_s"] = beside, row["link_bytes"] / beside / 1e3
    return row


class Group:
    """Processes that are the ranks, until one of them fails or hangs."""

    def __init__(self, setting: Setting, target: Callable[..., None] = serve) -> None:
        self._folder = tempfile.TemporaryDirectory()
        # A GPU's driver survives no fork.
        context: Any = multiprocessing.get_context("forkserver" if setting.device == "cpu" else "spawn")
        if setting.device == "cpu":
            context.set_forkserver_preload([target.__module__])
        store = str(Path(self._folder.name) / "store")
        self._pipes, self._processes = [], []
        for rank in range(setting.ranks):
            here, there = context.Pipe()
            process = context.Process(target=target, args=(setting, rank, store, there), daemon=True)
            process.start()
            there.close()
            self._pipes.append(here)
            self._processes.append(process)
        self.error = self._answers(_START_SECONDS)[1]

    def measure(self, cell: Cell, limit: float) -> dict[str, Any]:
        """The row of a cell, with an error where a rank failed or did not answer in `limit` seconds."""
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.send(cell)
        found, self.error = self._answers(limit)
        return cell.named | {"error": self.error} if self.error else merged(cell, found)

    def _answers(self, limit: float) -> tuple[list[dict[str, Any]], str | None]:
        """What every rank answered, or what the first one that failed said: its peers may wait for it."""
        end, found = time.monotonic() + limit, {}
        waited = dict(zip(self._pipes, range(len(self._pipes)), strict=True))
        while waited:
            ready: Any = multiprocessing.connection.wait(list(waited), max(0.0, end - time.monotonic()))
            for pipe in ready:
                rank = waited.pop(pipe)
                try:
                    found[rank] = pipe.recv()
                except (EOFError, OSError):
                    return [], f"the process of rank {rank} ended"
                if "error" in found[rank]:
                    return [], f"rank {rank}: {found[rank]['error']}"
            if not ready:
                return [], f"rank {min(waited.values())} did not answer in {limit:g} s"
        return [found[rank] for rank in sorted(found)], None

    def close(self) -> None:
        """End the processes, whatever they do."""
        for process in self._processes:
            process.kill()
            process.join(10)
        for pipe in self._pipes:
            pipe.close()
        self._folder.cleanup()


def rows_of_processes(options: Options, deadline: float, target: Callable[..., None] = serve) -> Iterator[Any]:
    """Rows, measured in processes that are started here, and started again after an error."""
    group = None
    try:
        for cell in options.cells:
            if time.monotonic() > deadline:
                yield cell.named | {"error": "not run: the time was spent"}
                continue
            if group is None:
                group = Group(options.setting, target)
            if group.error:
                yield cell.named | {"error": f"no ranks: {group.error}"}
            else:
                yield group.measure(cell, options.setting.limit)
            if group.error:
                group.close()
                group = None
    finally:
        if group is not None:
            group.close()


def run(options: Options, rows: Iterator[Any]) -> dict[str, Any]:
    """The record, written after every cell where an output is named."""
    record: dict[str, Any] = {
        "schema": SCHEMA,
        "provenance": provenance("benchmarks.parallel"),
        "seed": options.setting.seed,
    }
    on_gpus = options.setting.device == "cuda"
    record |= {"ranks": options.setting.ranks, "backend": "nccl" if on_gpus else "gloo", "rows": []}
    if on_gpus:
        record["provenance"]["versions"]["nccl"] = ".".join(map(str, _nccl.version()))
    start = time.monotonic()
    for row in rows:
        row["seconds"] = time.monotonic() - start - sum(other["seconds"] for other in record["rows"])
        if on_gpus and "error" not in row:
            row["predicted_us"] = predicted(row, options.setting.ranks, H200)
        record["rows"].append(row)
        figure = row.get("error") or f"{row['us']:.0f} us, one GPU {row['alone_us']:.0f}"
        cell = " ".join(str(row[name]) for name in ("shape", "tokens", "mode", "rows", "what"))
        print(f"{time.monotonic() - start:5.0f} s  {cell}: {figure}", file=sys.stderr, flush=True)
        if options.output is not None:
            options.output.parent.mkdir(parents=True, exist_ok=True)
            options.output.write_text(json.dumps(record, indent=1) + "\n")
    return record


def main(arguments: Sequence[str] | None = None) -> int:
    """Run and print; 1 where a cell has an error."""
    options = parse(arguments)
    if options.setting.device == "cuda" and options.kernels != "ready":
        jobs: dict[str, list[Callable[[], None]]] = {}
        for cell in options.cells:
            jobs.setdefault(cell.shape.name, []).append(functools.partial(parallel_ahead.measured, cell))
        # This process has looked at its GPUs.
        context = multiprocessing.get_context("spawn")
        ahead = context.Process(target=parallel_ahead.compile_ahead, args=(jobs, options.setting.ranks))
        ahead.start()
        ahead.join()
        if options.kernels == "only":
            return int(bool(ahead.exitcode))
    record = run(options, rows_of_processes(options, time.monotonic() + options.seconds))
    print(table(record["rows"], COLUMNS))
    return int(any("error" in row for row in record["rows"]))


if __name__ == "__main__":
    sys.exit(main())
