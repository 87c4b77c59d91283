"""Products with prepacked integer weights: their tiles and kernels, what they compute on an sm_90 GPU, to the bit."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from moe_core.base import dtypes
from moe_core.base.arrays import ArraySpec
from moe_core.base.target import Target
from moe_core.formats import INT8_CHANNEL, Format, QuantizedSpec, QuantizedTensor, format_named, quantized_specs
from moe_core.ops.matmul.forward import plan_matmul_ogs
from moe_core.ops.matmul.sm90_packed.few_rows_plan import MATMUL_FEW_ROWS, few_rows_config, why_illegal_few_rows
from moe_core.ops.matmul.sm90_packed.plan import MATMUL_MIXED_INPUT, mixed_input_config, why_illegal_mixed_input
from moe_core.ops.moe.forward import plan_moe
from moe_core.ops.prepack.prepack import tile
from moe_core.ops.quantize.reference import dequantize, quantize
from moe_core.parity.tolerance import assert_close, quantized_matmul_tolerance
from moe_core.plan.steps import Constant, KernelLaunch, LaunchPlan
from moe_core.specs import Activation, LayoutSpec, MatmulSpec, MatmulTuning, MoESpec, RouterSpec
from moe_core.specs.operands import ExpertWeights, MatmulOperands, RouterLogits, map_arrays
from tests.support.compile_gate.prepacked_plans import EPILOGUES, INTEGERS, tiled_weight
from tests.support.harness import engine_target
from tests.support.matmul.sm90 import SM_90, needs_sm_90
from tests.support.matmul.sm90_packed import HEIGHTS, configurations, draw_product, prepacked, run_product
from tests.support.strategies import ID_KINDS, draw_array, draw_ids, layout_arrays

ROWS = MatmulSpec("out_in", "token", "slot")


def launch_of(plan: LaunchPlan) -> KernelLaunch:
    """The launch of the product itself."""
    return next(
        step
        for step in plan.steps
        if isinstance(step, KernelLaunch)
        and step.kernel.name.startswith(("matmul.sm90_packed.kernels.few_rows:", "matmul.sm90_packed.kernels.matmul:"))
    )


def planned(rows: int, name: str, scale_dtype: str, d: int = 768, target: Target = SM_90) -> KernelLaunch:
    """A product of so many rows per expert."""
    layout = LayoutSpec(8 * rows, 1, 8)
    weight = tiled_weight((8, 128, d), None, format_named(name), scale_dtype)
    operands = MatmulOperands(ArraySpec((8 * rows, d), "bfloat16"), weight)
    return launch_of(plan_matmul_ogs(operands, layout, ROWS, target))


@pytest.mark.parametrize(("name", "scale_dtype"), INTEGERS)
def test_kernels_are_told_how_a_format_is_tiled(name: str, scale_dtype: str) -> None:
    """Few rows stream, more take the warp-specialised kernel: both with the same constants."""
    format = format_named(name)
    columns = 64 if "int8" in name else 128
    groups = max(1, columns // (format.group_columns or 768))
    repeat = 768 // columns if format.group_columns is None else max(1, format.group_columns // columns)
    for rows, kernel in ((1, MATMUL_FEW_ROWS), (4, MATMUL_FEW_ROWS), (8, MATMUL_MIXED_INPUT)):
        launch = planned(rows, name, scale_dtype)
        found = dict(launch.arguments)
        assert launch.kernel == kernel
        wanted = {"ELEMENT": "uint8" if columns == 64 else "uint4", "COLUMNS": columns, "GROUPS": groups}
        for constant, value in (wanted | {"REPEAT": repeat}).items():
            assert found[constant] == Constant(value)
        assert (found["zero_points"] == Constant(None)) == (not format.zero_points)


@pytest.mark.parametrize(
    ("name", "d", "block_k", "alike", "multiprocessors"),
    [("int4_g128", 768, 384, 1, 7), ("int4_row", 768, 384, 3, 7), ("int8_g128", 768, 256, 2, 7),
     ("int8_g128", 640, 128, 2, 7), ("int8_g32", 768, 256, 1, 7), ("int8_channel", 768, 256, 4, 7),
     ("int4_g128", 768, 768, 1, 8), ("int4_row", 768, 768, 6, 8), ("int8_g128", 768, 384, 2, 8),
     ("int8_channel", 768, 384, 6, 8)],
)  # fmt: skip
def test_steps_that_share_scales_load_them_once(
    name: str, d: int, block_k: int, alike: int, multiprocessors: int
) -> None:
    """Grids of 16 blocks: with at most two blocks for each multiprocessor, more steps are under way."""
    found = dict(planned(1, name, "float32", d, Target("cuda", 90, multiprocessors)).arguments)
    columns, chunk = found["COLUMNS"], found["CHUNK"]
    assert isinstance(columns, Constant) and isinstance(chunk, Constant)
    assert columns.value * chunk.value == block_k and found["ALIKE"] == Constant(alike)  # pyright: ignore


@pytest.mark.parametrize(("name", "scale_dtype"), INTEGERS)
def test_configurations(name: str, scale_dtype: str) -> None:
    """The heuristics' are legal and fill shared memory; what the format's blocks do not divide is refused."""
    weight = tiled_weight((8, 128, 768), None, format_named(name), scale_dtype)
    columns = 64 if "int8" in name else 128
    for height, rows in HEIGHTS.items():
        config = mixed_input_config(rows, weight, ROWS, SM_90)
        assert config.block_m == height and config.num_stages >= 3 and config.block_k in (columns, 2 * columns)
        assert why_illegal_mixed_input(config, weight, ROWS, SM_90) is None
        more = dataclasses.replace(config, num_stages=config.num_stages + 1)
        assert "num_stages must be at most" in str(why_illegal_mixed_input(more, weight, ROWS, SM_90))
        wrong = dataclasses.replace(config, block_k=32)
        assert "block_k must be" in str(why_illegal_mixed_input(wrong, weight, ROWS, SM_90))
    config = few_rows_config(weight, ROWS)
    assert why_illegal_few_rows(config, weight, ROWS) is None
    wrong = dataclasses.replace(config, block_k=columns)
    depths = ", ".join(str(chunk * columns) for chunk in (8, 6, 4, 3, 2))
    assert f"block_k must be one of {depths}" in str(why_illegal_few_rows(wrong, weight, ROWS))


def test_a_layer_runs_on_them() -> None:
    activation, format = Activation("silu"), format_named("int4_g64_zp")
    experts = ExpertWeights(
        tiled_weight((8, 512, 128), activation, format, "bfloat16"),
        tiled_weight((8, 128, 256), None, format, "float32"),
    )
    spec = MoESpec(activation, RouterSpec(2), weight_layout="out_in")
    for tokens, kernel in ((4, MATMUL_FEW_ROWS), (64, MATMUL_MIXED_INPUT)):
        routing = RouterLogits(ArraySpec((tokens, 8), "float32"))
        plan = plan_moe(ArraySpec((tokens, 128), "bfloat16"), experts, routing, spec, SM_90)
        launches = [step.kernel for step in plan.steps if isinstance(step, KernelLaunch)]
        assert launches.count(kernel) == 2
        assert {"experts.gate_up.zero_points", "experts.down.zero_points"} <= {buffer.name for buffer in plan.inputs}


@pytest.mark.gpu
@pytest.mark.parametrize("place", range(9))
@pytest.mark.parametrize(("name", "scale_dtype"), INTEGERS)
def test_matches_the_reference(name: str, scale_dtype: str, place: int) -> None:
    """Sizes that end inside of blocks of rows, and of columns where groups do; one kernel for every routing."""
    needs_sm_90()
    format = format_named(name)
    d = {32: 416, 64: 448, 128: 384, None: 416}[format.group_columns]
    for number, (tokens, top_k, kind, seed) in enumerate(
        ((0, 1, "uniform", 0), (1, 3, "uniform", 1), *((150, 2, kind, 2) for kind in ID_KINDS))
    ):
        epilogue = EPILOGUES[(number + place) % len(EPILOGUES)]
        layout = LayoutSpec(tokens, top_k, 8)
        arrays = layout_arrays(draw_ids(kind, tokens, top_k, 8, seed), layout)
        operands, spec = draw_product(epilogue, layout, d, 352, seed, format, scale_dtype)
        expected = run_product(operands, layout, arrays, spec, Target("reference"))
        ours = prepacked(operands, spec)
        config = configurations(ours.weight, spec)[place]
        tuned = dataclasses.replace(spec, tuning=MatmulTuning(config))
        actual = run_product(ours, layout, arrays, tuned, engine_target())
        tolerance = quantized_matmul_tolerance("bfloat16", d, format, spec)
        assert_close(actual, expected, tolerance, label=f"y of {tokens} tokens, {kind}, {config}")


def any_weight(format: Format, scale_dtype: str, rows: int, columns: int) -> QuantizedTensor:
    """One expert of any codes and zero points, so that every one is among them, with scales of any size."""
    random = np.random.default_rng(rows)

    def draw(spec: ArraySpec) -> np.ndarray:
        if spec.dtype in ("uint8", "int8"):
            return random.integers(0, 256, spec.shape).astype(np.uint8).view(spec.dtype)
        size = np.exp2(random.uniform(-12, 2, spec.shape)) * random.choice([-1, 1], spec.shape)
        return size.astype(np.float32).astype(dtypes.numpy_dtype(spec.dtype))

    return map_arrays(quantized_specs(QuantizedSpec(format), (1, rows, columns), scale_dtype), draw)


@pytest.mark.gpu
@pytest.mark.parametrize("place", range(9))
@pytest.mark.parametrize(("name", "scale_dtype"), INTEGERS)
def test_every_code_to_the_bit(name: str, scale_dtype: str, place: int) -> None:
    """Rows with a single one pick the weights themselves: bf16 of (q - z) s, as the reference rounds it."""
    needs_sm_90()
    weight = any_weight(format_named(name), scale_dtype, 192, 256)
    layout, spec = LayoutSpec(256, 1, 1), dataclasses.replace(ROWS, gather="token")
    arrays = layout_arrays(np.zeros((256, 1), np.int32), layout)
    operands = MatmulOperands(np.eye(256).astype(dtypes.numpy_dtype("bfloat16")), tile(weight, "rows"))
    tuned = dataclasses.replace(spec, tuning=MatmulTuning(configurations(operands.weight, spec)[place]))
    found = run_product(operands, layout, arrays, tuned, engine_target()).astype(np.float32)
    np.testing.assert_array_equal(found, dequantize(weight, "bfloat16")[0].T.astype(np.float32))


@pytest.mark.gpu
@pytest.mark.parametrize("place", [0, 5])
@pytest.mark.parametrize("name", ["int4_g64_zp", "int8_g128", "int8_channel"])
def test_nan_scales_stay_where_they_are(name: str, place: int) -> None:
    needs_sm_90()
    layout = LayoutSpec(9, 2, 4)
    arrays = layout_arrays(draw_ids("some_absent", 9, 2, 4, 0), layout)
    operands, spec = draw_product((None, "token", "slot", False, False, False), layout, 384, 64, 0, format_named(name))
    operands.weight.scales[:, 5, -1] = np.nan
    ours = prepacked(operands, spec)
    spec = dataclasses.replace(spec, tuning=MatmulTuning(configurations(ours.weight, spec)[place]))
    y = run_product(ours, layout, arrays, spec, engine_target()).astype(np.float32).reshape(9, 2, 64)
    absent = arrays["row_of_slot"].reshape(9, 2) < 0
    assert absent.any() and not y[absent].any()
    assert np.isnan(y[~absent][:, 5]).all() and np.isfinite(np.delete(y, 5, axis=-1)).all()


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [5, 64])
@pytest.mark.parametrize("format", [format_named("int4_g128"), format_named("int8_g128_zp"), INT8_CHANNEL], ids=str)
def test_torch_equals_jax(format: Format, tokens: int) -> None:
    """A whole forward with prepacked weights, bit by bit, on both kernels."""
    needs_sm_90()
    jax, torch = pytest.importorskip("jax"), pytest.importorskip("torch")
    import moe_jax
    import moe_torch
    from tests.support.torch import to_torch

    random = np.random.default_rng(3)
    gate_up, down = (quantize(draw_array(random, (8, *size), rms=0.1), format) for size in ((512, 256), (256, 256)))
    experts = map_arrays(ExpertWeights(gate_up, down), lambda array: to_torch(array).cuda())
    spec = MoESpec(Activation("silu"), RouterSpec(2), weight_layout="out_in")
    experts = moe_torch.prepack_weights(experts, spec)
    x = torch.randn(tokens, 256, device="cuda").bfloat16()
    logits = torch.randn(tokens, 8, device="cuda")
    ours = moe_torch.moe(x, experts, RouterLogits(logits), spec).output
    given = moe_jax.from_dlpack(x), moe_jax.from_dlpack(logits), map_arrays(experts, moe_jax.from_dlpack)
    theirs = jax.jit(lambda x, logits, experts: moe_jax.moe(x, experts, RouterLogits(logits), spec).output)(*given)
    assert torch.equal(moe_torch.from_dlpack(theirs), ours)
