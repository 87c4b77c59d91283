"""Differentiate ops by a rule for each call, inside primitives that batch them.

An undifferentiated call is only its custom call. In reverse mode the forward saves what the backward reads, and the
backward is usually one custom call. Forward mode and second derivatives run in JAX's own operations and grouped
matmuls (`Rule.composed`).

`vmap` over rows makes them the rows of one call, if a rule is `folded`, and also its gradients are then one call.
`vmap` over experts makes them the experts of one call, if a rule is `stacked`. Otherwise, and for `vmap` of a gradient,
each element has a call.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import NamedSharding, PartitionSpec

from moe_jax.bridge import placement

Names = tuple[str, ...]
Arrays = dict[str, Any]


@dataclass(frozen=True)
class Rule:
    """The static part of a call, and its derivative. flowing: differentiable results."""

    names: Names
    results: Names
    flowing: Names

    def differentiable(self) -> Names:
        raise NotImplementedError

    def refuse(self, asked: list[str]) -> None:
        """Raise Unsupported for a requested gradient that does not exist."""

    def forward(self, arrays: Mapping[str, Any], save: bool) -> Arrays:
        """The results by name, plus with `save` the outputs named by `kept`."""
        raise NotImplementedError

    def kept(self) -> Names:
        """Outputs that a forward adds for the backward."""
        return ()

    def outputs(self, save: bool) -> Names:
        return tuple(dict.fromkeys((*self.results, *self.kept()))) if save else self.results

    @property
    def flowing_results(self) -> Names:
        return tuple(name for name in self.results if name in self.flowing)

    def saved(self, outputs: Arrays) -> Arrays:
        """The outputs of the forward that `gradients` and `composed` read."""
        return {}

    def by_row(self) -> frozenset[str]:
        """Arrays whose rows a batch may follow."""
        return frozenset()

    def folded(self, size: int) -> Any:
        """The rule of `size` times as many rows, None if a row's results depend on others."""

    def unfolded(self, size: int, arrays: Arrays, results: Arrays) -> Arrays:
        """Split results of the folded rule into those `[size, ...]` of each element."""
        return {name: array.reshape(size, array.shape[0] // size, *array.shape[1:]) for name, array in results.items()}

    def stacked(self, size: int, arrays: Arrays, split: frozenset[str]) -> Arrays | None:
        """The results `[size, ...]` of a batch whose split arrays are more than rows, None for a call of each."""
        return None

    def gradients(self, arrays: Arrays, saved: Arrays, upstream: Arrays, asked: Names) -> Arrays:
        """At least the requested gradients. upstream: of flowing results that have one."""
        raise NotImplementedError

    def composed(self, arrays: Arrays, saved: Arrays) -> Arrays:
        """The flowing results in operations that have every derivative. Raises Unsupported if there are none."""
        raise NotImplementedError

    def tangents(self, arrays: Arrays, saved: Arrays, moving: Arrays) -> Arrays:
        """Tangents of flowing results from tangents of arrays."""
        held = {name: arrays[name] for name in moving}
        return jax.jvp(lambda given: self.composed(arrays | given, saved), (held,), (moving,))[1]

    def repeated(self, arrays: Arrays, saved: Arrays, upstream: Arrays, asked: Names) -> Arrays:
        """`gradients` in operations that have every derivative."""
        held = {name: arrays[name] for name in asked}
        results, pull = jax.vjp(lambda given: self.composed(arrays | given, saved), held)
        return pull({name: upstream.get(name, jnp.zeros_like(one)) for name, one in results.items()})[0]


def _parted(operands: Sequence[Any], *groups: Names) -> tuple[Arrays, ...]:
    rest = iter(operands)
    return tuple(dict(zip(names, itertools.islice(rest, len(names)), strict=True)) for names in groups)


def _forward(*arrays: Any, rule: Rule, everywhere: bool, save: bool) -> tuple[Any, ...]:
    with placement.everywhere(everywhere):
        outputs = rule.forward(dict(zip(rule.names, arrays, strict=True)), save)
    return tuple(outputs[name] for name in rule.outputs(save))


def _moved(*operands: Any, rule: Rule, everywhere: bool, kept: Names, moving: Names, avals: Any) -> tuple[Any, ...]:
    """Tangents of flowing results from arrays, saved outputs and tangents of the moving arrays."""
    with placement.everywhere(everywhere):
        arrays, saved, tangents = _parted(operands, rule.names, kept, moving)
        moved = rule.tangents(arrays, saved, tangents)
    return tuple(moved[name] for name in rule.flowing_results)


def _returned(
    *operands: Any, rule: Rule, everywhere: bool, kept: Names, moving: Names, asked: Names, again: bool
) -> tuple[Any, ...]:
    """Gradients of the requested arrays from arrays, saved outputs and gradients of the moving results."""
    with placement.everywhere(everywhere):
        arrays, saved, upstream = _parted(operands, rule.names, kept, moving)
        made = (rule.repeated if again else rule.gradients)(arrays, saved, upstream, asked)
    return tuple(made[name] for name in asked)


def _mapped(function: Callable[..., Any]) -> Callable[..., Any]:
    """Jitted with static keywords. levels: for each vmap around it, outermost first, the operands with an axis 0."""

    def run(*operands: Any, levels: tuple[tuple[bool, ...], ...], **static: Any) -> tuple[Any, ...]:
        call = functools.partial(function, **static)
        for level in reversed(levels):
            call = jax.vmap(call, in_axes=tuple(0 if is_split else None for is_split in level))
        return call(*operands)

    # Inlined into an outer trace, so that programs contain only the custom calls.
    names = ("levels", *inspect.getfullargspec(function).kwonlyargs)
    return jax.jit(run, static_argnames=names, inline=True)


_run, _run_moved, _run_returned = _mapped(_forward), _mapped(_moved), _mapped(_returned)


def _primitive(name: str, run: Callable[..., Any]) -> Primitive:
    primitive = Primitive(name)
    primitive.multiple_results = True

    def results(*arrays: Any, avals: Any = None, **static: Any) -> list[Any]:
        if avals is not None:
            return list(avals)
        structs = [jax.ShapeDtypeStruct(array.shape, array.dtype, **_placed(array)) for array in arrays]
        like, shapes = arrays[0], jax.eval_shape(functools.partial(run, **static), *structs)
        sharding = NamedSharding(like.sharding.mesh, PartitionSpec())
        return [
            like.update(
                shape=one.shape,
                dtype=one.dtype,
                weak_type=False,
                sharding=sharding.update(spec=PartitionSpec(*(None,) * len(one.shape))),
            )
            for one in shapes
        ]

    primitive.def_impl(run)
    primitive.def_abstract_eval(results)
    mlir.register_lowering(primitive, mlir.lower_fun(run, multiple_results=True))
    return primitive


def _placed(array: Any) -> dict[str, Any]:
    varying = array.manual_axis_type
    return {"sharding": array.sharding, "manual_axis_type": varying} if varying.varying else {}


_call = _primitive("moebius_call", _run)
#: Tangents of a call. Its transpose is the call's backward, so reverse mode runs that.
_tangent = _primitive("moebius_tangent", _run_moved)
_backward = _primitive("moebius_backward", _run_returned)


def _differentiate(
    primals: Sequence[Any], tangents: Sequence[Any], *, rule: Rule, save: bool, levels: Any, everywhere: bool
) -> tuple[list[Any], list[Any]]:
    pairs = zip(rule.names, tangents, strict=True)
    moving = {name: tangent for name, tangent in pairs if not isinstance(tangent, ad.Zero)}
    rule.refuse(list(moving))
    moving = {name: moving[name] for name in rule.differentiable() if name in moving}
    names, saves = rule.outputs(save), save or bool(moving)
    values = _call.bind(*primals, rule=rule, save=saves, levels=levels, everywhere=everywhere)
    outputs, flowing, moved = dict(zip(rule.outputs(saves), values, strict=True)), rule.flowing_results, {}
    if moving:
        saved = rule.saved(outputs)
        split = [dict(zip(rule.names, level, strict=True)) for level in levels]
        deeper = tuple((*level.values(), *[True] * len(saved), *map(level.get, moving)) for level in split)
        static = {"rule": rule, "levels": deeper, "kept": tuple(saved), "moving": tuple(moving)}
        avals = tuple(jax.typeof(outputs[name]).to_tangent_aval() for name in flowing)
        values = _tangent.bind(
            *primals, *saved.values(), *moving.values(), **static, avals=avals, everywhere=everywhere
        )
        moved = dict(zip(flowing, values, strict=True))
    zeros = {name: ad.Zero(jax.typeof(outputs[name]).to_tangent_aval()) for name in names}
    return [outputs[name] for name in names], [moved.get(name, zeros[name]) for name in names]


def _differentiate_again(
    primitive: Primitive, run: Callable[..., Any], primals: Sequence[Any], tangents: Sequence[Any], **static: Any
) -> tuple[list[Any], list[Any]]:
    """Saved outputs are functions of the arrays, from which the repeated computation starts."""
    results, first = primitive.bind(*primals, **static), len(static["rule"].names)
    saved = range(first, first + len(static["kept"]))
    moving = [n for n, one in enumerate(tangents) if not (isinstance(one, ad.Zero) or n in saved)]
    if not moving:
        return results, [ad.Zero(jax.typeof(one).to_tangent_aval()) for one in results]
    static |= {"again": True} if "again" in static else {}

    def of(*given: Any) -> Any:
        operands = list(primals)
        for number, array in zip(moving, given, strict=True):
            operands[number] = array
        return run(*operands, **static)

    given, along = ([side[number] for number in moving] for side in (primals, tangents))
    return results, jax.jvp(of, given, along)[1]


def _go_back(
    gradients: Sequence[Any], *operands: Any, moving: Names, avals: Any, levels: Any, **static: Any
) -> list[Any]:
    rule: Rule = static["rule"]
    count = len(operands) - len(moving)
    linear = [ad.is_undefined_primal(one) for one in operands[count:]]
    asked = tuple(itertools.compress(moving, linear))
    pairs = zip(rule.flowing_results, gradients, strict=True)
    upstream = {name: gradient for name, gradient in pairs if not isinstance(gradient, ad.Zero)}
    made: list[Any] = [None] * len(asked)
    if upstream:
        static |= {"moving": tuple(upstream), "asked": asked, "again": False}
        static["levels"] = tuple((*level[:count], *[True] * len(upstream)) for level in levels)
        made = list(_backward.bind(*operands[:count], *upstream.values(), **static))
        for number, name in enumerate(asked):
            # An array without the axis of a vmap has the sum of its elements' gradients.
            index = rule.names.index(name)
            whole = tuple(depth for depth, level in enumerate(levels) if not level[index])
            made[number] = made[number].sum(axis=whole) if whole else made[number]
    rest = iter(made)
    return [*[None] * count, *(next(rest) if is_linear else None for is_linear in linear)]


ad.primitive_jvps[_call] = _differentiate
ad.primitive_jvps[_tangent] = functools.partial(_differentiate_again, _tangent, _run_moved)
ad.primitive_jvps[_backward] = functools.partial(_differentiate_again, _backward, _run_returned)
ad.primitive_transposes[_tangent] = _go_back


def _batch_each(primitive: Primitive, arrays: Sequence[Any], axes: Sequence[Any], **static: Any) -> Any:
    front = [one if axis is None else jnp.moveaxis(one, axis, 0) for one, axis in zip(arrays, axes, strict=True)]
    static["levels"] = (tuple(axis is not None for axis in axes), *static["levels"])
    results = primitive.bind(*front, **static)
    return results, [0] * len(results)


def _batch_tangent(arrays: Sequence[Any], axes: Sequence[Any], **static: Any) -> Any:
    results = jax.vmap(functools.partial(_run_moved, **static), in_axes=tuple(axes))(*arrays)
    return results, [0] * len(results)


def _batch(arrays: Sequence[Any], axes: Sequence[int | None], *, rule: Rule, **static: Any) -> Any:
    size = next(array.shape[axis] for array, axis in zip(arrays, axes, strict=True) if axis is not None)
    rows, split = rule.by_row(), [name for name, axis in zip(rule.names, axes, strict=True) if axis is not None]
    is_plain = not static["levels"] and not static["save"]
    folded = rule.folded(size) if is_plain and rows.issuperset(split) else None
    if folded is None:
        pairs = zip(rule.names, arrays, axes, strict=True)
        first = {name: one if axis is None else jnp.moveaxis(one, axis, 0) for name, one, axis in pairs}
        with placement.everywhere(static["everywhere"]):
            made = rule.stacked(size, first, frozenset(split)) if is_plain else None
        if made is None:
            return _batch_each(_call, arrays, axes, rule=rule, **static)
        return [made[name] for name in rule.results], [0] * len(rule.results)
    flat: dict[str, Any] = {}
    for name, array, axis in zip(rule.names, arrays, axes, strict=True):
        if name in rows:
            every = jnp.broadcast_to(array, (size, *array.shape)) if axis is None else jnp.moveaxis(array, axis, 0)
            array = every.reshape(size * every.shape[1], *every.shape[2:])
        flat[name] = array
    values = _call.bind(*flat.values(), rule=folded, **static)
    results = dict(zip(rule.results, values, strict=True))
    of_elements = rule.unfolded(size, flat, results)
    return [of_elements[name] for name in rule.results], [0] * len(rule.results)


batching.primitive_batchers[_call] = _batch
batching.primitive_batchers[_tangent] = _batch_tangent
batching.primitive_batchers[_backward] = functools.partial(_batch_each, _backward)


def differentiated(rule: Rule, arrays: Iterable[Any]) -> dict[str, Any]:
    arrays = varying_alike(arrays)
    everywhere = placement.may_run_everywhere(arrays)
    static = {"rule": rule, "everywhere": everywhere, "save": False, "levels": ()}
    is_traced = any(isinstance(array, Tracer) for array in arrays)
    results = _call.bind(*map(jnp.asarray, arrays), **static) if is_traced else _run(*arrays, **static)
    return dict(zip(rule.results, results, strict=True))


def more_rows(spec: Any, size: int) -> Any:
    """An ArraySpec of `size` times as many rows. None stays."""
    return None if spec is None else dataclasses.replace(spec, shape=(size * spec.shape[0], *spec.shape[1:]))


def varying_alike(arrays: Iterable[Any]) -> list[Any]:
    """Make arrays vary over the mesh axes of results, as gradients under shard_map do. JAX sums other gradients."""
    arrays = list(arrays)
    axes = [jax.typeof(array).manual_axis_type.varying for array in arrays]
    every = frozenset().union(*axes)
    return [
        array if varying == every else jax.lax.pcast(array, tuple(every - varying), to="varying")
        for array, varying in zip(arrays, axes, strict=True)
    ]
