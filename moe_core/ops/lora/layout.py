"""Plan of the layout of a batch with adapters: an expert's rows, sorted by adapter."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from moe_core.base import ArraySpec, Target, keep_plans, padded
from moe_core.errors import Unsupported
from moe_core.ops.lora.adapters import Adapters
from moe_core.ops.lora.kernels import groups as kernels
from moe_core.ops.routing.layout import MAX_EXPERTS, SLOTS_AT_ONCE, expert_warps, plan_layout, plan_schedule
from moe_core.plan import LaunchPlan, PlanBuilder, Role, declare_kernel, passed
from moe_core.plan.steps import ReferenceCall, function_name
from moe_core.specs import LayoutArrays, named_arrays
from moe_core.specs.operands import TopK

LAYOUT_AT_ONCE = declare_kernel(kernels.layout_at_once, pdl="start", writes_layout=True)
COUNT_BLOCKS = declare_kernel(kernels.count_blocks, pdl="start", writes_layout=True)
SUM_BLOCKS = declare_kernel(kernels.sum_blocks, pdl="start", writes_layout=True)
PLACE_BLOCKS = declare_kernel(kernels.place_blocks, pdl="start", writes_layout=True)

#: Slots of a block.
_BLOCK_SLOTS = {"gpu": 256, "interpreter": 16}
#: Ranks that a program reads at once, and counts of blocks.
_RANKS, _SUMMED_GROUPS, _SUMMED_BLOCKS = 4096, 32, 128


@keep_plans
def plan_adapter_layout(
    routing: TopK,
    adapters: Adapters,
    target: Target,
    *,
    expert_map: ArraySpec | None = None,
    token_mask: ArraySpec | None = None,
    block_ms: tuple[int, ...] = (),
    tile_counters: int = 0,
) -> LaunchPlan:
    """`plan_layout` of routing.ids with an expert's rows sorted by adapter, those without one first, then by slot.

    routing.weights: None, or given weights to widen. Further inputs: adapter_ids int32 `[T]` (-1 = none), ranks int32
    `[S, E]`. An adapter outside [0, S), or with no rank above 0, acts as -1, and each such token counts in
    invalid_ids. Further outputs, int32: virtual_sizes `[E (S + 1)]` and virtual_start, of the groups (expert, adapter
    + 1), and on compiled targets the virtual_schedule of `plan_shrink`.
    """
    builder, layout, virtual = PlanBuilder("adapter_layout", target), adapters.layout, adapters.virtual
    if target.compiled and virtual.num_experts > MAX_EXPERTS:
        raise Unsupported(
            f"experts times slots + 1 must be at most {MAX_EXPERTS}, got {layout.num_experts} x {adapters.slots + 1}; "
            "keep fewer adapters in slots"
        )
    tokens, ids = layout.num_tokens, routing.ids
    arrays = {"ids": ids, "expert_map": expert_map, "token_mask": token_mask}
    arrays |= {"adapter_ids": ArraySpec((tokens,), "int32")}
    arrays |= {"ranks": ArraySpec((adapters.slots, layout.num_experts), "int32")}
    present = builder.inputs(arrays)
    if routing.weights is not None:
        builder.input("given_weights", routing.weights, Role.ROW_WEIGHT)
    specs = dict(named_arrays(LayoutArrays.specs(layout)))
    for name, array in (specs | {"invalid_ids": ArraySpec((1,), "int32")}).items():
        builder.output(name, array)
    of_virtual = LayoutArrays.specs(virtual)
    builder.output("virtual_sizes", of_virtual.group_sizes)
    builder.output("virtual_start", of_virtual.group_start)
    if routing.weights is not None:
        builder.output("row_weight", ArraySpec(ids.shape, "float32"))
    assert (layout.alignment, layout.max_rows, layout.rows) == (1, None, None), layout
    if target.compiled:
        spec = plan_schedule(virtual, adapters.block_m(target), target).spec("schedule")
        builder.output("virtual_schedule", spec, Role.VIRTUAL_SCHEDULE)
        for block_m in block_ms:
            builder.output(f"schedule_{block_m}", plan_schedule(layout, block_m, target).spec("schedule"))
        if tile_counters:
            builder.output("tile_counters", ArraySpec((tile_counters,), "int32"))
        _launch(builder, adapters, arrays, block_ms, tile_counters)
    else:
        _add_reference(builder, adapters, present, token_mask, routing)
    builder.sums("an expert's rows: no adapter first, then adapters ascending, each in slot order")
    return builder.build()


def _launch(
    builder: PlanBuilder,
    adapters: Adapters,
    arrays: Mapping[str, ArraySpec | None],
    block_ms: tuple[int, ...],
    tile_counters: int,
) -> None:
    target, layout, groups = builder.target, adapters.layout, adapters.virtual.num_experts
    slots, block_slots, experts = layout.num_slots, _BLOCK_SLOTS[target.engine], padded(layout.num_experts + 1, 1)
    expert_map, present = arrays["expert_map"], padded(adapters.slots, 16)
    num_global = layout.num_experts if expert_map is None else expert_map.size
    read = builder.pointers(*arrays)
    sizes = passed(NUM_GLOBAL=num_global, NUM_EXPERTS=layout.num_experts, TOP_K=layout.top_k, SLOTS=adapters.slots)
    loads = passed(PRESENT=present, BLOCK_E=min(experts, _RANKS // present))
    schedules, heights = [f"schedule_{block_m}" for block_m in block_ms[:2]], [*block_ms, 1, 1][:2]
    lengths = [layout.max_blocks(block_m) for block_m in block_ms[:2]] + [0, 0]
    outputs = builder.pointers("slot_of_row", "row_of_slot", "invalid_ids", "virtual_schedule", "tile_counters")
    outputs |= builder.pointers("group_sizes", "group_start")
    outputs |= passed(**{f"schedule_{n}": name for n, name in enumerate([*schedules, None, None][:2])})
    outputs |= builder.pointers("given_weights", "row_weight") | passed(num_slots=slots)
    counts = passed(virtual_blocks=adapters.virtual.max_blocks(adapters.block_m(target)))
    counts |= passed(max_blocks_0=lengths[0], max_blocks_1=lengths[1])
    tail = passed(COUNTERS=tile_counters, BLOCK_M=adapters.block_m(target), BLOCK_M_0=heights[0], BLOCK_M_1=heights[1])
    tail |= passed(GROUPS=padded(groups, 32), EXPERTS=experts) | loads
    starts = builder.pointers("virtual_sizes", "virtual_start")
    if slots <= SLOTS_AT_ONCE[target.engine]:
        builder.note(f"{slots} slots: one launch, every program counts all slots")
        num_warps, block = expert_warps(padded(groups, 32), 4), 128 if target.on_gpu else 64
        programs = max(1, -(-slots // block)) + 3
        builder.scratch("block_counts", ArraySpec((2 * programs, groups), "int32"))
        tail |= passed(BLOCK_FILL=128 * num_warps, BLOCK_S=block, CHUNK=256 if target.on_gpu else 64, PDL=None)
        arguments = read | builder.pointers("block_counts") | starts | outputs | counts | sizes | tail
        builder.launch(LAYOUT_AT_ONCE, (programs,), arguments, num_warps)
    else:
        blocks, num_warps = -(-slots // block_slots), 8
        builder.note(f"{slots} slots: counted in blocks of {block_slots}, then placed")
        builder.scratch("block_counts", ArraySpec((blocks, groups), "int32"))
        builder.scratch("block_invalid", ArraySpec((blocks,), "int32"))
        counted = builder.pointers("block_counts", "block_invalid")
        arguments = read | counted | passed(num_slots=slots) | sizes | passed(GROUPS=padded(groups, 32)) | loads
        builder.launch(COUNT_BLOCKS, (blocks,), arguments | passed(BLOCK_S=block_slots, PDL=None))
        arguments = builder.pointers("block_counts", "virtual_sizes") | passed(num_blocks=blocks, NUM_GROUPS=groups)
        arguments |= passed(BLOCK_G=_SUMMED_GROUPS, BLOCK_B=_SUMMED_BLOCKS if target.on_gpu else 4, PDL=None)
        builder.launch(SUM_BLOCKS, (-(-groups // _SUMMED_GROUPS),), arguments)
        tail |= passed(BLOCK_FILL=128 * num_warps, BLOCK_S=block_slots, PDL=None)
        arguments = read | counted | starts | outputs | passed(num_blocks=blocks) | counts | sizes | tail
        builder.launch(PLACE_BLOCKS, (blocks + (16 if target.on_gpu else 2),), arguments, num_warps)
    for block_m in block_ms[2:]:
        name = f"schedule_{block_m}"
        builder.call(plan_schedule(layout, block_m, target), name, {"group_sizes": "group_sizes", "schedule": name})


def _add_reference(
    builder: PlanBuilder,
    adapters: Adapters,
    present: Mapping[str, str],
    token_mask: ArraySpec | None,
    routing: TopK,
) -> None:
    from moe_core.ops.lora import reference as twins

    builder.scratch("virtual", builder.spec("ids"), Role.IDS)
    builder.scratch("block_invalid", ArraySpec((1,), "int32"))
    builder.scratch("virtual_invalid", ArraySpec((1,), "int32"), Role.INVALID_IDS)
    function, made = function_name(twins.virtual_ids), ("virtual", "block_invalid")
    builder.add_reference(ReferenceCall(function, tuple(present.items()), (("adapters", adapters),), made))
    options = {"token_mask": token_mask, "given_weights": routing.weights}
    plan = plan_layout(builder.spec("virtual"), adapters.virtual, builder.target, **options)
    bindings = {"ids": "virtual", "group_sizes": "virtual_sizes", "group_start": "virtual_start"}
    bindings |= {"slot_of_row": "slot_of_row", "row_of_slot": "row_of_slot", "invalid_ids": "virtual_invalid"}
    bindings |= {"given_weights": "given_weights", "row_weight": "row_weight"} if routing.weights is not None else {}
    roles = {"group_sizes": Role.VIRTUAL_SIZES, "group_start": Role.VIRTUAL_START}
    builder.call(plan, "virtual", bindings, roles)
    names = ("virtual_start", "virtual_invalid", "block_invalid", "group_sizes", "group_start", "invalid_ids")
    function, inputs = function_name(twins.merge_groups), tuple((name, name) for name in names[:3])
    builder.add_reference(ReferenceCall(function, inputs, (("slots", adapters.slots),), names[3:]))


def add_virtual_schedule(
    builder: PlanBuilder, adapters: Adapters, sizes: str, declare: Callable[[str, ArraySpec], str]
) -> None:
    """Add `virtual_schedule` of the virtual experts' sizes, a buffer."""
    plan = plan_schedule(adapters.virtual, adapters.block_m(builder.target), builder.target)
    name = declare("virtual_schedule", plan.spec("schedule"))
    roles = {"group_sizes": Role.VIRTUAL_SIZES, "schedule": Role.VIRTUAL_SCHEDULE}
    builder.call(plan, name, {"group_sizes": sizes, "schedule": name}, roles)
