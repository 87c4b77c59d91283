"""Options of the operators as one canonical string, which under `torch.compile` is a constant of the graph."""

from __future__ import annotations

import functools
import operator
from typing import Any

import torch

from moe_core import formats, specs
from moe_core.base import codec, dtypes
from moe_core.base.checks import is_derived, shown
from moe_core.errors import InvalidInput
from moe_torch.bridge.private import constant_result

_NAMES = "float32 float16 bfloat16 float64 float8_e4m3fn int64 int32 int16 int8 uint64 uint32 uint16 uint8 bool"
TORCH_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in _NAMES.split()}
DTYPE_NAMES: dict[torch.dtype, str] = {dtype: name for name, dtype in TORCH_DTYPES.items()}


@functools.lru_cache(maxsize=4096, typed=True)
def _dumps(*values: Any) -> str:
    return codec.dumps(values)


@functools.lru_cache(maxsize=4096)
def decode(text: str) -> tuple[Any, ...]:
    return codec.loads(text)


#: id of a spec -> the spec, which keeps the id in use, and its text. Hashing the spec would take a microsecond.
_texts: dict[int, tuple[Any, str]] = {}
_TEXTS_LIMIT = 256


def encode(*values: Any) -> str:
    """Encode specs, integers, strings and None. Equal values give equal strings."""
    if torch.compiler.is_compiling():
        return _constant_text(_flatten(values))
    if len(values) != 1:
        return _dumps(*values)
    known = _texts.get(id(values[0]))
    if known is not None:
        return known[1]
    text = _dumps(*values)
    # Values are hashable and so do not change.
    if len(_texts) >= _TEXTS_LIMIT:
        _texts.clear()
    _texts[id(values[0])] = (values[0], text)
    return text


def _flatten(value: Any) -> Any:
    """Return nested tuples of constants for Dynamo: `RouterSpec(2)` -> `("RouterSpec", 2, "softmax", ...)`. Dynamo
    would make a changed int or float symbolic. `operator.index` and `float.hex` make it a guarded constant."""
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, int):
        return operator.index(value)
    if isinstance(value, float):
        return ("float", value.hex())
    if isinstance(value, tuple):
        return ("tuple", *[_flatten(item) for item in value])
    return (type(value).__name__, *[_flatten(getattr(value, name)) for name in value.__match_args__])


def _unflatten(flat: Any) -> Any:
    if not isinstance(flat, tuple):
        return flat
    kind, *items = flat
    if kind == "float":
        return float.fromhex(items[0])
    values = [_unflatten(item) for item in items]
    return tuple(values) if kind == "tuple" else getattr(formats if hasattr(formats, kind) else specs, kind)(*values)


@constant_result
def _constant_text(flat: tuple[Any, ...]) -> str:
    return codec.dumps(_unflatten(flat))


def require_instance(name: str, value: object, wanted: type | tuple[type, ...]) -> None:
    kinds = wanted if isinstance(wanted, tuple) else (wanted,)
    if type(value) not in kinds and not is_derived(value, kinds):
        names = " or ".join(kind.__name__ for kind in kinds)
        raise InvalidInput(f"{name} must be a {names}, got {type(value).__name__}; build one from moe_torch")


def dtype_name(name: str, dtype: torch.dtype | str | None) -> str | None:
    if dtype is None or (isinstance(dtype, str) and dtype.removeprefix("torch.") in TORCH_DTYPES):
        return dtype
    if not isinstance(dtype, torch.dtype) or dtype not in DTYPE_NAMES:
        allowed = ", ".join(dtypes.MATMUL_DTYPES)
        raise InvalidInput(f"{name} must be a torch dtype, one of {allowed}, got {shown(dtype)}; pass one of these")
    return DTYPE_NAMES[dtype]


@functools.lru_cache(maxsize=4096, typed=True)
def _checked_layout(*sizes: Any) -> specs.LayoutSpec:
    return specs.LayoutSpec(*sizes)


def layout_spec(num_tokens: int | torch.SymInt, *sizes: int | None) -> specs.LayoutSpec:
    """Make a LayoutSpec of its fields in order. In traced code it is made field by field, because its checks would
    put guards on a symbolic number of tokens. The operator checks the sizes when it runs."""
    if not torch.compiler.is_compiling() and not isinstance(num_tokens, torch.SymInt):
        return _checked_layout(num_tokens, *sizes)
    layout = object.__new__(specs.LayoutSpec)
    for name, size in zip(specs.LayoutSpec.__match_args__, (num_tokens, *sizes), strict=False):
        object.__setattr__(layout, name, size)
    return layout
