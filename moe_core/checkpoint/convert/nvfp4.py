"""Matrices in nvfp4 as in compressed-tensors: two e2m1 codes per byte, an e4m3 scale per 16 columns, one number that
divides these scales: 448 x 6 / amax. gate and up of an expert share it, because vLLM and SGLang use gate's for both.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from moe_core.checkpoint.layouts import NVFP4
from moe_core.formats import QuantizedSpec, QuantizedTensor
from moe_core.ops.quantize.codes import float32_to_e4m3
from moe_core.ops.quantize.reference import group_maxima, quantize

_LARGEST, _CODE = np.float32(448), np.float32(6)
#: The least scale: zero would not divide.
_LEAST = np.float32(2**-9)


class Nvfp4(NamedTuple):
    """A matrix `[N, D]`: values uint8 `[N, D/2]`, scales e4m3 `[N, D/16]`, whole fp32 `[1]`."""

    values: np.ndarray
    scales: np.ndarray
    whole: np.ndarray

    @property
    def numbers(self) -> QuantizedTensor:
        with np.errstate(all="ignore"):
            return QuantizedTensor(QuantizedSpec(NVFP4), self.values, self.scales.astype(np.float32) / self.whole)


def quantized_nvfp4(matrices: Mapping[str, np.ndarray]) -> dict[str, Nvfp4]:
    """Matrices that share the number by which scales are divided. NaN and infinities give their group the scale NaN."""
    with np.errstate(all="ignore"):
        largest = [group_maxima(matrix, NVFP4) for matrix in matrices.values()]
        amax = max(np.max(one, where=np.isfinite(one), initial=0) for one in largest)
        # Bits as in compressed-tensors, which multiplies by the reciprocal.
        whole = np.array([_LARGEST * _CODE * (1 / max(amax, np.finfo(np.float32).tiny))], np.float32)
        whole = np.where(np.isfinite(whole), whole, np.float32(1))
        result = {}
        for (name, matrix), one in zip(matrices.items(), largest, strict=True):
            scales = np.clip(one / _CODE * whole, _LEAST, _LARGEST)
            scales = float32_to_e4m3(np.where(np.isfinite(one), scales, np.float32(np.nan)))
            codes = quantize(matrix, NVFP4, scales=scales.astype(np.float32) / whole)
            result[name] = Nvfp4(codes.values, scales, whole)
    return result
