"""Bitmatrices from ids and back, against their NumPy twins, and how they are planned."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_core import Unsupported
from moe_core.base.arrays import ArraySpec
from moe_core.base.target import Target
from moe_core.ops.routing import reference
from moe_core.ops.routing.bitmatrix import plan_pack_bitmatrix, plan_unpack_bitmatrix
from moe_core.ops.routing.layout import MAX_EXPERTS
from moe_core.plan.steps import LaunchPlan
from tests.support import strategies
from tests.support.harness import H200, engine_target, run_plan
from tests.support.strategies import HARD_ROUTINGS, RoutingCase, hard_routing

pytestmark = pytest.mark.usefixtures("visible_poison")


def pack(ids: np.ndarray, num_experts: int, target: Target | None = None) -> dict[str, np.ndarray]:
    plan = plan_pack_bitmatrix(ArraySpec(ids.shape, "int32"), num_experts, target or engine_target())
    return run_plan(plan, {"ids": ids})


def unpack(bitmatrix: np.ndarray, num_experts: int, top_k: int, target: Target | None = None) -> np.ndarray:
    spec = ArraySpec(bitmatrix.shape, "uint32")
    plan = plan_unpack_bitmatrix(spec, num_experts, top_k, target or engine_target())
    return run_plan(plan, {"bitmatrix": bitmatrix})["ids"]


def assert_packs(ids: np.ndarray, num_experts: int) -> np.ndarray:
    found = pack(ids, num_experts)
    names = ("bitmatrix", "duplicates", "invalid_ids")
    for name, wanted in zip(names, reference.pack_bitmatrix(ids, num_experts=num_experts), strict=True):
        np.testing.assert_array_equal(found[name], wanted, err_msg=name, strict=True)
    return found["bitmatrix"]


@pytest.mark.parametrize("name", HARD_ROUTINGS)
def test_hard_routings(name: str) -> None:
    case = hard_routing(name)
    bitmatrix = assert_packs(case.ids, case.num_experts)
    for top_k in (1, case.top_k, case.top_k + 3):
        expected = reference.unpack_bitmatrix(bitmatrix, num_experts=case.num_experts, top_k=top_k)
        np.testing.assert_array_equal(unpack(bitmatrix, case.num_experts, top_k), expected, strict=True)


@given(strategies.routings())
def test_packs_like_the_reference(case: RoutingCase) -> None:
    assert_packs(case.ids, case.num_experts)


@given(st.integers(0, 40), st.sampled_from([1, 31, 32, 33, 64, 100, 384, 1000]), st.integers(1, 9), strategies.seeds())
def test_unpacking_gives_the_distinct_ids_ascending(num_tokens: int, num_experts: int, top_k: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    ids = strategies.distinct_ids(rng, num_tokens, min(top_k, num_experts), num_experts)
    bitmatrix = assert_packs(ids, num_experts)
    assert (unpack(bitmatrix, num_experts, ids.shape[1]) == np.sort(ids, axis=1)).all()
    expected = reference.unpack_bitmatrix(bitmatrix, num_experts=num_experts, top_k=top_k)
    np.testing.assert_array_equal(unpack(bitmatrix, num_experts, top_k), expected, strict=True)


def test_bit_31_and_the_next_word() -> None:
    found = pack(np.array([[31, 32, 0]], np.int32), 40)
    assert found["bitmatrix"].tolist() == [[2**31 + 1, 1]]
    assert unpack(found["bitmatrix"], 40, 4).tolist() == [[0, 31, 32, -1]]


def test_duplicates_and_invalid_ids_are_counted() -> None:
    found = pack(np.array([[2, 0, 2, 9, -1], [1, 1, 1, -2, 3]], np.int32), 4)
    assert found["bitmatrix"].tolist() == [[0b0101], [0b1010]]
    assert found["duplicates"].tolist() == [3] and found["invalid_ids"].tolist() == [2]


def test_counts_of_several_programs() -> None:
    rng = np.random.default_rng(0)
    # Nine programs: no multiple of what the last one adds up at a time.
    assert_packs(rng.integers(-3, 60, (1100, 5)).astype(np.int32), 50)


def test_every_expert_of_a_token() -> None:
    ids = np.tile(np.random.default_rng(0).permutation(384).astype(np.int32), (3, 1))
    assert (unpack(assert_packs(ids, 384), 384, 384) == np.arange(384)).all()


def test_bits_at_and_above_the_experts_are_ignored() -> None:
    assert unpack(np.full((2, 2), 2**32 - 1, np.uint32), 35, 40).tolist() == [[*range(35), *[-1] * 5]] * 2


def test_of_too_many_bits_the_lowest_are_kept() -> None:
    assert unpack(np.array([[0b11010]], np.uint32), 5, 2).tolist() == [[1, 3]]


def test_no_tokens_still_write_the_counters() -> None:
    found = pack(np.zeros((0, 2), np.int32), 4)
    assert found["duplicates"].tolist() == [0] and found["invalid_ids"].tolist() == [0]
    assert unpack(np.zeros((0, 1), np.uint32), 4, 2).shape == (0, 2)


def test_reference_engine_is_the_twin() -> None:
    case = hard_routing("out_of_range")
    found = pack(case.ids, case.num_experts, Target("reference"))
    expected = reference.pack_bitmatrix(case.ids, num_experts=case.num_experts)
    assert all((left == right).all() for left, right in zip(found.values(), expected, strict=True))
    ids = unpack(expected[0], case.num_experts, 4, Target("reference"))
    assert (ids == reference.unpack_bitmatrix(expected[0], num_experts=case.num_experts, top_k=4)).all()


IDS, WORDS = ArraySpec((3, 2), "int32"), ArraySpec((3, 2), "uint32")


def test_too_many_experts_are_refused_by_the_kernels_only() -> None:
    many, words = MAX_EXPERTS + 1, ArraySpec((3, MAX_EXPERTS // 32 + 1), "uint32")

    def plans(target: Target) -> list[LaunchPlan]:
        return [plan_pack_bitmatrix(IDS, many, target), plan_unpack_bitmatrix(words, many, 2, target)]

    for call in (lambda: plan_pack_bitmatrix(IDS, many, H200), lambda: plan_unpack_bitmatrix(words, many, 2, H200)):
        with pytest.raises(Unsupported, match=f"at most {MAX_EXPERTS}, got {many}"):
            call()
    assert all(plan.steps for plan in plans(Target("reference")))
