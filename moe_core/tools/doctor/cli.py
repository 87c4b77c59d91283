"""The command line of `moebius-doctor`. Exit status: 0 healthy, 1 a self-test failed, 2 nothing could be tested."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import moe_core
from moe_core.base import command, cpu_target, threads
from moe_core.parity.devices import has_triton, prefer_interpreter, use_gpu
from moe_core.runtime.cuda import why_no_gpu
from moe_core.tools.doctor.kernels import Kernels, kernels_of
from moe_core.tools.doctor.machine import TUNED_ARCH, Gpu, Package, gpus, packages
from moe_core.tools.doctor.self_test import FAIL, FRONT_ENDS, PASS, UNTESTED, Outcome, run_self_tests

HEALTHY, FAILED, NOTHING_TESTED = 0, 1, command.COULD_NOT_RUN
_CONCLUSIONS = {
    HEALTHY: "healthy: every op that ran agrees with the reference",
    FAILED: "FAILED: a self-test failed; do not trust what is named above",
    NOTHING_TESTED: "NOTHING WAS TESTED: no front-end ran a kernel here",
}
_DESCRIPTION = """\
Say what this machine runs and whether it computes right: versions, GPUs, the kernels that typical layers get, and a
self-test of every op of every front-end against the NumPy reference, on poisoned memory. Without a GPU the real kernels
run in Triton's interpreter.

With CHECKPOINT, examine that directory instead: how each matrix is stored, shapes beside config.json, bad scales, dead
and equal experts, settings that nobody honours, and what transformers, vLLM and SGLang would misread.
"""
_EPILOG = "exit status: 0 healthy, 1 a self-test failed or the checkpoint has a problem, 2 nothing could be tested"


@dataclass(frozen=True)
class Diagnosis:
    packages: tuple[Package, ...]
    gpus: tuple[Gpu, ...]
    no_gpu: str
    kernels: tuple[Kernels, ...]
    outcome: Outcome
    seconds: float

    @property
    def status(self) -> int:
        if not self.outcome.healthy:
            return FAILED
        return HEALTHY if self.outcome.tested else NOTHING_TESTED

    def untrusted(self) -> Iterator[str]:
        outcome = self.outcome
        for result in outcome.failures:
            where = f" on {result.device}" if result.device else ""
            yield f"{result.front_end} {result.op}{where} ({result.case or result.direction}): {result.note}"
        for row in outcome.bitwise:
            if row.equal is False:
                yield f"torch and JAX do not give the same bits ({row.direction}, {row.case}): {row.note}"
        for name in FRONT_ENDS:
            if name in outcome.absent:
                yield f"moe_{name} was not tested, it does not start: {outcome.absent[name]}"
            elif notes := {r.note for r in outcome.results if r.front_end == name and r.verdict == UNTESTED}:
                yield f"kernels of moe_{name} were not tested: {'; '.join(sorted(notes))}"
        for package in self.packages:
            if package.problem:
                yield package.problem
        if outcome.tested and not (outcome.poisoned.outputs and outcome.poisoned.workspaces):
            yield "memory was not poisoned: an output that nobody writes may have gone unseen"
        if not self.gpus:
            unseen = "and the interpreter shows neither races nor stray accesses"
            yield f"compiled kernels and speed: there is no GPU ({self.no_gpu}), {unseen}"
            if not has_triton():
                yield "kernels: Triton is not installed (it exists for Linux), so layers run on the NumPy reference"
        for gpu in self.gpus:
            if gpu.target is None:
                yield f"GPU {gpu.index} cannot be used: {gpu.refused}"
            elif gpu.index > 0:
                yield f"GPU {gpu.index} was not tested: the self-test runs on GPU 0"
            elif gpu.target.arch != TUNED_ARCH:
                yield f"speed on {gpu.name}: tile configurations are tuned for sm_{TUNED_ARCH} only"
        if self.gpus and self.outcome.tested and self.outcome.interpreted():
            yield "compiled kernels: there is a GPU, but the kernels ran in the interpreter (TRITON_INTERPRET=1)"
        if free := threads.why_blas_is_free():
            yield f"speed of the NumPy engine: {free}, which is slow beside other work; start with OMP_NUM_THREADS=1"
        if all(result.direction != "backward" for result in outcome.results):
            yield "gradients: none was tested"

    def as_dict(self) -> dict[str, Any]:
        outcome = self.outcome
        return {
            "status": self.status,
            "conclusion": _CONCLUSIONS[self.status],
            "packages": [vars(package) for package in self.packages],
            "gpus": [gpu.as_dict() for gpu in self.gpus],
            "no_gpu": self.no_gpu,
            "kernels": [kernels.as_dict() for kernels in self.kernels],
            "self_test": [vars(result) for result in outcome.results],
            "absent": outcome.absent,
            "bitwise": [vars(row) for row in outcome.bitwise],
            "poisoned": {"outputs": outcome.poisoned.outputs, "workspaces": outcome.poisoned.workspaces},
            "not_to_be_trusted": list(self.untrusted()),
            "seconds": self.seconds,
        }

    def __str__(self) -> str:
        return "\n".join([*self._machine_lines(), *self._kernel_lines(), *self._test_lines(), *self._verdict()])

    def _machine_lines(self) -> Iterator[str]:
        yield "Versions"
        for package in self.packages:
            problem = f"  {package.problem}" if package.problem else ""
            yield f"  {package.name:15} {package.version or 'not installed'}{problem}"
        yield "\nGPUs"
        if not self.gpus:
            yield f"  none: {self.no_gpu}"
        for gpu in self.gpus:
            yield f"  {gpu.index}: {gpu.name}, {f'refused: {gpu.refused}' if gpu.target is None else gpu.target}"

    def _kernel_lines(self) -> Iterator[str]:
        for kernels in self.kernels:
            yield f"\nKernels on {kernels.target}"
            for workload in kernels.workloads:
                yield f"  {workload.name}"
                if workload.refused:
                    yield f"    refused: {workload.refused}"
                # Plans repeat small kernels.
                for (kernel, configuration), count in Counter(workload.launches).items():
                    times = f" ({count} times)" if count > 1 else ""
                    yield f"    {kernel}{times}{f': {configuration}' if configuration else ''}"
                yield from (f"    note: {note}" for note in workload.notes)
            if kernels.refused:
                yield "  Refused"
                yield from (f"    {configuration}: {reason}" for configuration, reason in kernels.refused)

    def _test_lines(self) -> Iterator[str]:
        outcome = self.outcome
        poisoned = f"{outcome.poisoned.outputs} outputs and {outcome.poisoned.workspaces} workspaces poisoned"
        yield f"\nSelf-test against the NumPy reference ({poisoned})"
        for name in outcome.absent:
            yield f"  {name}: not tested, it does not start"
        groups: dict[tuple[str, str, str, str], list[Any]] = {}
        for result in outcome.results:
            groups.setdefault((result.front_end, result.direction, result.case, result.device), []).append(result)
        for (name, direction, case, device), results in groups.items():
            yield f"  {name} {direction}{f' {case}' if case else ''}{f' on {device}' if device else ''}"
            for verdict in (PASS, FAIL, UNTESTED):
                if ops := [result.op for result in results if result.verdict == verdict]:
                    yield f"    {verdict}: {', '.join(ops)}"
        for row in outcome.bitwise:
            answer = {True: "yes", False: "NO", None: "not compared"}[row.equal]
            yield f"  torch and JAX bitwise equal, {row.direction} {row.case}: {answer} ({row.note})"

    def _verdict(self) -> Iterator[str]:
        yield "\nNot to be trusted here"
        yield from (f"  - {line}" for line in self.untrusted())
        yield f"\nmoebius-doctor: {_CONCLUSIONS[self.status]} ({self.seconds:.1f} s)"


def diagnose(progress: Any) -> Diagnosis:
    start = time.perf_counter()
    # JAX would take most of a GPU's memory, and torch needs some.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    progress("looking for packages and GPUs")
    installed, devices = packages(), gpus()
    # Triton decides at import: afterwards, a CPU can only run the NumPy reference.
    if "triton" not in sys.modules:
        prefer_interpreter()
    targets = list(dict.fromkeys(gpu.target for gpu in devices if gpu.target is not None)) if use_gpu() else []
    progress("planning the kernels of typical layers")
    kernels = tuple(kernels_of(target) for target in targets or [cpu_target()])
    outcome = run_self_tests(progress)
    return Diagnosis(installed, devices, why_no_gpu(), kernels, outcome, round(time.perf_counter() - start, 3))


def _examine_checkpoint(options: argparse.Namespace, progress: Callable[[str], None]) -> int:
    # Most runs examine the machine.
    from moe_core.tools.doctor.checkpoint import examine

    write = command.report_writer(options.html)
    report = examine(options.checkpoint, progress)
    print(json.dumps(report.as_dict(), indent=2) if options.json else report)
    write(report.html())
    return HEALTHY if report.healthy else FAILED


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        "moebius-doctor", description=_DESCRIPTION, epilog=_EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", nargs="?", metavar="CHECKPOINT", help="a checkpoint directory to examine")
    parser.add_argument("--html", metavar="PATH", help="also write the report on CHECKPOINT as a page")
    parser.add_argument("--json", action="store_true", help="print the report as JSON, and nothing else, to stdout")
    parser.add_argument("--version", action="version", version=f"%(prog)s {moe_core.__version__}")
    options = parser.parse_args(arguments)
    if options.html is not None and options.checkpoint is None:
        parser.error("--html goes with CHECKPOINT")

    def progress(line: str) -> None:
        print(f"moebius-doctor: {line}", file=sys.stderr, flush=True)

    def examine() -> int:
        if options.checkpoint is not None:
            return _examine_checkpoint(options, progress)
        diagnosis = diagnose(progress)
        print(json.dumps(diagnosis.as_dict(), indent=2) if options.json else diagnosis)
        return diagnosis.status

    return command.run("moebius-doctor", examine)
