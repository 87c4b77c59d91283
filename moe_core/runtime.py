"""Runs plans on borrowed buffers: compiled kernels on a CUDA stream, interpreted kernels or NumPy twins on a CPU.

Nothing here allocates device memory, copies, synchronises or keeps an array alive. Launches go through the CUDA driver
with parameter blocks built once per plan, device and thread, so that a run costs one address write per buffer and one
driver call per kernel.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import operator
import struct
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from moe_core import dtypes
from moe_core.arrays import ALIGNMENT, TensorView, host_array
from moe_core.compiler import compile_launch, load_kernel
from moe_core.cuda import DEPENDENT_LAUNCH, LaunchConfig, cuda_target, driver
from moe_core.errors import InvalidInput, Unsupported
from moe_core.plan import Constant, KernelLaunch, LaunchPlan, Pointer, ReferenceCall, TensorMap
from moe_core.target import Target, cpu_target
from moe_core.tensor_map import HostTensorMap

_SCALARS = {"int32": ctypes.c_int32, "int64": ctypes.c_int64, "float32": ctypes.c_float}
_WARP = 32
_POINTER_BYTES = 8
#: Prepared plans that `prepare` remembers, oldest forgotten first; callers that hold one keep it.
_PREPARED_LIMIT = 4096


def target_of(device: tuple[str, int]) -> Target:
    """The target for arrays on a device: `("cpu", 0)` or `("cuda", index)`. Other kinds raise Unsupported."""
    kind, index = device
    if kind == "cpu":
        return cpu_target()
    if kind == "cuda":
        return cuda_target(index)
    raise Unsupported(f"arrays must be on a CPU or a CUDA device, got {kind!r}; move them there")


class Prepared:
    """A plan ready to run on one device: call it with addresses.

    `prepared(pointers, stream)`: addresses of the inputs and outputs in plan order, then of the scratch arena if
    `plan.scratch_bytes` is not 0. Every address must be a multiple of 16 (InvalidInput names the buffer).
    """

    def __init__(self, plan: LaunchPlan, device_index: int) -> None:
        self.plan, self.device_index = plan, device_index
        self._names = [buffer.name for buffer in (*plan.inputs, *plan.outputs)]
        self._count = len(self._names)
        self._offsets, self._scratch_bytes = plan.scratch_offsets, plan.scratch_bytes
        self._index = {
            name: index for index, name in enumerate([*self._names, *(buffer.name for buffer in plan.scratch)])
        }

    def __call__(self, pointers: Sequence[int], stream: int = 0) -> None:
        if functools.reduce(operator.or_, pointers, 0) % ALIGNMENT:
            self._refuse_misaligned(pointers)
        self._run(pointers, stream)

    def _refuse_misaligned(self, pointers: Sequence[int]) -> None:
        for name, pointer in zip([*self._names, "scratch"], pointers, strict=False):
            if pointer % ALIGNMENT:
                raise InvalidInput(
                    f"{name} must start at a multiple of {ALIGNMENT} bytes, got address {pointer:#x}; "
                    "copy it into a fresh array"
                )

    def _scratch_addresses(self, arena: int) -> list[int]:
        """The address of every scratch buffer in an arena."""
        return [arena + offset for offset in self._offsets]

    def _run(self, pointers: Sequence[int], stream: int) -> None:
        raise NotImplementedError


class _ParameterBlocks:
    """One thread's launch data: an address array and, per step, the arguments of its driver call.

    addresses: of inputs, outputs and scratch buffers, where the parameter lists point. Arena and stream stay written
    from call to call, since torch's allocator and a model mostly bring the same ones again.
    """

    def __init__(
        self, plan: LaunchPlan, steps: Sequence[KernelLaunch], kernels: Sequence[Any], index: Mapping[str, int]
    ) -> None:
        self.addresses = (ctypes.c_uint64 * len(index))()
        self.current = ctypes.c_void_p()
        self.current_reference = ctypes.byref(self.current)
        self.arena: int | None = None
        self.stream: int | None = None
        self.configs: list[LaunchConfig] = []
        self.launches: list[tuple[Any, ...]] = []
        self.maps: list[HostTensorMap] = []
        self._keep: list[Any] = []
        base = ctypes.addressof(self.addresses)
        for step, (function, shared, num_warps) in zip(steps, kernels, strict=True):
            entries: list[int] = []
            for _, value in step.arguments:
                if isinstance(value, Pointer):
                    entries.append(base + _POINTER_BYTES * index[value.buffer])
                elif isinstance(value, TensorMap):
                    tensor_map = HostTensorMap(value, plan.spec(value.buffer).dtype, index[value.buffer])
                    self.maps.append(tensor_map)
                    entries += tensor_map.entries
                elif not isinstance(value, Constant):
                    holder = _SCALARS[value.dtype](value.value)
                    self._keep.append(holder)
                    entries.append(ctypes.addressof(holder))
            # Triton appends two scratch pointers of its own to every kernel; our kernels use neither.
            null = ctypes.c_void_p()
            entries += [ctypes.addressof(null)] * 2
            parameters = (ctypes.c_void_p * len(entries))(*entries)
            config = LaunchConfig(*step.grid, _WARP * num_warps, 1, 1, shared, None, None, 0)
            if step.dependent:
                config.attributes, config.num_attributes = ctypes.addressof(DEPENDENT_LAUNCH), 1
            self._keep += [null, parameters]
            self.configs.append(config)
            self.launches.append((ctypes.byref(config), function, ctypes.byref(parameters), None))

    def use_stream(self, stream: int) -> None:
        """Launch on this stream from now on; interrupted half way, the next call writes it again."""
        self.stream = None
        for config in self.configs:
            config.stream = stream
        self.stream = stream


class _CudaPrepared(Prepared):
    """Compiled kernels, loaded on the device when made."""

    def __init__(self, plan: LaunchPlan, device_index: int) -> None:
        super().__init__(plan, device_index)
        self._driver = driver()
        device = cuda_target(device_index)
        if device.arch != plan.target.arch:
            raise InvalidInput(
                f"plan must be made for {device} to run on cuda device {device_index}, got one for {plan.target}; "
                "plan for runtime.target_of(('cuda', index))"
            )
        self._context = self._driver.context(device_index).value
        self._steps = [step for step in plan.steps if isinstance(step, KernelLaunch)]
        self._kernels = [_load(compile_launch(plan, step, plan.target), device_index) for step in self._steps]
        self._local = threading.local()
        # Packing in one call is faster than assigning to a ctypes array, which converts item by item.
        self._pack = struct.Struct(f"{self._count}Q").pack_into
        self._pack_scratch = struct.Struct(f"{len(self._offsets)}Q").pack_into

    def _run(self, pointers: Sequence[int], stream: int) -> None:
        try:
            blocks = self._local.blocks
        except AttributeError:
            blocks = self._local.blocks = _ParameterBlocks(self.plan, self._steps, self._kernels, self._index)
        code = self._driver.lib.cuCtxGetCurrent(blocks.current_reference)
        if code:
            self._driver.check(code, "cuCtxGetCurrent")
        if blocks.current.value != self._context:
            with self._driver.activate(self.device_index):
                self._launch(blocks, pointers, stream)
        else:
            self._launch(blocks, pointers, stream)

    def _launch(self, blocks: _ParameterBlocks, pointers: Sequence[int], stream: int) -> None:
        if self._scratch_bytes:
            *pointers, arena = pointers
            if arena != blocks.arena:
                # Forgotten first: interrupted half way, the next call writes the addresses again.
                blocks.arena = None
                self._pack_scratch(blocks.addresses, _POINTER_BYTES * self._count, *self._scratch_addresses(arena))
                blocks.arena = arena
        self._pack(blocks.addresses, 0, *pointers)
        for tensor_map in blocks.maps:
            address = blocks.addresses[tensor_map.index]
            if address != tensor_map.address:
                tensor_map.point_at(address)
        if stream != blocks.stream:
            blocks.use_stream(stream)
        launch = self._driver.launch
        for arguments in blocks.launches:
            code = launch(*arguments)
            if code:
                step = self._steps[blocks.launches.index(arguments)]
                self._driver.check(code, f"launching {step.kernel}")


@functools.cache
def _load_cached(key: Any, device_index: int) -> Any:
    compiled = key.compiled
    metadata = compiled.metadata
    function = driver().load(compiled.asm["cubin"], metadata.name, metadata.shared, device_index)
    # Specialised kernels run more warps than they were asked for.
    return function, metadata.shared, metadata.num_warps


class _ByIdentity:
    """Hashes a compiled kernel by identity, for the cache of loaded functions."""

    def __init__(self, compiled: Any) -> None:
        self.compiled = compiled

    def __hash__(self) -> int:
        return id(self.compiled)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _ByIdentity) and other.compiled is self.compiled


def _load(compiled: Any, device_index: int) -> Any:
    """(function, shared bytes, warps) of a compiled kernel on a device, loaded once."""
    return _load_cached(_ByIdentity(compiled), device_index)


class _HostPrepared(Prepared):
    """Interpreted kernels and NumPy twins, on host memory; `stream` is ignored because host work is in order."""

    def __init__(self, plan: LaunchPlan, device_index: int) -> None:
        super().__init__(plan, device_index)
        self._calls = [
            self._kernel(step) if isinstance(step, KernelLaunch) else self._reference(step) for step in plan.steps
        ]

    def _kernel(self, step: KernelLaunch) -> Callable[[list[int]], None]:
        from moe_core import interpreter

        interpreter.install()
        kernel = load_kernel(step.kernel)

        def call(addresses: list[int]) -> None:
            arguments = [
                (
                    name,
                    interpreter.HostPointer(addresses[self._index[value.buffer]], self.plan.spec(value.buffer).dtype),
                )
                if isinstance(value, Pointer)
                else (name, value.value if isinstance(value, Constant) else value)
                for name, value in step.arguments
            ]
            interpreter.launch(kernel, step.grid, arguments)

        return call

    def _reference(self, step: ReferenceCall) -> Callable[[list[int]], None]:
        module, name = step.function.split(":")
        function = getattr(importlib.import_module(f"moe_core.reference.{module}"), name)
        constants = dict(step.constants)

        def call(addresses: list[int]) -> None:
            def view(buffer: str) -> Any:
                return host_array(addresses[self._index[buffer]], self.plan.spec(buffer))

            results = function(**{keyword: view(buffer) for keyword, buffer in step.inputs}, **constants)
            results = results if isinstance(results, tuple) else (results,)
            for buffer, result in zip(step.outputs, results, strict=True):
                view(buffer)[...] = result

        return call

    def _run(self, pointers: Sequence[int], stream: int) -> None:
        arena = pointers[self._count] if self._scratch_bytes else 0
        addresses = [*pointers[: self._count], *self._scratch_addresses(arena)]
        for call in self._calls:
            call(addresses)


_prepared: dict[tuple[LaunchPlan, int], Prepared] = {}
_prepared_lock = threading.RLock()


def prepare(plan: LaunchPlan, device_index: int = 0) -> Prepared:
    """Compile and load everything a plan needs on a device; cached, so that later calls cost one look-up."""
    prepared = _prepared.get((plan, device_index))
    if prepared is None:
        with _prepared_lock:
            prepared = _prepared.get((plan, device_index))
            if prepared is None:
                while len(_prepared) >= _PREPARED_LIMIT:
                    del _prepared[next(iter(_prepared))]
                kind = _CudaPrepared if plan.target.kind == "cuda" else _HostPrepared
                prepared = _prepared[(plan, device_index)] = kind(plan, device_index)
    return prepared


def run(plan: LaunchPlan, views: Mapping[str, TensorView], stream: int = 0) -> None:
    """Run a plan on views, checked: the core's public entrance.

    views: one per input and output by name, and `scratch` (uint8 `[plan.scratch_bytes]`) if the plan needs any. Raises
    InvalidInput for a missing or unknown view, or one whose spec, device or alignment is not the plan's.
    """
    names = [buffer.name for buffer in (*plan.inputs, *plan.outputs)] + (["scratch"] if plan.scratch_bytes else [])
    unknown, missing = sorted(set(views) - set(names)), [name for name in names if name not in views]
    if unknown or missing:
        raise InvalidInput(
            f"views must be exactly {', '.join(names)}, got {', '.join(sorted(views))}; add or remove the others"
        )
    device = views[names[0]].device if names else ("cpu", 0)
    kind = "cuda" if plan.target.kind == "cuda" else "cpu"
    readable = {buffer.name for buffer in plan.inputs}
    for name in names:
        view = views[name]
        if view.device != device or view.device[0] != kind:
            raise InvalidInput(f"{name} must be on the same {kind} device as the others, got {view.device}; move it")
        if name == "scratch":
            if view.spec.nbytes < plan.scratch_bytes or not view.spec.is_contiguous:
                raise InvalidInput(
                    f"scratch must be at least {plan.scratch_bytes} contiguous bytes, got {view.spec}; allocate more"
                )
        elif view.spec != plan.spec(name):
            raise InvalidInput(f"{name} must be {plan.spec(name)} as planned, got {view.spec}; make a plan for it")
        if view.read_only and name not in readable:
            raise InvalidInput(f"{name} is written to, got a read-only array; pass a writable one")
    _refuse_overlap(views, [buffer.name for buffer in plan.inputs], names)
    prepare(plan, device[1])([views[name].pointer for name in names], stream)


def _refuse_overlap(views: Mapping[str, TensorView], inputs: Sequence[str], names: Sequence[str]) -> None:
    """Raise InvalidInput where an output or the scratch shares memory with another view; inputs may share theirs."""
    end, owner, owner_written = 0, "", False
    for name in sorted(names, key=lambda name: views[name].pointer):
        view, written = views[name], name not in inputs
        if view.spec.size == 0:
            continue
        if view.pointer < end and (written or owner_written):
            raise InvalidInput(
                f"{name} must not share memory with {owner}, got {view.pointer:#x} before its end {end:#x}; "
                "give every output memory of its own"
            )
        last = view.pointer + _span_bytes(view)
        if last > end:
            end, owner, owner_written = last, name, written


def _span_bytes(view: TensorView) -> int:
    """Bytes from a view's first element to the end of its last one."""
    steps = zip(view.spec.shape, view.spec.stride, strict=True)
    return (sum((size - 1) * max(step, 0) for size, step in steps) + 1) * dtypes.itemsize(view.spec.dtype)
