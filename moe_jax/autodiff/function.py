"""One `jax.custom_vjp` that differentiates ops by a rule for each call, inside a primitive that batches them.

An undifferentiated call is only its custom call. In reverse mode the forward saves what the backward reads, and the
backward is usually one custom call. Second derivatives are refused (`moe_jax.bridge.calls`), unless a rule `repeats`.

`vmap` over rows makes them the rows of one call, if a rule is `folded`, and also its gradients are then one call.
Otherwise, and for `vmap` of a gradient, each element has a call.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import NamedSharding, PartitionSpec

from moe_jax.bridge import placement


@dataclass(frozen=True)
class Rule:
    """The static part of a call, and its derivative. flowing: differentiable results."""

    names: tuple[str, ...]
    results: tuple[str, ...]
    flowing: tuple[str, ...]
    #: True: `gradients` has gradients, and reads arguments only.
    repeats = False

    def differentiable(self) -> tuple[str, ...]:
        raise NotImplementedError

    def refuse(self, asked: list[str]) -> None:
        """Raise Unsupported for a requested gradient that does not exist."""

    def forward(self, arrays: Mapping[str, Any], save: bool) -> dict[str, Any]:
        """The results by name, plus with `save` the outputs that `saved` reads."""
        raise NotImplementedError

    def saved(self, outputs: dict[str, Any], save: bool) -> dict[str, Any]:
        """The outputs of the forward that `gradients` reads, in the same structure without `save`."""
        return {}

    def by_row(self) -> frozenset[str]:
        """Arrays whose rows a batch may follow."""
        return frozenset()

    def folded(self, size: int) -> Any:
        """The rule of `size` times as many rows, None if a row's results depend on others."""

    def unfolded(self, size: int, arrays: dict[str, Any], results: dict[str, Any]) -> dict[str, Any]:
        """Results `[size, ...]` of each element, from those of the folded rule."""
        return {name: array.reshape(size, array.shape[0] // size, *array.shape[1:]) for name, array in results.items()}

    def gradients(
        self, arrays: dict[str, Any], saved: dict[str, Any], upstream: dict[str, Any], asked: tuple[str, ...]
    ) -> dict[str, Any]:
        """At least the requested gradients. upstream: of flowing results that have one."""
        raise NotImplementedError


@dataclass(frozen=True)
class Saved:
    """Residuals of a forward. JAX may run one forward rule for several sets of differentiated arguments and read all
    residuals with the latest structure. So the structure is constant, and the shape of an array without elements
    encodes the requested gradients, which survives transformations."""

    arrays: dict[str, Any]
    outputs: dict[str, Any]
    asked: jax.Array


jax.tree_util.register_dataclass(Saved, data_fields=["arrays", "outputs", "asked"], meta_fields=[])


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _function(rule: Rule, everywhere: bool, *arrays: Any) -> tuple[Any, ...]:
    with placement.everywhere(everywhere):
        outputs = rule.forward(dict(zip(rule.names, arrays, strict=True)), save=False)
    return tuple(outputs[name] for name in rule.results)


def _forward_rule(rule: Rule, everywhere: bool, *primals: Any) -> tuple[tuple[Any, ...], Saved]:
    arrays = {name: primal.value for name, primal in zip(rule.names, primals, strict=True)}
    asked = [name for name, primal in zip(rule.names, primals, strict=True) if primal.perturbed]
    rule.refuse(asked)
    bits = sum(1 << index for index, name in enumerate(rule.differentiable()) if name in asked)
    with placement.everywhere(everywhere):
        if rule.repeats:
            outputs = dict(zip(rule.results, _function(rule, everywhere, *arrays.values()), strict=True))
        else:
            outputs = rule.forward(arrays, save=bits > 0)
    saved = Saved(arrays, rule.saved(outputs, bits > 0), jnp.zeros((0, bits), bool))
    return tuple(outputs[name] for name in rule.results), saved


def _backward_rule(rule: Rule, everywhere: bool, saved: Saved, cotangents: tuple[Any, ...]) -> tuple[Any, ...]:
    bits, gradients = saved.asked.shape[1], {}
    asked = tuple(name for index, name in enumerate(rule.differentiable()) if bits >> index & 1)
    pairs = zip(rule.results, cotangents, strict=True)
    upstream = {name: one for name, one in pairs if name in rule.flowing and not isinstance(one, SymbolicZero)}
    if asked and upstream:
        # JAX hands back dicts with sorted names.
        arrays = {name: saved.arrays[name] for name in rule.names}
        with placement.everywhere(everywhere):
            gradients = rule.gradients(arrays, saved.outputs, upstream, asked)
    return tuple(gradients.get(name) if name in asked else None for name in rule.names)


_function.defvjp(_forward_rule, _backward_rule, symbolic_zeros=True)
# Inlined into an outer trace, so that programs contain only the custom calls.
_run = jax.jit(_function, static_argnums=(0, 1), inline=True)


_call = Primitive("moebius_call")
_call.multiple_results = True
_call.def_impl(lambda *arrays, rule, everywhere: _run(rule, everywhere, *arrays))


@_call.def_abstract_eval
def _results(*arrays: Any, rule: Rule, everywhere: bool) -> list[Any]:
    structs = [jax.ShapeDtypeStruct(array.shape, array.dtype, **_placed(array)) for array in arrays]
    results = jax.eval_shape(functools.partial(_run, rule, everywhere), *structs)
    like = arrays[0]
    sharding = NamedSharding(like.sharding.mesh, PartitionSpec())
    return [
        like.update(
            shape=one.shape,
            dtype=one.dtype,
            weak_type=False,
            sharding=sharding.update(spec=PartitionSpec(*(None,) * len(one.shape))),
        )
        for one in results
    ]


def _placed(array: Any) -> dict[str, Any]:
    varying = array.manual_axis_type
    return {"sharding": array.sharding, "manual_axis_type": varying} if varying.varying else {}


mlir.register_lowering(
    _call,
    mlir.lower_fun(lambda *arrays, rule, everywhere: _run(rule, everywhere, *arrays), multiple_results=True),
)


def _differentiate(primals: Sequence[Any], tangents: Sequence[Any], *, rule: Rule, everywhere: bool) -> Any:
    moving = [number for number, tangent in enumerate(tangents) if not isinstance(tangent, ad.Zero)]

    def of(*given: Any) -> Any:
        arrays = list(primals)
        for number, array in zip(moving, given, strict=True):
            arrays[number] = array
        return _run(rule, everywhere, *arrays)

    results, moved = jax.jvp(of, [primals[number] for number in moving], [tangents[number] for number in moving])
    still = [tangent.dtype == jax.dtypes.float0 for tangent in moved]
    zeros = (
        ad.Zero(jax.typeof(one).to_tangent_aval()) if is_still else tangent
        for one, tangent, is_still in zip(results, moved, still, strict=True)
    )
    return results, tuple(zeros)


ad.primitive_jvps[_call] = _differentiate


def _batch(arrays: Sequence[Any], axes: Sequence[int | None], *, rule: Rule, everywhere: bool) -> Any:
    size = next(array.shape[axis] for array, axis in zip(arrays, axes, strict=True) if axis is not None)
    rows, split = rule.by_row(), [name for name, axis in zip(rule.names, axes, strict=True) if axis is not None]
    folded = rule.folded(size) if rows.issuperset(split) else None
    if folded is None:
        call = jax.vmap(functools.partial(_run, rule, everywhere), in_axes=tuple(axes), axis_size=size)
        results = call(*arrays)
        return results, [0] * len(results)
    flat: dict[str, Any] = {}
    for name, array, axis in zip(rule.names, arrays, axes, strict=True):
        if name in rows:
            every = jnp.broadcast_to(array, (size, *array.shape)) if axis is None else jnp.moveaxis(array, axis, 0)
            array = every.reshape(size * every.shape[1], *every.shape[2:])
        flat[name] = array
    results = dict(zip(rule.results, _call.bind(*flat.values(), rule=folded, everywhere=everywhere), strict=True))
    of_elements = rule.unfolded(size, flat, results)
    return [of_elements[name] for name in rule.results], [0] * len(rule.results)


batching.primitive_batchers[_call] = _batch


def differentiated(rule: Rule, arrays: Iterable[Any]) -> dict[str, Any]:
    arrays = varying_alike(arrays)
    everywhere = placement.may_run_everywhere(arrays)
    if any(isinstance(array, Tracer) for array in arrays):
        results = _call.bind(*map(jnp.asarray, arrays), rule=rule, everywhere=everywhere)
    else:
        results = _run(rule, everywhere, *arrays)
    return dict(zip(rule.results, results, strict=True))


def more_rows(spec: Any, size: int) -> Any:
    """An ArraySpec of `size` times as many rows. None stays."""
    return None if spec is None else dataclasses.replace(spec, shape=(size * spec.shape[0], *spec.shape[1:]))


def varying_alike(arrays: Iterable[Any]) -> list[Any]:
    """Make arrays vary over the mesh axes of the results, as gradients under shard_map vary like their arrays. JAX sums
    the gradients of arrays that did not."""
    arrays = list(arrays)
    axes = [jax.typeof(array).manual_axis_type.varying for array in arrays]
    every = frozenset().union(*axes)
    return [
        array if varying == every else jax.lax.pcast(array, tuple(every - varying), to="varying")
        for array, varying in zip(arrays, axes, strict=True)
    ]
