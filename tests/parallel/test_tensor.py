"""Experts that are split over a tensor axis: slices, plans, the twin against one device, and predicted times."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_core.base import codec
from moe_core.errors import InvalidInput, Unsupported
from moe_core.formats import QuantizedSpec, QuantizedTensor, format_named
from moe_core.layers.spec import MoELayerSpec
from moe_core.ops.quantize.reference import dequantize, quantize
from moe_core.parallel import ExchangeSpec, Placement, TensorSplit, plan_exchange, predict
from moe_core.parallel.machine import H200
from moe_core.parallel.tensor import cut_of, require_splittable, split_experts
from moe_core.specs.operands import ExpertWeights, named_arrays
from tests.support.parallel.grid import join_arrays

LINEAR = Placement.linear(8, 4)


def experts_of(weight_layout: str, gate_layout: str | None, d: int = 3, f: int = 12) -> ExpertWeights:
    random = np.random.default_rng(0)

    def matrix(rows: int, columns: int) -> np.ndarray:
        return random.random((2, rows, columns) if weight_layout == "in_out" else (2, columns, rows))

    width = 2 * f if gate_layout in ("halves", "interleaved") else f
    up, up_bias = (matrix(d, f), random.random((2, f))) if gate_layout == "separate" else (None, None)
    biases: Any = {"gate_up_bias": random.random((2, width)), "up_bias": up_bias, "down_bias": random.random((2, d))}
    return ExpertWeights(matrix(d, width), matrix(f, d), up, **biases)


@given(
    size=st.sampled_from((1, 2, 3, 4, 6, 12)),
    weight_layout=st.sampled_from(("in_out", "out_in")),
    gate_layout=st.sampled_from(("halves", "interleaved", "separate", None)),
)
def test_slices_join_and_give_the_hidden_columns_of_a_rank(
    size: int, weight_layout: str, gate_layout: str | None
) -> None:
    experts = experts_of(weight_layout, gate_layout)
    slices = split_experts(experts, size, weight_layout, gate_layout)
    for name, array in named_arrays(experts):
        joined = join_arrays(
            [dict(named_arrays(one))[name] for one in slices], cut_of(name, weight_layout, gate_layout)
        )
        np.testing.assert_array_equal(joined, array, name)

    def gates(own: ExpertWeights) -> np.ndarray:
        """Gate and up columns of an expert, `[2, D, F]`; of an ungated one the same twice."""
        matrix = own.gate_up if weight_layout == "in_out" else own.gate_up.swapaxes(1, 2)
        if gate_layout == "separate":
            up = own.up if weight_layout == "in_out" else own.up.swapaxes(1, 2)
            return np.stack([matrix[0], up[0]])
        if gate_layout is None:
            return np.stack([matrix[0], matrix[0]])
        return np.stack(
            [matrix[0, :, ::2], matrix[0, :, 1::2]] if gate_layout == "interleaved" else np.split(matrix[0], 2, 1)
        )

    each = 12 // size
    for index, own in enumerate(slices):
        mine = slice(index * each, (index + 1) * each)
        np.testing.assert_array_equal(gates(own), gates(experts)[:, :, mine])
        down, whole = (one.down if weight_layout == "in_out" else one.down.swapaxes(1, 2) for one in (own, experts))
        np.testing.assert_array_equal(down, whole[:, mine])
        np.testing.assert_array_equal(own.down_bias, experts.down_bias)


@pytest.mark.parametrize("name", ["mxfp4", "fp8_block", "fp8_channel", "fp8_tensor", "int4_g128_zp", "int8_channel"])
def test_slices_of_quantised_matrices_have_whole_groups(name: str) -> None:
    format, random = format_named(name), np.random.default_rng(0)

    def matrix(*shape: int) -> QuantizedTensor:
        return quantize(random.random(shape, np.float32), format)

    experts = ExpertWeights(matrix(2, 1024, 128), matrix(2, 128, 512))
    whole = [dequantize(one) for one in (experts.gate_up, experts.down)]
    for index, own in enumerate(split_experts(experts, 2, "out_in", "halves")):
        mine = slice(256 * index, 256 * (index + 1))
        gate, up = np.split(whole[0], 2, 1)
        np.testing.assert_array_equal(dequantize(own.gate_up), np.concatenate([gate[:, mine], up[:, mine]], 1))
        np.testing.assert_array_equal(dequantize(own.down), whole[1][:, :, mine])


def test_axes_that_do_not_divide_are_refused_with_sizes_that_do() -> None:
    matrices = {"gate_up": QuantizedSpec(format_named("mxfp4")), "down": QuantizedSpec(format_named("mxfp4"))}
    require_splittable(2880, matrices, TensorSplit(2))
    with pytest.raises(Unsupported) as caught:
        require_splittable(2880, matrices, TensorSplit(4))
    assert str(caught.value) == (
        "tensor must leave whole groups of 32 of mxfp4 in experts.down on every rank, got d_ff / ranks = 2880 / 4 = "
        "720 = 22.5 groups; use 2, 3, 5, 6, 9, 10 ranks"
    )
    with pytest.raises(InvalidInput, match=r"divides d_ff = 2880, got 7; use 2, 3, 4, 5, 6, 8 ranks"):
        require_splittable(2880, {}, TensorSplit(7))
    with pytest.raises(
        Unsupported, match=r"groups of 128 of fp8_block in experts.gate_up .* 768 / 4 = 192 = 1.5 groups"
    ):
        require_splittable(768, {"gate_up": QuantizedSpec(format_named("fp8_block"))}, TensorSplit(4))
    # Two rows of gate or up share a byte of zero points.
    packed = {"gate_up": QuantizedSpec(format_named("int4_row_zp"))}
    require_splittable(12, packed, TensorSplit(2))
    with pytest.raises(Unsupported, match=r"groups of 2 of int4_row_zp in experts.gate_up .* 6 / 2 = 3 = 1.5 groups"):
        require_splittable(6, packed, TensorSplit(2))
    require_splittable(6, {"gate_up": QuantizedSpec(format_named("int8_row_zp"))}, TensorSplit(2))
    with pytest.raises(InvalidInput, match=r"divides d_ff = 7, got 2; use 7 ranks"):
        require_splittable(7, {}, TensorSplit(2))


def test_wrong_splits_are_named() -> None:
    refused: tuple[tuple[dict[str, Any], str], ...] = (
        ({"size": 0}, "size must be"),
        ({"size": 2, "index": 2}, "index must be"),
        ({"tokens": "same"}, "tokens must be one of split, replicated"),
    )
    for options, text in refused:
        with pytest.raises(InvalidInput, match=text):
            TensorSplit(**options)


def plan_of(mode: str, tensor: TensorSplit, **options: Any) -> Any:
    return plan_exchange(16, 4, 64, "bfloat16", LINEAR, ExchangeSpec(mode), tensor=tensor, **options)


@pytest.mark.parametrize("mode", ["all_to_all", "padded", "all_gather"])
def test_a_plan_is_that_of_all_tokens_of_the_axis_and_its_messages(mode: str) -> None:
    plan, whole = (
        plan_of(mode, TensorSplit(2, 1), training=True),
        plan_exchange(32, 4, 64, "bfloat16", LINEAR, ExchangeSpec(mode), training=True),
    )
    for kind in ("forward", "backward"):
        assert tuple(one for one in getattr(plan, kind) if one.axis == "experts") == getattr(whole, kind)
    over = [
        (one.kind, one.what, one.dtype, one.bytes) for one in (*plan.forward, *plan.backward) if one.axis == "tensor"
    ]
    header = [("all_gather", "header", "int32", 32)]
    first = [*header, ("all_gather", "ids and weights", "int32", 16 * 8 * 4)]
    if mode != "all_to_all":
        first = [("all_gather", "header, ids and weights", "int32", 32 + 16 * 8 * 4)]
    assert over == [
        *first,
        ("all_gather", "rows", "bfloat16", 16 * 128),
        ("all_to_all", "parts", "float32", 32 * 256),
        ("all_gather", "d_output", "bfloat16", 16 * 128),
        ("all_to_all", "d_x", "float32", 32 * 256),
        ("all_to_all", "d_weights", "float32", 32 * 16),
    ]
    assert not plan.exact and plan.why_not_exact[0].startswith("tensor=2: each rank adds up its part of F")
    assert plan.host_reads == (2 if mode == "all_to_all" else 0)
    assert (plan.expected_tokens, plan.expected_rows) == (whole.expected_tokens, whole.expected_rows)
    names = {buffer.name: buffer.bytes for buffer in plan.buffers}
    assert (names["gathered rows"], names["parts"], names["returned parts"]) == (32 * 128, 32 * 256, 32 * 256)
    if mode == "all_to_all":
        few, many = (plan_of(mode, TensorSplit(2, 1)).peak(rows, rows) for rows in (4000, 8000))
        assert 2 * few - many == names["returned results"], "beside what comes twice"
    assert plan.peak() > whole.peak() and "tensor     rank 1 of 2, tokens split" in plan.explain()
    assert codec.loads(codec.dumps(plan)) == plan


def test_replicated_tokens_travel_once() -> None:
    plan, alone = (
        plan_of("all_to_all", TensorSplit(2, 0, "replicated"), training=True),
        plan_of("all_to_all", TensorSplit()),
    )
    over = [(one.kind, one.what, one.bytes) for one in (*plan.forward, *plan.backward) if one.axis == "tensor"]
    assert over == [
        ("all_gather", "header", 32),
        ("all_gather", "parts", 16 * 256),
        ("all_gather", "d_x", 16 * 256),
        ("all_gather", "d_weights", 16 * 16),
    ]
    assert plan.header.tokens == alone.header.tokens == 16 and alone.exact
    headers = {
        plan_of("padded", split).header
        for split in (TensorSplit(), TensorSplit(2), TensorSplit(2, 1), TensorSplit(2, 0, "replicated"))
    }
    assert len(headers) == 4


def test_predicted_times_count_the_axis() -> None:
    layer, spec = MoELayerSpec(4096, 14336, 8, 2), ExchangeSpec()
    alone, split = predict(layer, 4096, 4, H200, spec), predict(layer, 4096, 4, H200, spec, tensor=2)
    assert (alone.ranks, split.ranks) == (4, 8)
    stages, before = dict(split.stages), dict(alone.stages)
    assert [name for name, _ in split.stages] == ["counts", "gather", "dispatch", "compute", "combine", "scatter"]
    link, axis = H200.link("all_to_all"), H200.link("all_gather")
    assert stages["gather"] == axis.us(4096 * 4096 * 2) and stages["scatter"] == axis.us(4096 * 4096 * 4)
    assert stages["dispatch"] > 1.9 * (before["dispatch"] - link.latency_us) and stages["compute"] <= before["compute"]
    trained = dict(predict(layer, 4096, 4, H200, spec, tensor=2, training=True).stages)
    assert trained["gather"] == 2 * stages["gather"]
    with pytest.raises(InvalidInput, match="tensor must be at most the machine's domain of 8, got 16"):
        predict(layer, 4096, 1, H200, spec, tensor=16)
    few = dataclasses.replace(H200, network=None)
    with pytest.raises(InvalidInput, match="machine must have a network for 8 ranks in domains of 4"):
        predict(layer, 4096, 8, few, spec, tensor=2)
