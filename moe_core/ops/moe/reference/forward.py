"""One MoE forward in NumPy, stage by stage: the reference of every engine."""

from __future__ import annotations

import dataclasses

import numpy as np

from moe_core.errors import InvalidInput
from moe_core.formats import QuantizedSpec, QuantizedTensor
from moe_core.ops.activation.reference import activation
from moe_core.ops.common.rounding import plain_name, round_to, to_float32
from moe_core.ops.matmul.reference.forward import Matrix, matmul_ogs
from moe_core.ops.matmul.reference.rows import rows_of
from moe_core.ops.norm.reference import rms_norm
from moe_core.ops.quantize.reference import quantize_rows
from moe_core.ops.reduction.reference import reduce, scale_rows
from moe_core.ops.router.reference import router
from moe_core.ops.routing.reference import layout as make_layout
from moe_core.ops.routing.reference import route
from moe_core.specs import LayoutSpec, LogitsSpec, MatmulSpec, MatmulTuning, MoESpec
from moe_core.specs import operands as bundles


def routing_stages(
    x: np.ndarray,
    routing: bundles.RouterWeights | bundles.RouterLogits | bundles.TopK,
    spec: MoESpec,
    token_mask: np.ndarray | None,
    given: np.ndarray | None = None,
) -> dict[str, np.ndarray]:
    """logits (unless routing has ids), ids and weights. given: replaces the router's ids."""
    if isinstance(routing, bundles.TopK):
        return {"ids": routing.ids, "weights": to_float32(routing.weights)}
    from_x = isinstance(routing, bundles.RouterWeights)
    if isinstance(routing, bundles.LayerRouter) and routing.spec is not None:
        x = rms_norm(x, routing.norm, spec=routing.spec)
    logits = router(x, routing.weight, routing.bias, spec=spec.logits_spec()) if from_x else routing.logits
    if spec.router is None:
        raise InvalidInput(
            "spec.router must be a RouterSpec where ids are not given, got None; pass MoESpec(router=...)"
        )
    ids, weights = route(logits, routing.correction_bias, token_mask, given, spec=spec.router)
    if isinstance(routing, bundles.LayerRouter) and routing.expert_scale is not None:
        weights = weights * to_float32(routing.expert_scale)[np.maximum(ids, 0)]
    return {"logits": logits, "ids": ids, "weights": weights}


def shared_output(
    x: np.ndarray, shared: bundles.SharedExpert, spec: MoESpec, layer_index: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray | None]:
    """The shared expert's output fp32 `[T, D]` (unrounded) and gate logits fp32 `[T, 1]`."""
    # The shared expert may be unstacked in a stack of layers.
    layer_index = layer_index if shared.gate_up.ndim == 3 else None
    product = MatmulSpec(spec.weight_layout, allow_tf32=spec.allow_tf32)
    first = dataclasses.replace(product, activation=spec.of_shared().activation)
    hidden_TF = matmul_ogs(bundles.MatmulOperands(x, shared.gate_up, shared.up, layer_index=layer_index), first)
    second = dataclasses.replace(product, out_dtype="float32")
    output_TD = matmul_ogs(bundles.MatmulOperands(hidden_TF, shared.down, layer_index=layer_index), second)
    if shared.gate is None:
        return output_TD, None
    return output_TD, router(x, shared.gate, spec=LogitsSpec(spec.weight_layout, allow_tf32=spec.allow_tf32))


def _quantized(rows: np.ndarray, spec: MoESpec, static_scale: np.ndarray | None, row_of_slot: np.ndarray) -> Matrix:
    """Rows in spec.activations, if set. A common scale comes from rows that a slot has."""
    format = spec.activations
    if format is None:
        return rows
    used_by = row_of_slot if format.group_rows is None and static_scale is None else None
    return QuantizedTensor(QuantizedSpec(format), *quantize_rows(rows, static_scale, used_by, format=format))


def moe_stages(
    x: np.ndarray,
    experts: bundles.ExpertWeights,
    routing: bundles.RouterWeights | bundles.RouterLogits | bundles.TopK,
    spec: MoESpec,
    *,
    token_mask: np.ndarray | None = None,
    expert_map: np.ndarray | None = None,
    shared: bundles.SharedExpert | None = None,
) -> dict[str, np.ndarray]:
    """Every stage of one MoE forward on x `[T, D]`, in order.

    Keys: logits fp32 `[T, E]` (unless ids are given), ids int32 and weights fp32 `[T, K]`, matmul1 `[T * K, 2F]` (or F)
    before the activation, activation `[T * K, F]`, matmul2 `[T * K, D]` times the router weight, output `[T, D]`,
    tokens_per_expert int32 `[E]` (local experts), invalid_ids int32 `[1]`. Stages by slot are exact zeros without an
    expert. They and the output (unless spec.out_dtype is set) have the dtype of x. matmul1 is rounded for this report
    only: the activation uses the fp32 accumulator. gate_layout `separate` has gate columns, then up. A shared expert
    also processes masked tokens. With quantised experts (docs/user/quantization.md) the stage activation is quantised.

    Raises InvalidInput for apply_router_weight_on_input with K > 1, no spec.router, or a layer_index outside the stack.
    """
    stages = routing_stages(x, routing, spec, token_mask)
    num_tokens, top_k = stages["ids"].shape
    weights_S = stages["weights"].reshape(-1)
    source_TD = x
    spec.require_slots(top_k)
    if spec.apply_router_weight_on_input:
        source_TD = scale_rows(x, stages["weights"])

    num_experts = experts.down.shape[0 if experts.layer_index is None else 1]
    layout = LayoutSpec(num_tokens, top_k, num_experts, limit=spec.row_limit)
    *groups, row_of_slot, invalid = make_layout(stages["ids"], expert_map, token_mask, layout=layout)[:5]
    rows = rows_of(layout, *groups)

    tuning = MatmulTuning(batch_invariant=True) if spec.batch_invariant else None

    def by_slot(operands: bundles.MatmulOperands, gather: str, out_dtype: str) -> np.ndarray:
        matmul = MatmulSpec(spec.weight_layout, gather, "slot", None, out_dtype, spec.allow_tf32, tuning=tuning)
        return matmul_ogs(dataclasses.replace(operands, layer_index=experts.layer_index), matmul, rows)

    source_TD = _quantized(source_TD, spec, experts.gate_up_input_scale, row_of_slot)
    gate_up_SN = by_slot(
        bundles.MatmulOperands(source_TD, experts.gate_up, bias=experts.gate_up_bias), "token", "float32"
    )
    up_SF = None
    if experts.up is not None:
        up_SF = by_slot(bundles.MatmulOperands(source_TD, experts.up, bias=experts.up_bias), "token", "float32")
    slot_dtype = plain_name(x)
    hidden_SF = activation(gate_up_SN, up_SF, activation=spec.activation, out_dtype=slot_dtype)
    before_SN = gate_up_SN if up_SF is None else np.concatenate([gate_up_SN, up_SF], axis=1)
    row_weight_S = None if spec.apply_router_weight_on_input else weights_S
    second_SF = _quantized(hidden_SF, spec, experts.down_input_scale, row_of_slot)
    product = bundles.MatmulOperands(second_SF, experts.down, bias=experts.down_bias, row_weight=row_weight_S)
    slots_SD = by_slot(product, "slot", slot_dtype)
    extra_TD = (None, None) if shared is None else shared_output(x, shared, spec, experts.layer_index)
    output_TD = reduce(
        slots_SD, row_of_slot, *extra_TD, top_k=top_k, order="slot", out_dtype=spec.out_dtype or slot_dtype
    )
    return stages | {
        "matmul1": round_to(before_SN, slot_dtype),
        "activation": hidden_SF,
        "matmul2": slots_SD,
        "output": output_TD,
        "tokens_per_expert": groups[0],
        "invalid_ids": invalid,
    }
