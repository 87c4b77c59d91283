"""Plans: what will run, decided in pure Python over specs, before any array exists.

A `LaunchPlan` is frozen and printable. It names its inputs, outputs and scratch buffers and the ordered steps between
them; a step is a Triton kernel launch or, for the CPU reference engine, a call of a NumPy twin. Its key is the
truncated SHA-256 of the canonical whole plan and of the sources that decide results, so equal keys mean equal plans,
and with one version of Triton, on one device, equal results.
"""

from __future__ import annotations

import base64
import dataclasses
import functools
import hashlib
import json
import pathlib
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moe_core import codec
from moe_core.arena import aligned, place_buffers
from moe_core.arrays import ArraySpec
from moe_core.codec import plan_type
from moe_core.errors import InvalidInput, Unsupported
from moe_core.target import Target

#: Key characters. Strings of up to 7 bytes are stored inline by the FFI that carries keys through XLA.
KEY_LENGTH = 7
_INT32_LIMIT = 2**31
#: CUDA takes grids below these.
_GRID_LIMITS = (2**31, 2**16, 2**16)
#: Raised when the meaning of plan data changes.
FORMAT_VERSION = 2


@plan_type
@dataclass(frozen=True)
class Buffer:
    """A named array of a plan."""

    name: str
    spec: ArraySpec


@plan_type
@dataclass(frozen=True)
class Pointer:
    """A kernel argument: the address of a buffer (16-byte aligned)."""

    buffer: str


@plan_type
@dataclass(frozen=True)
class Scalar:
    """A kernel argument passed at run time; changing it compiles nothing. dtype: int32, int64 or float32."""

    value: int | float
    dtype: str = "int32"

    def __post_init__(self) -> None:
        if self.dtype == "int32" and not -_INT32_LIMIT <= self.value < _INT32_LIMIT:
            raise Unsupported(f"a kernel's count must fit into 32 bits, got {self.value}; split the batch")


@plan_type
@dataclass(frozen=True)
class TensorMap:
    """A kernel argument: the TMA descriptor of a buffer seen as a matrix of 8- or 16-bit elements, its rows contiguous.

    shape: (rows, columns); pitch: elements from one row to the next; box: (rows, columns) that one copy moves, the
    columns in panels of 128 bytes, as the tensor cores read them. Neither shape nor pitch is compiled in.
    """

    buffer: str
    shape: tuple[int, int]
    pitch: int
    box: tuple[int, int]


@plan_type
@dataclass(frozen=True)
class Constant:
    """A kernel argument compiled in (`tl.constexpr`); None stands for an absent pointer."""

    value: int | float | bool | str | None


Argument = Pointer | Scalar | TensorMap | Constant


@plan_type
@dataclass(frozen=True)
class KernelLaunch:
    """One Triton launch. kernel: `"module:function"` under `moe_core.kernels`; arguments in the kernel's order.

    dependent: it may begin before the launch ahead of it has ended, and its kernel waits; see `moe_core.overlap`.
    """

    kernel: str
    grid: tuple[int, int, int]
    arguments: tuple[tuple[str, Argument], ...]
    num_warps: int = 4
    num_stages: int = 3
    dependent: bool = False

    @property
    def pipeline_stages(self) -> int:
        """num_stages, an option of the compiler, or STAGES, that constant of a kernel which makes its pipeline itself:
        there the option means nothing."""
        own = dict(self.arguments).get("STAGES")
        return own.value if isinstance(own, Constant) and isinstance(own.value, int) else self.num_stages


@plan_type
@dataclass(frozen=True)
class ReferenceCall:
    """One call of a NumPy twin. function: `"module:function"` under `moe_core.reference`.

    inputs: (keyword, buffer) pairs; constants: (keyword, option) pairs; outputs: buffers of the results, in order.
    """

    function: str
    inputs: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, Any], ...]
    outputs: tuple[str, ...]


@functools.cache
def sources_version() -> str:
    """SHA-256 over the sources that decide results or sizes: kernels, how they are compiled, NumPy twins, the arena."""
    digest = hashlib.sha256()
    root = pathlib.Path(__file__).parent
    for pattern in ("kernels/*.py", "compiler.py", "cuda.py", "tensor_map.py", "arena.py", "reference/*.py"):
        for path in sorted(root.glob(pattern)):
            digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


@plan_type
@dataclass(frozen=True, eq=False)
class LaunchPlan:
    """An executable plan. summation: one line per reduction, its order named. notes: decisions and rejected kernels."""

    name: str
    target: Target
    inputs: tuple[Buffer, ...]
    outputs: tuple[Buffer, ...]
    scratch: tuple[Buffer, ...]
    steps: tuple[KernelLaunch | ReferenceCall, ...]
    summation: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        first = self.steps[0] if self.steps else None
        # What runs before a plan is not known to its kernels: the first launch waits for all of it.
        assert not (isinstance(first, KernelLaunch) and first.dependent), "a plan's first launch must not be dependent"

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, LaunchPlan) and self.canonical == other.canonical)

    def __hash__(self) -> int:
        return hash(self.key)

    @functools.cached_property
    def canonical(self) -> str:
        """The canonical text the key is made from."""
        return codec.dumps((FORMAT_VERSION, sources_version(), self))

    @functools.cached_property
    def key(self) -> str:
        """At most 7 characters; equal plans have equal keys in every process."""
        digest = hashlib.sha256(self.canonical.encode()).digest()
        return base64.urlsafe_b64encode(digest).decode()[:KEY_LENGTH]

    @functools.cached_property
    def scratch_offsets(self) -> tuple[int, ...]:
        """Byte offset of every scratch buffer in the arena; buffers needed at different times may share memory."""
        sizes = [(buffer.name, buffer.spec.nbytes) for buffer in self.scratch]
        return place_buffers(sizes, [_buffers(step) for step in self.steps])

    @functools.cached_property
    def scratch_bytes(self) -> int:
        """Bytes of the one scratch arena (uint8, 16-byte aligned) the caller allocates."""
        ends = zip(self.scratch_offsets, self.scratch, strict=True)
        return max((offset + aligned(buffer.spec.nbytes) for offset, buffer in ends), default=0)

    def spec(self, name: str) -> ArraySpec:
        """The spec of an input, output or scratch buffer."""
        for buffer in (*self.inputs, *self.outputs, *self.scratch):
            if buffer.name == name:
                return buffer.spec
        raise KeyError(name)

    def explain(self) -> str:
        """Every buffer, step, decision and summation order, as text."""
        lines = [f"{self.name} on {self.target}, key {self.key}, scratch {self.scratch_bytes} bytes"]
        for title, buffers in (("input", self.inputs), ("output", self.outputs), ("scratch", self.scratch)):
            lines += [f"  {title:7} {buffer.name}: {buffer.spec}" for buffer in buffers]
        for number, step in enumerate(self.steps):
            if isinstance(step, KernelLaunch):
                constants = ", ".join(f"{n}={a.value}" for n, a in step.arguments if isinstance(a, Constant))
                grid = "x".join(str(size) for size in step.grid)
                early = ", dependent" if step.dependent else ""
                lines.append(
                    f"  step {number}  {step.kernel} grid {grid}, {step.num_warps} warps, {step.pipeline_stages} "
                    f"stages{early}; {constants}"
                )
            else:
                lines.append(f"  step {number}  NumPy reference {step.function}")
        lines += [f"  sums    {line}" for line in self.summation]
        lines += [f"  note    {line}" for line in self.notes]
        return "\n".join(lines)


class PlanBuilder:
    """Collects buffers and steps; `call` inlines another plan, so that composed plans are made of the stage plans."""

    def __init__(self, name: str, target: Target) -> None:
        self.name, self.target = name, target
        self._inputs: list[Buffer] = []
        self._outputs: list[Buffer] = []
        self._scratch: list[Buffer] = []
        self._specs: dict[str, ArraySpec] = {}
        self._steps: list[KernelLaunch | ReferenceCall] = []
        self._summation: list[str] = []
        self._notes: list[str] = []

    def _add(self, into: list[Buffer], name: str, spec: ArraySpec) -> str:
        assert name not in self._specs, f"buffer {name} is declared twice"
        into.append(Buffer(name, spec))
        self._specs[name] = spec
        return name

    def input(self, name: str, spec: ArraySpec) -> str:
        return self._add(self._inputs, name, spec)

    def output(self, name: str, spec: ArraySpec) -> str:
        return self._add(self._outputs, name, spec)

    def scratch(self, name: str, spec: ArraySpec) -> str:
        return self._add(self._scratch, name, spec)

    def spec(self, name: str) -> ArraySpec:
        return self._specs[name]

    def has(self, name: str) -> bool:
        """Whether a buffer of this name was declared."""
        return name in self._specs

    def launch(
        self,
        kernel: str,
        grid: tuple[int, ...],
        arguments: Mapping[str, Argument],
        num_warps: int = 4,
        num_stages: int = 3,
    ) -> None:
        """Add a kernel launch; a grid with a zero is dropped."""
        x, y, z = (*grid, 1, 1)[:3]
        if any(size >= limit for size, limit in zip((x, y, z), _GRID_LIMITS, strict=True)):
            raise Unsupported(
                f"{kernel} would need a grid of {(x, y, z)}, at or beyond {_GRID_LIMITS}; split the arrays"
            )
        for value in arguments.values():
            assert not isinstance(value, Pointer | TensorMap) or value.buffer in self._specs, f"unknown buffer {value}"
        if x and y and z:
            self._steps.append(KernelLaunch(kernel, (x, y, z), tuple(arguments.items()), num_warps, num_stages))

    def reference(
        self, function: str, inputs: Mapping[str, str], constants: Mapping[str, Any], outputs: Sequence[str]
    ) -> None:
        """Add a call of a NumPy twin."""
        for name in (*inputs.values(), *outputs):
            assert name in self._specs, f"unknown buffer {name}"
        self._steps.append(ReferenceCall(function, tuple(inputs.items()), tuple(constants.items()), tuple(outputs)))

    def call(self, plan: LaunchPlan, prefix: str, bindings: Mapping[str, str]) -> None:
        """Inline `plan`. bindings: its input and output names -> buffers here (unbound outputs become scratch)."""
        assert plan.target == self.target
        names: dict[str, str] = {}
        for buffer in (*plan.inputs, *plan.outputs, *plan.scratch):
            bound = bindings.get(buffer.name)
            if bound is None:
                assert buffer not in plan.inputs, f"{prefix}: input {buffer.name} is not bound"
                bound = self.scratch(f"{prefix}.{buffer.name}", buffer.spec)
            else:
                assert _same_memory(self._specs[bound], buffer.spec), (prefix, buffer, self._specs[bound])
            names[buffer.name] = bound
        unknown = set(bindings) - set(names)
        assert not unknown, f"{prefix}: {unknown} are no buffers of {plan.name}"
        for step in plan.steps:
            self._steps.append(_rename(step, names))
        self._summation += [f"{prefix}: {line}" for line in plan.summation]
        self._notes += [f"{prefix}: {line}" for line in plan.notes]

    def sums(self, line: str) -> None:
        self._summation.append(line)

    def note(self, line: str) -> None:
        self._notes.append(line)

    def build(self) -> LaunchPlan:
        return LaunchPlan(
            self.name,
            self.target,
            tuple(self._inputs),
            tuple(self._outputs),
            tuple(self._scratch),
            tuple(self._steps),
            tuple(self._summation),
            tuple(self._notes),
        )


def _buffers(step: KernelLaunch | ReferenceCall) -> set[str]:
    """Those that a step reads or writes."""
    if isinstance(step, ReferenceCall):
        return {*(buffer for _, buffer in step.inputs), *step.outputs}
    return {value.buffer for _, value in step.arguments if isinstance(value, Pointer | TensorMap)}


def _same_memory(array: ArraySpec, other: ArraySpec) -> bool:
    """Whether both are the same array, or dense ones of the same numbers in another shape."""
    dense = array.is_contiguous and other.is_contiguous
    return array == other or (dense and (array.size, array.dtype) == (other.size, other.dtype))


def _rename(step: KernelLaunch | ReferenceCall, names: Mapping[str, str]) -> KernelLaunch | ReferenceCall:
    if isinstance(step, ReferenceCall):
        inputs = tuple((keyword, names[buffer]) for keyword, buffer in step.inputs)
        return ReferenceCall(step.function, inputs, step.constants, tuple(names[name] for name in step.outputs))
    arguments = tuple(
        (
            name,
            dataclasses.replace(value, buffer=names[value.buffer]) if isinstance(value, Pointer | TensorMap) else value,
        )
        for name, value in step.arguments
    )
    return dataclasses.replace(step, arguments=arguments)


_registry: dict[str, LaunchPlan] = {}
_registry_lock = threading.Lock()


def register(plan: LaunchPlan) -> str:
    """Make a plan known by its key and return the key. Another plan under the same key raises."""
    with _registry_lock:
        known = _registry.setdefault(plan.key, plan)
    if known is not plan and known.canonical != plan.canonical:
        raise RuntimeError(
            f"plan key {plan.key} is taken by {known.name!r}; {plan.name!r} cannot be registered under it"
        )
    return plan.key


def lookup(key: str) -> LaunchPlan:
    """The plan registered under `key`; an unknown key raises InvalidInput that names the fix."""
    plan = _registry.get(key)
    if plan is None:
        raise InvalidInput(
            f"plan key must be registered in this process, got {key!r}; call moe_core.plan.load_plans(path) on a file "
            "written by export_plans in the process that made the program"
        )
    return plan


def export_plans(path: str | pathlib.Path, keys: Iterable[str] | None = None) -> tuple[str, ...]:
    """Write registered plans (all, or those named) to a JSON file for another process; returns their keys."""
    chosen = tuple(_registry) if keys is None else tuple(keys)
    text = codec.dumps((FORMAT_VERSION, sources_version(), tuple(lookup(key) for key in chosen)))
    pathlib.Path(path).write_text(text)
    return chosen


def load_plans(path: str | pathlib.Path) -> tuple[str, ...]:
    """Register the plans of a file written by `export_plans` and return their keys.

    Raises InvalidInput for any other file, and where the file was written by another version of the kernels: its keys
    would not match.
    """
    try:
        version, sources, plans = json.loads(pathlib.Path(path).read_text())
    except (ValueError, TypeError) as error:
        raise InvalidInput(
            f"path must be a file written by export_plans, got {str(path)!r} ({error}); export the plans again"
        ) from error
    # Another version's plans may hold types and fields that are unknown here: nothing of them is decoded before.
    if (version, sources) != (FORMAT_VERSION, sources_version()):
        raise InvalidInput(
            f"path must hold plans of this version of the kernels ({sources_version()[:12]}), got {str(sources)[:12]}; "
            "export the program and its plans again"
        )
    return tuple(register(plan) for plan in codec.decode(plans))
