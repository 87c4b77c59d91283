"""The runtime: what `run` checks before it starts a plan, what `prepare` keeps, threads, and plans without work."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from moe_core.base.arrays import ArraySpec, TensorView, host_array
from moe_core.base.target import Target
from moe_core.errors import InvalidInput, Unsupported
from moe_core.ops.matmul.forward import plan_matmul_ogs
from moe_core.ops.reduction.reduce import plan_scale_rows
from moe_core.ops.routing.layout import plan_layout
from moe_core.plan.builder import PlanBuilder
from moe_core.plan.steps import LaunchPlan
from moe_core.runtime import prepare as runtime
from moe_core.runtime.devices import prepared_class, target_of
from moe_core.runtime.prepare import prepare, run
from moe_core.specs import LayoutSpec, MatmulSpec
from moe_core.specs.operands import MatmulOperands
from tests.support.harness import POISON, engine_target
from tests.support.runtime.device_memory import DeviceBytes

ENGINES = (engine_target(), Target("reference"))
REFERENCE = Target("reference")
on_engines = pytest.mark.parametrize("target", ENGINES, ids=lambda target: target.kind)
ROWS, WIDTH = 6, 16
PAGE = 4096


class Memory:
    """A dense array where plans of a target find it, `PAGE` aligned: values, or poison."""

    def __init__(self, target: Target, spec: ArraySpec, values: np.ndarray | None) -> None:
        self.spec = spec
        storage = np.full(spec.nbytes + PAGE, POISON, np.uint8)
        skip = -storage.ctypes.data % PAGE
        self._bytes = storage[skip : skip + spec.nbytes]
        if values is not None:
            host_array(self._bytes.ctypes.data, spec)[...] = values
        # The driver gives no memory of 0 bytes: an empty array has no address there.
        self._on_device = DeviceBytes(self._bytes) if target.kind == "cuda" and spec.nbytes else None
        address, device = self._bytes.ctypes.data, "cpu"
        if target.kind == "cuda":
            address, device = self._on_device.address if self._on_device else 0, "cuda"
        self.view = TensorView(address, spec, (device, 0), owner=self)

    def read(self) -> np.ndarray:
        data = self._on_device.read() if self._on_device else self._bytes
        return host_array(data.ctypes.data, self.spec, owner=data).copy()

    def free(self) -> None:
        if self._on_device:
            self._on_device.free()


Buffers = dict[str, Memory]


@pytest.fixture
def allocate() -> Iterator[Callable[..., Buffers]]:
    """Memory for every buffer of a plan by name, inputs as given, outputs and scratch poisoned."""
    made: list[Memory] = []

    def call(plan: LaunchPlan, **inputs: np.ndarray) -> Buffers:
        specs = {buffer.name: buffer.spec for buffer in (*plan.inputs, *plan.outputs)}
        if plan.scratch_bytes:
            specs["scratch"] = ArraySpec((plan.scratch_bytes,), "uint8")
        buffers = {name: Memory(plan.target, spec, inputs.get(name)) for name, spec in specs.items()}
        made.extend(buffers.values())
        return buffers

    yield call
    for memory in made:
        memory.free()


def views_of(buffers: Buffers) -> dict[str, TensorView]:
    return {name: memory.view for name, memory in buffers.items()}


def scale_plan(target: Target, rows: int = ROWS) -> LaunchPlan:
    return plan_scale_rows(ArraySpec((rows, WIDTH), "float32"), ArraySpec((rows, 1), "float32"), target)


def twice_plan(target: Target, rows: int = ROWS) -> LaunchPlan:
    """y = (x * weights) * weights, and two scratch arrays: the product, and another that must not lie over it."""
    inner = scale_plan(target, rows)
    builder = PlanBuilder("twice", target)
    for buffer in inner.inputs:
        builder.input(buffer.name, buffer.spec)
    builder.output("y", inner.spec("y"))
    builder.call(inner, "first", {"x": "x", "weights": "weights"})
    builder.call(inner, "second", {"x": "first.y", "weights": "weights"})
    builder.call(inner, "third", {"x": "first.y", "weights": "weights", "y": "y"})
    return builder.build()


def draw(rows: int = ROWS, seed: int = 0) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    # Powers of two, so that results are exact.
    weights = np.exp2(random.integers(-3, 4, (rows, 1))).astype(np.float32)
    return {"x": random.standard_normal((rows, WIDTH)).astype(np.float32), "weights": weights}


def in_threads(calls: list[Callable[[], Any]]) -> list[Any]:
    """The results of calls that start together, each in a thread of its own."""
    results: list[Any] = [None] * len(calls)
    failures: list[BaseException] = []
    start = threading.Barrier(len(calls))

    def work(number: int) -> None:
        try:
            start.wait(60)
            results[number] = calls[number]()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive(), "a thread hangs"
    assert not failures, failures
    return results


@on_engines
def test_views_in_any_order_give_the_result(target: Target, allocate: Callable[..., Buffers]) -> None:
    arrays = draw()
    buffers = allocate(twice_plan(target), **arrays)
    run(twice_plan(target), dict(reversed(views_of(buffers).items())))
    np.testing.assert_array_equal(buffers["y"].read(), arrays["x"] * arrays["weights"] ** 2)
    for name, array in arrays.items():
        np.testing.assert_array_equal(buffers[name].read(), array)


def test_missing_and_unknown_views(allocate: Callable[..., Buffers]) -> None:
    plan = twice_plan(REFERENCE)
    views = views_of(allocate(plan, **draw()))
    for name in views:
        others = {other: view for other, view in views.items() if other != name}
        with pytest.raises(InvalidInput) as caught:
            run(plan, others)
        assert str(caught.value) == (
            f"views must be exactly x, weights, y, scratch, got {', '.join(sorted(others))}; add or remove the others"
        )
    with pytest.raises(InvalidInput, match="must be exactly x, weights, y, scratch, got bias, scratch, weights, x, y;"):
        run(plan, views | {"bias": views["x"]})
    # A plan without scratch takes none.
    with pytest.raises(InvalidInput, match="must be exactly x, weights, y, got scratch, weights, x, y; add or remove"):
        run(scale_plan(REFERENCE), views)


@pytest.mark.parametrize("name", ["x", "weights", "y"])
@pytest.mark.parametrize(
    ("change", "got"),
    [
        (lambda spec: ArraySpec((spec.shape[0] + 1, *spec.shape[1:]), spec.dtype), r"float32\[7, \d+\]"),
        (lambda spec: ArraySpec((spec.size,), spec.dtype), r"float32\[\d+\]"),
        (lambda spec: ArraySpec(spec.shape, "int32"), r"int32\[6, \d+\]"),
        (lambda spec: ArraySpec(spec.shape, spec.dtype, (2 * spec.shape[1], 1)), r"float32\[6, \d+\] strides .*"),
    ],
    ids=["shape", "rank", "dtype", "strides"],
)
def test_another_spec(name: str, change: Any, got: str, allocate: Callable[..., Buffers]) -> None:
    plan = scale_plan(REFERENCE)
    views = views_of(allocate(plan, **draw()))
    views[name] = dataclasses.replace(views[name], spec=change(views[name].spec))
    with pytest.raises(InvalidInput, match=rf"{name} must be float32\[6, \d+\] as planned, got {got}; make a plan for"):
        run(plan, views)


def test_another_device(allocate: Callable[..., Buffers]) -> None:
    """Refused by what the views and the plan say: no device is needed to find out."""
    views = views_of(allocate(twice_plan(REFERENCE), **draw()))

    def on(**devices: tuple[str, int]) -> dict[str, TensorView]:
        return {name: dataclasses.replace(view, device=devices.get(name, ("cuda", 0))) for name, view in views.items()}

    cuda = twice_plan(Target("cuda", 90, 132))
    for plan, given, message in (
        (twice_plan(REFERENCE), on(), r"x must be on the same cpu device as the others, got \('cuda', 0\); move it"),
        (twice_plan(Target("interpreter")), on(), r"x must be on the same cpu device .* got \('cuda', 0\); move it"),
        (cuda, views, r"x must be on the same cuda device as the others, got \('cpu', 0\); move it"),
        (cuda, on(weights=("cuda", 1)), r"weights must be on the same cuda device .* got \('cuda', 1\); move it"),
        (cuda, on(y=("cpu", 0)), r"y must be on the same cuda device as the others, got \('cpu', 0\); move it"),
        (cuda, on(scratch=("cuda", 1)), r"scratch must be on the same cuda device .* got \('cuda', 1\); move it"),
    ):
        with pytest.raises(InvalidInput, match=message):
            run(plan, given)


def test_small_and_strided_scratch(allocate: Callable[..., Buffers]) -> None:
    plan, arrays = twice_plan(REFERENCE), draw()
    buffers = allocate(plan, **arrays)
    views, size = views_of(buffers), plan.scratch_bytes
    for spec in (ArraySpec((size - 1,), "uint8"), ArraySpec((0,), "uint8"), ArraySpec((size,), "uint8", (2,))):
        with pytest.raises(InvalidInput) as caught:
            run(plan, views | {"scratch": dataclasses.replace(views["scratch"], spec=spec)})
        assert str(caught.value) == f"scratch must be at least {size} contiguous bytes, got {spec}; allocate more"
    # One arena may serve plans that need less.
    larger = Memory(REFERENCE, ArraySpec((size + 1,), "uint8"), None)
    run(plan, views | {"scratch": larger.view})
    np.testing.assert_array_equal(buffers["y"].read(), arrays["x"] * arrays["weights"] ** 2)


def test_read_only_views(allocate: Callable[..., Buffers]) -> None:
    plan, arrays = twice_plan(REFERENCE), draw()
    buffers = allocate(plan, **arrays)
    read_only = {name: dataclasses.replace(view, read_only=True) for name, view in views_of(buffers).items()}
    for name in ("y", "scratch"):
        with pytest.raises(InvalidInput, match=f"{name} is written to, got a read-only array; pass a writable one"):
            run(plan, views_of(buffers) | {name: read_only[name]})
    run(plan, views_of(buffers) | {name: read_only[name] for name in ("x", "weights")})
    np.testing.assert_array_equal(buffers["y"].read(), arrays["x"] * arrays["weights"] ** 2)


@on_engines
@pytest.mark.parametrize("name", ["x", "weights", "y", "scratch"])
def test_misaligned_addresses_name_their_buffer(name: str, target: Target, allocate: Callable[..., Buffers]) -> None:
    plan = twice_plan(target)
    buffers = allocate(plan, **draw())
    views = views_of(buffers)
    for step in (4, 8):
        address = views[name].pointer + step
        views[name] = dataclasses.replace(views[name], pointer=address)
        expected = f"{name} must start at a multiple of 16 bytes, got address {address:#x}; copy it into a fresh array"
        with pytest.raises(InvalidInput) as caught:
            run(plan, views)
        assert str(caught.value) == expected
        with pytest.raises(InvalidInput) as caught:
            prepare(plan)([views[each].pointer for each in ("x", "weights", "y", "scratch")])
        assert str(caught.value) == expected
        views = views_of(buffers)
    assert np.isnan(buffers["y"].read()).all()


@on_engines
def test_prepared_plans_are_kept(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """By content: an equal plan made anew finds what the first one prepared, and nothing is prepared again."""
    first, again = twice_plan(target), twice_plan(target)
    assert first is not again
    prepared = prepare(first)
    monkeypatch.setattr(runtime, "prepared_class", None)
    assert prepare(first) is prepare(again) is prepared
    monkeypatch.undo()
    assert prepare(twice_plan(target, ROWS + 1)) is not prepared


@on_engines
def test_threads_prepare_a_plan_once(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    # A number of rows that no other test has prepared.
    plans = [twice_plan(target, ROWS + 5) for _ in range(4)]
    made, original = [], prepared_class(target)

    def slow(*arguments: Any) -> Any:
        made.append(arguments)
        time.sleep(0.1)  # long enough for the other threads to ask meanwhile
        return original(*arguments)

    monkeypatch.setattr(runtime, "prepared_class", lambda _: slow)
    found = in_threads([lambda plan=plan: prepare(plan) for plan in plans])
    assert len(made) == 1 and len({id(prepared) for prepared in found}) == 1


@on_engines
def test_threads_run_one_prepared_plan(target: Target, allocate: Callable[..., Buffers]) -> None:
    """Each thread has buffers of its own; none sees another's addresses."""
    rounds, plan = 3 if target.kind == "interpreter" else 20, twice_plan(target)
    inputs = [draw(seed=seed) for seed in range(2)]
    memory = [[allocate(plan, **arrays) for _ in range(rounds)] for arrays in inputs]

    def work(number: int) -> None:
        for buffers in memory[number]:
            run(plan, views_of(buffers))

    in_threads([lambda number=number: work(number) for number in range(2)])
    for arrays, sets in zip(inputs, memory, strict=True):
        for buffers in sets:
            np.testing.assert_array_equal(buffers["y"].read(), arrays["x"] * arrays["weights"] ** 2)


@on_engines
def test_no_rows_are_no_work(target: Target, allocate: Callable[..., Buffers]) -> None:
    """Empty arrays need no address, and kernels whose grid is empty are left out."""
    plan = twice_plan(target, rows=0)
    assert not target.compiled or plan.steps == ()
    buffers = allocate(plan, **draw(rows=0))
    views = {name: dataclasses.replace(view, pointer=0) for name, view in views_of(buffers).items()}
    run(plan, views)
    assert buffers["y"].read().shape == (0, WIDTH)


@on_engines
def test_outputs_are_written_though_no_token_is_there(target: Target, allocate: Callable[..., Buffers]) -> None:
    layout, empty = LayoutSpec(0, 2, 4), np.zeros((0, 2), np.int32)
    plan = plan_layout(ArraySpec(empty.shape, "int32"), layout, target)
    buffers = allocate(plan, ids=empty)
    run(plan, views_of(buffers))
    assert buffers["group_sizes"].read().tolist() == [0] * 4
    assert buffers["group_start"].read().tolist() == [0] * 5
    assert buffers["invalid_ids"].read().tolist() == [0]


@pytest.mark.skipif(engine_target().kind == "reference", reason="needs the kernels")
def test_arguments_in_another_order_than_the_kernels_parameters_are_refused() -> None:
    """On every engine of kernels: Python takes them by name, so that the interpreter alone would run it."""
    plan = scale_plan(engine_target())
    (launch,) = plan.steps
    arguments = (launch.arguments[1], launch.arguments[0], *launch.arguments[2:])
    swapped = dataclasses.replace(plan, steps=(dataclasses.replace(launch, arguments=arguments),))
    with pytest.raises(RuntimeError, match=r"the plan gives .*; give them in this order"):
        prepared_class(swapped.target)(swapped, 0)


def test_targets_of_devices() -> None:
    assert target_of(("cpu", 0)).kind in ("interpreter", "reference")
    with pytest.raises(Unsupported, match="arrays must be on a CPU or a CUDA device, got 'tpu'; move them there"):
        target_of(("tpu", 0))


@pytest.mark.gpu
def test_devices_that_do_not_exist() -> None:
    with pytest.raises(InvalidInput, match=r"must be below the number of CUDA devices, .* got 4096; choose another"):
        target_of(("cuda", 4096))


def test_outputs_share_no_memory() -> None:
    """A plan may read an input after it has written an output, so in-place runs are refused."""
    operands = MatmulOperands(ArraySpec((64, 64), "float32"), ArraySpec((64, 64), "float32"))
    plan = plan_matmul_ogs(operands, None, MatmulSpec("in_out"), Target("reference"))
    x, weight, y = (np.ones((64, 64), np.float32) for _ in range(3))
    views = {"x": TensorView.from_numpy(x), "weight": TensorView.from_numpy(weight), "y": TensorView.from_numpy(y)}
    run(plan, views | {"weight": views["x"]})
    assert (y == 64).all()
    with pytest.raises(InvalidInput, match=r"must not share memory with .*; give every output memory of its own"):
        run(plan, views | {"y": views["x"]})
