"""Planning of the grouped matmul that runs on every compiled target (`kernel.matmul_ogs`)."""

from __future__ import annotations

from moe_core.base.arrays import ArraySpec, row_stride
from moe_core.ops.matmul.arguments import SCHEDULED_INPUTS, bias_strides, block_constants, fused_constants, row_counts
from moe_core.ops.matmul.portable.tiles import PortableTiles
from moe_core.ops.matmul.problem import MatmulProblem
from moe_core.plan.builder import PlanBuilder
from moe_core.plan.steps import Argument, Kernel, passed
from moe_core.specs.tile import TileConfig

MATMUL_OGS = Kernel("matmul.portable.kernel:matmul_ogs", pdl="layout")


class _Portable(PortableTiles):
    """The tiles, and their launch."""

    def launch(self, builder: PlanBuilder, problem: MatmulProblem, config: TileConfig, stage: int | None) -> None:
        arguments = _arguments(builder, problem, config)
        builder.launch(MATMUL_OGS, (problem.tiles(config),), arguments, config.num_warps, config.num_stages)
        builder.sums(f"k in blocks of {config.block_k}, in order, fp32 accumulator, one dot per block; no split")


PORTABLE = _Portable()


def _arguments(builder: PlanBuilder, problem: MatmulProblem, config: TileConfig) -> dict[str, Argument]:
    """Every kernel parameter in order."""
    operands, spec, sizes = problem.operands, problem.spec, problem.sizes
    weight: ArraySpec = operands.weight
    k_axis, n_axis = (-2, -1) if spec.weight_layout == "in_out" else (-1, -2)
    stacked, ragged = operands.layer_index is not None, problem.layout is not None
    # A second weight without an activation is that of a joined product.
    joined = passed(GATE_LAYOUT="joined") if problem.joined else {}
    tf32 = spec.allow_tf32 and operands.x.dtype == "float32"
    layer_stride, expert_stride = weight.stride[0] if stacked else 0, weight.stride[-3] if ragged else 0
    names = ("x", "weight", "up", "bias", "up_bias", "row_weight", "layer_index", *SCHEDULED_INPUTS, "y", "pre")
    return {
        **(builder.pointers(*names) | row_counts(problem, config)),
        **passed(D=sizes.d, N=sizes.n, WEIGHT_N=sizes.weight_n, NUM_LAYERS=sizes.num_layers),
        **passed(X_STRIDE=row_stride("x", operands.x), LAYER_STRIDE=layer_stride, EXPERT_STRIDE=expert_stride),
        **passed(K_STRIDE=weight.stride[k_axis], N_STRIDE=weight.stride[n_axis]),
        **(bias_strides(operands) | fused_constants(problem) | joined),
        **(passed(INPUT_PRECISION="tf32" if tf32 else "ieee") | block_constants(config) | passed(PDL=None)),
    }
