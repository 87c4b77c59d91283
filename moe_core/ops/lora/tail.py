"""The low-rank tail of a product: low . factor, added to its fp32 sums before bias and activation."""

from __future__ import annotations

from dataclasses import dataclass

from moe_core.base import ArraySpec
from moe_core.ops.lora.adapters import Adapters, adapter_inputs
from moe_core.plan import Argument, PlanBuilder, passed
from moe_core.specs.tile import TileConfig

#: Ranks of a step. More than the fewest spill in tiles of more rows, or of more columns of the factor for 4 warps.
_BLOCKS_R, _MOST_ROWS, _MOST_COLUMNS = (64, 32, 16), 32, 128
#: Names of a product's further inputs, after `tail.`.
INPUTS = ("low", "factor", "virtual_start", "ranks", "seed")
_CONSTANTS = ("RANK", "SLOTS", "NUM_EXPERTS", "SLOT_STRIDE", "EXPERT_STRIDE", "R_STRIDE", "N_STRIDE", "THRESHOLD")


@dataclass(frozen=True)
class Tail:
    """low `[capacity, R]` of `plan_shrink`, and factor `[S, E or 1, R, N]`, with adapters.transposed `[..., N, R]`.

    N and its order are as in the product's weights. adapters.dropout masks what is added.
    """

    low: ArraySpec
    factor: ArraySpec
    adapters: Adapters

    def inputs(self) -> dict[str, ArraySpec | None]:
        arrays = {"low": self.low, "factor": self.factor} | adapter_inputs(self.adapters, ranks=True)
        return {f"tail.{name}": arrays[name] for name in INPUTS}

    @property
    def columns(self) -> int:
        return self.adapters.sides(self.factor)[1]

    def describe(self, builder: PlanBuilder) -> None:
        order = "then ranks" if not self.adapters.dropout.mask else "then the masked sum of ranks"
        builder.sums(f"{order} of each row's adapter, in order, in the same accumulator")

    def block_r(self, config: TileConfig | None, gated: bool, most: int) -> int:
        columns = 0 if config is None else config.block_n * (2 if gated else 1) * 4 // config.num_warps
        if config is None or config.block_m > _MOST_ROWS or columns > _MOST_COLUMNS:
            most = _BLOCKS_R[-1]
        return next(size for size in _BLOCKS_R if size <= most and self.low.shape[1] % size == 0)


def tail_arguments(
    builder: PlanBuilder, tail: Tail | None, config: TileConfig | None = None, gated: bool = False, most: int = 64
) -> dict[str, Argument]:
    """Kernel arguments in the order of `kernels.tail.Tail`. config: of a tile with steps of up to `most` ranks."""
    pointers = {f"tail_{name}": builder.optional(f"tail.{name}") for name in INPUTS}
    if tail is None:
        absent = dict.fromkeys(_CONSTANTS, 0) | {"MASKED": None, "SALT": 0, "BLOCK_R": 0}
        return pointers | passed(**{f"TAIL_{name}": value for name, value in absent.items()})
    slot, expert, r_stride, n_stride = tail.adapters.strides(tail.factor)
    constants = passed(RANK=tail.low.shape[1], SLOTS=tail.adapters.slots, NUM_EXPERTS=tail.adapters.layout.num_experts)
    constants |= passed(SLOT_STRIDE=slot, EXPERT_STRIDE=expert, R_STRIDE=r_stride, N_STRIDE=n_stride)
    constants |= tail.adapters.dropout.constants() | passed(BLOCK_R=tail.block_r(config, gated, most))
    return pointers | {f"TAIL_{name}": value for name, value in constants.items()}
