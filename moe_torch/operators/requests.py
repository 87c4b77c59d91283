"""What a call of an op with bundles calls: the operator, its tensors in order and its options."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from moe_core.base.target import Target
from moe_core.formats import QuantizedTensor
from moe_core.ops.moe.backward import plan_training
from moe_core.plan.steps import LaunchPlan
from moe_core.specs.matmul import MatmulSpec
from moe_core.specs.moe import MoESpec
from moe_core.specs.operands import (
    ExpertWeights,
    MatmulOperands,
    MoEOperands,
    RaggedLayout,
    RouterLogits,
    RouterWeights,
    SharedExpert,
    TopK,
    array_fields,
)
from moe_core.specs.routing import LayoutSpec
from moe_torch.bridge.operator import Operator
from moe_torch.bridge.options import decode, encode, require_instance
from moe_torch.operators.table import MATMUL_OGS, MATMUL_OGS_QUANTIZED, MOE, MOE_QUANTIZED

#: An operator, its tensors in order (None where absent), its options.
Request = tuple[Operator, Sequence[Any], str]


# Dynamo reads no attrgetter, and a loop over names takes longer.
def _operand_arrays(operands: MatmulOperands) -> tuple[Any, ...]:
    """The arrays of a bundle in the order of the operators' arguments, as those below."""
    return (
        operands.x, operands.weight, operands.up, operands.bias, operands.up_bias, operands.row_weight,
        operands.layer_index,
    )  # fmt: skip


def _expert_arrays(experts: ExpertWeights) -> tuple[Any, ...]:
    return (
        experts.gate_up, experts.down, experts.up, experts.gate_up_bias, experts.up_bias, experts.down_bias,
        experts.layer_index, experts.gate_up_input_scale, experts.down_input_scale,
    )  # fmt: skip


def routing_arrays(routing: RouterWeights | RouterLogits | TopK) -> tuple[Any, ...]:
    if isinstance(routing, RouterWeights):
        return routing.weight, routing.bias, routing.correction_bias
    if isinstance(routing, RouterLogits):
        return routing.logits, routing.correction_bias
    return routing.ids, routing.weights


def _shared_arrays(shared: SharedExpert | None) -> tuple[Any, ...]:
    if shared is None:
        return None, None, None, None
    require_instance("shared", shared, SharedExpert)
    return shared.gate_up, shared.down, shared.up, shared.gate


def _is_quantized(first: Any, second: Any, third: Any) -> bool:
    """Whether one of three matrices is a `QuantizedTensor`."""
    kind = QuantizedTensor
    return isinstance(first, kind) or isinstance(second, kind) or isinstance(third, kind)


def layout_sizes(layout: RaggedLayout) -> tuple[Any, ...]:
    """The sizes of a layout among the options of an operator: its fields.

    Compiled and exported programs, whose number of tokens may change, leave it out: row_of_slot tells it.
    """
    require_instance("layout", layout, RaggedLayout)
    require_instance("layout.spec", layout.spec, LayoutSpec)
    spec, tokens = layout.spec, layout.spec.num_tokens
    tokens = None if torch.compiler.is_compiling() or isinstance(tokens, torch.SymInt) else tokens
    return tokens, spec.top_k, spec.num_experts, spec.alignment, spec.max_rows, spec.rows


def matmul_request(operands: MatmulOperands, layout: RaggedLayout | None, spec: MatmulSpec) -> Request:
    """What `matmul_ogs` calls for such operands. Raises InvalidInput for arguments of another type."""
    require_instance("operands", operands, MatmulOperands)
    require_instance("spec", spec, MatmulSpec)
    sizes, grouping = None, (None, None, None, None)
    if layout is not None:
        sizes = layout_sizes(layout)
        grouping = (layout.group_sizes, layout.group_start, layout.slot_of_row, layout.row_of_slot)
    arrays = (*_operand_arrays(operands), *grouping)
    if _is_quantized(operands.x, operands.weight, operands.up):
        signature = MATMUL_OGS_QUANTIZED.signature
        return MATMUL_OGS_QUANTIZED, signature.tensors(arrays), encode(spec, sizes, signature.formats(arrays))
    return MATMUL_OGS, arrays, encode(spec, sizes)


def moe_request(
    x: Any, experts: Any, routing: Any, spec: Any, token_mask: Any, expert_map: Any, shared: Any
) -> Request:
    """What `moe` calls for such experts and routing. Raises InvalidInput for arguments of another type."""
    # In line: every eager call asks.
    if type(experts) is not ExpertWeights:
        require_instance("experts", experts, ExpertWeights)
    if type(routing) is not RouterWeights:
        require_instance("routing", routing, (RouterWeights, RouterLogits, TopK))
    if type(spec) is not MoESpec:
        require_instance("spec", spec, MoESpec)
    *own, scale_1, scale_2 = _expert_arrays(experts)
    arrays = [x, *own, *routing_arrays(routing), token_mask, expert_map, *_shared_arrays(shared)]
    # Scales beside plain experts are refused by the planner, which that operator reaches with them.
    if scale_1 is not None or scale_2 is not None or _is_quantized(experts.gate_up, experts.down, experts.up):
        operator = MOE_QUANTIZED[type(routing)]
        arrays += [scale_1, scale_2]
        return operator, operator.signature.tensors(arrays), encode(spec, operator.signature.formats(arrays))
    return MOE[type(routing)], arrays, encode(spec)


def operands_of(operator: Operator, tensors: Sequence[Any], options: str) -> MoEOperands:
    """The specs of the tensors of a moe operator (None where absent), as its planner takes them."""
    given = operator.signature.keywords(operator.specs(tensors), decode(options))
    return MoEOperands(**{name: given[name] for name, _ in array_fields(MoEOperands)})


def training_plans(operator: Operator, tensors: Sequence[Any], options: str, target: Target) -> tuple[LaunchPlan, ...]:
    """The plans of a training step for the tensors of a moe operator and its options."""
    # Checks what a call checks.
    operator.plan(tensors, options, target)
    return plan_training(operands_of(operator, tensors, options), decode(options)[0], target)
