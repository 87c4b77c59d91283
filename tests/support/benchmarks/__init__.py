"""What tests of the benchmarks share: tiny settings and timers that only call."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax

from benchmarks.shapes import Shape
from benchmarks.timing import ChainTime, KernelSpan
from moe_core.specs.matmul import Activation

TINY = {
    "qwen3": Shape("qwen3", 16, 24, 4, 2, Activation("silu"), False),
    "gptoss20b": Shape("gptoss20b", 16, 24, 4, 2, Activation("swiglu_oai", gate_layout="interleaved"), True, "in_out"),
}


class CallingTimer:
    """Calls what it is to time once; every figure is `us`."""

    us = 100.0

    def __init__(self) -> None:
        self.calls = 0

    def time(self, function: Callable[[], Any], repeats: int = 30, seconds: float = 1.0, written: bool = True) -> float:
        self.calls += 1
        function()
        return self.us

    def rounds(self, functions: Mapping[str, Callable[[], Any]], seconds: float = 1.0) -> dict[str, list[float]]:
        return {name: [self.time(function)] for name, function in functions.items()}

    def device_time_of_chain(self, function: Callable[[], Any], length: int, repeats: int = 5) -> float:
        return self.time(function)

    def device_time_of_jax_chain(
        self,
        function: Callable[..., Any],
        x: Any,
        arguments: tuple[Any, ...],
        length: int,
        seconds: float = 1.0,
        check: Callable[[Any], None] | None = None,
    ) -> ChainTime:
        found = jax.block_until_ready(function(x, *arguments))
        if check is not None:
            check(found)
        return ChainTime(self.time(lambda: found), 0)

    def kernels(self, function: Callable[[], Any], repeats: int = 5) -> list[list[KernelSpan]]:
        self.time(function)
        return [[KernelSpan("route", 0, 2), KernelSpan("product", 3, 7), KernelSpan("product", 7, 10)]]

    def streaming_bytes_per_us(self) -> float:
        return 4.4e6


class RisingTimer(CallingTimer):
    """Of several functions each takes 1 us more than the one before; the first takes 1 us."""

    us = 1.0

    def rounds(self, functions: Mapping[str, Callable[[], Any]], seconds: float = 1.0) -> dict[str, list[float]]:
        return {name: [self.time(function) + number] for number, (name, function) in enumerate(functions.items())}
