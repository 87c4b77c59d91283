"""Run one layer: the composed op, or its stages one by one, and the parts around it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from moe_core.errors import InvalidInput, Unsupported
from moe_core.layers import MAXTEXT, LayerPart, MoELayerSpec
from moe_core.layers.rounding import refuse_expert_parallel, refuse_given_ids, require_ids
from moe_core.ops.lora.beyond import adapted_logits, adapted_tokens, shared_output
from moe_core.parallel import ParallelOutput
from moe_core.specs import MatmulSpec, MoESpec, NormSpec, RouterSpec
from moe_core.specs.operands import MatmulOperands, MoEOperands
from moe_jax import ops
from moe_jax.bridge.calls import int32_ids, require_kept
from moe_jax.layers.sharded import Ranks
from moe_jax.ops import MoEOutput, Routing, TopK
from moe_jax.parallel.forward import run
from moe_jax.trace import routed


@dataclasses.dataclass(frozen=True)
class RoutedBy:
    """Inputs or choices of the router instead of x and its own.

    Args:
        gate_inputs: like x. The router scores it instead of x.
        expert_ids: integers `[..., K]`, see `moe_torch.MoE.forward`.
        input_ids: integers `[...]`, token ids for a layer with a table of ids, used without expert_ids.
    """

    gate_inputs: Any = None
    expert_ids: Any = None
    input_ids: Any = None


def of_rows(by: RoutedBy, x: Any, given: MoEOperands, spec: MoELayerSpec) -> RoutedBy:
    require_ids(spec, by.expert_ids, by.input_ids)
    rows, ids = by.gate_inputs, by.expert_ids
    if rows is not None:
        require_kept("gate_inputs", rows)
        rows = jnp.asarray(rows)
        if rows.shape != x.shape or not jnp.issubdtype(rows.dtype, jnp.floating):
            raise InvalidInput(
                f"gate_inputs must be floating {x.shape} like x, got {rows.dtype} {rows.shape}; pass one row for each "
                "of x"
            )
        rows = rows.reshape(given.x.shape).astype(given.x.dtype)
    if ids is not None:
        ids, shape = jnp.asarray(int32_ids(ids)), (*x.shape[:-1], spec.top_k)
        if ids.shape != shape or ids.dtype != jnp.int32:
            raise InvalidInput(
                f"expert_ids must be integers {shape}, top_k for each token of x, got {ids.dtype} {ids.shape}; convert "
                "them and give them that shape"
            )
        ids = ids.reshape(-1, spec.top_k)
    return RoutedBy(rows, _by_table(by, x, given, spec) if ids is None else ids)


def _by_table(by: RoutedBy, x: Any, given: MoEOperands, spec: MoELayerSpec) -> jax.Array | None:
    """ids int32 `[T, K]` from the table. None: the router chooses."""
    if by.input_ids is None:
        return None
    tokens, table = jnp.asarray(int32_ids(by.input_ids)), given.routing.table
    if tokens.shape != x.shape[:-1] or not jnp.issubdtype(tokens.dtype, jnp.integer):
        raise InvalidInput(
            f"input_ids must be integers {x.shape[:-1]}, one for each token of x, got {tokens.dtype} {tokens.shape}; "
            "convert them and give them that shape"
        )
    flat = tokens.reshape(-1)
    inside = (flat >= 0) & (flat < len(table))
    # A token outside of the table counts as an invalid id.
    return jnp.where(inside[:, None], table[jnp.where(inside, flat, 0)], spec.num_experts)


class _Experts:
    def __init__(self, spec: MoELayerSpec, ranks: Ranks | None) -> None:
        axis, self.over = (None, ()) if ranks is None else (ranks.axis, ranks.over)
        self.group = None if axis is None else axis.group(spec.num_experts)
        refuse_expert_parallel(bool(self.over) and spec.token_rounding is not None)
        if spec.capacity_factor is not None and ranks is not None and not ranks.consecutive:
            raise Unsupported(
                "capacity_factor must be None where several batch axes of x are split, since later tokens are dropped "
                f"and these are not in order on the devices, got {spec.capacity_factor}; split only the first axis of x"
            )
        if axis is not None and spec.norm_of_experts is not None:
            raise Unsupported(
                "expert_axis must be None for a layer with a norm of each expert's result, which is between what ranks "
                f"exchange, got {axis.name!r}; leave it out"
            )

    def spec(self, spec: MoELayerSpec, tokens: int) -> MoESpec:
        local = spec.moe_spec(MAXTEXT)
        return local if self.group is None else self.group.whole(local, tokens)

    def run(
        self, x: Any, experts: Any, routing: Any, spec: MoESpec, token_mask: Any = None, shared: Any = None, **lora: Any
    ) -> MoEOutput | ParallelOutput:
        if self.group is None:
            return ops.moe(x, experts, routing, spec, token_mask=token_mask, shared=shared, **lora)
        adapters = (lora["lora"], lora["adapter_ids"]) if lora else None
        return run(x, experts, routing, spec, self.group, token_mask, shared, adapters)

    def kept(self, rank: jax.Array, ids: jax.Array, spec: MoELayerSpec, counts: jax.Array) -> jax.Array:
        """Within all ranks' capacity. rank: the slot's number among its expert's here."""
        if not self.over:
            return rank < spec.capacity(ids.shape[0])
        ranks = jax.lax.axis_size(self.over)
        earlier = jnp.arange(ranks) < jax.lax.axis_index(self.over)
        before = jnp.where(earlier[:, None], jax.lax.all_gather(counts, self.over), 0).sum(axis=0)
        return rank + before[ids] < spec.capacity(ranks * ids.shape[0])


def run_layer(
    operands: MoEOperands,
    around: Mapping[str, LayerPart],
    spec: MoELayerSpec,
    by: RoutedBy,
    ranks: Ranks | None = None,
    lora_dropout: float = 0.0,
) -> tuple[MoEOutput | ParallelOutput, jax.Array]:
    """A layer's result, and slots of each expert `[E]` before any capacity limit."""
    x, mask, of_layer = operands.x, operands.token_mask, _Experts(spec, ranks)
    staged = spec.in_stages or spec.token_rounding is not None
    staged |= operands.lora is not None and operands.lora.beyond_experts
    if not staged and by.gate_inputs is None and by.expert_ids is None:
        moe_spec = dataclasses.replace(of_layer.spec(spec, x.shape[0]), lora_dropout=lora_dropout)
        lora = {"lora": operands.lora, "adapter_ids": operands.adapter_ids} if operands.lora is not None else {}
        result = of_layer.run(x, operands.experts, operands.routing, moe_spec, mask, operands.shared, **lora)
        return result._replace(output=_finished(result.output, around, spec)), result.tokens_per_expert
    if spec.norm_of_experts is not None and operands.lora is not None and operands.lora.of_experts() is not None:
        raise Unsupported("layers with a norm of each expert's result take no adapters, got some; leave them out")
    result, counts = _run_stages(operands, around, spec, by, of_layer, lora_dropout)
    return result._replace(output=_finished(result.output, around, spec)), counts


def _run_stages(
    operands: MoEOperands,
    around: Mapping[str, LayerPart],
    spec: MoELayerSpec,
    by: RoutedBy,
    of_layer: _Experts,
    lora_dropout: float,
) -> tuple[MoEOutput | ParallelOutput, jax.Array]:
    x, router, mask = operands.x, operands.routing, operands.token_mask
    factors, lora, own, invalid_adapters = operands.lora, {}, None, 0
    moe_spec = dataclasses.replace(of_layer.spec(spec, x.shape[0]), lora_dropout=lora_dropout)
    if factors is not None:
        if factors.beyond_experts:
            own, invalid_adapters = adapted_tokens(ops.ARRAYS, factors, operands.adapter_ids, lora_dropout, mask)
        if (of_experts := factors.of_experts()) is not None:
            masked = operands.adapter_ids if mask is None else jnp.where(mask, operands.adapter_ids, -1)
            lora, invalid_adapters = {"lora": of_experts, "adapter_ids": masked}, 0
        else:
            moe_spec = dataclasses.replace(moe_spec, lora_dropout=0.0)
    scored = x if by.gate_inputs is None else by.gate_inputs
    # The router's backward multiplies rows by 0 for masked tokens: rows may hold NaN.
    rows = scored if mask is None else jnp.where(mask[:, None], scored, 0)
    if spec.router_norm is not None:
        rows = ops.rms_norm(rows, router.norm, spec.router_norm)
    if own is not None and own.factors.a_router is not None:
        logits = adapted_logits(ops.ARRAYS, rows, router, moe_spec, own)
    else:
        logits = ops.router(rows, router.weight, bias=router.bias, spec=moe_spec.logits_spec())
    bias, rounding = router.correction_bias if by.expert_ids is None else None, spec.token_rounding
    if rounding is not None:
        refuse_given_ids(by.expert_ids is not None)
        *table, counts = ops.route_rounded(logits, spec.router, rounding, correction_bias=bias, token_mask=mask)
        routing = Routing(*table)
    elif spec.sparse_mixer is None:
        routing = ops.route(logits, spec.router, correction_bias=bias, token_mask=mask, ids=by.expert_ids)
    else:
        routing = _sparse_mixed(logits, spec.sparse_mixer, mask)
    if spec.expert_scale:
        routing = routing._replace(weights=_scaled(routing, router.expert_scale))
    ids = routing.ids
    if rounding is None:
        layout = ops.make_layout(ids, spec.num_experts)
        counts, invalid_ids = layout.group_sizes, layout.invalid_ids
    else:
        invalid_ids = jnp.zeros_like(counts[:1])
    if spec.capacity_factor is not None:
        # A slot's number among its expert's. Slots without a row keep the id -1.
        rank = layout.row_of_slot.reshape(ids.shape) - layout.group_start[ids]
        ids = jnp.where(of_layer.kept(rank, ids, spec, counts), ids, -1)
    if by.expert_ids is not None:
        outside = (by.expert_ids < -1) | (by.expert_ids >= spec.num_experts)
        outside = outside if mask is None else outside & mask[:, None]
        invalid_ids = outside.sum(dtype=jnp.int32).reshape(1)
    given_ids = TopK(ids, routing.weights)
    shares = factors is not None and (factors.a1_shared is not None or factors.a2_shared is not None)
    if spec.latent is None and spec.norm_of_experts is None and not shares:
        limit = None if rounding is None or lora else rounding.row_limit(spec.top_k)
        moe_spec = dataclasses.replace(moe_spec, router=None, row_limit=limit)
        result = of_layer.run(x, operands.experts, given_ids, moe_spec, shared=operands.shared, **lora)
    else:
        result = _around_experts(operands, around, (spec, moe_spec), given_ids, of_layer, lora, own if shares else None)
    if lora:
        assert result.invalid_ids is not None
        invalid_adapters = result.invalid_ids
    invalid_ids = invalid_ids + invalid_adapters
    # Under a replay, the layer's choice: the experts' are the trace's, without a gradient.
    return result._replace(ids=ids, weights=routing.weights, logits=logits, invalid_ids=invalid_ids), counts


def _sparse_mixed(logits: jax.Array, epsilon: float, token_mask: Any) -> Routing:
    """ids and weights `[T, 2]`, see `MoELayerSpec.sparse_mixer`."""
    left, choices, fixed = logits, [], jax.lax.stop_gradient(logits)
    for _ in range(2):
        largest = jax.lax.stop_gradient(left).max(axis=-1, keepdims=True)
        far = (largest - fixed) / jnp.maximum(jnp.abs(fixed), largest) > 2 * epsilon
        choices.append(ops.route(jnp.where(far, -jnp.inf, left), RouterSpec(1), token_mask=token_mask))
        left = jnp.where(jnp.arange(logits.shape[1]) == choices[-1].ids, -jnp.inf, left)
    return Routing(*(jnp.concatenate(parts, axis=1) for parts in zip(*choices, strict=True)))


def _around_experts(
    operands: MoEOperands,
    around: Mapping[str, LayerPart],
    specs: tuple[MoELayerSpec, MoESpec],
    routing: TopK,
    of_layer: _Experts,
    lora: dict[str, Any],
    of_shared: Any,
) -> MoEOutput | ParallelOutput:
    x, experts, (spec, moe_spec) = operands.x, operands.experts, specs
    product = MatmulSpec(moe_spec.weight_layout, allow_tf32=spec.allow_tf32, tuning=moe_spec.matmul_tuning())
    rows = x
    if spec.latent is not None:
        # The projection's backward multiplies rows without an expert by 0.
        rows = jnp.where((routing.ids >= 0).any(axis=1, keepdims=True), x, 0)
        rows = ops.matmul_ogs(MatmulOperands(rows, around["before"].weight), None, product)
        if spec.latent.norm is not None:
            rows = ops.rms_norm(rows, around["before"].norm, spec.latent.norm)
    if spec.norm_of_experts is None:
        plain = dataclasses.replace(moe_spec, router=None, shared_activation=None)
        result = of_layer.run(rows, experts, routing, plain, **lora)
    else:
        output = _normalised(rows, experts, routing, moe_spec, (around["output"].norm, spec.norm_of_experts))
        result = MoEOutput(output, routing.ids, routing.weights, None, None, None)
    output = result.output
    if spec.latent is not None:
        output = ops.matmul_ogs(MatmulOperands(output, around["after"].weight), None, product)
    if operands.shared is not None:
        visited = shared_output(ops.ARRAYS, x, operands.shared, moe_spec, of_shared, experts.layer_index)
        output = ops.ARRAYS.like(at_least_float32(output) + at_least_float32(visited), output)
    return result._replace(output=output)


def _normalised(x: Any, experts: Any, routing: TopK, spec: MoESpec, norm: tuple[Any, NormSpec]) -> jax.Array:
    """The norm runs between the second product and the router's weights."""
    index = experts.layer_index
    num_experts = experts.down.shape[0 if index is None else 1]
    ids, weights = routed(routing.ids, routing.weights, num_experts)
    layout = ops.make_layout(ids, num_experts)

    def multiply(rows: Any, matrix: str, product: MatmulSpec) -> jax.Array:
        weight, bias = getattr(experts, matrix), getattr(experts, f"{matrix}_bias")
        return ops.matmul_ogs(MatmulOperands(rows, weight, bias=bias, layer_index=index), layout, product)

    into = MatmulSpec(spec.weight_layout, "token", allow_tf32=spec.allow_tf32, tuning=spec.matmul_tuning(1))
    up = None if experts.up is None else multiply(x, "up", into)
    hidden = ops.activation(multiply(x, "gate_up", into), spec.activation, up=up)
    out = MatmulSpec(spec.weight_layout, scatter="slot", allow_tf32=spec.allow_tf32, tuning=spec.matmul_tuning(2))
    slots = at_least_float32(ops.rms_norm(multiply(hidden, "down", out), *norm))
    # A slot without a row counts in no gradient.
    factors = jnp.where(layout.row_of_slot[:, None] < 0, 0, weights.reshape(-1, 1))
    return ops.reduce(slots * factors, layout, out_dtype=x.dtype)


def _finished(rows: jax.Array, around: Mapping[str, LayerPart], spec: MoELayerSpec) -> jax.Array:
    output = spec.output
    if output is None:
        return rows
    part = around["output"]
    if output.norm is not None and not output.of_experts:
        rows = ops.rms_norm(rows, part.norm, output.norm)
    if output.scale != 1:
        rows = ops.ARRAYS.like(at_least_float32(rows) * output.scale, rows)
    if part.bias is None:
        return rows
    # In fp32, with one cast. The gradient of the bias has the router's order of sums.
    return ops.ARRAYS.like(at_least_float32(rows) + _rows_of(part.bias, len(rows)), rows)


def at_least_float32(array: Any) -> jax.Array:
    return array if array.dtype == jnp.float64 else array.astype(jnp.float32)


def _rows_of(values: Any, count: int) -> jax.Array:
    """`count` rows of the values `[N]`, as the bias of a product with zeros."""
    values = at_least_float32(values)
    zeros = jnp.zeros((count, 1), values.dtype), jnp.zeros((1, len(values)), values.dtype)
    return ops.router(*zeros, bias=values)


def _scaled(routing: Routing, scale: Any) -> jax.Array:
    """Multiply weights `[T, K]` by the scales `[E]` of their experts. Masked ones stay 0."""
    rows = _rows_of(scale, len(routing.ids))
    return routing.weights * jnp.take_along_axis(rows, jnp.maximum(routing.ids, 0), axis=1)
