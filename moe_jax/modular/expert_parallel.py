"""Prepare and finalize across the ranks of a mesh axis, inside `jax.shard_map`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from moe_core.errors import InvalidInput, Unsupported
from moe_core.parallel.placement import Placement
from moe_core.parallel.plan import plan_exchange
from moe_core.parallel.spec import ExchangeSpec
from moe_core.specs.tuning import Tuning
from moe_jax.bridge.calls import require_array, require_type
from moe_jax.modular import prepare_finalize as one_device
from moe_jax.parallel import exchange as arithmetic
from moe_jax.parallel.collectives import varying_over
from moe_jax.parallel.forward import Group, require_ranks, require_x
from moe_jax.parallel.function import combine, dispatch, used
from moe_jax.parallel.routes import Routes, Sizes, make_routes

_PLAIN_EXCHANGE = ExchangeSpec()


@dataclass(frozen=True)
class SentTokens:
    """The result of `prepare_expert_parallel`, a pytree.

    a1q: `[R, K]`, rows of one slot each. topk_weights, topk_ids: fp32 and int32 `[R, 1]`, of this rank's experts, -1 =
    an unused row. tuning: gives the experts the summation order of one device.
    """

    a1q: jax.Array
    topk_weights: jax.Array
    topk_ids: jax.Array
    routes: Routes
    sizes: Sizes
    tuning: Tuning

    @property
    def overflow(self) -> jax.Array:
        """int32 `[1]`: rows of all ranks beyond a bound of the exchange."""
        return self.routes.overflow


jax.tree_util.register_dataclass(
    SentTokens, data_fields=["a1q", "topk_weights", "topk_ids", "routes"], meta_fields=["sizes", "tuning"]
)


def prepare_expert_parallel(
    a1: jax.Array,
    topk_weights: jax.Array,
    topk_ids: jax.Array,
    apply_router_weight_on_input: bool = False,
    *,
    axis_name: str = "ep",
    placement: Placement,
    exchange: ExchangeSpec = _PLAIN_EXCHANGE,
) -> SentTokens:
    """Collect the slots of all ranks' tokens for this rank's experts, inside a `shard_map` over axis_name.

    a1: bf16, fp16 or fp32 `[M, K]`, equally many tokens on every rank. topk_weights, topk_ids: `[M, topk]`, with ids of
    all experts. exchange: mode `all_to_all`, `all_gather` or `padded`, see `moe_jax.parallel.moe`. placement: this
    rank's experts are its places, `[placement.per_rank, ...]`. Raises InvalidInput, and Unsupported for replicas, since
    their gradients would be partial.
    """
    require_type("placement", placement, Placement)
    require_type("exchange", exchange, ExchangeSpec)
    if placement.has_replicas:
        raise Unsupported(f"placement must have every expert once, got {placement}; call moe_jax.parallel.moe")
    weights, ids = one_device.as_routing(topk_weights, topk_ids)
    x = require_x(one_device.prepare(a1, weights, ids, apply_router_weight_on_input).a1q)
    require_ranks(Group(axis_name, placement, exchange))
    x, (tokens, top_k) = varying_over(x, axis_name), ids.shape
    plan_exchange(tokens, top_k, x.shape[1], x.dtype.name, placement, exchange)
    places, _ = arithmetic.physical_ids(ids, placement)
    sizes = Sizes(axis_name, placement, exchange, tokens, top_k)
    routes = make_routes(sizes, varying_over(places, axis_name), jax.lax.stop_gradient(weights))
    (wide,) = used(x, 1, jnp.float32)
    sent: Any = dispatch(sizes, routes, jax.lax.stop_gradient(x), wide, weights)
    slots = max(1, placement.num_ranks * tokens * top_k)
    tuning = Tuning(expected_tokens=slots, expected_experts=placement.num_experts)
    return SentTokens(sent[0], sent[1], routes.ids, routes, sizes, tuning)


def finalize_expert_parallel(
    fused_expert_output: jax.Array, prepared: SentTokens, apply_router_weight_on_input: bool = False
) -> jax.Array:
    """Return output `[M, K]` of this rank's tokens: their slots' rows, added in fp32 in the order k = 0..topk-1.

    fused_expert_output: `[R, K]`, weighted, as experts of this package return it, or `[R, 1, K]`, weighted here unless
    the input was. Tokens with rows beyond a bound of the exchange (`prepared.overflow`) get NaN, or lack them with
    `on_overflow="drop"`.
    """
    require_type("prepared", prepared, SentTokens)
    require_array("fused_expert_output", fused_expert_output)
    rows, count = fused_expert_output, prepared.a1q.shape[0]
    if rows.ndim == 3:
        rows = one_device.finalize(rows, prepared.topk_weights, prepared.topk_ids, apply_router_weight_on_input)
    if rows.ndim != 2 or rows.shape[0] != count:
        raise InvalidInput(
            f"fused_expert_output must be [{count}, K] or [{count}, 1, K], a row for each of prepared.a1q, got "
            f"{fused_expert_output.shape}; pass what the experts return"
        )
    return combine(prepared.sizes, prepared.a1q.dtype.name, prepared.routes, rows, None, None)
