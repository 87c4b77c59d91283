"""Quantised tensors on JAX: as pytrees, through the ops under every transformation, and what is refused."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import moe_jax
from moe_core.formats import (
    FP8_BLOCK,
    FP8_CHANNEL,
    FP8_TENSOR,
    FP8_TOKEN,
    MXFP4,
    MXFP8,
    Format,
    Scheme,
    format_named,
    scheme_named,
)
from moe_core.ops.matmul.reference.forward import matmul_ogs
from moe_core.ops.matmul.reference.rows import rows_of
from moe_core.ops.quantize import reference
from moe_core.parity.tolerance import assert_close, quantized_matmul_tolerance
from moe_core.specs.operands import named_arrays
from moe_jax import (
    Activation,
    ExpertWeights,
    LayoutSpec,
    MatmulOperands,
    MatmulSpec,
    MoESpec,
    QuantizedTensor,
    RouterSpec,
    RouterWeights,
    Unsupported,
)
from tests.support.jax import (
    NUM_DEVICES,
    Case,
    check_error,
    cpu_mesh,
    draw,
    on_engines,
    program_text,
    running_on,
    to_jax,
    untyped,
    weight_copies,
)

T, K, E, D, F, LAYERS = 5, 2, 3, 64, 32, 3
INT4 = format_named("int4_g32_zp")
INT4_SCHEME = Scheme("int4_g32_w4a16_zp", INT4)
SCHEMES = (scheme_named("fp8_block"), scheme_named("mxfp4_w4a8"), INT4_SCHEME)


def bits(tree: Any) -> Any:
    """Every array of a tree as bytes, so that NaNs and small floats compare."""
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


def quantized_layer(scheme: Scheme, *lead: int) -> tuple[jax.Array, ExpertWeights, RouterWeights, MoESpec]:
    """x bf16 and experts in a scheme, `out_in`, on the default device; lead: a leading axis of layers."""
    random = np.random.default_rng(0)

    def weight(*shape: int) -> QuantizedTensor:
        return reference.quantize(draw(random, *lead, *shape), scheme.weights)

    x = random.standard_normal((T, D)).astype(np.float32)
    experts = ExpertWeights(
        weight(E, 2 * F, D), weight(E, D, F), down_bias=random.standard_normal((*lead, E, D)).astype(np.float32)
    )
    routing = RouterWeights(draw(random, D, E))
    spec = MoESpec(Activation("silu"), RouterSpec(K), weight_layout="out_in", activations=scheme.activations)
    return jnp.asarray(x, jnp.bfloat16), *to_jax((experts, routing)), spec


def test_weights_are_quantised_where_they_are() -> None:
    weight, device = np.random.default_rng(1).standard_normal((2, 64, 96)).astype(np.float32), jax.devices("cpu")[1]
    found = moe_jax.quantize(jax.device_put(weight, device), MXFP4)
    assert all(isinstance(array, jax.Array) and array.devices() == {device} for _, array in named_arrays(found))
    assert moe_jax.dequantize(found, jnp.bfloat16).devices() == {device}
    assert not any(array.committed for array in jax.tree.leaves(moe_jax.quantize(weight, MXFP4)))


@on_engines
@pytest.mark.parametrize("format", [FP8_BLOCK, MXFP4, INT4], ids=str)
def test_a_product_equals_its_twin(engine: str, format: Format) -> None:
    """With plain and quantised rows, eager, jitted, and one element of a batch at a time."""
    random = np.random.default_rng(3)
    x, weight = random.standard_normal((T, D)).astype(np.float32), draw(random, E, 48, D)
    ids = random.integers(0, E, (T, K)).astype(np.int32)
    tensor = reference.quantize(weight, format)
    rows = reference.quantize(x, {FP8_BLOCK: FP8_TOKEN, MXFP4: MXFP8}[format]) if format is not INT4 else x
    spec = MatmulSpec("out_in", gather="token", scatter="slot", out_dtype="float32")

    def product(rows: Any, weight: QuantizedTensor, ids: jax.Array) -> jax.Array:
        return moe_jax.matmul_ogs(MatmulOperands(rows, weight), moe_jax.make_layout(ids, E), spec)

    with running_on(engine):
        for given in (x, rows):
            arguments = to_jax((given, tensor, ids))
            layout = moe_jax.make_layout(arguments[2], E)
            arrays = [np.asarray(getattr(layout, name)) for name in ("group_sizes", "group_start", "slot_of_row")]
            expected = matmul_ogs(MatmulOperands(given, tensor), spec, rows_of(LayoutSpec(T, K, E), *arrays))
            found = product(*arguments)
            if engine == "reference":
                np.testing.assert_array_equal(np.asarray(found), expected)
            side = given.format if isinstance(given, QuantizedTensor) else None
            tolerance = quantized_matmul_tolerance("float32", D, format, spec, rows=side)
            assert_close(np.asarray(found), expected, tolerance, label=f"{side} x {format}")
            assert bits(jax.jit(product)(*arguments)) == bits(found)
            if engine == "reference":
                batch = jax.tree.map(lambda array: jnp.stack([array, array]), arguments[::2])
                many = jax.vmap(product, in_axes=(0, None, 0))(batch[0], arguments[1], batch[1])
                assert bits(many[1]) == bits(found)


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_a_stack_is_read_by_layer_without_a_copy(scheme: Scheme) -> None:
    with running_on("reference"):
        x, stacked, routing, spec = quantized_layer(scheme, LAYERS)

        def layer(x: jax.Array, experts: ExpertWeights) -> jax.Array:
            return x + moe_jax.moe(x, experts, routing, spec).output

        expected = x
        for number in range(LAYERS):
            expected = layer(expected, jax.tree.map(lambda array: array[number], stacked))  # noqa: B023

        def by_index(x: jax.Array, stacked: ExpertWeights) -> jax.Array:
            def step(x: jax.Array, index: jax.Array) -> tuple[jax.Array, None]:
                return layer(x, dataclasses.replace(stacked, layer_index=index[None])), None

            return jax.lax.scan(step, x, jnp.arange(LAYERS, dtype=jnp.int32))[0]

        def by_slices(x: jax.Array, stacked: ExpertWeights) -> jax.Array:
            return jax.lax.scan(lambda x, experts: (layer(x, experts), None), x, stacked)[0]

        for run in (by_index, by_slices):
            assert bits(jax.jit(run)(x, stacked)) == bits(expected), run.__name__
        matrices = ExpertWeights(stacked.gate_up, stacked.down)
        assert weight_copies(program_text(jax.jit(by_index).lower(x, stacked)), matrices) == []
        assert weight_copies(program_text(jax.jit(by_slices).lower(x, stacked)), matrices), "copies can be seen"


@on_engines
def test_static_scales_and_explain(engine: str) -> None:
    scheme = scheme_named("fp8_tensor")
    with running_on(engine):
        x, experts, routing, spec = quantized_layer(scheme)
        spec = dataclasses.replace(spec, fast_accumulate=True)
        scale = jnp.array([0.02], jnp.float32)
        experts = dataclasses.replace(experts, gate_up_input_scale=scale, down_input_scale=scale)
        eager = moe_jax.moe(x, experts, routing, spec)
        jitted = jax.jit(lambda x, experts: moe_jax.moe(x, experts, routing, spec))(x, experts)
        assert bits(eager) == bits(jitted)
        dynamic = dataclasses.replace(experts, gate_up_input_scale=None, down_input_scale=None)
        assert bits(moe_jax.moe(x, dynamic, routing, spec).output) != bits(eager.output)
        shapes = jax.eval_shape(lambda: experts)
        assert isinstance(shapes.gate_up, QuantizedTensor) and shapes.gate_up.shape == (E, 2 * F, D)
        text = moe_jax.explain_moe(x, shapes, routing, spec)
        assert text == moe_jax.explain_moe(x, experts, routing, spec) and "fp8_tensor" in text
        assert moe_jax.warmup(x, shapes, routing, spec, tokens=[T, 2 * T]) is not None


def test_shard_map_on_local_tokens() -> None:
    with running_on("reference"):
        x, experts, routing, spec = quantized_layer(scheme_named("mxfp4_w4a8"))
        x = jnp.concatenate([x[:3]] * NUM_DEVICES)
        alone = moe_jax.moe(x[:3], experts, routing, spec).output

        def part(x: jax.Array, experts: ExpertWeights) -> jax.Array:
            return moe_jax.moe(x, experts, routing, spec).output

        whole = jax.shard_map(part, mesh=cpu_mesh(), in_specs=(P("data"), P()), out_specs=P("data"))
        assert bits(jax.jit(whole)(x, experts)) == bits(jnp.concatenate([alone] * NUM_DEVICES))


def test_tensors_are_pytrees() -> None:
    tensor = to_jax(reference.quantize(draw(np.random.default_rng(4), E, 64, D), INT4))
    leaves, structure = jax.tree_util.tree_flatten_with_path({"wo": tensor})
    assert [jax.tree_util.keystr(path) for path, _ in leaves] == [
        "['wo'].values",
        "['wo'].scales",
        "['wo'].zero_points",
    ]
    assert structure == jax.tree.structure({"wo": to_jax(reference.quantize(np.zeros((2, 32), np.float32), INT4))})
    assert structure != jax.tree.structure({"wo": to_jax(reference.quantize(np.zeros((2, 32), np.float32), MXFP4))})
    axes = jax.tree.map(lambda _: 0, tensor)
    assert isinstance(axes, QuantizedTensor) and axes.scales == 0
    doubled = jax.vmap(lambda one: jax.tree.map(lambda array: array, one), in_axes=(axes,), out_axes=axes)(tensor)
    assert doubled.spec == tensor.spec and bits(doubled) == bits(tensor)
    donated = jax.jit(lambda one: one, donate_argnums=0)(jax.tree.map(jnp.array, tensor))
    assert donated.shape == (E, 64, D) and bits(donated) == bits(tensor)


def with_plain_weights(experts: ExpertWeights) -> ExpertWeights:
    plain = {name: moe_jax.dequantize(getattr(experts, name), "bfloat16") for name in ("gate_up", "down")}
    return dataclasses.replace(experts, **plain)


@pytest.mark.parametrize("lead", [(), (LAYERS,)], ids=["layer", "stack"])
def test_gradients_flow_through_frozen_weights(lead: tuple[int, ...]) -> None:
    """To x, the bias and the router, as through dequantised weights; jitted, and with checkpoint."""
    with running_on("reference"):
        x, experts, routing, spec = quantized_layer(scheme_named("mxfp4_w4a16"), *lead)
        if lead:
            experts = dataclasses.replace(experts, layer_index=jnp.ones(1, jnp.int32))

        def loss(trained: Any, experts: ExpertWeights) -> jax.Array:
            x, experts = trained[0], dataclasses.replace(experts, down_bias=trained[1])
            return moe_jax.moe(x, experts, trained[2], spec).output.astype(jnp.float32).sum()

        trained = (x, experts.down_bias, routing)
        expected = jax.grad(loss)(trained, with_plain_weights(experts))
        for derive in (jax.grad(loss), jax.jit(jax.grad(jax.checkpoint(loss)))):
            for found, wanted in zip(jax.tree.leaves(derive(trained, experts)), jax.tree.leaves(expected), strict=True):
                np.testing.assert_allclose(np.asarray(found, np.float32), np.asarray(wanted, np.float32), 1e-2, 1e-2)
        assert moe_jax.explain_moe(x, experts, routing, spec, training=True)


def test_a_product_has_the_gradients_of_a_plain_one() -> None:
    with running_on("reference"):
        weight = to_jax(reference.quantize(draw(np.random.default_rng(5), 48, D), FP8_BLOCK))
        plain = moe_jax.dequantize(weight)

        def loss(x: jax.Array, weight: Any) -> jax.Array:
            return jnp.square(moe_jax.matmul_ogs(MatmulOperands(x, weight), None, MatmulSpec("out_in"))).sum()

        x = jnp.asarray(np.random.default_rng(6).standard_normal((T, D)), jnp.float32)
        np.testing.assert_allclose(jax.grad(loss)(x, weight), jax.grad(loss)(x, plain), 1e-5, 1e-5)
        with pytest.raises(Unsupported, match=r"weight\.\w+ has no gradient: quantised weights are frozen"):
            jax.grad(loss, argnums=1)(x, weight)


def test_gradients_that_do_not_exist_are_refused() -> None:
    with running_on("reference"):
        x, experts, routing, spec = quantized_layer(scheme_named("mxfp4_w4a8"))

        def layer(x: jax.Array, experts: ExpertWeights = experts, spec: MoESpec = spec) -> jax.Array:
            return moe_jax.moe(x, experts, routing, spec).output.astype(jnp.float32).sum()

        for derive in (jax.grad(layer), jax.jit(jax.grad(jax.checkpoint(layer)))):
            with pytest.raises(Unsupported, match="moe has no gradient with activations mxfp8"):
                derive(x)
        _, integers, _, plain = quantized_layer(INT4_SCHEME)
        with pytest.raises(Unsupported, match=r"experts\.down\.scales has no gradient: quantised weights are frozen"):
            jax.grad(layer, argnums=1, allow_int=True)(x, integers, plain)
        with pytest.raises(Unsupported, match="matmul_ogs has no gradient with a quantised x"):
            jax.grad(
                lambda scales: dense(dataclasses.replace(TOKENS, scales=scales), CHANNELS, out_dtype="float32").sum()
            )(TOKENS.scales)
        with pytest.raises(Unsupported, match="quantize_rows has no derivative"):
            jax.grad(lambda x: moe_jax.quantize_rows(x, MXFP8).values.astype(jnp.float32).sum())(x)
        through = jax.grad(lambda x: layer(jax.lax.stop_gradient(x)) + x.astype(jnp.float32).sum())(x)
        assert (np.asarray(through, np.float32) == 1).all()


def wrong() -> QuantizedTensor:
    """What a transformation may leave behind: values without the scales of their format."""
    tensor = to_jax(reference.quantize(np.zeros((E, 64, D), np.float32), MXFP4))
    return QuantizedTensor.unchecked(tensor.spec, tensor.values, tensor.scales[:, :, :1])


def dense(x: Any, weight: Any, **options: Any) -> jax.Array:
    return moe_jax.matmul_ogs(MatmulOperands(x, weight), None, MatmulSpec("out_in", **options))


ROWS = jnp.ones((T, D), jnp.bfloat16)
TOKENS = to_jax(reference.quantize(np.ones((T, D), np.float32), FP8_TOKEN))
CHANNELS = to_jax(reference.quantize(np.ones((8, D), np.float32), FP8_CHANNEL))
FIRST = to_jax(reference.quantize(np.zeros((8, D), np.float32), MXFP4))
CASES = (
    Case("scales shape", dense, (ROWS, wrong()), r"weight: scales of mxfp4.* must be \(3, 64, 2\), got \(3, 64, 1\)"),
    Case("no scales", lambda x, values: dense(x, QuantizedTensor.unchecked(FIRST.spec, values, None)),
        (ROWS, FIRST.values), r"weight\.scales must be an array, got None"),
    Case("layout", lambda x, w: moe_jax.matmul_ogs(MatmulOperands(x, w), None, MatmulSpec("in_out")), (ROWS, FIRST),
        "weight must be in_out like weight_layout"),
    Case("plain weight", lambda x, q: dense(q, x, out_dtype="float32"), (ROWS, FIRST),
        "weight must be quantised where x is"),
    Case("out_dtype", dense, (FIRST, FIRST), "out_dtype must be given where x is quantised"),
    Case("format", lambda x: moe_jax.quantize_rows(x, untyped("mxfp4")), (ROWS,), "format must be Format, got 'mxfp4'"),
    Case("static scale", lambda x: moe_jax.quantize_rows(x, FP8_TENSOR, scales=untyped(0.5)), (ROWS,),
        r"scales must be a jax\.Array, got builtins\.float"),
)  # fmt: skip


@pytest.mark.parametrize("jitted", [False, True])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_wrong_operands(case: Case, jitted: bool) -> None:
    check_error(case, jitted)


def test_weights_are_quantised_outside_of_programs() -> None:
    weight = jnp.ones((64, D))
    with pytest.raises(Unsupported, match="quantize computes on the host, got weight inside jit"):
        jax.jit(lambda weight: moe_jax.quantize(weight, MXFP4))(weight)
    with pytest.raises(Unsupported, match=r"dequantize computes on the host, got tensor\.values inside jit"):
        jax.jit(moe_jax.dequantize)(FIRST)
    split = jax.device_put(weight, jax.sharding.NamedSharding(cpu_mesh(), P("data")))
    with pytest.raises(Unsupported, match="quantize takes arrays of one device, got weight split over several"):
        moe_jax.quantize(split, MXFP4)
