"""Plans of products with adapters' factors: what shrinks rows to low rank, and the factors' gradients."""

from __future__ import annotations

from dataclasses import dataclass

from moe_core.base import ArraySpec, Target, keep_plans, padded, row_stride
from moe_core.ops.lora.adapters import Adapters, adapter_inputs
from moe_core.ops.lora.kernels import factors as kernels
from moe_core.plan import LaunchPlan, PlanBuilder, Role, declare_kernel, passed
from moe_core.specs.tile import shared_limit

#: Bytes of shared memory of four long steps.
_MUCH_SHARED = 160 * 1024
#: Longest side of a gradient's tile, rows of a step, stages.
_GRADIENT = (64, 32, 3)

SHRINK = declare_kernel(kernels.shrink, pdl="start")
FACTOR_GRADIENT = declare_kernel(kernels.factor_gradient)


@keep_plans
def plan_shrink(x: ArraySpec, factor: ArraySpec, adapters: Adapters, gather: str, target: Target) -> LaunchPlan:
    """low `[capacity, R]` = cast(scale / (1 - p) * (x[gather(row)] . factor)) of each row's adapter and expert.

    x `[*, D]`; factor `[S, E or 1, D, R]`, transposed `[S, E or 1, R, D]`, cast to the dtype of x. Sums are fp32.
    Zeros: columns from an adapter's rank on, and rows without an adapter. Rows without an expert are unwritten. Inputs:
    x, factor, scale fp32 and ranks int32 `[S, E]`, virtual_start, slot_of_row, the virtual experts' schedule (compiled
    targets), and with dropout seed int32 `[1]`.
    """
    builder, layout = PlanBuilder("shrink", target), adapters.layout
    depth, rank = adapters.sides(factor)
    inputs = {"x": x, "factor": factor} | adapter_inputs(adapters, ranks=True, scale=True)
    present = builder.inputs(inputs)
    builder.output("low", ArraySpec((layout.capacity, rank), x.dtype))
    if not target.compiled:
        builder.sums("reference: float32 BLAS over the whole reduction axis")
        from moe_core.ops.lora import reference as twins

        return builder.reference(twins.shrink, present, {"adapters": adapters, "gather": gather}, ("low",))
    block_m, block_n = adapters.block_m(target), min(64, padded(rank, 16))
    block_k, num_stages = _shrink_steps(block_m, depth, x.dtype, target)
    schedule = adapters.virtual.max_blocks(block_m)
    builder.input("virtual_schedule", ArraySpec((schedule, 2), "int32"), Role.VIRTUAL_SCHEDULE)
    slot, expert, k_stride, r_stride = adapters.strides(factor)
    arguments = {
        **builder.pointers("x", "factor", "scale", "ranks", "seed", "virtual_start", "slot_of_row"),
        **passed(schedule="virtual_schedule", low="low", num_rows=layout.capacity, num_slots=layout.num_slots),
        **passed(D=depth, RANK=rank, NUM_EXPERTS=layout.num_experts, SLOTS=adapters.slots),
        **passed(X_STRIDE=row_stride("x", x), SLOT_STRIDE=slot, EXPERT_STRIDE=expert, K_STRIDE=k_stride),
        **passed(R_STRIDE=r_stride, TOP_K=layout.top_k, GATHER=gather, KEPT=adapters.dropout.kept),
        **(adapters.dropout.constants() | passed(INPUT_PRECISION=adapters.precision(x.dtype))),
        **passed(BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k, PDL=None),
    }
    builder.launch(SHRINK, (schedule, -(-rank // block_n)), arguments, 4, num_stages)
    builder.sums(f"k in blocks of {block_k}, in order, fp32 accumulator; no split")
    return builder.build()


def _shrink_steps(block_m: int, depth: int, dtype: str, target: Target) -> tuple[int, int]:
    """Returns (block_k, stages)."""
    if not target.on_gpu or dtype == "float32":
        return (32, 3) if target.on_gpu else (min(64, padded(depth)), 1)
    # Few rows wait for memory: more bytes under way.
    few = block_m == 16 and shared_limit(target.arch) > _MUCH_SHARED
    return (min(256, padded(depth)), 4) if few else (min(64, padded(depth)), 3)


@dataclass(frozen=True)
class Rows:
    """Rows of a gradient's side: the array and its gather."""

    array: ArraySpec
    gather: str = "row"


@keep_plans
def plan_factor_gradient(
    left: Rows, right: Rows, gradient: ArraySpec, adapters: Adapters, target: Target, *, weighted: bool = False
) -> LaunchPlan:
    """gradient `[S, E or 1, M, N]` = cast(sum over the rows of each adapter and expert of left^T . right), fp32 sums.

    left `[*, M]`, masked by the dropout, and right `[*, N]`, of one dtype. An expert axis of 1: the sum over experts,
    in order. weighted: left is multiplied by row_weight fp32 `[T * K]` by slot and rounded again. Inputs: left, right,
    virtual_start, slot_of_row, [row_weight], [seed].
    """
    builder, layout = PlanBuilder("factor_gradient", target), adapters.layout
    shared, (m, n) = gradient.shape[1] == 1, gradient.shape[2:]
    present = builder.inputs({"left": left.array, "right": right.array} | adapter_inputs(adapters))
    if weighted:
        weight = ArraySpec((layout.num_tokens, layout.top_k), "float32")
        present["row_weight"] = builder.input("row_weight", weight)
    builder.output("d_factor", gradient)
    if not target.compiled:
        builder.sums("products and sums: the order of NumPy, fp32")
        constants = {"adapters": adapters, "gathers": (left.gather, right.gather), "spec": gradient}
        from moe_core.ops.lora import reference as twins

        return builder.reference(twins.factor_gradient, present, constants, ("d_factor",))
    side, block_k, stages = _GRADIENT if target.on_gpu else (64, 32, 1)
    block_m, block_n = min(side, padded(m)), min(side, padded(n))
    arguments = {
        **builder.pointers("left", "right", "row_weight", "seed", "virtual_start", "slot_of_row"),
        **passed(gradient="d_factor", num_rows=layout.capacity, num_slots=layout.num_slots, M=m, N=n),
        **passed(NUM_EXPERTS=layout.num_experts, SLOTS=adapters.slots, SHARED=shared),
        **passed(LEFT_STRIDE=row_stride("left", left.array), RIGHT_STRIDE=row_stride("right", right.array)),
        **passed(TOP_K=layout.top_k, LEFT_GATHER=left.gather, RIGHT_GATHER=right.gather),
        **(adapters.dropout.constants() | passed(INPUT_PRECISION=adapters.precision(left.array.dtype))),
        **passed(BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k),
    }
    grid = (-(-m // block_m), -(-n // block_n), gradient.shape[0] * gradient.shape[1])
    builder.launch(FACTOR_GRADIENT, grid, arguments, 4, stages)
    builder.sums(f"rows in blocks of {block_k}, in order, fp32 accumulator; no split")
    return builder.build()
