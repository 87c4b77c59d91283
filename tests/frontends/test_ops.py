"""Every op against its NumPy twin, on the real kernels and on the reference engine."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from moe_core.errors import InvalidInput
from moe_core.ops.activation import reference as activation_reference
from moe_core.ops.matmul.reference import forward as matmul_reference
from moe_core.ops.matmul.reference.rows import rows_of
from moe_core.ops.moe.reference.forward import moe_stages
from moe_core.ops.reduction import reference as reduction_reference
from moe_core.ops.router import reference as router_reference
from moe_core.ops.routing import reference
from moe_core.ops.routing import reference as routing_reference
from moe_core.ops.routing.reference import layout_of_runs
from moe_core.parity.tolerance import (
    EXACT,
    activation_tolerance,
    assert_close,
    matmul_tolerance,
    router_tolerance,
    routing_weights_tolerance,
    stage_tolerances,
)
from moe_core.specs import Activation, LayoutSpec, LogitsSpec, MatmulSpec, MoESpec, RouterSpec
from moe_core.specs.operands import MatmulOperands, RouterLogits, TopK
from tests.support.exact import reduce_tolerance
from tests.support.frontends import Frontend
from tests.support.frontends.small import D_FF, D_MODEL, NUM_EXPERTS, Layer, draw, full_layer, on_engines, small_layer

FIELDS = ("group_sizes", "group_start", "slot_of_row", "row_of_slot", "invalid_ids", "overflow")


def routed_from(layer: Layer, source: str) -> Layer:
    """The layer with its routing given from x, from logits, or as ids and weights."""
    if source == "x":
        return layer
    stages = moe_stages(*layer)
    if source == "logits":
        return layer._replace(routing=RouterLogits(stages["logits"]))
    topk = TopK(stages["ids"], stages["weights"])
    return layer._replace(routing=topk, spec=dataclasses.replace(layer.spec, router=None))


def check_moe(frontend: Frontend, layer: Layer, source: str = "x", **options: Any) -> Any:
    """Run `moe` and compare every result with the reference."""
    arguments, keywords = frontend.arrays(tuple(layer[:3])), frontend.arrays(options)

    def moe(arguments, keywords):
        return frontend.ops.moe(*arguments, spec=layer.spec, **keywords)

    result = frontend.call(moe, arguments, keywords)
    stages = moe_stages(*layer, **options)
    tolerances = stage_tolerances(
        layer.spec, layer.x.dtype.name, d_model=D_MODEL, d_ff=D_FF, top_k=stages["ids"].shape[1],
        num_experts=layer.experts.down.shape[0], routed_from=source,
    )  # fmt: skip
    found = frontend.numpy(result)
    names = ("ids", "weights", "output", "tokens_per_expert", "invalid_ids")
    for name in names if source == "ids" else (*names, "logits"):
        assert_close(getattr(found, name), stages[name], tolerances[name], name)
    assert (result.logits is None) == (source == "ids")
    return result


def check_layout(frontend: Frontend, layout: Any, expected: Any, label: str = "") -> None:
    """Compare the fields of a layout that its twin gives."""
    for name, want in zip(FIELDS, expected, strict=False):
        assert_close(frontend.numpy(getattr(layout, name)), want, EXACT, f"{label}{name}")


@on_engines
@pytest.mark.parametrize("source", ["x", "logits", "ids"])
def test_moe_from_every_kind_of_routing(frontend: Frontend, engine: str, source: str) -> None:
    with frontend.running_on(engine):
        check_moe(frontend, routed_from(small_layer(), source), source)


@on_engines
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_moe_in_half_precision(frontend: Frontend, engine: str, dtype: str) -> None:
    with frontend.running_on(engine):
        result = check_moe(frontend, routed_from(small_layer(dtype), "ids"), "ids")
        assert result.output.dtype == frontend.dtype(dtype)


@on_engines
def test_moe_with_everything(frontend: Frontend, engine: str) -> None:
    layer, options = full_layer()
    with frontend.running_on(engine):
        result = check_moe(frontend, layer, **options)
        assert int(result.tokens_per_expert.sum()) < 10


@on_engines
def test_moe_without_tokens(frontend: Frontend, engine: str) -> None:
    with frontend.running_on(engine):
        result = check_moe(frontend, small_layer(num_tokens=0))
        assert result.output.shape == (0, D_MODEL) and int(result.tokens_per_expert.sum()) == 0


def test_given_ids_and_weights_come_back_as_given(frontend: Frontend) -> None:
    with frontend.running_on("reference"):
        x, experts, topk = frontend.arrays(tuple(routed_from(small_layer(), "ids")[:3]))
        result = frontend.ops.moe(x, experts, topk, MoESpec(Activation("silu")))
        assert result.ids is topk.ids and result.weights is topk.weights and result.logits is None


@on_engines
def test_router_and_route(frontend: Frontend, engine: str) -> None:
    layer, random = small_layer("bfloat16"), np.random.default_rng(7)
    bias, correction, mask = draw(random, NUM_EXPERTS), draw(random, NUM_EXPERTS), np.arange(9) != 3
    spec = RouterSpec(3, "sigmoid", scale=1.5)
    expected = router_reference.router(layer.x, layer.routing.weight, bias, spec=LogitsSpec())
    with frontend.running_on(engine):
        x, weight, given_bias = frontend.arrays((layer.x, layer.routing.weight, bias))
        logits = frontend.ops.router(x, weight, bias=given_bias)
        assert_close(frontend.numpy(logits), expected, router_tolerance(D_MODEL), "logits")
        given, options = frontend.arrays((expected, {"correction_bias": correction, "token_mask": mask}))
        chosen = frontend.ops.route(given, spec, **options)
        ids, weights = routing_reference.route(expected, correction, mask, spec=spec)
        assert_close(frontend.numpy(chosen.ids), ids, EXACT, "ids")
        assert_close(frontend.numpy(chosen.weights), weights, routing_weights_tolerance(NUM_EXPERTS), "weights")


@on_engines
def test_layout_and_bitmatrix(frontend: Frontend, engine: str) -> None:
    ids = np.array([[3, 0], [35, 3], [-1, 2], [0, 39]], np.int32)
    with frontend.running_on(engine):
        given = frontend.arrays(ids)
        layout = frontend.ops.make_layout(given, 40, alignment=4, checked=True)
        assert layout.spec == LayoutSpec(4, 2, 40, alignment=4)
        check_layout(frontend, layout, routing_reference.layout(ids, layout=layout.spec))
        bitmatrix = frontend.ops.pack_bitmatrix(given, 40, checked=True)
        packed, *_ = reference.pack_bitmatrix(ids, num_experts=40)
        assert bitmatrix.dtype == frontend.dtype("uint32")
        assert_close(frontend.numpy(bitmatrix), packed, EXACT, "bitmatrix")
        want = reference.unpack_bitmatrix(packed, num_experts=40, top_k=2)
        assert_close(frontend.numpy(frontend.ops.unpack_bitmatrix(bitmatrix, 40, 2)), want, EXACT, "unpacked ids")


@on_engines
def test_layout_with_map_mask_and_limit(frontend: Frontend, engine: str) -> None:
    ids = np.array([[3, 0], [1, 3], [0, 2], [0, 0]], np.int32)
    expert_map, mask = np.array([1, -1, 0, 1], np.int32), np.array([True, True, False, True])
    with frontend.running_on(engine):
        given, options = frontend.arrays((ids, {"expert_map": expert_map, "token_mask": mask}))
        layout = frontend.ops.make_layout(given, 2, max_rows=2, **options)
        check_layout(frontend, layout, routing_reference.layout(ids, expert_map, mask, layout=layout.spec))


@on_engines
def test_layout_with_fewer_rows_than_slots(frontend: Frontend, engine: str) -> None:
    ids, y = np.array([[3, 0], [1, -1], [0, 2], [-1, 0]], np.int32), draw(np.random.default_rng(0), 4, 8)
    with frontend.running_on(engine):
        given, rows = frontend.arrays((ids, y))
        layout = frontend.ops.make_layout(given, 4, rows=4)
        expected = routing_reference.layout(ids, layout=layout.spec)
        check_layout(frontend, layout, expected)
        assert layout.overflow.tolist() == [2] and layout.slot_of_row.shape == (4,)
        want = reduction_reference.reduce(y, expected[3], top_k=2, order="row")
        assert_close(frontend.numpy(frontend.ops.reduce(rows, layout, order="row")), want, EXACT, "reduce")


@on_engines
def test_layout_of_runs(frontend: Frontend, engine: str) -> None:
    counts = np.array([[2, 1], [0, 3]], np.int32)
    with frontend.running_on(engine):
        for num_rows, stride in ((7, None), (5, None), (8, 4)):
            ids, layout = frontend.ops.layout_of_runs(frontend.arrays(counts), num_rows, stride=stride)
            expected_ids, *fields, overflow = layout_of_runs(counts, num_rows=num_rows, stride=stride)
            check_layout(frontend, layout, fields)
            assert_close(frontend.numpy(layout.overflow), overflow, EXACT, "overflow")
            assert_close(frontend.numpy(ids), expected_ids, EXACT, "ids")
            weight, x = draw(np.random.default_rng(0), 2, 4, 4), draw(np.random.default_rng(1), num_rows, 4)
            operands = MatmulOperands(*frontend.arrays((x, weight)))
            y = frontend.numpy(frontend.ops.matmul_ogs(operands, layout, MatmulSpec("in_out", "slot", "slot")))
            for row, expert in enumerate(expected_ids[:, 0]):
                want = x[row] @ weight[expert] if expert >= 0 else np.zeros(4, np.float32)
                np.testing.assert_allclose(y[row], want, rtol=1e-5, atol=1e-5)


@on_engines
def test_stages_one_by_one(frontend: Frontend, engine: str) -> None:
    """matmul (gather, fused activation), activation, matmul (scatter, row weight), reduce, scale_rows."""
    layer, ops, numpy = small_layer("bfloat16"), frontend.ops, frontend.numpy
    stages, activation = moe_stages(*layer), layer.spec.activation
    first, second = MatmulSpec("in_out", "token", "slot", activation), MatmulSpec("in_out", "slot", "slot")
    weights = np.ascontiguousarray(stages["weights"][:, :1])
    with frontend.running_on(engine):
        x, experts, given, one_weight = frontend.arrays((layer.x, layer.experts, stages, weights))
        layout = ops.make_layout(given["ids"], NUM_EXPERTS)
        groups = [numpy(array) for array in (layout.group_sizes, layout.group_start, layout.slot_of_row)]
        hidden = ops.matmul_ogs(MatmulOperands(x, experts.gate_up), layout, first)
        operands = MatmulOperands(layer.x, layer.experts.gate_up)
        want = matmul_reference.matmul_ogs(operands, first, rows_of(layout.spec, *groups))
        tolerance = matmul_tolerance("bfloat16", "bfloat16", D_MODEL, activation=activation)
        assert_close(numpy(hidden), want, tolerance, "matmul 1 with its activation")

        activated = ops.activation(given["matmul1"], activation, out_dtype=frontend.dtype("float32"))
        want = activation_reference.activation(stages["matmul1"], activation=activation, out_dtype="float32")
        assert_close(numpy(activated), want, activation_tolerance("float32"), "activation")

        row_weight = given["weights"].reshape(-1)
        operands = MatmulOperands(given["activation"], experts.down, row_weight=row_weight)
        slots = numpy(ops.matmul_ogs(operands, layout, second))
        assert_close(slots, stages["matmul2"], matmul_tolerance("bfloat16", "bfloat16", D_FF), "matmul 2")

        for out_dtype in ("float32", frontend.dtype("float32")):
            out = numpy(ops.reduce(given["matmul2"], layout, out_dtype=out_dtype))
            rows = numpy(layout.row_of_slot)
            want = reduction_reference.reduce(stages["matmul2"], rows, top_k=2, order="slot", out_dtype="float32")
            assert_close(out, want, reduce_tolerance("float32", 2), "reduce")

        want = reduction_reference.scale_rows(layer.x, weights)
        assert_close(numpy(ops.scale_rows(x, one_weight)), want, EXACT, "scale_rows")


@on_engines
def test_dense_matmul(frontend: Frontend, engine: str) -> None:
    layer, spec = small_layer(), MatmulSpec("in_out", out_dtype="float16")
    weight = layer.experts.gate_up[0]
    with frontend.running_on(engine):
        y = frontend.ops.matmul_ogs(MatmulOperands(*frontend.arrays((layer.x, weight))), None, spec)
        want = matmul_reference.matmul_ogs(MatmulOperands(layer.x, weight), spec)
        assert_close(frontend.numpy(y), want, matmul_tolerance("float32", "float16", D_MODEL), "dense matmul")


def test_checked_calls_name_the_count(frontend: Frontend) -> None:
    ids, layer = np.array([[0, 7], [-2, 1], [1, 1]], np.int32), routed_from(small_layer(), "ids")
    topk, spec = layer.routing, MoESpec(Activation("silu"))
    bad = TopK(np.where(topk.ids == 0, 99, topk.ids), topk.weights)
    with frontend.running_on("reference"):
        given, repeated, x, experts, topk, bad = frontend.arrays((ids, ids[2:], layer.x, layer.experts, topk, bad))
        assert int(frontend.ops.make_layout(given, 4).invalid_ids[0]) == 2
        with pytest.raises(InvalidInput, match=r"ids must be in \[-1, 4\), got 2 outside; .*checked"):
            frontend.ops.make_layout(given, 4, checked=True)
        with pytest.raises(InvalidInput, match=r"ids must be in \[-1, 4\), got 2 outside"):
            frontend.ops.pack_bitmatrix(given, 4, checked=True)
        with pytest.raises(InvalidInput, match=r"ids must not repeat within a token.*got 1 repeated"):
            frontend.ops.pack_bitmatrix(repeated, 4, checked=True)
        assert int(frontend.ops.moe(x, experts, bad, spec).invalid_ids[0]) > 0
        with pytest.raises(InvalidInput, match=r"ids must be in \[-1, 5\)"):
            frontend.ops.moe(x, experts, bad, spec, checked=True)
        assert int(frontend.ops.moe(x, experts, topk, spec, checked=True).invalid_ids[0]) == 0
