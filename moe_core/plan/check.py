"""Checks of plans that were read from a file. They can then run, but a kernel's numbers are not checked."""

from __future__ import annotations

import ast
import dataclasses
import functools
import importlib
import inspect
import pathlib
import re
import types
import typing
from collections.abc import Collection
from typing import Any

from moe_core.errors import InvalidInput
from moe_core.plan.builder import GRID_LIMITS
from moe_core.plan.steps import KernelLaunch, LaunchPlan, Pointer, ReferenceCall, TensorMap, declared_kernels

#: Bytes of a buffer: sums of many stay far below 64 bits.
_MOST_BYTES = 2**48
_OPS = pathlib.Path(__file__).parent.parent / "ops"
_REPAIR = "export the plan again"


def check_plan(plan: Any) -> LaunchPlan:
    """Return the plan. Raises InvalidInput for others than planners make."""
    _require_type("plan", plan, LaunchPlan)
    buffers = (*plan.inputs, *plan.outputs, *plan.scratch)
    names = {buffer.name for buffer in buffers}
    if len(names) != len(buffers):
        raise _wrong("buffers", "names of their own", [buffer.name for buffer in buffers])
    for buffer in buffers:
        if buffer.spec.nbytes >= _MOST_BYTES:
            raise _wrong(f"buffer {buffer.name}", f"fewer than {_MOST_BYTES} bytes", buffer.spec)
        if any(step < 0 for step in buffer.spec.stride):
            raise _wrong(f"buffer {buffer.name}", "no negative strides", buffer.spec)
        if buffer not in plan.inputs and not buffer.spec.is_contiguous:
            raise _wrong(f"buffer {buffer.name}, which is written to,", "row-major strides", buffer.spec)
    _check_places(plan)
    for step in plan.steps:
        used = _check_launch(step, plan) if isinstance(step, KernelLaunch) else _check_reference(step, plan)
        if not used <= names:
            raise _wrong(f"step {_name(step)}", "buffers of the plan", sorted(used - names))
    return plan


def _check_places(plan: LaunchPlan) -> None:
    outputs, inside = ({buffer.name for buffer in buffers} for buffers in (plan.outputs, (*plan.inputs, *plan.scratch)))
    if not outputs.issuperset(plan.lent):
        raise _wrong("lent memory", "outputs alone", plan.lent)
    over, scratch = dict(plan.over), {buffer.name for buffer in plan.scratch}
    if (
        not len(over) == len(plan.over) == len(set(over.values()))
        or not scratch.issuperset(over)
        or not inside.issuperset(over.values())
    ):
        raise _wrong("what lies over other memory", "scratch buffers over inputs or others", plan.over)
    if set(over) & set(over.values()) or any(plan.spec(one) != plan.spec(other) for one, other in plan.over):
        raise _wrong("what lies over other memory", "the spec of what it replaces", plan.over)


def _wrong(subject: str, expected: str, got: object) -> InvalidInput:
    return InvalidInput(f"{subject} of a plan must have {expected}, got {str(got)[:200]}; {_REPAIR}")


def _name(step: KernelLaunch | ReferenceCall) -> str:
    return step.kernel.name if isinstance(step, KernelLaunch) else step.function


def _require_names(
    step: KernelLaunch | ReferenceCall, arguments: list[str], known: Collection[str], needed: Collection[str]
) -> None:
    if len(set(arguments)) != len(arguments) or not set(needed) <= set(arguments) <= set(known):
        raise _wrong(f"step {_name(step)}", f"the arguments {', '.join(known)}", ", ".join(arguments))


def _check_launch(step: KernelLaunch, plan: LaunchPlan) -> set[str]:
    if not plan.target.compiled:
        raise _wrong(f"step {step.kernel.name}", "a NumPy twin, as its target is the reference", "a kernel")
    name = step.kernel.name
    if (declared := declared_kernels().get(name)) is None:
        raise InvalidInput(f"kernel must exist, got {name}, which moe_core.ops does not define; correct its name")
    if step.kernel != declared:
        raise _wrong(f"step {name}", f"the kernel {declared}", step.kernel)
    parameters = _parameters(name)
    _require_names(step, [name for name, _ in step.arguments], parameters, parameters)
    if not all(0 < size < limit for size, limit in zip(step.grid, GRID_LIMITS, strict=True)):
        raise _wrong(f"step {step.kernel.name}", f"a grid from 1 to below {GRID_LIMITS}", step.grid)
    if step.num_warps not in (1, 2, 4, 8, 16, 32) or not 0 < step.num_stages < 100:
        raise _wrong(f"step {step.kernel.name}", "1 to 32 warps, a power of two, and stages", step.tile)
    used: set[str] = set()
    for _, value in step.arguments:
        if isinstance(value, TensorMap):
            _check_map(step, value, plan)
        if isinstance(value, Pointer | TensorMap):
            used.add(value.buffer)
    return used


def _check_map(step: KernelLaunch, value: TensorMap, plan: LaunchPlan) -> None:
    buffers = (*plan.inputs, *plan.outputs, *plan.scratch)
    size = {buffer.name: buffer.spec.size for buffer in buffers}.get(value.buffer, 0)
    (rows, columns), pitch = value.shape, value.pitch
    if min(rows, columns, pitch, *value.box) < 1 or (rows - 1) * pitch + columns > size:
        raise _wrong(f"step {step.kernel.name}", f"a matrix within the {size} elements of {value.buffer}", value)


@functools.cache
def _parameters(name: str) -> tuple[str, ...]:
    """From the source: importing it would need Triton."""
    module, _, function = name.partition(":")
    text = _OPS.joinpath(*module.split(".")).with_suffix(".py").read_text()
    functions = [node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef) and node.name == function]
    return tuple(argument.arg for node in functions for argument in node.args.args)


def _check_reference(step: ReferenceCall, plan: LaunchPlan) -> set[str]:
    if plan.target.compiled:
        raise _wrong(f"step {step.function}", f"a kernel, as its target is {plan.target}", "a NumPy twin")
    parameters = inspect.signature(_reference(step.function)).parameters
    # A twin with a mapping checks its names itself.
    inputs = () if "arrays" in parameters else step.inputs
    named = [one for one in parameters.values() if one.name not in ("arrays", "places")]
    needed = [one.name for one in named if one.default is inspect.Parameter.empty]
    _require_names(step, [name for name, _ in (*inputs, *step.constants)], [one.name for one in named], needed)
    return {*(buffer for _, buffer in step.inputs), *step.outputs}


def _reference(name: str) -> types.FunctionType:
    module, _, function = name.partition(":")
    if re.fullmatch(r"[a-z]\w*(\.[a-z]\w*)*", module) and "reference" in module and not function.startswith("_"):
        path = _OPS.joinpath(*module.split("."))
        if path.with_suffix(".py").is_file() or path.joinpath("__init__.py").is_file():
            twin = getattr(importlib.import_module(f"moe_core.ops.{module}"), function, None)
            if isinstance(twin, types.FunctionType) and twin.__module__.startswith("moe_core.ops."):
                return twin
    raise InvalidInput(f"function of a step must be a NumPy twin below moe_core.ops, got {name!r}; {_REPAIR}")


def _require_type(subject: str, value: Any, hint: Any) -> None:
    if not _matches(value, hint):
        raise _wrong(subject, f"the type {hint}", repr(value))
    if dataclasses.is_dataclass(value):
        hints = typing.get_type_hints(type(value))
        for field in dataclasses.fields(value):
            _require_type(f"{type(value).__name__}.{field.name}", getattr(value, field.name), hints[field.name])
    elif isinstance(value, tuple):
        for item in value:
            _require_type(subject, item, Any)


def _matches(value: Any, hint: Any) -> bool:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return True
    if origin in (typing.Union, types.UnionType):
        return any(_matches(value, one) for one in arguments)
    if origin is typing.Literal:
        return value in arguments
    if origin is tuple:
        if arguments[-1] is not Ellipsis:
            pairs = zip(value, arguments, strict=False) if isinstance(value, tuple) else ()
            return isinstance(value, tuple) and len(value) == len(arguments) and all(_matches(*pair) for pair in pairs)
        return isinstance(value, tuple) and all(_matches(item, arguments[0]) for item in value)
    # True is an int, but no size.
    return type(value) is hint or (hint is float and type(value) is int)
