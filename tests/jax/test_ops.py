"""NumPy arguments, slices and explanations of JAX ops; tests/frontends has what torch shares."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

import moe_jax
from moe_core.ops.moe.fuse import CHAINED
from moe_core.parity.tolerance import EXACT, assert_close
from moe_jax.autodiff.moe import plain_top_k
from tests.support.jax import on_engines, running_on, small_layer, to_jax


def test_numpy_arguments_are_arrays_too() -> None:
    layer = small_layer()
    with running_on("reference"):
        result = moe_jax.moe(*layer)
        np.testing.assert_array_equal(
            np.asarray(result.output), np.asarray(moe_jax.moe(*to_jax(tuple(layer[:3])), layer.spec).output)
        )


def test_explain_names_the_engine_and_takes_shapes() -> None:
    layer = small_layer()
    shapes = jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype), tuple(layer[:3]))
    with running_on("reference"):
        text = moe_jax.explain_moe(*shapes, spec=layer.spec)
        assert "moe on reference" in text and "NumPy reference" in text
        with moe_jax.export_target(moe_jax.Target("cuda", 90, 132)):
            text = moe_jax.explain_moe(*shapes, spec=layer.spec)
        assert "moe on cuda sm_90 (132 SMs)" in text and CHAINED.name in text


@on_engines
def test_slices_of_tokens_start_anywhere(engine: str) -> None:
    """JAX gives every slice memory of its own, and copies NumPy arrays that lie anywhere."""
    random = np.random.default_rng(7)
    wide = random.integers(-1, 5, (9, 3), dtype=np.int32)
    with running_on(engine):
        expected = moe_jax.make_layout(jnp.asarray(wide[2:].copy()), 5).slot_of_row
        for name, ids in {"numpy": wide[2:], "eager": jnp.asarray(wide)[2:]}.items():
            assert_close(np.asarray(moe_jax.make_layout(ids, 5).slot_of_row), np.asarray(expected), EXACT, name)
        jitted = jax.jit(lambda ids: moe_jax.make_layout(ids[2:], 5).slot_of_row)(jnp.asarray(wide))
        assert_close(np.asarray(jitted), np.asarray(expected), EXACT, "jit")


def test_ids_that_int32_cannot_hold_stay_out_of_range() -> None:
    """None becomes -1, which marks a slot without an expert."""
    ids = [2**32 + 3, -(2**40), 2**31, -1, 5]
    with jax.enable_x64(True):
        plain, _ = plain_top_k(jnp.asarray(ids), jnp.ones(len(ids)))
    assert plain.dtype == jnp.int32 and plain.tolist() == [2**31 - 1, -2, 2**31 - 1, -1, 5]


T, K, E = 48, 2, 6
