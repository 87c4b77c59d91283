"""The operator that an op with bundles calls, and its arguments."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from moe_core.base.checks import require_flag
from moe_core.base.target import Target
from moe_core.errors import Unsupported
from moe_core.formats import QuantizedTensor
from moe_core.ops.lora.beyond import refuse_beyond_experts
from moe_core.ops.moe.backward import plan_training
from moe_core.plan.steps import LaunchPlan
from moe_core.specs import LayoutSpec, MatmulSpec, MoESpec
from moe_core.specs.operands import (
    ExpertWeights,
    LayoutArrays,
    LoRAFactors,
    MatmulOperands,
    MoEOperands,
    RaggedLayout,
    RouterLogits,
    RouterWeights,
    SharedExpert,
    TopK,
    array_fields,
)
from moe_torch.bridge.operator import Operator
from moe_torch.bridge.options import decode, require_instance
from moe_torch.operators.stages import MATMUL_OGS, MATMUL_OGS_QUANTIZED
from moe_torch.operators.table import LORA, MOE, MOE_QUANTIZED

_NO_LAYOUT = LayoutArrays()


class Request(NamedTuple):
    """Arguments are tensors in order (None where absent), then the options."""

    operator: Operator[..., Any]
    arguments: tuple[Any, ...]


def _is_quantized(first: Any, second: Any, third: Any) -> bool:
    kind = QuantizedTensor
    return isinstance(first, kind) or isinstance(second, kind) or isinstance(third, kind)


def layout_sizes(layout: RaggedLayout) -> tuple[Any, ...]:
    """A layout's fields as options. The number of tokens is None in compiled and exported programs."""
    require_instance("layout", layout, RaggedLayout)
    require_instance("layout.spec", layout.spec, LayoutSpec)
    spec, tokens = layout.spec, layout.spec.num_tokens
    tokens = None if torch.compiler.is_compiling() or isinstance(tokens, torch.SymInt) else tokens
    return tokens, spec.top_k, spec.num_experts, spec.alignment, spec.max_rows, spec.rows


def matmul_request(operands: MatmulOperands, layout: RaggedLayout | None, spec: MatmulSpec) -> Request:
    require_instance("operands", operands, MatmulOperands)
    require_instance("spec", spec, MatmulSpec)
    sizes, arrays = (None, _NO_LAYOUT) if layout is None else (layout_sizes(layout), layout)
    operator = MATMUL_OGS
    if _is_quantized(operands.x, operands.weight, operands.up):
        operator = MATMUL_OGS_QUANTIZED
    arguments = operator.arguments(
        x=operands.x, weight=operands.weight, up=operands.up, bias=operands.bias, up_bias=operands.up_bias,
        row_weight=operands.row_weight, layer_index=operands.layer_index, group_sizes=arrays.group_sizes,
        group_start=arrays.group_start, slot_of_row=arrays.slot_of_row, row_of_slot=arrays.row_of_slot, spec=spec,
        sizes=sizes,
    )  # fmt: skip
    return Request(operator, arguments)


def reads_formats(experts: Any, routing: Any, spec: Any, shared: Any = None) -> bool:
    # In line, because every eager call passes here.
    if type(experts) is not ExpertWeights:
        require_instance("experts", experts, ExpertWeights)
    if type(routing) is not RouterWeights:
        require_instance("routing", routing, (RouterWeights, RouterLogits, TopK))
    if type(spec) is not MoESpec:
        require_instance("spec", spec, MoESpec)
    if shared is not None:
        require_instance("shared", shared, SharedExpert)
    # That operator's planner refuses scales of plain experts.
    if experts.gate_up_input_scale is not None or experts.down_input_scale is not None:
        return True
    return _is_quantized(experts.gate_up, experts.down, experts.up)


def moe_request(
    x: Any,
    experts: Any,
    routing: Any,
    spec: Any,
    *,
    token_mask: Any = None,
    expert_map: Any = None,
    shared: Any = None,
    **adapters: Any,
) -> Request:
    """adapters: lora and adapter_ids."""
    operators = MOE_QUANTIZED if reads_formats(experts, routing, spec, shared) else MOE
    if any(one is not None for one in adapters.values()):
        require_instance("lora", adapters["lora"], LoRAFactors)
        refuse_beyond_experts(adapters["lora"])
        require_instance("adapter_ids", adapters["adapter_ids"], torch.Tensor)
        operator = LORA[type(routing)]
        arguments = operator.arguments(
            x=x, experts=experts, routing=routing, token_mask=token_mask, expert_map=expert_map, shared=shared,
            spec=spec, **adapters,
        )  # fmt: skip
        return Request(operator, arguments)
    operator = operators[type(routing)]
    arguments = operator.arguments(
        x=x, experts=experts, routing=routing, token_mask=token_mask, expert_map=expert_map, shared=shared, spec=spec,
    )  # fmt: skip
    return Request(operator, arguments)


def operands_of(operator: Operator[..., Any], arguments: tuple[Any, ...]) -> MoEOperands:
    *tensors, options = arguments
    keywords = operator.signature.keywords(operator.specs(tensors), decode(options))
    return MoEOperands(**{name: keywords[name] for name, _ in array_fields(MoEOperands) if name in keywords})


def training_plans(operator: Operator[..., Any], arguments: tuple[Any, ...], target: Target) -> tuple[LaunchPlan, ...]:
    operator.plan(arguments, target)
    return plan_training(operands_of(operator, arguments), decode(arguments[-1])[0], target)


def require_checkable(checked: bool) -> None:
    """Refuse `checked` in traced code, or while a CUDA graph is captured."""
    require_flag("checked", checked)
    if not checked:
        return
    if torch.compiler.is_compiling() or (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
        raise Unsupported(
            "checked=True reads a counter on the host, which a compiled, exported or captured graph cannot do; "
            "leave it out there and test invalid_ids afterwards"
        )
