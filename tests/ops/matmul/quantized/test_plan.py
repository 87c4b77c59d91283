"""Plans of quantised matmuls and forwards: what they name, compute on every target, and refuse."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import numpy as np
import pytest

from moe_core.base.arrays import ArraySpec
from moe_core.base.target import Target
from moe_core.errors import InvalidInput
from moe_core.formats import (
    FP8_CHANNEL,
    FP8_TENSOR,
    FP8_TOKEN,
    Format,
    QuantizedSpec,
    QuantizedTensor,
    Scheme,
    quantized_specs,
    scheme_named,
)
from moe_core.ops.common.zero_rows import ZERO_ROWS
from moe_core.ops.matmul.forward import plan_matmul_ogs
from moe_core.ops.matmul.problem import MatmulProblem
from moe_core.ops.matmul.quantized.plan import MATMUL_QUANTIZED
from moe_core.ops.matmul.tile_choice import heuristic_tile
from moe_core.ops.moe.forward import plan_moe
from moe_core.ops.moe.options import ForwardOptions
from moe_core.ops.moe.reference.forward import moe_stages
from moe_core.parity.tolerance import assert_close, stage_tolerances
from moe_core.plan.registry import export_plans, load_plans, register
from moe_core.plan.steps import KernelLaunch, LaunchPlan
from moe_core.specs import Activation, LayoutSpec, MatmulSpec, MoESpec, RouterSpec, TileConfig, Tuning
from moe_core.specs.operands import ExpertWeights, MatmulOperands, RouterWeights, SharedExpert, TopK, named_arrays
from tests.support.harness import engine_target, run_plan, spec_of
from tests.support.quantized.operands import LAYOUTS, SCHEMES, draw_experts, reduction_of
from tests.support.strategies import draw_array

REFERENCE = Target("reference")
GPUS = (Target("cuda", 80, 108), Target("cuda", 90, 132))


@dataclasses.dataclass(frozen=True)
class Layer:
    """Arrays and options of one forward. extras: token_mask, expert_map, shared."""

    x: np.ndarray
    experts: ExpertWeights
    routing: Any
    spec: MoESpec
    extras: dict[str, Any]

    def plan(self, target: Target, **options: Any) -> LaunchPlan:
        extras = {name: spec_of(value) for name, value in self.extras.items()}
        arguments = (spec_of(self.x), spec_of(self.experts), spec_of(self.routing), self.spec, target)
        return plan_moe(*arguments, options=ForwardOptions(**extras, **options))

    def run(self, target: Target) -> dict[str, np.ndarray]:
        arrays = {"x": self.x, **dict(named_arrays(self.experts, "experts."))}
        arrays |= dict(named_arrays(self.routing, "routing."))
        arrays |= {name: value for name, value in self.extras.items() if isinstance(value, np.ndarray)}
        if "shared" in self.extras:
            arrays |= dict(named_arrays(self.extras["shared"], "shared."))
        return run_plan(self.plan(target), arrays)

    def check(self, target: Target, scheme: Scheme) -> None:
        """Compare a run with the reference's stages."""
        actual, expected = self.run(target), moe_stages(self.x, self.experts, self.routing, self.spec, **self.extras)
        tolerances = stage_tolerances(
            self.spec,
            self.x.dtype.name,
            d_model=self.x.shape[1],
            d_ff=self.experts.down.shape[-2 if self.spec.weight_layout == "in_out" else -1],
            top_k=expected["ids"].shape[1],
            num_experts=8,
            weights_format=scheme.weights,
        )
        for name, value in actual.items():
            assert_close(value, expected[name], tolerances[name], f"{scheme} {name}")


def draw_layer(scheme: Scheme, seed: int, gate_layout: str, **options: Any) -> Layer:
    """A forward with a router, a map of 8 experts to 3, a token mask, a shared expert and a stack of 2 layers."""
    rng = np.random.default_rng(seed)
    width, tokens = reduction_of(scheme), 11
    layout = LAYOUTS[seed % 2]
    spec = MoESpec(
        Activation("silu", True, gate_layout), RouterSpec(2), layout, activations=scheme.activations, **options
    )
    experts = draw_experts(rng, (2, 3), width, width, scheme, spec)
    columns = width if gate_layout == "separate" else 2 * width

    def matrix(inputs: int, outputs: int) -> np.ndarray:
        return draw_array(rng, (inputs, outputs) if layout == "in_out" else (outputs, inputs), "bfloat16", 0.1)

    shared = SharedExpert(
        matrix(width, columns), matrix(width, width), matrix(width, width) if gate_layout == "separate" else None
    )
    extras = {
        "token_mask": np.arange(tokens) % 5 != 3,
        "expert_map": np.array([-1, 2, -1, 0, 1, -1, -1, -1], np.int32),
        "shared": shared,
    }
    routing = RouterWeights(draw_array(rng, (width, 8), "bfloat16"))
    experts = dataclasses.replace(experts, layer_index=np.array([1], np.int32))
    return Layer(draw_array(rng, (tokens, width), "bfloat16"), experts, routing, spec, extras)


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_a_forward_on_the_reference_target(scheme):
    number = SCHEMES.index(scheme)
    layer = draw_layer(scheme, number, ("halves", "interleaved", "separate")[number % 3])
    found = layer.run(REFERENCE)
    expected = moe_stages(layer.x, layer.experts, layer.routing, layer.spec, **layer.extras)
    for name, value in found.items():
        assert value.tobytes() == expected[name].tobytes(), name


@pytest.mark.parametrize("name", ["fp8_tensor", "int4_w4a16_zp", "mxfp4_w4a8"])
def test_a_forward_on_kernels(name):
    """Quantised rows, groups with zero points and packed codes, beside everything else a forward has."""
    scheme = scheme_named(name)
    gate_layout = {"fp8_tensor": "halves", "int4_w4a16_zp": "separate", "mxfp4_w4a8": "interleaved"}[name]
    draw_layer(scheme, len(name), gate_layout).check(engine_target(), scheme)


@pytest.mark.parametrize("target", [REFERENCE, engine_target()], ids=str)
def test_a_static_scale_and_the_weight_on_the_input(target):
    """The router weight goes onto x before x is quantised; rows of no expert, NaN here, change no other row."""
    scheme, rng = scheme_named("fp8_tensor"), np.random.default_rng(3)
    spec = MoESpec(Activation("gelu_tanh", False), activations=FP8_TENSOR, apply_router_weight_on_input=True)
    experts = draw_experts(rng, (3,), 90, 90, scheme, spec)
    scales = {name: np.array([0.03], np.float32) for name in ("gate_up_input_scale", "down_input_scale")}
    routing = TopK(np.array([[0], [-1], [2], [0]], np.int32), np.array([[1], [1], [0.3], [2]], np.float32))
    x = draw_array(rng, (4, 90), "bfloat16")
    x[1] = np.nan
    layer = Layer(x, dataclasses.replace(experts, **scales), routing, spec, {})
    output = layer.run(target)["output"].astype(np.float32)
    assert np.isfinite(output).all() and output[[0, 2, 3]].any(axis=1).all() and not output[1].any()
    layer.check(target, scheme)


@pytest.mark.parametrize("target", [REFERENCE, engine_target()], ids=str)
@pytest.mark.parametrize("on_input", [False, True])
def test_one_scale_is_found_from_rows_that_an_expert_gets(on_input, target):
    """Masked tokens, tokens without an expert and those whose expert is elsewhere, NaN here, change no other's bits."""
    scheme, rng = scheme_named("fp8_tensor"), np.random.default_rng(4)
    top_k = 1 if on_input else 3
    spec = MoESpec(Activation("silu"), activations=FP8_TENSOR, apply_router_weight_on_input=on_input)
    experts = draw_experts(rng, (2,), 40, 40, scheme, spec)
    ids = rng.integers(0, 4, (9, top_k)).astype(np.int32)
    ids[:, 0], ids[2], ids[5, 0] = np.arange(9) % 2, -1, 7
    extras = {"token_mask": np.arange(9) != 4, "expert_map": np.array([0, 1, -1, -1], np.int32)}
    ids[7] = 3
    routing = TopK(ids, rng.random((9, top_k)).astype(np.float32))
    # An id outside of the map alone counts as none, and so does the expert of another device.
    unused = [2, 4, 7, *([5] if on_input else [])]
    outputs = []
    for value in (0.0, np.nan, 1e30):
        x = draw_array(np.random.default_rng(5), (9, 40), "bfloat16")
        x[unused] = value
        layer = Layer(x, experts, routing, spec, extras)
        outputs.append(layer.run(target)["output"])
        layer.check(target, scheme)
    assert not outputs[0][unused].any() and outputs[0][[0, 1, 3, 6, 8]].any(axis=1).all()
    assert outputs[0].tobytes() == outputs[1].tobytes() == outputs[2].tobytes()


def test_which_rows_count_is_read_off_the_layout():
    layer = draw_layer(scheme_named("fp8_tensor"), 1, "halves")

    def readers(experts: ExpertWeights) -> list[Any]:
        plan = dataclasses.replace(layer, experts=experts).plan(GPUS[1])
        launches = [step for step in plan.steps if isinstance(step, KernelLaunch)]
        assert not any(step.kernel == ZERO_ROWS for step in launches)
        users = [
            dict(step.arguments)["used_by"]
            for step in launches
            if step.kernel.name.startswith("quantize.kernels.rows:")
        ]
        return [getattr(user, "buffer", None) for user in users]

    assert readers(layer.experts) == ["row_of_slot", "row_of_slot", "slot_of_row"]
    static = {"gate_up_input_scale": np.array([1], np.float32), "down_input_scale": np.array([1], np.float32)}
    assert readers(dataclasses.replace(layer.experts, **static)) == [None, "slot_of_row"]


@pytest.mark.parametrize("target", GPUS, ids=str)
@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_plans_for_gpus(scheme, target):
    tuning = Tuning(batch_invariant=True)
    layer = draw_layer(scheme, 0, "halves")
    plan = layer.plan(target)
    kernels = [step.kernel for step in plan.steps if isinstance(step, KernelLaunch)]
    assert kernels.count(MATMUL_QUANTIZED) == 2
    assert any(kernel.name.startswith("quantize.kernels.rows:") for kernel in kernels) == (
        scheme.activations is not None
    )
    if scheme.activations is not None and scheme.activations.group_rows is None:
        return
    invariant = dataclasses.replace(layer, spec=dataclasses.replace(layer.spec, tuning=tuning)).plan(target)
    again = dataclasses.replace(layer, x=np.tile(layer.x, (9, 1)), spec=dataclasses.replace(layer.spec, tuning=tuning))
    mask = {"token_mask": np.tile(layer.extras["token_mask"], 9)}
    many = dataclasses.replace(again, extras=again.extras | mask).plan(target)
    assert invariant.summation == many.summation


def test_names_order_and_round_trip(tmp_path):
    layer = draw_layer(scheme_named("int4_w4a16_zp"), 0, "separate")
    plan = layer.plan(REFERENCE)
    assert [buffer.name for buffer in plan.inputs][:11] == [
        *("x", "experts.gate_up.values", "experts.gate_up.scales", "experts.gate_up.zero_points"),
        *("experts.down.values", "experts.down.scales", "experts.down.zero_points", "experts.up.values"),
        *("experts.up.scales", "experts.up.zero_points", "experts.gate_up_bias"),
    ]
    assert "weight int4_g128_zp[2, 3, 256, 256] in_out, up int4_g128_zp[2, 3, 256, 256] in_out" in plan.explain()
    # Specs of equal arrays are equal keys of the cache.
    assert layer.plan(REFERENCE) is plan
    register(plan)
    assert load_plans_of(plan, tmp_path) == (plan.key,)


def load_plans_of(plan: LaunchPlan, directory: Any) -> tuple[str, ...]:
    """The keys after a way through a file."""
    path = directory / "plans.json"
    export_plans(path, [plan.key])
    return load_plans(path)


def test_tensors_of_specs_compare_by_their_fields():
    spec = QuantizedSpec(FP8_CHANNEL)
    one, same = quantized_specs(spec, (4, 8)), quantized_specs(spec, (4, 8))
    assert one == same and hash(one) == hash(same) and one != quantized_specs(spec, (4, 16)) and one != "fp8"
    array = QuantizedTensor(spec, np.zeros((4, 8), "float8_e4m3fn"), np.zeros((4, 1), np.float32))
    assert array == array and array != dataclasses.replace(array) and array != one and one != array
    assert len({array, dataclasses.replace(array), one, same}) == 3


def test_experts_of_which_one_matrix_is_quantised():
    layer = draw_layer(scheme_named("int4_w4a16"), 2, "halves")
    down = draw_array(np.random.default_rng(0), layer.experts.down.shape, "bfloat16", 0.1)
    layer = dataclasses.replace(layer, experts=dataclasses.replace(layer.experts, down=down))
    expected = moe_stages(layer.x, layer.experts, layer.routing, layer.spec, **layer.extras)
    assert layer.run(REFERENCE)["output"].tobytes() == expected["output"].tobytes()


def tensor(format: Format, *shape: int) -> QuantizedTensor:
    return quantized_specs(QuantizedSpec(format), shape)


def test_ragged_quantised_rows_follow_the_layout():
    """x in layout order has the layout's rows, and a plan keeps its inputs' order."""
    layout = LayoutSpec(4, 2, 3, alignment=16)
    operands = MatmulOperands(tensor(FP8_TOKEN, layout.capacity, 128), tensor(FP8_CHANNEL, 3, 8, 128))
    plan = plan_matmul_ogs(operands, layout, MatmulSpec("out_in", out_dtype="bfloat16"), REFERENCE)
    names = ["x.values", "x.scales", "weight.values", "weight.scales", "group_sizes", "group_start", "slot_of_row"]
    assert [buffer.name for buffer in plan.inputs] == names
    message = f"x must be [{layout.capacity}, 128], got (8, 128)"
    with pytest.raises(InvalidInput, match=re.escape(message)):
        plan_matmul_ogs(
            dataclasses.replace(operands, x=tensor(FP8_TOKEN, 8, 128)),
            layout,
            MatmulSpec("out_in", out_dtype="bfloat16"),
            REFERENCE,
        )


def test_tiles_are_as_high_as_twice_the_rows_of_an_expert():
    operands, spec = tensor(scheme_named("int8_w8a16").weights, 8, 512, 512), MatmulSpec("out_in", "token")
    heights = []
    for rows in (10, 11, 24, 25, 100, 101):
        layout = LayoutSpec(8 * rows, 1, 8)
        x = ArraySpec((8 * rows, 512), "bfloat16")
        problem = MatmulProblem(MatmulOperands(x, operands), layout, spec, GPUS[0])
        heights.append(heuristic_tile(problem).config.block_m)
    assert heights == [16, 32, 32, 64, 64, 128]


def test_a_stage_has_rows_as_they_are_stored_beside_codes():
    weight, layout = tensor(scheme_named("int8_w8a16").weights, 8, 512, 512), LayoutSpec(64, 2, 8)
    config = TileConfig(128, 64, 128, 8, 8, family="quantized")
    for x, needed in ((ArraySpec((64, 512), "bfloat16"), 40960), (ArraySpec((64, 512), "float32"), 73728)):
        with pytest.raises(InvalidInput, match=rf"8 stages of {needed} bytes exceed the 232448 bytes of shared memory"):
            plan_matmul_ogs(MatmulOperands(x, weight), layout, MatmulSpec("out_in", "token"), GPUS[1], config=config)
