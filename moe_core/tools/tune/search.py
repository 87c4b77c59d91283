"""Measure products, choose winners, make a table."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from moe_core.base import Target
from moe_core.ops.matmul.families import families_for, why_illegal
from moe_core.ops.matmul.problem import MatmulProblem
from moe_core.ops.matmul.tile_choice import heuristic_tile
from moe_core.specs import MatmulTuning, TileConfig
from moe_core.specs.tile_table import Measurement, TileEntry
from moe_core.tools.tune.bench import Timing
from moe_core.tools.tune.products import Product

#: Less gain over the heuristics is noise.
LEAST_GAIN = 0.02


class Bench(Protocol):
    """The interface of `bench.GpuBench`, which times configurations."""

    def measure(self, product: Product, configs: Sequence[TileConfig]) -> list[Timing]: ...


@dataclass(frozen=True)
class Result:
    """heuristic, best: (configuration, us). invariant: us under `batch_invariant`. refused: those without a time."""

    product: Product
    arch: int
    heuristic: tuple[TileConfig, float]
    best: tuple[TileConfig, float]
    invariant: float | None
    tried: int
    refused: tuple[Timing, ...]

    @property
    def gain(self) -> float:
        return 1 - self.best[1] / self.heuristic[1]

    @property
    def measurement(self) -> Measurement:
        entry = TileEntry(self.arch, self.product.bucket, self.best[0])
        return Measurement(entry, self.best[1], self.heuristic[1])


@dataclass(frozen=True)
class Limits:
    """candidates: per product. seconds: no product begins later."""

    candidates: int
    seconds: float


def candidates(problem: MatmulProblem, limit: int) -> tuple[TileConfig, ...]:
    """At most `limit` legal ones: the heuristics' first, then from each family in turn."""
    able = [family for family in families_for(problem) if family.why_not(problem) is None]
    legal = [
        dict.fromkeys(config for config in family.candidates(problem) if why_illegal(config, problem) is None)
        for family in able
    ]
    turns = itertools.chain.from_iterable(itertools.zip_longest(*legal))
    configs = dict.fromkeys((heuristic_tile(problem).config, *turns))
    return tuple(config for config in configs if config is not None)[:limit]


def search(
    products: Sequence[Product],
    target: Target,
    bench: Bench,
    limits: Limits,
    progress: Callable[[Result], None] = lambda result: None,
    clock: Callable[[], float] = time.monotonic,
) -> tuple[list[Result], list[Product]]:
    start, results = clock(), []
    for number, product in enumerate(products):
        if clock() - start >= limits.seconds:
            return results, list(products[number:])
        result = measure_product(product, target, bench, limits.candidates)
        progress(result)
        results.append(result)
    return results, []


def measure_product(product: Product, target: Target, bench: Bench, limit: int) -> Result:
    """Time a product's candidates and its `batch_invariant` configuration, and choose."""
    problem = product.problem(target)
    pinned = dataclasses.replace(problem.spec, tuning=MatmulTuning(batch_invariant=True))
    configs = candidates(problem, limit)
    invariant = heuristic_tile(dataclasses.replace(problem, spec=pinned)).config
    timings = bench.measure(product, tuple(dict.fromkeys((*configs, invariant))))
    times = {timing.config: timing.microseconds for timing in timings if timing.microseconds is not None}
    baseline = times[configs[0]]
    # Being legal, it competes too.
    config, microseconds = min(times.items(), key=lambda item: item[1])
    if microseconds > baseline * (1 - LEAST_GAIN):
        config, microseconds = configs[0], baseline
    refused = tuple(timing for timing in timings if timing.microseconds is None)
    heuristic, best = (configs[0], baseline), (config, microseconds)
    return Result(product, target.arch, heuristic, best, times.get(invariant), len(timings), refused)
