"""Objects of upstream's `triton_kernels` 3.5.1, as it makes them, through `from_upstream`."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import torch

from moe_torch.compat.triton_kernels import from_upstream
from tools.upstream.imports import original_triton_kernels
from tools.upstream.running import Answer, Case, of_device

#: Experts, and (K, N) of matrices: both products of gpt-oss, its shards, and sizes below those of a swizzle's tiles.
_EXPERTS = 1
_SIZES = ((2880, 5760), (2880, 2880), (1440, 2880), (2880, 720), (128, 128), (64, 2880), (64, 64), (96, 160))
#: Layouts of mxfp4 weights: their class for values and for scales, and the options of each.
_LAYOUTS = {
    "Hopper": ("HopperMXValueLayout", {"mx_axis": 1}, "HopperMXScaleLayout", {"mx_axis": 1, "num_warps": 8}),
    "Hopper, 4 warps": ("HopperMXValueLayout", {"mx_axis": 1}, "HopperMXScaleLayout", {"mx_axis": 1, "num_warps": 4}),
    "Blackwell": ("BlackwellMXValueLayout", {}, "BlackwellMXScaleLayout", {}),
    "strided": ("StridedLayout", {}, "StridedLayout", {}),
}


@of_device
def _converted(device: str, layout: str, size: tuple[int, int]) -> Answer:
    """mxfp4 weights `[E, K, N]` and their scales, laid out by upstream, as plain memory again."""
    K, N = size
    random = np.random.default_rng(0)
    codes = random.integers(0, 256, (_EXPERTS, N, K // 2)).astype(np.uint8)
    scales = random.integers(100, 150, (_EXPERTS, N, K // 32)).astype(np.uint8)
    values_kind, values_options, scales_kind, scales_options = _LAYOUTS[layout]
    with original_triton_kernels():
        tensor = importlib.import_module("triton_kernels.tensor")
        layouts = importlib.import_module("triton_kernels.tensor_details.layout")
        matmul_ogs = importlib.import_module("triton_kernels.matmul_ogs")

        def laid_out(array: np.ndarray, dtype: Any, kind: str, options: dict[str, Any]) -> Any:
            memory = torch.tensor(array, device=device).mT
            return tensor.convert_layout(
                tensor.wrap_torch_tensor(memory, dtype=dtype), getattr(layouts, kind), **options
            )

        weight = laid_out(codes, tensor.FP4, values_kind, values_options)
        scale = laid_out(scales, None, scales_kind, scales_options)
        given = (weight, matmul_ogs.PrecisionConfig(weight_scale=scale))
        mine, precision = from_upstream(given)
    assert list(mine.shape) == [_EXPERTS, K, N], f"shape {list(mine.shape)}"
    parts = (mine.data.mT, getattr(precision.weight_scale, "data", precision.weight_scale).mT)
    for part, wanted in zip(parts, (codes, scales), strict=True):
        assert tuple(part.shape) == wanted.shape, f"memory {list(part.shape)}, expected {list(wanted.shape)}"
    return Answer(torch.cat(parts, dim=-1), np.concatenate((codes, scales), axis=-1), bound=0.0)


def cases() -> list[Case]:
    """d: layouts of weights; which of them a size can have is upstream's choice."""
    return [
        Case(f"c from_upstream, {layout}, mxfp4 {size[0]} x {size[1]}", dict, _converted(layout, size))
        for layout in _LAYOUTS
        for size in _SIZES
    ]
