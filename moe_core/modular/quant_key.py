"""What a capability question names a quantisation by."""

from __future__ import annotations

from dataclasses import dataclass

from moe_core.formats import Format


@dataclass(frozen=True)
class ScaleDesc:
    """dtype of the scales, whether they are static (known before the call), and (rows, columns) that share one; -1 is
    the whole axis."""

    dtype: str
    static: bool
    group_shape: tuple[int, int]


@dataclass(frozen=True)
class QuantKey:
    """One side of a scheme: dtype of the elements (`e4m3`, `int8`, `uint8`, `uint4`, `e2m1`), their scales, and whether
    they are symmetric around zero (no zero points)."""

    dtype: str
    scale: ScaleDesc
    symmetric: bool = True


def quant_key(format: Format, static: bool) -> QuantKey:
    """The key of a format."""
    group = tuple(-1 if extent is None else extent for extent in (format.group_rows, format.group_columns))
    return QuantKey(
        format.element, ScaleDesc(format.scale_dtypes[0], static, (group[0], group[1])), not format.zero_points
    )
