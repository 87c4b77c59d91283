"""What Triton makes of a launch for sm_90, up to a stage of its compiler, without what only later stages would show."""

from __future__ import annotations

import re
from typing import Any, NoReturn
from unittest import mock

from moe_core.base.target import Target
from moe_core.plan.steps import KernelLaunch, LaunchPlan
from moe_core.runtime.compiler import compile_launch

#: An H200's.
TARGET = Target("cuda", 90, 132)
_LOCATION = re.compile(r"^#loc.*\n| loc\((?:[^()]|\([^()]*\))*\)", re.MULTILINE)


class _ReachedError(Exception):
    """Ends a compilation, with what its stage was given."""

    def __init__(self, given: object) -> None:
        self.given = str(given)


def _given_to(stage: str, plan: LaunchPlan, launch: KernelLaunch) -> str:
    from triton import knobs
    from triton.backends.nvidia.compiler import CUDABackend

    def reached(_: object, source: object, *__: Any) -> NoReturn:
        raise _ReachedError(source)

    with mock.patch.object(CUDABackend, stage, reached), knobs.compilation.scope():
        # What is in Triton's cache would reach no stage.
        knobs.compilation.always_compile = True
        try:
            compile_launch(plan, launch, TARGET)
        except _ReachedError as end:
            return end.given
    raise AssertionError(f"Triton compiled {launch.kernel.name} without {stage}")


def ptx_of(plan: LaunchPlan, launch: KernelLaunch) -> str:
    """Its PTX: no assembler reads it."""
    return _given_to("make_cubin", plan, launch)


def ptx_instructions(plan: LaunchPlan, launch: KernelLaunch) -> str:
    """Of its PTX, without directives and comments: they hold lines and columns of the source, which every fault
    changes."""
    lines = [line.partition("//")[0].strip() for line in ptx_of(plan, launch).splitlines()]
    return "\n".join(line for line in lines if line and not line.startswith("."))


def ttgir_instructions(plan: LaunchPlan, launch: KernelLaunch) -> str:
    """Of its TTGIR, which LLVM has not seen yet, without lines and columns: a third of the time."""
    return _LOCATION.sub("", _given_to("make_llir", plan, launch))


#: By what faulty copies are asked for.
INSTRUCTIONS = {"lower": ttgir_instructions, "compile": ptx_instructions}
