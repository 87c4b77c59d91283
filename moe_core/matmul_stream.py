"""Planning of the grouped matmul for few rows per expert, whose weights go into registers (`kernels.stream`)."""

from __future__ import annotations

from moe_core.formats import QuantizedTensor
from moe_core.formats.tiling import TiledBlock, block_of
from moe_core.matmul_mixed import block_width, tiled_constants
from moe_core.operands import MatmulOperands
from moe_core.plan import Argument, Constant, PlanBuilder, Pointer, Scalar
from moe_core.specs import LayoutSpec, MatmulSpec
from moe_core.tuning import TileConfig

FAMILY = "stream"
#: Rows of a block of the grid, as many as one instruction takes.
_HEIGHT = 8
#: Blocks along the reduction that are under way, the most first: as many as there are registers for.
_CHUNKS = (4, 3, 2)
#: Columns of one product, of which a sum takes every other one.
_DEPTH = 64
#: Registers of a thread, so that four blocks share a multiprocessor.
_REGISTERS = 128


def why_illegal_stream(config: TileConfig, weight: QuantizedTensor, spec: MatmulSpec) -> str | None:
    """The reason a configuration of the family cannot run a product with a tiled weight, or None."""
    if config.block_m != _HEIGHT:
        return f"block_m must be {_HEIGHT}, got {config.block_m}"
    if config.block_n != block_width(spec):
        return f"block_n must be {block_width(spec)}, one block of weight rows, got {config.block_n}"
    depths = [chunk * block_of(weight.format).columns for chunk in _CHUNKS]
    if config.block_k not in depths:
        return f"block_k must be one of {', '.join(map(str, depths))}, got {config.block_k}"
    if config.num_warps != 4 or config.num_stages != 2 or config.group_m < 1:
        return (
            f"num_warps must be 4, num_stages 2 and group_m at least 1, got {config.num_warps}, {config.num_stages} "
            f"and {config.group_m}"
        )
    return None


def stream_config(weight: QuantizedTensor, spec: MatmulSpec) -> TileConfig:
    """The configuration for a tiled weight: the most blocks under way that add few of zeros behind the last one."""
    block, steps = block_of(weight.format), weight.values.shape[-2]
    # Steps that share scales stay together: they load them once.
    chunks = [chunk for chunk in _CHUNKS if _alike(block, chunk, steps) in (chunk, block.repeat)]
    chunk = next((chunk for chunk in chunks if -steps % chunk <= steps // 8), _CHUNKS[-1])
    return TileConfig(_HEIGHT, block_width(spec), chunk * block.columns, 4, 2, 1, FAMILY)


def _alike(block: TiledBlock, chunk: int, steps: int) -> int:
    """How many of the `chunk` steps under way share their scales whenever they are loaded."""
    repeat = block.repeat
    if repeat is None or repeat >= steps or repeat % chunk == 0:
        return chunk
    return repeat if chunk % repeat == 0 else 1


def launch_stream(
    builder: PlanBuilder, operands: MatmulOperands, n: int, layout: LayoutSpec, spec: MatmulSpec, config: TileConfig
) -> None:
    """Add the launch that computes y, n columns. Buffers by the names of `plan_matmul_ogs`."""
    weight: QuantizedTensor = operands.weight
    block, steps = block_of(weight.format), weight.values.shape[-2]
    chunk = config.block_k // block.columns

    def optional(name: str) -> Pointer | Constant:
        return Pointer(name) if builder.has(name) else Constant(None)

    arguments: dict[str, Argument] = {
        "x": Pointer("x"),
        "weight": Pointer("weight.values"),
        "scales": Pointer("weight.scales"),
        "zero_points": optional("weight.zero_points"),
        **{name: optional(name) for name in ("bias", "row_weight", "layer")},
        **{name: Pointer(name) for name in ("group_sizes", "group_start", "slot_of_row", "schedule", "y")},
        "num_rows": Scalar(layout.capacity),
        "num_slots": Scalar(layout.num_slots),
        **tiled_constants(operands, n, layout, spec),
        "ALIKE": Constant(_alike(block, chunk, steps)),
        "BLOCK_M": Constant(config.block_m),
        "CHUNK": Constant(chunk),
        "SPAN": Constant(block.columns << (chunk - 1).bit_length()),
        "REGISTERS": Constant(_REGISTERS),
        "OVERLAP": Constant(None),
    }
    grid = layout.max_blocks(config.block_m) * weight.values.shape[-3]
    builder.launch("stream:matmul_stream", (grid,), arguments, config.num_warps, 1)
    if block.columns == 2 * _DEPTH:
        parts = f"of every {block.columns} the first {_DEPTH} in one sum, the others in another"
    else:
        parts = f"of every {chunk} times {_DEPTH} those at even places in one sum, the others in another"
    builder.sums(
        f"k in blocks of 16, fp32 accumulators, mma.sync of 16 weight rows and 8 tokens: {parts}, each in order, added "
        "at the end"
    )
