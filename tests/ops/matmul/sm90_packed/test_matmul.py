"""Products with prepacked weights: what their kernels refuse everywhere, what they compute on an sm_90 GPU."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from moe_core import InvalidInput, Unsupported
from moe_core.base.arrays import ArraySpec
from moe_core.base.target import Target
from moe_core.formats import MXFP4, QuantizedTensor
from moe_core.ops.matmul.forward import plan_matmul_ogs
from moe_core.ops.matmul.problem import MatmulProblem
from moe_core.ops.matmul.sm90_packed.few_rows_plan import (
    FEW_ROWS_NAME,
    MATMUL_FEW_ROWS,
    few_rows_config,
    why_illegal_few_rows,
)
from moe_core.ops.matmul.sm90_packed.plan import (
    MATMUL_MIXED_INPUT,
    MIXED_INPUT_NAME,
    mixed_input_config,
    why_illegal_mixed_input,
)
from moe_core.ops.matmul.tile_choice import heuristic_tile
from moe_core.ops.moe.forward import plan_moe
from moe_core.ops.moe.options import ForwardOptions
from moe_core.ops.reduction.reduce import REDUCE
from moe_core.parity.tolerance import assert_close, quantized_matmul_tolerance
from moe_core.plan.steps import Constant, KernelLaunch
from moe_core.specs import Activation, LayoutSpec, MatmulSpec, MatmulTuning, MoESpec, RouterSpec, TileConfig
from moe_core.specs.operands import ExpertWeights, MatmulOperands, RouterLogits
from tests.support.compile_gate.prepacked_plans import EPILOGUES, tiled_weight
from tests.support.harness import engine_target
from tests.support.matmul.sm90 import SM_90, needs_sm_90
from tests.support.matmul.sm90_packed import HEIGHTS, configurations, draw_product, prepacked, run_product
from tests.support.strategies import ID_KINDS, draw_ids, layout_arrays


@pytest.mark.gpu
@pytest.mark.parametrize("place", range(9))
@pytest.mark.parametrize("number", range(len(EPILOGUES)))
def test_matches_the_reference(number: int, place: int) -> None:
    """Sizes that end inside of blocks; one kernel for every routing."""
    needs_sm_90()
    for tokens, top_k, kind, seed in (
        (0, 1, "uniform", 0),
        (1, 3, "uniform", 1),
        *((150, 2, kind, 2) for kind in ID_KINDS),
    ):
        layout = LayoutSpec(tokens, top_k, 8)
        arrays = layout_arrays(draw_ids(kind, tokens, top_k, 8, seed), layout)
        operands, spec = draw_product(EPILOGUES[number], layout, 416, 352, seed)
        expected = run_product(operands, layout, arrays, spec, Target("reference"))
        ours = prepacked(operands, spec)
        config = configurations(ours.weight, spec)[place]
        tuned = dataclasses.replace(spec, tuning=MatmulTuning(config))
        actual = run_product(ours, layout, arrays, tuned, engine_target())
        tolerance = quantized_matmul_tolerance("bfloat16", 416, MXFP4, spec)
        assert_close(actual, expected, tolerance, label=f"y of {tokens} tokens, {kind}, {config}")


@pytest.mark.gpu
@pytest.mark.parametrize("place", [0, 5])
def test_nan_scales_and_rows_stay_where_they_are(place: int) -> None:
    """In both families."""
    needs_sm_90()
    layout = LayoutSpec(9, 2, 4)
    arrays = layout_arrays(draw_ids("some_absent", 9, 2, 4, 0), layout)
    operands, spec = draw_product((None, "token", "slot", False, False, False), layout, 256, 64, 0)
    operands.weight.scales[:, 5, 1] = 255
    operands.x[3] = np.nan
    ours = prepacked(operands, spec)
    spec = dataclasses.replace(spec, tuning=MatmulTuning(configurations(ours.weight, spec)[place]))
    y = run_product(ours, layout, arrays, spec, engine_target()).astype(np.float32).reshape(9, 2, 64)
    absent = arrays["row_of_slot"].reshape(9, 2) < 0
    assert absent.any() and not y[absent].any()
    assert np.isnan(y[~absent][:, 5]).all() and np.isnan(y[3][~absent[3]]).all()
    finite = np.delete(np.delete(y, 3, axis=0), 5, axis=-1)
    assert np.isfinite(finite).all()


@pytest.mark.gpu
@pytest.mark.parametrize("place", [0, 5])
def test_one_step_and_a_layer_outside(place: int) -> None:
    """The shortest reduction and the narrowest result there are; of a layer that the stack lacks rows are NaN."""
    needs_sm_90()
    layout = LayoutSpec(9, 2, 4)
    arrays = layout_arrays(draw_ids("some_absent", 9, 2, 4, 0), layout)
    operands, spec = draw_product(EPILOGUES[1], layout, 32, 8, 0)
    expected = run_product(operands, layout, arrays, spec, Target("reference"))
    ours = prepacked(operands, spec)
    tuned = dataclasses.replace(spec, tuning=MatmulTuning(configurations(ours.weight, spec)[place]))
    actual = run_product(ours, layout, arrays, tuned, engine_target())
    assert_close(actual, expected, quantized_matmul_tolerance("bfloat16", 32, MXFP4, spec), label="y")
    outside = dataclasses.replace(ours, layer_index=np.array([2], np.int32))
    y = run_product(outside, layout, arrays, tuned, engine_target()).astype(np.float32)
    written = arrays["row_of_slot"] >= 0
    assert np.isnan(y[written]).all() and not y[~written].any()


def described(
    activation: Activation | None = None, tokens: int = 64, dtype: str = "bfloat16", n: int = 128, d: int = 256
) -> MatmulOperands:
    width = 2 * n if activation is not None and activation.gated else n
    return MatmulOperands(ArraySpec((tokens, d), dtype), tiled_weight((8, width, d), activation))


LAYOUT = LayoutSpec(64, 2, 8)
TOKENS = MatmulSpec("out_in", "token")


@pytest.mark.parametrize(
    ("operands", "layout", "spec", "target", "reason"),
    [
        (described(), LAYOUT, TOKENS, Target("cuda", 80, 108), "kernels for sm_90, got"),
        (described(), LAYOUT, TOKENS, Target("interpreter"), "kernels for sm_90, got"),
        (described(dtype="float16"), LAYOUT, TOKENS, SM_90, "bfloat16 rows, to bfloat16, got float16"),
        (described(), LAYOUT, dataclasses.replace(TOKENS, out_dtype="float32"), SM_90, "got bfloat16 to float32"),
        (described(n=36), LAYOUT, TOKENS, SM_90, "multiples of 16 bytes, got 256 columns of x, 256"),
        (MatmulOperands(ArraySpec((64, 2**15), "bfloat16"), tiled_weight((1024, 2**15, 2**15), None)),
            LayoutSpec(64, 2, 1024), TOKENS, SM_90, "count lines of 128 bytes in 32 bits, got 549755813888"),
        (described(Activation("gelu")), LAYOUT, dataclasses.replace(TOKENS, activation=Activation("gelu")), SM_90,
            "use gelu_tanh"),
    ],
)  # fmt: skip
def test_says_why_there_is_no_kernel(
    operands: MatmulOperands, layout: LayoutSpec, spec: MatmulSpec, target: Target, reason: str
) -> None:
    with pytest.raises(Unsupported, match=reason):
        plan_matmul_ogs(operands, layout, spec, target)


@pytest.mark.parametrize("activation", [None, Activation("silu")])
def test_configurations(activation: Activation | None) -> None:
    """The heuristics' are legal and fill shared memory; others are refused with the reason."""
    spec, weight = dataclasses.replace(TOKENS, activation=activation), described(activation).weight
    for height, rows in HEIGHTS.items():
        config = mixed_input_config(rows, weight, spec, SM_90)
        assert config.block_m == height and config.num_stages >= 3
        assert config.block_k == (256 if height <= 32 else 128)
        assert why_illegal_mixed_input(config, weight, spec, SM_90) is None
        assert why_illegal_mixed_input(dataclasses.replace(config, group_m=1), weight, spec, SM_90) is None
        for change, reason in (
            ({"block_m": 48}, "block_m must be one of 16, 32, 64, 128"),
            ({"block_n": 8}, "block_n must be"),
            ({"block_k": 64}, "block_k must be 128"),
            ({"num_warps": 8}, "num_warps must be 4"),
            ({"num_stages": config.num_stages + 1}, f"num_stages must be at most {config.num_stages}"),
        ):
            found = why_illegal_mixed_input(dataclasses.replace(config, **change), weight, spec, SM_90)
            assert found is not None and reason in found
    tuned = dataclasses.replace(spec, tuning=MatmulTuning(TileConfig(64, 64, 128, family="quantized")))
    with pytest.raises(InvalidInput, match="family must be 'few_rows' or 'mixed_input' for prepacked weights"):
        plan_matmul_ogs(described(activation), LAYOUT, tuned, SM_90)


@pytest.mark.parametrize("activation", [None, Activation("silu")])
def test_configurations_that_stream(activation: Activation | None) -> None:
    """As many steps under way as add few of zeros behind the last one; others are refused with the reason."""
    spec = dataclasses.replace(TOKENS, activation=activation)
    weights = {steps: described(activation, d=128 * steps).weight for steps in (1, 4, 6, 16, 23, 56)}
    chosen = [few_rows_config(weight, spec).block_k for weight in weights.values()]
    assert chosen == [256, 512, 384, 512, 512, 512]
    for steps in (1, 6, 23):
        config = few_rows_config(weights[steps], spec)
        assert why_illegal_few_rows(config, weights[steps], spec) is None
        for change, reason in (
            ({"block_m": 16}, "block_m must be 8"),
            ({"block_n": 16}, "block_n must be"),
            ({"block_k": 128}, "block_k must be one of 1024, 768, 512, 384, 256"),
            ({"num_warps": 8}, "num_warps must be 4"),
            ({"num_stages": 3}, "num_stages 2"),
        ):
            found = why_illegal_few_rows(dataclasses.replace(config, **change), weights[steps], spec)
            assert found is not None and reason in found


@pytest.mark.parametrize(
    ("steps", "tokens", "activation", "multiprocessors", "columns"),
    [
        (23, 1, None, 132, 1024), (6, 1, None, 132, 768), (4, 1, None, 132, 512), (23, 4, None, 8, 1024),
        (23, 4, None, 7, 512), (23, 1, Activation("silu"), 132, 512),
    ],
)  # fmt: skip
def test_more_steps_are_under_way_with_few_blocks(
    steps: int, tokens: int, activation: Activation | None, multiprocessors: int, columns: int
) -> None:
    """At most two blocks for each multiprocessor, in products without an activation."""
    operands, spec = described(activation, tokens, d=128 * steps), dataclasses.replace(TOKENS, activation=activation)
    layout, target = LayoutSpec(tokens, 2, 8), Target("cuda", 90, multiprocessors)
    config = heuristic_tile(MatmulProblem(operands, layout, spec, target)).config
    assert (config.family, config.block_k) == (FEW_ROWS_NAME, columns)
    launch = plan_matmul_ogs(operands, layout, spec, target).steps[-1]
    assert isinstance(launch, KernelLaunch) and launch.kernel == MATMUL_FEW_ROWS
    constants = {name: value.value for name, value in launch.arguments if isinstance(value, Constant)}
    assert constants["REGISTERS"] == (255 if columns > 512 else 128)


@pytest.mark.parametrize("activation", [None, Activation("silu")])
def test_batch_invariant_products_take_one_tile(activation: Activation | None) -> None:
    """Whatever the number of rows: the largest of the mixed-input family, never one that streams."""
    spec = dataclasses.replace(TOKENS, activation=activation)
    pinned = dataclasses.replace(spec, tuning=MatmulTuning(batch_invariant=True))
    families, tiles = set(), set()
    for tokens in (1, 16, 256, 4096):
        layout = LayoutSpec(tokens, 2, 8)
        problems = [MatmulProblem(described(activation, tokens), layout, one, SM_90) for one in (spec, pinned)]
        families.add(heuristic_tile(problems[0]).config.family)
        tiles.add(heuristic_tile(problems[1]).config)
    assert families == {FEW_ROWS_NAME, MIXED_INPUT_NAME}
    (tile,) = tiles
    assert (tile.family, tile.block_m) == (MIXED_INPUT_NAME, 128)


@pytest.mark.parametrize(
    ("tokens", "kernel", "family"), [(4, MATMUL_FEW_ROWS, FEW_ROWS_NAME), (64, MATMUL_MIXED_INPUT, MIXED_INPUT_NAME)]
)
def test_a_layer_runs_on_them(tokens: int, kernel: str, family: str) -> None:
    """Few rows per expert stream; four launches, which overlap; explain names family and tiles."""
    activation = Activation("swiglu_oai", gate_layout="interleaved")
    experts = ExpertWeights(tiled_weight((8, 512, 128), activation), tiled_weight((8, 128, 256), None))
    spec = MoESpec(activation, RouterSpec(2), weight_layout="out_in")
    x, routing = ArraySpec((tokens, 128), "bfloat16"), RouterLogits(ArraySpec((tokens, 8), "float32"))
    plan = plan_moe(x, experts, routing, spec, SM_90)
    launches = [step for step in plan.steps if isinstance(step, KernelLaunch)]
    assert [launch.kernel for launch in launches[1:]] == [kernel, kernel, REDUCE]
    assert [launch.dependent for launch in launches] == [False, True, True, True]
    assert f"family='{family}'" in plan.explain()
    with pytest.raises(Unsupported, match="restore"):
        plan_moe(x, experts, routing, spec, SM_90, options=ForwardOptions(save=True))


def test_the_reference_takes_prepacked_weights() -> None:
    layout = LayoutSpec(13, 2, 4)
    arrays = layout_arrays(draw_ids("some_absent", 13, 2, 4, 0), layout)
    for epilogue in EPILOGUES:
        operands, spec = draw_product(epilogue, layout, 96, 32, 1)
        ours = prepacked(operands, spec)
        assert isinstance(ours.weight, QuantizedTensor) and ours.weight.spec.tiling is not None
        expected = run_product(operands, layout, arrays, spec, Target("reference"))
        np.testing.assert_array_equal(run_product(ours, layout, arrays, spec, Target("reference")), expected)
