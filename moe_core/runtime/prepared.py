"""Plans that are ready to run, and those for CPUs."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import inspect
import operator
from collections.abc import Callable, Sequence

from moe_core.base.arrays import ALIGNMENT, host_view
from moe_core.base.floats import exact_denormals
from moe_core.base.memory import LEAST_BYTES, prefer_huge_pages
from moe_core.base.threads import one_blas_thread
from moe_core.errors import InvalidInput
from moe_core.plan.steps import Constant, KernelLaunch, LaunchPlan, Pointer, ReferenceCall
from moe_core.runtime.compiler import load_kernel, require_parameters


class Prepared:
    """A plan ready to run on one device. steps: a slice of the plan's steps, None for all.

    `prepared(pointers, stream)`: addresses of inputs and outputs in plan order, then of the scratch arena if
    `plan.scratch_bytes` is not 0, each a multiple of 16 (InvalidInput names the buffer).
    """

    def __init__(self, plan: LaunchPlan, device_index: int) -> None:
        self.plan, self.device_index = plan, device_index
        self._names = [buffer.name for buffer in (*plan.inputs, *plan.outputs)]
        self._count = len(self._names)
        self._places, self._scratch_bytes = plan.scratch_places, plan.scratch_bytes
        self._index = {name: index for index, name in enumerate(self._names)}
        self._index |= {buffer.name: index for index, buffer in enumerate(plan.scratch, self._count + 1)}

    def __call__(self, pointers: Sequence[int], stream: int = 0, steps: slice | None = None) -> None:
        if functools.reduce(operator.or_, pointers, 0) % ALIGNMENT:
            self._refuse_misaligned(pointers)
        if 0 in pointers:
            self._refuse_missing(pointers)
        self._run(pointers, stream, steps or slice(None))

    def _refuse_misaligned(self, pointers: Sequence[int]) -> None:
        for name, pointer in zip([*self._names, "scratch"], pointers, strict=False):
            if pointer % ALIGNMENT:
                raise InvalidInput(
                    f"{name} must start at a multiple of {ALIGNMENT} bytes, got address {pointer:#x}; "
                    "copy it into a fresh array"
                )

    def _refuse_missing(self, pointers: Sequence[int]) -> None:
        for buffer, pointer in zip((*self.plan.inputs, *self.plan.outputs), pointers, strict=False):
            if not pointer and buffer.spec.size:
                raise InvalidInput(
                    f"{buffer.name} must have memory for {buffer.spec}, got a null address, as of a storage emptied by "
                    "resize_(0); allocate it again before the call"
                )

    def _run(self, pointers: Sequence[int], stream: int, steps: slice) -> None:
        raise NotImplementedError


class HostPrepared(Prepared):
    """Interpreted kernels and NumPy twins. Host work is in order, so the stream is ignored."""

    def __init__(self, plan: LaunchPlan, device_index: int) -> None:
        super().__init__(plan, device_index)
        outputs = enumerate(plan.outputs, len(plan.inputs))
        sizes = [*((index, buffer.spec.nbytes) for index, buffer in outputs), (self._count, self._scratch_bytes)]
        self._large = [(index, size) for index, size in sizes if size >= LEAST_BYTES]
        self._has_twins = any(isinstance(step, ReferenceCall) for step in plan.steps)
        self._calls = [
            self._kernel(step) if isinstance(step, KernelLaunch) else self._reference(step) for step in plan.steps
        ]

    def _kernel(self, step: KernelLaunch) -> Callable[[list[int]], None]:
        from moe_core.runtime import interpreter

        interpreter.install()
        kernel = load_kernel(step.kernel.name)
        require_parameters(step.kernel.name, kernel, [name for name, _ in step.arguments])
        buffers = [(name, value.buffer) for name, value in step.arguments if isinstance(value, Pointer)]
        pointers = [(name, self._index[buffer], self.plan.spec(buffer).dtype) for name, buffer in buffers]
        fixed = {name: value.value if isinstance(value, Constant) else value for name, value in step.arguments}

        def call(addresses: list[int]) -> None:
            host_pointers = {name: interpreter.HostPointer(addresses[index], dtype) for name, index, dtype in pointers}
            interpreter.launch(kernel, step.grid, list((fixed | host_pointers).items()))

        return call

    def _reference(self, step: ReferenceCall) -> Callable[[list[int]], None]:
        function, constants = load_kernel(step.function), dict(step.constants)
        parameters = inspect.signature(function).parameters
        inputs = [(keyword, self._index[buffer], host_view(self.plan.spec(buffer))) for keyword, buffer in step.inputs]
        outputs = [(self._index[buffer], host_view(self.plan.spec(buffer))) for buffer in step.outputs]

        def call(addresses: list[int]) -> None:
            places = tuple([view(addresses[index]) for index, view in outputs])
            inputs_by_name = {keyword: view(addresses[index]) for keyword, index, view in inputs}
            inputs_by_name = {"arrays": inputs_by_name} if "arrays" in parameters else inputs_by_name
            memory = {"places": places} if "places" in parameters else {}
            results = function(**inputs_by_name, **memory, **constants)
            results = results if isinstance(results, tuple) else (results,)
            for destination, result in zip(places, results, strict=True):
                if result is not destination:
                    destination[...] = result

        return call

    def _run(self, pointers: Sequence[int], stream: int, steps: slice) -> None:
        addressed = [*pointers, 0][: self._count + 1]
        addresses = [*addressed, *[addressed[home] + offset for home, offset in self._places]]
        for index, size in self._large:
            prefer_huge_pages(pointers[index], size)
        # NumPy's error state belongs to the context, and an interrupt may leave it changed.
        try:
            contextvars.copy_context().run(self._compute, addresses, steps)
        except MemoryError as error:
            reason = f"{self.plan.name} found no memory on the CPU ({error}); pass fewer tokens in one call"
            raise MemoryError(reason) from error

    def _compute(self, addresses: list[int], steps: slice) -> None:
        with exact_denormals(), one_blas_thread() if self._has_twins else contextlib.nullcontext():
            for call in self._calls[steps]:
                call(addresses)
