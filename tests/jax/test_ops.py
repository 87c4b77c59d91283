"""Every JAX op against its NumPy twin, on the real kernels and on the reference engine."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import moe_jax
from moe_core.ops.activation import reference as activation_reference
from moe_core.ops.matmul.reference import forward as matmul_reference
from moe_core.ops.moe.fuse import CHAINED
from moe_core.ops.moe.reference.forward import moe_stages
from moe_core.ops.reduction import reference as reduction_reference
from moe_core.ops.router import reference as router_reference
from moe_core.ops.routing import reference as routing_reference
from moe_core.ops.routing import reference_bitmatrix
from moe_core.ops.routing.reference_runs import layout_of_runs
from moe_core.parity.tolerance import (
    EXACT,
    activation_tolerance,
    assert_close,
    matmul_tolerance,
    reduce_tolerance,
    router_tolerance,
    routing_weights_tolerance,
    stage_tolerances,
)
from tests.support.jax import Layer, draw, on_engines, running_on, small_layer, to_jax, to_numpy

RANDOM_SEED = 7
SHARED_WIDTH = 40


def routed_from(layer: Layer, source: str) -> Layer:
    """The layer with its routing given from x, from logits, or as ids and weights."""
    if source == "x":
        return layer
    stages = moe_stages(*layer)
    if source == "logits":
        return layer._replace(routing=moe_jax.RouterLogits(stages["logits"]))
    topk = moe_jax.TopK(stages["ids"], stages["weights"])
    return layer._replace(routing=topk, spec=dataclasses.replace(layer.spec, router=None))


def check_moe(layer: Layer, source: str = "x", **options: object) -> moe_jax.MoEOutput:
    """Run `moe` eagerly and jitted, require equal bits, and compare every result with the reference."""
    arguments, keywords = to_jax(tuple(layer[:3])), to_jax(options)
    eager = moe_jax.moe(*arguments, spec=layer.spec, **keywords)
    jitted = jax.jit(lambda *arrays, **more: moe_jax.moe(*arrays, spec=layer.spec, **more))(*arguments, **keywords)
    for name, first, second in zip(eager._fields, eager, jitted, strict=True):
        assert (first is None) == (second is None), name
        if first is not None:
            np.testing.assert_array_equal(np.asarray(first), np.asarray(second), err_msg=f"eager and jitted {name}")
    stages = moe_stages(*layer, **options)  # type: ignore[arg-type]
    tolerances = stage_tolerances(
        layer.spec,
        layer.x.dtype.name,
        d_model=layer.x.shape[1],
        d_ff=SHARED_WIDTH if "shared" in options else 32,
        top_k=stages["ids"].shape[1],
        num_experts=layer.experts.down.shape[0],
        routed_from=source,
    )
    for name in ("ids", "weights", "output", "tokens_per_expert", "invalid_ids"):
        assert_close(np.asarray(getattr(eager, name)), stages[name], tolerances[name], name)
    return eager


@on_engines
@pytest.mark.parametrize("source", ["x", "logits", "ids"])
def test_moe_from_every_kind_of_routing(engine: str, source: str) -> None:
    with running_on(engine):
        layer = routed_from(small_layer(), source)
        result = check_moe(layer, source)
        assert (result.logits is None) == (source == "ids")
        if source == "x":
            logits = router_reference.router(layer.x, layer.routing.weight, spec=moe_jax.LogitsSpec())
            assert_close(np.asarray(result.logits), logits, router_tolerance(layer.x.shape[1]), "logits")


@on_engines
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_moe_in_half_precision(engine: str, dtype: str) -> None:
    with running_on(engine):
        result = check_moe(routed_from(small_layer(dtype), "ids"), "ids")
        assert result.output.dtype == jnp.dtype(dtype)


@on_engines
def test_moe_with_everything(engine: str) -> None:
    random = np.random.default_rng(RANDOM_SEED)
    layer = small_layer(num_tokens=7, num_experts=4)
    num_local, d_model, d_ff = 3, 48, 32
    experts = moe_jax.ExpertWeights(
        draw(random, num_local, d_ff, d_model),
        draw(random, num_local, d_model, d_ff),
        up=draw(random, num_local, d_ff, d_model),
        gate_up_bias=draw(random, num_local, d_ff),
        up_bias=draw(random, num_local, d_ff),
        down_bias=draw(random, num_local, d_model),
    )
    shared = moe_jax.SharedExpert(
        draw(random, SHARED_WIDTH, d_model),
        draw(random, d_model, SHARED_WIDTH),
        up=draw(random, SHARED_WIDTH, d_model),
        gate=draw(random, 1, d_model),
    )
    routing = moe_jax.RouterWeights(draw(random, 4, d_model), bias=draw(random, 4), correction_bias=draw(random, 4))
    spec = moe_jax.MoESpec(
        moe_jax.Activation("swiglu_oai", gate_layout="separate"),
        moe_jax.RouterSpec(2, "sigmoid", renormalize=True, scale=2.5),
        weight_layout="out_in",
        router_weight_layout="out_in",
    )
    with running_on(engine):
        result = check_moe(
            Layer(layer.x, experts, routing, spec),
            token_mask=np.arange(7) < 5,
            expert_map=np.array([0, -1, 2, 1], np.int32),
            shared=shared,
        )
        assert int(result.tokens_per_expert.sum()) < 10


@on_engines
def test_moe_without_tokens(engine: str) -> None:
    with running_on(engine):
        result = check_moe(small_layer(num_tokens=0))
        assert result.output.shape == (0, 48) and int(result.tokens_per_expert.sum()) == 0


def test_given_ids_and_weights_come_back_as_given() -> None:
    with running_on("reference"):
        layer = to_jax(routed_from(small_layer(), "ids")[:3])
        result = moe_jax.moe(*layer, spec=moe_jax.MoESpec(moe_jax.Activation("silu")))
        assert result.ids is layer[2].ids and result.weights is layer[2].weights and result.logits is None


@on_engines
def test_router_and_route(engine: str) -> None:
    layer = small_layer("bfloat16")
    random = np.random.default_rng(RANDOM_SEED)
    bias, correction = draw(random, 5), draw(random, 5)
    mask = np.arange(9) != 3
    spec = moe_jax.RouterSpec(3, "sigmoid", scale=1.5)
    with running_on(engine):
        logits = moe_jax.router(jnp.asarray(layer.x), jnp.asarray(layer.routing.weight), bias=jnp.asarray(bias))
        expected = router_reference.router(layer.x, layer.routing.weight, bias, spec=moe_jax.LogitsSpec())
        assert_close(np.asarray(logits), expected, router_tolerance(48), "logits")
        chosen = moe_jax.route(
            jnp.asarray(expected), spec, correction_bias=jnp.asarray(correction), token_mask=jnp.asarray(mask)
        )
        ids, weights = routing_reference.route(expected, correction, mask, spec=spec)
        assert_close(np.asarray(chosen.ids), ids, EXACT, "ids")
        assert_close(np.asarray(chosen.weights), weights, routing_weights_tolerance(5), "weights")


@on_engines
def test_layout_and_bitmatrix(engine: str) -> None:
    ids = np.array([[3, 0], [35, 3], [-1, 2], [0, 39]], np.int32)
    with running_on(engine):
        layout = moe_jax.make_layout(jnp.asarray(ids), 40, alignment=4, checked=True)
        expected = routing_reference.layout(ids, layout=layout.spec)
        names = ("group_sizes", "group_start", "slot_of_row", "row_of_slot", "invalid_ids")
        for name, want in zip(names, expected, strict=True):
            assert_close(np.asarray(getattr(layout, name)), want, EXACT, name)
        bitmatrix = moe_jax.pack_bitmatrix(jnp.asarray(ids), 40, checked=True)
        packed, *_ = reference_bitmatrix.pack_bitmatrix(ids, num_experts=40)
        assert bitmatrix.dtype == jnp.uint32
        assert_close(np.asarray(bitmatrix), packed, EXACT, "bitmatrix")
        unpacked = moe_jax.unpack_bitmatrix(bitmatrix, 40, 2)
        want = reference_bitmatrix.unpack_bitmatrix(packed, num_experts=40, top_k=2)
        assert_close(np.asarray(unpacked), want, EXACT, "unpacked ids")


@on_engines
def test_layout_with_map_mask_and_limit(engine: str) -> None:
    ids = np.array([[3, 0], [1, 3], [0, 2], [0, 0]], np.int32)
    expert_map, mask = np.array([1, -1, 0, 1], np.int32), np.array([True, True, False, True])
    with running_on(engine):
        layout = moe_jax.make_layout(
            jnp.asarray(ids), 2, expert_map=jnp.asarray(expert_map), token_mask=jnp.asarray(mask), max_rows=2
        )
        expected = routing_reference.layout(ids, expert_map, mask, layout=layout.spec)
        for got, want in zip(jax.tree.leaves(layout), expected, strict=True):
            assert_close(np.asarray(got), want, EXACT, "layout with a map, a mask and max_rows")


@on_engines
def test_layout_with_fewer_rows_than_slots(engine: str) -> None:
    ids = np.array([[3, 0], [1, -1], [0, 2], [-1, 0]], np.int32)
    with running_on(engine):
        layout = moe_jax.make_layout(jnp.asarray(ids), 4, rows=4)
        expected = routing_reference.layout(ids, layout=layout.spec)
        names = ("group_sizes", "group_start", "slot_of_row", "row_of_slot", "invalid_ids", "overflow")
        for field, want in zip(names, expected, strict=True):
            assert_close(np.asarray(getattr(layout, field)), want, EXACT, field)
        assert layout.overflow.tolist() == [2] and layout.slot_of_row.shape == (4,)
        y = draw(np.random.default_rng(0), 4, 8)
        out = moe_jax.reduce(jnp.asarray(y), layout, order="row")
        want = reduction_reference.reduce(y, expected[3], top_k=2, order="row")
        assert_close(np.asarray(out), want, EXACT, "reduce")


@on_engines
def test_layout_of_runs(engine: str) -> None:
    counts = np.array([[2, 1], [0, 3]], np.int32)
    names = ("group_sizes", "group_start", "slot_of_row", "row_of_slot", "overflow")
    with running_on(engine):
        for num_rows, stride in ((7, None), (5, None), (8, 4)):
            ids, layout = moe_jax.layout_of_runs(jnp.asarray(counts), num_rows, stride=stride)
            expected = layout_of_runs(counts, num_rows=num_rows, stride=stride)
            for field, want in zip(names, expected[1:], strict=True):
                assert_close(np.asarray(getattr(layout, field)), want, EXACT, field)
            assert_close(np.asarray(ids), expected[0], EXACT, "ids")
            weight = draw(np.random.default_rng(0), 2, 4, 4)
            x = draw(np.random.default_rng(1), num_rows, 4)
            operands = moe_jax.MatmulOperands(jnp.asarray(x), jnp.asarray(weight))
            y = np.asarray(moe_jax.matmul_ogs(operands, layout, moe_jax.MatmulSpec("in_out", "slot", "slot")))
            for row, expert in enumerate(expected[0][:, 0]):
                want = x[row] @ weight[expert] if expert >= 0 else np.zeros(4, np.float32)
                np.testing.assert_allclose(y[row], want, rtol=1e-5, atol=1e-5)


@on_engines
def test_stages_one_by_one(engine: str) -> None:
    """matmul (gather, bias, fused activation), activation, matmul (scatter, row weight), reduce, scale_rows."""
    layer = small_layer("bfloat16")
    stages = moe_stages(*layer)
    spec = layer.spec
    first = moe_jax.MatmulSpec("in_out", "token", "slot", spec.activation)
    second = moe_jax.MatmulSpec("in_out", "slot", "slot")
    with running_on(engine):
        x, experts = to_jax((layer.x, layer.experts))
        layout = moe_jax.make_layout(jnp.asarray(stages["ids"]), 5)
        arrays = to_numpy((layout.group_sizes, layout.group_start, layout.slot_of_row))
        hidden = moe_jax.matmul_ogs(moe_jax.MatmulOperands(x, experts.gate_up), layout, first)
        want = matmul_reference.matmul_ogs(layer.x, layer.experts.gate_up, *arrays, layout=layout.spec, spec=first)
        tolerance = matmul_tolerance("bfloat16", "bfloat16", 48, activation=spec.activation)
        assert_close(np.asarray(hidden), want, tolerance, "matmul 1 with its activation")

        before = jnp.asarray(stages["matmul1"])
        activated = moe_jax.activation(before, spec.activation, out_dtype=jnp.float32)
        want = activation_reference.activation(stages["matmul1"], activation=spec.activation, out_dtype="float32")
        assert_close(np.asarray(activated), want, activation_tolerance("float32"), "activation")

        weights = stages["weights"].reshape(-1)
        operands = moe_jax.MatmulOperands(
            jnp.asarray(stages["activation"]), experts.down, row_weight=jnp.asarray(weights)
        )
        slots = moe_jax.matmul_ogs(operands, layout, second)
        assert_close(np.asarray(slots), stages["matmul2"], matmul_tolerance("bfloat16", "bfloat16", 32), "matmul 2")

        out = moe_jax.reduce(jnp.asarray(stages["matmul2"]), layout, out_dtype="float32")
        rows = np.asarray(layout.row_of_slot)
        want = reduction_reference.reduce(stages["matmul2"], rows, top_k=2, order="slot", out_dtype="float32")
        assert_close(np.asarray(out), want, reduce_tolerance("float32", 2), "reduce")

        scaled = moe_jax.scale_rows(x, jnp.asarray(stages["weights"][:, :1]))
        want = reduction_reference.scale_rows(layer.x, stages["weights"][:, :1])
        assert_close(np.asarray(scaled), want, EXACT, "scale_rows")


@on_engines
def test_dense_matmul(engine: str) -> None:
    layer = small_layer()
    spec = moe_jax.MatmulSpec("in_out", out_dtype="float16")
    weight = layer.experts.gate_up[0]
    with running_on(engine):
        y = moe_jax.matmul_ogs(moe_jax.MatmulOperands(*to_jax((layer.x, weight))), None, spec)
        want = matmul_reference.matmul_ogs(layer.x, weight, layout=None, spec=spec)
        assert_close(np.asarray(y), want, matmul_tolerance("float32", "float16", 48), "dense matmul")


def test_numpy_arguments_are_arrays_too() -> None:
    layer = small_layer()
    with running_on("reference"):
        result = moe_jax.moe(*layer)
        np.testing.assert_array_equal(np.asarray(result.output), np.asarray(check_moe(layer).output))


def test_checked_calls_name_the_count() -> None:
    ids = jnp.array([[0, 7], [-2, 1], [1, 1]], jnp.int32)
    with running_on("reference"):
        assert int(moe_jax.make_layout(ids, 4).invalid_ids[0]) == 2
        with pytest.raises(moe_jax.InvalidInput, match=r"ids must be in \[-1, 4\), got 2 outside; .*checked"):
            moe_jax.make_layout(ids, 4, checked=True)
        with pytest.raises(moe_jax.InvalidInput, match=r"ids must be in \[-1, 4\), got 2 outside"):
            moe_jax.pack_bitmatrix(ids, 4, checked=True)
        with pytest.raises(moe_jax.InvalidInput, match=r"ids must not repeat within a token.*got 1 repeated"):
            moe_jax.pack_bitmatrix(ids[2:], 4, checked=True)
        layer = routed_from(small_layer(), "ids")
        given = layer.routing
        bad = moe_jax.TopK(np.where(given.ids == 0, 99, given.ids), given.weights)
        layer = to_jax((layer.x, layer.experts, bad))
        spec = moe_jax.MoESpec(moe_jax.Activation("silu"))
        assert int(moe_jax.moe(*layer, spec=spec).invalid_ids[0]) > 0
        with pytest.raises(moe_jax.InvalidInput, match=r"ids must be in \[-1, 5\)"):
            moe_jax.moe(*layer, spec=spec, checked=True)


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
    random = np.random.default_rng(RANDOM_SEED)
    wide = random.integers(-1, 5, (9, 3), dtype=np.int32)
    with running_on(engine):
        expected = moe_jax.make_layout(jnp.asarray(wide[2:].copy()), 5).slot_of_row
        for name, ids in {"numpy": wide[2:], "eager": jnp.asarray(wide)[2:]}.items():
            assert_close(np.asarray(moe_jax.make_layout(ids, 5).slot_of_row), np.asarray(expected), EXACT, name)
        jitted = jax.jit(lambda ids: moe_jax.make_layout(ids[2:], 5).slot_of_row)(jnp.asarray(wide))
        assert_close(np.asarray(jitted), np.asarray(expected), EXACT, "jit")
