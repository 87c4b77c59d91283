"""Counts of layers as results of the function that runs them, for `moe_jax.monitor`."""

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
from moe_core.layers import MoEAux, MoELayerSpec


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["counts", "kept", "overflow", "losses"],
    meta_fields=["top_k", "drops"],
)
@dataclasses.dataclass(frozen=True)
class Observed:
    """Of one layer's forward, or of a scan with one more axis in front: counts int32 `[E]`, kept and overflow int32
    scalars (overflow None: no exchange), losses fp32 `[2]` of (load-balancing loss, z-loss)."""

    counts: Any
    kept: Any
    overflow: Any
    losses: Any
    top_k: int
    drops: bool


class Observer:
    def __init__(self) -> None:
        self.layers: list[Observed] = []
        self._level = get_opaque_trace_state(convention="moebius")

    def note(self, spec: MoELayerSpec, aux: MoEAux) -> None:
        if get_opaque_trace_state(convention="moebius") != self._level:
            raise InvalidInput(
                "function must call its MoE layers outside of jit, scan, checkpoint and other transformations, got one "
                "inside; apply those around: jax.checkpoint(observe(block)), or observe the body of a scan"
            )
        losses = jnp.stack([jnp.asarray(one, jnp.float32) for one in (aux.load_balance_loss, aux.z_loss)])
        drops = spec.capacity_factor is not None
        kept = jnp.sum(aux.ids >= 0, dtype=jnp.int32) if drops else jnp.int32(0)
        overflow = None if aux.overflow is None else jnp.sum(aux.overflow)
        self.layers.append(Observed(aux.tokens_per_expert, kept, overflow, losses, spec.top_k, drops))

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        token = _current.set(None)
        try:
            yield
        finally:
            _current.reset(token)


_current: contextvars.ContextVar[Observer | None] = contextvars.ContextVar("moe_jax_observer", default=None)
# Part of every jit cache's key: a function jitted before is traced again.
_is_observed = jax.make_user_context(None)


def current() -> Observer | None:
    return _current.get()


def observe(function: Callable[..., Any]) -> Callable[..., tuple[Any, tuple[Observed, ...]]]:
    """`observe(function)(...)` is `(function(...), observed)`, for `Monitor.step`, with an entry for each MoE layer.

    For a loss: `jax.value_and_grad(observe(loss), has_aux=True)`. Layers are of `moe_jax.nnx`, `moe_jax.linen`
    and `moe_jax.layers.forward`. Results of the function keep their bits. On a mesh, counts are of all devices.
    Inside of your own `jax.shard_map` they are this device's, so add them with `jax.lax.psum`.

    Raises InvalidInput if no layer runs, or one runs inside a further transformation.
    """

    @functools.wraps(function)
    def observed(*arguments: Any, **keywords: Any) -> tuple[Any, tuple[Observed, ...]]:
        observer = Observer()
        token = _current.set(observer)
        try:
            with _is_observed(True):
                result = function(*arguments, **keywords)
        finally:
            _current.reset(token)
        if not observer.layers:
            raise InvalidInput(
                "function must run MoE layers on Moebius, got one that ran none; observe a function that calls them"
            )
        return result, tuple(observer.layers)

    return observed
