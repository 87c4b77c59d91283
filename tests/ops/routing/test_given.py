"""Layouts of ids and weights in the dtypes that routers give them in: those of casting them first, bit by bit."""

from __future__ import annotations

import numpy as np
import pytest

from moe_core import InvalidInput
from moe_core.base.arrays import ArraySpec
from moe_core.base.dtypes import ROUTER_WEIGHT_DTYPES, numpy_dtype
from moe_core.base.target import Target
from moe_core.ops.routing import reference
from moe_core.ops.routing.layout import COUNT_BLOCKS, LAYOUT_AT_ONCE, PLACE_BLOCKS, plan_layout
from moe_core.plan.steps import KernelLaunch
from moe_core.specs.routing import LayoutSpec
from tests.support.harness import H200, engine_target, run_plan, spec_of

E = 5
#: Ids of no expert, most of which int32 cannot hold: cut to it, some would be an expert, or -1.
FAR = [2**32 + 3, 2**32, 2**32 - 1, -(2**32) + 1, 2**31, -(2**31) - 1, 2**63 - 1, -(2**63), -(2**40), E, -2]
#: Weights whose bits say whether they were converted exactly.
HARD = [0.0, -0.0, 1.0, -3.0, 1 / 3, 6e-8, 1e-40, np.inf, -np.inf, np.nan]


def drawn(tokens: int, top_k: int, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """ids int64, among them all of FAR where there are enough, and weights in a dtype."""
    random = np.random.default_rng(tokens)
    ids = random.integers(-1, E, tokens * top_k)
    places = random.permutation(ids.size)[: len(FAR) if ids.size > len(FAR) else ids.size // 2]
    ids[places] = FAR[: len(places)]
    with np.errstate(over="ignore", invalid="ignore"):
        weights = np.resize(np.array(HARD, np.float32), ids.size).astype(numpy_dtype(dtype))
    return ids.reshape(tokens, top_k), weights.reshape(tokens, top_k)


def cast(ids: np.ndarray) -> np.ndarray:
    """int32 ids: those that it cannot hold are invalid ones."""
    return np.where((ids < -1) | (ids >= 2**31), -2, ids).astype(np.int32)


def require_same(found: np.ndarray, wanted: np.ndarray, label: str) -> None:
    """Equal bits; of NaN, which a GPU converts to its own, that it is one."""
    np.testing.assert_array_equal(found, wanted, err_msg=label, strict=True)
    number = ~np.isnan(wanted)
    assert found[number].tobytes() == wanted[number].tobytes(), label


@pytest.mark.parametrize("dtype", ROUTER_WEIGHT_DTYPES)
@pytest.mark.parametrize(("tokens", "top_k"), [(0, 2), (1, 1), (1, E), (9, 2), (40, 1), (75, E), (300, 2)])
@pytest.mark.parametrize("target", [engine_target(), Target("reference")], ids=str)
def test_results_are_those_of_casting_first(tokens: int, top_k: int, dtype: str, target: Target) -> None:
    ids, weights = drawn(tokens, top_k, dtype)
    layout = LayoutSpec(tokens, top_k, E)
    given = {"ids": ids, "given_weights": weights}
    specs = {name: spec_of(array) for name, array in given.items()}
    plan = plan_layout(specs.pop("ids"), layout, target, block_ms=(16,), **specs)
    found = run_plan(plan, given)
    expected = reference.layout(cast(ids), layout=layout, block_ms=(16,))
    names = [buffer.name for buffer in plan.outputs]
    assert names[-1] == "row_weight"
    for name, wanted in zip(names, (*expected, weights.astype(np.float32)), strict=True):
        require_same(found[name], wanted, name)


@pytest.mark.parametrize("tokens", [9, 300])
def test_far_ids_meet_maps_and_masks(tokens: int) -> None:
    ids, _ = drawn(tokens, 2, "float32")
    expert_map = np.array([1, -1, 0, 2, 7, 1, 1], np.int32)
    mask = np.random.default_rng(0).random(tokens) < 0.7
    layout, others = LayoutSpec(tokens, 2, 3), {"expert_map": expert_map, "token_mask": mask}
    plan = plan_layout(spec_of(ids), layout, engine_target(), **{name: spec_of(one) for name, one in others.items()})
    found = run_plan(plan, {"ids": ids} | others)
    expected = reference.layout(cast(ids), layout=layout, **others)
    for buffer, wanted in zip(plan.outputs, expected, strict=True):
        require_same(found[buffer.name], wanted, buffer.name)


@pytest.mark.parametrize("tokens", [1, 512, 513, 16384])
def test_no_launch_is_added(tokens: int) -> None:
    ids, weights = ArraySpec((tokens, 8), "int64"), ArraySpec((tokens, 8), "bfloat16")
    plan = plan_layout(ids, LayoutSpec(tokens, 8, 128), H200, given_weights=weights)
    kernels = [step.kernel for step in plan.steps if isinstance(step, KernelLaunch)]
    assert kernels == ([LAYOUT_AT_ONCE] if tokens <= 512 else [COUNT_BLOCKS, PLACE_BLOCKS])


def test_other_dtypes_are_refused() -> None:
    layout, ids = LayoutSpec(3, 2, E), ArraySpec((3, 2), "int32")
    with pytest.raises(InvalidInput, match=r"ids must be int32 or .*, got float32; cast it to int32"):
        plan_layout(ArraySpec((3, 2), "float32"), layout, H200)
    wrong = ArraySpec((3, 2), "float8_e4m3fn")
    with pytest.raises(InvalidInput, match=r"given_weights must be float32 or bfloat16 or float16, got float8.*cast"):
        plan_layout(ids, layout, H200, given_weights=wrong)
