"""Flax layers against each other, the composed op and the NumPy twins; presets, options, losses, explanations."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx as flax_nnx
from hypothesis import given, settings
from hypothesis import strategies as st

import moe_jax
from moe_core.layers import MAXTEXT, LayerWeights, MoEAux, MoELayerSpec, Storage
from moe_core.ops.routing.reference_backward import router_losses_backward
from moe_core.parity.tolerance import EXACT, Tolerance, assert_close
from moe_core.specs import RouterSpec
from moe_core.specs.operands import map_arrays
from moe_jax import Target, export_target, layers, linen, nnx
from tests.support import strategies
from tests.support.flax import (
    Bundles,
    as_numpy,
    draw_tokens,
    draw_weights,
    in_numpy,
    jax_array,
    linen_layer,
    nnx_layer,
    preset,
    stored_for_flax,
)
from tests.support.jax import REAL_KERNELS, on_engines, running_on
from tests.support.layers import layer_cases, tolerances

#: Sums of a few thousand fp32 terms near 1, in whatever order.
LOSS = Tolerance(relative_frobenius=1e-5, worst=1e-5)


def require_same_bits(actual: Any, expected: Any, label: str) -> None:
    assert actual.dtype == expected.dtype and actual.shape == expected.shape, label
    assert np.asarray(actual).tobytes() == np.asarray(expected).tobytes(), f"{label}: the bits differ"


def check_aux(actual: MoEAux, expected: MoEAux, tolerances: dict[str, Tolerance], label: str) -> None:
    actual = as_numpy(actual)
    for name, tolerance in {"weights": tolerances["weights"], "load_balance_loss": LOSS, "z_loss": LOSS}.items():
        assert_close(getattr(actual, name), np.asarray(getattr(expected, name)), tolerance, f"{label}: {name}")
    for name in ("ids", "tokens_per_expert", "invalid_ids"):
        assert_close(getattr(actual, name), getattr(expected, name), EXACT, f"{label}: {name}")
        assert getattr(actual, name).dtype == np.int32
    assert actual.load_balance_loss.shape == actual.z_loss.shape == ()


def check_flavours(
    weights: LayerWeights, spec: MoELayerSpec, x: np.ndarray, token_mask: np.ndarray | None = None
) -> None:
    """NNX, Linen and the composed op: equal bits, and the NumPy twins' numbers."""
    arrays, mask = jnp.asarray(x), jax_array(token_mask)
    layer = nnx_layer(weights, spec, param_dtype=weights.dtype)
    y, aux = jax.jit(lambda layer, x, mask: layer(x, token_mask=mask, return_aux=True))(layer, arrays, mask)
    module, variables = linen_layer(weights, spec, param_dtype=weights.dtype)
    y_linen = jax.jit(lambda variables, x, mask: module.apply(variables, x, token_mask=mask))(variables, arrays, mask)
    require_same_bits(y_linen, y, "Linen and NNX")
    if spec.capacity_factor is None:
        own = stored_for_flax(weights, spec)

        def op(own: Bundles, x: jax.Array, mask: jax.Array | None) -> moe_jax.MoEOutput:
            mask = None if mask is None else mask.reshape(-1)
            moe_spec = spec.moe_spec(MAXTEXT)
            x = x.reshape(-1, spec.d_model)
            return moe_jax.moe(x, own.experts, own.router, moe_spec, shared=own.shared, token_mask=mask)

        result = jax.jit(op)(own, arrays, mask)
        require_same_bits(y.reshape(result.output.shape), result.output, "layer and op")
        require_same_bits(aux.ids, result.ids, "ids of layer and op")
    expected, expected_aux = in_numpy(x, weights, spec, token_mask)
    allowed = tolerances(spec, x.dtype.name)
    assert_close(np.asarray(y), expected, allowed["output"], "layer and NumPy twin")
    check_aux(aux, expected_aux, allowed, "layer and NumPy twin")


@pytest.mark.parametrize(("family", "dtype"), [("mixtral", "float32"), ("qwen3_moe", "bfloat16"),
    ("gpt_oss", "bfloat16"), ("deepseek_v3", "float32"), ("deepseek_v3", "bfloat16"),
    ("qwen2_moe", "float32")])  # fmt: skip
def test_presets_on_the_real_kernels(family: str, dtype: str) -> None:
    spec = preset(family)
    with running_on(REAL_KERNELS):
        check_flavours(draw_weights(spec, dtype), spec, draw_tokens(spec, dtype, 2, 5))


@settings(max_examples=10)
@given(
    case=layer_cases(),
    storage=st.sampled_from(
        [Storage("out_in", "halves", "out_in"), Storage("in_out", "interleaved", "out_in"), MAXTEXT]
    ),
    capacity_factor=st.sampled_from([None, None, 0.5, 1.0]),
)
def test_any_layer_on_the_reference_engine(case: Any, storage: Storage, capacity_factor: float | None) -> None:
    spec, shape, mask, seed = case
    spec = dataclasses.replace(spec, capacity_factor=capacity_factor)
    weights = draw_weights(spec, seed=seed, storage=storage)
    with running_on("reference"):
        check_flavours(weights, spec, draw_tokens(spec, "float32", *shape, seed=seed), mask)


def test_capacity_on_the_real_kernels() -> None:
    spec = dataclasses.replace(preset("deepseek_v3"), capacity_factor=0.6)
    x = draw_tokens(spec, "float32", 11)
    with running_on(REAL_KERNELS):
        check_flavours(draw_weights(spec), spec, x, np.arange(11) != 4)
    _, aux = in_numpy(x, draw_weights(spec), spec)
    assert (aux.ids == -1).any() and (aux.ids >= 0).any(), "the limit drops some slots and not all"


@on_engines
def test_a_masked_token_gets_the_shared_experts_alone(engine: str) -> None:
    spec = preset("qwen2_moe")
    weights, x = draw_weights(spec), draw_tokens(spec, "float32", 2, 3)
    mask = np.array([[True, False, True], [True, True, False]])
    with running_on(engine):
        check_flavours(weights, spec, x, mask)
        plain = dataclasses.replace(spec, shared_experts=None)
        routed = nnx_layer(dataclasses.replace(weights, shared=None), plain)(
            jnp.asarray(x), token_mask=jnp.asarray(mask)
        )
    assert not np.asarray(routed)[~mask].any() and np.asarray(routed)[mask].all()


def test_dtype_is_computed_in_and_returned() -> None:
    """fp32 parameters, bf16 compute: the matrices are rounded, gates and biases are not."""
    spec = preset("gpt_oss")
    weights, x = draw_weights(spec), jnp.asarray(draw_tokens(spec, "float32", 6))
    with running_on("reference"):
        layer = nnx_layer(weights, spec, dtype=jnp.bfloat16)
        y = layer(x)
        assert y.dtype == jnp.bfloat16 and layer.wi_0.get_value().dtype == jnp.float32
        own = stored_for_flax(weights, spec)
        rounded = {name: getattr(own.experts, name).astype(jnp.bfloat16) for name in ("gate_up", "up", "down")}
        experts = dataclasses.replace(own.experts, **rounded)
        expected = moe_jax.moe(x.astype(jnp.bfloat16), experts, own.router, spec.moe_spec(MAXTEXT)).output
        require_same_bits(y, expected, "bf16 compute on fp32 parameters")
        module, variables = linen_layer(weights, spec, dtype=jnp.bfloat16)
        require_same_bits(module.apply(variables, x), y, "Linen")
        # No dtype: the wider of x and the parameters.
        assert nnx_layer(weights, spec)(x.astype(jnp.bfloat16)).dtype == jnp.float32
        narrow = nnx_layer(draw_weights(spec, "bfloat16"), spec, param_dtype=jnp.bfloat16)
        assert narrow(x.astype(jnp.bfloat16)).dtype == jnp.bfloat16 and narrow(x).dtype == jnp.float32


LOSSES = jax.jit(layers.router_losses, static_argnames="spec")


def test_the_losses_of_a_uniform_router() -> None:
    """Load balance 1, z-loss log(E)^2, as their definitions promise; one expert for all gives E."""
    balance, z = LOSSES(np.zeros((6, 4), np.float32), np.array([3, 3, 3, 3]), spec=RouterSpec(2))
    np.testing.assert_allclose([balance, z], [1.0, np.log(4) ** 2], rtol=1e-6)
    skewed = np.zeros((6, 4), np.float32)
    skewed[:, 2] = 100
    balance, _ = LOSSES(skewed, np.array([0, 0, 6, 0]), spec=RouterSpec(1))
    np.testing.assert_allclose(balance, 4.0, rtol=1e-6)


def test_losses_are_differentiable_and_blind_to_masked_logits() -> None:
    mask = np.array([True, False, True])
    logits = np.random.default_rng(0).standard_normal((3, 5)).astype(np.float32)
    wild = logits.copy()
    wild[1] = np.nan

    @jax.jit
    def loss(logits: jax.Array) -> jax.Array:
        return sum(layers.router_losses(logits, np.array([2, 0, 1, 1, 0]), mask, spec=RouterSpec(2)), jnp.float32(0))

    np.testing.assert_array_equal(loss(wild), loss(logits))
    gradient = np.asarray(jax.jit(jax.grad(loss))(wild))
    assert np.isfinite(gradient).all() and gradient[0].any() and not gradient[1].any()


@pytest.mark.parametrize("low", [-50.0, -100.0, -1e4])
@pytest.mark.parametrize("scoring", ["sigmoid", "sqrt_softplus"])
def test_the_balance_loss_of_very_negative_logits_has_its_gradient(scoring: str, low: float) -> None:
    """Scores underflow there, and their sum with them."""
    logits, counts = strategies.low_logits(low), np.array([2, 0, 1, 1, 0])
    spec = RouterSpec(2, scoring=scoring)
    expected = router_losses_backward(1.0, None, logits, counts, spec=spec)
    found = jax.jit(jax.grad(lambda logits: layers.router_losses(logits, counts, spec=spec)[0]))(logits)
    assert expected[0].any()
    np.testing.assert_allclose(np.asarray(found), expected, rtol=1e-4, atol=1e-7)


def test_update_correction_bias() -> None:
    update = jax.jit(layers.update_correction_bias, static_argnums=2)
    bias = np.array([0.5, 0.0, 0.0, -0.5], np.float32)
    np.testing.assert_array_equal(update(bias, np.array([8, 2, 4, 2]), 0.25), [0.25, 0.25, 0.0, -0.25])
    # The mean is 4.25: nobody is at it.
    np.testing.assert_array_equal(update(bias, np.array([9, 2, 4, 2]), 0.25), [0.25, 0.25, 0.25, -0.25])
    # Counts whose sum float32 cannot hold.
    large = np.array([2**28 + 1, 2**28 - 1, 2**28, 2**28])
    np.testing.assert_array_equal(update(bias, large, 0.25), [0.25, 0.25, 0.0, -0.5])
    stacked = update(np.zeros((2, 2), np.float32), np.array([[1, 3], [5, 1]]), 1.0)
    np.testing.assert_array_equal(stacked, [[1, -1], [-1, 1]])
    for wrong in (np.zeros(3, np.int32), np.zeros(4, np.float32)):
        with pytest.raises(moe_jax.InvalidInput, match=r"tokens_per_expert must be int32\[4\] like correction_bias"):
            layers.update_correction_bias(jnp.asarray(bias), jnp.asarray(wrong), 0.1)


def test_explain_says_what_runs() -> None:
    spec = dataclasses.replace(preset("deepseek_v3"), capacity_factor=1.0)
    module = linen.MoE.from_spec(preset("mixtral"), dtype=jnp.bfloat16, num_layers=2)
    layer = flax_nnx.eval_shape(lambda: nnx.MoE.from_spec(spec, rngs=flax_nnx.Rngs(0)))
    with running_on("reference"):
        text = module.explain((2, 5, 48))
        assert "moe on reference" in text and "x: bfloat16[10, 48]" in text
        assert "experts.gate_up: bfloat16[4, 48, 40]" in text, "one layer is cut out of the fp32 stack"
        text = layer.explain(7)
        assert "capacity limit: slots behind the first 2 of an expert" in text and "routing.ids: int32[7, 2]" in text
        assert [text.count(f"{op} on reference") for op in ("router", "routing", "layout", "moe")] == [1, 1, 1, 1]
        with export_target(Target("cuda", 90, 132)):
            assert "cuda sm_90" in layer.explain(7)


def test_explain_reads_the_dtypes_that_were_loaded() -> None:
    """Experts in bfloat16, the router's weight and the biases wider, as checkpoints hold them."""
    spec = dataclasses.replace(preset("qwen2_moe"), router_bias=True, correction_bias=True)
    weights = draw_weights(spec, "bfloat16")
    weights = dataclasses.replace(weights, router=map_arrays(weights.router, lambda array: array.astype(np.float32)))
    with running_on("reference"):
        layer = nnx_layer(weights, spec, param_dtype=jnp.bfloat16)
        module, variables = linen_layer(weights, spec, param_dtype=jnp.bfloat16)
        text = layer.explain(5)
        assert "x: bfloat16[5, 48]" in text and "routing.weight: float32[48, 5]" in text
        assert "routing.bias: float32[5]" in text and "experts.down: bfloat16[5, 24, 48]" in text
        assert module.explain(5, variables) == text
        assert module.explain(5, jax.eval_shape(lambda: variables)) == text
        assert "routing.weight: bfloat16[48, 5]" in module.explain(5), "as made by init"
        stacked, held = linen_layer([weights] * 2, spec, param_dtype=jnp.bfloat16, num_layers=2)
        text = stacked.explain(5, held)
        assert "routing.weight: float32[48, 5]" in text and "experts.down: bfloat16[2, 5, 24, 48]" in text
        assert nnx_layer([weights] * 2, spec, param_dtype=jnp.bfloat16, num_layers=2).explain(5) == text
