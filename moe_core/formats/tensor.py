"""One quantised tensor in any array type."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from moe_core.base import WEIGHT_LAYOUTS, ArraySpec, plan_type, require_choice, require_kind
from moe_core.base.dtypes import canonical, itemsize
from moe_core.errors import InvalidInput
from moe_core.formats.format import Format
from moe_core.formats.tiling import BLOCK_ROWS, BLOCK_VALUES, Tiling, block_of, why_not_tileable


@plan_type
@dataclass(frozen=True)
class QuantizedSpec:
    """The format, layout and tiling of a quantised tensor, all static.

    layout: the axis that a product sums over, with packed bytes and groups. `out_in`: the last (weights `[E, N, D]`,
    activations `[T, D]`). `in_out`: the one before it (weights `[E, D, N]`). tiling: the order of prepacked weights
    (logically `out_in`). None: not prepacked.
    """

    format: Format
    layout: str = "out_in"
    tiling: Tiling | None = None

    def __post_init__(self) -> None:
        require_kind("format", self.format, Format)
        require_choice("layout", self.layout, WEIGHT_LAYOUTS)
        require_kind("tiling", self.tiling, Tiling, optional=True)
        if self.tiling is None:
            return
        if self.layout != "out_in":
            raise InvalidInput(f"layout must be out_in with a tiling, got {self.layout}; prepack_weights transposes")
        reason = why_not_tileable(self.format)
        if reason is not None:
            raise InvalidInput(f"tiling must be None for {self.format}, got {self.tiling}; {reason}")


class QuantizedShapes(NamedTuple):
    """Shapes of the arrays. zero_points is None for formats without them."""

    values: tuple[int, ...]
    scales: tuple[int, ...]
    zero_points: tuple[int, ...] | None


def quantized_shapes(spec: QuantizedSpec, shape: Sequence[int]) -> QuantizedShapes:
    """Shapes of the arrays that hold a tensor of logical `shape` (`[..., N, D]` or, for `in_out`, `[..., D, N]`).

    Worked example, mxfp4 `out_in` of (8, 5760, 2880): values (8, 5760, 1440), scales (8, 5760, 90). fp8_block of (300,
    200): scales (3, 2). int4_g128_zp of (6, 256): values (6, 128), scales (6, 2), zero points (3, 2). Tiled: see
    `moe_core.formats.tiling`. Raises InvalidInput where the format's padding rule does not allow the shape.
    """
    format = spec.format
    sizes = tuple(int(size) for size in shape)
    if len(sizes) < 2:
        raise InvalidInput(f"shape must have at least 2 axes, got {sizes}; quantised tensors are matrices or stacks")
    if spec.tiling is not None:
        return _tiled_shapes(format, spec.tiling, sizes)
    rows, columns = sizes[-2:] if spec.layout == "out_in" else sizes[:-3:-1]
    per_byte = format.own_element.per_byte
    unit = per_byte if format.group_columns is None else format.group_columns
    if not format.allows_partial_groups:
        if columns % unit:
            reason = f"groups of {unit}" if format.group_columns else f"{per_byte} elements to a byte"
            raise InvalidInput(
                f"the input axis must be a multiple of {unit} for {format.name} ({reason}), got {columns} in {sizes}; "
                "pad it with zeros or choose another format"
            )
        if format.group_rows is not None and rows % format.group_rows:
            raise InvalidInput(
                f"the output axis must be a multiple of {format.group_rows} for {format.name}, got {rows} in {sizes}; "
                "pad it with zeros or choose another format"
            )

    def laid_out(rows: int, columns: int) -> tuple[int, ...]:
        return (*sizes[:-2], *((rows, columns) if spec.layout == "out_in" else (columns, rows)))

    groups = _count(columns, format.group_columns)
    return QuantizedShapes(
        values=laid_out(rows, columns // per_byte),
        scales=laid_out(_count(rows, format.group_rows), groups),
        zero_points=laid_out(-(-rows // per_byte), groups) if format.zero_points else None,
    )


def _tiled_shapes(format: Format, tiling: Tiling, sizes: tuple[int, ...]) -> QuantizedShapes:
    if sizes[-2:] != (tiling.rows, tiling.columns):
        raise InvalidInput(
            f"shape must end in {(tiling.rows, tiling.columns)}, the sizes of its tiling, got {sizes}; tile the weight "
            "itself"
        )
    block, lead = block_of(format), (*sizes[:-2], tiling.blocks)
    scales = (*lead, block.records(tiling.columns), BLOCK_ROWS * block.groups)
    values = (*lead, block.steps(tiling.columns), BLOCK_VALUES)
    return QuantizedShapes(values, scales, scales if format.zero_points else None)


def _count(size: int, group: int | None) -> int:
    """Groups along an axis; one for the whole axis, even if empty."""
    return 1 if group is None else -(-size // group)


@dataclass(frozen=True, eq=False)
class QuantizedTensor:
    """A tensor in a quantised format. Arrays are of any library (NumPy, torch, JAX), or `ArraySpec`s.

    Shapes for a logical tensor `[..., N, D]` in layout `out_in` (`in_out` swaps the last two axes of every array):

    - values `[..., N, D / elements per byte]`
    - scales `[..., N groups, D groups]`, 1 for a whole axis
    - zero_points uint8, for unsigned elements; 4-bit ones in pairs along the output axis, `[..., ceil(N / 2), D
      groups]`, where the last high nibble of an odd N is 0

    Per tensor fp8 weights of E experts have scales `[E, 1, 1]`, per token activations `[T, 1]`. For dtypes see
    `Format`, for tiled arrays `moe_core.formats.tiling`.

    Tensors of `ArraySpec`s compare and hash by their fields, all others by identity. Raises InvalidInput if the arrays
    disagree with the format.
    """

    spec: QuantizedSpec
    values: Any
    scales: Any
    zero_points: Any = None

    def __post_init__(self) -> None:
        require_kind("spec", self.spec, QuantizedSpec)
        format = self.format
        element = format.own_element
        _require_dtype("values", self.values, (element.dtype,), format)
        _require_dtype("scales", self.scales, format.scale_dtypes, format)
        shapes = quantized_shapes(self.spec, self.shape)
        if self.spec.tiling is not None:
            _require_shape("values", self.values, shapes.values, self)
        _require_shape("scales", self.scales, shapes.scales, self)
        if shapes.zero_points is None:
            if self.zero_points is not None:
                raise InvalidInput(f"zero_points must be None for {format.name}, got an array; choose a _zp format")
            return
        if self.zero_points is None:
            raise InvalidInput(f"zero_points must be an array for {format.name}, got None; pass it")
        _require_dtype("zero_points", self.zero_points, (element.dtype,), format)
        _require_shape("zero_points", self.zero_points, shapes.zero_points, self)

    @classmethod
    def unchecked(cls, spec: QuantizedSpec, values: Any, scales: Any, zero_points: Any = None) -> QuantizedTensor:
        """The same bundle around anything, such as tangents or axis numbers of a transformation."""
        tensor = object.__new__(cls)
        for name, value in (("spec", spec), ("values", values), ("scales", scales), ("zero_points", zero_points)):
            object.__setattr__(tensor, name, value)
        return tensor

    @property
    def _described(self) -> tuple[Any, ...] | None:
        return (self.spec, self.values, self.scales, self.zero_points) if isinstance(self.values, ArraySpec) else None

    def __eq__(self, other: object) -> bool:
        if self is other or not isinstance(other, QuantizedTensor):
            return self is other
        return self._described is not None and self._described == other._described

    def __hash__(self) -> int:
        return hash(self._described or id(self))

    @property
    def format(self) -> Format:
        return self.spec.format

    @property
    def layout(self) -> str:
        return self.spec.layout

    @property
    def shape(self) -> tuple[int, ...]:
        """The logical shape, which `dequantize` gives."""
        if (tiling := self.spec.tiling) is not None:
            if len(self.values.shape) < 3:
                raise InvalidInput(
                    f"values of a tiled tensor must have at least 3 axes (blocks, steps, {BLOCK_VALUES}), got "
                    f"{tuple(self.values.shape)}; pass what prepack_weights gives"
                )
            # Leading axes may be symbols of a compiler.
            return (*tuple(self.values.shape)[:-3], tiling.rows, tiling.columns)
        sizes = [int(size) for size in self.values.shape]
        if len(sizes) < 2:
            raise InvalidInput(
                f"values must have at least 2 axes, got {tuple(sizes)}; pass a matrix or a stack of them"
            )
        sizes[-1 if self.layout == "out_in" else -2] *= self.format.own_element.per_byte
        return tuple(sizes)

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        arrays = (array for array in (self.values, self.scales, self.zero_points) if array is not None)
        return sum(math.prod(array.shape) * itemsize(canonical(array.dtype)) for array in arrays)

    def __str__(self) -> str:
        sizes, tiling = getattr(self.values, "shape", None), self.spec.tiling
        if not isinstance(sizes, tuple) or len(sizes) < (2 if tiling is None else 3):
            # Leaves of a transformation (`unchecked`) may lack axes.
            return f"{self.format.name} {self.layout} of {type(self.values).__name__}"
        tiled = "" if tiling is None else f" tiled in order {tiling.order}"
        return f"{self.format.name}{list(self.shape)} {self.layout}{tiled}"


def quantized_specs(spec: QuantizedSpec, shape: Sequence[int], scale_dtype: str | None = None) -> QuantizedTensor:
    """A quantised tensor of `ArraySpec`s. scale_dtype: None: the quantisers' choice."""
    values, scales, points = quantized_shapes(spec, shape)
    dtype, scales = spec.format.own_element.dtype, ArraySpec(scales, scale_dtype or spec.format.scale_dtypes[0])
    return QuantizedTensor(spec, ArraySpec(values, dtype), scales, points and ArraySpec(points, dtype))


def _require_dtype(name: str, array: Any, allowed: tuple[str, ...], format: Format) -> None:
    if not hasattr(array, "shape") or not hasattr(array, "dtype"):
        raise InvalidInput(f"{name} must be an array, got {type(array).__name__}; pass the array or its ArraySpec")
    try:
        dtype = canonical(array.dtype)
    except InvalidInput:
        dtype = str(array.dtype)
    if dtype not in allowed:
        raise InvalidInput(
            f"{name} of {format.name} must be {' or '.join(allowed)}, got {dtype}; pass the arrays of that format"
        )


def _require_shape(name: str, array: Any, wanted: tuple[int, ...], tensor: QuantizedTensor) -> None:
    if tuple(array.shape) != wanted:
        raise InvalidInput(
            f"{name} of {tensor} must be {wanted}, got {tuple(array.shape)}; check the layout and the group sizes of "
            "the format"
        )
