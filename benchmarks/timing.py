"""Timing on a CUDA device: graph replay with a flushed L2, and device time of both frameworks through CUPTI."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable
from typing import Any

import jax
import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from moe_jax.ffi import callback_count

_FLUSH_BYTES = 512 * 1024 * 1024


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

    def time(self, function: Callable[[], Any], repeats: int = 30) -> float:
        """Median microseconds of one call: graph replay between events, after an L2 flush."""
        graph = self.capture(function)
        times = []
        for _ in range(repeats):
            self._flush.zero_()
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) * 1e3)
        return statistics.median(times)

    def device_time_of_chain(self, function: Callable[[], Any], length: int, repeats: int = 5) -> float:
        """Median microseconds on the device of one of `length` calls that one graph holds."""
        graph = self.capture(lambda: [function() for _ in range(length)])
        return device_time(graph.replay, repeats) / length


def device_time(function: Callable[[], Any], repeats: int) -> float:
    """Median microseconds from the first kernel's start to the last one's end, as CUPTI saw them.

    Kernels of every library in the process are seen, so that torch and JAX are measured alike; the host's share is not.
    """
    spans = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
            function()
            torch.cuda.synchronize()
        ranges = [event.time_range for event in profiler.events() or () if event.device_type == DeviceType.CUDA]
        spans.append(max(span.end for span in ranges) - min(span.start for span in ranges))
    return statistics.median(spans)


def device_time_of_jax_chain(
    function: Callable[..., Any], x: Any, arguments: tuple[Any, ...], length: int, repeats: int = 5
) -> tuple[float, int]:
    """(device microseconds of one of `length` dependent calls in one jitted program, Python callbacks per program).

    `function(x, *arguments)` gives the next x; x is donated, so that every run finds its arrays at the addresses of the
    one before and XLA replays its CUDA graph without Python. The other arrays are arguments because those a program
    closes over are copied into it as constants.
    """

    @functools.partial(jax.jit, donate_argnums=0)
    def chain(value: Any, *others: Any) -> Any:
        for _ in range(length):
            value = function(value, *others)
        return value

    state = [jax.block_until_ready(x.copy())]

    def run() -> None:
        state[0] = jax.block_until_ready(chain(state[0], *arguments))

    for _ in range(4):
        run()
    before = callback_count()
    span = device_time(run, repeats)
    return span / length, (callback_count() - before) // repeats
