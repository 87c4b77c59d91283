"""Products whose rows, weights or biases lie more than 2**31 elements behind the start of their array; see
test_far_rows.py."""

from __future__ import annotations

import numpy as np
import pytest

from moe_core.base.arrays import ArraySpec
from moe_core.base.target import Target
from moe_core.formats import QuantizedSpec, format_named, quantized_specs
from moe_core.ops.matmul.backward import plan_matmul_ogs_backward
from moe_core.ops.matmul.forward import plan_matmul_ogs
from moe_core.ops.matmul.weight_gradient import plan_weight_gradient
from moe_core.plan.steps import Constant, KernelLaunch, LaunchPlan
from moe_core.specs import Activation, LayoutSpec, MatmulSpec, WeightGradientSpec
from moe_core.specs.operands import MatmulOperands, WeightGradientOperands
from tests.support.harness import engine_target
from tests.support.runtime.far import HERE, LAST, ROWS, SECOND, WIDTH, agree, draw, far, half, integers, single
from tests.support.runtime.memory import run_last_programs, sparse

pytestmark = pytest.mark.skipif(engine_target().kind != "interpreter", reason="a GPU would need all of the memory")
SEPARATE = Activation("silu", gate_layout="separate")


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
    launches = [dict(step.arguments) for step in plan.steps if isinstance(step, KernelLaunch)]
    block_m = next(given["BLOCK_M"] for given in launches if "schedule" in given and "D" in given)
    assert isinstance(block_m, Constant) and isinstance(block_m.value, int)
    for buffer in plan.scratch:
        if buffer.name.startswith("schedule"):
            found[buffer.name] = np.full(buffer.spec.shape, -1, np.int32)
            size = layout.capacity - SECOND
            found[buffer.name][-1] = ((size - 1) // block_m.value, 1)
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


def test_matmul_of_far_rows_without_a_layout() -> None:
    operands = MatmulOperands(half(ROWS, WIDTH), half(WIDTH, 64))
    plan = plan_matmul_ogs(operands, None, MatmulSpec("in_out"), HERE)
    last, weight = draw(half(LAST, WIDTH)), draw(half(WIDTH, 64))
    found = run_last_programs(plan, {"x": far(half(ROWS, WIDTH), last), "weight": weight})["y"]
    agree(found[-LAST:] / 100, last.astype(np.float32) @ weight.astype(np.float32) / 100)


@pytest.mark.parametrize(
    ("experts", "d", "n", "activation"),
    [(2049, 1024, 1040, None), (4096, 1, 2**19 + 256, None), (4096, 1, 2**19 + 256, SEPARATE)],
    ids=["weight", "bias", "bias of up"],
)
def test_matmul_of_the_last_expert(experts: int, d: int, n: int, activation: Activation | None) -> None:
    assert (experts - 1) * d * n > 2**31
    layout, weight, bias = LayoutSpec(LAST, 1, experts), half(experts, d, n), half(experts, n)
    up = {"up": weight, "up_bias": bias} if activation else {}
    operands = MatmulOperands(half(LAST, d), weight, bias=bias, **up)
    plan = plan_matmul_ogs(operands, layout, MatmulSpec("in_out", "token", "slot", activation), HERE)
    last = {name: draw(half(1, *plan.spec(name).shape[1:]), seed) for seed, name in enumerate(("weight", "bias", *up))}
    arrays = {"x": draw(half(LAST, d))} | {name: far(plan.spec(name), one) for name, one in last.items()}
    arrays |= {"group_sizes": np.zeros(experts, np.int32), "group_start": np.zeros(experts + 1, np.int32)}
    arrays["group_sizes"][-1] = arrays["group_start"][-1] = LAST
    arrays |= {name: np.arange(LAST, dtype=np.int32) for name in ("slot_of_row", "row_of_slot")}
    schedules = [buffer for buffer in plan.scratch if buffer.name.startswith("schedule")]
    arrays |= {buffer.name: np.array([[0, experts - 1]] * buffer.spec.shape[0], np.int32) for buffer in schedules}
    found = run_last_programs(plan, arrays, without=("schedule",))["y"][:, -8:]
    wide = {name: one[0, ..., -8:].astype(np.float32) for name, one in last.items()}
    x = arrays["x"].astype(np.float32)
    wanted = x @ wide["weight"] + wide["bias"]
    if activation:
        wanted = wanted / (1 + np.exp(-wanted)) * (x @ wide["up"] + wide["up_bias"])
    agree(found / d, wanted / d)


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


@pytest.mark.parametrize(("gather", "scatter"), [("row", "row"), ("slot", "slot"), ("token", "slot")])
def test_weight_gradient_of_far_rows(gather: str, scatter: str) -> None:
    layout = LayoutSpec(ROWS, 1, 2)
    operands = MatmulOperands(half(ROWS, WIDTH), half(2, WIDTH, 8), bias=single(2, 8))
    spec = MatmulSpec("in_out", gather, scatter)
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


def test_weight_gradient_in_parts_of_the_last_layer() -> None:
    """Parts are as many as a GPU has room for, so they are planned for one."""
    layers, rows, m, n = 500, 4096, 1408, 3072
    assert (layers - 1) * m * n > 2**31
    operands = WeightGradientOperands(half(rows, m), half(rows, n), layer_index=integers(1))
    plan = plan_weight_gradient(
        operands, None, WeightGradientSpec("bfloat16", num_layers=layers), Target("cuda", 90, 132)
    )
    parts = far(single(2, m, n), draw(single(1, m, n)))
    arrays = {"left": sparse((rows, m), "bfloat16"), "right": sparse((rows, n), "bfloat16"), "d_weight_parts": parts}
    arrays["layer_index"] = np.array([layers - 1], np.int32)
    found = run_last_programs(plan, arrays, along=2, without=("weight_gradient",))["d_weight"]
    agree(found[-1, -1, -64:], parts[1, -1, -64:])
