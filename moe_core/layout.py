"""Planning of ragged layouts and schedules."""

from __future__ import annotations

import functools

from moe_core.arrays import ArraySpec, require_spec
from moe_core.errors import InvalidInput, Unsupported
from moe_core.plan import Constant, LaunchPlan, PlanBuilder, Pointer, Scalar
from moe_core.specs import LayoutSpec, require_at_least
from moe_core.target import Target

#: Experts that one program can hold a row of; far above any model.
MAX_EXPERTS = 4096
#: Elements of a tile that one program works on at once; the interpreter's cost does not depend on it.
BLOCK_ELEMENTS = {"cuda": 4096, "interpreter": 65536}
#: Up to this many slots one launch makes the layout (its programs all count every slot), above it three.
SLOTS_AT_ONCE = {"cuda": 8192, "interpreter": 256}
#: Slots per program. Ranking within a block compares every pair, so that a block's cost grows with its square.
_BLOCK_SLOTS = {"cuda": 128, "interpreter": 64}
#: Slots that one step of counting takes: the first number where it holds them all, else the last.
_CHUNK_SLOTS = {"cuda": (256, 1024), "interpreter": (64, 128)}
#: Blocks of slots that one step of the scan takes. The interpreter's sizes are small so that its tests take every loop.
_SCAN_BLOCKS = {"cuda": 512, "interpreter": 4}
#: Schedules a layout kernel writes itself; further ones are launches of their own.
_FUSED_SCHEDULES = 2


def padded(size: int, least: int = 16) -> int:
    """The next power of two, at least `least`."""
    return max(least, 1 << max(size - 1, 0).bit_length())


def optional(name: str, spec: ArraySpec | None) -> Pointer | Constant:
    """The kernel argument of an input that may be absent."""
    return Constant(None) if spec is None else Pointer(name)


def require_experts(num_experts: int) -> None:
    """Raise Unsupported above MAX_EXPERTS."""
    if num_experts > MAX_EXPERTS:
        raise Unsupported(
            f"the kernels hold one row of experts per program and take at most {MAX_EXPERTS}, got {num_experts}; "
            "use the NumPy reference engine"
        )


def _expert_warps(experts: int, least: int) -> int:
    """Warps for a program that holds several padded rows of experts: 4 elements of each per thread, up to 2048."""
    return min(16, max(least, experts // 128))


def _schedule_rows(experts: int, target: Target) -> int:
    """Schedule rows per step: each is compared with every expert."""
    return max(1, BLOCK_ELEMENTS[target.kind] // experts)


def _schedule_spec(layout: LayoutSpec, block_m: int) -> ArraySpec:
    return ArraySpec((layout.max_blocks(block_m), 2), "int32")


@functools.lru_cache(maxsize=4096)
def plan_layout(
    ids: ArraySpec,
    layout: LayoutSpec,
    target: Target,
    *,
    expert_map: ArraySpec | None = None,
    token_mask: ArraySpec | None = None,
    block_ms: tuple[int, ...] = (),
) -> LaunchPlan:
    """Group the slots of ids int32 `[T, K]` by expert, stably: an expert's rows are in slot order.

    expert_map int32 `[E_global]`: global to local id; entries outside [0, E) mean "not here". token_mask bool `[T]`: a
    masked token's ids act as -1 and count nowhere. Ids outside [-1, E_global) act as -1 and are counted in invalid_ids.
    block_ms: heights of the schedules to make.

    Inputs: ids, [expert_map], [token_mask]. Outputs, int32: group_sizes `[E]`, group_start `[E + 1]`, slot_of_row
    `[capacity]`, row_of_slot `[T * K]`, invalid_ids `[1]`, then `schedule_{block_m}` `[max_blocks, 2]` per block_m.
    Raises InvalidInput, Unsupported.
    """
    require_spec("ids", ids, (layout.num_tokens, layout.top_k), "int32")
    if expert_map is not None:
        require_spec("expert_map", expert_map, ("num_global_experts",), "int32")
        if expert_map.size == 0:
            raise InvalidInput("expert_map must have an entry per global expert, got none; pass None for no map")
    if token_mask is not None:
        require_spec("token_mask", token_mask, (layout.num_tokens,), "bool")
    for block_m in block_ms:
        require_at_least("block_ms", block_m, 1)
    if len(set(block_ms)) != len(block_ms):
        raise InvalidInput(f"block_ms must be distinct, got {block_ms}; name each height once")

    builder = PlanBuilder("layout", target)
    arrays = {"ids": ids, "expert_map": expert_map, "token_mask": token_mask}
    present = {name: builder.input(name, array) for name, array in arrays.items() if array is not None}
    sizes = {
        "group_sizes": layout.num_experts,
        "group_start": layout.num_experts + 1,
        "slot_of_row": layout.capacity,
        "row_of_slot": layout.num_slots,
        "invalid_ids": 1,
    }
    outputs = [builder.output(name, ArraySpec((size,), "int32")) for name, size in sizes.items()]
    outputs += [builder.output(f"schedule_{block_m}", _schedule_spec(layout, block_m)) for block_m in block_ms]
    if not target.compiled:
        builder.reference("routing:layout", present, {"layout": layout, "block_ms": block_ms}, outputs)
        return builder.build()
    require_experts(layout.num_experts)
    _LayoutPlanner(builder, layout, expert_map, token_mask, block_ms).launch()
    return builder.build()


class _LayoutPlanner:
    """Chooses between one launch and three, and adds them."""

    def __init__(
        self,
        builder: PlanBuilder,
        layout: LayoutSpec,
        expert_map: ArraySpec | None,
        token_mask: ArraySpec | None,
        block_ms: tuple[int, ...],
    ) -> None:
        self.builder, self.layout, self.block_ms = builder, layout, block_ms
        self.target = builder.target
        self.experts = padded(layout.num_experts, 32)
        self.max_rows = Constant(layout.max_rows)
        num_global = layout.num_experts if expert_map is None else expert_map.size
        self.read = {
            "ids": Pointer("ids"),
            "expert_map": optional("expert_map", expert_map),
            "token_mask": optional("token_mask", token_mask),
        }
        self.sizes = {
            "NUM_GLOBAL": Constant(num_global),
            "NUM_EXPERTS": Constant(layout.num_experts),
            "TOP_K": Constant(layout.top_k),
        }

    def launch(self) -> None:
        few = self.layout.num_slots <= SLOTS_AT_ONCE[self.target.kind]
        self.builder.note(
            f"{self.layout.num_slots} slots: "
            + ("one launch, every program counts all slots" if few else "counted by block, scanned, placed")
        )
        if few:
            self._at_once()
        else:
            self._by_blocks()
        for block_m in self.block_ms[_FUSED_SCHEDULES:]:
            _launch_schedule(self.builder, self.layout, block_m, f"schedule_{block_m}")

    def _programs(self, block_slots: int) -> int:
        """Programs of a placing kernel: one per block of slots, and enough to share out the rows left by padding."""
        padding = self.layout.num_experts if self.layout.alignment > 1 or self.layout.max_rows is not None else 1
        shared = 1 if self.target.kind == "interpreter" else min(padding, self.target.num_sms)
        return max(-(-self.layout.num_slots // block_slots), shared)

    def _schedules(self) -> tuple[dict[str, Pointer | Constant], dict[str, Scalar], dict[str, Constant]]:
        """The fused schedules: their pointers, lengths and heights."""
        pointers: dict[str, Pointer | Constant] = {}
        lengths: dict[str, Scalar] = {}
        heights: dict[str, Constant] = {}
        for number in range(_FUSED_SCHEDULES):
            block_m = self.block_ms[number] if number < len(self.block_ms) else None
            pointers[f"schedule_{number}"] = Constant(None) if block_m is None else Pointer(f"schedule_{block_m}")
            lengths[f"max_blocks_{number}"] = Scalar(0 if block_m is None else self.layout.max_blocks(block_m))
            heights[f"BLOCK_M_{number}"] = Constant(block_m or 1)
        return pointers, lengths, heights

    def _tail(self, block_slots: int, block_sizes: dict[str, Constant]) -> dict[str, Constant]:
        """The constants that end the arguments of both placing kernels."""
        return {
            "ALIGNMENT": Constant(self.layout.alignment),
            "MAX_ROWS": self.max_rows,
            **self._schedules()[2],
            "BLOCK_S": Constant(block_slots),
            **block_sizes,
            "EXPERTS": Constant(self.experts),
            "BLOCK_ROWS": Constant(_schedule_rows(self.experts, self.target)),
            "BLOCK_FILL": Constant(1024),
        }

    def _at_once(self) -> None:
        layout, block_slots = self.layout, _BLOCK_SLOTS[self.target.kind]
        chunks = _CHUNK_SLOTS[self.target.kind]
        chunk = chunks[0] if layout.num_slots <= chunks[0] else chunks[-1]
        pointers, lengths, _ = self._schedules()
        outputs = ("group_sizes", "group_start", "slot_of_row", "row_of_slot", "invalid_ids")
        self.builder.launch(
            "layout:layout_at_once",
            (self._programs(block_slots),),
            {
                **self.read,
                **{name: Pointer(name) for name in outputs},
                **pointers,
                "num_slots": Scalar(layout.num_slots),
                "capacity": Scalar(layout.capacity),
                **lengths,
                **self.sizes,
                **self._tail(block_slots, {"CHUNK": Constant(chunk)}),
            },
            num_warps=_expert_warps(self.experts, 4),
        )

    def _by_blocks(self) -> None:
        builder, layout, block_slots = self.builder, self.layout, _BLOCK_SLOTS[self.target.kind]
        blocks = -(-layout.num_slots // block_slots)
        counts = ArraySpec((blocks, layout.num_experts), "int32")
        builder.scratch("block_counts", counts)
        builder.scratch("block_offsets", counts)
        builder.scratch("block_invalid", ArraySpec((blocks,), "int32"))
        builder.launch(
            "layout:count_blocks",
            (blocks,),
            {
                **self.read,
                "block_counts": Pointer("block_counts"),
                "block_invalid": Pointer("block_invalid"),
                "num_slots": Scalar(layout.num_slots),
                **self.sizes,
                "BLOCK_S": Constant(block_slots),
                "EXPERTS": Constant(self.experts),
            },
            num_warps=_expert_warps(self.experts, 4),
        )
        block_e = 8 if self.target.kind == "cuda" else self.experts
        builder.launch(
            "layout:scan_blocks",
            (-(-layout.num_experts // block_e),),
            {
                **{name: Pointer(name) for name in ("block_counts", "block_invalid", "block_offsets")},
                "group_sizes": Pointer("group_sizes"),
                "invalid_ids": Pointer("invalid_ids"),
                "num_blocks": Scalar(blocks),
                "NUM_EXPERTS": Constant(layout.num_experts),
                "MAX_ROWS": self.max_rows,
                "BLOCK_B": Constant(_SCAN_BLOCKS[self.target.kind]),
                "BLOCK_E": Constant(block_e),
            },
            num_warps=8,
        )
        pointers, lengths, _ = self._schedules()
        arrays = ("block_offsets", "group_sizes", "group_start", "slot_of_row", "row_of_slot")
        builder.launch(
            "layout:place_blocks",
            (self._programs(block_slots),),
            {
                **self.read,
                **{name: Pointer(name) for name in arrays},
                **pointers,
                "num_slots": Scalar(layout.num_slots),
                "capacity": Scalar(layout.capacity),
                **lengths,
                **self.sizes,
                **self._tail(block_slots, {}),
            },
            num_warps=_expert_warps(self.experts, 4),
        )


def _launch_schedule(builder: PlanBuilder, layout: LayoutSpec, block_m: int, output: str) -> None:
    experts = padded(layout.num_experts, 32)
    rows, length = _schedule_rows(experts, builder.target), layout.max_blocks(block_m)
    builder.launch(
        "schedule:schedule",
        (-(-length // rows),),
        {
            "group_sizes": Pointer("group_sizes"),
            "schedule": Pointer(output),
            "max_blocks": Scalar(length),
            "NUM_EXPERTS": Constant(layout.num_experts),
            "BLOCK_M": Constant(block_m),
            "BLOCK_ROWS": Constant(rows),
            "EXPERTS": Constant(experts),
        },
        num_warps=_expert_warps(experts, 4),
    )


@functools.lru_cache(maxsize=4096)
def plan_schedule(layout: LayoutSpec, block_m: int, target: Target) -> LaunchPlan:
    """schedule int32 `[max_blocks, 2]` of group_sizes int32 `[E]`: (row block within the expert, expert), experts and
    their blocks ascending, idle rows (-1, -1).

    Example, group_sizes [3, 0, 2], block_m 2: (0, 0), (1, 0), (0, 2). Input: group_sizes; output: schedule. Raises
    InvalidInput, Unsupported.
    """
    require_at_least("block_m", block_m, 1)
    builder = PlanBuilder("schedule", target)
    builder.input("group_sizes", ArraySpec((layout.num_experts,), "int32"))
    builder.output("schedule", _schedule_spec(layout, block_m))
    if not target.compiled:
        constants = {"layout": layout, "block_m": block_m}
        builder.reference("routing:schedule", {"group_sizes": "group_sizes"}, constants, ("schedule",))
        return builder.build()
    require_experts(layout.num_experts)
    _launch_schedule(builder, layout, block_m, "schedule")
    return builder.build()
