"""Rows of x written in layout order before product 1: the bits of gathered ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np
import pytest

from moe_core.base.arrays import ArraySpec
from moe_core.base.target import Target
from moe_core.ops.matmul.family import Family
from moe_core.ops.moe import fuse
from moe_core.ops.moe.forward import plan_moe
from moe_core.ops.moe.fuse import CHAINED
from moe_core.ops.moe.options import ForwardOptions
from moe_core.ops.reduction.rowwise import ORDER_ROWS
from moe_core.plan.steps import KernelLaunch, LaunchPlan
from moe_core.specs import Activation, MoESpec, RouterSpec
from moe_core.specs.operands import ExpertWeights, RouterLogits, TopK, named_arrays
from tests.support.harness import H200, engine_target, run_plan, spec_of
from tests.support.moe import plan_of, run_layer, simple_layer
from tests.support.strategies import draw_array

SILU = MoESpec(Activation("silu"), weight_layout="out_in")


def orders(plan: LaunchPlan) -> int:
    return sum(isinstance(step, KernelLaunch) and step.kernel is ORDER_ROWS for step in plan.steps)


@pytest.fixture
def _no_plans_stay() -> Iterator[None]:
    plan_moe.cache_clear()
    yield
    plan_moe.cache_clear()


@pytest.mark.usefixtures("_no_plans_stay")
@pytest.mark.parametrize("on_input", [False, True])
def test_bits(on_input: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    rng, top_k = np.random.default_rng(0), 1 if on_input else 3
    spec = dataclasses.replace(SILU, apply_router_weight_on_input=on_input)
    experts = ExpertWeights(draw_array(rng, (4, 96, 72), "bfloat16"), draw_array(rng, (4, 72, 48), "bfloat16"))
    ids = rng.integers(-1, 3, (40, top_k)).astype(np.int32)
    x, mask = draw_array(rng, (40, 72), "bfloat16"), np.arange(40) != 4
    x[4], ids[7] = np.nan, -1
    routing = TopK(ids, rng.random(ids.shape, np.float32))
    arrays = {"x": x, "token_mask": mask} | dict(named_arrays(experts, "experts."))
    arrays |= dict(named_arrays(routing, "routing."))
    monkeypatch.setattr(fuse, "MOST_TOKENS", 0)
    found = []
    for ordered in (False, True):
        monkeypatch.setattr(Family, "orders_rows", lambda family, problem, config, ordered=ordered: ordered)
        plan_moe.cache_clear()
        options = ForwardOptions(token_mask=spec_of(mask), save=True)
        plan = plan_moe(spec_of(x), spec_of(experts), spec_of(routing), spec, engine_target(), options=options)
        assert orders(plan) == ordered
        made = run_plan(plan, {buffer.name: arrays[buffer.name] for buffer in plan.inputs})
        found.append((made["output"], made["saved.pre_activation"][: (ids[mask] >= 0).sum()]))
    for one, other in zip(*found, strict=True):
        assert one.any() and one.tobytes() == other.tobytes()


@pytest.mark.parametrize(
    ("tokens", "width", "ordered"), [(2048, 2880, 1), (1024, 2880, 0), (2048, 2048, 0), (2048, 6400, 1)]
)
def test_many_rows_of_wide_experts(tokens: int, width: int, ordered: int) -> None:
    """And it takes no memory: the rows lie where the results will."""
    shapes = (8, 2 * width, 2048), (8, 2048, width)
    experts = ExpertWeights(*(ArraySpec(shape, "bfloat16") for shape in shapes))
    logits, spec = RouterLogits(ArraySpec((tokens, 8), "float32")), dataclasses.replace(SILU, router=RouterSpec(2))
    plan = plan_moe(ArraySpec((tokens, 2048), "bfloat16"), experts, logits, spec, H200)
    assert orders(plan) == ordered
    assert plan.scratch_bytes <= 2 * tokens * (width + 2048) * 2 + 2_000_000


def test_every_tile_of_the_sum_is_written() -> None:
    layer = simple_layer(20, d_model=1025)
    last = plan_of(layer, engine_target()).steps[-1]
    assert isinstance(last, KernelLaunch) and last.kernel == CHAINED
    wanted = run_layer(layer, Target("reference"))["output"]
    np.testing.assert_allclose(run_layer(layer)["output"], wanted, rtol=1e-4, atol=1e-4)
