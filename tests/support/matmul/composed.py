"""A grouped matmul as a product of a composed plan: on a layout of our own, where it may store the pre-activation."""

from __future__ import annotations

import numpy as np

from moe_core.base.arrays import ArraySpec
from moe_core.base.target import Target
from moe_core.ops.matmul.arguments import zero_counters
from moe_core.ops.matmul.forward import plan_matmul_ogs
from moe_core.ops.routing.layout import add_schedule
from moe_core.plan.builder import PlanBuilder
from moe_core.plan.steps import LaunchPlan
from moe_core.specs import LayoutSpec, MatmulSpec, TileConfig
from moe_core.specs.operands import LAYOUT_INPUTS, MatmulOperands, map_arrays, named_arrays
from tests.support.harness import engine_target, run_plan, spec_of


def plan_composed(
    operands: MatmulOperands,
    layout: LayoutSpec,
    spec: MatmulSpec,
    config: TileConfig,
    outputs: tuple[str, ...],
    target: Target,
) -> LaunchPlan:
    """Schedule, cleared counters where the family counts, and the product. operands: a bundle of ArraySpecs."""
    plan = plan_matmul_ogs(operands, layout, spec, target, config=config, stage=0, outputs=outputs)
    builder = PlanBuilder("composed", target)
    names = [name for name, _ in named_arrays(operands)] + list(LAYOUT_INPUTS)
    bindings = {name: builder.input(name, plan.spec(name)) for name in names}
    bindings |= {name: builder.output(name, plan.spec(name)) for name in outputs}
    add_schedule(builder, layout, config.block_m)
    if config.family == "sm90":
        bindings["tile_counters"] = zero_counters(builder)
    builder.call(plan, "matmul", bindings)
    return builder.build()


def run_composed(
    operands: MatmulOperands,
    layout: LayoutSpec,
    arrays: dict[str, np.ndarray],
    spec: MatmulSpec,
    config: TileConfig,
    outputs: tuple[str, ...],
) -> dict[str, np.ndarray]:
    """The outputs on the engine target; rows of no expert are as poisoned as they were."""
    given = dict(named_arrays(operands)) | {name: arrays[name] for name in LAYOUT_INPUTS}
    specs = MatmulOperands(**{name: ArraySpec(a.shape, a.dtype.name) for name, a in named_arrays(operands)})
    return run_plan(plan_composed(specs, layout, spec, config, outputs, engine_target()), given)


def expected_composed(
    operands: MatmulOperands,
    layout: LayoutSpec,
    arrays: dict[str, np.ndarray],
    spec: MatmulSpec,
    outputs: tuple[str, ...],
) -> dict[str, np.ndarray]:
    """The reference's outputs; rows of no expert are zeros."""
    given = dict(named_arrays(operands)) | {name: arrays[name] for name in LAYOUT_INPUTS}
    plan = plan_matmul_ogs(map_arrays(operands, spec_of), layout, spec, Target("reference"), stage=0, outputs=outputs)
    return run_plan(plan, given)


def filled_rows(layout: LayoutSpec, arrays: dict[str, np.ndarray]) -> np.ndarray:
    """bool `[capacity]`: the rows of experts."""
    filled = np.zeros(layout.capacity, bool)
    for start, size in zip(arrays["group_start"], arrays["group_sizes"], strict=False):
        filled[start : start + size] = True
    return filled
