"""Programs for several devices outside shard_map: split by rows, refused when lowered, or replicated where wanted."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import moe_jax
from moe_core.specs import MatmulSpec
from moe_jax.autodiff.stages import run_grouped_mm
from moe_jax.bridge import ffi
from tests.support.jax import NUM_DEVICES, running_on, small_layer, to_jax

REFUSED = "one device at a time, got a program for 4 devices outside jax.shard_map.*`with moe_jax.replicated"
LAYER = small_layer(num_tokens=8)


def mesh_of(*sizes: int, kind: AxisType = AxisType.Auto) -> Mesh:
    devices = jax.devices("cpu")[: int(np.prod(sizes))]
    return jax.make_mesh(sizes, ("data", "model")[: len(sizes)], axis_types=(kind,) * len(sizes), devices=devices)


def arrays(mesh: Mesh | None = None) -> tuple[Any, ...]:
    """x, over the tokens of a mesh if there is one, experts and routing."""
    x, experts, routing = to_jax(LAYER[:3])
    return (x if mesh is None else jax.device_put(x, NamedSharding(mesh, P("data")))), experts, routing


def forward(x: jax.Array, experts: Any, routing: Any) -> jax.Array:
    return moe_jax.moe(x, experts, routing, LAYER.spec).output


def layout_forward(x: jax.Array, experts: Any, routing: Any) -> jax.Array:
    """By an op that reads a layout, which XLA would have to gather."""
    ids = jnp.zeros((x.shape[0], 1), jnp.int32)
    return moe_jax.gather_rows(x, moe_jax.make_layout(ids, 1))


def replicated_forward(x: jax.Array, experts: Any, routing: Any) -> jax.Array:
    with moe_jax.replicated():
        return forward(x, experts, routing)


def scanned(layer: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x, *more: jax.lax.scan(lambda carry, _: (carry + layer(carry, *more), None), x, None, length=2)[0]


def gradient(layer: Callable[..., Any]) -> Callable[..., Any]:
    return jax.grad(lambda *given: jnp.square(layer(*given)).sum(), argnums=(0, 1, 2))


PROGRAMS: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    "forward": lambda layer: layer,
    "gradient": gradient,
    "remat": lambda layer: gradient(jax.checkpoint(layer)),
    "scan": scanned,
    "gradient of scan": lambda layer: gradient(scanned(layer)),
    "vmap": lambda layer: lambda x, *more: jax.vmap(lambda x: layer(x, *more))(x[:, None]),
}
every_program = pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)


@every_program
def test_jit_on_an_auto_mesh_splits_rows_or_is_replicated(program: Callable[..., Any]) -> None:
    """The block may stand around the program or only around the layer: its gradient is allowed as well."""
    with running_on("reference"):
        given = arrays(mesh_of(NUM_DEVICES))
        with pytest.raises(moe_jax.Unsupported, match=REFUSED):
            jax.jit(program(layout_forward))(*given)
        wanted = jax.jit(program(forward))(*arrays())
        with moe_jax.replicated():
            around = jax.jit(program(forward))(*given)
        inside = jax.jit(program(replicated_forward))(*given)
        split = jax.jit(program(forward))(*given)
    for found in (around, inside):
        jax.tree.map(
            lambda ours, other: np.testing.assert_array_equal(np.asarray(ours), np.asarray(other)), found, wanted
        )
        assert len(jax.tree.leaves(found)[0].sharding.device_set) == NUM_DEVICES
    jax.tree.map(lambda ours, other: np.testing.assert_allclose(ours, other, 1e-4, 1e-5), split, wanted)


OPS: dict[str, Callable[..., Any]] = {
    "moe": lambda x, experts, routing: moe_jax.moe(x, experts, routing, LAYER.spec, token_mask=x[:, 0] > -1),
    "ids": lambda x, experts, routing: moe_jax.moe(
        x, experts, moe_jax.TopK(jnp.arange(8, dtype=jnp.int32)[:, None] - 2, jnp.ones((8, 1))),
        dataclasses.replace(LAYER.spec, router=None),
    ),
    "router": lambda x, experts, routing: moe_jax.router(x, routing.weight),
    "route": lambda x, experts, routing: moe_jax.route(x, moe_jax.RouterSpec(2), correction_bias=x),
    "norm": lambda x, experts, routing: moe_jax.rms_norm(x, routing.weight[:, 0]),
    "activation": lambda x, experts, routing: moe_jax.activation(x, moe_jax.Activation("silu", gate_layout="halves")),
    "scaled": lambda x, experts, routing: moe_jax.scale_rows(x, x[:, :1]),
    "quantised": lambda x, experts, routing: moe_jax.quantize_rows(
        x, moe_jax.format_named("fp8_channel"), used_by=jnp.arange(16, dtype=jnp.int32) - 3
    ),
    "bits": lambda x, experts, routing: moe_jax.pack_bitmatrix((x[:, :2] > 0).astype(jnp.int32), 40),
    "packed": lambda x, experts, routing: moe_jax.unpack_bitmatrix((x[:, :2] > 0).astype(jnp.uint32), 40, 2),
}  # fmt: skip


@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
def test_ops_on_rows_are_split(op: Callable[..., Any]) -> None:
    """Eagerly and in jit, by automatic and explicit axes; counts are of all rows."""
    with running_on("reference"):
        wanted = op(*arrays())
        for kind in (AxisType.Auto, AxisType.Explicit):
            given = arrays(mesh_of(2, 2, kind=kind))
            for found in (op(*given), jax.jit(op)(*given)) if kind == AxisType.Auto else (jax.jit(op)(*given),):
                jax.tree.map(lambda ours, other: np.testing.assert_allclose(ours, other, 1e-4, 1e-5), found, wanted)
                first = jax.tree.leaves(found)[0]
                assert first.sharding.spec[0] is not None, "its rows stay where they are"


def slots(x: Any) -> dict[str, Any]:
    """Of two experts of four, one of them nobody's, and tokens without any."""
    ids = jnp.arange(16, dtype=jnp.int32).reshape(8, 2) % 3 - 1
    return {"routing": moe_jax.TopK(ids, jnp.ones((8, 2))), "spec": dataclasses.replace(SHARED.spec, router=None)}


SHARED = small_layer(num_tokens=8, num_experts=4)
CALLS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "mask": lambda x: {"token_mask": x[:, 0] > -1},
    "ids": slots,
    "shared": lambda x: {"shared": moe_jax.SharedExpert(jnp.ones((48, 16)) / 9, jnp.ones((8, 48)) / 9)},
}


@pytest.mark.parametrize(("name", "sizes"), [("mask", (2, 2)), ("mask", (2, 1)),
    ("ids", (2, 2)), ("shared", (1, NUM_DEVICES))], ids=str)  # fmt: skip
def test_devices_that_share_the_experts_exchange_rows(name: str, sizes: tuple[int, int]) -> None:
    """Where their split shows: not in a transformation under automatic axes. Gradients stay split."""
    more = CALLS[name]

    def both(x: jax.Array, experts: Any, routing: Any) -> Any:
        options = {"routing": routing, "spec": SHARED.spec, **more(x)}
        result = moe_jax.moe(x, experts, **options)
        return jnp.square(result.output).sum(), result

    step = jax.jit(jax.value_and_grad(both, argnums=(0, 1, 2), has_aux=True))
    x, *others = to_jax(SHARED[:3])
    with running_on("reference"):
        wanted = step(x, *others)
        for kind, run in ((AxisType.Auto, both), (AxisType.Explicit, step)):
            mesh = mesh_of(*sizes, kind=kind)
            experts = jax.device_put(others[0], NamedSharding(mesh, P("model")))
            found = run(jax.device_put(x, NamedSharding(mesh, P("data"))), experts, others[1])
            expected = wanted[0] if run is both else wanted
            jax.tree.map(lambda ours, other: np.testing.assert_allclose(ours, other, 1e-4, 1e-5), found, expected)
        assert found[1][1].down.sharding.is_equivalent_to(experts.down.sharding, 3)
        if sizes[1] > 1:
            with pytest.raises(moe_jax.Unsupported, match="experts must be whole on every device with expert_map, got"):
                moe_jax.moe(x, experts, others[1], SHARED.spec, expert_map=jnp.arange(4, dtype=jnp.int32))
            with pytest.raises(moe_jax.InvalidInput, match="adapter_ids must be None without lora"):
                moe_jax.moe(x, experts, others[1], SHARED.spec, adapter_ids=jnp.zeros(8, jnp.int32))
        if sizes == (2, 2):
            apart = dataclasses.replace(experts, down=jax.device_put(others[0].down, NamedSharding(mesh, P("data"))))
            with pytest.raises(moe_jax.Unsupported, match=r"experts\.down must be whole on every device, got .*data"):
                moe_jax.moe(x, apart, others[1], SHARED.spec)


def reshard(arrays: Any, mesh: Mesh) -> Any:
    constrain = jax.sharding.reshard if mesh.are_all_axes_explicit else jax.lax.with_sharding_constraint
    return jax.tree.map(lambda one: constrain(one, NamedSharding(mesh, P(*(None,) * one.ndim))), arrays)


@pytest.mark.parametrize(
    ("kind", "error"), [(AxisType.Explicit, moe_jax.Unsupported), (AxisType.Auto, jax.errors.JaxRuntimeError)]
)
def test_weights_that_would_be_gathered_are_refused(kind: AxisType, error: type[Exception]) -> None:
    """Of automatic axes by XLA's compiler, also behind a cast and in a gradient. Tokens stay on their devices, too."""
    mesh = mesh_of(2, 2, kind=kind)
    x, experts, routing = arrays(mesh)
    split = jax.device_put(experts, NamedSharding(mesh, P(None, None, "model")))
    cast = lambda x, experts, routing: forward(x, jax.tree.map(jnp.sin, experts), routing)  # noqa: E731
    with running_on("reference"):
        for call in (forward, gradient(cast)):
            with pytest.raises(error, match=r"experts.* must be whole on every device.*, got .*model"):
                jax.jit(call)(x, split, routing)
        moved = lambda x, experts, routing: forward(x, reshard(experts, mesh), routing)  # noqa: E731
        np.testing.assert_allclose(jax.jit(moved)(x, split, routing), forward(*arrays()), 1e-4, 1e-5)
        if kind == AxisType.Auto:
            wrong = jax.device_put(x, NamedSharding(mesh, P("model")))
            with pytest.raises(error, match=r"x must be split as .*data.* got .*model.*; reshard it"):
                jax.jit(forward)(wrong, experts, routing)


def test_every_device_runs_all_of_a_replicated_call() -> None:
    with running_on("reference"), moe_jax.replicated():
        program = jax.jit(forward)
        jax.block_until_ready(program(*arrays(mesh_of(NUM_DEVICES))))
        before = ffi.callback_count()
        jax.block_until_ready(program(*arrays(mesh_of(NUM_DEVICES))))
        assert ffi.callback_count() - before == NUM_DEVICES


def test_shardings_of_a_program_and_exports_are_refused() -> None:
    with running_on("reference"):
        sharding = NamedSharding(mesh_of(NUM_DEVICES), P("data"))
        program = jax.jit(layout_forward, in_shardings=(sharding, None, None))
        checks = [export.DisabledSafetyCheck.custom_call(ffi.TARGET_NAME)]
        for call in (program, program.lower, export.export(program, platforms=["cpu"], disabled_checks=checks)):
            with pytest.raises(moe_jax.Unsupported, match=REFUSED):
                call(*arrays())
        with jax.set_mesh(mesh_of(NUM_DEVICES)):
            found = jax.jit(layout_forward)(*arrays())
        np.testing.assert_array_equal(found, layout_forward(*arrays()))


def test_every_axis_of_a_mesh_must_be_manual() -> None:
    """Axes of one device aside: XLA has nothing to split over them."""
    specs = {"in_specs": (P("data"), P(), P()), "out_specs": P("data"), "axis_names": {"data"}}
    with running_on("reference"):
        wanted = forward(*arrays())
        message = r"got a jax.shard_map that leaves 'model' \(2 devices\) of the mesh to XLA"

        def product(x: jax.Array, *_: Any) -> jax.Array:
            groups = jnp.array([4]), None
            return run_grouped_mm(x, jnp.ones((1, x.shape[1], 4)), groups, MatmulSpec("in_out"))

        with pytest.raises(moe_jax.Unsupported, match=message):
            jax.jit(jax.shard_map(product, mesh=mesh_of(2, 2), **specs))(*arrays())
        two, lone = (
            jax.jit(jax.shard_map(layout_forward, mesh=mesh_of(2, size), **specs))(*arrays()) for size in (2, 1)
        )
        np.testing.assert_array_equal(two, lone)
        rest = jax.shard_map(forward, mesh=mesh_of(2, 2), **specs)
        partial = jax.shard_map(replicated_forward, mesh=mesh_of(2, 2), **specs)
        whole = jax.shard_map(forward, mesh=mesh_of(NUM_DEVICES, 1), **specs)
        for program in (rest, partial, whole):
            np.testing.assert_allclose(jax.jit(program)(*arrays()), wanted, rtol=1e-4, atol=1e-5)


def test_what_is_whole_on_every_device_runs() -> None:
    """One device, eager calls on copies, and axes whose types say that nothing is split."""
    with running_on("reference"):
        wanted = np.asarray(forward(*arrays()))
        assert (np.asarray(jax.jit(forward)(*arrays(mesh_of(1, 1)))) == wanted).all()
        for kind in (AxisType.Auto, AxisType.Explicit):
            copies = jax.device_put(arrays(), NamedSharding(mesh_of(NUM_DEVICES, kind=kind), P()))
            assert (np.asarray(forward(*copies)) == wanted).all()
        assert (np.asarray(jax.jit(forward)(*copies)) == wanted).all()
        with jax.set_mesh(mesh_of(NUM_DEVICES, kind=AxisType.Explicit)):
            assert (np.asarray(jax.jit(forward)(*arrays())) == wanted).all()


def test_one_axis_whose_type_tells_nothing_is_enough() -> None:
    """An array may be split along the axis that XLA chooses for, whatever the other says, if it has several devices."""
    devices = np.array(jax.devices("cpu")[:4]).reshape(2, 2)
    mesh = Mesh(devices, ("data", "model"), axis_types=(AxisType.Auto, AxisType.Explicit))
    with running_on("reference"):
        copies = jax.device_put(arrays(), NamedSharding(mesh, P()))
        with pytest.raises(moe_jax.Unsupported, match=REFUSED):
            jax.jit(layout_forward)(*copies)
        lone = Mesh(devices[:1], mesh.axis_names, axis_types=mesh.axis_types)
        program = jax.make_jaxpr(layout_forward)(*jax.device_put(arrays(), NamedSharding(lone, P())))
        assert "shard_map" not in str(program)


def test_eager_gradients_on_split_arrays() -> None:
    """Where no program is lowered, the arrays themselves show it."""
    with running_on("reference"):
        split = arrays(mesh_of(NUM_DEVICES))
        with pytest.raises(moe_jax.Unsupported, match=r"x must be whole on every device, .*scatter='slot'"):
            gradient(layout_forward)(*split)
        wanted = gradient(forward)(*arrays())
        jax.tree.map(
            lambda one, other: np.testing.assert_allclose(one, other, 1e-4, 1e-5), gradient(forward)(*split), wanted
        )
        with moe_jax.replicated():
            found = gradient(forward)(*split)
            np.testing.assert_array_equal(np.asarray(forward(*split)), np.asarray(forward(*arrays())))
        jax.tree.map(
            lambda one, other: np.testing.assert_array_equal(np.asarray(one), np.asarray(other)), found, wanted
        )
        # A cotangent may be split although nothing else is.
        _, backward = jax.vjp(forward, *arrays())
        with pytest.raises(moe_jax.Unsupported, match="moe_backward runs on one device at a time"):
            backward(split[0])
        visible = arrays(mesh_of(2, kind=AxisType.Explicit))[0]
        with pytest.raises(moe_jax.Unsupported, match=r"gradients\.output is split over several"):
            jax.jit(backward)(visible)


def test_an_eager_vmap_of_split_arrays() -> None:
    ids = jnp.arange(64, dtype=jnp.int32).reshape(4, 8, 2) % 5 - 1
    with running_on("reference"):
        split = jax.device_put(ids, NamedSharding(mesh_of(NUM_DEVICES), P("data")))
        found, wanted = (jax.vmap(lambda ids: moe_jax.make_layout(ids, 4))(one) for one in (split, ids))
        jax.tree.map(np.testing.assert_array_equal, found, wanted)


def test_a_constant_of_a_program_for_a_mesh_is_split() -> None:
    def product(weight: jax.Array) -> jax.Array:
        return jnp.square(moe_jax.ragged_dot(jnp.ones((8, 3)), weight, jnp.array([2, 6]))).sum()

    with running_on("reference"):
        wanted = jax.grad(product)(jnp.ones((2, 3, 4)))
        with jax.set_mesh(mesh_of(NUM_DEVICES)):
            np.testing.assert_allclose(jax.jit(jax.grad(product))(jnp.ones((2, 3, 4))), wanted, 1e-5)
