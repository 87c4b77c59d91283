"""What the tests of DeepGEMM's contract share: operands whose scales differ block by block, and a product by loops."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

from moe_core.base.dtypes import numpy_dtype
from moe_core.formats import FP8_BLOCK, FP8_GROUP, Format, QuantizedTensor
from moe_core.modular.quant_config import FusedMoEQuantConfig
from moe_core.ops.quantize.reference import quantize
from tests.support.modular.problems import Problem
from tests.support.torch import to_torch

BLOCK = [128, 128]
#: Groups, columns and reduction of `draw_products`.
G, N, K = 3, 256, 384


def draw_side(random: np.random.Generator, shape: tuple[int, ...], format: Format) -> QuantizedTensor:
    """Normal numbers whose groups differ by powers of two, so that no scale does for another."""
    values = random.standard_normal(shape).astype(np.float32)
    unit = (format.group_rows or 1, format.group_columns or 1)
    groups = [-(-size // step) for size, step in zip(shape[-2:], unit, strict=True)]
    factors = 2.0 ** random.integers(-3, 4, (*shape[:-2], *groups))
    spread = factors.repeat(unit[0], -2).repeat(unit[1], -1)[..., : shape[-2], : shape[-1]]
    return quantize(values * spread.astype(np.float32) * shape[-1] ** -0.5, format)


def looped_product(a: QuantizedTensor, b: QuantizedTensor, m_indices: np.ndarray) -> np.ndarray:
    """d float64 `[M, N]`: a loop over rows, blocks of columns and blocks of outputs; zeros where an index is -1."""
    d = np.zeros((len(m_indices), b.shape[1]))
    values_a, values_b = a.values.astype(np.float64), b.values.astype(np.float64)
    for row, group in enumerate(m_indices):
        if group < 0:
            continue
        for column in range(b.scales.shape[2]):
            k = slice(128 * column, 128 * (column + 1))
            for output in range(b.scales.shape[1]):
                n = slice(128 * output, 128 * (output + 1))
                scale = float(a.scales[row, column]) * float(b.scales[group, output, column])
                d[row, n] += values_b[group, n, k] @ values_a[row, k] * scale
    return d


#: One half of the rows of a padded block, an expert twice, one never, and a block of nothing.
GROUPS_OF_BLOCKS = (2, 0, -1, 2)


def draw_products(format: Any = FP8_GROUP, rows: int = 512) -> tuple[Any, Any, np.ndarray]:
    """a, b and m_indices of the contiguous layout; padding holds NaN in values and scales."""
    random = np.random.default_rng(3)
    a, b = draw_side(random, (rows, K), format), draw_side(random, (G, N, K), FP8_BLOCK)
    m_indices = np.full(rows, -1, np.int32)
    for block, group in enumerate(GROUPS_OF_BLOCKS):
        m_indices[128 * block : 128 * block + 40 + block] = group
    a.values[m_indices < 0] = np.nan
    a.scales[m_indices < 0] = np.nan
    return a, b, m_indices


class Experts(NamedTuple):
    """A problem whose w1 and w2 are e4m3 values, and their scales; in NumPy."""

    problem: Problem
    scales: dict[str, Any]


def draw_experts(
    dtype: str = "float32", *, tokens: int = 40, experts: int = 3, hidden: int = 256, width: int = 128, seed: int = 0
) -> Experts:
    """A gated problem of two choices, some of them -1."""
    random = np.random.default_rng(seed)
    x = random.standard_normal((tokens, hidden)).astype(np.float32).astype(numpy_dtype(dtype))
    w1 = draw_side(random, (experts, 2 * width, hidden), FP8_BLOCK)
    w2 = draw_side(random, (experts, hidden, width), FP8_BLOCK)
    ids = np.stack([random.permutation(experts)[:2] for _ in range(tokens)]).astype(np.int32)
    ids[::7, 1] = -1
    problem = Problem(x, w1.values, w2.values, random.random((tokens, 2)).astype(np.float32), ids)
    return Experts(problem, {"w1_scale": w1.scales, "w2_scale": w2.scales})


def config_of(scales: dict[str, Any]) -> FusedMoEQuantConfig:
    """fp8_w8a8 in blocks of 128, with scales of any library."""
    return FusedMoEQuantConfig.make(use_fp8_w8a8=True, block_shape=BLOCK, **scales)


def tensor(array: Any, device: Any = "cpu") -> Any:
    """A tensor of a NumPy array, e4m3 included."""
    if array.dtype.name == "float8_e4m3fn":
        return to_torch(array.view(np.uint8), device).view(torch.float8_e4m3fn)
    return to_torch(array, device)


def tensors(case: Experts, device: Any = "cpu") -> tuple[list[Any], dict[str, Any]]:
    """The positional arguments of a modular kernel, and the scales by name."""
    scales = {name: tensor(array, device) for name, array in case.scales.items()}
    return [tensor(array, device) for array in case.problem], scales


def pair(side: QuantizedTensor, device: Any = "cpu") -> tuple[Any, Any]:
    """(values, scales) as tensors."""
    return tensor(side.values, device), tensor(side.scales, device)
