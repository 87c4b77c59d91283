"""Quantisation of activations on real kernels: the bits of the reference."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

from moe_core import InvalidInput, Unsupported
from moe_core.base.arrays import ArraySpec
from moe_core.base.target import Target
from moe_core.formats import FP8_TENSOR, FP8_TOKEN, INT8_TOKEN, MXFP4, Format, format_named
from moe_core.ops.quantize.reference import quantize_rows
from moe_core.ops.quantize.rows import plan_quantize_rows
from moe_core.plan.steps import Constant, KernelLaunch
from tests.support.harness import engine_target, run_plan
from tests.support.quantized.codes import ROW_FORMATS, hard_rows

INT8_TENSOR = Format("int8_tensor", "int8", None, None)
E2M1_TENSOR = Format("e2m1_tensor", "e2m1", None, None)


def assert_same_bits(
    x: np.ndarray, format: Format, static_scale: np.ndarray | None = None, converts: bool | None = None
) -> None:
    """converts: whether kernels take the path of hardware that converts to fp8, None = as planned."""
    given = {} if static_scale is None else {"static_scale": static_scale}
    scales = None if static_scale is None else ArraySpec((1,), "float32")
    described = ArraySpec(x.shape, x.dtype.name)
    plan = plan_quantize_rows(described, format, engine_target(), scales=scales)
    if converts is not None:
        chosen = {"CONVERTS": Constant(converts)}
        launches = [step for step in plan.steps if isinstance(step, KernelLaunch)]
        given_to = [[(name, chosen.get(name, value)) for name, value in step.arguments] for step in launches]
        steps = [replace(step, arguments=tuple(made)) for step, made in zip(launches, given_to, strict=True)]
        plan = replace(plan, steps=tuple(steps))
    found = run_plan(plan, {"x": x} | given)
    expected = quantize_rows(x, static_scale, format=format)
    for name, wanted in zip(("values", "scales"), expected, strict=True):
        different = np.argwhere(found[name].view(np.uint8) != wanted.view(np.uint8))
        assert found[name].shape == wanted.shape and not different.size, f"{format} {name} differs at {different[:5]}"


@pytest.mark.parametrize("name", ROW_FORMATS)
def test_bits_of_the_reference(name: str) -> None:
    format = format_named(name)
    odd = 5 if format.allows_partial_groups or format.element == "int8" else 0
    whole = format.group_rows is None
    for rows, dtype in ((20, "float32"), (13, "bfloat16"), (0, "float16")):
        assert_same_bits(hard_rows(rows, 160 + odd, dtype, whole), format)
    if whole:
        assert_same_bits(hard_rows(20, 37, "float32"), format)


@pytest.mark.parametrize("converts", [True, False])
def test_both_ways_to_e4m3_have_the_same_bits(converts: bool) -> None:
    for format in (FP8_TENSOR, FP8_TOKEN, format_named("fp8_group")):
        x = hard_rows(20, 160, "float32", format.group_rows is None)
        x[3] *= -1
        assert_same_bits(x, format, converts=converts)


@pytest.mark.parametrize("format", [FP8_TENSOR, INT8_TENSOR, E2M1_TENSOR], ids=str)
def test_a_static_scale_stands_for_all(format: Format) -> None:
    x = hard_rows(20, 38, "float32")
    x[7, 0] = np.copysign(np.float32(np.nan), np.float32(-1))
    for scale in (0.01, 3.0, 1e-44, 1e-38, 1e-20, 1e20, 3e38, 0.0, -0.5, np.nan, np.inf):
        assert_same_bits(x, format, np.array([scale], np.float32))


@pytest.mark.parametrize(
    ("name", "users", "static"),
    [
        ("fp8_tensor", 3, None), ("e2m1_tensor", 1, None), ("fp8_tensor", 2, 0.5), ("fp8_token", 2, None),
        ("fp8_group", 1, None), ("mxfp4", 3, None),
    ],
)  # fmt: skip
def test_rows_that_nothing_reads_become_zeros(name: str, users: int, static: float | None) -> None:
    format = E2M1_TENSOR if name == "e2m1_tensor" else format_named(name)
    scale = None if static is None else np.array([static], np.float32)
    given = {} if scale is None else {"static_scale": scale}
    scales = None if scale is None else ArraySpec((1,), "float32")
    for rows in (20, 0):
        x, used_by = hard_rows(rows, 160, "bfloat16", format.group_rows is None), np.full((rows, users), -1, np.int32)
        used_by[::3, users - 1] = np.arange(len(used_by[::3]))
        x[1::3], x[2::3] = np.nan, np.inf
        described = ArraySpec(x.shape, "bfloat16"), ArraySpec((rows * users,), "int32")
        plan = plan_quantize_rows(described[0], format, engine_target(), scales=scales, used_by=described[1])
        found = run_plan(plan, {"x": x, "used_by": used_by.reshape(-1)} | given)
        zeroed = np.where(used_by.max(axis=1, initial=-1)[:, None] >= 0, x, np.zeros((), x.dtype))
        expected = quantize_rows(zeroed, scale, format=format)
        of_reference = quantize_rows(x, scale, used_by.reshape(-1), format=format)
        for part, wanted, other in zip(("values", "scales"), expected, of_reference, strict=True):
            assert found[part].tobytes() == wanted.tobytes() == other.tobytes(), part


@pytest.mark.parametrize("rows", [20, 0])
def test_largest_magnitudes_may_be_found_before(rows: int) -> None:
    """And zeros be written for others, that are found later."""
    x = hard_rows(rows, 160, "bfloat16", whole=True)
    maxima = np.zeros(64, np.int32)
    maxima[37] = np.abs(x.astype(np.float32)).max(initial=0).view(np.int32)
    plan = plan_quantize_rows(
        ArraySpec(x.shape, "bfloat16"), FP8_TENSOR, engine_target(), maxima=ArraySpec((64,), "int32"), zeros=16
    )
    found, expected = run_plan(plan, {"x": x, "maxima": maxima}), quantize_rows(x, format=FP8_TENSOR)
    assert len(plan.steps) == 1 and found["zeros"].tobytes() == bytes(64)
    assert (found["values"].tobytes(), found["scales"].tobytes()) == tuple(array.tobytes() for array in expected)
    maxima[5] = 0x7F800000
    found = run_plan(plan, {"x": x, "maxima": maxima})
    assert np.isnan(found["scales"]).all() and not found["values"].view(np.uint8).any()


def test_only_kernels_of_whole_rows_read_maxima_and_write_zeros() -> None:
    x, maxima = ArraySpec((4, 128), "bfloat16"), ArraySpec((64,), "int32")
    for format, target in ((FP8_TENSOR, Target("reference")), (format_named("fp8_group"), engine_target())):
        with pytest.raises(AssertionError, match="of whole rows, by kernels"):
            plan_quantize_rows(x, format, target, maxima=maxima)
        with pytest.raises(AssertionError, match="of whole rows, by kernels"):
            plan_quantize_rows(x, format, target, zeros=1)


@pytest.mark.parametrize("entries", [6, 0])
@pytest.mark.parametrize("format", [FP8_TENSOR, FP8_TOKEN], ids=str)
def test_users_that_do_not_fit(format: Format, entries: int) -> None:
    words = f"used_by must have as many entries for every one of the 4 rows of x, got {entries}"
    with pytest.raises(InvalidInput, match=words):
        used_by = ArraySpec((entries,), "int32")
        plan_quantize_rows(ArraySpec((4, 64), "bfloat16"), format, engine_target(), used_by=used_by)


@pytest.mark.parametrize("format", [FP8_TENSOR, FP8_TOKEN, INT8_TOKEN, E2M1_TENSOR, MXFP4], ids=str)
def test_bits_of_many_rows(format: Format) -> None:
    """Whose tile is not that of few on a GPU, and of which the interpreter takes a part at a time."""
    x = hard_rows(4099, 1120, "bfloat16", format.group_rows is None)
    assert_same_bits(x, format)
    if format.group_rows is None:
        assert_same_bits(x, format, np.array([0.01], np.float32))


def test_many_rows_have_a_tile_of_their_own() -> None:
    def tiles(rows: int) -> list[tuple[object, object, int, int]]:
        plan = plan_quantize_rows(ArraySpec((rows, 2880), "bfloat16"), FP8_TENSOR, Target("cuda", 90, 132))
        steps = [step for step in plan.steps if isinstance(step, KernelLaunch)]
        constants = [dict(step.arguments) for step in steps]
        return [
            (found["BLOCK_M"], found["BLOCK_K"], step.num_warps, step.grid[0])
            for found, step in zip(constants, steps, strict=True)
        ]

    few, many = (Constant(1), Constant(2048), 4), (Constant(4), Constant(1024), 8)
    assert tiles(4095) == [(*few, 512), (*few, 4095)] and tiles(4097) == [(*many, 512), (*many, 1025)]


def test_groups_wider_than_a_usual_tile() -> None:
    for width in (5000, 3000):
        assert_same_bits(hard_rows(9, width, "float32"), Format("wide", "e4m3", 1, 4096))
    too_wide = Format("too_wide", "e4m3", 1, 20000)
    with pytest.raises(Unsupported, match="groups of at most 16384 columns"):
        plan_quantize_rows(ArraySpec((4, 64), "bfloat16"), too_wide, engine_target())


def test_the_reference_engine_runs_the_same_plan() -> None:
    plan = plan_quantize_rows(
        ArraySpec((20, 37), "float32"), FP8_TENSOR, Target("reference"), scales=ArraySpec((1,), "float32")
    )
    x, scale = hard_rows(20, 37, "float32"), np.array([0.01], np.float32)
    found = run_plan(plan, {"x": x, "static_scale": scale})
    assert found["values"].tobytes() == quantize_rows(x, scale, format=FP8_TENSOR)[0].tobytes()


def test_every_fp8_number_and_every_tie() -> None:
    """Numbers of e4m3 and all midpoints between neighbours: a group of 448 has the scale 1."""
    numbers = np.arange(127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    middles = (numbers[1:] + numbers[:-1]) / 2
    row = np.concatenate([numbers, middles, np.nextafter(middles, 500, dtype=np.float32), np.array([448], np.float32)])
    assert_same_bits(np.stack([row, -row]), FP8_TOKEN)


def test_quotients_beside_every_tie() -> None:
    """What lies a rounding error from the middle of two neighbours, for scales of any size: the quotient's last bit
    decides, which a product with the reciprocal alone gets wrong."""
    numbers = np.arange(127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    middles, random = (numbers[1:] + numbers[:-1]) / 2, np.random.default_rng(0)
    for exponent in (-100, -63, -20, -1, 0, 3, 40, 63, 100):
        scale = np.float32(random.uniform(1, 2) * 2.0**exponent)
        near = (middles.astype(np.float64) * scale).astype(np.float32)
        rows = [near]
        for _ in range(2):
            rows = [np.nextafter(rows[0], -np.inf, dtype=np.float32), *rows]
            rows.append(np.nextafter(rows[-1], np.inf, dtype=np.float32))
        x = np.stack([*rows, *(-row for row in rows)])
        assert_same_bits(x, FP8_TENSOR, np.array([scale], np.float32))


def test_strided_rows() -> None:
    x = hard_rows(9, 64, "float32")
    plan = plan_quantize_rows(ArraySpec((9, 32), "float32", (64, 1)), MXFP4, engine_target())
    found = run_plan(plan, {"x": x[:, :32]})
    assert found["values"].tobytes() == quantize_rows(x[:, :32], format=MXFP4)[0].tobytes()


def test_a_kernel_serves_every_number_of_rows() -> None:
    for format in (FP8_TENSOR, INT8_TOKEN, MXFP4):
        plans = [
            plan_quantize_rows(ArraySpec((rows, 96), "bfloat16"), format, Target("cuda", 90, 132)) for rows in (1, 999)
        ]
        few, many = ([step for step in plan.steps if isinstance(step, KernelLaunch)] for plan in plans)
        for one, other in zip(few, many, strict=True):
            assert dict(one.arguments) | {"num_rows": None} == dict(other.arguments) | {"num_rows": None}


@pytest.mark.parametrize(
    ("format", "scales", "error", "words"),
    [
        (format_named("fp8_block"), None, Unsupported, "scales of one row or of all"),
        (format_named("int4_g32"), None, Unsupported, "must be of e4m3, e2m1, int8"),
        (Format("bands", "e4m3", None, 64), None, Unsupported, "not over all columns"),
        (FP8_TOKEN, ArraySpec((1,), "float32"), InvalidInput, "scales must be None for fp8_token"),
        (FP8_TENSOR, ArraySpec((2,), "float32"), InvalidInput, r"scales must be \[1\]"),
    ],
    ids=str,
)
def test_refused(format: Format, scales: ArraySpec | None, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        plan_quantize_rows(ArraySpec((4, 64), "bfloat16"), format, engine_target(), scales=scales)
