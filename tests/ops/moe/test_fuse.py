"""Stages that share a launch: the bits of the launches apart, whatever the order of the programs."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest

from moe_core.base.arrays import ArraySpec
from moe_core.base.target import Target
from moe_core.ops.matmul.portable.plan import MATMUL_OGS, PORTABLE
from moe_core.ops.matmul.sm90.plan import SM90
from moe_core.ops.matmul.tile_choice import TileChoice, TileSource
from moe_core.ops.moe import forward as moe
from moe_core.ops.moe.fuse import (
    CHAINED,
    MOST_TOKENS,
    MULTIPLY_AND_REDUCE,
    ROUTE_AND_MULTIPLY,
    fusion_counters,
    why_not_fused,
)
from moe_core.ops.reduction.reduce import REDUCE
from moe_core.ops.routing.topk import ROUTE_AND_LAYOUT
from moe_core.plan.steps import Kernel, KernelLaunch, LaunchPlan
from moe_core.runtime import interpreter
from moe_core.specs import Activation, MoESpec, RouterSpec, TileConfig, Tuning
from moe_core.specs.operands import ExpertWeights, RouterLogits, TopK
from tests.support.harness import engine_target
from tests.support.moe import Layer, plan_of, run_layer, simple_layer

CUDA = Target("cuda", 90, 132)
TILE = TileConfig(16, 64, 64)
TALL = TileConfig(64, 64, 64)


def kernels(plan: LaunchPlan) -> list[Kernel]:
    return [step.kernel for step in plan.steps if isinstance(step, KernelLaunch)]


@pytest.fixture
def apart(monkeypatch: pytest.MonkeyPatch):
    """Run a layer with its stages as launches of their own."""

    def run(layer: Layer) -> dict[str, np.ndarray]:
        with monkeypatch.context() as patch:
            patch.setattr(moe, "why_not_fused", lambda *_, **__: "the test wants them apart")
            moe.plan_moe.cache_clear()
            found = kernels(plan_of(layer, engine_target()))
            assert not {CHAINED, ROUTE_AND_MULTIPLY, MULTIPLY_AND_REDUCE} & set(found)
            found = run_layer(layer)
        moe.plan_moe.cache_clear()
        return found

    return run


def hard_ids(num_tokens: int, kind: str) -> np.ndarray:
    """Ids [T, 2] of 4 experts."""
    ids = np.stack([np.arange(num_tokens) % 4, (np.arange(num_tokens) + 1) % 4], 1).astype(np.int32)
    if kind == "one expert":
        ids[:] = [3, -1]
    elif kind == "nobody":
        ids[:] = -1
    elif kind == "some":
        ids[::3] = -1
    return ids


@pytest.mark.parametrize(
    ("num_tokens", "kind"),
    [(1, "all"), (1, "one expert"), (1, "nobody"), (9, "one expert"), (40, "some"), (8, "nobody")],
)
def test_given_ids_give_the_bits_of_launches_apart(num_tokens: int, kind: str, apart) -> None:
    layer = simple_layer(num_tokens)
    ids = hard_ids(num_tokens, kind)
    weights = np.linspace(0.1, 1.0, ids.size, dtype=np.float32).reshape(ids.shape)
    layer = dataclasses.replace(layer, routing=TopK(ids, weights), spec=dataclasses.replace(layer.spec, router=None))
    last = MULTIPLY_AND_REDUCE if num_tokens == 1 else CHAINED
    assert kernels(plan_of(layer, engine_target()))[-1] == last
    found, wanted = run_layer(layer), apart(layer)
    for name, value in wanted.items():
        assert found[name].tobytes() == value.tobytes(), name


ROUTERS = [
    RouterSpec(2),
    RouterSpec(3, slot_order="expert", scale=2.5),
    RouterSpec(1, scoring="sigmoid", renormalize=False),
    RouterSpec(4, order="topk_then_softmax"),
    RouterSpec(2, scoring="sigmoid", num_groups=2, topk_group=1),
]


@pytest.mark.parametrize("router", ROUTERS, ids=str)
@pytest.mark.parametrize("masked", [False, True])
def test_one_token_gives_the_bits_of_launches_apart(router: RouterSpec, masked: bool, apart) -> None:
    """Ties and NaN among the logits, too: every program must choose as the routing does."""
    for logits in ([0.5, -1.0, 2.0, 0.25], [1.0, 1.0, 1.0, 1.0], [np.nan, 3.0, -np.inf, np.nan]):
        layer = simple_layer(1)
        routing = RouterLogits(np.asarray([logits], np.float32))
        mask = np.asarray([False]) if masked else None
        spec = dataclasses.replace(layer.spec, router=router)
        layer = dataclasses.replace(layer, routing=routing, spec=spec, token_mask=mask)
        wanted = [ROUTE_AND_MULTIPLY, MULTIPLY_AND_REDUCE]
        assert kernels(plan_of(layer, engine_target())) == wanted
        found, expected = run_layer(layer), apart(layer)
        for name, value in expected.items():
            assert found[name].tobytes() == value.tobytes(), name


def test_one_token_whose_experts_are_mapped_is_routed_apart() -> None:
    """A map may give one expert two rows."""
    layer = dataclasses.replace(simple_layer(1), expert_map=np.asarray([0, 0, 1, 3], np.int32))
    plan = plan_of(layer, CUDA)
    wanted = [ROUTE_AND_LAYOUT, MATMUL_OGS, MULTIPLY_AND_REDUCE]
    assert kernels(plan) == wanted
    assert "matmul 2 and reduce are one launch" in plan.explain()


def test_columns_that_do_not_fill_a_tile_of_the_sum(apart) -> None:
    layer = simple_layer(d_model=1025)
    assert kernels(plan_of(layer, engine_target()))[-1] == CHAINED
    found, wanted = run_layer(layer), apart(layer)
    for name, value in wanted.items():
        assert found[name].tobytes() == value.tobytes(), name


@pytest.mark.skipif(engine_target().kind != "interpreter", reason="only the interpreter's order can be chosen")
def test_programs_may_run_in_any_order(monkeypatch: pytest.MonkeyPatch, apart) -> None:
    layer = simple_layer(40)
    wanted = apart(layer)
    product = itertools.product
    backwards = type("itertools", (), {"product": staticmethod(lambda *axes: list(product(*axes))[::-1])})
    monkeypatch.setattr(interpreter, "itertools", backwards)
    for name, value in run_layer(layer).items():
        assert value.tobytes() == wanted[name].tobytes(), name


def test_a_forward_of_few_tokens_is_two_launches() -> None:
    plan = plan_of(simple_layer(), CUDA)
    assert kernels(plan) == [ROUTE_AND_LAYOUT, CHAINED]
    assert plan.steps[-1].grid[1:] == (1, 1)  # pyright: ignore[reportAttributeAccessIssue]
    assert "matmul 1, matmul 2 and reduce are one launch" in plan.explain()
    assert kernels(plan_of(simple_layer(MOST_TOKENS + 1), CUDA))[-1] == REDUCE
    assert CHAINED not in kernels(plan_of(simple_layer(0), CUDA))


def portable(config: TileConfig, **changes: int) -> TileChoice:
    return TileChoice(PORTABLE, dataclasses.replace(config, **changes), TileSource.GIVEN)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"tiles": (None, None)}, "there are no tiles"),
        ({"num_tokens": 0}, "there are no tiles"),
        (
            {"tiles": (portable(TILE), TileChoice(SM90, TILE, TileSource.GIVEN))},
            "portable family, got portable and sm90",
        ),
        ({"num_tokens": MOST_TOKENS + 1}, f"gains nothing above {MOST_TOKENS} tokens, got {MOST_TOKENS + 1}"),
        ({"tiles": (portable(TILE), portable(TILE, block_m=32))}, "row blocks of one height"),
        ({"tiles": (portable(TILE), portable(TILE, num_warps=8))}, "one number of warps"),
        ({"tiles": (portable(TALL), portable(TALL))}, "gains nothing above 32 rows of a block, got 64"),
        ({"top_k": 17}, "top_k must be at most 16, got 17"),
        ({"alone": False}, "something is saved"),
        ({"batch_invariant": True}, "the same kernels for every number of tokens"),
    ],
)
def test_reasons_against_it(change: dict, reason: str) -> None:
    options = {"tiles": (portable(TILE), portable(TILE)), "num_tokens": 8, "top_k": 4}
    arguments = options | {"alone": True, "batch_invariant": False} | change
    positional = [arguments.pop(name) for name in ("tiles", "num_tokens", "top_k")]
    assert reason in str(why_not_fused(*positional, **arguments))


def test_batch_invariant_plans_stay_apart() -> None:
    layer = simple_layer()
    invariant = dataclasses.replace(layer.spec, tuning=Tuning(batch_invariant=True))
    assert kernels(plan_of(dataclasses.replace(layer, spec=invariant), CUDA))[-1] == REDUCE


def test_one_token_may_have_products_of_different_heights(apart) -> None:
    """As an override, or a measured table, may say. Product 1 has two column tiles."""
    layer = simple_layer(1)
    tuned = dataclasses.replace(layer.spec, tuning=Tuning(matmul_1=dataclasses.replace(TALL, block_n=16)))
    layer = dataclasses.replace(layer, spec=tuned)
    for target in (CUDA, engine_target()):
        assert kernels(plan_of(layer, target))[-1] == MULTIPLY_AND_REDUCE
    found, wanted = run_layer(layer), apart(layer)
    for name, value in wanted.items():
        assert found[name].tobytes() == value.tobytes(), name


def test_plans_say_why_stages_share_no_launch() -> None:
    layer = simple_layer(8)
    assert "stages share no launch" not in plan_of(layer, CUDA).explain()
    tuned = dataclasses.replace(layer.spec, tuning=Tuning(matmul_1=TALL))
    text = plan_of(dataclasses.replace(layer, spec=tuned), CUDA).explain()
    assert "note    stages share no launch: both products need row blocks of one height" in text


def test_counters_hold_every_row_block_or_tile_of_columns() -> None:
    for count in (1, 62, 1022, 1023, 3000):
        chained, one_token = fusion_counters(2, count, 1), fusion_counters(1, 1, count)
        assert chained >= count + 2 and one_token >= count
        assert chained.bit_count() == one_token.bit_count() == 1


def test_plans_have_counters_for_every_row_block() -> None:
    """Of more experts than the fewest counters are for."""
    experts = ExpertWeights(ArraySpec((2048, 64, 32), "bfloat16"), ArraySpec((2048, 16, 64), "bfloat16"))
    routing, spec = RouterLogits(ArraySpec((256, 2048), "float32")), MoESpec(Activation("silu"), RouterSpec(16))
    plan = moe.plan_moe(ArraySpec((256, 64), "bfloat16"), experts, routing, spec, CUDA)
    assert CHAINED in kernels(plan)
    counters, schedule = (
        next(buffer.spec for buffer in plan.scratch if buffer.name.startswith(name))
        for name in ("tile_counters", "schedule")
    )
    assert counters.size >= 2 + schedule.shape[0] > 1024
