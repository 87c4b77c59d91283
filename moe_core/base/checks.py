"""Checks of single options, which raise InvalidInput with the name, the expectation, the value and the fix."""

from __future__ import annotations

import math
from typing import Any

from moe_core.base import dtypes
from moe_core.errors import InvalidInput

_NO_NUMBERS = (bool, str, bytes, list, tuple, dict, type(None))


def require_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    """Raise InvalidInput unless `value` is one of `choices`."""
    if value not in choices:
        raise InvalidInput(f"{name} must be one of {', '.join(choices)}, got {value!r}; name one of these")


def require_wanted(wanted: tuple[str, ...], names: tuple[str, ...]) -> None:
    """Raise InvalidInput unless the gradients asked for, `wanted`, are some of those there are, each once."""
    if not wanted or not set(wanted) <= set(names) or len(set(wanted)) != len(wanted):
        raise InvalidInput(f"wanted must name at least one of {', '.join(names)}, each once, got {wanted}; correct it")


def require_at_least(name: str, value: object, least: int) -> None:
    """Raise InvalidInput unless `value` is an int of at least `least` (booleans are refused)."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise InvalidInput(f"{name} must be an integer of at least {least}, got {value!r}; pass such a number")


def require_flag(name: str, value: object) -> None:
    """Raise InvalidInput unless `value` is True or False."""
    if not isinstance(value, bool):
        raise InvalidInput(f"{name} must be True or False, got {value!r}; pass one of them")


def require_flags(options: object, *names: str) -> None:
    """`require_flag` for several fields of a dataclass."""
    for name in names:
        require_flag(name, getattr(options, name))


def set_matmul_dtype(options: object, name: str, optional: bool = False) -> None:
    """Make a dataclass field canonical; InvalidInput unless it is a matmul dtype (or None where optional)."""
    if getattr(options, name) is not None or not optional:
        object.__setattr__(options, name, dtypes.canonical(getattr(options, name)))
        require_choice(name, getattr(options, name), dtypes.MATMUL_DTYPES)


def require_kind(name: str, value: object, kind: type, optional: bool = False) -> None:
    """Raise InvalidInput unless `value` is a `kind` (or None where optional)."""
    if not isinstance(value, kind) and not (optional and value is None):
        article = "an" if kind.__name__[0] in "AEIOU" else "a"
        wanted = f"{article} {kind.__name__}{' or None' if optional else ''}"
        raise InvalidInput(f"{name} must be {wanted}, got {type(value).__name__}; build one from {kind.__module__}")


def finite_float(name: str, value: object) -> float:
    """`value` as a float, -0.0 as 0.0; raises InvalidInput unless it is a finite number."""
    number: Any = value
    # Kinds that are refused, not those that are taken: a compiler's symbolic number is none of Python's.
    if isinstance(number, _NO_NUMBERS) or not -math.inf < number < math.inf:
        raise InvalidInput(f"{name} must be finite, got {value!r}; pass a finite number")
    return float(number) + 0.0
