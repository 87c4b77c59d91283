"""Both products and the reduction in one launch: the bits of the launches apart, whatever the order of the programs."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest

from moe_core import interpreter, moe
from moe_core.chain import MOST_TOKENS, chain_counters, why_not_chained
from moe_core.operands import TopK
from moe_core.plan import KernelLaunch, LaunchPlan
from moe_core.specs import Tuning
from moe_core.target import Target
from moe_core.tuning import TileConfig
from tests.harness import engine_target
from tests.test_moe_plan import Layer, plan_of, run_layer, simple_layer

CUDA = Target("cuda", 90, 132)
TILE = TileConfig(16, 64, 64)


def kernels(plan: LaunchPlan) -> list[str]:
    return [step.kernel for step in plan.steps if isinstance(step, KernelLaunch)]


@pytest.fixture
def apart(monkeypatch: pytest.MonkeyPatch):
    """Run a layer with its stages as launches of their own."""

    def run(layer: Layer) -> dict[str, np.ndarray]:
        with monkeypatch.context() as patch:
            patch.setattr(moe, "why_not_chained", lambda *_, **__: "the test wants them apart")
            moe.plan_moe.cache_clear()
            assert not [kernel for kernel in kernels(plan_of(layer, engine_target())) if "chained" in kernel]
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


@pytest.mark.parametrize(("num_tokens", "kind"), [(1, "all"), (9, "one expert"), (40, "some"), (3, "nobody")])
def test_results_are_those_of_launches_apart(num_tokens: int, kind: str, apart) -> None:
    layer = simple_layer(num_tokens)
    ids = hard_ids(num_tokens, kind)
    weights = np.linspace(0.1, 1.0, ids.size, dtype=np.float32).reshape(ids.shape)
    layer = dataclasses.replace(layer, routing=TopK(ids, weights), spec=dataclasses.replace(layer.spec, router=None))
    assert kernels(plan_of(layer, engine_target()))[-1] == "chained:chained"
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
    assert kernels(plan) == ["route_and_layout:route_and_layout", "chained:chained"]
    assert "matmul 1, matmul 2 and reduce are one launch" in plan.explain()
    assert kernels(plan_of(simple_layer(MOST_TOKENS + 1), CUDA))[-1] == "reduction:reduce"
    assert "chained:chained" not in kernels(plan_of(simple_layer(0), CUDA))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"configs": (None, None)}, "there are no tiles"),
        ({"num_tokens": 0}, "there are no tiles"),
        ({"alike": False}, "both products need one of the families"),
        ({"configs": (TILE, dataclasses.replace(TILE, family="hopper"))}, "got portable and hopper"),
        ({"num_tokens": MOST_TOKENS + 1}, f"gains nothing above {MOST_TOKENS} tokens, got {MOST_TOKENS + 1}"),
        ({"configs": (TILE, dataclasses.replace(TILE, block_m=32))}, "row blocks of one height"),
        ({"configs": (TILE, dataclasses.replace(TILE, num_warps=8))}, "one number of warps"),
        ({"top_k": 17}, "top_k must be at most 16, got 17"),
        ({"alone": False}, "something is kept"),
        ({"batch_invariant": True}, "the same kernels for every number of tokens"),
    ],
)
def test_reasons_against_it(change: dict, reason: str) -> None:
    options = {"configs": (TILE, TILE), "alike": True, "num_tokens": 8, "top_k": 4}
    arguments = options | {"alone": True, "batch_invariant": False} | change
    positional = [arguments.pop(name) for name in ("configs", "alike", "num_tokens", "top_k")]
    assert reason in why_not_chained(*positional, **arguments)


def test_batch_invariant_plans_stay_apart() -> None:
    layer = simple_layer()
    invariant = dataclasses.replace(layer.spec, tuning=Tuning(batch_invariant=True))
    assert kernels(plan_of(dataclasses.replace(layer, spec=invariant), CUDA))[-1] == "reduction:reduce"


def test_counters_hold_every_row_block() -> None:
    for blocks in (1, 62, 1022, 1023, 3000):
        assert chain_counters(blocks) >= blocks + 2 and chain_counters(blocks).bit_count() == 1
