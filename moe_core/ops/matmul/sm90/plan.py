"""Planning of the grouped matmul's warp-specialised kernels for Hopper (`kernels.matmul`, `kernels.tall`)."""

from __future__ import annotations

from moe_core.base.arrays import row_stride
from moe_core.base.sizes import INT32_LIMIT
from moe_core.errors import InvalidInput, Unsupported
from moe_core.ops.matmul.arguments import SCHEDULED_INPUTS, bias_strides, fused_constants, row_counts, size_constants
from moe_core.ops.matmul.problem import MatmulProblem
from moe_core.ops.matmul.sm90.tiles import SM90_BLOCK_K, SM90_BLOCK_M, SM90_TALL_BLOCK_M, SM90_WIDTH, Sm90Tiles
from moe_core.plan.builder import PlanBuilder
from moe_core.plan.steps import Argument, Kernel, TensorMap, passed
from moe_core.specs.tile import TileConfig

SM90_MATMUL_OGS = Kernel("matmul.sm90.kernels.matmul:matmul_ogs", pdl="start", whole_multiprocessor=True)
#: Its blocks take a multiprocessor each, too; PDL at any number of tokens has not been measured for it.
SM90_TALL_MATMUL_OGS = Kernel("matmul.sm90.kernels.tall:matmul_ogs", pdl="start")

_CONSUMER_ROWS, _PIECE, _PANEL = 64, 128, 64


class _Sm90(Sm90Tiles):
    """The tiles, and their launch."""

    def launch(self, builder: PlanBuilder, problem: MatmulProblem, config: TileConfig, stage: int | None) -> None:
        tall = config.block_m == SM90_TALL_BLOCK_M
        kernel = SM90_TALL_MATMUL_OGS if tall else SM90_MATMUL_OGS
        arguments = _arguments(builder, problem, config, stage)
        grid = min(problem.tiles(config), builder.target.num_sms)
        builder.launch(kernel, (grid,), arguments, config.num_warps, 1)
        products = "wgmma 64 x 256 x 16" + (" and 64 x 128 x 16" if tall else "")
        builder.sums(f"k in blocks of {config.block_k}, in order, fp32 accumulator, {products}; no split")


SM90 = _Sm90()


def _arguments(
    builder: PlanBuilder, problem: MatmulProblem, config: TileConfig, stage: int | None
) -> dict[str, Argument]:
    """Every kernel parameter in order. A stage trusts its layout, without padding inside a group, so that whole tiles
    may be stored; pre needs it."""
    operands, spec, sizes, layout = problem.operands, problem.spec, problem.sizes, problem.layout
    assert layout is not None and (stage is not None or not builder.has("pre")), "pre is stored by whole tiles"
    x, weight, in_out = operands.x, operands.weight, spec.weight_layout == "in_out"
    d, n, weight_n = sizes.d, sizes.n, sizes.weight_n
    tall = config.block_m == SM90_TALL_BLOCK_M
    if tall and builder.has("pre"):
        raise InvalidInput(
            f"config must have block_m {SM90_BLOCK_M} where the pre-activation is stored, as training does, got "
            f"{config}, whose kernel stores only the result; give one of {SM90_BLOCK_M}, or None"
        )
    matrices = weight.size // (d * weight_n)
    if matrices * max(d, weight_n) >= INT32_LIMIT:
        raise Unsupported(
            f"weight must have fewer than 2**31 rows over all layers and experts for the sm90 family, got "
            f"{matrices} matrices of {d} x {weight_n}; give a portable configuration"
        )
    two_tiles = problem.gate_layout in ("halves", "separate")
    columns = (_PANEL if tall else _PIECE) if two_tiles else SM90_WIDTH
    box = _PANEL if tall and problem.gated else _PIECE

    def weight_map(name: str) -> TensorMap:
        if in_out:
            return TensorMap(name, (matrices * d, weight_n), weight_n, (SM90_BLOCK_K, columns))
        return TensorMap(name, (matrices * weight_n, d), d, (columns, SM90_BLOCK_K))

    def output_map(name: str, columns: int | None = None) -> TensorMap | None:
        # Of the first `columns` columns, where not of all.
        if not builder.has(name):
            return None
        rows, width = builder.spec(name).shape
        return TensorMap(name, (rows, columns or width), width, (_CONSUMER_ROWS, box))

    gate_map = output_map("pre", n) if two_tiles else None
    pre = builder.pointers("pre") | passed(pre_map=output_map("pre"), gate_map=gate_map)
    stride = row_stride("x", x)
    x_map = TensorMap("x", (x.shape[0], d), stride, (_CONSUMER_ROWS, SM90_BLOCK_K))
    up_map = weight_map("up") if operands.up is not None else None
    return {
        **passed(x="x", x_map=x_map if spec.gather == "row" else None, weight_map=weight_map("weight"), up_map=up_map),
        **builder.pointers("bias", "up_bias", "row_weight", "layer_index", *SCHEDULED_INPUTS),
        **passed(counters="tile_counters", y=builder.optional("y"), y_map=output_map("y")),
        **(({} if tall else pre) | row_counts(problem, config) | size_constants(problem)),
        **(passed(X_STRIDE=stride) | bias_strides(operands) | fused_constants(problem)),
        **passed(IN_OUT=in_out, TRUSTED=stage is not None, COUNTER=stage or 0, STAGES=config.num_stages),
        **passed(GROUP_M=config.group_m, PDL=None),
    }
