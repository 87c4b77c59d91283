"""Refuse programs in which XLA would move arrays of a call unasked. Only its compiler knows how arrays on automatic
axes are split: an identity asks it, and reports a JaxRuntimeError. Programs to export are not asked.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import jax
from jax.core import Tracer
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from moe_core.errors import Unsupported

#: In place of the axes that split a dimension: any.
_ANY = "*"


def is_hidden(array: Any, mesh: AbstractMesh) -> bool:
    """True if the type of an array does not show how it is split over the mesh."""
    kinds = zip(mesh.axis_types, mesh.axis_sizes, strict=True)
    return isinstance(array, Tracer) and any(kind == AxisType.Auto and size > 1 for kind, size in kinds)


def stays(array: Any, spec: PartitionSpec, name: str, fix: str) -> Any:
    """The array. Raises Unsupported in XLA's compiler if devices lack parts of it by spec. fix: ends the message."""
    entries = tuple(_names(entry) for entry in spec)
    return _bound(array, (*entries, *((),) * (array.ndim - len(entries))), name, fix)


_stays = Primitive("moebius_stays")
_stays.def_impl(lambda array, *, wanted, name, fix, asking: _checked(array, wanted, name, fix))
_stays.def_abstract_eval(lambda array, **static: array)
ad.primitive_jvps[_stays] = lambda primals, tangents, **static: (_stays.bind(*primals, **static), tangents[0])


def _bound(array: Any, wanted: tuple[Any, ...], name: str, fix: str) -> Any:
    # A jaxpr that inspects a sharding tells JAX to lower the program with its devices.
    shape = jax.ShapeDtypeStruct(array.shape, array.dtype)
    asking = jax.make_jaxpr(_asking(wanted, name, fix))(shape)
    return _stays.bind(array, wanted=wanted, name=name, fix=fix, asking=asking)


def _batched(arrays: Any, axes: Any, *, wanted: tuple[Any, ...], name: str, fix: str, asking: Any) -> Any:
    del asking
    return _bound(arrays[0], (*wanted[: axes[0]], _ANY, *wanted[axes[0] :]), name, fix), axes[0]


batching.primitive_batchers[_stays] = _batched


def _lower(context: mlir.LoweringRuleContext, array: Any, *, wanted: Any, name: str, fix: str, asking: Any) -> Any:
    del asking
    if not context.module_context.lowering_parameters.for_export:
        ask = mlir.lower_fun(_asking(wanted, name, fix), multiple_results=False)
        ask(context, array if any(wanted) else _source(array))
    return [array]


def _source(value: Any) -> Any:
    """The array that a program casts to this one, for example. XLA gathers before the cast."""
    while (made_by := getattr(value.owner, "name", "")).startswith("stablehlo.") and made_by != "stablehlo.custom_call":
        operands = value.owner.operands
        if len(operands) != 1:
            break
        value = operands[0]
    return value


mlir.register_lowering(_stays, _lower, cacheable=False)


def _asking(wanted: tuple[Any, ...], name: str, fix: str) -> Callable[[Any], Any]:
    def ask(array: Any) -> Any:
        jax.debug.inspect_array_sharding(array, callback=lambda sharding: _check(sharding, wanted, name, fix))
        return array

    return ask


def _checked(array: Any, wanted: tuple[Any, ...], name: str, fix: str) -> Any:
    """The array of an eager call, as a gradient traces it."""
    _check(array.sharding, wanted, name, fix)
    return array


def _check(sharding: Any, wanted: tuple[Any, ...], name: str, fix: str) -> None:
    if not isinstance(sharding, NamedSharding):
        return
    sizes, held = sharding.mesh.shape, tuple(map(_names, sharding.spec))
    for names, most in itertools.zip_longest(held, wanted, fillvalue=()):
        split = tuple(one for one in names if sizes[one] > 1)
        if most != _ANY and split != tuple(one for one in most if sizes[one] > 1)[: len(split)]:
            parts = f"split as {_spec(wanted)}" if any(wanted) else "whole on every device"
            raise Unsupported(f"{name} must be {parts}, got {_spec(held)}, so XLA would move it; {fix}")


def _names(entry: Any) -> tuple[str, ...]:
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def _spec(entries: tuple[Any, ...]) -> PartitionSpec:
    return PartitionSpec(*(entry or None for entry in entries))
