"""Runs cases, each in a try of its own, and prints the table of what came out."""

from __future__ import annotations

import contextlib
import pathlib
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Concatenate, ParamSpec
from unittest import mock

import numpy as np
import torch

import moe_torch
from moe_core.errors import InvalidInput, Unsupported
from moe_core.runtime import interpreter
from tools.upstream import imports, stand_ins
from tools.upstream.problems import BOUND, complaint

#: From the name of a device: what was computed, and what the reference says; bound: see `problems`.
Run = Callable[[str], "Answer"]


@dataclass(frozen=True, eq=False)
class Answer:
    actual: torch.Tensor
    expected: np.ndarray
    bound: float = BOUND


_Rest = ParamSpec("_Rest")


def of_device(function: Callable[Concatenate[str, _Rest], Answer]) -> Callable[_Rest, Run]:
    """A function of a device and more, as one of the rest that gives a `Run`."""

    def bound(*arguments: _Rest.args, **named: _Rest.kwargs) -> Run:
        return lambda device: function(device, *arguments, **named)

    return bound


@dataclass(frozen=True)
class Case:
    """replaced: names that a world has beside the wheel's files and the stand-ins, made when it begins. generation: of
    the installed `triton_kernels`, None: no installation."""

    name: str
    replaced: Callable[[], Mapping[str, imports.Names]]
    run: Run
    generation: str | None = "3.5"


@dataclass(frozen=True)
class Result:
    """status: `agrees`, `refused` (documented), `REFUSED` (not), `WRONG` or `raises`. bound: as in `Answer`."""

    engine: str
    name: str
    status: str
    text: str = ""
    trace: str = ""
    bound: float = BOUND

    @property
    def failed(self) -> bool:
        return self.status not in ("agrees", "refused")


@contextlib.contextmanager
def on_engine(engine: str) -> Iterator[str]:
    """The device whose tensors run on `cuda`, `interpreter` or `reference`."""
    if engine == "cuda":
        yield "cuda"
    else:
        if find_spec("triton") is not None:
            # Kernels of others are interpreted on both: with Triton's own interpreter, casts to bf16 truncate.
            interpreter.install()
        # Other people's code asks the device's stream whether a graph is captured; a CPU has none.
        stream = mock.Mock(is_capturing=lambda: False)
        with mock.patch.object(torch.accelerator, "current_stream", lambda: stream), moe_torch.cpu_engine(engine):
            yield "cpu"


def run_cases(
    cases: list[Case],
    engine: str,
    files: pathlib.Path,
    refusals: Mapping[str, tuple[str, str]],
    names: Mapping[str, imports.Names] = stand_ins.STAND_INS,
    served: Sequence[str] = imports.SERVED,
) -> list[Result]:
    """Every case on one engine. refusals: those by choice, see `refusals.VLLM`. names: the stand-ins."""
    stand_ins.define_operators()
    results = []
    with contextlib.suppress(KeyboardInterrupt):
        for case in cases:
            world = imports.world(files, names, case.replaced(), served, case.generation)
            with world, on_engine(engine) as device:
                results.append(_run(case, engine, device, refusals.get(case.name)))
    return [*results, *(Result(engine, case.name, "not run") for case in cases[len(results) :])]


def _run(case: Case, engine: str, device: str, refusal: tuple[str, str] | None) -> Result:
    try:
        with torch.no_grad():
            answer = case.run(device)
        wrong = complaint(answer.actual, answer.expected, answer.bound)
    except (InvalidInput, Unsupported) as error:
        if refusal is not None and refusal[0] in str(error):
            return Result(engine, case.name, "refused", refusal[1])
        return Result(engine, case.name, "REFUSED", f"{type(error).__name__}: {error}", traceback.format_exc())
    except Exception as error:
        # Whatever other people's code raises is a row of the table.
        if refusal is not None and refusal[0] in str(error):
            return Result(engine, case.name, "refused", refusal[1])
        return Result(engine, case.name, "raises", f"{type(error).__name__}: {error}", traceback.format_exc())
    if wrong is not None:
        return Result(engine, case.name, "WRONG", wrong)
    return Result(engine, case.name, "agrees", bound=answer.bound)


def table(results: list[Result]) -> str:
    """One line for each result, and a count."""
    width = max((len(result.name) for result in results), default=0)
    lines = [
        f"{result.engine:<11} {result.name:<{width}} {result.status:<7} {' '.join(result.text.split())}".rstrip()
        for result in results
    ]
    failed = sum(result.failed for result in results)
    return "\n".join([*lines, f"{len(results)} cases, {len(results) - failed} as documented, {failed} not"])
