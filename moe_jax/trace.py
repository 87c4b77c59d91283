"""Record which experts every token visits, and play it back, in any JAX function with MoE layers on Moebius.

Both transform a function, also under `jit` (docs/user/layers.md). They see every MoE layer in call order.

A layer inside a further transformation (an inner `jit`, the body of a scan, `checkpoint`, `vmap`, `shard_map`) raises
InvalidInput. Apply them inside there. A scan then stacks what its body captures, and splits a stack to replay:

    y, stacks = jax.lax.scan(capture(body), x, parameters)  # body(x, parameters) returns the next x
    RoutingTrace.from_scan(stacks).save("routing.safetensors")

A replayed layer keeps its token mask and computes its logits (for losses). It can be trained: the weights' gradient
flows into the router (or passed logits or weights) as if that had chosen the trace's ids. A trace of ids alone
(`RoutingTrace.from_routed_experts`) pins the experts, with the weights of `moe`'s or `route`'s live logits.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn, TypeVar, cast

import jax
import jax.numpy as jnp
from jax.extend.core import get_opaque_trace_state

from moe_core.errors import InvalidInput, Unsupported
from moe_core.specs.operands import MoEOutput, Routing, TopK
from moe_core.trace import LayerRouting, Playback, RoutingTrace, layers_of, sizes_of
from moe_jax.autodiff.moe import plain_top_k

__all__ = ["LayerRouting", "RoutingTrace", "capture", "replay"]

jax.tree_util.register_dataclass(LayerRouting, data_fields=["ids", "weights"], meta_fields=["num_experts"])
_Function = TypeVar("_Function", bound=Callable[..., Any])


def capture(function: Callable[..., Any]) -> Callable[..., tuple[Any, tuple[LayerRouting, ...]]]:
    """`capture(function)(...)` is `(function(...), layers)`, with the routing of every MoE layer in it.

    Raises InvalidInput if none runs, or one runs inside a further transformation.
    """

    def captured(*arguments: Any, **keywords: Any) -> tuple[Any, tuple[LayerRouting, ...]]:
        layers: list[LayerRouting] = []

        def record(call: _Seen) -> Any:
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
    """`replay(function)(trace, ...)` is `function(...)` with the trace's ids, and weights if any, in its MoE layers.

    trace is a RoutingTrace, or its layers, which `jit` takes as an argument. Raises InvalidInput if tokens, top-k,
    experts or number of layers differ from the trace, or a layer is inside a further transformation, and Unsupported
    for ids alone and a layer with weights from elsewhere.
    """

    def replayed(
        trace: RoutingTrace | LayerRouting | tuple[LayerRouting, ...], *arguments: Any, **keywords: Any
    ) -> Any:
        player = _Player(layers_of(trace))
        with _watched(_Watch(player.play, player)):
            result = function(*arguments, **keywords)
        player.playback.finish()
        return result

    return replayed


class _Player:
    def __init__(self, layers: Sequence[LayerRouting]) -> None:
        self.playback = Playback(layers)
        #: `route` has the next layer's ids, and the token mask of the last one.
        self._chosen, self.token_mask = False, None

    def play(self, call: _Seen) -> Any:
        layer = self.playback.next(call.rows, *call.sizes)
        mask, self.token_mask = call.token_mask if call.token_mask is not None else self.token_mask, None
        ids, *weights = [_masked(jnp.asarray(array), mask) for array in layer.arrays]
        chosen, self._chosen = self._chosen, False
        if weights:
            return call.run_with(ids, weights[0])
        if not call.brings_weights:
            return call.run_with(ids, call.live_weights(ids))
        if not chosen:
            raise Unsupported(
                "a trace of ids alone needs the logits of each layer, got weights from elsewhere; replay a trace with "
                "weights, or route by moe or route"
            )
        return call.run()

    def choose(self, *sizes: int) -> jax.Array | None:
        """The ids of the next layer, for its router."""
        ids = self.playback.choice(*sizes)
        self._chosen = ids is not None
        return None if ids is None else jnp.asarray(ids)


def asked(route: _Function) -> _Function:
    """Decorate the op `route` so that it chooses the ids of a trace."""

    @functools.wraps(route)
    def asked_route(logits: Any, spec: Any, **options: Any) -> Any:
        watch = _current.get()
        if watch is None or watch.player is None or not hasattr(logits, "shape"):
            return route(logits, spec, **options)
        watch.require_same_level()
        watch.player.token_mask = options.get("token_mask")
        ids = watch.player.choose(logits.shape[0], spec.top_k, logits.shape[-1])
        if ids is None:
            return route(logits, spec, **options)
        if not watch.player.playback.lacks_weights:  # the trace dropped slots, which count in sums of weights
            ids = jnp.where(ids < 0, route(logits, spec, **options).ids, ids)
        return route(logits, spec, **options | {"correction_bias": None, "ids": ids})

    return cast(_Function, asked_route)


def noted(route_rounded: _Function) -> _Function:
    """Decorate the op `route_rounded`, whose token mask holds for the next layer of a replay."""

    @functools.wraps(route_rounded)
    def noted_route(*arguments: Any, **options: Any) -> Any:
        watch = _current.get()
        if watch is not None and watch.player is not None:
            watch.player.playback.require_weights()
            watch.player.token_mask = options.get("token_mask")
        return route_rounded(*arguments, **options)

    return cast(_Function, noted_route)


def _masked(array: jax.Array, token_mask: Any) -> jax.Array:
    """ids or weights `[T, K]` without those of masked tokens."""
    if token_mask is None or len(token_mask) != len(array):
        return array
    nothing = 0 if jnp.issubdtype(array.dtype, jnp.floating) else -1
    return jnp.where(jnp.asarray(token_mask)[:, None], array, jnp.asarray(nothing, array.dtype))


def routed(ids: jax.Array, weights: jax.Array, num_experts: int) -> Routing:
    """Show traces the routing of experts that run stage by stage, or on several ranks. Under a replay, return its."""
    return _Routed(Routing(ids, weights), num_experts).run()


def unwatched() -> contextlib.AbstractContextManager[None]:
    """Hide a layer's ops from traces, which see its `routed`."""
    return _watched(None) if _current.get() is not None else contextlib.nullcontext()


@jax.custom_jvp
def _in_place_of(weights: jax.Array, replayed: jax.Array) -> jax.Array:
    """replayed, with the derivative of weights."""
    return replayed.astype(weights.dtype)


_in_place_of.defjvp(lambda arrays, tangents: (_in_place_of(*arrays), tangents[0]))


def watched(replayable: Callable[..., MoEOutput], weigh: Callable[..., Any]) -> Callable[[_Function], _Function]:
    """Decorate `moe` for capture and replay; replayable takes `replayed`, a Routing. weigh: weights of ids."""

    def decorate(moe: _Function) -> _Function:
        @functools.wraps(moe)
        def watched_moe(x: Any, experts: Any, routing: Any, spec: Any, **options: Any) -> MoEOutput:
            return _Call(moe, (replayable, weigh), x, experts, routing, spec, options).run()

        return cast(_Function, watched_moe)

    return decorate


@dataclasses.dataclass(frozen=True)
class _Call:
    """One call of `moe`. function: the op, or its replayable form."""

    function: Callable[..., MoEOutput]
    forms: tuple[Callable[..., MoEOutput], Callable[..., Any]]
    x: Any
    experts: Any
    routing: Any
    spec: Any
    options: dict[str, Any]

    @property
    def sizes(self) -> tuple[int, int]:
        """(K, E)."""
        return sizes_of(self.experts, self.routing, self.spec, self.options.get("expert_map"))

    @property
    def rows(self) -> int:
        return self.x.shape[0]

    @property
    def brings_weights(self) -> bool:
        return isinstance(self.routing, TopK)

    @property
    def token_mask(self) -> Any:
        return self.options.get("token_mask")

    def live_weights(self, ids: jax.Array) -> jax.Array:
        """The router's weights of ids. Their gradient is the rule's, at the same logits."""
        with unwatched():
            weights = self.forms[1](self.x, self.routing, self.spec, self.options.get("token_mask"), ids)
        return jax.lax.stop_gradient(weights)

    def run(self) -> MoEOutput:
        if _current.get() is None:
            return self.function(self.x, self.experts, self.routing, self.spec, **self.options)
        return _seen(self)

    def run_with(self, ids: jax.Array, weights: jax.Array) -> MoEOutput:
        options = self.options | {"replayed": Routing(ids, weights)}
        return dataclasses.replace(self, function=self.forms[0], options=options).run()


@dataclasses.dataclass(frozen=True)
class _Routed:
    """The ids and weights of one layer. Under a replay, the gradient of the trace's weights is that of these."""

    routing: Routing
    num_experts: int
    brings_weights, token_mask = True, None

    @property
    def sizes(self) -> tuple[int, int]:
        """(K, E)."""
        return self.routing.ids.shape[1], self.num_experts

    @property
    def rows(self) -> int:
        return self.routing.ids.shape[0]

    def live_weights(self, ids: jax.Array) -> NoReturn:
        raise AssertionError("its caller brings weights")

    def run(self) -> Routing:
        return self.routing if _current.get() is None else _seen(self)

    def run_with(self, ids: jax.Array, weights: jax.Array) -> Routing:
        return _Routed(Routing(ids, _in_place_of(self.routing.weights, weights)), self.num_experts).run()


_Seen = _Call | _Routed


def _seen(call: _Seen) -> Any:
    """Let the innermost watch run a call first."""
    watch = _current.get()
    assert watch is not None
    watch.require_same_level()
    with _watched(watch.outer):
        return watch.visit(call)


class _Watch:
    """A capture or replay in progress, with its level of transformations."""

    def __init__(self, visit: Callable[[_Seen], Any], player: _Player | None = None) -> None:
        self.visit, self.player = visit, player
        self.outer = _current.get()
        self._level = get_opaque_trace_state(convention="moebius")

    def require_same_level(self) -> None:
        if get_opaque_trace_state(convention="moebius") != self._level:
            raise InvalidInput(
                "function must call its MoE layers outside of jit, scan and other transformations, got one inside; "
                "apply those around: jax.jit(capture(function)), or capture and replay the body of a scan, or of a "
                "shard_map (an expert_axis or a mesh opens one)"
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
