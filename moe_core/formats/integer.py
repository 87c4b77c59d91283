"""Integers: int8 w8a8 (channel x token), int8 w8a16 and int4 w4a16 in groups along the input axis.

w8a8 is symmetric, clamped to +-127, half to even. The grouped formats are unsigned codes with a zero point z:
w = (q - z) s in fp32; without stored zero points z is 128 (8 bits) or 8 (4 bits) and s = max(amax, 1e-10) / 127 or / 7;
with them s = max(high - low, 1e-10) / 255 or / 15 and z = round(-low / s), where low <= 0 <= high bound the group.
"""

from __future__ import annotations

from moe_core.formats.format import Format, Scheme, register_format, register_scheme

INT8_CHANNEL = register_format(Format("int8_channel", "int8", 1, None))
INT8_TOKEN = register_format(Format("int8_token", "int8", 1, None))


def _grouped(bits: int, group_size: int | None, zero_points: bool) -> Format:
    extent = "row" if group_size is None else f"g{group_size}"
    name = f"int{bits}_{extent}{'_zp' if zero_points else ''}"
    return Format(name, f"uint{bits}", 1, group_size, zero_points=zero_points)


def int8_grouped(group_size: int | None, zero_points: bool = False) -> Format:
    """int8 weights with a scale per group_size inputs of an output (None: all): `int8_g128`, `int8_row`."""
    return _grouped(8, group_size, zero_points)


def int4_grouped(group_size: int | None, zero_points: bool = False) -> Format:
    """int4 weights with a scale per group_size inputs of an output (None: all): `int4_g32_zp`."""
    return _grouped(4, group_size, zero_points)


for _group_size in (32, 64, 128, None):
    for _zero_points in (False, True):
        register_format(int8_grouped(_group_size, _zero_points))
        register_format(int4_grouped(_group_size, _zero_points))

register_scheme(Scheme("int8_w8a8", INT8_CHANNEL, INT8_TOKEN))
register_scheme(Scheme("int8_w8a16", int8_grouped(128)))
register_scheme(Scheme("int8_w8a16_zp", int8_grouped(128, zero_points=True)))
register_scheme(Scheme("int4_w4a16", int4_grouped(128)))
register_scheme(Scheme("int4_w4a16_zp", int4_grouped(128, zero_points=True)))
