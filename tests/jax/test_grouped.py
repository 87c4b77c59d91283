"""`ragged_dot`, `ragged_dot_general` and `gmm` beside JAX's own, in its transformations."""

from __future__ import annotations

from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.lax import DotAlgorithmPreset, Precision, RaggedDotDimensionNumbers
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import moe_jax
from moe_jax import InvalidInput, Unsupported
from tests.support.jax import NUM_DEVICES, cpu_mesh, on_engines, running_on

SIZES = (4, 0, 9, 2, 3)
CONTRACTION = RaggedDotDimensionNumbers((([0], [0]), ([], [])), [0], [])


def draw(*shape: int, whole: bool = False, seed: int = 0) -> jax.Array:
    """Normal numbers, or small whole ones, whose sums are exact in any order."""
    random = np.random.default_rng([*shape, seed])
    values = random.integers(-3, 4, shape) if whole else random.standard_normal(shape)
    return jnp.asarray(values.astype(np.float32))


def sizes() -> jax.Array:
    return jnp.asarray(SIZES, jnp.int32)


@on_engines
def test_equals_jax_bitwise_where_sums_are_exact(engine: str) -> None:
    """Results and gradients, and zeros for the tail."""
    with running_on(engine):
        lhs, rhs, d_y = draw(24, 16, whole=True), draw(5, 16, 12, whole=True), draw(24, 12, whole=True)
        pairs = []
        for product, general in (
            (moe_jax.ragged_dot, moe_jax.ragged_dot_general),
            (jax.lax.ragged_dot, jax.lax.ragged_dot_general),
        ):
            y, pull = jax.vjp(lambda lhs, rhs: product(lhs, rhs, sizes()), lhs, rhs)  # noqa: B023
            pairs.append((y, *pull(d_y), general(lhs, d_y, sizes(), CONTRACTION)))
        for ours, theirs in zip(*pairs, strict=True):
            np.testing.assert_array_equal(np.asarray(ours), np.asarray(theirs))
        assert not pairs[0][0][18:].any()


@on_engines
def test_general_forms(engine: str) -> None:
    """Axes in any order give the products of the canonical order."""
    with running_on(engine):
        lhs, rhs, other = draw(24, 16), draw(5, 16, 12), draw(24, 12)
        y, d_rhs = moe_jax.ragged_dot(lhs, rhs, sizes()), moe_jax.ragged_dot_general(lhs, other, sizes(), CONTRACTION)
        for swap_lhs, swap_rhs in ((False, True), (True, False), (True, True)):
            left, right = lhs.T if swap_lhs else lhs, rhs.swapaxes(1, 2) if swap_rhs else rhs
            numbers = RaggedDotDimensionNumbers(
                (([0 if swap_lhs else 1], [2 if swap_rhs else 1]), ([], [])), [1 if swap_lhs else 0], [0]
            )
            found = moe_jax.ragged_dot_general(left, right, sizes(), numbers)
            np.testing.assert_array_equal(np.asarray(found), np.asarray(y))
            sides = [int(swap_lhs)], [int(swap_rhs)]
            numbers = RaggedDotDimensionNumbers((sides, ([], [])), sides[0], [])
            found = moe_jax.ragged_dot_general(left, other.T if swap_rhs else other, sizes(), numbers)
            np.testing.assert_array_equal(np.asarray(found), np.asarray(d_rhs))


@on_engines
def test_group_offset_computes_a_part(engine: str) -> None:
    with running_on(engine):
        lhs, rhs, offset = draw(24, 16), draw(5, 16, 12), jnp.ones(1, jnp.int32)
        whole, pull_whole = jax.vjp(lambda lhs: moe_jax.ragged_dot(lhs, rhs, sizes()), lhs)
        y, pull = jax.vjp(lambda lhs, rhs: moe_jax.ragged_dot(lhs, rhs, sizes(), None, None, offset), lhs, rhs[1:3])
        inside = (jnp.arange(24) >= 4) & (jnp.arange(24) < 13)
        np.testing.assert_array_equal(np.asarray(y), np.asarray(jnp.where(inside[:, None], whole, 0)))
        d_lhs, d_rhs = pull(whole)
        wanted = jnp.where(inside[:, None], pull_whole(whole)[0], 0)
        np.testing.assert_array_equal(np.asarray(d_lhs), np.asarray(wanted))
        wanted = moe_jax.ragged_dot_general(lhs, whole, sizes(), CONTRACTION)[1:3]
        np.testing.assert_array_equal(np.asarray(d_rhs), np.asarray(wanted))


def test_transformations() -> None:
    """vmap, scan, checkpoint and shard_map of a call give the bits of the call."""
    with running_on("reference"):
        lhs, rhs = draw(NUM_DEVICES, 24, 16), draw(5, 16, 16)
        each = jnp.stack([moe_jax.ragged_dot(one, rhs, sizes()) for one in lhs])
        mapped = jax.vmap(moe_jax.ragged_dot, in_axes=(0, None, None))(lhs, rhs, sizes())
        scanned = jax.lax.scan(lambda carry, one: (carry, moe_jax.ragged_dot(one, rhs, sizes())), 0, lhs)[1]
        for found in (mapped, scanned):
            np.testing.assert_array_equal(np.asarray(found), np.asarray(each))

        def loss(rhs: Any, lhs: Any) -> Any:
            return (moe_jax.ragged_dot(jnp.tanh(moe_jax.ragged_dot(lhs, rhs, sizes())), rhs, sizes()) ** 2).sum()

        wanted = jax.grad(loss)(rhs, lhs[0])
        found = jax.jit(jax.grad(jax.checkpoint(loss)))(rhs, lhs[0])
        np.testing.assert_array_equal(np.asarray(found), np.asarray(wanted))
        specs = {"in_specs": (P(), P("data")), "out_specs": P()}
        mesh = cpu_mesh()
        step = jax.shard_map(lambda rhs, lhs: jax.lax.psum(loss(rhs, lhs[0]), "data"), mesh=mesh, **specs)
        wanted = sum(jax.grad(loss)(rhs, one) for one in lhs)
        np.testing.assert_allclose(np.asarray(jax.jit(jax.grad(step))(rhs, lhs)), np.asarray(wanted), 1e-5, 1e-4)


def test_results_in_other_dtypes_and_precisions() -> None:
    with running_on("reference"):
        lhs, rhs = draw(24, 16, whole=True), draw(5, 16, 12, whole=True)
        y = moe_jax.ragged_dot(lhs, rhs, sizes())
        half = lhs.astype(jnp.bfloat16), rhs.astype(jnp.bfloat16)
        assert moe_jax.ragged_dot(*half, sizes()).dtype == jnp.bfloat16
        for wide in (
            moe_jax.ragged_dot(*half, sizes(), preferred_element_type=jnp.float32),
            moe_jax.gmm(*half, sizes(), tiling=None),
            moe_jax.ragged_dot(lhs, rhs, sizes(), (Precision.HIGH, Precision.HIGH)),
            moe_jax.ragged_dot(lhs, rhs, sizes(), DotAlgorithmPreset.F32_F32_F32),
            moe_jax.ragged_dot(lhs, rhs, sizes(), "float32"),
        ):
            assert wide.dtype == jnp.float32
            np.testing.assert_array_equal(np.asarray(wide), np.asarray(y))


def test_wrong_arguments() -> None:
    lhs, rhs, one = draw(24, 16), draw(5, 16, 12), jnp.ones(1, jnp.int32)
    batched = RaggedDotDimensionNumbers((([2], [2]), ([0], [0])), [1], [])
    dot: Any = moe_jax.ragged_dot
    general: Any = moe_jax.ragged_dot_general
    gmm: Any = moe_jax.gmm
    for call, error, message in (
        (lambda: dot(lhs, rhs, sizes()[:4]), InvalidInput, r"group_sizes must be one axis of 5, got \(4,\); pass an"),
        (lambda: dot(lhs, rhs, sizes()[:4], group_offset=one), InvalidInput, "group_sizes must be one axis of at"),
        (lambda: dot(lhs, rhs, sizes(), group_offset=one[0]), InvalidInput, r"group_offset must be int32 \[1\], got"),
        (lambda: dot(lhs, rhs, sizes() * 1.0), InvalidInput, "group_sizes must be integers, got float32; cast"),
        (lambda: dot(lhs[:, :9], rhs, sizes()), InvalidInput, "rhs must have 9 as its axis k, like lhs, got"),
        (lambda: dot(lhs, rhs[0], sizes()), InvalidInput, r"lhs and rhs must be \[m, k\] and \[groups, k, n\], got"),
        (lambda: dot(lhs, rhs.astype(jnp.bfloat16), sizes()), InvalidInput, "rhs must be float32 like lhs, got bfloat"),
        (lambda: dot(lhs, rhs, sizes(), DotAlgorithmPreset.BF16_BF16_F32), Unsupported, "precision must be None, DEF"),
        (lambda: dot(lhs, rhs, sizes(), ("highest", {})), Unsupported, "precision must be None, DEFAULT, HIGH or HIGH"),
        (lambda: dot(lhs, rhs, sizes(), None, jnp.int8), InvalidInput, "preferred_element_type must be one of bfloat"),
        (lambda: dot(sizes()[:, None], sizes()[None, None], sizes()), InvalidInput, "lhs must be bfloat16 or .*int32"),
        (lambda: dot(lhs, rhs[:, :, :0], sizes()), InvalidInput, "rhs must have no empty axis, got .* leave the call"),
        (lambda: dot(lhs, rhs, sizes(), out_sharding=P()), Unsupported, "out_sharding must be None, got P"),
        (lambda: general(lhs[None], rhs, sizes(), batched), Unsupported, "one contracted and one ragged dimension and"),
        (lambda: general(lhs, rhs, sizes(), CONTRACTION), InvalidInput, "rhs must have two axes and no group"),
        (lambda: gmm(lhs, rhs, sizes(), existing_out=lhs), Unsupported, "existing_out must be None, got an array; add"),
        (lambda: gmm(lhs, rhs, sizes(), interpret=True), Unsupported, "interpret must be False, got True; use moe_jax"),
    ):  # fmt: skip
        with pytest.raises(cast(Any, error), match=message):
            call()


@pytest.mark.parametrize(("axes", "kind"), [(("data",), AxisType.Explicit), (("data", "model"), AxisType.Auto)])
def test_rows_of_a_mesh_are_multiplied_where_they_are(axes: tuple[str, ...], kind: AxisType) -> None:
    """Products, gradients and contractions of rows on several devices have the numbers of one, in both orders."""
    mesh = jax.make_mesh(
        (2,) * len(axes), axes, axis_types=(kind,) * len(axes), devices=jax.devices("cpu")[: 2 ** len(axes)]
    )
    lhs, rhs, other = draw(32, 16, whole=True), draw(5, 16, 12, whole=True), draw(32, 12, whole=True)

    def results(lhs: jax.Array, other: jax.Array, rhs: jax.Array, sizes: jax.Array) -> Any:
        y, pull = jax.vjp(lambda lhs, rhs: moe_jax.ragged_dot(lhs, rhs, sizes), lhs, rhs)
        part = moe_jax.gmm(lhs, rhs[1:3], sizes, group_offset=jnp.ones(1, jnp.int32))
        back = moe_jax.gmm(other, rhs, sizes, transpose_rhs=True)
        return y, *pull(other), moe_jax.ragged_dot_general(lhs, other, sizes, CONTRACTION), part, back

    jitted = jax.jit(results)
    with running_on("reference"):
        for lengths in ((9, 9, 9, 9, 9), (0, 0, 32, 0, 0), (4, 0, 17, 2, 3)):
            groups = jnp.asarray(lengths, jnp.int32)
            wanted = results(lhs, other, rhs, groups)
            split = jax.device_put((lhs, other), NamedSharding(mesh, P(axes)))
            for call in (jitted, *([results] if kind == AxisType.Auto and lengths[2] == 32 else [])):
                with jax.set_mesh(mesh):
                    found: Any = call(split[0], split[1], rhs, groups)
                for ours, one in zip(found, wanted, strict=True):
                    np.testing.assert_array_equal(np.asarray(ours), np.asarray(one))
            assert found[0].sharding.is_equivalent_to(split[1].sharding, 2)
        halves = [side.astype(jnp.bfloat16) for side in split]
        total = moe_jax.ragged_dot_general(halves[0], halves[1], groups, CONTRACTION)
        assert total.dtype == jnp.bfloat16 and total.sharding.is_fully_replicated
