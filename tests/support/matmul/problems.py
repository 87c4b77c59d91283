"""Products of plain operands described by their sizes."""

from __future__ import annotations

from moe_core.base.arrays import ArraySpec
from moe_core.base.target import Target
from moe_core.ops.matmul.problem import MatmulProblem
from moe_core.specs import Activation, LayoutSpec, MatmulSpec, MatmulTuning
from moe_core.specs.operands import MatmulOperands
from tests.support.harness import H200


def plain_problem(
    rows: int,
    groups: int,
    d: int,
    n: int,
    dtype: str = "bfloat16",
    buffers: int = 1,
    *,
    target: Target = H200,
    weight_layout: str = "in_out",
    activation: str = "silu",
    out_dtype: str | None = None,
    tuning: MatmulTuning | None = None,
) -> MatmulProblem:
    """buffers: 2 for a fused gated activation."""
    layout = LayoutSpec(rows, 1, groups)
    width = buffers * n
    weight = ArraySpec((groups, *((d, width) if weight_layout == "in_out" else (width, d))), dtype)
    fused = Activation(activation) if buffers == 2 else None
    spec = MatmulSpec(weight_layout, activation=fused, out_dtype=out_dtype, tuning=tuning)
    return MatmulProblem(MatmulOperands(ArraySpec((rows, d), dtype), weight), layout, spec, target)
