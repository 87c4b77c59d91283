"""One rank, where no row travels: until a call returns, and how long it leaves the device idle.

    python -m benchmarks.parallel_host [--tokens 128,4096] [--turns 200] [--output record.json]

`moe` without ranks is measured beside calls across ranks, by turns, and a loop in Python before each: it shows how fast
the core is. Each round stays on the core that is fastest then. Nothing else should run on the machine. Parity comes
first, as in benchmarks.parallel.
"""

from __future__ import annotations

import functools
import gc
import importlib
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks import parallel_ahead
from benchmarks.parallel import _TINY
from benchmarks.parallel_cell import Cell, Setting
from benchmarks.parallel_rank import Bench, _Problem
from benchmarks.parallel_serve import joined
from benchmarks.provenance import provenance
from benchmarks.record import command, write_record
from benchmarks.shapes import ALL_SHAPES
from moe_torch.bridge import private

_ROUNDS, _PROFILED, _IN_A_ROW = 3, 12, 20
#: Cycles of the device before a profiled call, so that its host is ahead.
_AHEAD = 1_000_000
_CATEGORIES = {"kernel", "gpu_memcpy", "gpu_memset"}


def host_us(call: Callable[[], Any], turns: int, wait: Callable[[], None]) -> dict[str, float]:
    """Microseconds until calls return, the device idle before: median, least, and 90 % of them."""
    times = []
    for _ in range(turns):
        wait()
        start = time.perf_counter_ns()
        call()
        times.append((time.perf_counter_ns() - start) / 1e3)
    wait()
    times.sort()
    return {"median": statistics.median(times), "least": times[0], "p90": times[turns * 9 // 10]}


def python_us() -> float:
    """A loop of 100 turns."""
    start = time.perf_counter_ns()
    for _ in range(100):
        (lambda: None)()
    return (time.perf_counter_ns() - start) / 1e3


def stay_on_the_fastest(cores: set[int]) -> None:
    """Let this thread stay on one of some cores, where others do not slow Python down now."""
    times = {}
    for core in cores:
        os.sched_setaffinity(0, {core})
        times[core] = statistics.median(python_us() for _ in range(300))
    os.sched_setaffinity(0, {min(cores, key=lambda core: times[core])})


def row_us(call: Callable[[], Any]) -> float:
    """Microseconds of the device for one of some calls in a row."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    call()
    start.record()
    for _ in range(_IN_A_ROW):
        call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3 / _IN_A_ROW


def idle_us(call: Callable[[], Any]) -> dict[str, float]:
    """Medians over calls whose host is ahead at first: the device idle and busy, and kernels with copies.

    A profiler of torch turns fast calls off, so calls do not see it.
    """
    with mock.patch.object(private, "_profiling", lambda: False), tempfile.TemporaryDirectory() as folder:
        with profile(activities=[ProfilerActivity.CUDA]) as recorded:
            for _ in range(_PROFILED):
                torch.cuda.synchronize()
                torch.cuda._sleep(_AHEAD)
                call()
            torch.cuda.synchronize()
        recorded.export_chrome_trace(path := os.path.join(folder, "trace"))
        with open(path) as file:
            events = json.load(file)["traceEvents"]
    spans = [(event["ts"], event["dur"], event["name"]) for event in events if event.get("cat") in _CATEGORIES]
    return idle_of(sorted(spans))


def idle_of(spans: list[tuple[float, float, str]]) -> dict[str, float]:
    """Medians over calls: what is idle and busy, and how many. spans: start, length and name, each call behind a kernel
    that spins."""
    found: list[tuple[float, float, int]] = []
    end = 0.0
    for start, length, name in spans:
        if "spin" in name:
            found.append((0.0, 0.0, 0))
            end = start
        elif found:
            idle, busy, count = found[-1]
            late = max(start, end)
            found[-1] = idle + late - end, busy + max(0.0, start + length - late), count + 1
        end = max(end, start + length)
    # The first calls behind a profiler's start wait for it.
    medians = map(statistics.median, zip(*found[2:], strict=True))
    return dict(zip(("idle_us", "busy_us", "launches"), medians, strict=True))


def measure(bench: Bench, cell: Cell, turns: int, cores: set[int]) -> list[dict[str, Any]]:
    """A row of `moe` without ranks, and one of the call across ranks. cores: to choose from, empty: none is chosen."""
    bench.take(cell.shape)
    problem = _Problem(bench, cell)
    calls = {"none": problem.alone, cell.mode: problem.together}
    for call in calls.values():
        for _ in range(6):
            output = call().output
        if not problem.agrees(output):
            raise AssertionError(f"parity is red for {cell}")
    rows = [{**cell.named, "mode": mode, "host_us": [], "row_us": [], "python_us": []} for mode in calls]
    wait = torch.cuda.synchronize if bench.is_gpu else lambda: None
    for _ in range(_ROUNDS):
        if cores:
            stay_on_the_fastest(cores)
        for row, call in zip(rows, calls.values(), strict=True):
            row["python_us"].append(statistics.median(python_us() for _ in range(turns)))
            row["host_us"].append(host_us(call, turns, wait))
            if bench.is_gpu:
                row["row_us"].append(row_us(call))
    if bench.is_gpu:
        for row, call in zip(rows, calls.values(), strict=True):
            row |= idle_us(call)
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Run and print."""
    parser = command(__doc__, tokens=[128, 4096], modes=["peer", "all_to_all", "padded"], turns=200)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    options = parser.parse_args(arguments)
    shape = ALL_SHAPES["gptoss120b"] if options.device == "cuda" else _TINY["tiny_biased"]
    tokens, modes = map(int, options.tokens.split(",")), options.modes.split(",")
    cells = [Cell(shape, count, mode, "tokens", False) for count in tokens for mode in modes]
    if options.device == "cuda":
        jobs: dict[str, list[Any]] = {}
        for cell in cells:
            jobs.setdefault(f"{cell.tokens} tokens", []).append(functools.partial(parallel_ahead.measured, cell))
        ahead = multiprocessing.get_context("spawn").Process(target=parallel_ahead.compile_ahead, args=(jobs, 1))
        ahead.start()
        ahead.join()
    record: dict[str, Any] = {"provenance": provenance("benchmarks.parallel_host"), "rows": []}
    setting, cores = Setting(1, options.device, 0, 0.0, 60.0), set[int]()
    if options.device == "cuda":
        cores = os.sched_getaffinity(0)
    # torch does not export all of what it documents.
    store: Any = importlib.import_module("torch.distributed").HashStore()
    with joined(setting, 0, store=store, rank=0, world_size=1) as bench, torch.no_grad():
        # Collections of garbage are no part of a call.
        gc.disable()
        try:
            for cell in cells:
                record["rows"] += measure(bench, cell, options.turns, cores)
                print(*record["rows"][-2:], sep="\n", flush=True)
                write_record(options.output, record)
        finally:
            gc.enable()
            torch.distributed.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
