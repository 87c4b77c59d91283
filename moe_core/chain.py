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
#: Counters before those of row blocks, and the fewest of a launch: one number of them for most plans, so that the
#: kernels that clear them are the same.
_COUNTERS, _FEWEST_COUNTERS = 2, 1024
#: Families of products that are chained.
_FAMILIES = ("portable", "stream")
#: Up to this K the loop over slots is unrolled; the chained reduction is that alone.
_MOST_CHOICES = 16
#: What says how the codes of tiled weights lie.
_CODES = ("ELEMENT", "COLUMNS", "GROUPS", "REPEAT", "ALIKE")
#: Elements along the reduction of product 2 that waiting blocks have the L2 cache fetch.
_AHEAD = 0
#: Columns of a program of the reduction: latency alone counts, and they are spread over as many as there can be.
_REDUCED_COLUMNS = 512


def why_not_chained(
    configs: tuple[TileConfig | None, ...], alike: bool, num_tokens: int, top_k: int, *, alone: bool,
    batch_invariant: bool,
) -> str:  # fmt: skip
    """The reason the stages of a forward are launches of their own; empty if they may be one.

    configs: of both products, None where there are no tiles. alike: whether both or none quantise their rows. alone:
    whether the reduction follows product 2 and has nothing but its slots to add up, and nothing of the products is
    kept.
    """
    first, second = configs
    if first is None or second is None or num_tokens == 0:
        return "there are no tiles"
    if not alike or first.family != second.family or first.family not in _FAMILIES:
        return f"both products need one of the families {', '.join(_FAMILIES)}, got {first.family} and {second.family}"
    if num_tokens > MOST_TOKENS:
        return f"chaining gains nothing above {MOST_TOKENS} tokens, got {num_tokens}"
    if first.block_m != second.block_m or first.num_warps != second.num_warps:
        return "both products need row blocks of one height and one number of warps"
    if top_k > _MOST_CHOICES:
        return f"top_k must be at most {_MOST_CHOICES}, got {top_k}"
    if not alone:
        return "something is kept for a backward, or added in the reduction"
    if batch_invariant:
        return "batch_invariant runs the same kernels for every number of tokens"
    return ""


def chain_counters(max_blocks: int) -> int:
    """The int32 counters a chained launch takes, a power of two."""
    return padded(_COUNTERS + max_blocks, _FEWEST_COUNTERS)


def chain_launches(plan: LaunchPlan) -> LaunchPlan:
    """The plan with its last three launches as one. It has scratch `tile_counters`, cleared by a launch before."""
    *before, first, second, reduction = plan.steps
    assert isinstance(first, KernelLaunch) and isinstance(second, KernelLaunch) and isinstance(reduction, KernelLaunch)
    assert first.kernel == second.kernel and reduction.kernel == "reduction:reduce", plan.steps
    chain = _CHAINS[first.kernel]
    note = "matmul 1, matmul 2 and reduce are one launch, whose blocks wait for each other's results"
    steps = (*before, chain(first, second, reduction, plan.target))
    return dataclasses.replace(plan, steps=steps, notes=(*plan.notes, note))


def _of(step: KernelLaunch, *names: str, prefix: str = "") -> dict[str, Argument]:
    """Arguments of a launch; prefix: what goes before their names."""
    arguments = dict(step.arguments)
    return {(prefix.upper() if name.isupper() else prefix) + name: arguments[name] for name in names}


def _renamed(step: KernelLaunch, **names: str) -> dict[str, Argument]:
    """Arguments of a launch by other names."""
    arguments = dict(step.arguments)
    return {new: arguments[name] for new, name in names.items()}


def _number(step: KernelLaunch, name: str) -> int:
    argument = dict(step.arguments)[name]
    assert isinstance(argument, Constant | Scalar) and isinstance(argument.value, int), argument
    return argument.value


def _portable(first: KernelLaunch, second: KernelLaunch, reduction: KernelLaunch, target: Target) -> KernelLaunch:
    """Product 1 as it is launched; what product 2 has of its own with a prefix."""
    d, num_tokens = _number(first, "D"), _number(reduction, "num_tokens")
    block_t, block_d = 1, min(_REDUCED_COLUMNS, padded(d))
    if target.kind == "interpreter":
        block_t, block_d = elementwise_tile(d, target)
    arguments = {
        **_of(first, "x", "weight", "up", "bias", "up_bias"),
        **_of(second, "weight", "bias", prefix="second_"),
        **_of(second, "row_weight", "layer", "group_sizes", "group_start", "slot_of_row"),
        **_of(reduction, "row_of_slot"),
        **_of(first, "schedule"),
        **_renamed(first, hidden="y"),
        **_renamed(second, slots="y"),
        **_of(reduction, "out"),
        "progress": Pointer("tile_counters"),
        **_of(first, "num_blocks", "num_rows", "num_slots"),
        **_of(reduction, "num_tokens"),
        **_renamed(first, D="D", F="N"),
        **_of(first, "WEIGHT_N", "NUM_LAYERS", "X_STRIDE", "LAYER_STRIDE", "EXPERT_STRIDE", "K_STRIDE", "N_STRIDE"),
        **_of(first, "BIAS_LAYER_STRIDE", "UP_BIAS_LAYER_STRIDE"),
        **_of(second, "LAYER_STRIDE", "EXPERT_STRIDE", "K_STRIDE", "N_STRIDE", "BIAS_LAYER_STRIDE", prefix="second_"),
        **_of(first, "TOP_K", "GATE_LAYOUT", "ACTIVATION", "ALPHA", "LIMIT", "INPUT_PRECISION"),
        **_of(first, "BLOCK_M", "BLOCK_N", "BLOCK_K", "GROUP_M"),
        "STAGES": Constant(first.num_stages),
        **_of(second, "BLOCK_N", "BLOCK_K", "GROUP_M", prefix="second_"),
        "SECOND_STAGES": Constant(second.num_stages),
        "AHEAD": Constant(_AHEAD if target.kind == "cuda" else 0),
        "BLOCK_T": Constant(block_t),
        "BLOCK_D": Constant(block_d),
        "OVERLAP": Constant(None),
    }
    programs = first.grid[0] + second.grid[0] + -(-num_tokens // block_t) * -(-d // block_d)
    stages = max(first.num_stages, second.num_stages)
    return KernelLaunch("chained:chained", (programs, 1, 1), tuple(arguments.items()), first.num_warps, stages)


def _stream(first: KernelLaunch, second: KernelLaunch, reduction: KernelLaunch, target: Target) -> KernelLaunch:
    """The same of products whose weights stream."""
    d, num_tokens = _number(first, "D"), _number(reduction, "num_tokens")
    block_d = min(_REDUCED_COLUMNS, padded(d, 32 * first.num_warps))
    num_blocks = first.grid[0] // _number(first, "BLOCKS")
    arguments = {
        **_of(first, "x", "weight", "scales", "zero_points", "bias"),
        **_of(second, "weight", "scales", "zero_points", "bias", prefix="second_"),
        **_of(second, "row_weight", "layer", "group_sizes", "group_start", "slot_of_row"),
        **_of(reduction, "row_of_slot"),
        **_of(first, "schedule"),
        **_renamed(first, hidden="y"),
        **_renamed(second, slots="y"),
        **_of(reduction, "out"),
        "progress": Pointer("tile_counters"),
        "num_blocks": Scalar(num_blocks),
        **_of(first, "num_rows", "num_slots"),
        **_renamed(first, D="D", F="N"),
        **_of(first, "WEIGHT_N", "STEPS", "BLOCKS", "NUM_EXPERTS", "NUM_LAYERS", "X_STRIDE", "BIAS_LAYER_STRIDE"),
        **_of(second, "STEPS", "BLOCKS", "BIAS_LAYER_STRIDE", prefix="second_"),
        **_of(first, "TOP_K", "GATE_LAYOUT", "ACTIVATION", "ALPHA", "LIMIT", *_CODES),
        **_of(second, *_CODES, prefix="second_"),
        **_of(first, "BLOCK_M", "CHUNK", "SPAN"),
        **_of(second, "CHUNK", "SPAN", prefix="second_"),
        "BLOCK_D": Constant(block_d),
        **_of(first, "REGISTERS"),
        "OVERLAP": Constant(None),
    }
    programs = first.grid[0] + second.grid[0] + num_tokens * -(-d // block_d)
    return KernelLaunch("chained_stream:chained_stream", (programs, 1, 1), tuple(arguments.items()), first.num_warps, 1)


def _stream_fp8(first: KernelLaunch, second: KernelLaunch, reduction: KernelLaunch, target: Target) -> KernelLaunch:
    """The same of products that quantise their rows."""
    d, num_tokens = _number(first, "D"), _number(reduction, "num_tokens")
    block_d = min(_REDUCED_COLUMNS, padded(d, 32 * first.num_warps))
    arguments = {
        **_of(first, "x", "weight", "scales", "bias"),
        **_of(second, "weight", "scales", "bias", prefix="second_"),
        **_of(second, "row_weight", "layer", "group_sizes", "group_start", "slot_of_row"),
        **_of(reduction, "row_of_slot"),
        **_of(first, "schedule"),
        **_renamed(first, hidden="y"),
        **_renamed(second, slots="y"),
        **_of(reduction, "out"),
        "progress": Pointer("tile_counters"),
        "num_blocks": Scalar(first.grid[0] // _number(first, "BLOCKS")),
        **_of(first, "num_rows", "num_slots"),
        **_renamed(first, D="D", F="N"),
        **_of(first, "WEIGHT_N", "BLOCKS", "NUM_EXPERTS", "NUM_LAYERS", "X_STRIDE", "BIAS_LAYER_STRIDE"),
        **_of(second, "BLOCKS", "BIAS_LAYER_STRIDE", prefix="second_"),
        **_of(first, "TOP_K", "GATE_LAYOUT", "ACTIVATION", "ALPHA", "LIMIT", "RULE", "LARGEST", "BLOCK_M", "CHUNK"),
        **_of(second, "CHUNK", prefix="second_"),
        "BLOCK_D": Constant(block_d),
        **_of(first, "REGISTERS"),
        "OVERLAP": Constant(None),
    }
    programs = first.grid[0] + second.grid[0] + num_tokens * -(-d // block_d)
    kernel = "chained_stream_fp8:chained_stream_fp8"
    return KernelLaunch(kernel, (programs, 1, 1), tuple(arguments.items()), first.num_warps, 1)


_CHAINS = {
    "matmul_ogs:matmul_ogs": _portable,
    "stream:matmul_stream": _stream,
    "stream_fp8:matmul_stream_fp8": _stream_fp8,
}
