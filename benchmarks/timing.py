"""Timing on a CUDA device: graph replay with a flushed L2, and device time of both frameworks through CUPTI."""

from __future__ import annotations

import functools
import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks.sustained import Meter, sustained
from moe_jax.bridge.ffi import callback_count

_FLUSH_BYTES = 512 * 1024 * 1024
_STREAMED_BYTES = 2 * 1024 * 1024 * 1024
#: A median needs this many repeats, however long they take.
_FEWEST_REPEATS = 5


class KernelSpan(NamedTuple):
    """One kernel as CUPTI saw it, in microseconds."""

    name: str
    start: float
    end: float


class ChainTime(NamedTuple):
    """Device microseconds of one call of a chain, and calls into Python per chain."""

    us: float
    callbacks: int


class GraphTimer:
    """Captures functions into CUDA graphs and times their replays."""

    def __init__(self) -> None:
        self._flush = torch.empty(_FLUSH_BYTES, dtype=torch.uint8, device="cuda")
        self._stream = torch.cuda.Stream()

    def capture(self, function: Callable[[], Any]) -> torch.cuda.CUDAGraph:
        """Warm up, then capture one call."""
        with torch.cuda.stream(self._stream):
            for _ in range(2):
                function()
        self._stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self._stream):
            function()
        return graph

    def time(
        self, function: Callable[[], Any], repeats: int = 30, seconds: float = 1.0, *, written: bool = True
    ) -> float:
        """Median microseconds of one call: graph replay between events, after an L2 flush.

        After `seconds` no repeat starts, once there are enough for a median. written: the flush leaves the cache full
        of lines that were written, which go to memory while the call reads; if not, it reads them once more.
        """
        graph, times = self.capture(function), []
        stop = time.monotonic() + seconds
        while len(times) < repeats and (len(times) < _FEWEST_REPEATS or time.monotonic() < stop):
            times.append(self._replay(graph, written))
        return statistics.median(times)

    def rounds(
        self, functions: Mapping[str, Callable[[], Any]], repeats: int = 30, seconds: float = 1.0
    ) -> dict[str, list[float]]:
        """Microseconds of one call of each, as `time` has them, replayed by turns: the chip's clock, which falls while
        it is busy, is the same for all. Every other round runs backwards, so that none always follows the same one.
        seconds: as for `time`, of all together."""
        graphs = {name: self.capture(function) for name, function in functions.items()}
        times: dict[str, list[float]] = {name: [] for name in graphs}
        order, done, stop = list(graphs), 0, time.monotonic() + seconds
        while done < repeats and (done < _FEWEST_REPEATS or time.monotonic() < stop):
            for name in order:
                times[name].append(self._replay(graphs[name]))
            order, done = order[::-1], done + 1
        return times

    def sustained(self, functions: Mapping[str, Callable[[], Any]]) -> dict[str, dict[str, float]]:
        """Time and energy of replays without a pause, by turns; see `sustained.sustained`."""
        graphs = {name: self.capture(function).replay for name, function in functions.items()}
        return sustained(graphs, Meter().joules)

    def _replay(self, graph: torch.cuda.CUDAGraph, written: bool = True) -> float:
        """Microseconds of one replay after an L2 flush."""
        self._flush.zero_()
        if not written:
            self._flush.view(torch.float32).sum()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e3

    def device_time_of_chain(self, function: Callable[[], Any], length: int, repeats: int = 5) -> float:
        """Median microseconds on the device of one of `length` calls that one graph holds."""
        graph = self.capture(lambda: [function() for _ in range(length)])
        return device_time(graph.replay, repeats) / length

    def device_time_of_jax_chain(
        self,
        function: Callable[..., Any],
        x: Any,
        arguments: tuple[Any, ...],
        length: int,
        seconds: float = 1.0,
        check: Callable[[Any], None] | None = None,
    ) -> ChainTime:
        """One of `length` dependent calls in one jitted program; median of 5 programs, of fewer after `seconds`.

        `function(x, *arguments)` gives the next x, an array or a tree of them. x is donated, so that every run finds
        its arrays at the addresses of the one before and XLA replays its CUDA graph without Python. The other arrays
        are arguments because those a program closes over are copied into it as constants. check gets the result of the
        first program and may raise: nothing is timed then, and nothing is compiled twice.
        """

        @functools.partial(jax.jit, donate_argnums=0)
        def chain(value: Any, *others: Any) -> Any:
            for _ in range(length):
                value = function(value, *others)
            return value

        state = [jax.block_until_ready(jax.tree.map(lambda array: array.copy(), x))]

        runs = 0

        def run() -> None:
            nonlocal runs
            runs += 1
            state[0] = jax.block_until_ready(chain(state[0], *arguments))

        run()
        if check is not None:
            check(state[0])
        start = time.monotonic()
        run()
        affordable = int(seconds / (time.monotonic() - start))
        for _ in range(min(2, affordable)):
            run()
        repeats = max(1, min(5, affordable))
        before, runs = callback_count(), 0
        span = device_time(run, repeats)
        return ChainTime(span / length, (callback_count() - before) // runs)

    def kernels(self, function: Callable[[], Any], repeats: int = 5) -> list[list[KernelSpan]]:
        """The kernels of each of some replays of one call, in the order they started, after an L2 flush."""
        graph = self.capture(function)
        return [kernel_spans(graph.replay, self._flush.zero_) for _ in range(repeats)]

    def streaming_bytes_per_us(self) -> float:
        """What a plain sum over 2 GiB reaches: the memory bandwidth of this device in this hour."""
        values = torch.randn(_STREAMED_BYTES // 4, device="cuda")
        return _STREAMED_BYTES / self.time(lambda: values.sum())


class EagerTimer:
    """Times calls as the host makes them: until the device is done, by the host's clock."""

    def rounds(
        self, functions: Mapping[str, Callable[[], Any]], repeats: int = 30, seconds: float = 1.0
    ) -> dict[str, list[float]]:
        """Microseconds of one call of each by turns, in the order of `GraphTimer.rounds`; called once ahead."""
        for function in functions.values():
            function()
        times: dict[str, list[float]] = {name: [] for name in functions}
        order, done, stop = list(functions), 0, time.monotonic() + seconds
        while done < repeats and (done < _FEWEST_REPEATS or time.monotonic() < stop):
            for name in order:
                _wait()
                start = time.perf_counter()
                functions[name]()
                _wait()
                times[name].append((time.perf_counter() - start) * 1e6)
            order, done = order[::-1], done + 1
        return times


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def medians(rounds: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """The median of each of `GraphTimer.rounds`."""
    return {name: statistics.median(times) for name, times in rounds.items()}


def paired_ratio(rounds: Mapping[str, Sequence[float]], name: str, over: str) -> float:
    """The median over rounds of one's time over another's of the same round."""
    return statistics.median(one / other for one, other in zip(rounds[name], rounds[over], strict=True))


def paired_spread(rounds: Mapping[str, Sequence[float]], name: str, over: str) -> float:
    """Half of what lies between the quartiles of these ratios, over their median."""
    ratios = [one / other for one, other in zip(rounds[name], rounds[over], strict=True)]
    if len(ratios) < 2:
        return 0.0
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return (high - low) / 2 / middle


def free_memory() -> None:
    """Give back memory that only garbage holds: what comes next may need all of it."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def peak_bytes(call: Callable[[], Any]) -> tuple[Any, int]:
    """What a call gives, and what torch holds on the GPU at most beyond what it held before."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    return call(), torch.cuda.max_memory_allocated() - before


def kernel_spans(function: Callable[[], Any], before: Callable[[], Any] | None = None) -> list[KernelSpan]:
    """What CUPTI saw on the device while the function ran, by start; `before` runs unseen.

    Kernels of every library in the process are seen, so that torch and JAX are measured alike; the host's share is not.
    """
    if before is not None:
        before()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
        function()
        torch.cuda.synchronize()
    events = [event for event in profiler.events() or () if event.device_type == DeviceType.CUDA]
    spans = [KernelSpan(event.name, event.time_range.start, event.time_range.end) for event in events]
    return sorted(spans, key=lambda span: span.start)


def device_time(function: Callable[[], Any], repeats: int) -> float:
    """Median microseconds of a call from the first kernel's start to the last one's end."""

    def one_after_another() -> None:
        for _ in range(repeats):
            function()
            torch.cuda.synchronize()

    # Starting and stopping CUPTI takes longer than the calls, so all of them are seen at once where they can be told
    # apart.
    spans = equal_parts(kernel_spans(one_after_another), repeats)
    spans = spans or [kernel_spans(function) for _ in range(repeats)]
    return statistics.median(max(span.end for span in found) - found[0].start for found in spans)


def equal_parts(spans: list[KernelSpan], parts: int) -> list[list[KernelSpan]] | None:
    """Kernels of equal calls, by start, taken apart call by call; None unless each part has the same kernels."""
    size = len(spans) // parts
    found = [spans[size * part : size * (part + 1)] for part in range(parts)]
    names = [sorted(span.name for span in part) for part in found]
    if size * parts != len(spans) or not size or any(other != names[0] for other in names):
        return None
    return found
