"""Quantised formats of matrices: rows are output channels or tokens, columns the axis that products sum over."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from moe_core.base import dtypes, plan_type
from moe_core.base.checks import require_at_least, require_choice, require_flag, require_kind
from moe_core.errors import InvalidInput


@dataclass(frozen=True)
class Element:
    """One stored number.

    Args:
        dtype: canonical dtype of the array that holds it.
        per_byte: elements in one element of that array (2: the even index in the low nibble).
        largest: the magnitude that amax is scaled to.
        top_exponent: floor(log2(largest)), for scales that are powers of two.
        zero_point: the code for 0 where a format stores no zero points.
        max_code: the largest code of unsigned integers.
    """

    name: str
    dtype: str
    per_byte: int
    largest: float
    top_exponent: int | None = None
    zero_point: int | None = None
    max_code: int | None = None


#: e2m1 and the 4-bit integers are packed in uint8, because frameworks disagree about 4-bit dtypes.
ELEMENTS = {
    element.name: element
    for element in (
        Element("e4m3", "float8_e4m3fn", 1, 448.0, top_exponent=8),
        Element("e2m1", "uint8", 2, 6.0, top_exponent=2),
        Element("int8", "int8", 1, 127.0),
        Element("uint8", "uint8", 1, 127.0, zero_point=128, max_code=255),
        Element("uint4", "uint8", 2, 7.0, zero_point=8, max_code=15),
    )
}
#: amax: max(amax, 1e-10) / largest. power_of_two: that, rounded up to a power of two; both stored as numbers.
#: floor: 2^(floor(log2 amax) - top_exponent). ceil: the smallest power of two with amax / scale <= largest. Both e8m0.
SCALE_RULES = ("amax", "power_of_two", "floor", "ceil")
_E8M0_RULES = ("floor", "ceil")
#: Checkpoints have scales of grouped integers in any of these. Kernels widen them exactly.
_INTEGER_SCALES = ("float32", "bfloat16", "float16")


@plan_type
@dataclass(frozen=True)
class Format:
    """How one tensor is quantised. Frozen, hashable, part of plans.

    Args:
        name: unique among registered formats.
        element: a name of ELEMENTS.
        group_rows: rows that share a scale. None: all.
        group_columns: likewise for columns.
        scale_rule: one of SCALE_RULES, for quantisers. Readers need only the kind of scales: e8m0 bytes (`floor`,
            `ceil`) or numbers.
        zero_points: the tensor has one per group (unsigned elements only).

    Groups of e4m3 with numbers as scales may be cut short at the end of either axis, as in DeepSeek's checkpoints:
    there are ceil(size / group) groups, and missing elements count as zeros. Every other format needs a multiple of
    group_columns columns, and two elements in each byte.
    """

    name: str
    element: str
    group_rows: int | None
    group_columns: int | None
    scale_rule: str = "amax"
    zero_points: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name.isidentifier():
            raise InvalidInput(f"name must be an identifier, got {self.name!r}; for example fp8_block")
        require_choice("element", self.element, tuple(ELEMENTS))
        require_choice("scale_rule", self.scale_rule, SCALE_RULES)
        require_flag("zero_points", self.zero_points)
        for name in ("group_rows", "group_columns"):
            if getattr(self, name) is not None:
                require_at_least(name, getattr(self, name), 1)
        codes = self.own_element
        if self.has_e8m0_scales and codes.top_exponent is None:
            raise InvalidInput(
                f"scale_rule must be amax or power_of_two for {self.element}, got {self.scale_rule!r}; e8m0 scales go "
                "with float elements"
            )
        if self.zero_points and codes.max_code is None:
            raise InvalidInput(
                f"zero_points must be False for {self.element}, got True; only unsigned integers have them"
            )
        if self.zero_points and self.group_rows != 1:
            raise InvalidInput(
                f"group_rows must be 1 with zero_points, which every row has of its own, got {self.group_rows}; choose "
                "1, or leave zero_points out"
            )
        if codes.per_byte > 1 and self.group_columns is not None and self.group_columns % codes.per_byte:
            raise InvalidInput(
                f"group_columns must be a multiple of {codes.per_byte} for {self.element}, got {self.group_columns}; a "
                "byte cannot belong to two groups"
            )

    @property
    def own_element(self) -> Element:
        return ELEMENTS[self.element]

    @property
    def has_e8m0_scales(self) -> bool:
        """True if scales are uint8 exponents: 2^(b - 127), 255 = NaN."""
        return self.scale_rule in _E8M0_RULES

    @property
    def scale_dtypes(self) -> tuple[str, ...]:
        """Canonical dtypes of scales, a quantiser's first."""
        if self.has_e8m0_scales:
            return ("uint8",)
        return _INTEGER_SCALES if self.own_element.max_code is not None else ("float32",)

    @property
    def allows_partial_groups(self) -> bool:
        """True if an axis may end with a shorter group."""
        return self.element == "e4m3" and not self.has_e8m0_scales

    @property
    def bits_per_element(self) -> int:
        """Bits of one element, scales not counted."""
        return 8 * dtypes.itemsize(self.own_element.dtype) // self.own_element.per_byte

    def splits_rows(self, rows: int) -> bool:
        """False where a group, or a byte of packed zero points, would hold one of the first `rows` rows and another."""
        if self.group_rows is None or rows % self.group_rows:
            return False
        return not self.zero_points or rows % self.own_element.per_byte == 0

    def __str__(self) -> str:
        return self.name


@plan_type
@dataclass(frozen=True)
class Scheme:
    """The formats of a quantised layer's weights and, before each product, activations.

    activations: None: not quantised (w4a16, w8a16). Their groups along the summed axis are the weights' or the whole
    axis. Schemes of the same formats are equal, because the arrays of a layer do not tell a name.
    """

    name: str
    weights: Format
    activations: Format | None = None

    def __post_init__(self) -> None:
        require_kind("weights", self.weights, Format)
        require_kind("activations", self.activations, Format, optional=True)
        ours = self.activations
        if ours is not None and ours.group_columns not in (None, self.weights.group_columns):
            raise InvalidInput(
                f"activations must have groups of {self.weights.group_columns} columns, like weights, or None, got "
                f"{ours.group_columns}; scales of both sides are applied together"
            )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Scheme) and self._formats == other._formats

    def __hash__(self) -> int:
        return hash(self._formats)

    @property
    def _formats(self) -> tuple[Format, Format | None]:
        return self.weights, self.activations

    def __str__(self) -> str:
        return self.name


_FORMATS: dict[str, Format] = {}
_SCHEMES: dict[str, Scheme] = {}


def register_format(format: Format) -> Format:
    """Register a format and return it. Raises InvalidInput if another one has its name."""
    return _register("format", format, Format, _FORMATS)


def register_scheme(scheme: Scheme) -> Scheme:
    """Register a scheme and return it. Raises InvalidInput if another one has its name."""
    return _register("scheme", scheme, Scheme, _SCHEMES)


def _register(what: str, value: Any, kind: type, known: dict[str, Any]) -> Any:
    require_kind(what, value, kind)
    if known.setdefault(value.name, value) != value:
        raise InvalidInput(f"name must be unique among {what}s, got {value.name!r} again; choose another")
    return value


def format_names() -> tuple[str, ...]:
    """Names of every registered format."""
    return tuple(_FORMATS)


def scheme_names() -> tuple[str, ...]:
    """Names of every registered scheme."""
    return tuple(_SCHEMES)


def format_named(name: str) -> Format:
    """The registered format. Raises InvalidInput."""
    require_choice("format", name, format_names())
    return _FORMATS[name]


def scheme_named(name: str) -> Scheme:
    """The registered scheme. Raises InvalidInput."""
    require_choice("scheme", name, scheme_names())
    return _SCHEMES[name]


def known_scheme(weights: Format, activations: Format | None) -> Scheme | None:
    """The registered scheme of these formats, or None."""
    matches = (scheme for scheme in _SCHEMES.values() if (scheme.weights, scheme.activations) == (weights, activations))
    return next(matches, None)
