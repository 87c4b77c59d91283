"""Every torch op against its NumPy twin, on the real kernels and on the reference engine."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import moe_torch
from moe_core.ops.activation import reference as activation_reference
from moe_core.ops.matmul.reference import forward as matmul_reference
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
from tests.support.torch import (
    D_FF,
    D_MODEL,
    ENGINES,
    NUM_EXPERTS,
    Layer,
    draw,
    full_layer,
    on_engines,
    require_equal,
    running_on,
    small_layer,
    to_numpy,
    to_torch,
    torch_layer,
)


def routed_from(layer: Layer, source: str) -> Layer:
    """The layer with its routing given from x, from logits, or as ids and weights."""
    if source == "x":
        return layer
    stages = moe_stages(*layer)
    if source == "logits":
        return layer._replace(routing=moe_torch.RouterLogits(stages["logits"]))
    topk = moe_torch.TopK(stages["ids"], stages["weights"])
    return layer._replace(routing=topk, spec=dataclasses.replace(layer.spec, router=None))


def check_moe(layer: Layer, device: Any, source: str = "x", **options: Any) -> moe_torch.MoEOutput:
    """Run `moe` and compare every result with the reference."""
    tensors = {name: to_torch(value, device) for name, value in options.items()}
    result = moe_torch.moe(*to_torch(tuple(layer[:3]), device), layer.spec, **tensors)
    stages = moe_stages(*layer, **options)
    tolerances = stage_tolerances(
        layer.spec,
        layer.x.dtype.name,
        d_model=D_MODEL,
        d_ff=D_FF,
        top_k=stages["ids"].shape[1],
        num_experts=layer.experts.down.shape[0],
        routed_from=source,
    )
    for name in ("ids", "weights", "output", "tokens_per_expert", "invalid_ids"):
        assert_close(to_numpy(getattr(result, name)), stages[name], tolerances[name], name)
    assert (result.logits is None) == (source == "ids")
    if source != "ids":
        assert_close(to_numpy(result.logits), stages["logits"], tolerances["logits"], "logits")
    return result


@on_engines
@pytest.mark.parametrize("source", ["x", "logits", "ids"])
def test_moe_from_every_kind_of_routing(engine: str, source: str) -> None:
    with running_on(engine) as device:
        check_moe(routed_from(small_layer(), source), device, source)


@on_engines
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_moe_in_half_precision(engine: str, dtype: str) -> None:
    with running_on(engine) as device:
        result = check_moe(routed_from(small_layer(dtype), "ids"), device, "ids")
        assert result.output.dtype == getattr(torch, dtype)


@on_engines
def test_moe_with_everything(engine: str) -> None:
    layer, options = full_layer()
    with running_on(engine) as device:
        result = check_moe(layer, device, **options)
        assert int(result.tokens_per_expert.sum()) < 10


@on_engines
def test_moe_on_stacked_layers(engine: str) -> None:
    """Stacked weights with a device-side layer index equal that layer's own weights, bitwise."""
    with running_on(engine) as device:
        layers = [torch_layer(device, seed=seed) for seed in range(3)]
        experts = moe_torch.ExpertWeights(
            torch.stack([layer.experts.gate_up for layer in layers]),
            torch.stack([layer.experts.down for layer in layers]),
            layer_index=torch.tensor([1], dtype=torch.int32, device=device),
        )
        x, own, routing, spec = layers[1]
        stacked = moe_torch.moe(x, experts, routing, spec)
        require_equal(tuple(stacked), tuple(moe_torch.moe(x, own, routing, spec)), "stacked")


@on_engines
def test_moe_without_tokens(engine: str) -> None:
    with running_on(engine) as device:
        result = check_moe(small_layer(num_tokens=0), device)
        assert result.output.shape == (0, D_MODEL) and int(result.tokens_per_expert.sum()) == 0


def test_given_ids_and_weights_come_back_as_given() -> None:
    with running_on("reference"):
        layer = to_torch(tuple(routed_from(small_layer(), "ids")[:3]))
        result = moe_torch.moe(*layer, moe_torch.MoESpec(moe_torch.Activation("silu")))
        assert result.ids is layer[2].ids and result.weights is layer[2].weights and result.logits is None


@on_engines
def test_router_and_route(engine: str) -> None:
    layer = small_layer("bfloat16")
    random = np.random.default_rng(7)
    bias, correction = draw(random, NUM_EXPERTS), draw(random, NUM_EXPERTS)
    mask = np.arange(9) != 3
    spec = moe_torch.RouterSpec(3, "sigmoid", scale=1.5)
    with running_on(engine) as device:
        x, weight = to_torch((layer.x, layer.routing.weight), device)
        logits = moe_torch.router(x, weight, bias=to_torch(bias, device))
        expected = router_reference.router(layer.x, layer.routing.weight, bias, spec=moe_torch.LogitsSpec())
        assert_close(to_numpy(logits), expected, router_tolerance(D_MODEL), "logits")
        chosen = moe_torch.route(
            to_torch(expected, device),
            spec,
            correction_bias=to_torch(correction, device),
            token_mask=to_torch(mask, device),
        )
        ids, weights = routing_reference.route(expected, correction, mask, spec=spec)
        assert_close(to_numpy(chosen.ids), ids, EXACT, "ids")
        assert_close(to_numpy(chosen.weights), weights, routing_weights_tolerance(NUM_EXPERTS), "weights")


@on_engines
def test_layout_and_bitmatrix(engine: str) -> None:
    ids = np.array([[3, 0], [35, 3], [-1, 2], [0, 39]], np.int32)
    with running_on(engine) as device:
        tensor = to_torch(ids, device)
        layout = moe_torch.make_layout(tensor, 40, alignment=4, checked=True)
        assert layout.spec == moe_torch.LayoutSpec(4, 2, 40, alignment=4)
        expected = routing_reference.layout(ids, layout=layout.spec)
        names = ("group_sizes", "group_start", "slot_of_row", "row_of_slot", "invalid_ids")
        for name, want in zip(names, expected, strict=True):
            assert_close(to_numpy(getattr(layout, name)), want, EXACT, name)
        bitmatrix = moe_torch.pack_bitmatrix(tensor, 40, checked=True)
        packed, *_ = reference_bitmatrix.pack_bitmatrix(ids, num_experts=40)
        assert bitmatrix.dtype == torch.uint32
        assert_close(to_numpy(bitmatrix), packed, EXACT, "bitmatrix")
        want = reference_bitmatrix.unpack_bitmatrix(packed, num_experts=40, top_k=2)
        assert_close(to_numpy(moe_torch.unpack_bitmatrix(bitmatrix, 40, 2)), want, EXACT, "unpacked ids")


@on_engines
def test_layout_with_map_mask_and_limit(engine: str) -> None:
    ids = np.array([[3, 0], [1, 3], [0, 2], [0, 0]], np.int32)
    expert_map, mask = np.array([1, -1, 0, 1], np.int32), np.array([True, True, False, True])
    with running_on(engine) as device:
        layout = moe_torch.make_layout(
            to_torch(ids, device),
            2,
            expert_map=to_torch(expert_map, device),
            token_mask=to_torch(mask, device),
            max_rows=2,
        )
        expected = routing_reference.layout(ids, expert_map, mask, layout=layout.spec)
        arrays = (layout.group_sizes, layout.group_start, layout.slot_of_row, layout.row_of_slot, layout.invalid_ids)
        for got, want in zip(arrays, expected, strict=True):
            assert_close(to_numpy(got), want, EXACT, "layout with a map, a mask and max_rows")


@on_engines
def test_layout_with_fewer_rows_than_slots(engine: str) -> None:
    ids = np.array([[3, 0], [1, -1], [0, 2], [-1, 0]], np.int32)
    with running_on(engine) as device:
        layout = moe_torch.make_layout(to_torch(ids, device), 4, rows=4)
        expected = routing_reference.layout(ids, layout=layout.spec)
        names = ("group_sizes", "group_start", "slot_of_row", "row_of_slot", "invalid_ids", "overflow")
        for field, want in zip(names, expected, strict=True):
            assert_close(to_numpy(getattr(layout, field)), want, EXACT, field)
        assert layout.overflow.tolist() == [2] and layout.slot_of_row.shape == (4,)
        y = draw(np.random.default_rng(0), 4, 8)
        out = moe_torch.reduce(to_torch(y, device), layout, order="row")
        want = reduction_reference.reduce(y, expected[3], top_k=2, order="row")
        assert_close(to_numpy(out), want, EXACT, "reduce")


@on_engines
def test_layout_of_runs(engine: str) -> None:
    counts = np.array([[2, 1], [0, 3]], np.int32)
    names = ("group_sizes", "group_start", "slot_of_row", "row_of_slot", "overflow")
    with running_on(engine) as device:
        for num_rows, stride in ((7, None), (5, None), (8, 4)):
            ids, layout = moe_torch.layout_of_runs(to_torch(counts, device), num_rows, stride=stride)
            expected = layout_of_runs(counts, num_rows=num_rows, stride=stride)
            for field, want in zip(names, expected[1:], strict=True):
                assert_close(to_numpy(getattr(layout, field)), want, EXACT, field)
            assert_close(to_numpy(ids), expected[0], EXACT, "ids")
            weight = draw(np.random.default_rng(0), 2, 4, 4)
            x = draw(np.random.default_rng(1), num_rows, 4)
            operands = moe_torch.MatmulOperands(to_torch(x, device), to_torch(weight, device))
            y = to_numpy(moe_torch.matmul_ogs(operands, layout, moe_torch.MatmulSpec("in_out", "slot", "slot")))
            for row, expert in enumerate(expected[0][:, 0]):
                want = x[row] @ weight[expert] if expert >= 0 else np.zeros(4, np.float32)
                np.testing.assert_allclose(y[row], want, rtol=1e-5, atol=1e-5)


@on_engines
def test_stages_one_by_one(engine: str) -> None:
    """matmul (gather, fused activation), activation, matmul (scatter, row weight), reduce, scale_rows."""
    layer = small_layer("bfloat16")
    stages = moe_stages(*layer)
    spec = layer.spec
    first = moe_torch.MatmulSpec("in_out", "token", "slot", spec.activation)
    second = moe_torch.MatmulSpec("in_out", "slot", "slot")
    with running_on(engine) as device:
        x, experts = to_torch((layer.x, layer.experts), device)
        layout = moe_torch.make_layout(to_torch(stages["ids"], device), NUM_EXPERTS)
        arrays = [to_numpy(array) for array in (layout.group_sizes, layout.group_start, layout.slot_of_row)]
        hidden = moe_torch.matmul_ogs(moe_torch.MatmulOperands(x, experts.gate_up), layout, first)
        want = matmul_reference.matmul_ogs(layer.x, layer.experts.gate_up, *arrays, layout=layout.spec, spec=first)
        tolerance = matmul_tolerance("bfloat16", "bfloat16", D_MODEL, activation=spec.activation)
        assert_close(to_numpy(hidden), want, tolerance, "matmul 1 with its activation")

        before = to_torch(stages["matmul1"], device)
        activated = moe_torch.activation(before, spec.activation, out_dtype=torch.float32)
        want = activation_reference.activation(stages["matmul1"], activation=spec.activation, out_dtype="float32")
        assert_close(to_numpy(activated), want, activation_tolerance("float32"), "activation")

        operands = moe_torch.MatmulOperands(
            *to_torch((stages["activation"], layer.experts.down), device),
            row_weight=to_torch(stages["weights"].reshape(-1), device),
        )
        slots = moe_torch.matmul_ogs(operands, layout, second)
        assert_close(to_numpy(slots), stages["matmul2"], matmul_tolerance("bfloat16", "bfloat16", D_FF), "matmul 2")

        out = moe_torch.reduce(to_torch(stages["matmul2"], device), layout, out_dtype="float32")
        rows = to_numpy(layout.row_of_slot)
        want = reduction_reference.reduce(stages["matmul2"], rows, top_k=2, order="slot", out_dtype="float32")
        assert_close(to_numpy(out), want, reduce_tolerance("float32", 2), "reduce")

        weights = np.ascontiguousarray(stages["weights"][:, :1])
        scaled = moe_torch.scale_rows(x, to_torch(weights, device))
        assert_close(to_numpy(scaled), reduction_reference.scale_rows(layer.x, weights), EXACT, "scale_rows")


@on_engines
def test_dense_matmul(engine: str) -> None:
    layer = small_layer()
    spec = moe_torch.MatmulSpec("in_out", out_dtype="float16")
    weight = layer.experts.gate_up[0]
    with running_on(engine) as device:
        y = moe_torch.matmul_ogs(moe_torch.MatmulOperands(*to_torch((layer.x, weight), device)), None, spec)
        want = matmul_reference.matmul_ogs(layer.x, weight, layout=None, spec=spec)
        assert_close(to_numpy(y), want, matmul_tolerance("float32", "float16", D_MODEL), "dense matmul")


@on_engines
def test_views_are_read_where_they_lie(engine: str) -> None:
    """Row-strided x and tensors with a storage offset give the bits of their contiguous copies."""
    with running_on(engine) as device:
        layer = torch_layer(device)
        wide = torch.zeros(layer.x.shape[0] + 2, D_MODEL + 16, device=device)
        view = wide[2:, 4 : 4 + D_MODEL]
        view.copy_(layer.x)
        assert not view.is_contiguous() and view.storage_offset() > 0
        stack = torch.stack([layer.experts.down, layer.experts.down])
        experts = dataclasses.replace(layer.experts, down=stack[1])
        plain = moe_torch.moe(*layer)
        require_equal(tuple(moe_torch.moe(view, experts, *layer[2:])), tuple(plain), "views")


@on_engines
def test_outputs_are_fresh_and_inputs_unchanged(engine: str) -> None:
    with running_on(engine) as device:
        layer = torch_layer(device)
        before = [tensor.clone() for tensor in (layer.x, layer.experts.gate_up, layer.routing.weight)]
        first, second = moe_torch.moe(*layer), moe_torch.moe(*layer)
        require_equal(tuple(first), tuple(second), "two runs")
        storages = {tensor.untyped_storage().data_ptr() for tensor in (*first, *second)}
        assert len(storages) == 2 * len(first)
        after = (layer.x, layer.experts.gate_up, layer.routing.weight)
        require_equal(tuple(before), after, "inputs")


@on_engines
def test_every_element_of_every_output_is_written(engine: str) -> None:
    """In deterministic mode torch fills new memory with NaN and the largest integers: outputs and scratch alike."""
    with running_on(engine) as device:
        layer, options = full_layer()
        tensors = to_torch(tuple(layer[:3]), device)
        options = {name: to_torch(value, device) for name, value in options.items()}
        plain = moe_torch.moe(*tensors, layer.spec, **options)
        torch.use_deterministic_algorithms(True)
        try:
            assert torch.empty(3, device=device).isnan().all()
            poisoned = moe_torch.moe(*tensors, layer.spec, **options)
        finally:
            torch.use_deterministic_algorithms(False)
        require_equal(tuple(poisoned), tuple(plain), "poisoned")


def test_the_engine_can_change_between_calls() -> None:
    results = []
    for engine in (*ENGINES, *ENGINES):
        with running_on(engine) as device:
            layer = torch_layer(device)
            assert f"moe on {engine}" in moe_torch.explain_moe(*layer)
            results.append(moe_torch.scale_rows(layer.x, torch.ones(9, 1, device=device)).cpu())
    for result in results[1:]:
        require_equal(result, results[0], "scale_rows on every engine")


def test_inference_mode() -> None:
    with running_on("reference"), torch.inference_mode():
        layer = torch_layer()
        assert moe_torch.moe(*layer).output.is_inference()


def test_checked_calls_name_the_count() -> None:
    ids = torch.tensor([[0, 7], [-2, 1], [1, 1]], dtype=torch.int32)
    with running_on("reference"):
        assert int(moe_torch.make_layout(ids, 4).invalid_ids) == 2
        with pytest.raises(moe_torch.InvalidInput, match=r"ids must be in \[-1, 4\), got 2 outside; .*checked"):
            moe_torch.make_layout(ids, 4, checked=True)
        with pytest.raises(moe_torch.InvalidInput, match=r"ids must be in \[-1, 4\), got 2 outside"):
            moe_torch.pack_bitmatrix(ids, 4, checked=True)
        with pytest.raises(moe_torch.InvalidInput, match=r"ids must not repeat within a token.*got 1 repeated"):
            moe_torch.pack_bitmatrix(ids[2:].clone(), 4, checked=True)
        x, experts, topk = to_torch(tuple(routed_from(small_layer(), "ids")[:3]))
        bad = moe_torch.TopK(torch.where(topk.ids == 0, 99, topk.ids), topk.weights)
        spec = moe_torch.MoESpec(moe_torch.Activation("silu"))
        assert int(moe_torch.moe(x, experts, bad, spec).invalid_ids) > 0
        with pytest.raises(moe_torch.InvalidInput, match=r"ids must be in \[-1, 5\)"):
            moe_torch.moe(x, experts, bad, spec, checked=True)
        assert int(moe_torch.moe(x, experts, topk, spec, checked=True).invalid_ids) == 0


def shifted(tensor: Any) -> Any:
    """The same values and strides one element behind the start of an allocation."""
    storage = torch.cat([tensor.new_zeros(1), tensor.flatten()])
    found = storage[1:].view(tensor.shape)
    assert found.data_ptr() % 16
    return found


@on_engines
def test_arrays_of_tokens_start_anywhere(engine: str) -> None:
    """As slices of tokens do: the op copies them, gaps between rows included, and gradients go to the slice."""
    with running_on(engine) as device:
        x, experts, routing, spec = torch_layer(device, num_tokens=6)
        stages = moe_torch.moe(x, experts, routing, spec)
        ids, weights = shifted(stages.ids), shifted(stages.weights)
        given = dataclasses.replace(spec, router=None)
        wide = torch.zeros(6, D_MODEL + 7, dtype=x.dtype, device=device)
        wide[:, 3 : 3 + D_MODEL] = x
        columns = wide[:, 3 : 3 + D_MODEL]
        assert columns.data_ptr() % 16
        for name, rows in {"rows": shifted(x), "columns": columns}.items():
            require_equal(moe_torch.moe(rows, experts, routing, spec), stages, name)
        result = moe_torch.moe(shifted(x), experts, moe_torch.TopK(ids, weights), given)
        require_equal(result.output, stages.output, "given ids and weights")
        mask = torch.ones(6, dtype=torch.bool, device=device)
        layout = moe_torch.make_layout(ids, NUM_EXPERTS, token_mask=shifted(mask))
        require_equal(layout.row_of_slot, moe_torch.make_layout(stages.ids, NUM_EXPERTS).row_of_slot, "layout")
        activation = moe_torch.Activation("silu", gate_layout="separate")
        require_equal(
            moe_torch.activation(shifted(x), activation, up=shifted(x)),
            moe_torch.activation(x, activation, up=x),
            "rows named up",
        )
        found = []
        for rows in (x.clone(), shifted(x)):
            rows.requires_grad_()
            moe_torch.moe(rows, experts, routing, spec).output.square().sum().backward()
            found.append(rows.grad)
        require_equal(found[1], found[0], "d_x")
