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
from moe_core.base.target import Target
from moe_core.formats import QuantizedSpec, format_named, quantized_specs
from moe_core.ops.activation.backward import plan_activation_backward, plan_expert_activation_backward
from moe_core.ops.activation.forward import plan_activation
from moe_core.ops.common.zero_rows import launch_zero_rows
from moe_core.ops.matmul.backward import plan_matmul_ogs_backward
from moe_core.ops.matmul.forward import plan_matmul_ogs
from moe_core.ops.norm.backward import plan_rms_norm_backward
from moe_core.ops.norm.forward import plan_rms_norm
from moe_core.ops.quantize.rows import plan_quantize_rows
from moe_core.ops.reduction.reduce import plan_reduce, plan_scale_rows
from moe_core.ops.reduction.rowwise import plan_add, plan_bias_product, plan_cast_rows, plan_weighted_input
from moe_core.ops.router.forward import plan_router
from moe_core.ops.routing.backward import plan_routing_backward
from moe_core.ops.routing.topk import plan_routing
from moe_core.plan.builder import PlanBuilder
from moe_core.plan.steps import LaunchPlan
from moe_core.specs.matmul import Activation, MatmulSpec
from moe_core.specs.norm import NormSpec
from moe_core.specs.operands import ExpertActivationOperands, MatmulOperands, RoutingGradients
from moe_core.specs.routing import LayoutSpec, LogitsSpec, RouterSpec
from tests.support.harness import engine_target, run_plan
from tests.support.runtime.memory import run_last_programs, sparse

pytestmark = pytest.mark.skipif(engine_target().kind != "interpreter", reason="a GPU would need all of the memory")
HERE = Target("interpreter")
#: Rows of WIDTH elements, the last of which begin past 2**31; of a last block LAST are there, whatever its height. The
#: second of two experts begins with row SECOND.
LAST, WIDTH = 5, 1040
ROWS, SECOND = 2**21 + LAST, 2**20
assert (ROWS - LAST) * WIDTH > 2**31
SILU, SEPARATE, GELU = Activation("silu"), Activation("silu", gate_layout="separate"), Activation("gelu", False)


def half(*shape: int) -> ArraySpec:
    return ArraySpec(shape, "bfloat16")


def single(*shape: int) -> ArraySpec:
    return ArraySpec(shape, "float32")


def integers(*shape: int) -> ArraySpec:
    return ArraySpec(shape, "int32")


def draw(spec: ArraySpec, seed: int = 0) -> np.ndarray:
    random, kind = np.random.default_rng([seed, spec.size]), dtypes.numpy_dtype(spec.dtype)
    if spec.dtype in ("int8", "uint8"):
        return random.integers(0, 120, spec.shape).astype(kind)
    return random.standard_normal(spec.shape, np.float32).astype(kind)


def far(spec: ArraySpec, last: np.ndarray) -> np.ndarray:
    """An array of zeros that ends in `last`."""
    array = sparse(spec.shape, spec.dtype)
    array[len(array) - len(last) :] = last
    return array


def agree(actual: np.ndarray, expected: np.ndarray) -> None:
    found, wanted = (np.asarray(one, np.float32) for one in (actual, expected))
    assert np.any(wanted), "the test sees nothing"
    np.testing.assert_allclose(found, wanted, rtol=1e-2, atol=1e-3)


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


def grouping(layout: LayoutSpec) -> dict[str, np.ndarray]:
    """A layout whose last LAST rows, of the last expert, have the last slots; all other rows are padding."""
    rows, slots = layout.capacity, layout.num_slots
    slot_of_row, row_of_slot = np.full(rows, -1, np.int32), np.full(slots, -1, np.int32)
    slot_of_row[-LAST:], row_of_slot[-LAST:] = np.arange(slots - LAST, slots), np.arange(rows - LAST, rows)
    start, size = SECOND, rows - SECOND
    return {
        "group_sizes": np.array([0, size], np.int32),
        "group_start": np.array([0, start, rows], np.int32),
        "slot_of_row": slot_of_row,
        "row_of_slot": row_of_slot,
    }


def last_block(plan: LaunchPlan, layout: LayoutSpec) -> dict[str, np.ndarray]:
    """The schedules of a plan, in which the last entry is the last block of the last expert."""
    found = {}
    for buffer in plan.scratch:
        if buffer.name.startswith("schedule"):
            launch = next(
                step for step in plan.steps if "schedule" in dict(step.arguments) and "D" in dict(step.arguments)
            )
            block_m = dict(launch.arguments)["BLOCK_M"].value
            found[buffer.name] = np.full(buffer.spec.shape, -1, np.int32)
            size = layout.capacity - SECOND
            found[buffer.name][-1] = ((size - 1) // block_m, 1)
    return found


@pytest.mark.parametrize(("gather", "scatter"), [("row", "row"), ("slot", "slot"), ("slot", "row"), ("row", "slot")])
def test_matmul(gather: str, scatter: str) -> None:
    layout = LayoutSpec(ROWS, 1, 2)
    operands = MatmulOperands(half(ROWS, WIDTH), half(2, WIDTH, WIDTH), row_weight=single(ROWS))
    plan = plan_matmul_ogs(operands, layout, MatmulSpec("in_out", gather, scatter), HERE)
    last, weight, row_weight = draw(half(LAST, WIDTH)), draw(half(2, WIDTH, WIDTH)), draw(single(LAST))
    arrays = {"x": far(half(ROWS, WIDTH), last), "weight": weight, "row_weight": far(single(ROWS), row_weight)}
    arrays |= grouping(layout) | last_block(plan, layout)
    found = run_last_programs(plan, arrays, without=("schedule",))["y"]
    product = last.astype(np.float32) @ weight[1].astype(np.float32) * row_weight[:, None]
    agree(found[-LAST:, -8:] / 100, product[:, -8:] / 100)


def test_matmul_of_tokens_far_apart() -> None:
    layout, stride = LayoutSpec(LAST, 1, 2), 2**29 + 8
    x = np.lib.stride_tricks.as_strided(sparse((LAST * stride,), "bfloat16"), (LAST, WIDTH), (2 * stride, 2))
    x[...] = draw(half(LAST, WIDTH))
    operands = MatmulOperands(ArraySpec(x.shape, "bfloat16", (stride, 1)), half(2, WIDTH, WIDTH))
    plan = plan_matmul_ogs(operands, layout, MatmulSpec("in_out", "token", "slot"), HERE)
    arrays = {"x": x, "weight": draw(half(2, WIDTH, WIDTH))} | grouping(layout)
    arrays |= {"group_sizes": np.array([0, LAST], np.int32), "group_start": np.array([0, 0, LAST], np.int32)}
    arrays |= {name: np.array([[0, 1]] * len(one), np.int32) for name, one in last_block(plan, layout).items()}
    found = run_last_programs(plan, arrays, without=("schedule",))["y"]
    agree(found[:, -8:] / 100, (x.astype(np.float32) @ arrays["weight"][1].astype(np.float32))[:, -8:] / 100)


LAYERS = 4096


def stacked(weight: object, layers: int) -> tuple[LaunchPlan, dict[str, np.ndarray]]:
    """A product with the last of many layers, whose bias is one of many too."""
    layout = LayoutSpec(LAST, 1, 1)
    bias = single(layers, 1, 512)
    operands = MatmulOperands(single(LAST, 1032), weight, bias=bias, layer_index=integers(1))
    plan = plan_matmul_ogs(operands, layout, MatmulSpec("in_out", "token", "slot"), HERE)
    arrays = {"x": draw(single(LAST, 1032)), "layer_index": np.array([layers - 1], np.int32)}
    arrays |= {"bias": far(bias, draw(single(1, 1, 512)))}
    arrays |= {"group_sizes": np.array([LAST], np.int32), "group_start": np.array([0, LAST], np.int32)}
    arrays |= {"slot_of_row": np.arange(LAST, dtype=np.int32), "row_of_slot": np.arange(LAST, dtype=np.int32)}
    schedules = [buffer for buffer in plan.scratch if buffer.name.startswith("schedule")]
    return plan, arrays | {buffer.name: np.zeros(buffer.spec.shape, np.int32) for buffer in schedules}


def test_matmul_of_the_last_layer() -> None:
    shape = (LAYERS, 1, 1032, 512)
    assert (LAYERS - 1) * 1032 * 512 > 2**31
    plan, arrays = stacked(single(*shape), LAYERS)
    arrays["weight"] = far(single(*shape), draw(single(1, *shape[1:])))
    found = run_last_programs(plan, arrays, without=("schedule",))["y"]
    wanted = arrays["x"] @ arrays["weight"][-1, 0] + arrays["bias"][-1, 0]
    agree(found[:, -8:] / 100, wanted[:, -8:] / 100)


def test_quantised_matmul_of_the_last_layer() -> None:
    shape = (LAYERS, 1, 1032, 512)
    weight = quantized_specs(QuantizedSpec(format_named("int8_channel"), "in_out"), shape)
    plan, arrays = stacked(weight, LAYERS)
    codes, scales = draw(ArraySpec((1, *shape[1:]), "int8")), np.abs(draw(single(1, *weight.scales.shape[1:])))
    arrays |= {"weight.values": far(weight.values, codes), "weight.scales": far(weight.scales, scales)}
    found = run_last_programs(plan, arrays, without=("schedule",))["y"]
    wanted = arrays["x"] @ (codes * scales)[0, 0] + arrays["bias"][-1, 0]
    agree(found[:, -8:] / 1e4, wanted[:, -8:] / 1e4)


def test_quantised_matmul_transposed_of_the_last_layer() -> None:
    shape, layout = (LAYERS, 1, 1032, 512), LayoutSpec(LAST, 1, 1)
    weight = quantized_specs(QuantizedSpec(format_named("int8_channel"), "in_out"), shape)
    operands = MatmulOperands(single(LAST, 1032), weight, layer_index=integers(1))
    spec = MatmulSpec("in_out", "slot", "slot")
    plan = plan_matmul_ogs_backward(single(LAST, 512), operands, layout, spec, HERE, wanted=("d_x",))
    codes, scales = draw(ArraySpec((1, *shape[1:]), "int8")), np.abs(draw(single(1, *weight.scales.shape[1:])))
    arrays = {"d_y": draw(single(LAST, 512)), "x": draw(single(LAST, 1032))}
    arrays |= {"weight.values": far(weight.values, codes), "weight.scales": far(weight.scales, scales)}
    arrays |= {"layer_index": np.array([LAYERS - 1], np.int32), "group_sizes": np.array([LAST], np.int32)}
    arrays |= {"group_start": np.array([0, LAST], np.int32)}
    arrays |= {name: np.arange(LAST, dtype=np.int32) for name in ("slot_of_row", "row_of_slot")}
    schedules = [buffer for buffer in plan.scratch if buffer.name.startswith("schedule")]
    arrays |= {buffer.name: np.zeros(buffer.spec.shape, np.int32) for buffer in schedules}
    found = run_last_programs(plan, arrays, without=("schedule",))["d_x"]
    wanted = arrays["d_y"] @ (codes * scales)[0, 0].T
    agree(found[:, -8:] / 1e4, wanted[:, -8:] / 1e4)


@pytest.mark.parametrize("gather", ["row", "slot"])
def test_weight_gradient_of_far_rows(gather: str) -> None:
    layout = LayoutSpec(ROWS, 1, 2)
    operands = MatmulOperands(half(ROWS, WIDTH), half(2, WIDTH, 8), bias=single(2, 8))
    spec = MatmulSpec("in_out", gather, gather)
    plan = plan_matmul_ogs_backward(half(ROWS, 8), operands, layout, spec, HERE, wanted=("d_weight", "d_bias"))
    x, d_y = draw(half(LAST, WIDTH)), draw(half(LAST, 8))
    arrays = grouping(layout) | {"x": far(half(ROWS, WIDTH), x), "d_y": far(half(ROWS, 8), d_y)}
    arrays |= {"weight": sparse((2, WIDTH, 8), "bfloat16"), "bias": sparse((2, 8), "float32")}
    arrays["group_sizes"][1], arrays["group_start"][1] = LAST, ROWS - LAST
    found = run_last_programs(plan, arrays, along=2)
    wide = x.astype(np.float32), d_y.astype(np.float32)
    agree(found["d_weight"][1, -8:], (wide[0].T @ wide[1])[-8:])


def test_weight_gradient_of_the_last_expert() -> None:
    experts = 2049
    assert (experts - 1) * 1024 * WIDTH > 2**31
    layout = LayoutSpec(LAST, 1, experts)
    operands = MatmulOperands(half(LAST, 1024), half(experts, 1024, WIDTH))
    spec = MatmulSpec("in_out", "row", "row")
    plan = plan_matmul_ogs_backward(half(LAST, WIDTH), operands, layout, spec, HERE, wanted=("d_weight",))
    arrays = {"x": draw(half(LAST, 1024)), "d_y": draw(half(LAST, WIDTH))}
    arrays |= {"weight": sparse((experts, 1024, WIDTH), "bfloat16"), "group_sizes": np.zeros(experts, np.int32)}
    arrays |= {"group_start": np.zeros(experts + 1, np.int32)}
    arrays["group_sizes"][-1] = arrays["group_start"][-1] = LAST
    arrays |= {name: np.arange(LAST, dtype=np.int32) for name in ("slot_of_row", "row_of_slot")}
    found = run_last_programs(plan, arrays, along=3)["d_weight"]
    x, d_y = (arrays[name].astype(np.float32) for name in ("x", "d_y"))
    agree(found[-1, -8:, -8:], (x.T @ d_y)[-8:, -8:])


def test_activation_between_products() -> None:
    rows, places = ROWS, np.arange(ROWS - LAST, ROWS, dtype=np.int32)
    operands = ExpertActivationOperands(half(rows, WIDTH), half(rows, 2 * WIDTH), integers(LAST), single(LAST, 1))
    plan = plan_expert_activation_backward(operands, SILU, HERE)
    small = ExpertActivationOperands(half(LAST, WIDTH), half(LAST, 2 * WIDTH), integers(LAST), single(LAST, 1))
    near = plan_expert_activation_backward(small, SILU, HERE)
    given = {buffer.name: draw(buffer.spec) for buffer in near.inputs} | {"row_of_slot": places - places[0]}
    spread = {name: far(plan.spec(name), given[name]) for name in ("d_hidden", "pre")}
    actual = run_last_programs(plan, given | spread | {"row_of_slot": places})
    for name, wanted in run_plan(near, given).items():
        agree(actual[name][-LAST:], wanted)


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
