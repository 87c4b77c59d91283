"""What only a GPU shows: graph replay without Python, stream order, several GPUs, programs exported for one."""

from __future__ import annotations

import gc
import os
import pathlib
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import moe_jax
from moe_core.parity.tolerance import assert_close, stage_tolerances
from moe_jax.bridge import ffi
from tests.support.jax import small_layer, to_jax
from tests.support.paths import ROOT

pytestmark = pytest.mark.gpu

CHAIN = 50
WARM_UP = 10
RUNS = 20

RUN_EXPORTED = """
import pathlib, sys
import numpy as np, jax
from jax import export
import moe_jax
folder = pathlib.Path(sys.argv[1])
moe_jax.load_plans(folder / "plans.json")
program = export.deserialize((folder / "program").read_bytes())
np.save(folder / "result.npy", np.asarray(program.call(np.load(folder / "x.npy"))))
"""


def chain(x: jax.Array, weights: jax.Array) -> jax.Array:
    """Many ops, one after the other."""
    for _ in range(CHAIN):
        x = moe_jax.scale_rows(x, weights)
    return x


def scanned_chain(x: jax.Array, weights: jax.Array) -> jax.Array:
    """The same in a loop whose body is long enough for XLA to make a graph of it."""
    steps = 10

    def body(carry: jax.Array, nothing: None) -> tuple[jax.Array, None]:
        for _ in range(CHAIN // steps):
            carry = moe_jax.scale_rows(carry, weights)
        return carry, None

    return jax.lax.scan(body, x, None, length=steps)[0]


def callbacks_during(run: Callable[[], object]) -> int:
    """Callbacks into Python while `run` runs, after its addresses have had time to settle."""
    # Arrays of earlier tests that are freed between two runs would make room, and so other addresses.
    gc.collect()
    gc.disable()
    try:
        for _ in range(WARM_UP):
            run()
        before = ffi.callback_count()
        for _ in range(RUNS):
            run()
        return ffi.callback_count() - before
    finally:
        gc.enable()


@pytest.mark.parametrize("function", [chain, scanned_chain])
def test_no_python_once_buffers_recur(function: Callable[..., jax.Array]) -> None:
    x, weights = jnp.ones((64, 64)), jnp.full((64, 1), -1.0)
    jitted = jax.jit(function)

    def run() -> None:
        # The result is gone before the next run, so that its memory serves again.
        result = jitted(x, weights)
        result.block_until_ready()
        result.delete()

    assert callbacks_during(run) == 0
    np.testing.assert_array_equal(np.asarray(jitted(x, weights)), np.ones((64, 64)))


def test_no_python_with_donated_buffers() -> None:
    weights = jnp.full((64, 1), -1.0)
    jitted = jax.jit(chain, donate_argnums=0)
    state = [jnp.ones((64, 64))]

    def run() -> None:
        state[0] = jitted(state[0], weights)
        state[0].block_until_ready()

    assert callbacks_during(run) == 0
    np.testing.assert_array_equal(np.asarray(state[0]), np.ones((64, 64)))


def test_no_python_for_whole_layers_once_buffers_recur() -> None:
    layer = small_layer("bfloat16", num_tokens=32)
    x, experts, routing = to_jax(layer[:3])

    @jax.jit
    def layers(x: jax.Array) -> jax.Array:
        for _ in range(8):
            x = moe_jax.moe(x, experts, routing, layer.spec).output
        return x

    def run() -> None:
        result = layers(x)
        result.block_until_ready()
        result.delete()

    expected = np.asarray(layers(x))
    assert callbacks_during(run) == 0
    np.testing.assert_array_equal(np.asarray(layers(x)), expected)


def test_changed_buffers_are_seen() -> None:
    """A replayed graph never runs on the addresses of an earlier call."""
    weights = jnp.full((64, 1), -1.0)
    jitted = jax.jit(chain)
    kept = [jnp.full((64, 64), float(number)) for number in range(8)]
    results = [jitted(x, weights) for _ in range(3) for x in kept]
    for number, result in enumerate(results):
        np.testing.assert_array_equal(np.asarray(result), np.full((64, 64), float(number % 8)))


def test_cpu_arrays_run_on_the_cpu() -> None:
    """A process with a GPU plans for both and takes the plan of the platform it is lowered for."""
    layer = small_layer()
    arrays = jax.device_put(tuple(layer[:3]), jax.devices("cpu")[0])
    on_cpu = moe_jax.moe(*arrays, spec=layer.spec)
    on_gpu = moe_jax.moe(*to_jax(layer[:3]), spec=layer.spec)
    assert {device.platform for device in on_cpu.output.devices()} == {"cpu"}
    assert {device.platform for device in on_gpu.output.devices()} == {"gpu"}
    tolerances = stage_tolerances(layer.spec, "float32", d_model=48, d_ff=32, top_k=2, num_experts=5)
    np.testing.assert_array_equal(np.asarray(on_cpu.ids), np.asarray(on_gpu.ids))
    assert_close(np.asarray(on_gpu.output), np.asarray(on_cpu.output), tolerances["output"], "GPU against CPU")


def test_torch_memory_and_stream_order() -> None:
    """JAX reads a tensor that torch is still writing when it is handed over, and torch reads JAX's result likewise."""
    torch = pytest.importorskip("torch", reason="needs torch beside jax")
    if not torch.cuda.is_available():
        pytest.skip("this torch has no CUDA")
    weights = jnp.full((2048, 1), 2.0)
    stream = torch.cuda.Stream()
    moe_jax.scale_rows(jnp.zeros((2048, 2048)), weights).block_until_ready()
    for value in range(1, 6):
        with torch.cuda.stream(stream):
            matrix = torch.full((2048, 2048), 1 / 2048, device="cuda")
            for _ in range(30):  # keeps the stream busy
                matrix = matrix @ matrix * 1.0
            tensor = matrix * 2048 * value
            array = moe_jax.from_dlpack(tensor)
            assert array.unsafe_buffer_pointer() == tensor.data_ptr()
            doubled = moe_jax.scale_rows(array, weights)
            back = torch.from_dlpack(doubled)
            assert back.data_ptr() == doubled.unsafe_buffer_pointer()
            # Read on the stream that computes it: torch's streams do not wait for each other.
            assert abs(float((back / (2 * value)).mean()) - 1) < 1e-3


def test_an_exported_program_runs_in_another_process(tmp_path: pathlib.Path) -> None:
    layer = small_layer()
    x, experts, routing = to_jax(layer[:3])
    forward = jax.jit(lambda x: moe_jax.moe(x, experts, routing, layer.spec).output)
    allowed = [export.DisabledSafetyCheck.custom_call(ffi.TARGET_NAME)]
    program = export.export(forward, platforms=["cuda"], disabled_checks=allowed)(x)
    (tmp_path / "program").write_bytes(program.serialize())
    np.save(tmp_path / "x.npy", layer.x)
    moe_jax.export_plans(tmp_path / "plans.json")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-c", RUN_EXPORTED, str(tmp_path)]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    np.testing.assert_array_equal(np.load(tmp_path / "result.npy"), np.asarray(forward(x)))


def cuda_pair() -> list[Any]:
    """Two CUDA devices, or a skip."""
    devices = jax.devices("cuda")
    if len(devices) < 2:
        pytest.skip(f"needs 2 GPUs, this machine has {len(devices)}")
    return devices[:2]


def test_shard_map_with_psum_on_two_gpus() -> None:
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,), devices=cuda_pair())
    layer = small_layer(num_tokens=32)
    whole = moe_jax.moe(*to_jax(layer[:3]), spec=layer.spec)

    def part(x: jax.Array, experts: moe_jax.ExpertWeights, routing: moe_jax.RouterWeights):
        result = moe_jax.moe(x, experts, routing, layer.spec)
        return result.output, jax.lax.psum(result.tokens_per_expert, "data")

    sharded = jax.jit(jax.shard_map(part, mesh=mesh, in_specs=(P("data"), P(), P()), out_specs=(P("data"), P())))
    tolerances = stage_tolerances(layer.spec, "float32", d_model=48, d_ff=32, top_k=2, num_experts=5)
    for _ in range(5):
        output, counts = sharded(*to_jax(layer[:3]))
        assert len(output.sharding.device_set) == 2
        assert_close(np.asarray(output), np.asarray(whole.output), tolerances["output"], "output of both GPUs")
        np.testing.assert_array_equal(np.asarray(counts), np.asarray(whole.tokens_per_expert))


def hammer(devices: list[Any]) -> None:
    """Threads that call ops of their own shapes on the devices in turn; every result must be right."""

    def work(number: int) -> None:
        layer = small_layer("bfloat16", num_tokens=16 + number, seed=number)
        arrays = jax.device_put(tuple(layer[:3]), devices[number % len(devices)])
        results = [np.asarray(moe_jax.moe(*arrays, spec=layer.spec).output) for _ in range(20)]
        for result in results:
            np.testing.assert_array_equal(result, results[0])

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(work, range(8), timeout=300))


def test_threads_on_one_gpu() -> None:
    hammer(jax.devices("cuda")[:1])


def test_threads_on_two_gpus() -> None:
    hammer(cuda_pair())
