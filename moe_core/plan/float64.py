"""Float64 on the reference engine, for checks of gradients: in its plans and twins `float32` stands for float64."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from moe_core.base import ArraySpec, Target
from moe_core.errors import InvalidInput, Unsupported
from moe_core.plan.steps import LaunchPlan

Result = TypeVar("Result")
_FLOATS = ("float32", "float16", "bfloat16", "float64", "float8_e4m3fn")


def require_one_precision(dtypes: Iterable[tuple[str, str]]) -> None:
    """Raise InvalidInput if only some float arrays are float64. dtypes: (name, dtype)."""
    dtypes = list(dtypes)
    floats = [(name, dtype) for name, dtype in dtypes if dtype in _FLOATS]
    wide = next((name for name, dtype in floats if dtype == "float64"), None)
    if wide is None:
        return
    named = [name for name, _ in dtypes]
    stored = next((name for name in named if name.endswith((".values", ".scales", ".tiled_values"))), None)
    if stored is not None:
        raise Unsupported(
            f"float64 is not there beside quantised weights, got {wide} in float64 with {stored}; cast to float32, or "
            "dequantise the weights"
        )
    added = next((name for name in named if name.startswith("into.")), None)
    if added is not None:
        raise Unsupported(
            f"main_grad is not there in float64, as its sums are float32, got {wide} in float64; leave main_grad out"
        )
    for name, dtype in floats:
        if dtype != "float64":
            raise InvalidInput(f"{name} must be float64 like {wide}, got {dtype}; cast every array or none")


def refuse_float64(wide: bool) -> None:
    """Raise Unsupported for float64 rows of experts on several ranks."""
    if wide:
        raise Unsupported(
            "float64 is not there for experts on several ranks, got x in float64; cast to float32, or check gradients "
            "on one rank"
        )


def any_precision(planner: Callable[..., Result]) -> Callable[..., Result]:
    """Let a planner take float64 arrays on the reference engine. Raises Unsupported elsewhere."""

    @functools.wraps(planner)
    def plan(*arguments: Any, **keywords: Any) -> Result:
        wide: list[ArraySpec] = []
        narrow_arguments, narrow_keywords = _narrow(arguments, wide), _narrow(keywords, wide)
        if not wide:
            return planner(*arguments, **keywords)
        values = [*arguments, *keywords.values()]
        target = next(one for one in values if isinstance(one, Target))
        if target.kind != "reference":
            raise Unsupported(
                f"float64 runs on the CPU's reference engine alone, which checks of gradients need, got {wide[0]} for "
                f"{target}; cast the arrays to float32, or move them to the CPU and call under cpu_engine('reference')"
            )
        if "float32" in (keywords.get("out_dtype"), *(getattr(one, "out_dtype", None) for one in values)):
            raise InvalidInput("out_dtype must be left out for float64 arrays, got float32; cast the result")
        if keywords.get("out_dtype") == "float64":
            narrow_keywords["out_dtype"] = None
        return _widen(planner(*narrow_arguments, **narrow_keywords))

    return plan


def _narrow(value: Any, wide: list[ArraySpec]) -> Any:
    if isinstance(value, ArraySpec):
        if value.dtype != "float64":
            return value
        wide.append(value)
        return dataclasses.replace(value, dtype="float32")
    if isinstance(value, dict):
        return {name: _narrow(one, wide) for name, one in value.items()}
    if type(value) in (tuple, list):
        return type(value)(_narrow(one, wide) for one in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if field.init}
        changed = {name: new for name, one in fields.items() if (new := _narrow(one, wide)) is not one}
        return dataclasses.replace(value, **changed) if changed else value
    return value


def _widen(planned: Any) -> Any:
    if isinstance(planned, tuple):
        return tuple(map(_widen, planned))
    if isinstance(planned, LaunchPlan):
        parts = {part: _widen(getattr(planned, part)) for part in ("inputs", "outputs", "scratch")}
        return dataclasses.replace(planned, **parts)
    spec = planned.spec
    if spec.dtype != "float32":
        return planned
    return dataclasses.replace(planned, spec=dataclasses.replace(spec, dtype="float64"))
