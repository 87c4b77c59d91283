"""Products of the NumPy engine: what they write beside y, threads, overflows. Quantised ones: methods and tiles."""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

import numpy as np
import pytest

from moe_core.base import threads
from moe_core.base.arrays import ArraySpec
from moe_core.base.dtypes import numpy_dtype
from moe_core.base.target import Target
from moe_core.errors import InvalidInput
from moe_core.formats import QuantizedSpec, format_named, quantized_specs
from moe_core.ops.matmul.backward import plan_matmul_ogs_backward
from moe_core.ops.matmul.forward import plan_matmul_ogs
from moe_core.ops.matmul.quantized.plan import product_method
from moe_core.ops.matmul.reference.backward import weight_gradient
from moe_core.ops.matmul.reference.rows import Rows, dense_rows, rows_of
from moe_core.ops.moe.reference.backward import _Chain
from moe_core.ops.quantize.rows import plan_quantize_rows
from moe_core.specs import Activation, LayoutSpec, MatmulSpec, MatmulTuning, MoESpec, RouterSpec, TileConfig
from moe_core.specs.operands import ExpertWeights, MatmulOperands, RouterLogits
from tests.support.harness import run_plan
from tests.support.moe import Layer, run_layer

REFERENCE = Target("reference")
GPUS = Target("cuda", 80, 108), Target("cuda", 90, 132)


def draw(*shape: int, dtype: str = "float32", seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).standard_normal(shape, np.float32).astype(numpy_dtype(dtype))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("activation", [Activation("silu"), Activation("relu2", gated=False)], ids=str)
def test_a_dense_product_keeps_its_pre_activation(dtype: str, activation: Activation) -> None:
    x, weight = draw(9, 16, dtype=dtype), draw(16, 24, dtype=dtype)
    operands = MatmulOperands(ArraySpec(x.shape, dtype), ArraySpec(weight.shape, dtype))
    spec = MatmulSpec("in_out", activation=activation)
    plan = plan_matmul_ogs(operands, None, spec, REFERENCE, outputs=("y", "pre"))
    found = run_plan(plan, {"x": x, "weight": weight})
    wanted = x.astype(np.float32) @ weight.astype(np.float32)
    np.testing.assert_allclose(found["pre"].astype(np.float32), wanted, rtol=1e-2, atol=1e-2)
    gate, up = wanted[:, :12], wanted[:, 12:]
    y = gate / (1 + np.exp(-gate)) * up if activation.gated else np.maximum(wanted, 0) ** 2
    np.testing.assert_allclose(found["y"].astype(np.float32), y, rtol=3e-2, atol=3e-2)


def layer(tokens: int, width: int, factor: float = 1.0) -> Layer:
    """One expert."""
    experts = ExpertWeights(draw(1, width, 2 * width, seed=1), draw(1, width, width, seed=2))
    routing = RouterLogits(np.zeros((tokens, 1), np.float32))
    return Layer(draw(tokens, width) * np.float32(factor), experts, routing, MoESpec(Activation("silu"), RouterSpec(1)))


def test_more_threads_than_pieces_give_the_same_bits() -> None:
    one = layer(40, 320)
    with threads.use(1):
        alone = run_layer(one, REFERENCE)["output"]
    assert np.isfinite(alone).all() and alone.any()
    for number in (2, 16):
        with threads.use(number):
            np.testing.assert_array_equal(run_layer(one, REFERENCE)["output"], alone)


def test_the_largest_pieces_come_first() -> None:
    parts = [(0, slice(0, 1)), (1, slice(1, 6)), (2, slice(6, 9))]
    assert Rows(None, 9, {}, 0, parts).pieces(1, 1 << 20) == [(parts[1],), (parts[2],), (parts[0],)]


@pytest.mark.parametrize("number", [1, 16])
def test_numbers_that_overflow_warn_of_nothing(number: int) -> None:
    with threads.use(number), warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not np.isfinite(run_layer(layer(40, 320, 3e37), REFERENCE)["output"]).all()


@dataclasses.dataclass
class Bundle:
    gate_up: Any
    down: Any
    up: Any = None
    gate_up_bias: Any = None
    down_bias: Any = None


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, True),
        ({"gate_up_bias": 1}, False),
        ({"down_bias": 1}, False),
        ({"gate_up_bias": 1, "down_bias": 1}, False),
        ({"up": 1}, False),
        ({"down": None}, False),
    ],
)
def test_one_call_of_threads_does_plain_matrices_alone(changes: dict[str, Any], expected: bool) -> None:
    bundle, x = Bundle(np.ones(2), np.ones(2), **{}), np.ones((2, 2), np.float32)
    bundle = dataclasses.replace(bundle, **changes)
    chain: Any = _Chain(bundle, "d_", None, x, x, dense_rows(2))  # type: ignore[arg-type]
    assert chain.at_once() is expected
    assert not _Chain(bundle, "d_", np.zeros(1, np.int32), x, x, dense_rows(2)).at_once()  # type: ignore[arg-type]
    assert not _Chain(bundle, "d_", None, x.astype(np.float16), x, dense_rows(2)).at_once()  # type: ignore[arg-type]


def product(weights: str, x: str | None, dtype: str = "bfloat16") -> MatmulOperands:
    """Products of 64 rows with two matrices [256, 128]."""
    weight = quantized_specs(QuantizedSpec(format_named(weights), "out_in"), (2, 128, 256))
    rows = ArraySpec((64, 256), dtype)
    return MatmulOperands(rows if x is None else quantized_specs(QuantizedSpec(format_named(x)), (64, 256)), weight)


@pytest.mark.parametrize(
    ("weights", "x", "dtype", "old", "new"),
    [
        ("mxfp4", None, "float16", ("float16", "per_block", 16, 32), None),
        ("mxfp4", None, "bfloat16", ("bfloat16", "into_weight", 16, 0), None),
        ("int8_channel", None, "float32", ("float32", "into_weight", 16, 0), None),
        ("mxfp4", "mxfp8", "", ("bfloat16", "into_weight", 16, 0), None),
        ("fp8_channel", "fp8_token", "", ("bfloat16", "at_end", 16, 0), ("e4m3", "at_end", 32, 0)),
        ("fp8_block", "fp8_group", "", ("bfloat16", "per_block", 16, 128), ("e4m3", "per_block", 32, 128)),
        ("int8_channel", "int8_token", "", ("int8", "at_end", 32, 0), None),
    ],
)
def test_how_quantised_products_are_computed(weights: str, x: str | None, dtype: str, old: Any, new: Any) -> None:
    """On sm_80, and on sm_90 where that is another way."""
    for target, expected in zip(GPUS, (old, new or old), strict=True):
        assert dataclasses.astuple(product_method(product(weights, x, dtype or "bfloat16"), target)) == expected


def test_sums_of_fp8_products_are_promoted_after_128_columns() -> None:
    operands, layout = product("fp8_channel", "fp8_token"), LayoutSpec(64, 1, 2)
    long = TileConfig(16, 64, 256, 4, 2, family="quantized")
    for fast in (False, True):
        spec = MatmulSpec("out_in", "row", out_dtype="bfloat16", tuning=MatmulTuning(long), fast_accumulate=fast)
        if fast:
            assert plan_matmul_ogs(operands, layout, spec, GPUS[1])
        else:
            with pytest.raises(InvalidInput, match="block_k must be at most 128 unless fast_accumulate, got 256"):
                plan_matmul_ogs(operands, layout, spec, GPUS[1])
    spec = MatmulSpec("out_in", "row", tuning=MatmulTuning(long))
    assert plan_matmul_ogs(product("mxfp4", None), layout, spec, GPUS[1])


@pytest.mark.parametrize("rows", [2, 64])
def test_float32_rows_have_tiles_of_their_own(rows: int) -> None:
    layout = LayoutSpec(2 * rows, 1, 2)
    weight = quantized_specs(QuantizedSpec(format_named("int8_channel"), "out_in"), (2, 128, 256))
    operands = MatmulOperands(ArraySpec((2 * rows, 256), "float32"), weight)
    plan = plan_matmul_ogs(operands, layout, MatmulSpec("out_in", "token"), GPUS[1])
    launch: Any = next(step for step in plan.steps if "BLOCK_K" in dict(step.arguments))  # type: ignore[union-attr]
    sizes = [dict(launch.arguments)[f"BLOCK_{axis}"].value for axis in "MNK"]
    assert [*sizes, launch.num_warps, launch.num_stages] == ([16, 64, 32, 4, 2] if rows == 2 else [32, 64, 32, 8, 2])


def test_rows_to_quantise_are_a_matrix_of_a_dtype_of_products() -> None:
    for spec in (ArraySpec((2, 3, 32), "bfloat16"), ArraySpec((3, 32), "int32")):
        with pytest.raises(InvalidInput, match="x must be "):
            plan_quantize_rows(spec, format_named("fp8_token"), REFERENCE)


def test_gradients_of_row_weights_see_products_before_they_are_rounded() -> None:
    layout = LayoutSpec(6, 1, 1)
    x, weight, d_y = (draw(*shape, dtype="bfloat16") for shape in ((6, 64), (1, 64, 32), (6, 32)))
    arrays = {"x": x, "weight": weight, "d_y": d_y, "row_weight": np.ones((6, 1), np.float32)}
    operands = MatmulOperands(*(ArraySpec(arrays[name].shape, "bfloat16") for name in ("x", "weight")))
    operands = dataclasses.replace(operands, row_weight=ArraySpec((6, 1), "float32"))
    spec = MatmulSpec("in_out", "token", "slot")
    plan = plan_matmul_ogs_backward(
        ArraySpec(d_y.shape, "bfloat16"), operands, layout, spec, REFERENCE, wanted=("d_row_weight",)
    )
    arrays |= {"group_sizes": np.array([6], np.int32), "group_start": np.array([0, 6], np.int32)}
    arrays |= {name: np.arange(6, dtype=np.int32) for name in ("slot_of_row", "row_of_slot")}
    found = run_plan(plan, {name: arrays[name] for name in (buffer.name for buffer in plan.inputs)})["d_row_weight"]
    wide = [array.astype(np.float64) for array in (x, weight[0], d_y)]
    wanted = (wide[0] @ wide[1] * wide[2]).sum(axis=1)
    np.testing.assert_allclose(found.reshape(-1), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("into", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_gradients_of_one_row_have_the_bits_of_a_product(dtype: str, into: bool) -> None:
    """More rows than a block holds, zeros of both signs, overflow, and an expert without rows."""
    draw, special = np.random.default_rng(0), [0.0, -0.0, np.inf, 3e38, -1e-30]
    sides = draw.standard_normal((1, 300)), draw.standard_normal((1, 500))
    for side, sign in zip(sides, (1, -1), strict=True):
        side[0, : len(special)] = np.multiply(special, sign)
    with np.errstate(all="ignore"):
        left, right = (side.astype(numpy_dtype(dtype)) for side in sides)
        added = draw.standard_normal((2, 300, 500)).astype(np.float32) if into else None
        wanted = np.zeros((2, 300, 500), np.float32)
        wanted[1] = left.astype(np.float32).T @ right.astype(np.float32)
        wanted = (wanted if added is None else added + wanted).astype(numpy_dtype(dtype))
    rows = rows_of(LayoutSpec(1, 1, 2), *(np.array(array, np.int32) for array in ([0, 1], [0, 0, 1], [0])))
    made = weight_gradient(left, right, rows, out_dtype=dtype, into=added)
    np.testing.assert_array_equal(made.astype(np.float32), wanted.astype(np.float32))
    assert (np.signbit(made) == np.signbit(wanted))[~np.isnan(wanted)].all()
