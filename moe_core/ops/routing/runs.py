"""Planning of the layout of rows from other ranks."""

from __future__ import annotations

from moe_core.base import ArraySpec, Target, keep_plans, require_spec
from moe_core.base.checks import require_at_least
from moe_core.base.sizes import padded
from moe_core.errors import InvalidInput, Unsupported
from moe_core.ops.routing.kernels import runs as kernels
from moe_core.plan import LaunchPlan, PlanBuilder, declare_kernel, passed
from moe_core.specs import LayoutArrays, LayoutSpec, named_arrays

LAYOUT_OF_RUNS = declare_kernel(kernels.layout_of_runs, writes_layout=True)

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
        from moe_core.ops.routing import reference_runs as twins

        constants = {"num_rows": num_rows, "stride": stride}
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
