"""What a case of the table is, its small sizes, and how a planner is called with its arguments."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from moe_core.base.arrays import ArraySpec
from moe_core.base.target import Target
from moe_core.errors import InvalidInput
from moe_core.ops.activation.forward import plan_activation
from moe_core.ops.matmul.forward import plan_matmul_ogs
from moe_core.ops.moe.forward import plan_moe
from moe_core.ops.moe.options import ForwardOptions
from moe_core.ops.reduction.reduce import plan_reduce, plan_scale_rows
from moe_core.ops.router.forward import plan_router
from moe_core.ops.routing.bitmatrix import plan_pack_bitmatrix, plan_unpack_bitmatrix
from moe_core.ops.routing.layout import plan_layout
from moe_core.ops.routing.topk import plan_routing
from moe_core.plan.steps import LaunchPlan
from moe_core.specs.operands import (
    ExpertWeights,
    MatmulOperands,
    RaggedLayout,
    RouterLogits,
    RouterWeights,
    SharedExpert,
    TopK,
    map_arrays,
)
from moe_core.specs.routing import LayoutSpec, LogitsSpec

#: Tokens, choices, experts, d_model, d_ff.
T, K, E, D, F = 6, 2, 4, 16, 8
LAYOUT, DEFAULT_LOGITS = LayoutSpec(T, K, E), LogitsSpec()
BUNDLES = (ExpertWeights, MatmulOperands, RouterLogits, RouterWeights, SharedExpert, TopK)
KINDS = ("rank", "shape", "size", "dtype", "strides", "missing", "option", "unsupported")


class Case(NamedTuple):
    """`op(**arguments)` must raise `error` with a message that matches `text`.

    kind: one of KINDS. arguments: those of the front-ends' functions, an ArraySpec for every array, a LayoutSpec for a
    layout.
    """

    name: str
    kind: str
    op: str
    text: str
    arguments: Mapping[str, Any]
    error: type[Exception] = InvalidInput

    def given(self, make: Callable[[ArraySpec], Any]) -> dict[str, Any]:
        """The arguments with made arrays, also in bundles and layouts."""
        return {name: made(value, make) for name, value in self.arguments.items()}


def case_id(case: Case) -> str:
    """For names of tests."""
    return f"{case.op}-{case.kind}-{case.name}".replace(" ", "_")


def made(value: Any, make: Callable[[ArraySpec], Any]) -> Any:
    if isinstance(value, ArraySpec):
        return make(value)
    if isinstance(value, LayoutSpec):
        sizes = (value.num_experts, value.num_experts + 1, value.capacity, value.num_slots, 1)
        return RaggedLayout(value, *(make(ids(size)) for size in sizes))
    return map_arrays(value, make) if isinstance(value, BUNDLES) else value


def array(*shape: int, dtype: str = "float32", strides: tuple[int, ...] | None = None) -> ArraySpec:
    return ArraySpec(shape, dtype, strides)


def ids(*shape: int, dtype: str = "int32") -> ArraySpec:
    return ArraySpec(shape or (T, K), dtype)


def _plan_make_layout(
    target: Target, ids: ArraySpec, num_experts: int, alignment: int = 1, max_rows: int | None = None, **maps: Any
) -> LaunchPlan:
    return plan_layout(ids, LayoutSpec(T, K, num_experts, alignment, max_rows), target, **maps)


def _plan_reduce(target: Target, y: ArraySpec, layout: LayoutSpec, **options: Any) -> LaunchPlan:
    return plan_reduce(y, ArraySpec((layout.num_slots,), "int32"), layout, target, **options)


#: Op -> its plan for a target and the front-ends' arguments.
PLANNERS: dict[str, Callable[..., LaunchPlan]] = {
    "router": lambda target, x, weight, bias=None, spec=DEFAULT_LOGITS: plan_router(x, weight, bias, spec, target),
    "route": lambda target, logits, spec, **extras: plan_routing(logits, spec, target, **extras),
    "make_layout": _plan_make_layout,
    "pack_bitmatrix": lambda target, ids, num_experts: plan_pack_bitmatrix(ids, num_experts, target),
    "unpack_bitmatrix": lambda target, bitmatrix, num_experts, top_k: plan_unpack_bitmatrix(
        bitmatrix, num_experts, top_k, target
    ),
    "matmul_ogs": lambda target, operands, layout, spec: plan_matmul_ogs(operands, layout, spec, target),
    "activation": lambda target, x, activation, **extras: plan_activation(x, activation, target, **extras),
    "reduce": _plan_reduce,
    "scale_rows": lambda target, x, weights: plan_scale_rows(x, weights, target),
    "moe": lambda target, x, experts, routing, spec, **extras: plan_moe(
        x, experts, routing, spec, target, options=ForwardOptions(**extras)
    ),
}
