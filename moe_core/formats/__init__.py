"""Quantised formats: the single source of truth for the arrays of a quantised tensor.

    weights = reference.quantize.quantize(w, format_named("mxfp4"))     # NumPy; w [E, N, D]
    weights.values, weights.scales                                      # uint8 [E, N, D / 2], uint8 [E, N, D / 32]

To add a format, write a file like `mx.py` and its tests. Other packages can register their own.
"""

from moe_core.formats.format import ELEMENTS as ELEMENTS
from moe_core.formats.format import SCALE_RULES as SCALE_RULES
from moe_core.formats.format import Element as Element
from moe_core.formats.format import Format as Format
from moe_core.formats.format import Scheme as Scheme
from moe_core.formats.format import format_named as format_named
from moe_core.formats.format import format_names as format_names
from moe_core.formats.format import known_scheme as known_scheme
from moe_core.formats.format import register_format as register_format
from moe_core.formats.format import register_scheme as register_scheme
from moe_core.formats.format import scheme_named as scheme_named
from moe_core.formats.format import scheme_names as scheme_names
from moe_core.formats.fp8 import FP8_BLOCK as FP8_BLOCK
from moe_core.formats.fp8 import FP8_BLOCK_POW2 as FP8_BLOCK_POW2
from moe_core.formats.fp8 import FP8_CHANNEL as FP8_CHANNEL
from moe_core.formats.fp8 import FP8_CHANNEL_POW2 as FP8_CHANNEL_POW2
from moe_core.formats.fp8 import FP8_GROUP as FP8_GROUP
from moe_core.formats.fp8 import FP8_GROUP_POW2 as FP8_GROUP_POW2
from moe_core.formats.fp8 import FP8_TENSOR as FP8_TENSOR
from moe_core.formats.fp8 import FP8_TENSOR_POW2 as FP8_TENSOR_POW2
from moe_core.formats.fp8 import FP8_TOKEN as FP8_TOKEN
from moe_core.formats.fp8 import FP8_TOKEN_POW2 as FP8_TOKEN_POW2
from moe_core.formats.integer import INT8_CHANNEL as INT8_CHANNEL
from moe_core.formats.integer import INT8_TOKEN as INT8_TOKEN
from moe_core.formats.integer import int4_grouped as int4_grouped
from moe_core.formats.integer import int8_grouped as int8_grouped
from moe_core.formats.mx import MXFP4 as MXFP4
from moe_core.formats.mx import MXFP4_CEIL as MXFP4_CEIL
from moe_core.formats.mx import MXFP8 as MXFP8
from moe_core.formats.mx import MXFP8_CEIL as MXFP8_CEIL
from moe_core.formats.tensor import QuantizedShapes as QuantizedShapes
from moe_core.formats.tensor import QuantizedSpec as QuantizedSpec
from moe_core.formats.tensor import QuantizedTensor as QuantizedTensor
from moe_core.formats.tensor import quantized_shapes as quantized_shapes
from moe_core.formats.tensor import quantized_specs as quantized_specs
from moe_core.formats.tiling import Tiling as Tiling
from moe_core.formats.tiling import why_not_tileable as why_not_tileable
