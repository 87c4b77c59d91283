"""Small plans of no particular op."""

from __future__ import annotations

from moe_core.base.arrays import ArraySpec
from moe_core.base.target import Target
from moe_core.ops.reduction.rowwise import CAST_ROWS
from moe_core.plan.builder import PlanBuilder
from moe_core.plan.steps import Constant, LaunchPlan, Pointer, Scalar

CUDA = Target("cuda", 90, 132)


def small_plan(block: int = 64, tokens: int = 10, target: Target = CUDA, warps: int = 4) -> LaunchPlan:
    builder = PlanBuilder("double", target)
    builder.input("x", ArraySpec((tokens, 3), "bfloat16"))
    builder.output("y", ArraySpec((tokens, 3), "float32"))
    builder.scratch("partial", ArraySpec((tokens,), "float32"))
    builder.scratch("counts", ArraySpec((7,), "int32"))
    arguments = {
        "x_pointer": Pointer("x"),
        "y_pointer": Pointer("y"),
        "partial_pointer": Pointer("partial"),
        "num_tokens": Scalar(tokens),
        "scale": Scalar(0.1, "float32"),
        "BLOCK": Constant(block),
        "bias_pointer": Constant(None),
    }
    builder.launch(CAST_ROWS, (-(-tokens // block), 2), arguments, num_warps=warps)
    builder.sums("y: ascending columns, one tile")
    builder.note("split-K rejected: one tile holds the reduction")
    return builder.build()
