"""Plan of the layout of a batch with adapters: an expert's rows, sorted by adapter."""

from __future__ import annotations

from collections.abc import Callable

from moe_core.base import ArraySpec, Target, keep_plans, padded
from moe_core.errors import Unsupported
from moe_core.ops.lora.adapters import Adapters
from moe_core.ops.lora.kernels import groups as kernels
from moe_core.ops.routing.layout import MAX_EXPERTS, plan_layout, plan_schedule
from moe_core.plan import LaunchPlan, PlanBuilder, Role, declare_kernel, passed
from moe_core.plan.steps import ReferenceCall, function_name
from moe_core.specs import LayoutArrays, named_arrays
from moe_core.specs.operands import TopK

VIRTUAL_IDS = declare_kernel(kernels.virtual_ids)
MERGE_GROUPS = declare_kernel(kernels.merge_groups, writes_layout=True)


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
    block_t = 256 if target.interpreted else 32
    blocks = -(-tokens // block_t) if target.compiled else 1
    builder.scratch("virtual", ArraySpec(ids.shape, "int32"), Role.IDS)
    builder.scratch("block_invalid", ArraySpec((blocks,), "int32"))
    builder.scratch("virtual_invalid", ArraySpec((1,), "int32"), Role.INVALID_IDS)
    if target.compiled:
        num_global = layout.num_experts if expert_map is None else expert_map.size
        arguments = builder.pointers(*arrays, "virtual", "block_invalid") | passed(num_tokens=tokens)
        arguments |= passed(NUM_GLOBAL=num_global, NUM_EXPERTS=layout.num_experts, TOP_K=layout.top_k)
        arguments |= passed(SLOTS=adapters.slots, BLOCK_T=block_t, CHOICES=padded(layout.top_k, 1))
        builder.launch(VIRTUAL_IDS, (blocks,), arguments | passed(EXPERTS=padded(layout.num_experts, 1)))
    else:
        from moe_core.ops.lora import reference as twins

        function, made = function_name(twins.virtual_ids), ("virtual", "block_invalid")
        builder.add_reference(ReferenceCall(function, tuple(present.items()), (("adapters", adapters),), made))
    heights = (adapters.block_m(target),) if target.compiled else ()
    plan = plan_layout(
        builder.spec("virtual"),
        virtual,
        target,
        token_mask=token_mask,
        given_weights=routing.weights,
        block_ms=heights,
        tile_counters=tile_counters,
    )
    if tile_counters:
        builder.output("tile_counters", plan.spec("tile_counters"))
    bindings = {"ids": "virtual", "group_sizes": "virtual_sizes", "group_start": "virtual_start"}
    bindings |= {"slot_of_row": "slot_of_row", "row_of_slot": "row_of_slot", "invalid_ids": "virtual_invalid"}
    bindings |= {"given_weights": "given_weights", "row_weight": "row_weight"} if routing.weights is not None else {}
    bindings |= {"tile_counters": "tile_counters"} if tile_counters else {}
    roles = {"group_sizes": Role.VIRTUAL_SIZES, "group_start": Role.VIRTUAL_START}
    for height in heights:
        builder.output("virtual_schedule", plan.spec(f"schedule_{height}"))
        bindings[f"schedule_{height}"], roles[f"schedule_{height}"] = "virtual_schedule", Role.VIRTUAL_SCHEDULE
    builder.call(plan, "virtual", bindings, roles)
    names = ("virtual_start", "virtual_invalid", "block_invalid", "group_sizes", "group_start", "invalid_ids")
    if target.compiled:
        arguments = builder.pointers(*names) | passed(num_blocks=blocks, NUM_EXPERTS=layout.num_experts)
        arguments |= passed(SLOTS=adapters.slots, EXPERTS=padded(layout.num_experts + 1, 1), BLOCK=128)
        builder.launch(MERGE_GROUPS, (1,), arguments)
    else:
        from moe_core.ops.lora import reference as twins

        function, inputs = function_name(twins.merge_groups), tuple((name, name) for name in names[:3])
        builder.add_reference(ReferenceCall(function, inputs, (("slots", adapters.slots),), names[3:]))
    for block_m in block_ms:
        name = f"schedule_{block_m}"
        plan = plan_schedule(layout, block_m, target)
        builder.output(name, plan.spec("schedule"))
        builder.call(plan, name, {"group_sizes": "group_sizes", "schedule": name})
    builder.sums("an expert's rows: no adapter first, then adapters ascending, each in slot order")
    return builder.build()


def add_virtual_schedule(
    builder: PlanBuilder, adapters: Adapters, sizes: str, declare: Callable[[str, ArraySpec], str]
) -> None:
    """Add `virtual_schedule` of the virtual experts' sizes, a buffer."""
    plan = plan_schedule(adapters.virtual, adapters.block_m(builder.target), builder.target)
    name = declare("virtual_schedule", plan.spec("schedule"))
    roles = {"group_sizes": Role.VIRTUAL_SIZES, "schedule": Role.VIRTUAL_SCHEDULE}
    builder.call(plan, name, {"group_sizes": sizes, "schedule": name}, roles)
