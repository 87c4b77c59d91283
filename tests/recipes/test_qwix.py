"""Quantisation of models with our layers by the real qwix, after and in training, or it says why not."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flax", reason="the layers under test need flax")
qwix = pytest.importorskip("qwix", reason="needs qwix (pip install 'moebius[recipes]')")

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax import nnx as flax_nnx
from jax.sharding import AxisType

import moe_jax
from moe_core.formats import QuantizedSpec, QuantizedTensor, format_named
from moe_core.ops.quantize.reference import dequantize, quantize
from moe_jax import InvalidInput, Unsupported, layers, linen, nnx
from moe_jax.layers.trained_codes import fake_quantize
from moe_jax.nnx import ExpertsSpec
from tests.support.jax import on_engines, running_on
from tests.support.quantized.qwix import D, E, F, K, Model, quantized, rule, tokens

#: qwix 0.1.8 uses names that flax deprecates.
pytestmark = pytest.mark.filterwarnings(r"ignore::DeprecationWarning:qwix\.")

RULES = {
    "int8_row": rule(weight_qtype=jnp.int8),
    "int8_g32": rule(weight_qtype="int8", tile_size=32),
    "int4_g32": rule(weight_qtype=jnp.int4, tile_size=32),
    "int4_g64_zp": rule(weight_qtype=jnp.int4, tile_size=64, weight_calibration_method="minmax"),
    "int8_channel": rule(weight_qtype=jnp.int8, act_qtype=jnp.int8),
    "fp8_channel": rule(weight_qtype=jnp.float8_e4m3fn, act_qtype=jnp.float8_e4m3fn),
    "mxfp8": rule(weight_qtype="mxfp8", act_qtype="mxfp8", tile_size=32),
}
MX4 = {
    "mxfp4_w4a16": rule(weight_qtype="mxfp4", tile_size=32),
    "mxfp4_w4a8": rule(weight_qtype="mxfp4", act_qtype="mxfp8", tile_size=32),
    "mxfp4_w4a4": rule(weight_qtype="mxfp4", act_qtype="mxfp4", tile_size=32),
    "fp8_channel_weights": rule(weight_qtype=jnp.float8_e4m3fn),
}


@pytest.mark.parametrize("name", RULES)
def test_experts_are_quantised_as_the_rule_says(name: str) -> None:
    """The experts hold our format's codes, bit by bit, in the copy that qwix makes of the model."""
    with running_on("reference"):
        model = Model(flax_nnx.Rngs(0))
        before, y = model.moe.parameters(), model(tokens())
        found = quantized(model, RULES[name])
        scheme = found.moe.spec.experts.scheme
        assert scheme == layers.scheme_of_rule(RULES[name]) and str(scheme.weights) == name
        held = found.moe.parameters()
        for matrix in ("wi_0", "wi_1", "wo"):
            wanted = quantize(np.asarray(before[matrix]), scheme.weights, layout="in_out")
            np.testing.assert_array_equal(held[matrix]["values"], wanted.values)
            np.testing.assert_array_equal(held[matrix]["scales"], wanted.scales)
            error = np.linalg.norm(dequantize(wanted) - np.asarray(before[matrix])) / np.linalg.norm(before[matrix])
            assert error < (0.15 if "4" in name else 0.05)
        assert model.moe.spec.experts.scheme is None and (model(tokens()) == y).all()
        again = jax.jit(lambda model, x: model(x))(found, tokens())
        difference = float(jnp.linalg.norm(again - y) / jnp.linalg.norm(y))
        assert 0 < difference < (0.3 if "4" in name else 0.15)
        assert not qwix_params(found.moe), "everything of the experts is quantised"


def qwix_params(layer: nnx.MoE) -> list[str]:
    state = flax_nnx.to_flat_state(flax_nnx.state(layer, flax_nnx.Param))
    return [str(path) for path, _ in state if path[0] != "gate"]


@pytest.mark.parametrize("name", MX4)
def test_schemes_of_rules(name: str) -> None:
    assert str(layers.scheme_of_rule(MX4[name])) == name


@on_engines
def test_a_quantised_model_runs_on_the_kernels(engine: str) -> None:
    with running_on(engine):
        found = quantized(Model(flax_nnx.Rngs(0), dtype=jnp.bfloat16), RULES["int4_g32"])
        assert found(tokens()).dtype == jnp.bfloat16


def test_rules_choose_layers_by_path() -> None:
    with running_on("reference"):
        elsewhere = quantized(Model(flax_nnx.Rngs(0)), rule(module_path="inner", weight_qtype=jnp.int8))
        assert elsewhere.moe.spec.experts.scheme is None
        only = quantized(Model(flax_nnx.Rngs(0)), rule(module_path="moe", weight_qtype=jnp.int8))
        assert only.moe.spec.experts.scheme is not None and isinstance(only.inner.kernel, flax_nnx.Param)
        products = quantized(Model(flax_nnx.Rngs(0)), rule(op_names=("dot_general",), weight_qtype=jnp.int8))
        assert products.moe.spec.experts.scheme is None
        nothing = quantized(Model(flax_nnx.Rngs(0)), rule())
        assert nothing.moe.spec.experts.scheme is None


def test_stacks_are_quantised() -> None:
    with running_on("reference"):
        stack = nnx.MoE(D, F, E, K, num_layers=2, rngs=flax_nnx.Rngs(0))
        provider = qwix.PtqProvider([RULES["int8_row"]])
        found = qwix.quantize_model(stack, provider, tokens(), layer_index=1)
        assert found.wo.values.get_value().shape[:2] == (2, E)
        one, other = stack(tokens(), layer_index=1), found(tokens(), layer_index=1)
        np.testing.assert_allclose(one, other, atol=0.05)


REFUSED = {
    r"experts must be quantised to int8.*got uint8 with tile_size=None": rule(weight_qtype=jnp.uint8),
    r"got int8 with tile_size=16": rule(weight_qtype=jnp.int8, tile_size=16),
    r"got float8_e4m3fn with tile_size=None and 'rms,7'": rule(
        weight_qtype=jnp.float8_e4m3fn, weight_calibration_method="rms,7"
    ),
    r"must be int8_row with int8, .*got int4_row with int8": rule(weight_qtype=jnp.int4, act_qtype=jnp.int8),
    r"mxfp4 with mxfp4, got int8_g32 with int8": rule(weight_qtype=jnp.int8, act_qtype=jnp.int8, tile_size=32),
    r"act_static_scale .* got True": rule(weight_qtype=jnp.int8, act_qtype=jnp.int8, act_static_scale=True),
    r"act_qtype and tile_size of a rule need a weight_qtype": qwix.LoraRule(rank=2, alpha=1.0, tile_size=32),
    r"act_qtype of a QtRule must be None": qwix.QtRule(weight_qtype=jnp.int8, act_qtype=jnp.int8),
    r"bwd_qtype of a QtRule must be None": qwix.QtRule(weight_qtype=jnp.int8, bwd_qtype=jnp.int8),
    r"disable_channelwise_axes of a QtRule": qwix.QtRule(weight_qtype=jnp.int8, disable_channelwise_axes=True),
    r"weight_calibration_method of a QtRule": qwix.QtRule(weight_qtype=jnp.int8, weight_calibration_method="minmax"),
}


@pytest.mark.parametrize("message", REFUSED)
def test_rules_that_cannot_be_followed_are_refused(message: str) -> None:
    with pytest.raises(Unsupported, match=message):
        layers.scheme_of_rule(REFUSED[message])
    with running_on("reference"), pytest.raises(Unsupported, match=message):
        quantized(Model(flax_nnx.Rngs(0)), REFUSED[message])


def test_abstract_models_and_other_rules_are_refused() -> None:
    with running_on("reference"), pytest.raises(Unsupported, match=r"computes on the host"):
        flax_nnx.eval_shape(lambda: quantized(Model(flax_nnx.Rngs(0)), RULES["int8_row"]))
    with pytest.raises(InvalidInput, match=r"rule must be a qwix.QuantizationRule, got str"):
        layers.scheme_of_rule("int8")


TRAINED = ("int8_row", "int4_row", "int8_g32", "int4_g64", "fp8_channel", "mxfp8", "mxfp4")


@pytest.mark.parametrize("layout", ["in_out", "out_in"])
@pytest.mark.parametrize("name", TRAINED)
def test_trained_values_have_the_bits_of_quantised_ones(name: str, layout: str) -> None:
    format, random = format_named(name), np.random.default_rng(0)
    weight = random.standard_normal((5, 128, 192)) * np.exp(3 * random.standard_normal((5, 128, 192)))
    weight[0, :, 3] = weight[1, 5] = 0
    weight[2, 7, 9], weight[3, 1, 1], weight[4] = np.nan, np.inf, weight[4] * 1e-20
    for dtype in (jnp.float32, jnp.bfloat16):
        array = jnp.asarray(weight, dtype)
        wanted = dequantize(quantize(np.asarray(array), format, layout=layout), str(array.dtype))
        for call in (fake_quantize, jax.jit(fake_quantize, static_argnums=(1, 2))):
            got = call(array, format, layout)
            np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(wanted, np.float32))
        slope = jax.grad(lambda array: fake_quantize(array, format, layout).sum())(array)
        np.testing.assert_array_equal(np.asarray(slope, np.float32), 1)


@pytest.mark.parametrize("name", ["int8_row", "int4_g32", "mxfp4"])
def test_quantised_training_ends_in_the_weights_that_it_trained(name: str) -> None:
    """Experts train through the values that PtqProvider gives them afterwards, in NNX and Linen, with gradients of
    those values."""
    chosen, x = (RULES | {"mxfp4": MX4["mxfp4_w4a16"]})[name], tokens()
    with running_on("reference"):
        model = Model(flax_nnx.Rngs(0))
        trained = qwix.quantize_model(model, qwix.QtProvider([dataclasses.replace(chosen, module_path="moe")]), x)
        optimizer = flax_nnx.Optimizer(trained, optax.adam(1e-2), wrt=flax_nnx.Param)

        @flax_nnx.jit
        def step(model: Any, optimizer: Any) -> Any:
            loss, gradients = flax_nnx.value_and_grad(lambda model: jnp.square(model(x) - x).mean())(model)
            optimizer.update(model, gradients)
            return loss

        losses = [float(step(trained, optimizer)) for _ in range(6)]
        assert losses[-1] < losses[0]
        scheme, layer = layers.scheme_of_rule(chosen), nnx.MoE(D, F, E, K, rngs=flax_nnx.Rngs(0))
        assert scheme is not None
        flax_nnx.update(layer, flax_nnx.state(trained.moe, flax_nnx.Param))
        held, h = layer.parameters(), trained.inner(x)
        values = layers.fake_quantized(held, layer.spec, scheme)
        layer.quantize_experts(scheme)
        for matrix in ("wi_0", "wi_1", "wo"):
            tensor = QuantizedTensor(QuantizedSpec(scheme.weights, "in_out"), **layer.parameters()[matrix])
            np.testing.assert_array_equal(values[matrix], moe_jax.dequantize(tensor))
        y = trained(x)
        np.testing.assert_allclose(layer(h), y, atol=1e-5)

        def loss(parameters: Any) -> jax.Array:
            return jnp.square(layers.forward(parameters, h, nnx.MoE(D, F, E, K, rngs=flax_nnx.Rngs(0)).spec)).sum()

        wanted = jax.grad(loss)(values)
        found = flax_nnx.grad(lambda model: jnp.square(model(x)).sum())(trained).moe
        for matrix in ("wi_0", "wi_1", "wo"):
            np.testing.assert_array_equal(found[matrix].get_value(), wanted[matrix])
        twin = qwix.quantize_model(linen.MoE(D, F, E, K), qwix.QtProvider([chosen]))
        np.testing.assert_array_equal(twin.apply({"params": held}, h), y)


def test_quantised_training_on_a_mesh() -> None:
    """Experts and inputs of experts split over devices, automatic and explicit axes: the numbers of one device."""
    chosen, x = RULES["int8_g32"], tokens().repeat(2, axis=0)[:8]
    with running_on("reference"):
        layer = nnx.MoE(D, F, E, K, rngs=flax_nnx.Rngs(0))
        trained = qwix.quantize_model(layer, qwix.QtProvider([chosen]), x)
        loss = lambda model, x: jnp.square(model(x)).sum()  # noqa: E731
        y, wanted = trained(x), flax_nnx.grad(loss)(trained, x)
        for kind in (AxisType.Auto, AxisType.Explicit):
            mesh = jax.make_mesh((4,), ("ep",), axis_types=(kind,))
            spread = qwix.quantize_model(layer, qwix.QtProvider([chosen]), x)
            spread.parallelize(mesh)
            with jax.set_mesh(mesh):
                np.testing.assert_array_equal(jax.jit(lambda model, x: model(x))(spread, x), y)
                found = flax_nnx.jit(flax_nnx.grad(loss), graph_updates=False)(spread, x)
            np.testing.assert_array_equal(found.wo.get_value(), wanted.wo.get_value())


def test_linen_says_what_to_do_and_that_works() -> None:
    class Block(nn.Module):
        experts: ExpertsSpec = ExpertsSpec()

        @nn.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            return linen.MoE(D, F, E, K, experts=self.experts, name="moe")(nn.Dense(D, name="inner")(x))

    chosen, x = RULES["int8_row"], tokens()
    with running_on("reference"):
        plain = Block()
        variables = nn.meta.unbox(plain.init(jax.random.key(0), x))
        ptq = qwix.quantize_model(plain, qwix.PtqProvider([chosen]))
        with pytest.raises(Unsupported, match=r"layer\.quantize_experts\(variables, .*module_path"):
            ptq.init(jax.random.key(0), x)
        # What it says: the layer's variables first, then the model that is built with the scheme, through qwix.
        scheme = layers.scheme_of_rule(chosen)
        assert scheme is not None
        layer = linen.MoE(D, F, E, K)
        layer, held = layer.quantize_experts({"params": variables["params"]["moe"]}, scheme)
        model = qwix.quantize_model(Block(experts=layer.experts), qwix.PtqProvider([chosen]))
        shapes = jax.eval_shape(model.init, jax.random.key(0), x)
        params = qwix.quantize_params(
            {"inner": variables["params"]["inner"], "moe": held["params"]}, nn.meta.unbox(shapes["params"])
        )
        y = model.apply({"params": params, "quantized": {"moe": held["quantized"]}}, x)
        wanted = plain.apply(variables, x)
        assert 0 < float(jnp.linalg.norm(y - wanted) / jnp.linalg.norm(wanted)) < 0.1


def test_a_layer_is_quantised_once() -> None:
    scheme = layers.scheme_of_rule(RULES["int8_row"])
    assert scheme is not None
    with running_on("reference"):
        layer = nnx.MoE(D, F, E, K, rngs=flax_nnx.Rngs(0))
        layer.quantize_experts(scheme)
        assert layer.spec.experts == dataclasses.replace(ExpertsSpec(), scheme=scheme)
        with pytest.raises(InvalidInput, match=r"experts must be plain to be quantised, got"):
            layer.quantize_experts(scheme)
