"""From a dispatcher operator to a prepared plan: one class, used by every operator.

Way of a call: public function -> operator (schema of tensors and one option string) -> plan, cached by the tensors'
metadata -> outputs and scratch from torch's allocator -> launch on the current stream. Metadata seen before is not
checked again. Gradients are not defined for any operator, so each refuses tensors that ask for one.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch._C import _AutoDispatchBelowAutograd  # pyright: ignore[reportAttributeAccessIssue]
from torch._C._functorch import peek_interpreter_stack  # pyright: ignore[reportMissingImports]
from torch.autograd import forward_ad

from moe_core.arrays import ALIGNMENT, ArraySpec
from moe_core.errors import InvalidInput, Unsupported
from moe_core.plan import LaunchPlan
from moe_core.runtime import Prepared, prepare, target_of
from moe_core.target import Target, cpu_target
from moe_torch.options import DTYPE_NAMES, TORCH_DTYPES, decode

#: The namespace of every operator; kept for the life of the process, as its registrations are.
LIBRARY = torch.library.Library("moebius", "DEF")
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)
#: Plans one operator remembers; the oldest is forgotten first.
_CACHE_LIMIT = 4096

#: shapes(*tensors, *options) -> (shape, dtype) of every output; sizes may be symbolic.
Shapes = Callable[..., Sequence[tuple[tuple[Any, ...], torch.dtype]]]


class _Entry(NamedTuple):
    """A prepared plan: which arguments it reads, what to allocate, and where."""

    prepared: Prepared
    selection: tuple[int, ...]
    outputs: tuple[tuple[tuple[int, ...], torch.dtype], ...]
    scratch_bytes: int
    device: torch.device


def _raw_stream_getter() -> Callable[[int], int]:
    """`device index -> address of the current stream`; torch's unwrapped getter where the build has one."""
    getter = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    return getter or (lambda index: torch.cuda.current_stream(index).cuda_stream)


_raw_stream = _raw_stream_getter()


def array_spec(name: str, tensor: Any) -> ArraySpec:
    """The spec of a tensor; symbolic sizes count as their hints. Raises InvalidInput for what is no dense tensor."""
    if not isinstance(tensor, torch.Tensor):
        raise InvalidInput(
            f"{name} must be a torch.Tensor, got {type(tensor).__name__}; convert it with moe_torch.from_dlpack"
        )
    if tensor.layout != torch.strided:
        raise InvalidInput(f"{name} must be a dense tensor, got layout {tensor.layout}; call to_dense() on it")
    if tensor.dtype not in DTYPE_NAMES:
        raise InvalidInput(f"{name} must have a dtype among {', '.join(TORCH_DTYPES)}, got {tensor.dtype}; cast it")
    sizes, strides = [_hint(size) for size in tensor.shape], [_hint(step) for step in tensor.stride()]
    return ArraySpec(tuple(sizes), DTYPE_NAMES[tensor.dtype], tuple(strides))


class _NoHintError(Exception):
    """A symbolic size without an example value."""


def _hint(size: int | torch.SymInt) -> int:
    """The example value behind a symbolic size, without guarding on it."""
    if not isinstance(size, torch.SymInt):
        return size
    if not size.node.has_hint():
        raise _NoHintError
    return int(size.node.hint)


def require_one_device(named: Sequence[tuple[str, torch.Tensor]]) -> torch.device:
    """The device of all tensors; raises InvalidInput that names the first one elsewhere."""
    first, device = named[0][0], named[0][1].device
    for name, tensor in named[1:]:
        if tensor.device != device:
            raise InvalidInput(
                f"{name} must be on {device} like {first}, got {tensor.device}; move it with .to({str(device)!r})"
            )
    return device


def target_of_device(device: torch.device) -> Target:
    """The target for tensors on a CPU or CUDA device; others raise Unsupported."""
    return target_of((device.type, device.index or 0))


def _refuse_gradient(name: str) -> NoReturn:
    raise Unsupported(
        f"{name} requires a gradient, and the operators of moe_torch define none; call them under torch.no_grad() or "
        f"pass {name}.detach()"
    )


def _has_tangent(tensor: torch.Tensor) -> bool:
    return forward_ad._current_level >= 0 and forward_ad.unpack_dual(tensor).tangent is not None


class Operator:
    """One operator of the namespace `moebius`.

    schema: tensors first, then `str options`, as in `scale_rows(Tensor x, Tensor weights, str options) -> Tensor`.
    plan(*specs, *options, target): the plan, from ArraySpecs (None for absent tensors). shapes(*tensors, *options):
    shape and dtype of every output. bundles: prefixes of schema names that stand for a bundle (`experts_down` is shown
    and planned as `experts.down`).
    """

    def __init__(
        self, schema: str, plan: Callable[..., LaunchPlan], shapes: Shapes, bundles: tuple[str, ...] = ()
    ) -> None:
        LIBRARY.define(schema, tags=_TAGS)
        self.name = schema.partition("(")[0]
        packet, _, overload = self.name.partition(".")
        self.overload = getattr(getattr(torch.ops.moebius, packet), overload or "default")
        arguments = [argument.name for argument in self.overload._schema.arguments]
        assert arguments[-1] == "options", schema
        self.count = len(arguments) - 1
        self.names = tuple(_shown(name, bundles) for name in arguments[:-1])
        self._single = len(self.overload._schema.returns) == 1
        self._plan, self._shapes = plan, shapes
        self._cache: dict[Any, _Entry] = {}
        self._lock = threading.Lock()
        LIBRARY.impl(self.name, self._run_on_cpu, "CPU")
        LIBRARY.impl(self.name, self._run_on_cuda, "CUDA")
        LIBRARY.impl(self.name, self._refuse_gradients, "Autograd")
        LIBRARY.impl(self.name, self._refuse_backend, "CompositeExplicitAutograd")
        torch.library.register_fake(f"moebius::{self.name}", self._infer, lib=LIBRARY)

    def __call__(self, *arguments: Any) -> Any:
        """Call the operator from eager code.

        Gradients are refused here, so that the dispatcher can skip its autograd layer: half the time of a call. Under
        functional transforms and forward-mode differentiation only that layer knows, so it is not skipped.
        """
        if peek_interpreter_stack() is not None or forward_ad._current_level >= 0:
            return self.overload(*arguments)
        try:
            if torch.is_grad_enabled():
                for name, tensor in zip(self.names, arguments, strict=False):
                    if tensor is not None and tensor.requires_grad:
                        _refuse_gradient(name)
            with _AutoDispatchBelowAutograd():
                return self.overload(*arguments)
        except (AttributeError, RuntimeError):
            # The dispatcher's own complaint about a foreign array names neither our argument nor the fix.
            for name, tensor in zip(self.names, arguments, strict=False):
                if tensor is not None:
                    array_spec(name, tensor)
            raise

    def plan(self, tensors: Sequence[Any], options: str, target: Target) -> LaunchPlan:
        """The plan for tensors (None where absent), each input's spec compared with what was planned."""
        specs = [
            None if tensor is None else array_spec(name, tensor)
            for name, tensor in zip(self.names, tensors, strict=True)
        ]
        plan = self._plan(*specs, *decode(options), target)
        given = dict(zip(self.names, specs, strict=True))
        # The planner derives the arrays of a layout from its sizes and has not seen the ones given.
        for buffer in plan.inputs:
            if given[buffer.name] != buffer.spec:
                raise InvalidInput(
                    f"{buffer.name} must be {buffer.spec}, got {given[buffer.name]}; pass the layout's own array"
                )
        return plan

    def _run_on_cpu(self, *arguments: Any) -> Any:
        return self._run(arguments, cpu_target(), 0)

    def _run_on_cuda(self, *arguments: Any) -> Any:
        return self._run(arguments, None, None)

    def _run(self, arguments: tuple[Any, ...], target: Target | None, stream: int | None) -> Any:
        count = self.count
        key = (
            target,
            arguments[count],
            *[
                None if tensor is None else (tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
                for tensor in arguments[:count]
            ],
        )
        entry = self._cache.get(key) or self._prepare(key, arguments)
        prepared, selection, specs, scratch_bytes, device = entry
        outputs = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in specs]
        pointers = [arguments[index].data_ptr() for index in selection]
        pointers += [tensor.data_ptr() for tensor in outputs]
        if scratch_bytes:
            # Freed when this returns: torch reuses it in stream order, behind the launches that read it.
            scratch = torch.empty(scratch_bytes, dtype=torch.uint8, device=device)
            pointers.append(scratch.data_ptr())
        try:
            prepared(pointers, _raw_stream(device.index) if stream is None else stream)
        except InvalidInput:
            self._require_alignment(arguments)
            raise
        return outputs[0] if self._single else tuple(outputs)

    def _prepare(self, key: Any, arguments: tuple[Any, ...]) -> _Entry:
        *tensors, options = arguments
        device = require_one_device(self._present(tensors))
        plan = self.plan(tensors, options, target_of_device(device))
        index = {name: position for position, name in enumerate(self.names)}
        entry = _Entry(
            prepare(plan, device.index or 0),
            tuple(index[buffer.name] for buffer in plan.inputs),
            tuple((buffer.spec.shape, TORCH_DTYPES[buffer.spec.dtype]) for buffer in plan.outputs),
            plan.scratch_bytes,
            device,
        )
        with self._lock:
            while len(self._cache) >= _CACHE_LIMIT:
                del self._cache[next(iter(self._cache))]
            self._cache[key] = entry
        return entry

    def _present(self, tensors: Sequence[Any]) -> list[tuple[str, torch.Tensor]]:
        return [(name, tensor) for name, tensor in zip(self.names, tensors, strict=True) if tensor is not None]

    def _require_alignment(self, arguments: tuple[Any, ...]) -> None:
        for name, tensor in self._present(arguments[:-1]):
            if tensor.data_ptr() % ALIGNMENT:
                raise InvalidInput(
                    f"{name} must start at a multiple of {ALIGNMENT} bytes, got address {tensor.data_ptr():#x} "
                    f"(storage offset {tensor.storage_offset()}); clone() it"
                )

    def _infer(self, *arguments: Any) -> Any:
        """Fake and meta tensors: the outputs' shapes. What the planner refuses is refused here too.

        Sizes nobody knows yet (unbacked) cannot be planned with; the operator checks them when it runs.
        """
        *tensors, options = arguments
        device = require_one_device(self._present(tensors))
        with contextlib.suppress(_NoHintError):
            self.plan(tensors, options, Target("reference"))
        shapes = self._shapes(*tensors, *decode(options))
        outputs = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in shapes]
        return outputs[0] if self._single else tuple(outputs)

    def _refuse_gradients(self, *arguments: Any) -> Any:
        """The autograd layer: refuse a tensor that asks for a gradient, else call the layer below."""
        for name, tensor in self._present(arguments[:-1]):
            if (torch.is_grad_enabled() and tensor.requires_grad) or _has_tangent(tensor):
                _refuse_gradient(name)
        with _AutoDispatchBelowAutograd():
            return self.overload(*arguments)

    def _refuse_backend(self, *arguments: Any) -> NoReturn:
        """Every backend without a kernel of its own: sparse and quantised tensors, other devices; no tensor at all."""
        for name, tensor in self._present(arguments[:-1]):
            array_spec(name, tensor)
            target_of_device(tensor.device)
        if arguments[0] is None:
            raise InvalidInput(f"{self.names[0]} must be a torch.Tensor, got None; pass the tensor")
        raise Unsupported(
            f"{self.name} takes ordinary CPU and CUDA tensors, got {type(arguments[0]).__name__}; convert it"
        )


def _shown(name: str, bundles: tuple[str, ...]) -> str:
    for prefix in bundles:
        if name.startswith(f"{prefix}_"):
            return f"{prefix}.{name.removeprefix(f'{prefix}_')}"
    return name


def call(operator: Operator, *arguments: Any) -> Any:
    """Call an operator: from traced code straight, so that its graph shows it; from eager code through `Operator`."""
    if torch.compiler.is_compiling():
        return operator.overload(*arguments)
    return operator(*arguments)
