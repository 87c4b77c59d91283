"""The operators of grouped matmuls of rows in the order of their groups. offs `[G]`: their ends."""

from __future__ import annotations

from typing import Any

from moe_core.base.arrays import ArraySpec
from moe_core.base.target import Target
from moe_core.ops.matmul.grouped import plan_grouped_contraction, plan_grouped_mm
from moe_core.ops.routing.groups import Groups
from moe_core.plan.steps import LaunchPlan
from moe_core.specs.matmul import MatmulSpec
from moe_core.specs.operands import MatmulOperands
from moe_torch.bridge.operator import Operator, Outputs
from moe_torch.bridge.signature import MaybeTensor, Signature, Tensor
from moe_torch.operators.shapes import out_dtype_of, width_of


def _grouped_mm(*, x: Tensor, weight: Tensor, bias: MaybeTensor, offs: Tensor, spec: MatmulSpec) -> Tensor: ...
def _grouped_contraction(*, left: Tensor, right: Tensor, offs: Tensor, out_dtype: str | None) -> Tensor: ...


def _plan(x: Any, weight: Any, bias: Any, offs: ArraySpec, spec: MatmulSpec, target: Target) -> LaunchPlan:
    return plan_grouped_mm(MatmulOperands(x, weight, bias=bias), Groups(offs, True), spec, target)


def _plan_contraction(
    left: ArraySpec, right: ArraySpec, offs: ArraySpec, out_dtype: str | None, target: Target
) -> LaunchPlan:
    return plan_grouped_contraction(left, right, Groups(offs, True), target, out_dtype=out_dtype)


def _shapes(call: Any) -> Outputs:
    width = width_of(call.weight, call.spec.weight_layout)
    return [((call.x.shape[0], width), out_dtype_of(call.x, call.spec.out_dtype))]


def _contraction_shapes(call: Any) -> Outputs:
    return [((call.offs.shape[0], call.left.shape[1], call.right.shape[1]), out_dtype_of(call.left, call.out_dtype))]


_QUANTIZED = Signature("grouped_mm_quantized", ("x", "weight", "bias?", "offs"), ("spec",), matrices=("x", "weight"))
#: x `[R, K]`, weight `[G, K, N]` or `[G, N, K]`, bias `[G, N]`.
GROUPED_MM = Operator(_grouped_mm, _plan, _shapes)
GROUPED_MM_QUANTIZED = Operator(_QUANTIZED, _plan, _shapes)
#: left `[R, M]`, right `[R, N]`. Returns `[G, M, N]`.
GROUPED_CONTRACTION = Operator(_grouped_contraction, _plan_contraction, _contraction_shapes)
