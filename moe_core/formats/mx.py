"""OCP microscaling formats: 32 elements along the input axis share an e8m0 scale, a uint8 b that means 2^(b - 127).

b = 0 is 2^-127 and b = 255 is NaN (OCP Microscaling Formats (MX) Specification 1.0). The `_ceil` variants differ only
in a quantiser's choice of b.
"""

from __future__ import annotations

from moe_core.formats.format import Format, Scheme, register_format, register_scheme

GROUP = 32

MXFP4 = register_format(Format("mxfp4", "e2m1", 1, GROUP, "floor"))
MXFP4_CEIL = register_format(Format("mxfp4_ceil", "e2m1", 1, GROUP, "ceil"))
MXFP8 = register_format(Format("mxfp8", "e4m3", 1, GROUP, "floor"))
MXFP8_CEIL = register_format(Format("mxfp8_ceil", "e4m3", 1, GROUP, "ceil"))

register_scheme(Scheme("mxfp4_w4a16", MXFP4))
register_scheme(Scheme("mxfp4_w4a8", MXFP4, MXFP8))
register_scheme(Scheme("mxfp4_w4a4", MXFP4, MXFP4))
register_scheme(Scheme("mxfp8", MXFP8, MXFP8))
