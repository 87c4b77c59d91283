"""The expert-parallel forward of one rank, for `jax.shard_map`."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from moe_core.errors import InvalidInput, Unsupported
from moe_core.parallel import ExchangePlan, ExchangeSpec, ParallelOutput, Placement, plan_exchange
from moe_core.parallel.operands import require_given, require_row_scales, require_scores
from moe_core.plan.float64 import refuse_float64
from moe_core.specs import MoESpec, Tuning
from moe_core.specs.operands import ExpertWeights, LoRAFactors, RouterLogits, RouterWeights, SharedExpert, TopK
from moe_jax import ops
from moe_jax.autodiff.function import varying_alike
from moe_jax.autodiff.moe import plain_top_k
from moe_jax.bridge.calls import Array, OpCall, int32_ids, require_array, require_type
from moe_jax.parallel import exchange as arithmetic
from moe_jax.parallel.adapters import adapters_here, push_ids
from moe_jax.parallel.collectives import AxisName, varying_over
from moe_jax.parallel.dense import shared_output
from moe_jax.parallel.function import combine, dispatch, untrained, used
from moe_jax.parallel.routes import Routes, Sizes, make_routes
from moe_jax.parallel.tensor import Brought, bias_once, gathered, size_of, total
from moe_jax.trace import routed, unwatched

PLAIN_EXCHANGE = ExchangeSpec()


def moe(
    x: Array,
    experts: ExpertWeights,
    routing: RouterWeights | RouterLogits | TopK,
    spec: MoESpec,
    *,
    axis_name: AxisName = "ep",
    placement: Placement,
    exchange: ExchangeSpec = PLAIN_EXCHANGE,
    token_mask: Array | None = None,
    tensor_axis: str | None = None,
    lora: LoRAFactors | None = None,
    adapter_ids: Array | None = None,
) -> ParallelOutput:
    """Run `moe_jax.moe` over the ranks of a mesh axis, which share the experts, inside `jax.shard_map`.

    Output and gradients have the bits of `moe_jax.moe` on one device with all ranks' tokens, in rank order, and all
    experts (exceptions: `moe_core.parallel.plan_exchange`). Router gradients are sums over ranks, in another order.

    Args:
        x: bf16, fp16 or fp32 `[T, D]`, the tokens of this rank, with the same T on all.
        experts: of this rank, `[L, ...]`, in the order of `placement.owners[rank]`. Empty places are not read.
        routing: over all E experts, of this rank's tokens.
        spec: as for `moe_jax.moe`.
        axis_name: the mesh axis of the ranks, manual in the `shard_map`. Two axes, such as `("host", "local")`, are
            hosts and the ranks of each: a token then crosses to a host once.
        exchange: how rows travel. Buffers of `all_to_all` and blocks of `padded` hold the most rows there can be, or
            `receive`. `all_gather` sends every token to every rank.
        token_mask: bool `[T]`, as for `moe_jax.moe`.
        tensor_axis: a second mesh axis. Its ranks have separate tokens and slices of the experts from
            `moe_core.parallel.tensor.split_experts`, but the whole down_bias. Results are sums over it in rank order,
            not bitwise equal to one device.
        lora, adapter_ids: see `moe_torch.parallel.moe`.

    Returns:
        a ParallelOutput. Its `overflow` counts rows beyond a bound. The output of their tokens is NaN, or lacks them
            with `exchange.on_overflow="drop"`.

    Raises:
        InvalidInput: outside of a shard_map over these axes, or other numbers of ranks or experts than the placement's.
        Unsupported: requests that exchanges cannot serve, and gradients of experts with replicas.
    """
    require_type("placement", placement, Placement)
    require_type("exchange", exchange, ExchangeSpec)
    if lora is None and adapter_ids is not None:
        raise InvalidInput("adapter_ids must be None without lora, got an array; pass lora too")
    group, adapters = group_of(axis_name, placement, exchange, tensor_axis), lora and (lora, adapter_ids)
    return run(x, experts, routing, spec, group, token_mask, adapters=adapters)


@dataclass(frozen=True)
class Group:
    axis_name: AxisName
    placement: Placement
    exchange: ExchangeSpec
    tensor_axis: str | None = None

    def whole(self, spec: MoESpec, tokens: int) -> MoESpec:
        tuning = Tuning() if spec.tuning is None else spec.tuning
        expected: dict[str, Any] = {"expected_tokens": max(1, self.placement.num_ranks * tokens)}
        expected["expected_experts"] = self.placement.num_experts
        return dataclasses.replace(spec, tuning=dataclasses.replace(tuning, **expected))

    def owner(self, spec: MoESpec, slots: int) -> MoESpec:
        plain = dataclasses.replace(spec, router=None, out_dtype=None, shared_activation=None)
        return self.whole(plain, slots)


def group_of(
    axis_name: AxisName, placement: Placement, exchange: ExchangeSpec, tensor_axis: str | None = None
) -> Group:
    """The group of a mesh axis, or of hosts and their ranks."""
    two = isinstance(axis_name, (tuple, list))
    names = tuple(axis_name) if two else (axis_name,)
    if len(names) != 1 + two or not all(isinstance(name, str) for name in names):
        raise InvalidInput(f"axis_name must be a mesh axis or two, got {axis_name!r}; pass 'ep' or ('host', 'local')")
    hosts = _size_of(names[0]) if two else 1
    if exchange.hosts not in (1, hosts):
        raise InvalidInput(
            f"exchange.hosts must be those of axis_name, got {exchange.hosts} with {axis_name!r}; leave it out"
        )
    if exchange.other:
        raise Unsupported(f"exchange.transport must be 'framework' in JAX, got {exchange.transport!r}; leave it out")
    if hosts > 1 and tensor_axis is not None:
        raise Unsupported(f"tensor_axis must be None beside hosts, got {tensor_axis!r}; pass one axis_name")
    axis: Any = names if hosts > 1 else axis_name
    return Group(axis, placement, dataclasses.replace(exchange, hosts=hosts), tensor_axis)


def _size_of(axis_name: AxisName) -> int:
    try:
        return jax.lax.axis_size(axis_name)
    except NameError as error:
        raise InvalidInput(
            f"axis_name must be a mesh axis that is manual here, got {axis_name!r}; call this inside jax.shard_map "
            "over that axis, with the local tokens and the local experts"
        ) from error


def run(
    x: Any,
    experts: ExpertWeights,
    routing: Any,
    spec: MoESpec,
    group: Group,
    token_mask: Any = None,
    shared: SharedExpert | None = None,
    adapters: tuple[LoRAFactors, Any] | None = None,
) -> ParallelOutput:
    require_type("spec", spec, MoESpec)
    require_type("routing", routing, RouterWeights, RouterLogits, TopK)
    x, placement, axis_name = require_x(x), group.placement, group.axis_name
    require_ranks(group, spec)
    require_row_scales(spec, experts)
    _require_experts(experts, placement)
    mask = None if token_mask is None else jnp.asarray(token_mask)
    tensor, size = group.tensor_axis, size_of(group.tensor_axis)
    x = varying_over(x, axis_name)
    x = x if tensor is None else varying_over(x, tensor)
    tokens = x.shape[0] * size
    here = adapters and adapters_here(adapters, mask, x.shape[0], (placement, axis_name, size))
    # The gradient of x adds other parts before the slots.
    scored = isinstance(routing, RouterWeights)
    *others, wide = used(x, 1 + (shared is not None) + scored, jnp.float32)
    whole = group.whole(spec, tokens)
    ids, weights, logits, traveling = route_of(
        x, others[-1] if scored else x, routing, whole, mask, placement.num_experts
    )
    if logits is not None:
        require_scores(logits.shape, x.shape[0], placement)
    require_memory(plan_exchange(tokens, ids.shape[1], x.shape[1], x.dtype.name, placement, group.exchange))
    brought = Brought(jax.lax.stop_gradient(x), wide, ids, traveling, mask, here and here.ids)
    if tensor is not None:
        brought, experts = gathered(tensor, brought), bias_once(tensor, experts)
    sent = sent_out(group, brought, tokens)
    places, invalid_ids, sizes, routes = sent.places, sent.invalid_ids, sent.sizes, sent.routes
    if placement.has_replicas:
        experts = jax.tree.map(untrained, experts)
    lora: Any = {}
    if here is not None and brought.adapter_ids is not None:
        factors = jax.tree.map(untrained, here.lora) if placement.has_replicas else here.lora
        lora = {"lora": factors, "adapter_ids": push_ids(sizes, routes, brought.adapter_ids)}
    owner = group.owner(spec, tokens * ids.shape[1])
    with unwatched():
        result = ops.moe(sent.rows, experts, TopK(routes.ids, sent.weights), owner, **lora)
    dense: tuple[Any, Any] = (None, None)
    if shared is not None:
        dense = shared_output(x, others[0], experts, shared, dataclasses.replace(whole, lora_dropout=0.0))
    dtype = spec.out_dtype or x.dtype.name
    output: Any = None
    if tensor is None:
        output = combine(sizes, dtype, routes, result.output, *dense)
    else:
        parts = combine(sizes, "float32", routes, result.output, None, None)
        output = total(tensor, x.dtype.name, dtype, parts, *dense)
        places, invalid_ids = arithmetic.physical_ids(ids, placement, token_mask=mask)
    invalid_ids = invalid_ids if here is None else invalid_ids + here.invalid
    counts = jnp.zeros(placement.num_experts, jnp.int32)
    counts, chosen = varying_alike((counts, jnp.where(places < 0, placement.num_experts, ids)))
    counts = counts.at[chosen].add(1, mode="drop")
    received = result.tokens_per_expert
    return ParallelOutput(output, ids, weights, logits, counts, invalid_ids, received, routes.overflow)


@functools.cache
def _memory() -> int | None:
    """Bytes of a device, None where JAX does not know them."""
    return (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")


def require_memory(plan: ExchangePlan) -> None:
    """Raise InvalidInput if room for the worst case, without a bound, takes more than a quarter of the memory."""
    memory = _memory()
    spec, ranks, peak = plan.spec, plan.placement.num_ranks, plan.peak(static=True)
    bounds = spec.mode != "all_gather" and spec.hosts == 1 and spec.receive is None
    if bounds and memory is not None and peak > memory / 4:
        fair = plan.tokens * (plan.top_k if spec.rows == "slots" else min(plan.top_k, ranks))
        raise InvalidInput(
            f"exchange.receive must bound the rows of a rank, got None: room for every routing takes {peak / 1e9:.1f} "
            f"of {memory / 1e9:.1f} GB; pass receive={2 * fair}, twice the mean, or {ranks * fair} for every routing"
        )


class Sent(NamedTuple):
    """Rows and weights at their owners, and the routes."""

    rows: jax.Array
    weights: jax.Array
    places: jax.Array
    invalid_ids: jax.Array
    sizes: Sizes
    routes: Routes


def sent_out(group: Group, brought: Brought, tokens: int) -> Sent:
    axis_name, placement = group.axis_name, group.placement
    first, hosts = jax.lax.axis_index(axis_name) * tokens, group.exchange.hosts
    host = (jax.lax.axis_index(axis_name[0]), hosts) if hosts > 1 else None
    options: Any = {"first_token": first, "token_mask": brought.token_mask, "host": host}
    places, invalid_ids = arithmetic.physical_ids(brought.ids, placement, **options)
    sizes = Sizes(axis_name, placement, group.exchange, tokens, brought.ids.shape[1])
    routes = make_routes(sizes, varying_over(places, axis_name), jax.lax.stop_gradient(brought.weights))
    rows, weights = dispatch(sizes, routes, brought.x, brought.wide, brought.weights)
    return Sent(rows, weights, places, invalid_ids, sizes, routes)


def route_of(
    x: jax.Array, wide: jax.Array, routing: Any, spec: MoESpec | None, token_mask: jax.Array | None, num_experts: int
) -> tuple[Any, Any, Any, jax.Array]:
    """Returned ids, weights and logits, and the weights that travel."""
    if isinstance(routing, TopK):
        routing = dataclasses.replace(routing, ids=int32_ids(routing.ids))
        specs = OpCall("moe").bundle("routing", routing, "routing.")
        require_given(specs.ids, specs.weights, x.shape[0])
        ids, weights = plain_top_k(routing.ids, jnp.asarray(routing.weights))
        ids, weights = routed(ids, weights, num_experts)
        return ids, weights, None, weights
    if spec is None or spec.router is None:
        raise InvalidInput("spec.router must be a RouterSpec to route with, got None; pass RouterSpec(top_k=...)")
    if isinstance(routing, RouterWeights):
        if token_mask is not None:
            # The router's backward multiplies rows by 0 for masked tokens: rows may hold NaN.
            x, wide = (jnp.where(token_mask[:, None], rows, 0) for rows in (x, wide))
        scores = ops.router(x, routing.weight, bias=routing.bias, spec=spec.logits_spec(), wide=wide)
        for_routing, logits = used(scores, 2, jnp.float32)
    else:
        for_routing = logits = routing.logits
    bias = routing.correction_bias
    ids, weights = ops.route(for_routing, spec.router, correction_bias=bias, token_mask=token_mask)
    ids, weights = routed(ids, weights, num_experts)
    traveling, weights = used(weights, 2, jnp.float32)
    return ids, weights, logits, traveling


def require_ranks(group: Group, spec: MoESpec | None = None) -> None:
    """Raise InvalidInput unless the axis is manual with the placement's ranks, Unsupported for other exchanges."""
    axis_name, placement, exchange = group.axis_name, group.placement, group.exchange
    size = _size_of(axis_name)
    if size != placement.num_ranks:
        raise InvalidInput(
            f"placement must be of the {size} ranks of the axis {axis_name!r}, got {placement}; make it for {size}"
        )
    refused = (
        ("exchange.mode", exchange.mode, exchange.mode == "peer", "all_to_all"),
        ("exchange.format", exchange.format, exchange.format is not None, None),
        ("exchange.chunks", exchange.chunks, exchange.chunks != 1, 1),
        ("spec.apply_router_weight_on_input", True, spec is not None and spec.apply_router_weight_on_input, False),
    )
    for name, value, wrong, instead in refused:
        if wrong:
            raise Unsupported(
                f"{name} must not be {value!r} in moe_jax.parallel, which has no such exchange; pass {instead!r}"
            )


def require_x(x: Any) -> jax.Array:
    require_array("x", x)
    refuse_float64(x.dtype == jnp.float64)
    if x.ndim != 2 or x.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        raise InvalidInput(
            f"x must be bf16, fp16 or fp32 [T, D], got {x.dtype}{list(x.shape)}; flatten the batch axes first"
        )
    return jnp.asarray(x)


def _require_experts(experts: Any, placement: Placement) -> None:
    require_type("experts", experts, ExpertWeights)
    held, stacked = experts.down.shape, experts.layer_index is not None
    if len(held) < 3 + stacked or held[stacked] != placement.per_rank:
        raise InvalidInput(
            f"experts must be the {placement.per_rank} places of this rank, got down {list(held)}; split them over the "
            "axis with in_specs, in the order of placement.owners"
        )
