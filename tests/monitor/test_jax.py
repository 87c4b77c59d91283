"""The monitor of JAX functions: what layers count, as results of a function, and what it refuses."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

pytest.importorskip("jax")

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

import moe_jax
from moe_core.errors import InvalidInput
from moe_core.layers import MoELayerSpec
from moe_jax import layers
from moe_jax.monitor import Monitor, gradient_norms, observe
from tests.support.parallel.jax import ep_mesh

D, E, K, T = 16, 6, 2, 10
SPEC = MoELayerSpec(D, 8, E, K, capacity_factor=0.75)


@pytest.fixture(autouse=True)
def on_the_reference() -> Iterator[None]:
    with moe_jax.cpu_engine("reference"):
        yield


@functools.cache
def draw() -> Any:
    return layers.initialize(SPEC, jax.random.key(0))


def loss(parameters: Any, x: jax.Array) -> jax.Array:
    for name in sorted(parameters):
        x = x + layers.forward(parameters[name], x, SPEC)
    return jnp.square(x).mean()


@jax.jit
def step(parameters: Any, x: jax.Array, due: Any) -> Any:
    (value, seen), gradients = jax.value_and_grad(observe(loss), has_aux=True)(parameters, x)
    return value, gradients, (seen, gradient_norms(gradients, due))


def test_values_are_those_of_the_layers() -> None:
    parameters, written = {"a": draw(), "b": draw()}, []
    monitor = Monitor(lambda values, step: written.append((step, values)), every=2, names=["a", "b"])
    total, kept, x = np.zeros(E), 0, jax.random.normal(jax.random.key(1), (4, T, D))
    for number, part in enumerate(x):
        assert monitor.due is bool(number % 2)
        value, gradients, seen = step(parameters, part, monitor.due)
        assert value == loss(parameters, part)
        if not monitor.due:
            assert not any(leaf.any() for leaf in jax.tree.leaves(seen[1]))
        monitor.step(*seen, step=number)
        if number >= 2:
            _, aux = layers.forward(parameters["a"], part, SPEC, return_aux=True)
            total, kept = total + np.asarray(aux.tokens_per_expert), kept + int((aux.ids >= 0).sum())
    assert [step for step, _ in written] == [1, 3]
    values = written[-1][1]
    np.testing.assert_allclose(values["moe/a/load"], total / total.mean())
    assert values["moe/a/dropped"] == pytest.approx(1 - kept / (2 * T * K)) and kept < 2 * T * K
    losses = [values[f"moe/a/{name}"] for name in ("load_balance_loss", "z_loss")]
    assert losses == pytest.approx([float(aux.load_balance_loss), float(aux.z_loss)], rel=1e-5)
    of_a = gradients["a"]
    each = sum(np.square(of_a[name]).sum((1, 2)) for name in ("wi_0", "wi_1", "wo"))
    np.testing.assert_allclose(values["moe/a/grad_norm_of_experts"], np.sqrt(each), 1e-5)
    assert values["moe/a/grad_norm_router"] == pytest.approx(np.linalg.norm(of_a["gate"]["kernel"]), rel=1e-5)


def test_scans_and_checkpoints() -> None:
    """A scan's layers come in the order that they run, and a checkpoint's recomputation counts nothing."""
    x = jax.random.normal(jax.random.key(1), (T, D))
    stack = {name: layers.initialize(SPEC, jax.random.key(i), num_layers=3) for i, name in enumerate("ab")}

    def block(x: jax.Array, pair: Any) -> Any:
        return x + layers.forward(pair["b"], x + layers.forward(pair["a"], x, SPEC), SPEC)

    def scanned(stack: Any, x: jax.Array) -> Any:
        x, seen = jax.lax.scan(jax.checkpoint(observe(block)), x, stack)
        return jnp.square(x).mean(), seen

    (_, seen), gradients = jax.jit(jax.value_and_grad(scanned, has_aux=True))(stack, x)
    names = [f"{name}.{i}" for i in range(3) for name in "ab"]
    values = Monitor(None, every=1, names=names).step(seen, gradient_norms(gradients))

    def unrolled(stack: Any, x: jax.Array) -> jax.Array:
        for i in range(3):
            x = block(x, jax.tree.map(lambda leaf, i=i: leaf[i], stack))
        return jnp.square(x).mean()

    (_, seen), gradients = jax.jit(jax.value_and_grad(observe(unrolled), has_aux=True))(stack, x)
    expected = Monitor(None, every=1, names=names).step(seen, gradient_norms(gradients))
    assert values is not None and expected is not None and values.keys() == expected.keys()
    for name in values.keys() - {"moe/tokens_per_second"}:
        np.testing.assert_allclose(values[name], expected[name], 1e-4, err_msg=name)


def test_flax_layers() -> None:
    nnx = pytest.importorskip("flax.nnx")
    from moe_jax import linen
    from moe_jax.nnx import MoE

    x = jax.random.normal(jax.random.key(1), (T, D))
    model = MoE(D, 8, E, K, rngs=nnx.Rngs(0))

    def of_model(model: Any, x: jax.Array) -> Any:
        return jnp.square(model(x)).mean()

    (_, seen), gradients = nnx.value_and_grad(observe(of_model), has_aux=True)(model, x)
    values = Monitor(None, every=1, names=["model"]).step(seen, gradient_norms({"model": gradients}))
    other = linen.MoE(D, 8, E, K)
    variables = other.init(jax.random.key(0), x)
    _, seen = observe(lambda x: other.apply(variables, x))(x)
    assert values is not None and values["moe/model/grad_norm_experts"] > 0 and "moe/model/dropped" not in values
    assert int(seen[0].counts.sum()) == T * K and Monitor(None, every=1).step(seen) is not None


def test_counts_on_a_mesh_are_of_all_devices() -> None:
    spec = MoELayerSpec(D, 8, 8, K, capacity_factor=0.75)
    parameters, x = layers.initialize(spec, jax.random.key(0)), jax.random.normal(jax.random.key(1), (4, 6, D))

    def call(parameters: Any, x: jax.Array, **options: Any) -> Any:
        return observe(lambda: layers.forward(parameters, x, spec, **options))()[1]

    (expected,) = jax.jit(call)(parameters, x)
    mesh = ep_mesh(4)
    with jax.set_mesh(mesh):
        split = jax.device_put(x, NamedSharding(mesh, PartitionSpec("ep")))
        (found,) = jax.jit(lambda parameters, x: call(parameters, x, expert_axis="ep"))(parameters, split)
    np.testing.assert_array_equal(found.counts, expected.counts)
    assert int(found.kept) == int(expected.kept) < expected.counts.sum() and int(found.overflow) == 0
    np.testing.assert_allclose(found.losses, expected.losses, 1e-5)


@pytest.mark.parametrize("transform", [jax.jit, jax.checkpoint, jax.vmap], ids=lambda one: one.__name__)
def test_an_inner_transformation_is_refused(transform: Any) -> None:
    parameters = draw()
    inner = transform(lambda x: layers.forward(parameters, x, SPEC))
    inner(jnp.ones((2, T, D)))
    with pytest.raises(InvalidInput, match="outside of jit, scan, checkpoint"):
        observe(lambda x: inner(x))(jnp.ones((2, T, D)))


def test_what_is_refused() -> None:
    parameters, x = draw(), jnp.ones((T, D))
    _, seen = observe(lambda x: layers.forward(parameters, x, SPEC))(x)
    for options, message in (({"every": 0}, "every"), ({"per_layer": 1}, "per_layer"), ({"writer": 3}, "writer must")):
        with pytest.raises(InvalidInput, match=message):
            monitor: Any = Monitor
            monitor(**({"writer": None} | options))
    for call, message in (
        (lambda: observe(lambda x: x)(x), "must run MoE layers on Moebius"),
        (lambda: Monitor(None).step(x), "observed must be the results of observe"),  # type: ignore[arg-type]
        (lambda: Monitor(None, every=1, names=["a", "b"]).step(seen), "names must be of 1 layers, got 2"),
        (lambda: gradient_norms({"kernel": x}), "must hold those of MoE layers"),
    ):
        with pytest.raises(InvalidInput, match=message):
            call()
    monitor = Monitor(None)
    monitor.add(seen)
    with pytest.raises(InvalidInput, match="of the layers before"):
        monitor.add(seen * 2)
