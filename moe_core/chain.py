"""Chaining: of few tokens' plans, both products and the reduction in one launch (`moe_core.kernels.chained`).

Few tokens' forwards stream weights, and each boundary between launches costs what it takes the memory to fall silent
and start again: the last blocks of a grid, a launch, the first loads. In one launch a block of product 2 begins as soon
as a block of product 1 has left room and its own rows are done, so that weights never stop coming; the reduction's
begin while the last ones of product 2 run. What is computed is the same, to the bit: the tiles are those of the
launches apart, and a tile's sums know nothing of others.

Blocks that wait do so for blocks that were given a lower number, in the order in which they began: that they end does
not depend on the order in which the GPU begins blocks, nor on how many it runs at once.
"""

from __future__ import annotations

import dataclasses

from moe_core.activation import elementwise_tile
from moe_core.layout import padded
from moe_core.plan import Argument, Constant, KernelLaunch, LaunchPlan, Pointer, Scalar
from moe_core.target import Target
from moe_core.tuning import TileConfig

#: Plans of more tokens launch their stages one by one.
MOST_TOKENS = 256
#: Counters before those of row blocks.
_COUNTERS = 2
_STAGES = ("matmul_ogs:matmul_ogs", "matmul_ogs:matmul_ogs", "reduction:reduce")
#: Columns of a program of the reduction: latency alone counts, and they are spread over as many as there can be.
_REDUCED_COLUMNS = 512


def why_not_chained(
    configs: tuple[TileConfig | None, ...], num_tokens: int, target: Target, *, alone: bool, batch_invariant: bool
) -> str:
    """The reason the stages of a forward are launches of their own; empty if they may be one.

    configs: of both products, None where there are no tiles. alone: whether the reduction follows product 2 and has
    nothing but its slots to add up, and nothing of the products is kept.
    """
    first, second = configs
    if first is None or second is None or num_tokens == 0:
        return "there are no tiles"
    if (first.family, second.family) != ("portable", "portable"):
        return f"portable products are chained, got {first.family} and {second.family}"
    if num_tokens > MOST_TOKENS:
        return f"chaining gains nothing above {MOST_TOKENS} tokens, got {num_tokens}"
    if first.block_m != second.block_m or first.num_warps != second.num_warps:
        return "both products need row blocks of one height and one number of warps"
    if not alone:
        return "something is kept for a backward, or added in the reduction"
    if batch_invariant:
        return "batch_invariant runs the same kernels for every number of tokens"
    return ""


def chain_counters(max_blocks: int) -> int:
    """The int32 counters a chained launch takes, a power of two."""
    return padded(_COUNTERS + max_blocks, 1)


def chain_launches(plan: LaunchPlan) -> LaunchPlan:
    """The plan with its last three launches as one. It has scratch `tile_counters`, cleared by a launch before."""
    *before, first, second, reduction = plan.steps
    stages = (first, second, reduction)
    assert all(isinstance(step, KernelLaunch) for step in stages), stages
    assert tuple(step.kernel for step in stages) == _STAGES, stages  # type: ignore[union-attr]
    chained = _chained(*stages, plan.target)  # type: ignore[arg-type]
    note = "matmul 1, matmul 2 and reduce are one launch, whose blocks wait for each other's results"
    return dataclasses.replace(plan, steps=(*before, chained), notes=(*plan.notes, note))


def _chained(first: KernelLaunch, second: KernelLaunch, reduction: KernelLaunch, target: Target) -> KernelLaunch:
    """The three launches as one: product 1 as it is launched, what product 2 has of its own with a prefix."""
    one, two, three = dict(first.arguments), dict(second.arguments), dict(reduction.arguments)

    def of(step: dict[str, Argument], *names: str, prefix: str = "") -> dict[str, Argument]:
        return {(prefix.upper() if name.isupper() else prefix) + name: step[name] for name in names}

    d, num_tokens = _number(one["D"]), _number(three["num_tokens"])
    block_t, block_d = (1, min(_REDUCED_COLUMNS, padded(d)))
    if target.kind == "interpreter":
        block_t, block_d = elementwise_tile(d, target)
    arguments = {
        **of(one, "x", "weight", "up", "bias", "up_bias"),
        **of(two, "weight", "bias", prefix="second_"),
        **of(two, "row_weight", "layer", "group_sizes", "group_start", "slot_of_row"),
        **of(three, "row_of_slot"),
        **of(one, "schedule"),
        "hidden": one["y"],
        "slots": two["y"],
        **of(three, "out"),
        "progress": Pointer("tile_counters"),
        **of(one, "num_blocks", "num_rows", "num_slots"),
        **of(three, "num_tokens"),
        "D": one["D"],
        "F": one["N"],
        **of(one, "WEIGHT_N", "NUM_LAYERS", "X_STRIDE", "LAYER_STRIDE", "EXPERT_STRIDE", "K_STRIDE", "N_STRIDE"),
        **of(one, "BIAS_LAYER_STRIDE", "UP_BIAS_LAYER_STRIDE"),
        **of(two, "LAYER_STRIDE", "EXPERT_STRIDE", "K_STRIDE", "N_STRIDE", "BIAS_LAYER_STRIDE", prefix="second_"),
        **of(one, "TOP_K", "GATE_LAYOUT", "ACTIVATION", "ALPHA", "LIMIT", "INPUT_PRECISION"),
        **of(one, "BLOCK_M", "BLOCK_N", "BLOCK_K", "GROUP_M"),
        "STAGES": Constant(first.num_stages),
        **of(two, "BLOCK_N", "BLOCK_K", "GROUP_M", prefix="second_"),
        "SECOND_STAGES": Constant(second.num_stages),
        **of(three, "UNROLL"),
        "BLOCK_T": Constant(block_t),
        "BLOCK_D": Constant(block_d),
        "OVERLAP": Constant(None),
    }
    programs = first.grid[0] + second.grid[0] + -(-num_tokens // block_t) * -(-d // block_d)
    stages = max(first.num_stages, second.num_stages)
    return KernelLaunch("chained:chained", (programs, 1, 1), tuple(arguments.items()), first.num_warps, stages)


def _number(argument: Argument) -> int:
    assert isinstance(argument, Constant | Scalar) and isinstance(argument.value, int), argument
    return argument.value
