"""A layer out of ops has the gradients of the composed op, to the bit, where `wide` adds up what flows into x."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import moe_jax
from tests.support.jax import on_engines, running_on, small_layer, to_jax

Leaves = dict[str, Any]


def leaves_of(dtype: str) -> tuple[Leaves, Any]:
    layer = small_layer(dtype, num_tokens=19)
    experts = {"gate_up": layer.experts.gate_up, "down": layer.experts.down}
    return to_jax({"x": layer.x, **experts, "router": layer.routing.weight}), layer.spec


def composed(leaves: Leaves, spec: Any) -> Any:
    experts = moe_jax.ExpertWeights(leaves["gate_up"], leaves["down"])
    return moe_jax.moe(leaves["x"], experts, moe_jax.RouterWeights(leaves["router"]), spec).output


def staged(leaves: Leaves, spec: Any, wide: bool = True) -> Any:
    """What expert parallelism does: route, send rows to the experts, which see a slot each, and add up at home."""
    x = leaves["x"]
    given = {"wide": x.astype(jnp.float32)} if wide else {}
    logits = moe_jax.router(x, leaves["router"], spec=spec.logits_spec(), **given)
    ids, weights = moe_jax.route(logits, spec.router)
    layout = moe_jax.make_layout(ids, leaves["down"].shape[0])
    rows, slots = moe_jax.gather_rows(x, layout, **given), layout.slot_of_row
    experts = moe_jax.ExpertWeights(leaves["gate_up"], leaves["down"])
    routing = moe_jax.TopK(ids.reshape(-1)[slots][:, None], weights.reshape(-1)[slots][:, None])
    alone = dataclasses.replace(spec, router=None)
    return moe_jax.reduce(moe_jax.moe(rows, experts, routing, alone).output, layout, order="row")


def gradients(layer: Any, dtype: str, **options: Any) -> Leaves:
    leaves, spec = leaves_of(dtype)
    y, pull = jax.vjp(lambda leaves: layer(leaves, spec, **options), leaves)
    d_y = np.random.default_rng(0).standard_normal(y.shape).astype(y.dtype)
    return {"y": y} | {f"d_{name}": value for name, value in pull(jnp.asarray(d_y))[0].items()}


@on_engines
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_stages_have_the_gradients_of_the_composed_op(engine: str, dtype: str) -> None:
    with running_on(engine):
        expected, found = gradients(composed, dtype), gradients(staged, dtype)
        for name, value in expected.items():
            assert np.asarray(found[name]).tobytes() == np.asarray(value).tobytes(), name
        twice = gradients(staged, dtype, wide=False)["d_x"]
        assert dtype == "float32" or not np.array_equal(twice, expected["d_x"]), "two casts are one"


def test_programs() -> None:
    with running_on("reference"):
        leaves, spec = leaves_of("bfloat16")

        def loss(leaves: Leaves) -> Any:
            return (staged(leaves, spec).astype(jnp.float32) ** 2).sum()

        wanted = jax.grad(loss)(leaves)
        for name, found in {"jit": jax.jit(jax.grad(loss)), "remat": jax.grad(jax.checkpoint(loss))}.items():
            for leaf, value in found(leaves).items():
                np.testing.assert_array_equal(value, wanted[leaf], f"{name} of {leaf}")


def test_what_wide_must_be() -> None:
    layer = small_layer()
    x, weight = to_jax((layer.x, layer.routing.weight))
    layout = moe_jax.make_layout(jnp.zeros((9, 1), jnp.int32), 1)
    with pytest.raises(moe_jax.InvalidInput, match="wide must be float32, got float16; cast it"):
        moe_jax.gather_rows(x, layout, wide=x.astype(jnp.float16))
    with pytest.raises(moe_jax.InvalidInput, match=r"wide must be \[9, 48\], got \(8, 48\)"):
        moe_jax.router(x, weight, wide=x[:8])
    with pytest.raises(moe_jax.Unsupported, match="gather_rows has no second derivative"):
        jax.hessian(lambda x: (moe_jax.gather_rows(x, layout) ** 3).sum())(x)
