"""Quantised formats: the single source of truth for what the arrays of a quantised tensor mean.

    weights = reference.quantize.quantize(w, format_named("mxfp4"))     # NumPy; w [E, N, D]
    weights.values, weights.scales                                      # uint8 [E, N, D / 2], uint8 [E, N, D / 32]

A format is one frozen `Format`; `QuantizedTensor` carries values, scales, zero points and layout together; a `Scheme`
says which format weights and activations have. Adding a format is a file like `mx.py` and its tests; a package that
registers its own needs no change here.
"""

from moe_core.formats.format import (
    ELEMENTS,
    SCALE_RULES,
    Element,
    Format,
    Scheme,
    format_named,
    format_names,
    known_scheme,
    register_format,
    register_scheme,
    scheme_named,
    scheme_names,
)
from moe_core.formats.fp8 import (
    FP8_BLOCK,
    FP8_BLOCK_POW2,
    FP8_CHANNEL,
    FP8_CHANNEL_POW2,
    FP8_GROUP,
    FP8_GROUP_POW2,
    FP8_TENSOR,
    FP8_TENSOR_POW2,
    FP8_TOKEN,
    FP8_TOKEN_POW2,
)
from moe_core.formats.integer import INT8_CHANNEL, INT8_TOKEN, int4_grouped, int8_grouped
from moe_core.formats.mx import MXFP4, MXFP4_CEIL, MXFP8, MXFP8_CEIL
from moe_core.formats.tensor import QuantizedShapes, QuantizedSpec, QuantizedTensor, quantized_shapes, quantized_specs
from moe_core.formats.tiling import Tiling, why_not_tileable

__all__ = [
    "ELEMENTS",
    "FP8_BLOCK",
    "FP8_BLOCK_POW2",
    "FP8_CHANNEL",
    "FP8_CHANNEL_POW2",
    "FP8_GROUP",
    "FP8_GROUP_POW2",
    "FP8_TENSOR",
    "FP8_TENSOR_POW2",
    "FP8_TOKEN",
    "FP8_TOKEN_POW2",
    "INT8_CHANNEL",
    "INT8_TOKEN",
    "MXFP4",
    "MXFP4_CEIL",
    "MXFP8",
    "MXFP8_CEIL",
    "SCALE_RULES",
    "Element",
    "Format",
    "QuantizedShapes",
    "QuantizedSpec",
    "QuantizedTensor",
    "Scheme",
    "Tiling",
    "format_named",
    "format_names",
    "int4_grouped",
    "int8_grouped",
    "known_scheme",
    "quantized_shapes",
    "quantized_specs",
    "register_format",
    "register_scheme",
    "scheme_named",
    "scheme_names",
    "why_not_tileable",
]
