"""Functions with a backward of their own that also have tangents: `jax.custom_vjp` has reverse mode alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from moe_jax.autodiff.function import Arrays, Names, Rule, differentiated


@dataclass(frozen=True)
class _Paired(Rule):
    """Arrays are leaves of the arguments, called by their numbers; see `paired`."""

    functions: tuple[Callable[..., Any], ...]
    static: tuple[Any, ...]
    structure: Any
    trained: Names

    def differentiable(self) -> Names:
        return self.trained

    def _call(self, function: Callable[..., Any], arrays: Mapping[str, Any]) -> Arrays:
        arguments = jax.tree.unflatten(self.structure, [arrays[name] for name in self.names])
        return dict(zip(self.results, jax.tree.leaves(function(*self.static, *arguments)), strict=True))

    def forward(self, arrays: Mapping[str, Any], save: bool) -> Arrays:
        return self._call(self.functions[0], arrays)

    def gradients(self, arrays: Arrays, saved: Arrays, upstream: Arrays, asked: Names) -> Arrays:
        values = {} if len(upstream) == len(self.results) else self.forward(arrays, False)
        given = [upstream[name] if name in upstream else jnp.zeros_like(values[name]) for name in self.results]
        arguments = jax.tree.unflatten(self.structure, [arrays[name] for name in self.names])
        return dict(zip(self.trained, self.functions[1](*self.static, arguments, *given), strict=True))

    def composed(self, arrays: Arrays, saved: Arrays) -> Arrays:
        return self._call(self.functions[2], arrays)


def paired(
    function: Callable[..., Any], backward: Callable[..., Any], again: Callable[..., Any] | None = None
) -> Callable[..., Any]:
    """Return `call(static, trained, others)`, tuples, of `function(*static, *trained, *others)`.

    `backward(*static, arguments, *gradients of results)` returns the gradients of `trained`, arrays or None, as one
    tuple. again: the same function of `trained` in operations with every derivative.
    """

    def call(static: tuple[Any, ...], trained: tuple[Any, ...], others: tuple[Any, ...] = ()) -> Any:
        flat, structure = jax.tree.flatten((*trained, *others))
        shapes, made = jax.tree.flatten(jax.eval_shape(lambda *given: function(*static, *given), *trained, *others))
        names, results = (tuple(map(str, range(len(leaves)))) for leaves in (flat, shapes))
        of_trained = names[: len(jax.tree.leaves(trained))]
        functions = (function, backward, again or function)
        rule = _Paired(names, results, results, functions, static, structure, of_trained)
        return jax.tree.unflatten(made, list(differentiated(rule, flat).values()))

    return call
