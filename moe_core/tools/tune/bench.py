"""Compile the candidates of a product, compare each with the heuristics' result, time them."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from moe_core.base import ArraySpec, Target
from moe_core.ops.matmul.forward import plan_matmul_ogs
from moe_core.ops.routing.reference import layout as make_layout
from moe_core.ops.routing.reference import schedule as make_schedule
from moe_core.parity.tolerance import assert_close, matmul_tolerance
from moe_core.plan import KernelLaunch, LaunchPlan
from moe_core.runtime.compiler import compile_launch
from moe_core.runtime.prepare import prepare
from moe_core.specs import LayoutSpec, TileConfig, named_arrays
from moe_core.tools.tune.device import Device
from moe_core.tools.tune.products import Product

#: Rows compared element by element. All are searched for infinities and NaN.
_COMPARED_ROWS = 4096
_ROUNDS_SECONDS, _LEAST_ROUNDS, _MOST_ROUNDS = 0.4, 7, 31
#: Candidates this many times slower are not timed further.
_TOO_SLOW = 3.0
#: Set in all numbers that are not finite.
_EXPONENT = {"bfloat16": (np.uint16, 0x7F80), "float16": (np.uint16, 0x7C00), "float32": (np.uint32, 0x7F800000)}
_COUNTER_BYTES = 8


@dataclass(frozen=True)
class Timing:
    """Median microseconds of a configuration, or None and the reason."""

    config: TileConfig
    microseconds: float | None
    reason: str = ""


class GpuBench:
    def __init__(self, device: Device, target: Target, workers: int) -> None:
        self._device, self._target, self._workers = device, target, workers

    def measure(self, product: Product, configs: Sequence[TileConfig]) -> list[Timing]:
        """A Timing for each configuration. The first, the heuristics', is the reference (RuntimeError: it fails)."""
        plans = [plan_of(product, config, self._target) for config in configs]
        problems = self._compile(plans)
        if problems[0]:
            raise RuntimeError(f"{configs[0]} of the heuristics does not compile for {product.key}: {problems[0]}")
        mark = self._device.mark()
        try:
            return self._run(_Arrays(self._device, product, plans), list(configs), problems)
        finally:
            self._device.free(mark)

    def _compile(self, plans: Sequence[LaunchPlan]) -> list[str]:
        def attempt(plan: LaunchPlan) -> str:
            try:
                for step in plan.steps:
                    if isinstance(step, KernelLaunch):
                        compile_launch(plan, step, plan.target)
            # A failing compiler may raise anything.
            except Exception as error:
                return f"does not compile: {type(error).__name__}: {error}"
            return ""

        with ThreadPoolExecutor(self._workers, "moebius-tune") as pool:
            return list(pool.map(attempt, plans))

    def _run(self, arrays: _Arrays, configs: list[TileConfig], problems: list[str]) -> list[Timing]:
        runs: dict[int, Callable[[], None]] = {}
        expected, first = None, math.inf
        for number, (config, plan) in enumerate(zip(configs, arrays.plans, strict=True)):
            if problems[number]:
                continue
            try:
                run = arrays.runner(plan, config)
                run()
                result = arrays.result()
                expected = result if expected is None else expected
                problems[number] = arrays.complaint(result, expected)
                if number == 0 and problems[0]:
                    raise RuntimeError(f"{config} of the heuristics fails for {arrays.key}: {problems[0]}")
                single = self._device.time([run], 1)[0]
            except RuntimeError as error:
                if number == 0:
                    raise
                # Raises again an error that the device does not recover from.
                self._device.synchronize()
                problems[number] = f"does not run: {error}"
                continue
            first = single if number == 0 else first
            if not problems[number] and single > _TOO_SLOW * first:
                problems[number] = f"{single / first:.1f} times slower in one run"
            if not problems[number]:
                runs[number] = run
        rounds = int(_ROUNDS_SECONDS * 1e6 / max(1.0, len(runs) * (first + 100)))
        medians = self._device.time(list(runs.values()), min(_MOST_ROUNDS, max(_LEAST_ROUNDS, rounds)))
        measured = dict(zip(runs, medians, strict=True))
        return [Timing(config, measured.get(number), problems[number]) for number, config in enumerate(configs)]


def plan_of(product: Product, config: TileConfig, target: Target) -> LaunchPlan:
    """A product as in a whole forward: with a schedule, without filling absent rows."""
    stage = 0 if product.layout is not None else None
    return plan_matmul_ogs(product.operands, product.layout, product.spec, target, config=config, stage=stage)


def random_ids(layout: LayoutSpec, seed: int) -> np.ndarray:
    """ids int32 `[T, K]`, uniform without repetition."""
    random = np.random.default_rng(seed)
    if layout.top_k == layout.num_experts:
        return np.tile(np.arange(layout.top_k, dtype=np.int32), (layout.num_tokens, 1))
    scores = random.random((layout.num_tokens, layout.num_experts), dtype=np.float32)
    return np.argpartition(scores, layout.top_k, axis=1)[:, : layout.top_k].astype(np.int32)


class _Arrays:
    def __init__(self, device: Device, product: Product, plans: Sequence[LaunchPlan]) -> None:
        self._device, self._product, self.plans, self.key = device, product, plans, product.key
        self._buffers: dict[str, int] = {}
        for seed, (name, spec) in enumerate(named_arrays(product.operands)):
            # Products keep an rms of about 1.
            scale = 1.0 if name in ("x", "row_weight") else self.key.d**-0.5
            self._buffers[name] = device.random(spec, scale, seed)
        self._sizes: np.ndarray | None = None
        if product.layout is not None:
            names = ("group_sizes", "group_start", "slot_of_row", "row_of_slot")
            arrays = make_layout(random_ids(product.layout, 0), layout=product.layout, block_ms=())
            self._buffers |= {name: device.upload(array) for name, array in zip(names, arrays[:4], strict=True)}
            self._sizes = arrays[0]
        self._y: ArraySpec = plans[0].spec("y")
        self._buffers["y"] = device.allocate(self._y.nbytes)
        self._scratch = device.allocate(max(plan.scratch_bytes for plan in plans))
        self._schedule = functools.cache(self._make_schedule)
        self._counters = device.allocate(_COUNTER_BYTES)

    def runner(self, plan: LaunchPlan, config: TileConfig) -> Callable[[], None]:
        buffers = dict(self._buffers)
        if self._product.layout is not None:
            buffers["schedule"] = self._schedule(self._product.layout, config.block_m)
            buffers["tile_counters"] = self._counters
        prepared = prepare(plan, self._device.index)
        pointers = [buffers[buffer.name] for buffer in (*plan.inputs, *plan.outputs)]
        if plan.scratch_bytes:
            pointers.append(self._scratch)
        # NaN shows unwritten elements.
        self._device.fill(buffers["y"], self._y.nbytes, 0xFF)
        if not any(buffer.name == "tile_counters" for buffer in plan.inputs):
            return lambda: prepared(pointers)

        def run() -> None:
            # Timed, since a forward clears the counters too.
            self._device.fill(self._counters, _COUNTER_BYTES, 0)
            prepared(pointers)

        return run

    def result(self) -> np.ndarray:
        return self._device.download(self._buffers["y"], self._y)

    def complaint(self, result: np.ndarray, expected: np.ndarray) -> str:
        bits, mask = _EXPONENT[self._y.dtype]
        if ((result.view(bits) & bits(mask)) == mask).any():
            return "wrong result: an element is not finite, or was not written"
        rows = np.unique(np.linspace(0, len(result) - 1, min(len(result), _COMPARED_ROWS)).astype(np.int64))
        activation, allow_tf32 = self._product.spec.activation, self._product.spec.allow_tf32
        sizes = (self.key.dtype, self._y.dtype, self.key.d)
        tolerance = matmul_tolerance(*sizes, activation=activation, allow_tf32=allow_tf32)
        try:
            assert_close(result[rows], expected[rows], tolerance, label="y")
        except AssertionError as error:
            return f"wrong result: {error}"
        return ""

    def _make_schedule(self, layout: LayoutSpec, block_m: int) -> int:
        assert self._sizes is not None
        return self._device.upload(make_schedule(self._sizes, layout=layout, block_m=block_m))
