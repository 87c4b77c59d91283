"""One `jax.custom_vjp` that differentiates ops by a rule for each call.

An undifferentiated call is only its custom call. In reverse mode the forward saves what the backward reads, and the
backward is usually one custom call. Second derivatives are refused (`moe_jax.bridge.calls`), unless a rule `repeats`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

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


def differentiated(rule: Rule, arrays: Iterable[Any]) -> dict[str, Any]:
    arrays = varying_alike(arrays)
    results = _run(rule, placement.may_run_everywhere(arrays), *arrays)
    return dict(zip(rule.results, results, strict=True))


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
