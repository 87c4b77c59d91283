"""What the CUDA engine hands to the driver, seen by a driver that is none: addresses, streams, contexts, errors."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import itertools
import sys
import threading
from collections.abc import Callable
from types import FrameType, SimpleNamespace
from typing import Any, NamedTuple

import pytest

from moe_core.base.arrays import ArraySpec
from moe_core.base.recent import Recent
from moe_core.base.target import Target
from moe_core.errors import InvalidInput
from moe_core.ops.reduction.rowwise import CAST_ROWS
from moe_core.plan.builder import PlanBuilder
from moe_core.plan.steps import Constant, KernelLaunch, LaunchPlan, Pointer, Scalar
from moe_core.runtime import cuda
from moe_core.runtime import prepare as prepares
from moe_core.runtime.cuda import CudaPrepared, Driver, LaunchAttribute

TARGET = Target("cuda", 90, 132)
CONTEXT, ROWS, FAILURE = 0x7000, 64, 700
X, Y, OTHER_Y = 0x10000, 0x20000, 0x30000
ARENA, OTHER_ARENA = 0x100000, 0x200000


class Seen(NamedTuple):
    """One launch: its kernel's number, pointers and count, and where it went."""

    kernel: int
    pointers: tuple[int, ...]
    count: int
    grid: int
    stream: int
    context: int


class FakeDriver(Driver):
    """Records launches as a real driver would read them: from memory, when called. Contexts are numbers, None = 0."""

    def __init__(self) -> None:
        self.launches: list[Seen] = []
        self.attributes: list[tuple[tuple[int, int], ...]] = []
        self.current = CONTEXT
        self.contexts_made_current: list[int] = []
        self.fail_at: int | None = None
        #: Codes that the next loads give, and how many modules are loaded.
        self.load_codes: list[int] = []
        self.loaded = 0
        self.lib: Any = SimpleNamespace(
            cuCtxGetCurrent=self.get_context, cuCtxSetCurrent=self._set_current, cuGetErrorString=self._explain,
            cuModuleLoadData=self._load_module, cuModuleGetFunction=self._find, cuModuleUnload=self._unload,
        )  # fmt: skip

    def get_context(self, reference: Any) -> int:
        reference._obj.value = self.current
        return 0

    def _set_current(self, context: ctypes.c_void_p) -> int:
        self.current = context.value or 0
        self.contexts_made_current.append(self.current)
        return 0

    def _explain(self, code: int, reference: Any) -> int:
        reference._obj.value = {2: b"out of memory", 200: b"device kernel image is invalid"}.get(code)
        return 0

    def _load_module(self, reference: Any, cubin: bytes) -> int:
        assert self.current == CONTEXT
        code = self.load_codes.pop(0) if self.load_codes else 0
        self.loaded += not code
        return code

    def _find(self, reference: Any, module: ctypes.c_void_p, name: bytes) -> int:
        reference._obj.value = int(name.decode().removeprefix("kernel_"))
        return self.load_codes.pop(0) if self.load_codes else 0

    def _unload(self, module: ctypes.c_void_p) -> int:
        self.loaded -= 1
        return 0

    def context(self, device_index: int) -> ctypes.c_void_p:
        return ctypes.c_void_p(CONTEXT)

    def launch(self, config: Any, function: Any, parameters: Any, extra: None) -> int:
        if self.fail_at == function.value:
            return FAILURE
        config, entries = config._obj, list(parameters._obj)
        # Two pointers and a count, then the two that Triton adds.
        assert len(entries) == 5 and all(ctypes.c_uint64.from_address(entry).value == 0 for entry in entries[3:])
        pointers = tuple(ctypes.c_uint64.from_address(entry).value for entry in entries[:2])
        count = ctypes.c_int32.from_address(entries[2]).value
        stream = config.stream or 0
        found = (LaunchAttribute * config.num_attributes).from_address(config.attributes or 0)
        self.attributes.append(tuple((attribute.id, attribute.value) for attribute in found))
        self.launches.append(Seen(function.value, pointers, count, config.grid_x, stream, self.current))
        return 0


def chain_plan(with_scratch: bool = True) -> LaunchPlan:
    """x -> y, by way of two scratch buffers if wanted."""
    builder = PlanBuilder("chain", TARGET)
    spec = ArraySpec((ROWS,), "float32")
    names = [builder.input("x", spec), builder.output("y", spec)]
    if with_scratch:
        names[1:1] = [builder.scratch("first", spec), builder.scratch("second", spec)]
    for number, (source, result) in enumerate(itertools.pairwise(names)):
        arguments = {
            "source": Pointer(source), "result": Pointer(result), "count": Scalar(ROWS + number), "WIDTH": Constant(8)
        }  # fmt: skip
        builder.launch(CAST_ROWS, (number + 1,), arguments)
    return builder.build()


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    driver, numbers = FakeDriver(), itertools.count(1)

    class Compiled:
        def __init__(self, plan: LaunchPlan, step: KernelLaunch, target: Target) -> None:
            self.metadata = SimpleNamespace(name=f"kernel_{next(numbers)}", shared=0, num_warps=4)
            self.asm = {"cubin": b""}

    monkeypatch.setattr(cuda, "driver", lambda: driver)
    monkeypatch.setattr(cuda, "cuda_target", lambda index: TARGET)
    monkeypatch.setattr(cuda, "compile_launch", functools.cache(Compiled))
    monkeypatch.setattr(cuda, "_load", functools.cache(cuda._load.__wrapped__))
    return driver


def expected(x: int, y: int, arena: int, stream: int) -> list[Seen]:
    """What the chain launches; scratch buffers start at multiples of 256 bytes."""
    first, second = arena, arena + 256
    return [
        Seen(1, (x, first), ROWS, 1, stream, CONTEXT),
        Seen(2, (first, second), ROWS + 1, 2, stream, CONTEXT),
        Seen(3, (second, y), ROWS + 2, 3, stream, CONTEXT),
    ]


def test_every_call_launches_with_its_own_addresses_and_stream(fake: FakeDriver) -> None:
    """Every change of one of them between calls, and none."""
    prepared = CudaPrepared(chain_plan(), 0)
    calls = list(itertools.product((X, X + 256), (Y, OTHER_Y), (ARENA, OTHER_ARENA), (0, 5, 9)))
    for call in [*calls, *calls[::-1], calls[0], calls[0]]:
        fake.launches.clear()
        *pointers, stream = call
        prepared(pointers, stream)
        assert fake.launches == expected(*call)


def test_plans_without_scratch(fake: FakeDriver) -> None:
    prepared = CudaPrepared(chain_plan(with_scratch=False), 0)
    for y in (Y, OTHER_Y):
        fake.launches.clear()
        prepared([X, y])
        assert fake.launches == [Seen(1, (X, y), ROWS, 1, 0, CONTEXT)]


def test_scratch_buffers_in_several_homes(fake: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    """One lies in the output and one in the arena; each follows its home alone."""
    monkeypatch.setattr(LaunchPlan, "scratch_places", ((1, 512), (2, 256)))
    prepared = CudaPrepared(chain_plan(), 0)
    for y, arena in [(Y, ARENA), (OTHER_Y, ARENA), (OTHER_Y, OTHER_ARENA), (Y, OTHER_ARENA), (2**64 - 1024, ARENA)]:
        fake.launches.clear()
        prepared([X, y, arena])
        pointers = [launch.pointers for launch in fake.launches]
        assert pointers == [(X, y + 512), (y + 512, arena + 256), (arena + 256, y)]


def test_dependent_launches_alone_carry_the_attribute(fake: FakeDriver) -> None:
    """CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION is 6 in cuda.h, where an attribute has 72 bytes."""
    plan = chain_plan()
    steps = [dataclasses.replace(step, dependent=number == 1) for number, step in enumerate(plan.steps)]  # type: ignore[arg-type]
    prepared = CudaPrepared(dataclasses.replace(plan, steps=tuple(steps)), 0)
    for stream in (0, 5):
        fake.attributes.clear()
        prepared([X, Y, ARENA], stream)
        assert fake.attributes == [(), ((6, 1),), ()]
    assert (ctypes.sizeof(LaunchAttribute), LaunchAttribute.value.offset) == (72, 8)


def test_misaligned_addresses_launch_nothing(fake: FakeDriver) -> None:
    prepared = CudaPrepared(chain_plan(), 0)
    prepared([X, Y, ARENA])
    fake.launches.clear()
    for number, name in enumerate(("x", "y", "scratch")):
        pointers = [X, Y, OTHER_ARENA]
        pointers[number] += 8
        with pytest.raises(InvalidInput, match=f"{name} must start at a multiple of 16 bytes, got address"):
            prepared(pointers, 7)
    assert not fake.launches
    prepared([X, Y, ARENA])
    assert fake.launches == expected(X, Y, ARENA, 0)


def test_another_context_is_replaced_for_the_launches(fake: FakeDriver) -> None:
    prepared = CudaPrepared(chain_plan(), 3)
    for current in (0x9000, 0):
        fake.launches.clear()
        fake.contexts_made_current.clear()
        fake.current = current
        prepared([X, Y, ARENA], 4)
        assert fake.launches == expected(X, Y, ARENA, 4)
        assert fake.contexts_made_current == [CONTEXT, current, current] and fake.current == current


def interrupted_everywhere(function: Callable[[], Any], check: Callable[[], None]) -> int:
    """Call a function until it ends, with Ctrl-C before its first instruction, its second, ...; `check` follows each.

    Instructions count in everything of Python that it calls. Returns how many there were.
    """
    for place in itertools.count():
        left = place

        def press(frame: FrameType, event: str, argument: Any) -> Any:
            nonlocal left
            frame.f_trace_opcodes = True
            if event == "opcode":
                left -= 1
                if left < 0:
                    sys.settrace(None)
                    raise KeyboardInterrupt
            return press

        before = sys.gettrace()
        # Python 3.12 sends events of instructions once any frame asked for them before.
        sys._getframe().f_trace_opcodes = True
        sys.settrace(press)
        try:
            function()
        except KeyboardInterrupt:
            pass
        else:
            return place
        finally:
            sys.settrace(before)
            check()
    raise AssertionError("unreachable")


@pytest.mark.parametrize("current", [0x9000, 0, CONTEXT])
def test_an_interrupt_at_any_instruction_of_a_launch_leaves_the_context(current: int, fake: FakeDriver) -> None:
    prepared = CudaPrepared(chain_plan(), 3)
    prepared([X, Y, ARENA], 4)
    calls = itertools.cycle(([X, OTHER_Y, OTHER_ARENA], [X, Y, ARENA]))
    fake.current = current

    def check() -> None:
        assert fake.current == current
        fake.launches.clear()
        prepared([X, Y, OTHER_ARENA], 5)
        assert fake.launches == expected(X, Y, OTHER_ARENA, 5) and fake.current == current

    assert interrupted_everywhere(lambda: prepared(next(calls), 4), check) > 200


def test_an_interrupt_while_a_kernel_is_loaded_leaves_the_context(fake: FakeDriver) -> None:
    fake.current, count = 0x9000, itertools.count(1)

    def check() -> None:
        assert fake.current == 0x9000
        assert fake.load(b"", f"kernel_{next(count)}", 0, 0).value == next(count) - 1

    assert interrupted_everywhere(lambda: fake.load(b"", "kernel_9", 0, 0), check) > 50


@pytest.mark.parametrize(
    ("codes", "message"),
    [
        ([2], r"loading kernel_1 failed with CUDA error 2: out of memory"),
        ([200], r"loading kernel_1, perhaps from a damaged file \(delete .* with CUDA error 200"),
        ([0, 500], r"finding kernel_1 failed with CUDA error 500"),
        ([0, 0, 2], r"loading kernel_2 failed with CUDA error 2: out of memory"),
    ],
)
def test_a_kernel_that_fails_to_load_is_named_and_loaded_by_the_next_call(
    codes: list[int], message: str, fake: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepares, "_prepared", Recent())
    plan, fake.load_codes, fake.current = chain_plan(), list(codes), 0x9000
    with pytest.raises(RuntimeError, match=message):
        prepares.prepare(plan)
    assert fake.current == 0x9000 and fake.loaded == codes.count(0) // 2
    prepares.prepare(plan)([X, Y, ARENA], 4)
    assert fake.launches == expected(X, Y, ARENA, 4) and fake.loaded == 3


def test_a_failed_launch_names_its_kernel_and_leaves_the_plan_usable(fake: FakeDriver) -> None:
    prepared = CudaPrepared(chain_plan(), 0)
    fake.fail_at = 2
    with pytest.raises(
        RuntimeError, match=r"launching reduction\.kernels\.rowwise:cast_rows failed with CUDA error 700"
    ):
        prepared([X, Y, ARENA], 4)
    assert [launch.kernel for launch in fake.launches] == [1]
    fake.fail_at = None
    fake.launches.clear()
    prepared([X, Y, OTHER_ARENA], 5)
    assert fake.launches == expected(X, Y, OTHER_ARENA, 5)


#: The first scratch buffer of this arena has an address, the second lies beyond 64 bits.
TOO_HIGH = 2**64 - 256


@pytest.mark.parametrize(
    ("arena", "stream", "error"), [(TOO_HIGH, 4, OverflowError), (OTHER_ARENA, "no stream", TypeError)]
)
def test_an_interrupted_call_leaves_nothing_half_written(
    arena: int, stream: Any, error: type[Exception], fake: FakeDriver
) -> None:
    """Whatever was being written when a call broke off is written again by the next."""
    prepared = CudaPrepared(chain_plan(), 0)
    prepared([X, Y, ARENA], 4)
    with pytest.raises(error):
        prepared([X, Y, arena], stream)
    fake.launches.clear()
    prepared([X, Y, ARENA], 4)
    assert fake.launches == expected(X, Y, ARENA, 4)


def test_threads_have_parameters_of_their_own(fake: FakeDriver) -> None:
    """A thread that stops between writing its addresses and launching is not disturbed by another."""
    prepared = CudaPrepared(chain_plan(), 0)
    started, go_on = threading.Event(), threading.Event()
    launch, slow = fake.launch, []

    def wait_first(*arguments: Any) -> int:
        if threading.current_thread() is worker and not slow:
            slow.append(True)
            started.set()
            assert go_on.wait(30)
        return launch(*arguments)

    fake.launch = wait_first  # type: ignore[method-assign]
    worker = threading.Thread(target=prepared, args=([X, Y, ARENA], 1))
    worker.start()
    assert started.wait(30)
    prepared([X + 256, OTHER_Y, OTHER_ARENA], 2)
    go_on.set()
    worker.join(30)
    assert not worker.is_alive()
    assert fake.launches == [*expected(X + 256, OTHER_Y, OTHER_ARENA, 2), *expected(X, Y, ARENA, 1)]
