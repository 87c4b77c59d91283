"""Plans ragged layouts and schedules."""

from __future__ import annotations

from dataclasses import dataclass

from moe_core.base import ArraySpec, Target, keep_plans, padded, require_at_least, require_spec
from moe_core.base.dtypes import ID_DTYPES, ROUTER_WEIGHT_DTYPES
from moe_core.base.sizes import INT32_LIMIT, first_holding
from moe_core.errors import InvalidInput, Unsupported
from moe_core.ops.routing.kernels import layout as layout_kernels
from moe_core.ops.routing.kernels import runs as run_kernels
from moe_core.ops.routing.kernels import schedule as schedule_kernels
from moe_core.plan import Argument, Held, LaunchPlan, PlanBuilder, Role, declare_kernel, passed
from moe_core.specs import LAYOUT_INPUTS, LayoutArrays, LayoutSpec, named_arrays

LAYOUT_AT_ONCE = declare_kernel(layout_kernels.layout_at_once, pdl="start", writes_layout=True, counts_slots=True)
COUNT_BLOCKS = declare_kernel(layout_kernels.count_blocks, writes_layout=True, counts_slots=True)
PLACE_BLOCKS = declare_kernel(layout_kernels.place_blocks, pdl="start", writes_layout=True, counts_slots=True)
SCHEDULE = declare_kernel(schedule_kernels.schedule, writes_layout=True)
ZERO_COUNTERS = declare_kernel(schedule_kernels.zero, writes_layout=True)

_OUTPUTS = (*LAYOUT_INPUTS, "row_of_slot", "invalid_ids")
_PLACING = ("overflow", "given_weights", "row_weight")
MAX_EXPERTS = 4096
#: The interpreter's cost does not depend on it.
BLOCK_ELEMENTS = {"gpu": 4096, "interpreter": 65536}
#: Most slots of one launch, where every program counts every slot.
SLOTS_AT_ONCE = {"gpu": 4096, "interpreter": 256}
#: Per program, which compares every pair.
_BLOCK_SLOTS = {"gpu": 128, "interpreter": 64}
#: The first size that holds all, else the last.
_CHUNK_SLOTS = {"gpu": (256, 1024), "interpreter": (64, 128)}
#: Chosen likewise. The interpreter's sizes are small, so that tests take every loop.
_PLACED_SLOTS = {"gpu": (64, 256), "interpreter": (16, 64)}
#: Warps of a placing program with small blocks and at most this many experts, since fewer warps wait less for each
#: other; and of other programs, for the registers.
_FEW_WARPS, _FEW_EXPERTS, _MANY_WARPS = 4, 512, 8
#: Blocks that a placing program sums at once: the first size that holds all, else the last, or as many as give
#: a warp this many counts (128 per thread).
_SUMMED_BLOCKS, _SUMMED_COUNTS = {"gpu": (32, 128), "interpreter": (2, 4)}, 4096
#: Programs that write the rest while others place slots.
_LEAST_SHARING = 4
#: Blocks that the interpreter counts apart. A GPU gets one per multiprocessor.
_INTERPRETER_BLOCKS = 6
_FUSED_SCHEDULES = 2


def require_experts(num_experts: int) -> None:
    if num_experts > MAX_EXPERTS:
        raise Unsupported(
            f"the kernels hold one row of experts per program and take at most {MAX_EXPERTS}, got {num_experts}; "
            "use the NumPy reference engine"
        )


def expert_warps(experts: int, least: int) -> int:
    """Warps for several padded rows of experts: 4 elements of each per thread."""
    return min(16, max(least, experts // 128))


def _schedule_spec(layout: LayoutSpec, block_m: int) -> ArraySpec:
    blocks = layout.max_blocks(block_m)
    # False sizes may claim this many blocks; kernels add in 32 bits.
    if layout.num_experts * blocks >= INT32_LIMIT:
        raise Unsupported(
            f"a schedule must have fewer than 2**31 blocks times experts, got {blocks} x {layout.num_experts}; "
            "split the batch"
        )
    return ArraySpec((blocks, 2), "int32")


@keep_plans
def plan_layout(
    ids: ArraySpec,
    layout: LayoutSpec,
    target: Target,
    *,
    expert_map: ArraySpec | None = None,
    token_mask: ArraySpec | None = None,
    given_weights: ArraySpec | None = None,
    block_ms: tuple[int, ...] = (),
    tile_counters: int = 0,
) -> LaunchPlan:
    """Group the slots of ids, integers `[T, K]`, by expert, stably: an expert's rows are in slot order.

    Args:
        ids: outside [-1, E_global), and in slots past layout.limit, they act as -1 and count in invalid_ids.
        expert_map: int32 `[E_global]`: global to local id; entries outside [0, E) mean "not here".
        token_mask: bool `[T]`: a masked token's ids act as -1 and count nowhere.
        given_weights: bf16, fp16 or fp32 `[T, K]`: written as fp32.
        block_ms: heights of schedules.
        tile_counters: counters of products to clear, a power of two.

    Outputs, int32: group_sizes `[E]`, group_start `[E + 1]`, slot_of_row `[capacity]`, row_of_slot `[T * K]`,
    invalid_ids `[1]`, with layout.rows overflow `[1]` (slots that it leaves without a row), `schedule_{block_m}`
    `[max_blocks, 2]` per block_m, [row_weight, fp32 `[T, K]`], [tile_counters, zeros].
    """
    require_spec("ids", ids, (layout.num_tokens, layout.top_k), ID_DTYPES)
    if expert_map is not None:
        require_spec("expert_map", expert_map, ("num_global_experts",), "int32")
        if expert_map.size == 0:
            raise InvalidInput("expert_map must have an entry per global expert, got none; pass None for no map")
    if token_mask is not None:
        require_spec("token_mask", token_mask, (layout.num_tokens,), "bool")
    if given_weights is not None:
        require_spec("given_weights", given_weights, ids.shape, ROUTER_WEIGHT_DTYPES)
    for block_m in block_ms:
        require_at_least("block_ms", block_m, 1)
    if len(set(block_ms)) != len(block_ms):
        raise InvalidInput(f"block_ms must be distinct, got {block_ms}; name each height once")

    builder = PlanBuilder("layout", target)
    arrays = {"ids": ids, "expert_map": expert_map, "token_mask": token_mask}
    present = builder.inputs(arrays)
    if given_weights is not None:
        present["given_weights"] = builder.input("given_weights", given_weights, Role.ROW_WEIGHT)
    outputs = [builder.output(name, array) for name, array in named_arrays(LayoutArrays.specs(layout))]
    counters = ("invalid_ids", *(() if layout.rows is None else ("overflow",)))
    outputs += [builder.output(name, ArraySpec((1,), "int32")) for name in counters]
    outputs += [builder.output(f"schedule_{block_m}", _schedule_spec(layout, block_m)) for block_m in block_ms]
    if given_weights is not None:
        outputs.append(builder.output("row_weight", ArraySpec(ids.shape, "float32")))
    assert target.compiled or not tile_counters, "only kernels count tiles"
    if tile_counters:
        builder.output("tile_counters", ArraySpec((tile_counters,), "int32"))
    if not target.compiled:
        constants = {"layout": layout, "block_ms": block_ms}
        from moe_core.ops.routing import reference as twins

        return builder.reference(twins.layout, present, constants, outputs)
    require_experts(layout.num_experts)
    num_global = layout.num_experts if expert_map is None else expert_map.size
    read = builder.pointers(*arrays)
    LayoutLauncher(builder, layout, block_ms, num_global, read, tile_counters).launch()
    return builder.build()


def most_blocks(target: Target) -> int:
    """Most blocks that are counted apart. Every placing program reads each."""
    return _INTERPRETER_BLOCKS if target.interpreted else target.num_sms


@dataclass
class LayoutLauncher:
    """Adds the launches of a layout. read: the pointers ids, expert_map and token_mask."""

    builder: PlanBuilder
    layout: LayoutSpec
    block_ms: tuple[int, ...]
    num_global: int
    read: dict[str, Argument]
    tile_counters: int

    def __post_init__(self) -> None:
        self.target, self.experts = self.builder.target, padded(self.layout.num_experts, 32)
        self.sizes = passed(NUM_GLOBAL=self.num_global, NUM_EXPERTS=self.layout.num_experts, TOP_K=self.layout.top_k)

    def launch(self) -> None:
        slots = self.layout.num_slots
        if slots <= SLOTS_AT_ONCE[self.target.engine]:
            self.builder.note(f"{slots} slots: one launch, every program counts all slots")
            layout, block_slots = self.layout, _BLOCK_SLOTS[self.target.engine]
            chunk = first_holding(_CHUNK_SLOTS[self.target.engine], layout.num_slots)
            num_warps = expert_warps(self.experts, 4)
            arguments = self.read | self.outputs(*_PLACING, num_slots=layout.num_slots, capacity=layout.capacity)
            arguments |= passed(COUNT_LOST=layout.limit is not None) | self.sizes
            arguments |= self.tail(num_warps, BLOCK_S=block_slots, CHUNK=chunk)
            programs = max(-(-layout.num_slots // block_slots), self._sharing())
            self.builder.launch(LAYOUT_AT_ONCE, (programs,), arguments, num_warps)
        else:
            step = _PLACED_SLOTS[self.target.engine][-1]
            block_slots = -(-slots // (most_blocks(self.target) * step)) * step
            self.builder.note(f"{slots} slots: counted in blocks of {block_slots}, then placed")
            blocks = self.block_counts(block_slots)
            self.builder.scratch("block_invalid", ArraySpec((blocks,), "int32"))
            arguments = self.read | self.builder.pointers("block_counts", "block_invalid")
            arguments |= passed(num_slots=self.layout.num_slots, block_slots=block_slots) | self.sizes
            arguments |= passed(CHUNK=_CHUNK_SLOTS[self.target.engine][-1], EXPERTS=self.experts)
            self.builder.launch(COUNT_BLOCKS, (blocks,), arguments, expert_warps(self.experts, 4))
            self.place_blocks(block_slots, "block_invalid")
        self.further_schedules()

    def further_schedules(self) -> None:
        for block_m in self.block_ms[_FUSED_SCHEDULES:]:
            _launch_schedule(self.builder, self.layout, block_m, f"schedule_{block_m}")

    def _sharing(self) -> int:
        if self.target.interpreted:
            return 1
        return max(1, min(-(-self.layout.capacity // BLOCK_ELEMENTS["gpu"]), self.target.num_sms))

    def outputs(self, *more: str, **counts: int) -> dict[str, Argument]:
        """The last pointers and counts of `write_groups`."""
        names = [f"schedule_{block_m}" for block_m in self.block_ms[:_FUSED_SCHEDULES]]
        lengths = [self.layout.max_blocks(block_m) for block_m in self.block_ms[:_FUSED_SCHEDULES]]
        absent = _FUSED_SCHEDULES - len(names)
        arguments = self.builder.pointers(*_OUTPUTS)
        arguments |= passed(**{f"schedule_{n}": name for n, name in enumerate(names + [None] * absent)})
        arguments |= self.builder.pointers("tile_counters", *more) | passed(**counts)
        arguments |= passed(**{f"max_blocks_{n}": length for n, length in enumerate(lengths + [0] * absent)})
        return arguments | passed(max_rows=self.layout.max_rows)

    def tail(self, num_warps: int, **block_sizes: int) -> dict[str, Argument]:
        layout, heights = self.layout, [*self.block_ms, *[1] * _FUSED_SCHEDULES][:_FUSED_SCHEDULES]
        pad = max(1, min(BLOCK_ELEMENTS[self.target.engine], 512 * num_warps) // self.experts)
        return {
            **passed(ALIGNMENT=layout.alignment, COUNTERS=self.tile_counters),
            **passed(**{f"BLOCK_M_{number}": height for number, height in enumerate(heights)}, **block_sizes),
            **passed(EXPERTS=self.experts, BLOCK_PAD=pad, BLOCK_FILL=128 * num_warps, PDL=None),
        }

    def block_counts(self, block_slots: int) -> int:
        blocks = -(-self.layout.num_slots // block_slots)
        self.builder.scratch("block_counts", ArraySpec((blocks, self.layout.num_experts), "int32"))
        return blocks

    def _placing_sizes(self, blocks: int, block_slots: int) -> tuple[int, int, int]:
        sizes = _PLACED_SLOTS[self.target.engine]
        small = block_slots <= sizes[0] and self.experts <= _FEW_EXPERTS
        num_warps = _FEW_WARPS if small else _MANY_WARPS
        summed = first_holding(_SUMMED_BLOCKS[self.target.engine], blocks)
        return num_warps, first_holding(sizes, block_slots), min(summed, _SUMMED_COUNTS * num_warps // self.experts)

    def place_blocks(self, block_slots: int, block_invalid: str | None) -> None:
        slots, capacity = self.layout.num_slots, self.layout.capacity
        blocks = -(-slots // block_slots)
        num_warps, placed, summed = self._placing_sizes(blocks, block_slots)
        arguments = self.read | passed(block_counts="block_counts", block_invalid=block_invalid)
        counts = {"num_slots": slots, "block_slots": block_slots, "num_blocks": blocks, "capacity": capacity}
        arguments |= self.outputs(*_PLACING, **counts)
        arguments |= passed(COUNT_LOST=self.layout.limit is not None) | self.sizes
        arguments |= self.tail(num_warps, BLOCK_S=placed, BLOCK_B=summed)
        programs = blocks + max(_LEAST_SHARING, self._sharing())
        self.builder.launch(PLACE_BLOCKS, (programs,), arguments, num_warps)


def _launch_schedule(builder: PlanBuilder, layout: LayoutSpec, block_m: int, output: str) -> None:
    experts, length = padded(layout.num_experts, 32), layout.max_blocks(block_m)
    programs = -(-length // 1024)
    programs = programs if builder.target.interpreted else min(programs, builder.target.num_sms)
    arguments = passed(group_sizes="group_sizes", schedule=output, max_blocks=length, NUM_EXPERTS=layout.num_experts)
    arguments |= passed(BLOCK_M=block_m, EXPERTS=experts, BLOCK_FILL=1024)
    builder.launch(SCHEDULE, (programs,), arguments, expert_warps(experts, 4))


def add_schedule(
    builder: PlanBuilder, layout: LayoutSpec, block_m: int, *, given: bool = False, name: str = "schedule"
) -> None:
    """Declare a schedule: an input if given, else scratch made of group_sizes."""
    declare = builder.input if given else builder.scratch
    declare(name, _schedule_spec(layout, block_m), Held(Role.SCHEDULE, str(block_m)))
    if not given:
        builder.call(plan_schedule(layout, block_m, builder.target), name, {"schedule": name})


@keep_plans
def plan_schedule(layout: LayoutSpec, block_m: int, target: Target) -> LaunchPlan:
    """schedule int32 `[max_blocks, 2]` of group_sizes int32 `[E]`: (row block within the expert, expert), both
    ascending, then (-1, -1). Kernels stop at the first of these.

    Example, group_sizes [3, 0, 2], block_m 2: (0, 0), (1, 0), (0, 2). Input: group_sizes. Output: schedule.
    """
    require_at_least("block_m", block_m, 1)
    builder = PlanBuilder("schedule", target)
    builder.input("group_sizes", ArraySpec((layout.num_experts,), "int32"))
    builder.output("schedule", _schedule_spec(layout, block_m), Held(Role.SCHEDULE, str(block_m)))
    if not target.compiled:
        constants = {"layout": layout, "block_m": block_m}
        inputs = {"group_sizes": "group_sizes"}
        from moe_core.ops.routing import reference as twins

        return builder.reference(twins.schedule, inputs, constants, ("schedule",))
    require_experts(layout.num_experts)
    _launch_schedule(builder, layout, block_m, "schedule")
    return builder.build()


LAYOUT_OF_RUNS = declare_kernel(run_kernels.layout_of_runs, writes_layout=True)

MAX_COUNTS = 8192
_BLOCK = {"gpu": 1024, "interpreter": 64}


def runs_spec(num_rows: int, num_experts: int) -> LayoutSpec:
    return LayoutSpec(num_rows, 1, num_experts, rows=num_rows)


@keep_plans
def plan_layout_of_runs(counts: ArraySpec, num_rows: int, target: Target, *, stride: int | None = None) -> LaunchPlan:
    """Group received rows by expert. Rows arrive in runs, ordered by source, then by expert.

    counts int32 `[W, L]`: rows per run. stride: rows per source, unused after its runs (None: runs are contiguous). An
    expert's rows keep their order. A row is a slot (K = 1). Runs are cut where their memory ends, and overflow counts
    the missing rows.

    Outputs, int32, R = num_rows: ids `[R, 1]`, the local expert of every row, -1 = unused; group_sizes `[L]`,
    group_start `[L + 1]`, slot_of_row `[R]`, row_of_slot `[R]`, overflow `[1]`.
    """
    require_spec("counts", counts, ("num_sources", "num_experts"), "int32")
    num_sources, num_experts = counts.shape
    for name, size in (("num_sources", num_sources), ("num_experts", num_experts)):
        require_at_least(f"{name} of counts", size, 1)
    require_at_least("num_rows", num_rows, 0)
    if stride is not None:
        require_at_least("stride", stride, 0)
        if stride * num_sources != num_rows:
            raise InvalidInput(
                f"stride must be num_rows / num_sources = {num_rows} / {num_sources}, got {stride}; give every source "
                "as many rows"
            )
    layout = runs_spec(num_rows, num_experts)
    builder = PlanBuilder("layout_of_runs", target)
    present = builder.inputs({"counts": counts})
    outputs = [builder.output("ids", ArraySpec((num_rows, 1), "int32"))]
    outputs += [builder.output(name, array) for name, array in named_arrays(LayoutArrays.specs(layout))]
    outputs.append(builder.output("overflow", ArraySpec((1,), "int32")))
    if not target.compiled:
        constants = {"num_rows": num_rows, "stride": stride}
        from moe_core.ops.routing import reference as twins

        return builder.reference(twins.layout_of_runs, present, constants, outputs)
    sources, experts = padded(num_sources, 1), padded(num_experts, 1)
    if sources * experts > MAX_COUNTS:
        raise Unsupported(
            f"one program holds all counts and takes at most {MAX_COUNTS}, got {num_sources} x {num_experts}; use the "
            "NumPy reference engine"
        )
    arguments = builder.pointers("counts", *outputs)
    arguments |= passed(num_rows=num_rows, num_sources=num_sources, stride=stride, NUM_EXPERTS=num_experts)
    arguments |= passed(SOURCES=sources, EXPERTS=experts, BLOCK=_BLOCK[target.engine])
    builder.launch(LAYOUT_OF_RUNS, (num_sources, num_experts), arguments, 4 if sources * experts <= 2048 else 8)
    return builder.build()
