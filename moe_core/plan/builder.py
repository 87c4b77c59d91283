"""Buffers and steps of a plan, and plans composed of other plans."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from moe_core.base import ArraySpec, Target
from moe_core.errors import Unsupported
from moe_core.plan import steps
from moe_core.plan.roles import Held, Role, role_of
from moe_core.specs import LAYOUT_INPUTS, LayoutArrays, LayoutSpec

GRID_LIMITS = (2**31, 2**16, 2**16)


class PlanBuilder:
    def __init__(self, name: str, target: Target) -> None:
        self.name, self.target = name, target
        self._inputs: list[steps.Buffer] = []
        self._outputs: list[steps.Buffer] = []
        self._scratch: list[steps.Buffer] = []
        self._buffers: dict[str, steps.Buffer] = {}
        self._filled: set[str] = set()
        self._steps: list[steps.KernelLaunch | steps.ReferenceCall] = []
        self._summation: list[str] = []
        self._notes: list[str] = []
        self._of_role: dict[Held | None, list[str]] = {}
        self.lent: list[str] = []
        self._over: dict[str, str] = {}

    def _add(self, into: list[steps.Buffer], buffer: steps.Buffer) -> str:
        assert not self.has(buffer.name), f"buffer {buffer.name} is declared twice"
        into.append(buffer)
        self._buffers[buffer.name] = buffer
        return buffer.name

    def _declare(self, into: list[steps.Buffer], name: str, spec: ArraySpec, role: Held | Role | None) -> str:
        buffer = steps.Buffer(name, spec, _role(name, role))
        self._of_role.setdefault(buffer.role, []).append(name)
        return self._add(into, buffer)

    def input(self, name: str, spec: ArraySpec, role: Held | Role | None = None) -> str:
        """Declare an input. role: None: by its name."""
        self._filled.add(name)
        return self._declare(self._inputs, name, spec, role)

    def inputs(self, arrays: Mapping[str, ArraySpec | None]) -> dict[str, str]:
        """Declare the arrays that are not None. Returns name -> name for `reference`."""
        return {name: self.input(name, array) for name, array in arrays.items() if array is not None}

    def output(self, name: str, spec: ArraySpec, role: Held | Role | None = None) -> str:
        return self._declare(self._outputs, name, spec, role)

    def scratch(self, name: str, spec: ArraySpec, role: Held | Role | None = None) -> str:
        return self._declare(self._scratch, name, spec, role)

    def lend(self, *outputs: str) -> None:
        """Let scratch take the memory of outputs until a step writes them. Nothing may share their memory."""
        self.lent += outputs

    def scratch_over(self, name: str, over: str, role: Held | Role | None = None) -> str:
        """Declare scratch in the memory of a filled buffer. The step that writes an element reads the old one first."""
        self._over[self.scratch(name, self.spec(over), role)] = over
        return name

    def layout_inputs(self, layout: LayoutSpec | None, names: Sequence[str] = LAYOUT_INPUTS) -> dict[str, str]:
        if layout is None:
            return {}
        specs = LayoutArrays.specs(layout)
        return self.inputs({name: getattr(specs, name) for name in names})

    def spec(self, name: str) -> ArraySpec:
        return self._buffers[name].spec

    def spec_of(self, name: str | None) -> ArraySpec | None:
        return self.spec(name) if name is not None and self.has(name) else None

    def has(self, name: str) -> bool:
        return name in self._buffers

    def optional(self, name: str) -> steps.Pointer | steps.Constant:
        return steps.Pointer(name) if self.has(name) else steps.Constant(None)

    def pointers(self, *names: str) -> dict[str, steps.Argument]:
        return {name: self.optional(name) for name in names}

    def launch(
        self,
        kernel: steps.Kernel,
        grid: tuple[int, ...],
        arguments: Mapping[str, steps.Argument],
        num_warps: int = 4,
        num_stages: int = 3,
    ) -> None:
        """Add a kernel launch, unless its grid has a zero. Raises Unsupported and `KernelLaunch`'s errors."""
        assert self.target.compiled, f"{self.name}: the reference engine runs no {kernel.name}"
        assert num_warps.bit_count() == 1, f"{kernel.name} with {num_warps} warps"
        x, y, z = (*grid, 1, 1)[:3]
        step = steps.KernelLaunch(kernel, (x, y, z), tuple(arguments.items()), num_warps, num_stages)
        if any(size >= limit for size, limit in zip((x, y, z), GRID_LIMITS, strict=True)):
            raise Unsupported(
                f"{kernel.name} would need a grid of {(x, y, z)}, at or beyond {GRID_LIMITS}; split the arrays"
            )
        for value in arguments.values():
            if isinstance(value, steps.Pointer | steps.TensorMap):
                assert self.has(value.buffer), f"unknown buffer {value}"
                self._filled.add(value.buffer)
        if x and y and z:
            self._steps.append(step)

    def reference(
        self,
        function: Callable[..., Any],
        inputs: Mapping[str, str],
        constants: Mapping[str, Any],
        outputs: Sequence[str],
    ) -> steps.LaunchPlan:
        """Add a call of a NumPy twin and build the plan."""
        arguments = tuple(inputs.items()), tuple(constants.items())
        self.add_reference(steps.ReferenceCall(steps.function_name(function), *arguments, tuple(outputs)))
        return self.build()

    def add_reference(self, step: steps.ReferenceCall) -> None:
        assert not self.target.compiled, f"{self.name}: {step.function} is for the reference engine"
        for name in (*(buffer for _, buffer in step.inputs), *step.outputs):
            assert self.has(name), f"unknown buffer {name}"
        self._filled.update(step.outputs)
        self._steps.append(step)

    def call(
        self,
        plan: steps.LaunchPlan,
        prefix: str,
        bindings: Mapping[str, str],
        roles: Mapping[str, Held | Role] | None = None,
    ) -> str:
        """Inline `plan`. Returns the buffer of its first output, "" if it has none.

        Args:
            plan: every buffer bound must have its role. Inputs must be filled, outputs must not be.
            prefix: of the names of its scratch buffers.
            bindings: the plan's inputs and outputs -> buffers here; a quantised operand is named without its part. An
                input without a binding is the one filled buffer of its role, an output without one becomes scratch.
            roles: of inputs and outputs that hold something else in this call than their names say.
        """
        assert plan.target == self.target
        names = self._bind(plan, prefix, bindings, roles or {})
        self._filled.update(names[buffer.name] for buffer in plan.outputs)
        for buffer in plan.scratch:
            names[buffer.name] = self._add(self._scratch, steps.Buffer(f"{prefix}.{buffer.name}", buffer.spec))
        self._steps += [_rename(step, names) for step in plan.steps]
        self._summation += [f"{prefix}: {line}" for line in plan.summation]
        self._notes += [f"{prefix}: {line}" for line in plan.notes]
        return names[plan.outputs[0].name] if plan.outputs else ""

    def _bind(
        self, plan: steps.LaunchPlan, prefix: str, bindings: Mapping[str, str], roles: Mapping[str, Held | Role]
    ) -> dict[str, str]:
        wanted = {buffer.name: buffer for buffer in (*plan.inputs, *plan.outputs)}
        known = {*wanted, *(name.rpartition(".")[0] for name in wanted)}
        present = {name for name, bound in bindings.items() if self.has(bound) or self.has(f"{bound}.values")}
        assert present | set(roles) <= known, (
            f"{prefix}: {(present | set(roles)) - known} are no buffers of {plan.name}"
        )
        names: dict[str, str] = {}
        for name, buffer in wanted.items():
            operand, dot, part = name.rpartition(".")
            bound = bindings.get(name)
            if bound is None and operand in bindings:
                bound = bindings[operand] + dot + part
            role = _role(name, roles[name]) if name in roles else buffer.role
            is_input = buffer in plan.inputs
            if bound is None and is_input:
                candidates = [other for other in self._of_role.get(role, ()) if other in self._filled]
                assert len(candidates) == 1, (
                    f"{prefix}: input {name} is not bound, and {candidates} have the role {role}"
                )
                (bound,) = candidates
            elif bound is None:
                bound = self._add(self._scratch, steps.Buffer(f"{prefix}.{name}", buffer.spec, role))
            names[name] = bound
            existing = self._buffers[bound]
            takes = f"{prefix}: {'input' if is_input else 'output'} {name} of {plan.name} takes"
            assert role is not None, f"{takes} an array without a role; declare it with one"
            assert existing.role == role, f"{takes} the role {role}, got {bound}, whose role is {existing.role}"
            state = "filled" if is_input else "not filled"
            assert (bound in self._filled) == is_input, f"{takes} a buffer that is {state}, got {bound}"
            assert _same_memory(existing.spec, buffer.spec), f"{takes} {buffer.spec}, got {bound} {existing.spec}"
        return names

    def sums(self, line: str) -> None:
        self._summation.append(line)

    def note(self, line: str) -> None:
        self._notes.append(line)

    def build(self) -> steps.LaunchPlan:
        buffers = (tuple(self._inputs), tuple(self._outputs), tuple(self._scratch))
        texts = (tuple(self._summation), tuple(self._notes))
        memory = tuple(self.lent), tuple(self._over.items())
        return steps.LaunchPlan(self.name, self.target, *buffers, tuple(self._steps), *texts, *memory)


def _role(name: str, role: Held | Role | None) -> Held | None:
    return role_of(name) if role is None else Held(role) if isinstance(role, Role) else role


def _same_memory(array: ArraySpec, other: ArraySpec) -> bool:
    dense = array.is_contiguous and other.is_contiguous
    return array == other or (dense and (array.size, array.dtype) == (other.size, other.dtype))


def _rename(
    step: steps.KernelLaunch | steps.ReferenceCall, names: Mapping[str, str]
) -> steps.KernelLaunch | steps.ReferenceCall:
    if isinstance(step, steps.ReferenceCall):
        inputs = tuple((keyword, names[buffer]) for keyword, buffer in step.inputs)
        return steps.ReferenceCall(step.function, inputs, step.constants, tuple(names[name] for name in step.outputs))
    arguments = dict(step.arguments)
    for name, value in step.arguments:
        if isinstance(value, steps.Pointer | steps.TensorMap):
            arguments[name] = dataclasses.replace(value, buffer=names[value.buffer])
    return dataclasses.replace(step, arguments=tuple(arguments.items()))
