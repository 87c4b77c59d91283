"""NumPy products of quantised matrices, the reference of every quantised kernel.

Plain x: weights become (code - zero point) * scale in fp32, cast to the dtype of x. e8m0 scales may exceed that dtype's
range, so codes, exact in every dtype, are multiplied group by group, and each partial sum is scaled.

Quantised x: partial sums of codes are multiplied by (scale of x * scale of the weight) as they enter the accumulator.
int8 partial sums are exact. If both sides are microscaled (e8m0) both are multiplied in bf16, which is exact for them.
"""

from __future__ import annotations

import numpy as np

from moe_core.formats import QuantizedTensor
from moe_core.ops.common.product import multiply, product
from moe_core.ops.quantize.reference import codes_and_scales, dequantize


def quantized_product(x: np.ndarray | QuantizedTensor, weight: QuantizedTensor, batch_invariant: bool) -> np.ndarray:
    """fp32 `[R, N]` = x `[R, D]` . weight, in either layout. batch_invariant: as in `product`."""
    microscaled = weight.format.has_e8m0_scales
    if isinstance(x, QuantizedTensor) and microscaled and x.format.has_e8m0_scales:
        return product(dequantize(x, "bfloat16"), dequantize(weight, "bfloat16"), weight.layout, batch_invariant)
    if isinstance(x, np.ndarray) and not microscaled:
        return product(x, dequantize(weight, x.dtype.name), weight.layout, batch_invariant)
    codes, scales = codes_and_scales(weight)
    x_codes, x_scales = codes_and_scales(x) if isinstance(x, QuantizedTensor) else (np.asarray(x, np.float32), None)
    # float64 sums of int8 products are exact and use BLAS.
    wide = np.float64 if x_scales is not None and weight.format.element == "int8" else np.float32
    step = weight.format.group_columns or codes.shape[1]
    total = np.zeros((len(x_codes), len(codes)), np.float32)
    for group, start in enumerate(range(0, codes.shape[1], step)):
        span = slice(start, start + step)
        left, right = x_codes[:, span].astype(wide, copy=False), codes[:, span].astype(wide, copy=False)
        partial = multiply(left, right, "out_in", batch_invariant).astype(np.float32, copy=False)
        factor = _column(scales, group)[None, :]
        total += partial * (factor if x_scales is None else _column(x_scales, group)[:, None] * factor)
    return total


def _column(scales: np.ndarray, group: int) -> np.ndarray:
    return scales[:, group if scales.shape[1] > 1 else 0]
