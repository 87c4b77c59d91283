"""Several devices: shard_map with collectives, no deadlock between callbacks, and clear refusals elsewhere."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import moe_jax
from moe_core.layers import MoELayerSpec
from moe_core.specs import MatmulSpec, RouterSpec
from moe_jax import layers
from moe_jax.bridge import ending, placement, platforms
from tests.support.jax import NUM_DEVICES, REAL_KERNELS, cpu_mesh, running_on, small_layer, to_jax
from tests.support.paths import ROOT

LIMITED = MoELayerSpec(d_model=8, d_ff=6, num_experts=5, top_k=2, capacity_factor=1.0)

#: Four host devices run the reference engine at once, with BLAS and XLA's thread pools as they come, over and over.
#: Each step is awaited: XLA waits for itself for ever where many programs with collectives run on host devices.
HAMMER = """
import numpy as np, jax, jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import moe_jax
random = np.random.default_rng(0)
draw = lambda *shape: jnp.asarray(random.standard_normal(shape).astype(np.float32) / shape[-1] ** 0.5)
T, D, F, E = 256, 128, 96, 8
x, routing = draw(T, D), moe_jax.RouterWeights(draw(D, E))
experts = moe_jax.ExpertWeights(draw(E, D, 2 * F), draw(E, F, D))
spec = moe_jax.MoESpec(moe_jax.Activation("silu"), moe_jax.RouterSpec(2))

def step(x, experts, routing):
    for _ in range(3):
        x = x + moe_jax.moe(x, experts, routing, spec).output
    return x, jax.lax.psum(jnp.sum(x), "data")

mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
assert mesh.size == 4
step = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=(P("data"), P(), P()), out_specs=(P("data"), P())))
first = np.asarray(step(x, experts, routing)[0])
for _ in range(15):
    result, total = step(x, experts, routing)
    more = step(result, experts, routing)
    np.testing.assert_array_equal(np.asarray(result), first)
    assert np.isfinite(np.asarray(more[1]))

def long(x):
    return jax.lax.fori_loop(0, 100, lambda _, x: moe_jax.moe(x, experts, routing, spec).output, x)

long = jax.jit(jax.shard_map(long, mesh=mesh, in_specs=P("data"), out_specs=P("data"), check_vma=False))
long = long.lower(x).compile()

# Experts on four devices: collectives between the callbacks of every forward and backward.
from moe_jax import layers
axis, spec = layers.ExpertAxis("data"), layers.MoELayerSpec(D, F, E, 2)
with jax.set_mesh(mesh):
    parameters = jax.device_put(layers.initialize(spec, jax.random.key(0)), layers.expert_sharding(spec, mesh, "data"))
    loss = lambda parameters, x: jnp.square(layers.forward(parameters, x, spec, expert_axis=axis)).mean()
    step = jax.jit(jax.grad(loss))
    first = jax.block_until_ready(step(parameters, x))
    for _ in range(15):
        found = jax.block_until_ready(step(parameters, x))
        jax.tree.map(lambda own, other: np.testing.assert_array_equal(np.asarray(own), np.asarray(other)), found, first)

# The process ends while a program runs whose result nobody has.
from moe_jax.bridge import ffi
before = ffi.callback_count()
long(x)
assert ffi.callback_count() - before < 400, "it is running"
print("done")
"""


def routed_product(parameters: dict[str, Any], x: jax.Array) -> jax.Array:
    """Stage ops, with a layout made of ids that depend on a parameter."""
    ids, weights = moe_jax.route(moe_jax.router(x, parameters["gate"]["kernel"]), RouterSpec(2))
    operands = moe_jax.MatmulOperands(x, parameters["wi_0"], row_weight=weights.flatten())
    layout = moe_jax.make_layout(ids, parameters["wi_0"].shape[0])
    return moe_jax.matmul_ogs(operands, layout, MatmulSpec("in_out", gather="token", scatter="slot"))


def limited_layer(parameters: dict[str, Any], x: jax.Array) -> jax.Array:
    """A layer that drops slots, of which each expert keeps as many per device."""
    return layers.forward(parameters, x, LIMITED)


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("forward", [routed_product, limited_layer])
def test_gradients_through_layouts_inside_shard_map(forward: Callable[..., jax.Array], check_vma: bool) -> None:
    """Data parallel: the sum over devices is that of the plain gradients of their tokens."""

    def loss(parameters: dict[str, Any], x: jax.Array) -> jax.Array:
        return jnp.square(forward(parameters, x)).sum()

    def part(parameters: dict[str, Any], x: jax.Array) -> dict[str, Any]:
        gradients = jax.grad(loss)(parameters, x)
        # With the check on, JAX itself sums the gradients of what every device has.
        return gradients if check_vma else jax.lax.psum(gradients, "data")

    random, shapes = np.random.default_rng(0), jax.eval_shape(lambda: layers.initialize(LIMITED, jax.random.key(0)))
    parameters = jax.tree.map(lambda one: random.standard_normal(one.shape, np.float32) / 3, shapes)
    x = random.standard_normal((3 * NUM_DEVICES, LIMITED.d_model), np.float32)
    sharded = jax.shard_map(part, mesh=cpu_mesh(), in_specs=(P(), P("data")), out_specs=P(), check_vma=check_vma)
    with running_on("reference"):
        summed = jax.jit(sharded)(parameters, x)
        alone = jax.jit(jax.grad(loss))
        plain = [alone(parameters, tokens) for tokens in np.split(x, NUM_DEVICES)]
    wanted = jax.tree.map(lambda *gradients: np.sum(gradients, axis=0), *plain)
    assert wanted["gate"]["kernel"].any()
    jax.tree.map(lambda ours, other: np.testing.assert_allclose(ours, other, rtol=1e-4, atol=1e-5), summed, wanted)


@pytest.mark.skipif(REAL_KERNELS != "interpreter", reason="tests/jax/test_gpu.py does this with compiled kernels")
def test_shard_map_runs_interpreted_kernels() -> None:
    mesh = cpu_mesh()
    x = jnp.arange(32, dtype=jnp.float32).reshape(8, 4)
    weights = jnp.arange(8, dtype=jnp.float32).reshape(8, 1)
    with moe_jax.cpu_engine("interpreter"):
        scaled = jax.shard_map(moe_jax.scale_rows, mesh=mesh, in_specs=(P("data"), P("data")), out_specs=P("data"))
        np.testing.assert_array_equal(np.asarray(jax.jit(scaled)(x, weights)), np.asarray(x * weights))


def test_the_wait_at_exit_is_for_programs_whose_results_nobody_has() -> None:
    ended: list[int] = []

    def slow(x: Any) -> Any:
        time.sleep(0.1)
        ended.append(1)
        return np.asarray(x)

    def part(x: jax.Array) -> jax.Array:
        return jax.pure_callback(slow, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    call = jax.jit(jax.shard_map(part, mesh=cpu_mesh(), in_specs=P("data"), out_specs=P("data"), check_vma=False))
    ending.wait_at_exit()
    with running_on("reference"):
        call(np.ones(NUM_DEVICES, np.float32))
        ending._wait()
    assert len(ended) == NUM_DEVICES


def test_callbacks_on_four_devices_do_not_deadlock_nor_outlive_python() -> None:
    environment = {name: value for name, value in os.environ.items() if not name.endswith("_NUM_THREADS")}
    environment |= {
        "JAX_PLATFORMS": "cpu",
        "TRITON_INTERPRET": "0",
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    done = subprocess.run(
        [sys.executable, "-c", HAMMER], env=environment, cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0 and "done" in done.stdout, done.stdout + done.stderr


def test_threads() -> None:
    """Eager ops of several threads on several devices, planned and traced at the same time."""
    devices = jax.devices("cpu")[:NUM_DEVICES]

    def work(number: int) -> None:
        layer = small_layer(num_tokens=3 + number % 2, seed=number)
        with jax.default_device(devices[number % len(devices)]), moe_jax.cpu_engine("reference"):
            arrays = to_jax(layer[:3])
            results = [np.asarray(moe_jax.moe(*arrays, spec=layer.spec).output) for _ in range(5)]
            for result in results:
                np.testing.assert_array_equal(result, results[0])

    with ThreadPoolExecutor(6) as threads:
        list(threads.map(work, range(6), timeout=60))


def ranked(ids: jax.Array) -> jax.Array:
    """A layout needs the ids of all tokens."""
    return moe_jax.make_layout(ids, 4).slot_of_row


def test_a_sharded_array_outside_shard_map_is_gathered_if_small_or_refused() -> None:
    mesh, ids = cpu_mesh(), jnp.arange(16, dtype=jnp.int32).reshape(8, 2) % 4
    split = jax.device_put(ids, NamedSharding(mesh, P("data")))
    with running_on("reference"):
        np.testing.assert_array_equal(ranked(split), ranked(ids))
        with pytest.raises(moe_jax.Unsupported, match=r"of a jitted function, got constants .*jax\.set_mesh"):
            jax.jit(lambda: ranked(split))()
        # A copy on every device is whole on each of them.
        result = ranked(jax.device_put(ids, NamedSharding(mesh, P())))
        assert result.sharding.is_fully_replicated and len(result.sharding.device_set) == NUM_DEVICES


def test_explicit_mesh_axes_are_known_inside_jit() -> None:
    mesh = cpu_mesh(AxisType.Explicit)
    ids = jax.device_put(jnp.ones((8, 2), jnp.int32), NamedSharding(mesh, P("data")))
    with running_on("reference"):
        np.testing.assert_array_equal(jax.jit(ranked)(ids), np.arange(16))
        inside = jax.shard_map(ranked, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
        assert jax.jit(inside)(ids).shape == (16,)


def test_arrays_of_different_devices_are_refused() -> None:
    first, second, *_ = jax.devices("cpu")
    x, weights = jax.device_put(jnp.ones((8, 4)), first), jax.device_put(jnp.ones((8, 1)), second)
    with running_on("reference"):
        with pytest.raises(
            moe_jax.InvalidInput, match=r"weights must be on the device of x, .*:0, got .*:1; .*jax.device_put"
        ):
            moe_jax.scale_rows(x, weights)
        with pytest.raises(moe_jax.InvalidInput, match="weights must be on the device of x"):
            placement.check("op", {"x": x, "sizes": np.ones(1), "weights": weights})
        # An array that was not placed on purpose follows the others.
        assert moe_jax.scale_rows(jax.device_put(jnp.ones((8, 4)), second), np.ones((8, 1), np.float32)).devices() == {
            second
        }


def test_gpus_of_different_kinds_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = {0: moe_jax.Target("cuda", 90, 132), 1: moe_jax.Target("cuda", 80, 108)}
    monkeypatch.setattr(platforms, "cuda_devices", lambda: (0, 1))
    monkeypatch.setattr(platforms, "target_of", lambda device: kinds[device[1]])
    platforms._local_cuda_target.cache_clear()
    try:
        with pytest.raises(
            moe_jax.Unsupported, match=r"devices of one kind.*cuda:1 is cuda sm_80.*CUDA_VISIBLE_DEVICES"
        ):
            moe_jax.scale_rows(jnp.ones((8, 4)), jnp.ones((8, 1)))
    finally:
        platforms._local_cuda_target.cache_clear()


def test_other_default_platforms_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    with pytest.raises(moe_jax.Unsupported, match=r"must be cpu or cuda, got 'tpu'.*JAX_PLATFORMS=cpu"):
        moe_jax.scale_rows(jnp.ones((8, 4)), jnp.ones((8, 1)))
