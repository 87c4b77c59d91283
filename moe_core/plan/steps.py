"""Plans: steps and buffers.

A step is a Triton launch or, on the CPU reference engine, a call of a NumPy twin. A plan's key is the truncated SHA-256
of the plan and of the sources that decide results. Equal keys mean equal plans and, on one device with one version of
Triton, equal results.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import importlib
import pathlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from moe_core.base import ArraySpec, Target, codec, plan_type
from moe_core.errors import InvalidInput, Unsupported
from moe_core.plan.arena import aligned, lend_memory, place_buffers
from moe_core.plan.roles import Held

_INT32_LIMIT = 2**31
_OPS = pathlib.Path(__file__).parent.parent / "ops"
#: Raised when the meaning of plan data changes.
FORMAT_VERSION = 5


@plan_type
@dataclass(frozen=True)
class Buffer:
    """A named array of a plan. role: for composing only; None if it cannot be bound."""

    name: str
    spec: ArraySpec
    role: Held | None = field(default=None, compare=False)


@plan_type
@dataclass(frozen=True)
class Pointer:
    """A buffer's address, 16-byte aligned."""

    buffer: str


@plan_type
@dataclass(frozen=True)
class Scalar:
    """A run-time kernel argument. dtype: int32, int64 or float32."""

    value: int | float
    dtype: str = "int32"

    def __post_init__(self) -> None:
        if self.dtype == "int32" and not -_INT32_LIMIT <= self.value < _INT32_LIMIT:
            raise Unsupported(f"a kernel's count must fit into 32 bits, got {self.value}; split the batch")


@plan_type
@dataclass(frozen=True)
class TensorMap:
    """A kernel argument: the TMA descriptor of a buffer as a matrix of 8- or 16-bit elements with contiguous rows.

    shape: (rows, columns); pitch: elements between rows; box: (rows, columns) of one copy, with columns in panels of
    128 bytes. Shape and pitch are not compiled in.
    """

    buffer: str
    shape: tuple[int, int]
    pitch: int
    box: tuple[int, int]


@plan_type
@dataclass(frozen=True)
class Constant:
    """A kernel argument compiled in. None is an absent pointer."""

    value: int | float | bool | str | None


Argument = Pointer | Scalar | TensorMap | Constant


def passed(**values: Argument | int | float | str | bool | None) -> dict[str, Argument]:
    """Kernel arguments by name. CAPITALS: a constant. Else a string is a buffer, a number a scalar, None no pointer."""
    return {name: _argument(name, value) for name, value in values.items()}


def _argument(name: str, value: Argument | int | float | str | bool | None) -> Argument:
    if isinstance(value, Argument):
        return value
    if name.isupper() or value is None:
        return Constant(value)
    return Pointer(value) if isinstance(value, str) else Scalar(value)


@plan_type
@dataclass(frozen=True)
class Kernel:
    """A Triton kernel, with the facts that planning and compiling need; made by `declare_kernel`.

    Args:
        name: `"module:function"` under `moe_core.ops`.
        pdl: when the kernel waits for the previous launch under PDL (`moe_core.ops.moe.pdl`). `"start"`: before it
            reads or writes anything. `"layout"`: after looking up its layout and schedule, or at its start if the
            previous launch writes them. `"tail"`: likewise, or after its sums if the previous launch writes low-rank
            rows of its tail. None: no PDL, and no constant `PDL`.
        writes_layout: it writes a layout, a schedule, or counts of one.
        whole_multiprocessor: each block takes one; PDL gains for any number of tokens.
        counts_slots: it counts in histograms, and `moe_core.runtime.compiler` checks that each element counts once.
        prepacked_weight: the argument that is a prepacked weight, with three axes of blocks per matrix.

    Raises InvalidInput for any other name or `pdl`.
    """

    name: str
    pdl: Literal["start", "layout", "tail"] | None = None
    writes_layout: bool = False
    whole_multiprocessor: bool = False
    counts_slots: bool = False
    prepacked_weight: str | None = None

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[\w.]+:\w+", self.name):
            raise InvalidInput(f"name must be 'module:function' under moe_core.ops, got {self.name!r}; correct it")
        if self.pdl not in (None, "start", "layout", "tail"):
            raise InvalidInput(f"pdl of {self.name} must be None, start, layout or tail, got {self.pdl!r}; choose one")

    @property
    def function(self) -> str:
        return self.name.partition(":")[2]


_declared: dict[str, Kernel] = {}


def function_name(function: Any) -> str:
    function = getattr(function, "fn", function)
    return f"{function.__module__.removeprefix('moe_core.ops.')}:{function.__name__}"


def declare_kernel(
    function: Any,
    *,
    pdl: Literal["start", "layout", "tail"] | None = None,
    writes_layout: bool = False,
    whole_multiprocessor: bool = False,
    counts_slots: bool = False,
    prepacked_weight: str | None = None,
) -> Kernel:
    name = function_name(function)
    kernel = Kernel(name, pdl, writes_layout, whole_multiprocessor, counts_slots, prepacked_weight)
    assert _declared.setdefault(name, kernel) == kernel, f"{name} is declared twice"
    return kernel


@functools.cache
def declared_kernels() -> Mapping[str, Kernel]:
    """All kernels by name. Imports every planner."""
    for path in sorted(_OPS.rglob("*.py")):
        if path.parent.name != "kernels" and not path.stem.endswith("kernel"):
            importlib.import_module(".".join(("moe_core.ops", *path.relative_to(_OPS).with_suffix("").parts)))
    return _declared


@plan_type
@dataclass(frozen=True)
class KernelLaunch:
    """One Triton launch, arguments in the kernel's order. dependent: under PDL, so its kernel waits."""

    kernel: Kernel
    grid: tuple[int, int, int]
    arguments: tuple[tuple[str, Argument], ...]
    num_warps: int = 4
    num_stages: int = 3
    dependent: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.kernel, Kernel):
            raise InvalidInput(f"kernel must be a Kernel, got {self.kernel!r}; declare one beside its planner")
        name, arguments = self.kernel.name, {name for name, _ in self.arguments}
        if ("PDL" in arguments) != (self.kernel.pdl is not None):
            raise InvalidInput(
                f"arguments of {name} must have PDL exactly if its Kernel says when it waits, got pdl="
                f"{self.kernel.pdl!r} and the arguments {', '.join(sorted(arguments))}; correct the one or the other"
            )
        if self.kernel.prepacked_weight not in {None, *arguments}:
            raise InvalidInput(
                f"arguments of {name} must have its prepacked weight {self.kernel.prepacked_weight!r}, got "
                f"{', '.join(sorted(arguments))}; correct its Kernel"
            )

    @property
    def pipeline_stages(self) -> int:
        stages = dict(self.arguments).get("STAGES")
        return stages.value if isinstance(stages, Constant) and isinstance(stages.value, int) else self.num_stages

    @property
    def tile(self) -> str:
        blocks = [(name, value) for name, value in self.arguments if name.startswith("BLOCK")]
        sides = [f"{name}={value.value}" for name, value in blocks if isinstance(value, Constant)]
        return ", ".join([*sides, f"{self.num_warps} warps, {self.pipeline_stages} stages"])


@plan_type
@dataclass(frozen=True)
class ReferenceCall:
    """One call of a NumPy twin. function: `"module:function"` under `moe_core.ops`.

    inputs: (keyword, buffer), one mapping for a twin with the parameter `arrays`; constants: (keyword, option);
    outputs: buffers of the results, in order.
    """

    function: str
    inputs: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, Any], ...]
    outputs: tuple[str, ...]


#: Sources below moe_core that decide results or sizes.
_SOURCES = ("ops/**/*.py", "runtime/compiler.py", "runtime/cuda.py", "plan/arena.py")


@functools.cache
def sources_version() -> str:
    digest = hashlib.sha256()
    root = pathlib.Path(__file__).parent.parent
    for pattern in _SOURCES:
        paths = sorted(root.glob(pattern))
        if not paths:
            raise RuntimeError(f"{root / pattern} must match the sources of plans, and matches no file; install again")
        for path in paths:
            digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


@plan_type
@dataclass(frozen=True, eq=False)
class LaunchPlan:
    """An executable plan. summation: one line per reduction, with its order. notes: decisions and rejected kernels.

    lent: outputs that may hold scratch before the first step that names them. over: (scratch buffer, the input or
    scratch buffer with its memory); the step that writes the first reads the second element by element.
    """

    name: str
    target: Target
    inputs: tuple[Buffer, ...]
    outputs: tuple[Buffer, ...]
    scratch: tuple[Buffer, ...]
    steps: tuple[KernelLaunch | ReferenceCall, ...]
    summation: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    lent: tuple[str, ...] = ()
    over: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        first = self.steps[0] if self.steps else None
        # The first launch waits for all that ran before the plan.
        assert not (isinstance(first, KernelLaunch) and first.dependent), "a plan's first launch must not be dependent"

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, LaunchPlan) and self.canonical == other.canonical)

    def __hash__(self) -> int:
        return hash(self.key)

    @property
    def canonical(self) -> str:
        return codec.dumps((FORMAT_VERSION, sources_version(), self))

    @functools.cached_property
    def key(self) -> str:
        """`KEY_LENGTH` characters. Equal plans have equal keys in every process."""
        digest = hashlib.sha256(self.canonical.encode()).digest()
        return base64.urlsafe_b64encode(digest).decode()[:KEY_LENGTH]

    @functools.cached_property
    def scratch_places(self) -> tuple[tuple[int, int], ...]:
        """(home, byte offset) of each scratch buffer. home: an index of inputs and outputs, their number: the arena."""
        index = {buffer.name: number for number, buffer in enumerate((*self.inputs, *self.outputs))}
        over = dict(self.over)
        sizes = [(buffer.name, buffer.spec.nbytes) for buffer in self.scratch if buffer.name not in over]
        steps = [{over.get(name, name) for name in _buffers(step)} for step in self.steps]
        outputs = [(buffer.name, buffer.spec.nbytes) for buffer in self.outputs if buffer.name in self.lent]
        lent = lend_memory(sizes, steps, outputs)
        placed = {name: (index[lender], offset) for name, (lender, offset) in lent.items()}
        rest = [size for size in sizes if size[0] not in lent]
        arena = zip(rest, place_buffers(rest, steps), strict=True)
        placed |= {name: (len(index), offset) for (name, _), offset in arena}
        placed |= {name: placed.get(other) or (index[other], 0) for name, other in self.over}
        return tuple(placed[buffer.name] for buffer in self.scratch)

    @functools.cached_property
    def scratch_bytes(self) -> int:
        """Bytes of the arena (uint8, 16-byte aligned) that the caller allocates."""
        number = len(self.inputs) + len(self.outputs)
        places = zip(self.scratch_places, self.scratch, strict=True)
        return max((offset + aligned(one.spec.nbytes) for (home, offset), one in places if home == number), default=0)

    @property
    def memory_note(self) -> str:
        """Text for a framework's out-of-memory error."""
        outputs = sum(buffer.spec.nbytes for buffer in self.outputs)
        return (
            f"{self.name} asked for {outputs} bytes for its outputs and {self.scratch_bytes} bytes of scratch memory; "
            "pass fewer tokens in one call"
        )

    def spec(self, name: str) -> ArraySpec:
        for buffer in (*self.inputs, *self.outputs, *self.scratch):
            if buffer.name == name:
                return buffer.spec
        raise KeyError(name)

    def explain(self) -> str:
        """Buffers, steps, decisions and summation orders as text."""
        lines = [f"{self.name} on {self.target}, key {self.key}, scratch {self.scratch_bytes} bytes"]
        for title, buffers in (("input", self.inputs), ("output", self.outputs)):
            lines += [f"  {title:7} {buffer.name}: {buffer.spec}" for buffer in buffers]
        homes = [*(f", in {buffer.name}" for buffer in (*self.inputs, *self.outputs)), ""]
        places = zip(self.scratch, self.scratch_places, strict=True)
        lines += [f"  scratch {buffer.name}: {buffer.spec}{homes[home]}" for buffer, (home, _) in places]
        for number, step in enumerate(self.steps):
            if isinstance(step, KernelLaunch):
                constants = ", ".join(f"{n}={a.value}" for n, a in step.arguments if isinstance(a, Constant))
                grid = "x".join(str(size) for size in step.grid)
                early = ", dependent" if step.dependent else ""
                lines.append(
                    f"  step {number}  {step.kernel.name} grid {grid}, {step.num_warps} warps, {step.pipeline_stages} "
                    f"stages{early}; {constants}"
                )
            else:
                lines.append(f"  step {number}  NumPy reference {step.function}")
        lines += [f"  sums    {line}" for line in self.summation]
        lines += [f"  note    {line}" for line in self.notes]
        return "\n".join(lines)


def _buffers(step: KernelLaunch | ReferenceCall) -> set[str]:
    if isinstance(step, ReferenceCall):
        return {*(buffer for _, buffer in step.inputs), *step.outputs}
    return {value.buffer for _, value in step.arguments if isinstance(value, Pointer | TensorMap)}


#: 6 bits each: too many for a collision by chance or by trying.
KEY_LENGTH = 21
