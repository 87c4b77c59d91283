"""Timing on a CUDA device: graph replay, L2 flushed before each, median of many."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import torch

_FLUSH_BYTES = 512 * 1024 * 1024
_MICROSECONDS = 1e6


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

    def time_chain(self, function: Callable[[], Any], length: int, repeats: int = 7) -> float:
        """Median microseconds of one of `length` calls that one graph holds, by the host's clock."""
        graph = self.capture(lambda: [function() for _ in range(length)])
        return time_host(lambda: (graph.replay(), torch.cuda.synchronize()), repeats) / length


def time_host(function: Callable[[], Any], repeats: int = 7) -> float:
    """Median microseconds of a call that waits for its own work."""
    times = []
    for _ in range(repeats + 2):
        start = time.perf_counter()
        function()
        times.append((time.perf_counter() - start) * _MICROSECONDS)
    return statistics.median(times[2:])


def time_jax_chain(
    function: Callable[..., Any], x: Any, arguments: tuple[Any, ...], length: int, repeats: int = 7
) -> float:
    """Median microseconds of one of `length` dependent calls in one jitted program whose buffers recur.

    `function(x, *arguments)` gives the next x; x is donated, so that every run finds its arrays at the addresses of the
    one before and XLA replays its CUDA graph. The other arrays are arguments because those a program closes over are
    copied into it as constants.
    """

    @functools.partial(jax.jit, donate_argnums=0)
    def chain(value: Any, *others: Any) -> Any:
        for _ in range(length):
            value = function(value, *others)
        return value

    state = [jax.block_until_ready(x.copy())]

    def run() -> None:
        state[0] = jax.block_until_ready(chain(state[0], *arguments))

    for _ in range(3):
        run()
    return time_host(run, repeats) / length
