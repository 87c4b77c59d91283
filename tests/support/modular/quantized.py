"""Quantised layers for tests of the modular stages: configurations, drawn weights, and their conversions."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

from moe_core.formats import QuantizedTensor
from moe_core.modular.quant_config import SCHEMES
from moe_core.modular.schemes import weight_quantization
from moe_core.ops.quantize.reference import quantize
from moe_torch.modular import FusedMoEQuantConfig
from tests.support.modular.problems import E, Problem
from tests.support.torch import to_torch

HIDDEN, WIDTH = 128, 64


make = FusedMoEQuantConfig.make


ZERO_POINTS = {"w1_zp": np.zeros(1), "w2_zp": np.zeros(1)}


#: Schemes without their arrays.
CONFIGURATIONS = {
    "fp8_tensor": make(use_fp8_w8a8=True),
    "fp8_token": make(use_fp8_w8a8=True, per_act_token_quant=True),
    "fp8_block": make(use_fp8_w8a8=True, block_shape=[128, 128]),
    "int8_w8a8": make(use_int8_w8a8=True, per_act_token_quant=True),
    "int8_w8a16": make(use_int8_w8a16=True, block_shape=[0, 32]),
    "int4_w4a16_zp": make(use_int4_w4a16=True, block_shape=[0, 32], **ZERO_POINTS),
    "mxfp4_w4a4": make(use_mxfp4_w4a4=True),
    "fp8_w8a16_blocks": FusedMoEQuantConfig("fp8_w8a16", block_shape=(128, 128)),
    **{name: FusedMoEQuantConfig(name) for name in SCHEMES[5:]},
}


class Quantized(NamedTuple):
    problem: Problem
    config: FusedMoEQuantConfig
    #: Of a call of a kernel whose experts know the scheme alone.
    arrays: dict[str, Any]
    matrices: tuple[QuantizedTensor, QuantizedTensor]


def draw(name: str, layout: str) -> Quantized:
    """A problem whose weights are values, in NumPy."""
    random, scheme = np.random.default_rng(1), CONFIGURATIONS[name]
    x = random.standard_normal((40, HIDDEN)).astype(np.float32)
    shapes = ((E, 2 * WIDTH, HIDDEN), (E, HIDDEN, WIDTH))
    format, matrices = weight_quantization(scheme), []
    for shape in shapes:
        weight = (random.standard_normal(shape) * shape[2] ** -0.5).astype(np.float32)
        weight = weight if layout == "out_in" else np.ascontiguousarray(weight.swapaxes(1, 2))
        matrices.append(quantize(weight, format, layout=layout))
    ids = np.stack([random.permutation(E)[:2] for _ in range(40)]).astype(np.int32)
    ids[::7, 1] = -1
    # A token without an expert: nothing of it is read, not even by a scale that is found from all rows.
    ids[5], x[5] = -1, np.nan
    problem = Problem(x, matrices[0].values, matrices[1].values, random.random((40, 2)).astype(np.float32), ids)
    arrays = {}
    for number, matrix in enumerate(matrices, 1):
        arrays[f"w{number}_scale"] = matrix.scales
        arrays[f"w{number}_zp"] = matrix.zero_points
    return Quantized(problem, scheme, arrays, tuple(matrices))


def tensor(array: Any, device: Any) -> Any:
    """A tensor of a NumPy array, fp8 included; None for None."""
    if array is not None and array.dtype.name == "float8_e4m3fn":
        return to_torch(array.view(np.uint8), device).view(torch.float8_e4m3fn)
    return to_torch(array, device)


def converted(case: Quantized, dtype: Any, device: Any) -> tuple[list[Any], dict[str, Any]]:
    x, *others = (tensor(array, device) for array in case.problem)
    return [x.to(dtype), *others], {name: tensor(array, device) for name, array in case.arrays.items()}


def with_arrays(case: Quantized, arrays: dict[str, Any]) -> FusedMoEQuantConfig:
    config = case.config
    fields = {name: getattr(config, name) for name in ("scheme", "per_act_token_quant", "block_shape")}
    return FusedMoEQuantConfig(**fields, **arrays)
