"""Ops that make or read a layout over the devices of a mesh: the bits of one device, or refused."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import moe_jax
from moe_jax import MatmulOperands, MatmulSpec
from tests.support.jax import running_on

T, K, E, D, N = 8, 3, 4, 8, 6
AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
SLOTS, FROM_SLOTS = (MatmulSpec("in_out", gather, "slot") for gather in ("token", "slot"))
ROWS = MatmulSpec("in_out")


@pytest.fixture(autouse=True)
def engine() -> Any:
    with running_on("reference"):
        yield


def whole(seed: int, *shape: int) -> jax.Array:
    """Small integers, so that fp32 sums in any order are exact."""
    return jax.random.randint(jax.random.key(seed), shape, -3, 4).astype(jnp.float32)


def draw(num_tokens: int = T) -> tuple[jax.Array, ...]:
    """x, row weights, up, down, bias and ids, of which some are -1 and expert 3 has none."""
    ids = jax.random.randint(jax.random.key(9), (num_tokens, K), -1, E - 1)
    sizes = (num_tokens, D), (num_tokens, K), (E, D, N), (E, N, D), (E, N)
    return *(whole(seed, *shape) for seed, shape in enumerate(sizes)), ids


def by_slot(x: Any, weights: Any, up: Any, down: Any, bias: Any, ids: Any) -> jax.Array:
    layout = moe_jax.make_layout(ids, E)
    hidden = moe_jax.matmul_ogs(MatmulOperands(x, up, bias=bias), layout, SLOTS)
    y = moe_jax.matmul_ogs(MatmulOperands(hidden, down, row_weight=weights), layout, FROM_SLOTS)
    return moe_jax.reduce(y, layout, shared=x)


def by_row(x: Any, weights: Any, up: Any, down: Any, bias: Any, ids: Any, **sizes: int) -> jax.Array:
    """From rows `[capacity, D]` to rows."""
    layout = moe_jax.make_layout(ids, E, **sizes)
    hidden = moe_jax.matmul_ogs(MatmulOperands(x, up, bias=bias), layout, ROWS)
    return moe_jax.matmul_ogs(MatmulOperands(hidden, down), layout, ROWS)


def step(call: Callable[..., Any], *arrays: Any) -> Any:
    """The result and all gradients."""

    def loss(*given: Any) -> Any:
        y = call(*given, arrays[-1])
        return jnp.square(y).sum(), y

    (_, y), gradients = jax.value_and_grad(loss, range(5), has_aux=True)(*arrays[:-1])
    return y, gradients


def mesh_of(kind: AxisType, *sizes: int, names: tuple[str, ...] = ("data", "fsdp")) -> Mesh:
    devices = jax.devices("cpu")[: int(np.prod(sizes))]
    return jax.make_mesh(sizes, names[: len(sizes)], axis_types=(kind,) * len(sizes), devices=devices)


def placed(mesh: Mesh, arrays: Any, *specs: P) -> list[jax.Array]:
    return [jax.device_put(one, NamedSharding(mesh, spec)) for one, spec in zip(arrays, specs, strict=True)]


def same(found: Any, wanted: Any) -> None:
    jax.tree.map(lambda *pair: np.testing.assert_array_equal(*map(np.asarray, pair)), found, wanted)


@pytest.mark.parametrize(("kind", "sizes"), [(AUTO, (4,)), (AUTO, (2, 2)), (EXPLICIT, (1,)), (EXPLICIT, (2, 2))])
def test_products_and_sums_by_token(kind: AxisType, sizes: tuple[int, ...]) -> None:
    """Result and gradients, in jit, eagerly, and where no axis divides the tokens."""
    arrays, mesh = draw(), mesh_of(kind, *sizes)
    rows = P(mesh.axis_names)
    given = placed(mesh, arrays, rows, rows, P(), P(), P(), rows)
    found, wanted = (jax.jit(functools.partial(step, by_slot))(*one) for one in (given, arrays))
    same(found, wanted)
    for one in (found[0], found[1][0]):
        assert one.sharding.is_equivalent_to(NamedSharding(mesh, rows), 2), "tokens stay"
    odd = draw(7)
    with jax.set_mesh(mesh):
        results = by_slot(*given), jax.jit(by_slot)(*odd)
    same(results, (wanted[0], by_slot(*odd)))


def test_slots_are_split_between_tokens() -> None:
    """Three devices divide the 24 slots, not the 8 tokens."""
    (slots,) = placed(mesh_of(AUTO, 3), (whole(7, T * K, N),), P("data"))
    *_, down, _, ids = draw()
    with pytest.raises(moe_jax.InvalidInput, match=r"operands\.x must have rows that 3 devices divide by token, got 8"):
        moe_jax.matmul_ogs(MatmulOperands(slots, down), moe_jax.make_layout(ids, E), FROM_SLOTS)


@pytest.mark.parametrize("sizes", [{}, {"alignment": 4}, {"max_rows": 5}], ids=str)
def test_products_by_row(sizes: dict[str, int]) -> None:
    """Devices have parts of groups, and padding between groups."""
    call, arrays = functools.partial(by_row, **sizes), draw()
    capacity = moe_jax.make_layout(arrays[-1], E, **sizes).slot_of_row.shape[0]
    arrays = whole(7, capacity, D), *arrays[1:]
    wanted = step(call, *arrays)

    def weighted(x: Any, weights: Any, up: Any, ids: Any) -> jax.Array:
        return moe_jax.matmul_ogs(MatmulOperands(x, up, row_weight=weights), moe_jax.make_layout(ids, E, **sizes), ROWS)

    for kind in (AUTO, EXPLICIT):
        mesh = mesh_of(kind, 4)
        with jax.set_mesh(mesh):
            given = placed(mesh, arrays, P("data"), P(), P(), P(), P(), P("data"))
            found = jax.jit(functools.partial(step, call))(*given)
            of_weighted = weighted(*given[:3], given[-1])
        same((*found, of_weighted), (*wanted, weighted(*arrays[:3], arrays[-1])))
        assert found[0].sharding.spec[0] == "data"


def test_weights_split_by_expert_stay() -> None:
    """Where their split shows: each device has the rows of its experts, and gradients come back split."""
    mesh, arrays = mesh_of(EXPLICIT, 2, 2, names=("data", "ep")), draw()
    rows, specs = whole(7, T * K, D), (P("data"), P("data"), P("ep"), P("ep"), P("ep"), P("data"))
    with jax.set_mesh(mesh):
        given = placed(mesh, arrays, *specs)
        found = jax.jit(functools.partial(step, by_slot))(*given)
        of_rows = jax.jit(functools.partial(step, by_row))(*placed(mesh, (rows,), P("data")), *given[1:])
    assert found[1][2].sharding.spec[0] == "ep" and found[0].sharding.spec[0] == "data"
    same((found, of_rows), (step(by_slot, *arrays), step(by_row, rows, *arrays[1:])))


@pytest.mark.parametrize("kind", [AUTO, EXPLICIT])
def test_layouts_are_whole_and_equal_on_every_device(kind: AxisType) -> None:
    mesh, ids = mesh_of(kind, 4), draw()[-1]
    counts = whole(5, 4, E).astype(jnp.int32) ** 2
    calls = (lambda ids: moe_jax.make_layout(ids, E, alignment=2)), (lambda counts: moe_jax.layout_of_runs(counts, 40))
    for call, array in zip(calls, (ids, counts), strict=True):
        (split,) = placed(mesh, (array,), P("data"))
        for found in (jax.jit(call)(split), call(split)):
            same(found, call(array))
            assert all(leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(found))
    checked = moe_jax.make_layout(*placed(mesh, (ids,), P("data")), E, checked=True)
    assert checked.spec == moe_jax.make_layout(ids, E).spec


#: op -> (its number of rows, a call).
MOVING: dict[str, tuple[int, Callable[[jax.Array, Any], Any]]] = {
    "gather_rows": (T, lambda x, layout: moe_jax.gather_rows(x, layout)),
    "matmul_ogs": (
        T, lambda x, layout: moe_jax.matmul_ogs(MatmulOperands(x, draw()[2]), layout, MatmulSpec("in_out", "token"))
    ),
    "reduce": (T * K, lambda x, layout: moe_jax.reduce(x, layout, order="row")),
    "route_rounded": (
        16, lambda x, layout: moe_jax.route_rounded(x, moe_jax.RouterSpec(2), moe_jax.TokenRounding(16))
    ),
    "quantize_rows": (T, lambda x, layout: moe_jax.quantize_rows(x, moe_jax.format_named("fp8_tensor"))),
}  # fmt: skip


@pytest.mark.parametrize("op", MOVING)
def test_rows_that_would_move_are_refused_and_whole_ones_run(op: str) -> None:
    """By trace or by XLA's compiler. Arrays that are whole give the bits of one device."""
    (count, run), ids = MOVING[op], draw()[-1]
    x = whole(0, count, D)

    def call(x: jax.Array) -> Any:
        return run(x, moe_jax.make_layout(ids, E))

    for kind, error in ((AUTO, jax.errors.JaxRuntimeError), (EXPLICIT, moe_jax.Unsupported)):
        mesh = mesh_of(kind, 4)
        with jax.set_mesh(mesh):
            found = jax.jit(call)(*placed(mesh, (x,), P()))
            with pytest.raises(error, match="must be whole on every device, got "):
                jax.jit(call)(*placed(mesh, (x,), P("data")))
        same(found, call(x))
