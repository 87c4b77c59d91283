"""Rows, slots, layers and gradients more than 2**31 elements behind the start of their array: offsets of 32 bits would
wrap around.

The arrays are sparse: pages that nothing writes take no memory. Each launch runs its last program alone, which sees the
last rows, and must give what a small plan gives for these rows.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from moe_core.base import dtypes
from moe_core.base.arrays import ArraySpec
from moe_core.formats import format_named
from moe_core.ops.activation.backward import plan_activation_backward, plan_expert_activation_backward
from moe_core.ops.activation.forward import plan_activation
from moe_core.ops.common.zero_rows import launch_zero_rows
from moe_core.ops.norm.backward import plan_rms_norm_backward
from moe_core.ops.norm.forward import plan_rms_norm
from moe_core.ops.quantize.rows import plan_quantize_rows
from moe_core.ops.reduction.reduce import plan_reduce, plan_scale_rows
from moe_core.ops.reduction.rowwise import (
    plan_add,
    plan_bias_product,
    plan_cast_rows,
    plan_gather_rows,
    plan_weighted_input,
)
from moe_core.ops.router.forward import plan_router
from moe_core.ops.routing.backward import plan_routing_backward
from moe_core.ops.routing.topk import plan_routing
from moe_core.plan.builder import PlanBuilder
from moe_core.plan.steps import LaunchPlan
from moe_core.specs import Activation, LayoutSpec, LogitsSpec, NormSpec, RouterSpec
from moe_core.specs.operands import ExpertActivationOperands, RoutingGradients
from tests.support.harness import engine_target, run_plan
from tests.support.runtime.far import HERE, LAST, ROWS, WIDTH, agree, draw, far, half, integers, single
from tests.support.runtime.memory import run_last_programs, sparse

pytestmark = pytest.mark.skipif(engine_target().kind != "interpreter", reason="a GPU would need all of the memory")
SILU, SEPARATE, GELU = Activation("silu"), Activation("silu", gate_layout="separate"), Activation("gelu", False)


def norm_backward(rows: int) -> LaunchPlan:
    given = half(rows, WIDTH), half(rows, WIDTH), half(WIDTH)
    return plan_rms_norm_backward(*given, NormSpec(), HERE, wanted=("d_x",))


def quantised(format: str) -> Callable[[int], LaunchPlan]:
    # Groups of 32 columns are whole ones in all formats that have them.
    return lambda rows: plan_quantize_rows(half(rows, WIDTH + 16), format_named(format), HERE)


#: Kernels that treat each row alike: the plan for a number of rows.
ROW_BY_ROW: dict[str, Callable[[int], LaunchPlan]] = {
    "scale_rows": lambda rows: plan_scale_rows(half(rows, WIDTH), single(rows, 1), HERE),
    "cast_rows": lambda rows: plan_cast_rows(half(rows, WIDTH), "float16", HERE),
    "activation": lambda rows: plan_activation(half(rows, 2 * WIDTH), SILU, HERE),
    "activation of two buffers": lambda rows: plan_activation(half(rows, WIDTH), SEPARATE, HERE, up=half(rows, WIDTH)),
    "ungated activation": lambda rows: plan_activation(half(rows, WIDTH), GELU, HERE),
    "activation backward": lambda rows: plan_activation_backward(half(rows, WIDTH), half(rows, 2 * WIDTH), SILU, HERE),
    "activation backward of two buffers": lambda rows: plan_activation_backward(
        half(rows, WIDTH), half(rows, WIDTH), SEPARATE, HERE, up=half(rows, WIDTH)
    ),
    "router": lambda rows: plan_router(half(rows, WIDTH), half(WIDTH, 8), None, LogitsSpec(), HERE),
    "routing": lambda rows: plan_routing(single(rows, WIDTH), RouterSpec(2), HERE),
    "routing with groups": lambda rows: plan_routing(
        single(rows, WIDTH), RouterSpec(2, "sigmoid", num_groups=4, topk_group=2), HERE, correction_bias=single(WIDTH)
    ),
    "load balance backward": lambda rows: plan_routing_backward(
        RoutingGradients(logits=single(rows, WIDTH), z=single(1)), single(rows, WIDTH), None, RouterSpec(2), HERE
    ),
    "fp8 by row": quantised("fp8_token"),
    "fp8 by groups": quantised("fp8_group"),
    "mxfp8": quantised("mxfp8"),
    "norm": lambda rows: plan_rms_norm(half(rows, WIDTH), half(WIDTH), NormSpec(), HERE),
    "norm backward": norm_backward,
}


@pytest.mark.parametrize("name", ROW_BY_ROW)
def test_row_by_row(name: str) -> None:
    make = ROW_BY_ROW[name]
    near, plan = make(LAST), make(ROWS)
    given = {buffer.name: draw(buffer.spec) for buffer in near.inputs}
    spread = {
        buffer.name: given[buffer.name] if buffer.spec.shape[0] != ROWS else far(buffer.spec, given[buffer.name])
        for buffer in plan.inputs
    }
    if name == "load balance backward":  # means over all tokens
        spread["gradients.z"] = given["gradients.z"] * np.float32(ROWS / LAST)
    actual, expected = run_last_programs(plan, spread), run_plan(near, given)
    for output, wanted in expected.items():
        columns = 1 if output == "scales" else 32
        agree(actual[output][-LAST:, :columns], wanted[:, :columns])


def test_sums_of_equal_arrays() -> None:
    plan, last = plan_add(single(ROWS, WIDTH), HERE), draw(single(1, WIDTH))
    given = {name: far(single(ROWS, WIDTH), last) for name in ("first", "second")}
    agree(run_last_programs(plan, given)["total"][-1, -64:], (2 * last)[0, -64:])


@pytest.mark.parametrize("top_k", [1, 3, 17])
def test_reduce_by_slot(top_k: int) -> None:
    tokens = ROWS // top_k
    layout, last = LayoutSpec(tokens, top_k, 4), draw(half(top_k, WIDTH))
    plan = plan_reduce(half(tokens * top_k, WIDTH), integers(tokens * top_k), layout, HERE)
    every = np.zeros(tokens * top_k, np.int32)
    found = run_last_programs(plan, {"y": far(half(tokens * top_k, WIDTH), last), "row_of_slot": every})
    agree(found["out"][-1, :64], last.astype(np.float32).sum(0)[:64])


def blocks(top_k: int = 1, tokens: int = LAST) -> LayoutSpec:
    """Two experts of so many rows each that those of the second lie far behind."""
    return LayoutSpec(tokens, top_k, 2, max_rows=2**20 + LAST)


@pytest.mark.parametrize("top_k", [3, 17])
def test_reduce_by_row(top_k: int) -> None:
    layout, last = blocks(top_k), draw(half(LAST * top_k, WIDTH))
    y = far(half(layout.capacity, WIDTH), last)
    places = np.arange(layout.capacity - LAST * top_k, layout.capacity, dtype=np.int32)
    plan = plan_reduce(half(*y.shape), integers(layout.num_slots), layout, HERE, order="row")
    found = run_last_programs(plan, {"y": y, "row_of_slot": places})
    agree(found["out"][:, :64], last.astype(np.float32).reshape(LAST, top_k, WIDTH).sum(1)[:, :64])


def test_activation_between_products_whose_rows_are_slots() -> None:
    near, plan = (
        plan_expert_activation_backward(
            ExpertActivationOperands(half(rows, WIDTH), half(rows, 2 * WIDTH), None, single(rows, 1)), SILU, HERE
        )
        for rows in (LAST, ROWS)
    )
    given = {buffer.name: draw(buffer.spec) for buffer in near.inputs}
    actual = run_last_programs(plan, {name: far(plan.spec(name), one) for name, one in given.items()})
    for name, wanted in run_plan(near, given).items():
        agree(actual[name][-LAST:], wanted)


def test_activation_between_products() -> None:
    rows, places = ROWS, np.arange(ROWS - LAST, ROWS, dtype=np.int32)
    operands = ExpertActivationOperands(half(rows, WIDTH), half(rows, 2 * WIDTH), integers(LAST), single(LAST, 1))
    plan = plan_expert_activation_backward(operands, SILU, HERE, slot_of_row=integers(rows))
    small = ExpertActivationOperands(half(LAST, WIDTH), half(LAST, 2 * WIDTH), integers(LAST), single(LAST, 1))
    near = plan_expert_activation_backward(small, SILU, HERE, slot_of_row=integers(LAST))
    given = {buffer.name: draw(buffer.spec) for buffer in near.inputs} | {"row_of_slot": places - places[0]}
    given["slot_of_row"] = np.arange(LAST, dtype=np.int32)
    spread = {name: far(plan.spec(name), given[name]) for name in ("d_hidden", "pre", "slot_of_row")}
    actual = run_last_programs(plan, given | spread | {"row_of_slot": places})
    for name, wanted in run_plan(near, given).items():
        agree(actual[name][-LAST:], wanted)


@pytest.mark.parametrize("top_k", [1, 2])
def test_gather_of_far_rows(top_k: int) -> None:
    """The last rows are those of the last tokens; the first of them is padding."""
    layout, x = LayoutSpec(ROWS, top_k, 2), draw(half(LAST, WIDTH))
    rows, slots = integers(layout.capacity), integers(layout.num_slots)
    plan = plan_gather_rows(half(ROWS, WIDTH), rows, slots, layout, HERE)
    places = np.array([-1, *range(layout.num_slots - LAST + 1, layout.num_slots)], np.int32)
    arrays = {"x": far(half(ROWS, WIDTH), x), "slot_of_row": far(rows, places)}
    tokens = np.maximum(places // top_k - ROWS, -LAST)
    wanted = np.where(places[:, None] < 0, 0, x.astype(np.float32)[tokens])
    agree(run_last_programs(plan, arrays)["y"][-LAST:, :64], wanted[:, :64])


def test_weighted_input() -> None:
    outputs = ("d_x", "d_weight")
    plan = plan_weighted_input(half(ROWS, WIDTH), half(ROWS, WIDTH), HERE, outputs=outputs)
    near = plan_weighted_input(half(LAST, WIDTH), half(LAST, WIDTH), HERE, outputs=outputs)
    given = {buffer.name: draw(buffer.spec) for buffer in near.inputs}
    spread = {name: far(plan.spec(name), given[name]) for name in ("d_rows", "x", "weights")}
    given["row_of_slot"] = np.arange(LAST, dtype=np.int32)[::-1].copy()
    spread["row_of_slot"] = far(integers(ROWS), given["row_of_slot"] + ROWS - LAST)
    actual = run_last_programs(plan, spread)
    for name, wanted in run_plan(near, given).items():
        agree(actual[name][-LAST:, :64], wanted[:, :64])


def test_products_with_the_bias_of_the_last_layer() -> None:
    layout, layers, stride = LayoutSpec(LAST, 1, 1), ROWS, 2**29 + 8
    d_y = np.lib.stride_tricks.as_strided(sparse((LAST * stride,), "float32"), (LAST, WIDTH), (4 * stride, 4))
    d_y[...] = draw(single(LAST, WIDTH))
    spec, bias = ArraySpec(d_y.shape, "float32", (stride, 1)), half(layers, 1, WIDTH)
    plan = plan_bias_product(spec, bias, layout, HERE, layer_index=integers(1))
    arrays = {"d_y": d_y, "bias": far(bias, draw(half(1, 1, WIDTH))), "layer_index": np.array([layers - 1], np.int32)}
    arrays |= {"group_start": np.array([0, LAST], np.int32), "slot_of_row": np.arange(LAST, dtype=np.int32)}
    found = run_last_programs(plan, arrays)["products"]
    agree(found, d_y @ arrays["bias"][-1, 0].astype(np.float32))


def test_products_with_the_bias_of_the_last_expert() -> None:
    experts, width = 16385, 2**17 + 8
    assert (experts - 1) * width > 2**31
    layout, bias = LayoutSpec(LAST, 1, experts), half(experts, width)
    plan = plan_bias_product(single(LAST, width), bias, layout, HERE)
    arrays = {"d_y": draw(single(LAST, width)), "bias": far(bias, draw(half(1, width)))}
    arrays |= {"group_start": np.zeros(experts + 1, np.int32), "slot_of_row": np.arange(LAST, dtype=np.int32)}
    arrays["group_start"][-1] = LAST
    found = run_last_programs(plan, arrays)["products"]
    agree(found / 100, arrays["d_y"] @ arrays["bias"][-1].astype(np.float32) / 100)


def test_zeros_where_no_row_is() -> None:
    builder = PlanBuilder("zero_rows", HERE)
    builder.input("markers", integers(ROWS))
    builder.output("y", half(ROWS, WIDTH))
    launch_zero_rows(builder, "markers", "y", (8, 1024))
    markers = np.array([0, -1, 3, -1, 2], np.int32)
    y = far(half(ROWS, WIDTH), np.ones((LAST, WIDTH), np.float32).astype(dtypes.numpy_dtype("bfloat16")))
    run_last_programs(builder.build(), {"markers": far(integers(ROWS), markers), "y": y})
    np.testing.assert_array_equal(y[-LAST:].astype(np.float32), np.repeat(markers[:, None] >= 0, WIDTH, 1))
