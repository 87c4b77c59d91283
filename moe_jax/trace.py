"""Record which experts every token visits, and play it back, in any JAX function with MoE layers on Moebius.

Both transform a function, also under `jit`. They see every whole MoE forward in call order:

    y, layers = jax.jit(capture(model))(x)                  # one LayerRouting per layer, arrays of JAX
    RoutingTrace(layers).save("routing.safetensors")

    trace = RoutingTrace.load("routing.safetensors")        # perhaps captured by moe_torch.trace
    y = jax.jit(replay(model))(trace.layers, x)

A layer inside a further transformation (an inner `jit`, the body of a scan, `checkpoint`, `vmap`, `shard_map`) raises
InvalidInput. Apply them inside there. A scan then stacks what its body captures, and splits a stack to replay:

    y, stacks = jax.lax.scan(capture(body), x, parameters)  # body(x, parameters) returns the next x
    RoutingTrace.from_scan(stacks).save("routing.safetensors")

A replayed layer keeps its token mask and computes its logits (for losses). It can be trained: the weights' gradient
flows into the router (or passed logits or weights) as if that had chosen the trace's ids.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import get_opaque_trace_state

from moe_core.errors import InvalidInput
from moe_core.specs.operands import MoEOutput, Routing
from moe_core.trace import LayerRouting, Playback, RoutingTrace, layers_of, sizes_of
from moe_jax.autodiff.moe import plain_top_k

__all__ = ["LayerRouting", "RoutingTrace", "capture", "replay"]

jax.tree_util.register_dataclass(LayerRouting, data_fields=["ids", "weights"], meta_fields=["num_experts"])


def capture(function: Callable[..., Any]) -> Callable[..., tuple[Any, tuple[LayerRouting, ...]]]:
    """`capture(function)(...)` is `(function(...), layers)`, with the routing of every whole MoE forward in it.

    Raises InvalidInput if none runs, or one runs inside a further transformation.
    """

    def captured(*arguments: Any, **keywords: Any) -> tuple[Any, tuple[LayerRouting, ...]]:
        layers: list[LayerRouting] = []

        def record(call: _Call) -> MoEOutput:
            result = call.run()
            _, num_experts = call.sizes
            ids, weights = plain_top_k(result.ids, jnp.asarray(result.weights))
            layers.append(LayerRouting(ids, weights, num_experts))
            return result

        with _watched(_Watch(record)):
            result = function(*arguments, **keywords)
        if not layers:
            raise InvalidInput(
                "function must run MoE layers on Moebius, got one that ran none; capture a function that calls them"
            )
        return result, tuple(layers)

    return captured


def replay(function: Callable[..., Any]) -> Callable[..., Any]:
    """`replay(function)(trace, ...)` is `function(...)` with the trace's ids and weights in its whole MoE forwards.

    trace is a RoutingTrace, or its layers, which `jit` takes as an argument. Raises InvalidInput if tokens, top-k,
    experts or number of layers differ from the trace, or a layer is inside a further transformation.
    """

    def replayed(
        trace: RoutingTrace | LayerRouting | tuple[LayerRouting, ...], *arguments: Any, **keywords: Any
    ) -> Any:
        playback = Playback(layers_of(trace))

        def play(call: _Call) -> MoEOutput:
            layer = playback.next(call.x.shape[0], *call.sizes)
            return call.run_with(jnp.asarray(layer.ids), jnp.asarray(layer.weights))

        with _watched(_Watch(play)):
            result = function(*arguments, **keywords)
        playback.finish()
        return result

    return replayed


def watched(replayable: Callable[..., MoEOutput]) -> Callable[[Callable[..., MoEOutput]], Callable[..., MoEOutput]]:
    """Decorate the op `moe` so that capture and replay see its calls. replayable also takes `replayed`, a Routing."""

    def decorate(moe: Callable[..., MoEOutput]) -> Callable[..., MoEOutput]:
        @functools.wraps(moe)
        def watched_moe(x: Any, experts: Any, routing: Any, spec: Any, **options: Any) -> MoEOutput:
            return _Call(moe, replayable, x, experts, routing, spec, options).run()

        return watched_moe

    return decorate


@dataclasses.dataclass(frozen=True)
class _Call:
    """One call of `moe`. function: the op, or its replayable form."""

    function: Callable[..., MoEOutput]
    replayable: Callable[..., MoEOutput]
    x: Any
    experts: Any
    routing: Any
    spec: Any
    options: dict[str, Any]

    @property
    def sizes(self) -> tuple[int, int]:
        """(K, E)."""
        return sizes_of(self.experts, self.routing, self.spec, self.options.get("expert_map"))

    def run(self) -> MoEOutput:
        """The innermost watch sees the call first."""
        watch = _current.get()
        if watch is None:
            return self.function(self.x, self.experts, self.routing, self.spec, **self.options)
        watch.require_same_level()
        with _watched(watch.outer):
            return watch.visit(self)

    def run_with(self, ids: jax.Array, weights: jax.Array) -> MoEOutput:
        options = self.options | {"replayed": Routing(ids, weights)}
        return dataclasses.replace(self, function=self.replayable, options=options).run()


class _Watch:
    """A capture or replay in progress, with its level of transformations."""

    def __init__(self, visit: Callable[[_Call], MoEOutput]) -> None:
        self.visit = visit
        self.outer = _current.get()
        self._level = get_opaque_trace_state(convention="moebius")

    def require_same_level(self) -> None:
        if get_opaque_trace_state(convention="moebius") != self._level:
            raise InvalidInput(
                "function must call its MoE layers outside of jit, scan and other transformations, got one inside; "
                "apply those around: jax.jit(capture(function)), or capture and replay the body of a scan"
            )


_current: contextvars.ContextVar[_Watch | None] = contextvars.ContextVar("moe_jax_watch", default=None)
# Part of every jit cache's key: a function jitted before is traced again.
_is_watched = jax.make_user_context(None)


@contextlib.contextmanager
def _watched(watch: _Watch | None) -> Iterator[None]:
    token = _current.set(watch)
    try:
        with _is_watched(None if watch is None else True):
            yield
    finally:
        _current.reset(token)
