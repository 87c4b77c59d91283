"""How ops are differentiated: one `jax.custom_vjp`, which follows a rule for each call.

Undifferentiated, a call is its custom call and nothing else. Differentiated in reverse, the rule's forward says what
the backward reads, and its gradients are those that JAX asks for, usually by one more custom call. What nobody asks for
is neither planned nor saved. Second derivatives are refused (`moe_jax.bridge.calls`).
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
    """What is static of one call, and how it is differentiated.

    names: its arrays, in the order in which they are passed. results: what it returns. flowing: the results through
    which gradients flow back.
    """

    names: tuple[str, ...]
    results: tuple[str, ...]
    flowing: tuple[str, ...]

    def differentiable(self) -> tuple[str, ...]:
        """The arrays that may ask for a gradient; all others are constants."""
        raise NotImplementedError

    def refuse(self, asked: list[str]) -> None:
        """Raise Unsupported where this call has no gradient of what asks for one."""

    def forward(self, arrays: Mapping[str, Any], save: bool) -> dict[str, Any]:
        """The results, and with `save` more that `saved` takes, by name."""
        raise NotImplementedError

    def saved(self, outputs: dict[str, Any], save: bool) -> dict[str, Any]:
        """The outputs of the forward that `gradients` reads; of the same structure without `save`."""
        return {}

    def gradients(
        self, arrays: dict[str, Any], saved: dict[str, Any], upstream: dict[str, Any], asked: tuple[str, ...]
    ) -> dict[str, Any]:
        """The gradients asked for, or more, by name. upstream: those of the flowing results that have one."""
        raise NotImplementedError


@dataclass(frozen=True)
class Saved:
    """What a forward hands to its backward.

    JAX may run one forward rule for several sets of differentiated arguments, and then reads the residuals of all by
    the structure of the latest: so this has one structure for all of them, and says which gradients are asked for in
    the shape of an array without elements, which survives scan, vmap, remat and shard_map.
    """

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
    bits = sum(1 << place for place, name in enumerate(rule.differentiable()) if name in asked)
    with placement.everywhere(everywhere):
        outputs = rule.forward(arrays, save=bits > 0)
    saved = Saved(arrays, rule.saved(outputs, bits > 0), jnp.zeros((0, bits), bool))
    return tuple(outputs[name] for name in rule.results), saved


def _backward_rule(rule: Rule, everywhere: bool, saved: Saved, cotangents: tuple[Any, ...]) -> tuple[Any, ...]:
    bits, found = saved.asked.shape[1], {}
    asked = tuple(name for place, name in enumerate(rule.differentiable()) if bits >> place & 1)
    pairs = zip(rule.results, cotangents, strict=True)
    upstream = {name: one for name, one in pairs if name in rule.flowing and not isinstance(one, SymbolicZero)}
    if asked and upstream:
        # What JAX hands back has the names sorted.
        arrays = {name: saved.arrays[name] for name in rule.names}
        with placement.everywhere(everywhere):
            found = rule.gradients(arrays, saved.outputs, upstream, asked)
    return tuple(found.get(name) if name in asked else None for name in rule.names)


_function.defvjp(_forward_rule, _backward_rule, symbolic_zeros=True)
# Inlined into an outer trace, so that programs hold nothing but the custom calls.
_run = jax.jit(_function, static_argnums=(0, 1), inline=True)


def differentiated(rule: Rule, arrays: Iterable[Any]) -> dict[str, Any]:
    """The results of a call by name, with its gradients."""
    arrays = varying_alike(arrays)
    results = _run(rule, placement.may_run_everywhere(arrays), *arrays)
    return dict(zip(rule.results, results, strict=True))


def varying_alike(arrays: Iterable[Any]) -> list[Any]:
    """Arrays that vary over the same axes of a mesh, as the results do.

    Under shard_map a gradient varies like what it is the gradient of: here all of them vary, and JAX sums the gradients
    of arrays that did not.
    """
    arrays = list(arrays)
    axes = [jax.typeof(array).manual_axis_type.varying for array in arrays]
    every = frozenset().union(*axes)
    return [
        array if own == every else jax.lax.pcast(array, tuple(every - own), to="varying")
        for array, own in zip(arrays, axes, strict=True)
    ]
