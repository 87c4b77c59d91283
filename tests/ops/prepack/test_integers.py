"""Prepared integer weights: where codes, scales and zero points lie, and the way back, in every library."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import moe_jax
import moe_torch
from moe_core.base import dtypes
from moe_core.base.arrays import ArraySpec
from moe_core.errors import InvalidInput
from moe_core.formats import Format, QuantizedSpec, QuantizedTensor, format_named, int4_grouped, quantized_specs
from moe_core.formats.tiling import block_of
from moe_core.layers import ExpertsSpec
from moe_core.ops.prepack import prepack as reference
from moe_core.ops.prepack.prepack import prepack_weights, restore_weights
from moe_core.ops.quantize.codes import unpack_nibbles
from moe_core.ops.quantize.reference import dequantize
from moe_core.specs.operands import map_arrays, named_arrays
from moe_torch import MoE
from tests.support.jax import to_jax
from tests.support.torch import to_torch

#: (format, dtype of scales): blocks with several scales of a row, with one, and scales of several blocks.
CASES = (
    ("int4_g32_zp", "float16"), ("int4_g64", "float32"), ("int4_g128_zp", "bfloat16"), ("int4_row_zp", "float32"),
    ("int8_g32", "bfloat16"), ("int8_g64_zp", "float16"), ("int8_g128_zp", "float32"), ("int8_row", "bfloat16"),
    ("int8_channel", "float32"),
)  # fmt: skip
#: (order, leading axes, N, D): padded in rows, columns, both and neither, an odd N.
SHAPES = (
    ("rows", (3,), 71, 384), ("interleaved", (2, 2), 130, 128), ("halves", (2,), 128, 256), ("rows", (0,), 64, 128),
)  # fmt: skip


def drawn(format: Format, dtype: str, lead: tuple[int, ...], rows: int, columns: int, layout: str = "out_in") -> Any:
    """Any codes and zero points; scales that are numbers."""
    random = np.random.default_rng(rows + columns)
    axes = (rows, columns) if layout == "out_in" else (columns, rows)
    packed = quantized_specs(QuantizedSpec(format, layout), (*lead, *axes), dtype)

    def draw(spec: ArraySpec) -> np.ndarray:
        if spec.dtype in ("uint8", "int8"):
            return random.integers(0, 256, spec.shape).astype(np.uint8).view(spec.dtype)
        return random.standard_normal(spec.shape).astype(dtypes.numpy_dtype(spec.dtype))

    tensor = map_arrays(packed, draw)
    if format.zero_points and format.own_element.per_byte == 2 and rows % 2:
        # The last high nibble of an odd number of rows is unused.
        last = tensor.zero_points[..., -1, :] if layout == "out_in" else tensor.zero_points[..., -1]
        last &= 15
    return tensor


def bits(tree: Any) -> list[tuple[str, str, bytes]]:
    found = []
    for name, array in named_arrays(tree):
        if isinstance(array, torch.Tensor):
            kind, array = str(array.dtype).removeprefix("torch."), array.contiguous().view(torch.uint8).numpy()
        else:
            array = np.asarray(array)
            kind = array.dtype.name
        found.append((name, kind, array.tobytes()))
    return found


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_tiling_has_an_inverse(name: str, dtype: str) -> None:
    format = format_named(name)
    for order, lead, rows, columns in SHAPES:
        gate_layout = None if order == "rows" else order
        tensor = drawn(format, dtype, lead, rows, columns)
        tiled = prepack_weights(tensor, gate_layout=gate_layout)
        assert tiled.shape == tensor.shape and str(tiled) == f"{tensor} tiled in order {order}"
        assert bits(restore_weights(tiled)) == bits(tensor) and restore_weights(tiled).spec == tensor.spec
        np.testing.assert_array_equal(dequantize(tiled), dequantize(tensor))
        found = moe_torch.prepack_weights(to_torch(tensor), gate_layout=gate_layout)
        assert found.spec == tiled.spec and bits(found) == bits(tiled)
        assert bits(moe_torch.restore_weights(found)) == bits(tensor)
        stored = drawn(format, dtype, lead, rows, columns, "in_out")
        transposed = prepack_weights(stored, gate_layout=gate_layout)
        np.testing.assert_array_equal(dequantize(transposed), dequantize(stored).swapaxes(-1, -2))
        assert bits(moe_torch.prepack_weights(to_torch(stored), gate_layout=gate_layout)) == bits(transposed)


@pytest.mark.parametrize(("name", "dtype"), [CASES[0], CASES[6], CASES[8]])
def test_jax_tiles_alike(name: str, dtype: str) -> None:
    tensor = drawn(format_named(name), dtype, (2,), 71, 128)
    tiled = moe_jax.prepack_weights(to_jax(tensor))
    assert bits(tiled) == bits(prepack_weights(tensor)) and bits(moe_jax.restore_weights(tiled)) == bits(tensor)
    np.testing.assert_array_equal(np.asarray(moe_jax.dequantize(tiled)), dequantize(tensor))


@pytest.mark.parametrize(("name", "dtype"), CASES)
@pytest.mark.parametrize(("order", "rows"), [("rows", 71), ("interleaved", 130), ("halves", 128)])
def test_arrays_lie_where_the_format_says(name: str, dtype: str, order: str, rows: int) -> None:
    """The formulas of `moe_core.formats.tiling`, one code, one scale and one zero point at a time."""
    format, columns = format_named(name), 384
    tensor = drawn(format, dtype, (), rows, columns)
    tiled, block, four = reference.tile(tensor, order), block_of(format), format.own_element.per_byte == 2
    codes = unpack_nibbles(tensor.values) if four else tensor.values
    points = tensor.zero_points
    if points is not None and four:
        points = unpack_nibbles(points, 0, rows)
    random = np.random.default_rng(0)
    for _ in range(100):
        place, side, row = (int(random.integers(size)) for size in (tiled.values.shape[0], 2, 32))
        step, t, q = (int(random.integers(size)) for size in (tiled.values.shape[1], 4, 4))
        i, b = int(random.integers(4)), int(random.integers(2))
        source = {
            "rows": 64 * place + 32 * side + row,
            "interleaved": 64 * place + 2 * row + side,
            "halves": side * (rows // 2) + 32 * place + row,
        }[order]
        first = 2048 * side + 64 * row + 16 * t + 4 * q
        word = int.from_bytes(tiled.values[place, step, first : first + 4].tobytes(), "little")
        if four:
            column, code = 128 * step + 32 * q + 8 * i + 2 * t + b, word >> (16 * b + 4 * i) & 15
        else:
            p = i % 2
            column, code = 64 * step + 16 * q + 8 * p + 2 * t + b, word >> 8 * (2 * p + b) & 255
        bias = 128 if format.element == "int8" else 0
        assert code == (int(codes[source, column]) + bias if source < rows else bias)
        record, group = 0 if block.repeat is None else step // block.repeat, int(random.integers(block.groups))
        found = 0 if format.group_columns is None else block.groups * record + group
        element = block.groups * (32 * side + row) + group
        for array, published in ((tiled.scales, tensor.scales), (tiled.zero_points, points)):
            if published is not None:
                assert array[place, record, element] == (published[source, found] if source < rows else 0)


def test_sizes_that_cannot_be_tiled_are_refused() -> None:
    for format, shape, message in (
        (format_named("int4_row"), (64, 80), "columns must be a multiple of 32"),
        (format_named("int8_channel"), (65, 64), "rows must be a multiple of 2 for order 'interleaved'"),
        (int4_grouped(16), (64, 64), "must be in a format with a tiling, got int4_g16"),
    ):
        tensor = drawn(format, "float32", (), *shape)
        with pytest.raises(InvalidInput, match=message):
            prepack_weights(tensor, gate_layout="interleaved")
    tiled = prepack_weights(drawn(format_named("int8_g64_zp"), "float32", (), 64, 64))
    with pytest.raises(InvalidInput, match=r"zero_points of .* must be \(1, 1, 64\), got \(1, 1, 63\)"):
        QuantizedTensor(tiled.spec, tiled.values, tiled.scales, tiled.zero_points[..., 1:])


def test_layers_keep_published_zero_points() -> None:
    """A layer's state has the published layout before and after, whichever it was loaded into."""
    from moe_core.formats import scheme_named

    experts = ExpertsSpec(weight_layout="out_in", scheme=scheme_named("int4_w4a16_zp"))
    layers = [MoE(128, 128, 2, 1, experts=experts).requires_grad_(False) for _ in range(2)]
    generator = torch.Generator().manual_seed(0)
    for name, buffer in layers[0].named_buffers():
        if name.startswith("experts."):
            buffer.copy_(
                torch.randint(0, 256, buffer.shape, generator=generator) / (256 if buffer.is_floating_point() else 1)
            )
    published = {name: array.clone() for name, array in layers[0].state_dict().items()}
    assert any(name.endswith("zero_points") for name in published)
    x = torch.randn(3, 128)
    with moe_torch.cpu_engine("reference"):
        y = layers[0](x)
        for layer in layers:
            layer.prepack_weights()
        layers[1].load_state_dict(layers[0].state_dict())
        for layer in layers:
            assert layer.is_prepacked and torch.equal(layer(x), y)
            stored = layer.state_dict()
            assert all(torch.equal(stored[name], array) for name, array in published.items())
