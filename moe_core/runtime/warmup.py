"""Compiles every kernel of plans before the first call, and reports the cost."""

from __future__ import annotations

import os
import pathlib
import time
from collections.abc import Hashable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from moe_core.base import require_at_least
from moe_core.errors import InvalidInput
from moe_core.plan import Constant, KernelLaunch, LaunchPlan
from moe_core.runtime.compiler import compile_launch, launch_signature, load_kernel
from moe_core.runtime.prepare import prepare

_WORKERS = min(8, os.cpu_count() or 1)


@dataclass(frozen=True)
class KernelReport:
    """One kernel: name, tile, seconds in the compiler and waiting for a processor, and True if it was cached."""

    kernel: str
    tile: str
    seconds: float
    cached: bool


@dataclass(frozen=True)
class WarmupReport:
    """A warm-up: kernels in the plans' order (none off the GPU), seconds with loading, and the number of plans."""

    kernels: tuple[KernelReport, ...]
    seconds: float
    plans: int

    @property
    def compiled(self) -> tuple[KernelReport, ...]:
        """Kernels that were not cached."""
        return tuple(kernel for kernel in self.kernels if not kernel.cached)

    def __str__(self) -> str:
        new = self.compiled
        head = (
            f"{self.plans} plans ready after {self.seconds:.2f} s: {len(self.kernels)} kernels, {len(new)} compiled "
            f"({sum(kernel.seconds for kernel in new):.2f} s of work), {len(self.kernels) - len(new)} existed"
        )
        lines = [
            f"  {kernel.seconds:7.3f} s  {'existed ' if kernel.cached else 'compiled'}  {kernel.kernel}  {kernel.tile}"
            for kernel in self.kernels
        ]
        return "\n".join([head, *lines])


def kernel_identity(plan: LaunchPlan, launch: KernelLaunch) -> Hashable:
    """Equal for launches of one compiled kernel."""
    constants = tuple((name, value) for name, value in launch.arguments if isinstance(value, Constant))
    return launch_signature(plan, launch), launch.kernel, constants, launch.num_warps, launch.num_stages


def distinct_kernels(plans: Iterable[LaunchPlan]) -> list[tuple[LaunchPlan, KernelLaunch]]:
    launches: dict[Hashable, tuple[LaunchPlan, KernelLaunch]] = {}
    for plan in plans:
        for launch in plan.steps:
            if isinstance(launch, KernelLaunch):
                launches.setdefault((plan.target.architecture, kernel_identity(plan, launch)), (plan, launch))
    return list(launches.values())


def compile_kernels(
    kernels: Sequence[tuple[LaunchPlan, KernelLaunch]], workers: int = _WORKERS
) -> tuple[KernelReport, ...]:
    """Compile launches of cuda plans, `workers` at a time, and return a report for each, in order."""
    require_at_least("workers", workers, 1)
    if not kernels:
        return ()
    # Modules that import each other cannot be imported first by several threads.
    for name in dict.fromkeys(launch.kernel.name for _, launch in kernels):
        load_kernel(name)
    with ThreadPoolExecutor(min(workers, len(kernels)), "moebius-compile") as pool:
        return tuple(pool.map(lambda kernel: _compile(*kernel), kernels))


def warmup(
    plans: Iterable[LaunchPlan], device_indices: Sequence[int] = (0,), *, workers: int = _WORKERS
) -> WarmupReport:
    """Compile every kernel of the plans and load them on the devices. Running a plan afterwards compiles nothing.

    Args:
        plans: of one target. Plans for a CPU are made ready without compiling.
        device_indices: CUDA devices. Empty: compile only, which needs no GPU.

        Raises InvalidInput for plans of several targets, and the errors of `runtime.prepare`.
    """
    start = time.perf_counter()
    plans = tuple(dict.fromkeys(plans))
    targets = {plan.target for plan in plans}
    if len(targets) > 1:
        listed = ", ".join(sorted(map(str, targets)))
        raise InvalidInput(f"plans must be for one target, got {listed}; warm up for each target apart")
    on_gpu = any(target.on_gpu for target in targets)
    reports = compile_kernels(distinct_kernels(plans), workers) if on_gpu else ()
    for plan in plans:
        for index in device_indices if on_gpu else (0,):
            prepare(plan, index)
    return WarmupReport(reports, time.perf_counter() - start, len(plans))


def token_counts(tokens: Sequence[int]) -> tuple[int, ...]:
    """Numbers of tokens to warm up for, each once. Raises InvalidInput unless `tokens` are some integers."""
    if isinstance(tokens, (str, bytes)) or not isinstance(tokens, Sequence) or not tokens:
        raise InvalidInput(f"tokens must be a sequence of numbers of tokens, got {tokens!r}; pass [1, 64, 4096]")
    for count in tokens:
        require_at_least("tokens", count, 0)
    return tuple(dict.fromkeys(tokens))


def _compile(plan: LaunchPlan, launch: KernelLaunch) -> KernelReport:
    # File systems round to milliseconds.
    began, start = time.time(), time.perf_counter()
    compiled = compile_launch(plan, launch, plan.target)
    seconds = time.perf_counter() - start
    # Triton writes this into its cache only after compiling.
    paths = [pathlib.Path(path) for path in compiled.metadata_group.values() if path.endswith(".json")]
    return KernelReport(launch.kernel.name, launch.tile, seconds, all(path.stat().st_mtime < began for path in paths))
