"""Rows that arrived once, copied to the rows of their slots."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from moe_core import InvalidInput
from moe_core.base.arrays import ArraySpec
from moe_core.base.target import Target
from moe_core.formats import QuantizedSpec, QuantizedTensor, format_named
from moe_core.ops.exchange.pull import plan_take_rows
from moe_core.ops.quantize.reference import dequantize, quantize_rows
from tests.support.harness import H200, POISON, engine_target, run_plan, spec_of
from tests.support.strategies import draw_array

ENGINES = (engine_target(), Target("reference"))
on_engines = pytest.mark.parametrize("target", ENGINES, ids=lambda target: target.kind)
N = 9


def take(target: Target, x: np.ndarray, rows: np.ndarray, filled: int, **options: Any) -> np.ndarray:
    arrays = {"x": x, "rows": rows.reshape(-1, 1), "group_start": np.array([0, 1, filled], np.int32)}
    scales = options.pop("scales", None)
    plan = plan_take_rows(*map(spec_of, arrays.values()), target, scales=spec_of(scales), **options)
    return run_plan(plan, arrays | ({} if scales is None else {"scales": scales}))["y"]


def require(found: np.ndarray, whole: np.ndarray, rows: np.ndarray, filled: int) -> None:
    """Rows of `whole`, zeros where there is none, and nothing behind the last one."""
    own = rows[: max(0, filled)]
    exists = (own >= 0) & (own < len(whole))
    expected = np.where(exists[:, None], whole[np.where(exists, own, 0)], np.zeros((), whole.dtype))
    assert found[: len(own)].tobytes() == expected.tobytes()
    assert (found[len(own) :].view(np.uint8) == POISON).all()


@on_engines
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(("width", "programs"), [(8, None), (1032, 3)])
def test_rows(target: Target, dtype: str, width: int, programs: int | None) -> None:
    random = np.random.default_rng(width)
    x = draw_array(random, (N, width), dtype)
    rows = random.integers(-2, N + 2, 40).astype(np.int32)
    rows[:3] = 0, 2**31 - 1, -(2**31)
    for filled in (0, 1, 39, 40, 2**31 - 1, -5):
        require(take(target, x, rows, filled, programs=programs), x, rows, filled)
    assert take(target, x[:0], rows[:0], 0).shape == (0, width)


@on_engines
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("width", [16, 128, 400, 2064])
def test_codes_become_numbers(target: Target, dtype: str, width: int) -> None:
    """The bits of `dequantize`; groups with a NaN have none else."""
    random, format = np.random.default_rng(width), format_named("fp8_group")
    x = draw_array(random, (N, width), "float32") * np.logspace(-9, 9, N, dtype=np.float32)[:, None]
    x[3, 1] = np.nan
    codes, scales = quantize_rows(x, format=format)
    whole = dequantize(QuantizedTensor(QuantizedSpec(format), codes, scales), dtype)
    rows = random.integers(-1, N, 30).astype(np.int32)
    rows[0] = 0
    found = take(target, codes, rows, 25, scales=scales, dtype=dtype, programs=2)
    numbers = ~np.isnan(whole.astype(np.float32))
    assert np.isnan(found[:25].astype(np.float32)).sum() == (~numbers)[rows[:25]][rows[:25] >= 0].sum()
    require(np.where(np.isnan(found.astype(np.float32)) & (np.arange(30) < 25)[:, None], 0, found).astype(found.dtype),
            np.where(numbers, whole, 0).astype(whole.dtype), rows, 25)  # fmt: skip


def test_wrong_arguments() -> None:
    x, rows, start = ArraySpec((N, 16), "bfloat16"), ArraySpec((5, 1), "int32"), ArraySpec((3,), "int32")
    codes, scales = ArraySpec((N, 16), "float8_e4m3fn"), ArraySpec((N, 1), "float32")
    given = {"x": x, "rows": rows, "group_start": start}
    for changes, message in (
        ({"x": ArraySpec((N, 12), "bfloat16")}, "rows of x must be a multiple of 16 bytes, got 24"),
        ({"x": ArraySpec((N, 0), "bfloat16")}, "rows of x must be a multiple of 16 bytes, got 0"),
        ({"x": codes}, "x must be"),
        ({"rows": ArraySpec((5,), "int32")}, r"rows must be \[num_rows, 1\]"),
        ({"group_start": ArraySpec((1,), "int32")}, "length of group_start must be"),
        ({"dtype": "float32"}, "dtype must be bfloat16 like x without scales, got float32"),
        ({"x": codes, "scales": scales}, "dtype must be"),
        ({"x": codes, "scales": ArraySpec((N, 2), "float32"), "dtype": "float32"}, r"scales must be \[9, 1\]"),
        ({"programs": 0}, "programs must be"),
    ):
        with pytest.raises(InvalidInput, match=message):
            plan_take_rows(**(given | changes), target=H200)
