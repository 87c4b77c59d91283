"""Token rounding on JAX arrays: results, gradients, refusals, and the bits of torch."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import moe_jax
from moe_core.base.target import Target
from moe_core.ops.routing.rounding import plan_route_rounded, plan_route_rounded_backward
from moe_jax import InvalidInput, RouterSpec, TokenRounding, Unsupported
from tests.support.harness import engine_target, run_plan, spec_of
from tests.support.jax import on_engines, running_on

T, K, E = 48, 2, 6
RULE, ROUNDING = RouterSpec(K, renormalize=True), TokenRounding(16)
ARRAYS = {"logits": np.random.default_rng(0).standard_normal((T, E), np.float32), "token_mask": np.arange(T) % 5 != 1}


@on_engines
def test_results_and_gradient_are_those_of_the_plans(engine: str) -> None:
    """To the bit, eagerly and jitted: what torch's operators run too."""
    d_weights = np.random.default_rng(3).standard_normal((T, 2 * K), np.float32)
    with running_on(engine):
        target = Target("reference") if engine == "reference" else engine_target()
        specs = {name: spec_of(array) for name, array in ARRAYS.items()}
        plan = plan_route_rounded(specs["logits"], RULE, ROUNDING, target, token_mask=specs["token_mask"])
        expected = run_plan(plan, ARRAYS)
        mask = jnp.asarray(ARRAYS["token_mask"])

        def route(logits: jax.Array) -> moe_jax.RoundedRouting:
            return moe_jax.route_rounded(logits, RULE, ROUNDING, token_mask=mask)

        for run in (route, jax.jit(route)):
            found = run(jnp.asarray(ARRAYS["logits"]))
            for name, array in zip(found._fields, found, strict=True):
                np.testing.assert_array_equal(np.asarray(array), expected[name], err_msg=name)
        given = {"d_weights": d_weights, "logits": ARRAYS["logits"]}
        given |= {name: expected[name] for name in ("ids", "candidates")}
        plan = plan_route_rounded_backward(*(spec_of(array) for array in given.values()), RULE, ROUNDING, target)
        wanted = run_plan(plan, given)["d_logits"]
        gradient = jax.jit(jax.grad(lambda logits: (route(logits).weights * d_weights).sum()))
        np.testing.assert_array_equal(np.asarray(gradient(jnp.asarray(ARRAYS["logits"]))), wanted)


@on_engines
def test_a_layer_with_rounded_routing_trains(engine: str) -> None:
    random = np.random.default_rng(1)
    x, gate_up, down = (
        jnp.asarray(random.standard_normal(shape, np.float32) / 4) for shape in ((T, 8), (E, 8, 12), (E, 6, 8))
    )
    spec = moe_jax.MoESpec(moe_jax.Activation("silu"), row_limit=ROUNDING.row_limit(K))

    def loss(logits: jax.Array) -> jax.Array:
        routed = moe_jax.route_rounded(logits, RULE, ROUNDING)
        routing = moe_jax.TopK(routed.ids, routed.weights)
        return jnp.square(moe_jax.moe(x, moe_jax.ExpertWeights(gate_up, down), routing, spec).output).sum()

    with running_on(engine):
        logits = jnp.asarray(ARRAYS["logits"])
        value, gradient = jax.jit(jax.value_and_grad(loss))(logits)
        lower = loss(logits - 3e-3 * gradient / jnp.linalg.norm(gradient))
        assert lower < value and np.isfinite(np.asarray(gradient)).all()


def test_refusals() -> None:
    found = moe_jax.route_rounded(jnp.zeros((0, E)), RULE, TokenRounding())
    assert found.ids.shape == (0, 4) and found.tokens_per_expert.tolist() == [0] * E
    with pytest.raises(InvalidInput, match="tile must be at most num_tokens = 1, got 128: no expert could keep"):
        moe_jax.route_rounded(jnp.zeros((1, E)), RULE, TokenRounding())
    with pytest.raises(InvalidInput, match="rounding must be TokenRounding, got 128"):
        moe_jax.route_rounded(jnp.zeros((1, E)), RULE, 128)  # type: ignore[arg-type]
    with pytest.raises(Unsupported, match="second derivative"):
        jax.hessian(lambda logits: moe_jax.route_rounded(logits, RULE, ROUNDING).weights.sum())(
            jnp.asarray(ARRAYS["logits"])
        )
