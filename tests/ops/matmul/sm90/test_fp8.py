"""The warp-specialised kernel for fp8 with fp8: what it refuses everywhere, what it computes on an sm_90 GPU."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from moe_core import InvalidInput
from moe_core.base.arrays import ArraySpec
from moe_core.base.target import Target
from moe_core.formats import (
    FP8_CHANNEL,
    FP8_GROUP,
    FP8_TENSOR,
    FP8_TOKEN,
    MXFP8,
    Format,
    QuantizedSpec,
    QuantizedTensor,
    Scheme,
    quantized_specs,
    scheme_named,
)
from moe_core.ops.matmul.families import why_illegal
from moe_core.ops.matmul.forward import plan_matmul_ogs
from moe_core.ops.matmul.problem import MatmulProblem
from moe_core.ops.matmul.quantized.plan import QUANTIZED
from moe_core.ops.matmul.sm90.fp8_plan import MATMUL_FP8, SM90_FP8, sm90_fp8_config, why_not_codes
from moe_core.ops.matmul.tile_choice import heuristic_tile
from moe_core.ops.moe.forward import plan_moe
from moe_core.parity.tolerance import assert_close, quantized_matmul_tolerance
from moe_core.plan.steps import Constant, KernelLaunch, LaunchPlan
from moe_core.specs import Activation, LayoutSpec, MatmulSpec, MatmulTuning, MoESpec, RouterSpec, Tuning
from moe_core.specs.operands import ExpertWeights, MatmulOperands, RouterLogits, map_arrays, named_arrays
from tests.support.harness import engine_target, run_plan, spec_of
from tests.support.matmul.composed import filled_rows
from tests.support.matmul.sm90 import SM_90
from tests.support.matmul.sm90_fp8_cases import CASES, CODES, plan_codes, with_special_rows
from tests.support.strategies import draw_ids, layout_arrays

KERNEL = MATMUL_FP8.name
BLOCK = scheme_named("fp8_block")
RUNS = ((700, "uniform"), (130, "one_expert"), (300, "some_absent"), (1, "uniform"), (0, "uniform"))


def needs_sm_90() -> None:
    target = engine_target()
    if target.kind != "cuda" or target.arch != 90:
        pytest.skip(f"the sm90 family needs sm_90, this machine has {target}")


def run(operands: MatmulOperands, layout: LayoutSpec, spec: MatmulSpec, groups: dict[str, Any], target: Target):
    plan = plan_matmul_ogs(map_arrays(operands, spec_of), layout, spec, target)
    arrays = dict(named_arrays(operands)) | groups
    return run_plan(plan, {buffer.name: arrays[buffer.name] for buffer in plan.inputs})["y"]


@pytest.mark.gpu
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", CASES)
def test_matches_the_reference(name: str) -> None:
    """Twice the same bits, rows without an expert zero, nothing written outside."""
    needs_sm_90()
    case = CASES[name]
    tolerance = quantized_matmul_tolerance(
        "bfloat16", case.d, case.scheme.weights, case.spec, rows=case.scheme.activations
    )
    for number, (tokens, kind) in enumerate(RUNS):
        operands, layout = case.operands(tokens, number), case.layout(tokens)
        groups = layout_arrays(draw_ids(kind, tokens, case.top_k, case.num_experts, number), layout)
        actual = run(operands, layout, case.tuned, groups, engine_target())
        expected = run(operands, layout, case.spec, groups, Target("reference"))
        assert_close(actual, expected, tolerance, label=f"{name}, {tokens} tokens, {kind}")
        assert actual.tobytes() == run(operands, layout, case.tuned, groups, engine_target()).tobytes()


@pytest.mark.gpu
def test_layouts_that_lie_and_layers_outside_stay_inside_their_buffers() -> None:
    """Sizes, starts and slots outside the arrays: the harness's guard zones must stay untouched."""
    needs_sm_90()
    case = CASES["interleaved"]
    operands, layout = case.operands(300), case.layout(300)
    groups = layout_arrays(draw_ids("uniform", 300, 2, 4, 0), layout)
    for name, value in (("group_sizes", 10**6), ("group_start", -(10**6)), ("slot_of_row", 10**7)):
        run(operands, layout, case.tuned, groups | {name: np.full_like(groups[name], value)}, engine_target())
    outside = dataclasses.replace(operands, layer_index=np.array([7], np.int32))
    assert np.isnan(run(outside, layout, case.tuned, groups, engine_target()).astype(np.float32)).all()


def codes_of(fused: bool, scale: float | None, operands: MatmulOperands, tokens: int, groups: dict) -> dict:
    """values and scales of CODES, in groups or by the scale that is given."""
    plan = plan_codes(
        operands, CODES, tokens, engine_target(), scales="groups" if scale is None else "given", fused=fused
    )
    given = {} if scale is None else {"static_scale": np.array([scale], np.float32)}
    return run_plan(plan, dict(named_arrays(operands)) | groups | given)


@pytest.mark.gpu
@pytest.mark.timeout(300)
@pytest.mark.parametrize("scale", [None, 0.01, 3.0, 1e-44, 1e-25, 1e25, 3e38, 0.0, -1.0, np.inf, np.nan])
def test_codes_are_those_of_two_launches(scale: float | None) -> None:
    """Of zeros, of numbers of every size, of rows with infinities and NaN: bit by bit."""
    needs_sm_90()
    for tokens, kind in ((500, "uniform"), (70, "some_absent")):
        operands, layout = with_special_rows(CODES.operands(tokens)), CODES.layout(tokens)
        groups = layout_arrays(draw_ids(kind, tokens, 2, 4, 0), layout)
        groups.pop("row_of_slot")
        filled = filled_rows(layout, groups)
        one, two = (codes_of(fused, scale, operands, tokens, groups) for fused in (True, False))
        for name in ("values", "scales"):
            rows = filled if scale is None or name == "values" else slice(None)
            left, right = (np.ascontiguousarray(arrays[name][rows]) for arrays in (one, two))
            assert np.array_equal(left.view(np.uint8), right.view(np.uint8)), name
        assert (one["values"][~filled].view(np.uint8) == 0xFF).all()


REFUSALS: dict[str, tuple[dict[str, Any], str]] = {
    "another chip": ({"target": Target("cuda", 100, 148)}, "sm_90"),
    "dense": ({"layout": None}, "dense"),
    "plain rows": ({"x": ArraySpec((40, 128), "bfloat16")}, "x is not quantised"),
    "e8m0": ({"formats": (MXFP8, MXFP8)}, "scales are numbers"),
    "in_out": ({"weight_layout": "in_out"}, "out_in, got in_out"),
    "rows": ({"formats": (FP8_GROUP, Format("fp8_rows", "e4m3", 1, 128))}, "single weight rows"),
    "groups": ({"formats": (FP8_TOKEN, Format("fp8_64", "e4m3", 128, 64))}, "weight scales must be"),
    "channels": ({"formats": (FP8_TOKEN, FP8_CHANNEL), "n": 264}, "divide n, got 264"),
    "out_dtype": ({"out_dtype": "float32"}, "out_dtype float32"),
    "d": ({"d": 136}, "got d 136"),
    "n": ({"n": 68}, "68 columns"),
    "up": ({"n": 136, "activation": Activation("silu")}, "128 must divide n, got 136"),
    "gelu": ({"activation": Activation("gelu", False)}, "erf"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals_say_why(name: str) -> None:
    change, reason = REFUSALS[name]
    rows, weights = change.get("formats", (FP8_GROUP, BLOCK.weights))
    d, n, layout_name = change.get("d", 128), change.get("n", 256), change.get("weight_layout", "out_in")
    activation, layout = change.get("activation"), change.get("layout", LayoutSpec(40, 1, 4))
    x = quantized_specs(QuantizedSpec(rows), (40, d))
    x = change.get("x", x)
    width = 2 * n if activation is not None and activation.gated else n
    matrix = (width, d) if layout_name == "out_in" else (d, width)
    lead = () if layout is None else (4,)
    operands = MatmulOperands(x, quantized_specs(QuantizedSpec(weights, layout_name), (*lead, *matrix)))
    spec = MatmulSpec(layout_name, activation=activation, out_dtype=change.get("out_dtype", "bfloat16"))
    target = change.get("target", SM_90)
    problem = MatmulProblem(operands, layout, spec, target)
    assert reason in str(SM90_FP8.why_not(problem))
    assert reason in str(why_illegal(sm90_fp8_config(spec), problem))


def test_other_tiles_are_refused() -> None:
    case = CASES["halves"]
    operands, layout = case.described(300), case.layout(300)
    problem = MatmulProblem(operands, layout, case.spec, SM_90)
    assert why_illegal(sm90_fp8_config(case.spec), problem) is None and sm90_fp8_config(case.spec).num_warps == 4
    for change, reason in (
        ({"block_n": 256}, "tiles of fp8 are"),
        ({"num_stages": 5}, "stages"),
        ({"group_m": 0}, "group_m"),
    ):
        config = dataclasses.replace(sm90_fp8_config(case.spec), **change)
        assert reason in str(why_illegal(config, problem))
        with pytest.raises(InvalidInput, match="config must be legal"):
            plan_matmul_ogs(operands, layout, case.spec, SM_90, config=config)


def test_many_rows_take_it_and_batch_invariance_does_not() -> None:
    case = CASES["halves"]
    for tokens, family in ((90, "quantized"), (100, "sm90")):
        problem = MatmulProblem(case.described(tokens), case.layout(tokens), case.spec, SM_90)
        assert heuristic_tile(problem).config.family == family
    invariant = dataclasses.replace(case.spec, tuning=MatmulTuning(batch_invariant=True))
    problems = [MatmulProblem(case.described(t), case.layout(t), invariant, SM_90) for t in (1, 5000)]
    configs = {heuristic_tile(problem).config for problem in problems}
    assert {config.family for config in configs} == {"quantized"} and len(configs) == 1


def forward(scheme: Scheme, tuning: Tuning | None = None, static: bool = False) -> LaunchPlan:
    """static: with given scales of both products' rows."""

    def weights(*shape: int) -> QuantizedTensor:
        return quantized_specs(QuantizedSpec(scheme.weights), shape)

    experts = ExpertWeights(weights(8, 512, 384), weights(8, 384, 256))
    if static:
        one = ArraySpec((1,), "float32")
        experts = dataclasses.replace(experts, gate_up_input_scale=one, down_input_scale=one)
    spec = MoESpec(Activation("silu"), RouterSpec(2), "out_in", activations=scheme.activations, tuning=tuning)
    logits = RouterLogits(ArraySpec((512, 8), "float32"))
    return plan_moe(ArraySpec((512, 384), "bfloat16"), experts, logits, spec, SM_90)


@pytest.mark.parametrize(
    ("scheme", "static", "quantisers"),
    [
        ("fp8_block", False, 1), ("fp8_block_pow2", False, 1), ("fp8_channel", False, 2), ("fp8_tensor", False, 3),
        ("fp8_tensor", True, 1),
    ],
)  # fmt: skip
def test_a_forward_quantises_hidden_rows_where_they_are_made(scheme: str, static: bool, quantisers: int) -> None:
    plan = forward(scheme_named(scheme), static=static)
    launches = [step for step in plan.steps if isinstance(step, KernelLaunch)]
    kernels = [step.kernel.name for step in launches]
    assert kernels.count(KERNEL) == 2
    assert sum(kernel.startswith("quantize.kernels.rows:") for kernel in kernels) == quantisers
    fused = quantisers == 1
    assert ("before it is stored" in plan.explain()) == fused
    assert any(buffer.name == "hidden" for buffer in plan.scratch) != fused
    products: list[dict[str, Any]] = [dict(step.arguments) for step in launches if step.kernel.name == KERNEL]
    assert [product["COUNTER"].value for product in products] == [0, 1]
    assert [product["weight_map"].shape for product in products] == [(8 * 512, 384), (8 * 384, 256)]
    assert dict(launches[-1].arguments)["BY_ROW"] == Constant(True)
    if scheme != "fp8_tensor":
        invariant = forward(scheme_named(scheme), Tuning(batch_invariant=True))
        assert KERNEL not in [step.kernel.name for step in invariant.steps if isinstance(step, KernelLaunch)]


def test_what_is_not_stored_as_codes_says_why() -> None:
    gated = CASES["halves"].spec
    assert not why_not_codes(FP8_GROUP, 256, gated)
    assert "by row" in str(why_not_codes(FP8_GROUP, 256, dataclasses.replace(gated, scatter="slot")))
    assert "gated" in str(why_not_codes(FP8_GROUP, 256, CASES["slots"].spec))
    assert not why_not_codes(FP8_TENSOR, 256, gated, static=True)
    for format, static in ((FP8_TOKEN, False), (FP8_TENSOR, False), (FP8_GROUP, True)):
        reason = str(why_not_codes(format, 256, gated, static=static))
        assert "a scale for 128 columns of a row, or one that is given for all" in reason
    assert "16 bytes" in str(why_not_codes(FP8_GROUP, 264, gated))
    case = CASES["halves"]
    problem = MatmulProblem(case.described(100), case.layout(100), gated, SM_90, out_format=FP8_GROUP)
    assert SM90_FP8.why_not_out_format(problem) is None
    assert "sm90 family" in str(QUANTIZED.why_not_out_format(problem))
