"""Shared launches for stages of few tokens' forwards, with the bits of separate launches: docs/notebook/launches.md.

**Chained** (`moe_core.ops.moe.kernels.chained`): both products and the reduction in one launch. Blocks wait only for
blocks with a lower number, given in the order of their beginning. So they end whatever the order in which the GPU
begins blocks, and however many run at once.

**One token** (`moe_core.ops.moe.kernels.one_token`): product 1's blocks choose the token's experts themselves. In
product 2's launch the last block of a tile of columns adds the slots. Nothing waits.
"""

from __future__ import annotations

import dataclasses

from moe_core.base.sizes import elementwise_tile, padded
from moe_core.ops.matmul.portable.plan import MATMUL_OGS
from moe_core.ops.matmul.tile_choice import TileChoice
from moe_core.ops.moe.kernels import chained as chained_kernels
from moe_core.ops.moe.kernels import one_token as one_token_kernels
from moe_core.ops.reduction.reduce import REDUCE
from moe_core.ops.routing.topk import ROUTE_AND_LAYOUT
from moe_core.plan.steps import (
    Argument,
    Constant,
    KernelLaunch,
    LaunchPlan,
    ReferenceCall,
    Scalar,
    declare_kernel,
    function_name,
    passed,
)

CHAINED = declare_kernel(chained_kernels.chained, pdl="start")
ROUTE_AND_MULTIPLY = declare_kernel(one_token_kernels.route_and_multiply, writes_layout=True, counts_slots=True)
MULTIPLY_AND_REDUCE = declare_kernel(one_token_kernels.multiply_and_reduce)

#: Most tokens of a chain, and the least above one: 2 to 4 were up to 15 % slower, 8 and more up to 8 % faster.
MOST_TOKENS, _FEWEST_TOKENS = 256, 8
#: Rows of a block from which launch boundaries cost too little.
_MOST_ROWS = 32
#: Counters before the row blocks', and the fewest: mostly one number, so that clearing kernels are the same.
_COUNTERS, _FEWEST_COUNTERS = 2, 1024
#: Up to this K the loop over slots is unrolled.
_MOST_CHOICES = 16
#: Columns per program of the chained reduction, where only latency counts.
_REDUCED_COLUMNS = 512
_SIZES = (
    "D", "N", "WEIGHT_N", "NUM_LAYERS", "X_STRIDE", "LAYER_STRIDE", "EXPERT_STRIDE", "K_STRIDE", "N_STRIDE",
    "BIAS_LAYER_STRIDE",
)  # fmt: skip
_TILE = ("INPUT_PRECISION", "BLOCK_M", "BLOCK_N", "BLOCK_K", "GROUP_M")


def why_not_fused(
    tiles: tuple[TileChoice | None, ...], num_tokens: int, top_k: int, *, alone: bool, batch_invariant: bool
) -> str | None:
    """Why no stages of a forward share a launch, or None. alone: the reduction adds only product 2's slots."""
    if not all(tiles) or num_tokens == 0:
        return "there are no tiles"
    families = [tile.family for tile in tiles if tile is not None]
    if not all(family.shares_launches for family in families):
        return f"both products need the portable family, got {' and '.join(family.name for family in families)}"
    if num_tokens > MOST_TOKENS:
        return f"sharing launches gains nothing above {MOST_TOKENS} tokens, got {num_tokens}"
    if 1 < num_tokens < _FEWEST_TOKENS:
        return f"sharing launches gains nothing with 2 to {_FEWEST_TOKENS - 1} tokens, got {num_tokens}"
    first, second = (tile.config for tile in tiles if tile is not None)
    if num_tokens > 1 and (first.block_m != second.block_m or first.num_warps != second.num_warps):
        return "both products need row blocks of one height and one number of warps"
    if num_tokens > 1 and first.block_m > _MOST_ROWS:
        return f"sharing launches gains nothing above {_MOST_ROWS} rows of a block, got {first.block_m}"
    if top_k > _MOST_CHOICES:
        return f"top_k must be at most {_MOST_CHOICES}, got {top_k}"
    if not alone:
        return "something is saved for a backward, or added in the reduction, or nothing is reduced"
    if batch_invariant:
        return "batch_invariant runs the same kernels for every number of tokens"
    return None


def fusion_counters(num_tokens: int, max_blocks: int, column_tiles: int) -> int:
    """Number of int32 counters, a power of two. column_tiles: of product 2."""
    return padded(column_tiles if num_tokens == 1 else _COUNTERS + max_blocks, _FEWEST_COUNTERS)


def fuse_launches(plan: LaunchPlan, num_tokens: int) -> LaunchPlan:
    """The plan with fewer launches. The routing or the layout clears its scratch `tile_counters`."""
    return _fuse_one_token(plan) if num_tokens == 1 else _chain(plan)


def _stages(plan: LaunchPlan) -> tuple[tuple[KernelLaunch, ...], KernelLaunch, KernelLaunch, KernelLaunch]:
    """(steps before the products, product 1, product 2, reduction)."""
    steps = tuple(step for step in plan.steps if isinstance(step, KernelLaunch))
    *before, first, second, reduction = steps
    kernels = (first.kernel, second.kernel, reduction.kernel)
    assert len(steps) == len(plan.steps) and kernels == (MATMUL_OGS, MATMUL_OGS, REDUCE), plan.steps
    return tuple(before), first, second, reduction


def _chain(plan: LaunchPlan) -> LaunchPlan:
    before, first, second, reduction = _stages(plan)
    note = "matmul 1, matmul 2 and reduce are one launch, whose blocks wait for each other's results"
    d, num_tokens = _number(first, "D"), _number(reduction, "num_tokens")
    block_t, block_d = 1, min(_REDUCED_COLUMNS, padded(d))
    if plan.target.interpreted:
        block_t, block_d = elementwise_tile(d, plan.target)
    arguments = {
        **_of(first, "x", "weight", "up", "bias", "up_bias"),
        **_of(second, "weight", "bias", prefix="second_"),
        **_of(second, "row_weight", "layer_index", "group_sizes", "group_start", "slot_of_row"),
        **(_of(reduction, "row_of_slot") | _of(first, "schedule")),
        **(_renamed(first, hidden="y") | _renamed(second, slots="y") | _of(reduction, "out")),
        **passed(progress="tile_counters"),
        **(_of(first, "num_blocks", "num_rows", "num_slots") | _of(reduction, "num_tokens")),
        **(_renamed(first, D="D", F="N") | _of(first, *_SIZES[2:], "UP_BIAS_LAYER_STRIDE")),
        **_of(second, "LAYER_STRIDE", "EXPERT_STRIDE", "K_STRIDE", "N_STRIDE", "BIAS_LAYER_STRIDE", prefix="second_"),
        **_of(first, "TOP_K", "GATE_LAYOUT", "ACTIVATION", "ALPHA", "LIMIT", *_TILE),
        **passed(STAGES=first.num_stages),
        **_of(second, "BLOCK_N", "BLOCK_K", "GROUP_M", prefix="second_"),
        **passed(SECOND_STAGES=second.num_stages, BLOCK_T=block_t, BLOCK_D=block_d, PDL=None),
    }
    programs = first.grid[0] + second.grid[0] + -(-num_tokens // block_t) * -(-d // block_d)
    stages = max(first.num_stages, second.num_stages)
    steps = (*before, KernelLaunch(CHAINED, (programs, 1, 1), tuple(arguments.items()), first.num_warps, stages))
    return dataclasses.replace(plan, steps=steps, notes=(*plan.notes, note))


def _fuse_one_token(plan: LaunchPlan) -> LaunchPlan:
    before, first, second, reduction = _stages(plan)
    steps, notes = [*before, first], [*plan.notes]
    if before and before[-1].kernel == ROUTE_AND_LAYOUT and dict(before[-1].arguments)["expert_map"] == Constant(None):
        steps[-2:] = [_route_and_multiply(before[-1], first)]
        notes.append("routing and matmul 1 are one launch, whose blocks choose the token's experts themselves")
    arguments = {
        **_of(second, "x", "weight", "bias", "row_weight", "layer_index", "group_sizes", "group_start", "slot_of_row"),
        **(_of(reduction, "row_of_slot") | _of(second, "schedule") | _renamed(second, slots="y")),
        **(_of(reduction, "out") | passed(tile_counters="tile_counters")),
        **_of(second, "num_blocks", "num_rows", "num_slots", *_SIZES),
        **(_of(reduction, "TOP_K") | _of(second, *_TILE)),
    }
    arguments = tuple(arguments.items())
    steps.append(KernelLaunch(MULTIPLY_AND_REDUCE, second.grid, arguments, second.num_warps, second.num_stages))
    notes.append("matmul 2 and reduce are one launch, whose last block of a tile of columns adds up its slots")
    return dataclasses.replace(plan, steps=tuple(steps), notes=tuple(notes))


def _of(step: KernelLaunch, *names: str, prefix: str = "") -> dict[str, Argument]:
    return _renamed(step, **{(prefix.upper() if name.isupper() else prefix) + name: name for name in names})


def _renamed(step: KernelLaunch, **names: str) -> dict[str, Argument]:
    arguments = dict(step.arguments)
    return {new: arguments[name] for new, name in names.items()}


def _number(step: KernelLaunch, name: str) -> int:
    argument = dict(step.arguments)[name]
    assert isinstance(argument, Constant | Scalar) and isinstance(argument.value, int), argument
    return argument.value


def _route_and_multiply(routing: KernelLaunch, product: KernelLaunch) -> KernelLaunch:
    """Routing by the first program, product 1 by the others."""
    arguments = {
        **_of(routing, "logits", "correction_bias", "token_mask", "ids", "weights", "group_sizes", "group_start"),
        **_of(routing, "slot_of_row", "row_of_slot", "invalid_ids", "schedule_0", "schedule_1", "tile_counters"),
        **_of(product, "x", "weight", "up", "bias", "up_bias", "layer_index", "y"),
        **_of(routing, "capacity", "max_blocks_0", "max_blocks_1"),
        **_of(product, "num_blocks"),
        **_of(routing, "NUM_EXPERTS", "TOP_K", "SCORING", "SOFTMAX_LAST", "RENORMALIZE", "SCALE", "NUM_GROUPS"),
        **_of(routing, "TOPK_GROUP", "BY_EXPERT", "BY_PAIR", "BIAS_ON_LOGITS", "BIAS_STRIDE", "EPSILON", "LOGIT_SCALE"),
        **_of(routing, "SOFTCAP", "GROUPS", "MEMBERS", "SLOTS", "SPAN"),
        **_of(routing, "COUNTERS", "BLOCK_M_0", "BLOCK_M_1", "EXPERTS", "BLOCK_PAD", "BLOCK_FILL"),
        **_of(product, *_SIZES, "UP_BIAS_LAYER_STRIDE", "GATE_LAYOUT", "ACTIVATION", "ALPHA", "LIMIT", *_TILE),
    }
    grid = (1 + product.grid[0], 1, 1)
    return KernelLaunch(ROUTE_AND_MULTIPLY, grid, tuple(arguments.items()), product.num_warps, product.num_stages)


_COMMON = ("group_sizes", "group_start", "slot_of_row", "layer_index")


def join_twins(plan: LaunchPlan) -> LaunchPlan:
    """The reference plan, with one call for two products if the second reads the first one's rows."""
    steps: list[KernelLaunch | ReferenceCall] = []
    for step in plan.steps:
        joined = _joined(steps[-1], step) if steps else None
        if joined is not None:
            steps.pop()
        steps.append(joined or step)
    return dataclasses.replace(plan, steps=tuple(steps))


def _joined(first: KernelLaunch | ReferenceCall, second: KernelLaunch | ReferenceCall) -> ReferenceCall | None:
    if not (isinstance(first, ReferenceCall) and isinstance(second, ReferenceCall)):
        return None
    from moe_core.ops.matmul.reference import forward as matmul_twins
    from moe_core.ops.moe.reference import experts as twins

    options, others = dict(first.constants), dict(second.constants)
    alike = {first.function, second.function} == {function_name(matmul_twins.matmul_ogs_plan)}
    if not alike or {"tensors", "adapters"} & {*options, *others}:
        return None
    outputs = options["outputs"]
    if options["layout"] != others["layout"] or others["outputs"] != ("y",):
        return None
    if dict(zip(outputs, first.outputs, strict=True)).get("y") != dict(second.inputs)["x"]:
        return None
    if (options["spec"].scatter, others["spec"].gather) != ("row", "row"):
        return None
    inputs = {}
    for prefix, step in (("first", first), ("second", second)):
        buffers = {name: buffer for name, buffer in step.inputs if (prefix, name) != ("second", "x")}
        inputs |= {name if name in _COMMON else f"{prefix}.{name}": buffer for name, buffer in buffers.items()}
    constants = {"layout": options["layout"], "first": options["spec"], "second": others["spec"], "outputs": outputs}
    made = (*first.outputs, *second.outputs)
    return ReferenceCall(function_name(twins.both_products), tuple(inputs.items()), tuple(constants.items()), made)
