"""Dispatch and combine for schedules of micro-batches, inside `jax.shard_map`: dispatch one before the experts of the
one before it, as XLA orders messages and products by what they need.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from moe_core.errors import InvalidInput, Unsupported
from moe_core.parallel import ExchangeSpec, Placement, plan_exchange
from moe_core.specs.moe import MoESpec
from moe_core.specs.operands import TopK
from moe_jax.bridge.calls import Array, require_type
from moe_jax.parallel.collectives import AxisName, varying_over
from moe_jax.parallel.forward import (
    PLAIN_EXCHANGE,
    Group,
    group_of,
    require_memory,
    require_ranks,
    require_x,
    route_of,
    sent_out,
)
from moe_jax.parallel.function import combine as combined
from moe_jax.parallel.function import used
from moe_jax.parallel.routes import Routes, Sizes
from moe_jax.parallel.tensor import Brought


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Arrived:
    """Rows of slots at their experts, a pytree: rows `[R, D]`; ids int32 `[R, 1]`, places here, -1 for unused rows;
    weights fp32 `[R, 1]`; overflow int32 `[1]`, rows of all ranks beyond a bound.
    """

    rows: jax.Array
    ids: jax.Array
    weights: jax.Array
    overflow: jax.Array
    _routes: Routes
    _sizes: Sizes = dataclasses.field(metadata={"static": True})

    def spec(self, spec: MoESpec) -> MoESpec:
        """Options of `moe_jax.moe` on these rows, with the order of sums of one device."""
        sizes = self._sizes
        group = Group(sizes.axis_name, sizes.placement, sizes.spec)
        return group.owner(spec, sizes.tokens * sizes.top_k)


def dispatch(
    x: Array,
    ids: Array,
    weights: Array,
    *,
    axis_name: AxisName = "ep",
    placement: Placement,
    exchange: ExchangeSpec = PLAIN_EXCHANGE,
    token_mask: Array | None = None,
) -> Arrived:
    """Send rows to their experts' ranks, as `moe` does; `combine` brings results home with the bits of `moe`.

        arrived = dispatch(x, ids, weights, placement=placement)
        results = moe_jax.moe(arrived.rows, experts, TopK(arrived.ids, arrived.weights), arrived.spec(spec)).output
        y = combine(results, arrived)

    x, ids, weights, token_mask: see `moe_torch.parallel.dispatch`. T is the same on all ranks.

    Raises:
        InvalidInput: wrong arguments, or outside of a shard_map over this axis.
        Unsupported: exchanges that `moe` refuses, and placements with replicas.
    """
    require_type("placement", placement, Placement)
    require_type("exchange", exchange, ExchangeSpec)
    if placement.has_replicas:
        raise Unsupported(
            f"placement must have no replicas in dispatch, got {placement}; call moe, which refuses gradients"
        )
    group, x = group_of(axis_name, placement, exchange), require_x(x)
    require_ranks(group)
    mask = None if token_mask is None else jnp.asarray(token_mask)
    x = varying_over(x, axis_name)
    (wide,) = used(x, 1, jnp.float32)
    given: Any = TopK(ids, weights)  # pyright: ignore[reportArgumentType]
    chosen, _, _, traveling = route_of(x, x, given, None, mask, placement.num_experts)
    require_memory(plan_exchange(x.shape[0], chosen.shape[1], x.shape[1], x.dtype.name, placement, exchange))
    sent = sent_out(group, Brought(jax.lax.stop_gradient(x), wide, chosen, traveling, mask), x.shape[0])
    return Arrived(sent.rows, sent.routes.ids, sent.weights, sent.routes.overflow, sent.routes, sent.sizes)


def combine(rows: jax.Array, arrived: Arrived) -> jax.Array:
    """The sum of each token's results at home, `[T, D]`; rows: results `[R, D]` of `arrived.rows`. See `dispatch`."""
    require_type("arrived", arrived, Arrived)
    rows = jnp.asarray(rows)
    if rows.shape != arrived.rows.shape or rows.dtype != arrived.rows.dtype:
        raise InvalidInput(
            f"rows must be {arrived.rows.dtype}{list(arrived.rows.shape)}, as arrived.rows, got "
            f"{rows.dtype}{list(rows.shape)}; pass a result for every row"
        )
    output: Any = combined(arrived._sizes, rows.dtype.name, arrived._routes, rows, None, None)
    return output
