"""The bridge itself: XLA's own buffers, counted callbacks, one scratch result; and arrays of other libraries."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import moe_jax
from moe_core.base.arrays import ALIGNMENT
from moe_core.base.recent import Recent
from moe_core.runtime import prepare as runtime
from moe_core.specs.operands import named_arrays
from moe_jax.bridge import ffi
from tests.support.jax import ENGINES, on_engines, running_on, small_layer, to_jax


class Call(NamedTuple):
    """What the callback handed to a prepared plan."""

    plan: Any
    pointers: list[int]
    stream: int


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Call]]:
    """Every run of a plan prepared during the test, as it happens."""
    found: list[Call] = []
    prepare = runtime.prepare

    def recording(plan: Any, device_index: int = 0) -> Any:
        prepared = prepare(plan, device_index)

        def run(pointers: Sequence[int], stream: int = 0) -> None:
            found.append(Call(plan, list(pointers), stream))
            prepared(pointers, stream)

        run.plan = plan
        return run

    monkeypatch.setattr(ffi, "_runnable", Recent())
    monkeypatch.setattr(ffi, "prepare", recording)
    jax.clear_caches()
    yield found
    # Programs traced here know plans that are prepared no more.
    jax.clear_caches()


def address(array: jax.Array) -> int:
    return array.unsafe_buffer_pointer()


@on_engines
@pytest.mark.parametrize("jitted", [False, True])
def test_the_callback_gets_the_arrays_own_buffers(engine: str, jitted: bool, calls: list[Call]) -> None:
    with running_on(engine):
        layer = small_layer()
        x, experts, routing = to_jax(layer[:3])

        def forward(x: jax.Array, experts: moe_jax.ExpertWeights, routing: moe_jax.RouterWeights) -> moe_jax.MoEOutput:
            return moe_jax.moe(x, experts, routing, layer.spec)

        result = (jax.jit(forward) if jitted else forward)(x, experts, routing)
        jax.block_until_ready(result)
    (call,) = calls
    arrays = {"x": x, **dict(named_arrays(experts, "experts.")), **dict(named_arrays(routing, "routing."))}
    arrays |= result._asdict()
    names = [buffer.name for buffer in (*call.plan.inputs, *call.plan.outputs)]
    for name, pointer in zip(names, call.pointers, strict=False):
        assert pointer == address(arrays[name]), name
    scratch = call.pointers[len(names) :]
    assert len(scratch) == (1 if call.plan.scratch_bytes else 0)
    assert not any(pointer % ALIGNMENT for pointer in scratch)
    assert (call.stream != 0) == (engine == "cuda")


@pytest.mark.parametrize("engine", [engine for engine in ENGINES if engine != "cuda"])
def test_every_run_on_a_cpu_is_one_callback(engine: str) -> None:
    with running_on(engine):
        x, weights = jnp.ones((6, 4)), jnp.ones((6, 1))
        jax.block_until_ready(moe_jax.scale_rows(x, weights))
        before = ffi.callback_count()
        jax.block_until_ready([moe_jax.scale_rows(x, weights) for _ in range(3)])
        assert ffi.callback_count() - before == 3


def test_programs_hold_the_call_and_no_program_around_it() -> None:
    with running_on("reference"):
        found = jax.make_jaxpr(moe_jax.scale_rows)(jnp.ones((6, 4)), jnp.ones((6, 1)))
    (equation,) = found.eqns
    if equation.primitive.name == "jit":
        # From 0.11 on JAX puts one around what has rules of its own.
        (equation,) = equation.params["jaxpr"].eqns
    assert equation.primitive.name == "custom_jvp_call"


def test_zero_size_and_every_dtype_pass_the_bridge() -> None:
    with running_on("reference"):
        assert moe_jax.activation(jnp.zeros((0, 8)), moe_jax.Activation("silu")).shape == (0, 4)
        layout = moe_jax.make_layout(jnp.zeros((0, 2), jnp.int32), 3, token_mask=jnp.zeros(0, bool))
        np.testing.assert_array_equal(np.asarray(layout.group_sizes), np.zeros(3))
        assert layout.slot_of_row.shape == (0,) and layout.group_start.shape == (4,)
        for dtype in (jnp.bfloat16, jnp.float16, jnp.float32):
            scaled = moe_jax.scale_rows(jnp.ones((2, 4), dtype), jnp.full((2, 1), 3.0))
            assert scaled.dtype == dtype and np.asarray(scaled, np.float32).tolist() == [[3.0] * 4] * 2


def aligned(shape: tuple[int, ...], dtype: Any = np.float32, skip: int = 0) -> np.ndarray:
    """A NumPy array that starts `skip` bytes past a multiple of 64."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    storage = np.zeros(size + 128, np.uint8)
    start = -storage.ctypes.data % 64 + skip
    return storage[start : start + size].view(dtype).reshape(shape)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.int32, np.uint32, np.int8, np.uint8, np.bool_])
def test_arrays_of_others_keep_their_memory(dtype: Any) -> None:
    exporter = aligned((6, 4), dtype)
    exporter[...] = np.arange(24).reshape(6, 4) % 2
    array = moe_jax.from_dlpack(exporter)
    assert isinstance(array, jax.Array) and array.dtype == dtype
    assert address(array) == exporter.ctypes.data
    expected = exporter.copy()
    del exporter
    gc.collect()
    np.testing.assert_array_equal(np.asarray(array), expected)


def test_an_op_reads_the_exporters_memory(calls: list[Call]) -> None:
    exporter = aligned((6, 4))
    with running_on("reference"):
        jax.block_until_ready(moe_jax.scale_rows(moe_jax.from_dlpack(exporter), jnp.ones((6, 1))))
    assert calls[0].pointers[0] == exporter.ctypes.data


def test_torch_tensors_travel_both_ways() -> None:
    torch = pytest.importorskip("torch", reason="needs torch beside jax")
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.int32, torch.uint32, torch.uint8, torch.bool):
        tensor = torch.arange(64).reshape(8, 8).to(dtype)
        array = moe_jax.from_dlpack(tensor)
        assert address(array) == tensor.data_ptr() and str(array.dtype) == str(tensor.dtype).removeprefix("torch.")
        back = torch.from_dlpack(array)
        assert back.data_ptr() == tensor.data_ptr() and torch.equal(back, tensor)
    with pytest.raises(moe_jax.InvalidInput, match=r"must not require gradients.*exporter.detach"):
        moe_jax.from_dlpack(torch.ones(4, requires_grad=True))
    with pytest.raises(moe_jax.InvalidInput, match=r"got a transposed torch.Tensor; make it contiguous"):
        moe_jax.from_dlpack(torch.ones(8, 16).T)
    with pytest.raises(moe_jax.InvalidInput, match=r"got int64 while jax_enable_x64 is off; convert it to int32"):
        moe_jax.from_dlpack(torch.ones(4, dtype=torch.int64))


class ElsewhereExporter:
    """Says that it lies on a device of a platform JAX does not have here."""

    def __dlpack_device__(self) -> tuple[int, int]:
        return (10, 0)  # ROCm

    def __dlpack__(self, **options: object) -> object:
        raise AssertionError("not reached")


def test_what_cannot_travel_is_refused() -> None:
    refused = {
        "no exporter": ([1.0], "exporter must have __dlpack__ .*got builtins.list; use jax.numpy.asarray"),
        "64 bits": (aligned((4,), np.float64), "got float64 while jax_enable_x64 is off; convert it to float32"),
        "transposed": (aligned((4, 8)).T, "row-major contiguous, got a transposed numpy.ndarray; make it contiguous"),
        "strided": (aligned((4, 8))[:, ::2], "row-major contiguous, got numpy.ndarray.*jax.numpy.array"),
        "misaligned": (aligned((4, 8), skip=16), "cannot travel as it is.*64 bytes.*jax.numpy.array"),
        "dtype": (np.zeros(4, ml_dtypes.bfloat16), "cannot travel as it is, got numpy.ndarray.*jax.numpy.array"),
    }
    for name, (exporter, message) in refused.items():
        with pytest.raises(moe_jax.InvalidInput, match=message):
            pytest.fail(f"{name}: no error for {moe_jax.from_dlpack(exporter)}")
    with pytest.raises(moe_jax.Unsupported, match=r"platform"):
        moe_jax.from_dlpack(ElsewhereExporter())


@on_engines
def test_denormals_stay_what_they_are(engine: str) -> None:
    """XLA's CPU threads flush them to zero, and run the bridge."""
    x = np.array([[1.5e-38, 3e-39, -4e-45]], np.float32)
    with running_on(engine):
        y = moe_jax.scale_rows(jnp.asarray(x), jnp.full((1, 1), 0.5))
    np.testing.assert_array_equal(np.asarray(y), x * np.float32(0.5))
