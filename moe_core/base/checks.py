"""Checks of single options. They raise InvalidInput."""

from __future__ import annotations

import enum
import math
from typing import Any

import numpy as np

from moe_core.base import dtypes
from moe_core.errors import InvalidInput

_NO_NUMBERS = (bool, str, bytes, list, tuple, dict, type(None), np.ndarray)
_CLOSED = ("moe_core.specs", "moe_core.formats")
#: The largest fp32 number: kernels take fp32.
_LARGEST = float(np.finfo(np.float32).max)


def shown(value: object) -> str:
    """The text of a value for messages: of arrays only the type, because their numbers fill pages."""
    if hasattr(value, "shape") and not isinstance(value, np.generic):
        return f"an array ({type(value).__name__})"
    return repr(value)


def require_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if not isinstance(value, str) or value not in choices:
        raise InvalidInput(f"{name} must be one of {', '.join(choices)}, got {shown(value)}; name one of these")


def require_wanted(wanted: tuple[str, ...], names: tuple[str, ...]) -> None:
    """Raise InvalidInput unless `wanted` are some of `names`, each once."""
    if not wanted or not set(wanted) <= set(names) or len(set(wanted)) != len(wanted):
        raise InvalidInput(f"wanted must name at least one of {', '.join(names)}, each once, got {wanted}; correct it")


def require_at_least(name: str, value: object, least: int) -> None:
    """Raise InvalidInput unless `value` is an int (no boolean) of at least `least`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise InvalidInput(f"{name} must be an integer of at least {least}, got {shown(value)}; pass such a number")


def as_integer(name: str, value: object, least: int, below: int | None = None) -> int:
    """`value`, also one of NumPy's, as an int in `[least, below)`."""
    # Plans hold plain integers.
    number: Any = int(value) if isinstance(value, (np.integer, enum.IntEnum)) else value
    require_at_least(name, number, least)
    if below is not None and number >= below:
        raise InvalidInput(f"{name} must be below {below}, got {shown(value)}; pass a smaller number")
    return number


def set_integer(options: object, name: str, least: int, below: int | None = None) -> None:
    object.__setattr__(options, name, as_integer(name, getattr(options, name), least, below))


def require_flag(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise InvalidInput(f"{name} must be True or False, got {shown(value)}; pass one of them")


def require_flags(options: object, *names: str) -> None:
    for name in names:
        require_flag(name, getattr(options, name))


def set_matmul_dtype(options: object, name: str, optional: bool = False) -> None:
    """Make a dataclass field the canonical name of a matmul dtype (or None where optional)."""
    if getattr(options, name) is not None or not optional:
        object.__setattr__(options, name, dtypes.canonical(getattr(options, name)))
        require_choice(name, getattr(options, name), dtypes.MATMUL_DTYPES)


def is_derived(value: object, kinds: tuple[type, ...]) -> bool:
    """True for an allowed subclass of one of `kinds`. Specs, formats and bundles allow none."""
    return isinstance(value, kinds) and not any(kind.__module__.startswith(_CLOSED) for kind in kinds)


def require_kind(name: str, value: object, kind: type, optional: bool = False) -> None:
    if type(value) is not kind and not is_derived(value, (kind,)) and not (optional and value is None):
        article = "an" if kind.__name__[0] in "AEIOU" else "a"
        wanted = f"{article} {kind.__name__}{' or None' if optional else ''}"
        raise InvalidInput(f"{name} must be {wanted}, got {type(value).__name__}; build one from {kind.__module__}")


def finite_float(name: str, value: object) -> float:
    number: Any = value
    # List refused kinds rather than accepted ones: a compiler's symbolic number has no Python type.
    try:
        # A compiler's symbolic number is a float that has no attributes.
        is_trained = not isinstance(value, int | float) and getattr(value, "requires_grad", False)
        is_finite = not isinstance(value, _NO_NUMBERS) and -math.inf < number < math.inf
        number = float(number) + 0.0 if not is_trained and -_LARGEST <= number <= _LARGEST else number
    except (TypeError, ValueError, RuntimeError):  # complex numbers, and arrays of several libraries
        is_finite, is_trained = False, hasattr(value, "aval")
    if is_trained:
        raise InvalidInput(f"{name} must be a number, because options have no gradient, got {shown(value)}; pass one")
    if not is_finite:
        raise InvalidInput(f"{name} must be finite, got {shown(value)}; pass a finite number")
    if not -_LARGEST <= number <= _LARGEST:
        raise InvalidInput(f"{name} must be finite in float32, got {shown(value)}; pass a number up to {_LARGEST:.4g}")
    return number
