"""What every registered format must hold in both front-ends: the reference's bits, of every code and every hard number.

The reference itself is held to its formulas in tests/ops/quantize/test_reference.py and
tests/ops/quantize/test_rules.py, the kernels to the reference in tests/ops/quantize/test_rows.py and
tests/ops/matmul/quantized/test_matmul.py.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

jax = pytest.importorskip("jax", reason="needs both frameworks")
torch = pytest.importorskip("torch", reason="needs both frameworks")

import moe_jax
import moe_torch
from moe_core.formats import Format, QuantizedTensor, format_named, format_names
from moe_core.ops.quantize.reference import dequantize, quantize, quantize_rows
from moe_core.specs.operands import map_arrays, named_arrays
from moe_torch.layers.weights import to_numpy
from moe_torch.parity.torch import to_torch
from tests.support import jax as jax_support
from tests.support.quantized.codes import ROW_FORMATS, all_codes, hard_rows
from tests.support.torch import running_on

FORMATS = [format_named(name) for name in format_names()]
CPU = torch.device("cpu")


def put_torch(tensor: QuantizedTensor) -> QuantizedTensor:
    return map_arrays(tensor, lambda array: to_torch(array, CPU))


def assert_same(label: str, wanted: Any, from_torch: Any, from_jax: Any) -> None:
    """Equal bytes of arrays or of all arrays of a tensor; any NaN of a dequantised array is any other."""
    if isinstance(wanted, QuantizedTensor):
        every = (named_arrays(tensor) for tensor in (wanted, from_torch, from_jax))
        for (name, one), (_, second), (_, third) in zip(*every, strict=True):
            assert_same(f"{label} {name}", one, second, third)
        return
    found = {"torch": to_numpy(from_torch), "JAX": np.asarray(from_jax)}
    number = wanted.dtype.name in ("float32", "bfloat16", "float16")
    for library, array in found.items():
        assert (array.dtype, array.shape) == (wanted.dtype, wanted.shape), f"{label}, {library}"
        different = array.view(np.uint8) != wanted.view(np.uint8)
        if number:
            different = ~((array == wanted) | (np.isnan(array) & np.isnan(wanted)))
        assert not different.any(), f"{label}, {library}: differs at {np.argwhere(different)[:3]}"


def hard_weight(format: Format) -> np.ndarray:
    """`[2, 37, D]` of every magnitude: zeros of both signs, denormals, ties, the ends of fp32, NaN, infinities.

    37 rows are a multiple of nothing; D is no multiple of a group either where the format takes that.
    """
    # int8 takes any number of columns too, two elements of a byte an even one.
    ragged = {1: 201, 2: 66}[format.own_element.per_byte]
    columns = ragged if format.allows_partial_groups or format.group_columns is None else 3 * format.group_columns
    random = np.random.default_rng(columns)
    weight = random.standard_normal((2, 37, columns)) * np.exp2(random.integers(-40, 30, (2, 37, 1)))
    weight[0, 3], weight[0, 4, 5], weight[1, 7, 9], weight[1, 6, 0] = 0, np.nan, np.inf, -np.inf
    weight[0, 30], weight[0, 31, ::2] = 1e-45, -0.0
    weight[0, 32] = np.round(random.standard_normal(columns) * 4) / 2
    weight[1, 8], weight[1, 9] = weight[1, 8] * 1e-38, 3e38
    # One scale for all of a matrix is not broken by one NaN.
    if format.group_rows != 1:
        weight[:, 4:8] = random.standard_normal((2, 4, columns))
    return weight.astype(np.float32)


@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_quantisers(format: Format) -> None:
    weight = hard_weight(format)
    with np.errstate(all="ignore"):
        half = weight.swapaxes(1, 2).astype(ml_dtypes.bfloat16)
    for layout, given in (("out_in", weight), ("in_out", half)):
        wanted = quantize(given, format, layout=layout)
        ours = moe_torch.quantize(to_torch(given, CPU), format, layout=layout)
        theirs = moe_jax.quantize(jax.numpy.asarray(given), format, layout=layout)
        assert wanted.spec == ours.spec == theirs.spec
        assert_same(layout, wanted, ours, theirs)


@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_every_code_and_scale(format: Format) -> None:
    """NaN, zero, denormal and huge scales among them; e8m0 has every byte."""
    for layout, dtype in (("out_in", "float32"), ("in_out", "bfloat16")):
        tensor = all_codes(format, layout, 32)
        wanted = dequantize(tensor, dtype)
        assert np.isnan(wanted).any() and np.isfinite(wanted).any()
        ours = moe_torch.dequantize(put_torch(tensor), dtype)
        theirs = moe_jax.dequantize(map_arrays(tensor, jax.numpy.asarray), dtype)
        assert_same(f"{layout} {dtype}", wanted, ours, theirs)


@pytest.mark.parametrize("name", ROW_FORMATS)
def test_rows(name: str) -> None:
    format = format_named(name)
    odd = 5 if format.allows_partial_groups or format.element == "int8" else 0
    x = hard_rows(13, 160 + odd, "float32", whole=format.group_rows is None)
    values, scales = quantize_rows(x, format=format)
    with running_on("reference"):
        ours = moe_torch.quantize_rows(to_torch(x, CPU), format)
    with jax_support.running_on("reference"):
        theirs = moe_jax.quantize_rows(jax.numpy.asarray(x), format)
    assert_same("values", values, ours.values, theirs.values)
    assert_same("scales", scales.view(np.uint8), ours.scales.view(torch.uint8), theirs.scales.view("uint8"))
