"""What tests of the benchmarks share: tiny settings and timers that only call."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import pytest
import torch

import moe_jax
import moe_torch
from benchmarks import check, forward, options, peers, plain, quantized, sustained, torch_host_time, training
from benchmarks.problem import Problem, draw_problem
from benchmarks.shapes import Shape
from benchmarks.timing import ChainTime, KernelSpan
from benchmarks.weights import draw_weights
from moe_core.specs.matmul import Activation

TINY = {
    "qwen3": Shape("qwen3", 16, 24, 4, 2, Activation("silu"), False),
    "gptoss20b": Shape("gptoss20b", 16, 24, 4, 2, Activation("swiglu_oai", gate_layout="interleaved"), True, "in_out"),
}


#: Packages that the tests take as not installed, so that the machine does not change what runs.
_EXTERNAL = ("triton_kernels", "tokamax", "sonicmoe", "flashinfer", "deep_gemm", "transformers")


@contextlib.contextmanager
def on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Tiny shapes on the reference engine, no peers from other packages, no compiler."""
    for module in (options, check, training):
        monkeypatch.setattr(module, "ALL_SHAPES", TINY)
    monkeypatch.setattr(options, "SHAPES", TINY)
    monkeypatch.setattr(training, "_SHAPES", tuple(TINY))
    # A collection takes long in a process with both frameworks, and JAX's programs serve all tests.
    monkeypatch.setattr(sustained, "LEAST_TOKENS", 4)
    for module in (check, forward, quantized, training):
        monkeypatch.setattr(module, "free_memory", lambda: None)
    monkeypatch.setattr(jax, "clear_caches", lambda: None)
    # JAX refuses an address on the CPU that is not aligned to 64 bytes.
    monkeypatch.setattr(moe_jax, "from_dlpack", lambda array: jax.dlpack.from_dlpack(array, copy=True))
    traced = functools.cache(lambda: torch.compile(plain.torch_forward, fullgraph=True, backend="eager"))
    monkeypatch.setattr(plain, "compiled", traced)
    real = peers.importlib.util.find_spec
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: None if name in _EXTERNAL else real(name))
    with moe_torch.cpu_engine("reference"), moe_jax.cpu_engine("reference"), jax.default_device(jax.devices("cpu")[0]):
        yield


class CallingTimer:
    """Calls what it is to time once; every figure is `us`."""

    us = 100.0

    def __init__(self) -> None:
        self.calls = 0

    def time(self, function: Callable[[], Any], repeats: int = 30, seconds: float = 1.0, written: bool = True) -> float:
        self.calls += 1
        function()
        return self.us

    def rounds(
        self, functions: Mapping[str, Callable[[], Any]], repeats: int = 30, seconds: float = 1.0
    ) -> dict[str, list[float]]:
        return {name: [self.time(function)] for name, function in functions.items()}

    def sustained(self, functions: Mapping[str, Callable[[], Any]]) -> dict[str, dict[str, float]]:
        return {name: {"us": self.time(function), "joules": 1.0} for name, function in functions.items()}

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


class TracingTimer(CallingTimer):
    """Traces what JAX is to time: running its ragged product costs seconds on a CPU."""

    def device_time_of_jax_chain(
        self,
        function: Callable[..., Any],
        x: Any,
        arguments: tuple[Any, ...],
        length: int,
        seconds: float = 1.0,
        check: Callable[[Any], None] | None = None,
    ) -> ChainTime:
        if check is not None:
            check(jax.jit(function)(x, *arguments))
        result = jax.eval_shape(function, x, *arguments)
        shapes = [jax.tree.map(lambda one: (one.shape, one.dtype), tree) for tree in (result, x)]
        assert shapes[0] == shapes[1]
        return ChainTime(self.time(lambda: None), 0)


def problem_of(shape: Shape, tokens: int = 12) -> Problem:
    """A forward of a shape with balanced routing on the CPU."""
    return draw_problem(shape, "balanced", tokens, draw_weights(shape, torch.Generator("cpu").manual_seed(0)))


def tiny_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give the models of benchmarks.models tiny sizes."""
    from benchmarks.models import blocks, training

    model, sizes = blocks.MODELS["qwen3-30b-a3b"], {"hidden_size": 32, "num_experts": 8, "num_experts_per_tok": 2}
    sizes["moe_intermediate_size"] = 16
    monkeypatch.setitem(blocks.MODELS, model.name, dataclasses.replace(model, sizes={**model.sizes, **sizes}))
    attention = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    rest = {"intermediate_size": 32, "vocab_size": 64, "norm_topk_prob": True}
    monkeypatch.setattr(training, "SIZES", sizes | attention | rest)


def tiny_host_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give benchmarks.torch_host_time a tiny layer and few calls."""
    small = {"TOKENS": 4, "D_MODEL": 16, "D_FF": 8, "NUM_EXPERTS": 4, "TOP_K": 2, "WARM_UP": 1, "CALLS": 2}
    for name, value in small.items():
        monkeypatch.setattr(torch_host_time, name, value)
