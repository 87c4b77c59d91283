"""The verdicts of `moe_core.parity.compare` on synthetic stages: drift, flips, NaN, shapes, missing stages."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch

from moe_core import InvalidInput
from moe_core.parity import Tolerance, assert_parity, compare

T, K, E, D = 6, 2, 8, 16


def make_stages(dtype: Any = np.float32) -> dict[str, np.ndarray]:
    """Stages of a small layer: only their shapes and the order of the logits mean anything."""
    random = np.random.default_rng(0)
    logits = random.standard_normal((T, E)).astype(np.float32)
    ids = np.argsort(-logits, axis=1, kind="stable")[:, :K].astype(np.int32)
    return {
        "logits": logits,
        "ids": ids,
        "weights": np.take_along_axis(logits, ids, axis=1),
        "matmul2": random.standard_normal((T * K, D)).astype(dtype),
        "output": random.standard_normal((T, D)).astype(dtype),
    }


def copy_of(stages: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name: array.copy() for name, array in stages.items()}


def verdicts(report: Any) -> dict[str, str]:
    return {row.stage: row.verdict for row in report.rows}


def tie_token(stages: dict[str, np.ndarray], token: int, margin: float) -> None:
    """Make expert number K of a token score `margin` less than its last chosen one."""
    order = np.argsort(-stages["logits"][token])
    stages["logits"][token, order[K]] = stages["logits"][token, order[K - 1]] - np.float32(margin)


def flip_token(stages: dict[str, np.ndarray], token: int) -> None:
    """Choose the next best expert of a token instead of its last chosen one, and change what lies behind."""
    order = np.argsort(-stages["logits"][token])
    stages["ids"][token, K - 1] = order[K]
    stages["weights"][token] += 1
    stages["matmul2"][token * K : token * K + K] += 1
    stages["output"][token] += 1


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_equal_stages_agree(dtype: Any) -> None:
    stages = make_stages(dtype)
    report = compare(stages, copy_of(stages))
    assert report.agrees and report.tested and report.verdict == "agree"
    assert report.first_divergent is None
    assert "agrees with the reference (0 router flips)" in str(report)


def test_drift_within_the_tolerance_agrees_and_beyond_differs() -> None:
    stages = make_stages()
    drifted = copy_of(stages)
    drifted["output"] *= np.float32(1 + 1e-6)
    assert compare(stages, drifted).agrees
    drifted["output"][3, 5] += 1
    report = compare(stages, drifted)
    assert report.first_divergent == "output" and report.verdict == "differ"
    row = report.rows[-1]
    assert row.difference is not None
    assert row.difference.where == (3, 5)
    assert row.difference.actual == drifted["output"][3, 5]
    assert "DIFFERS: first divergent stage is output" in str(report)


def test_first_divergent_stage_follows_the_order_of_the_reference() -> None:
    stages = make_stages()
    broken = copy_of(stages)
    broken["output"] += 1
    broken["matmul2"] += 1
    reordered = {name: broken[name] for name in reversed(broken)}
    assert compare(stages, reordered).first_divergent == "matmul2"


def test_given_tolerances_replace_the_derived_ones() -> None:
    stages = make_stages()
    broken = copy_of(stages)
    broken["output"] += np.float32(0.01)
    assert not compare(stages, broken).agrees
    assert compare(stages, broken, tolerances={"output": Tolerance(0.1, 0.1)}).agrees
    with pytest.raises(InvalidInput, match="tolerances must be of stages of the reference, got outptu; correct"):
        compare(stages, broken, tolerances={"outptu": Tolerance(0.1, 0.1)})


def test_nan_and_infinity_on_one_side_differ_and_on_both_agree() -> None:
    stages = make_stages()
    broken = copy_of(stages)
    broken["matmul2"][2, 1] = np.nan
    report = compare(stages, broken)
    assert report.first_divergent == "matmul2"
    assert "elements differ in NaN or infinity, the first at (2, 1)" in str(report)
    stages["matmul2"][2, 1] = np.nan
    assert compare(stages, broken).agrees
    broken["matmul2"][2, 2] = np.inf
    assert not compare(stages, broken).agrees


def test_shapes_that_differ_and_missing_stages_fail() -> None:
    stages = make_stages()
    broken = copy_of(stages)
    broken["output"] = broken["output"][:-1]
    report = compare(stages, broken)
    assert verdicts(report)["output"] == "differ" and "shape (5, 16), expected (6, 16)" in str(report)
    del broken["output"]
    report = compare(stages, broken)
    assert verdicts(report)["output"] == "missing" and not report.agrees
    assert "the candidate has no such stage" in str(report)
    report = compare(stages, copy_of(stages) | {"matmul_1": stages["output"].copy()})
    assert verdicts(report)["matmul_1"] == "missing" and not report.agrees
    with pytest.raises(InvalidInput, match="reference must hold at least one stage, got none"):
        compare({}, stages)


def test_the_same_memory_is_not_tested_and_fails() -> None:
    stages = make_stages()
    report = compare(stages, stages)
    assert set(verdicts(report).values()) == {"not tested"}
    assert report.verdict == "not tested" and not report.agrees and not report.tested
    report = compare(stages, copy_of(stages) | {"output": stages["output"][:]})
    assert verdicts(report)["output"] == "not tested" and not report.agrees
    with pytest.raises(AssertionError, match="NOT TESTED: candidate and reference are the same memory"):
        assert_parity(stages, stages)


def test_a_flip_within_the_tolerance_of_the_logits_is_a_tie() -> None:
    stages = make_stages()
    tie_token(stages, 4, 1e-6)
    flipped = copy_of(stages)
    flip_token(flipped, 4)
    report = compare(stages, flipped)
    assert report.agrees
    assert verdicts(report)["ids"] == "flip (tie within tolerance)"
    (flip,) = report.flips
    assert flip.token == 4 and flip.kind == "set" and flip.is_tie
    assert flip.margin == pytest.approx(1e-6, rel=0.2)
    assert flip.margin is not None and flip.margin <= flip.allowed
    assert "without 1 tokens that have other experts" in str(report)


def test_a_flip_beyond_the_tolerance_differs_with_its_margin() -> None:
    stages = make_stages()
    tie_token(stages, 1, 0.25)
    flipped = copy_of(stages)
    flip_token(flipped, 1)
    report = compare(stages, flipped)
    assert report.first_divergent == "ids"
    (flip,) = report.flips
    assert flip.margin == pytest.approx(0.25) and not flip.is_tie
    assert "margin 0.25" in str(report)
    # What lies behind the flip is told apart: the other tokens agree.
    assert {name for name, verdict in verdicts(report).items() if verdict != "agree"} == {"ids"}


def test_drift_behind_a_tie_still_differs() -> None:
    stages = make_stages()
    tie_token(stages, 4, 1e-6)
    flipped = copy_of(stages)
    flip_token(flipped, 4)
    flipped["output"][0] += 1
    report = compare(stages, flipped)
    assert report.first_divergent == "output"


def test_an_exchange_of_slots_is_a_flip_of_order() -> None:
    stages = make_stages()
    swapped = copy_of(stages)
    swapped["ids"][2] = swapped["ids"][2, ::-1]
    (flip,) = compare(stages, swapped).flips
    best, second = np.sort(stages["logits"][2])[::-1][:2]
    assert flip.kind == "order" and flip.margin == pytest.approx(best - second)


def test_a_single_token_with_exchanged_slots_is_compared() -> None:
    reference = {
        "logits": np.array([[3, 3, 0, 0]], np.float32),
        "ids": np.array([[0, 1]], np.int32),
        "weights": np.array([[0.5, 0.5]], np.float32),
        "output": np.ones((1, 16), np.float32),
    }
    candidate = copy_of(reference) | {"ids": np.array([[1, 0]], np.int32)}
    assert assert_parity(reference, candidate).agrees
    report = compare(reference, candidate | {"weights": np.array([[9, -7]], np.float32)})
    assert report.first_divergent == "weights" and verdicts(report)["output"] == "agree"
    report = compare(reference, candidate | {"output": np.full((1, 16), 123, np.float32)})
    assert report.first_divergent == "output"


def exchanged_slots(stages: dict[str, np.ndarray], tokens: list[int]) -> dict[str, np.ndarray]:
    """Make tokens' chosen experts score alike; the same layer with the slots of these tokens the other way round."""
    for token in tokens:
        stages["logits"][token, stages["ids"][token]] = stages["logits"][token].max()
    stages["slots"] = stages["matmul2"].reshape(T, K, D).copy()
    exchanged = copy_of(stages)
    for token in tokens:
        for name in ("ids", "weights", "slots"):
            exchanged[name][token] = exchanged[name][token, ::-1]
        exchanged["matmul2"].reshape(T, K, D)[token] = stages["slots"][token, ::-1]
    return exchanged


@pytest.mark.parametrize("tokens", [[2], [0, 3], list(range(T))])
def test_exchanged_slots_are_compared_in_the_order_of_the_reference(tokens: list[int]) -> None:
    stages = make_stages()
    exchanged = exchanged_slots(stages, tokens)
    report = compare(stages, exchanged)
    assert report.agrees, str(report)
    assert {flip.kind for flip in report.flips} == {"order"} and len(report.flips) == len(tokens)
    assert f"slots of {len(tokens)} tokens in the reference's order" in str(report)
    for name in ("weights", "matmul2", "slots", "output"):
        wrong = copy_of(exchanged)
        wrong[name][tokens[-1]] += 1
        assert compare(stages, wrong).first_divergent == name
        # Slots that did not move along with their ids are wrong, an output has none.
        unmoved = compare(stages, exchanged | {name: stages[name].copy()})
        assert unmoved.first_divergent == (None if name == "output" else name)


def test_an_output_as_wide_as_top_k_has_no_slots() -> None:
    stages = make_stages()
    stages["output"] = stages["output"][:, :K]
    exchanged = exchanged_slots(stages, [1])
    assert compare(stages, exchanged).agrees
    exchanged["output"][1] = exchanged["output"][1, ::-1]
    assert compare(stages, exchanged).first_divergent == "output"


def test_other_experts_of_some_tokens_leave_out_those_alone() -> None:
    stages = make_stages()
    exchanged = exchanged_slots(stages, [0])
    for token in (2, 5):
        tie_token(stages, token, 1e-6)
        exchanged["logits"][token] = stages["logits"][token]
        flip_token(exchanged, token)
        exchanged["slots"][token] += 1
    report = compare(stages, exchanged)
    assert report.agrees, str(report)
    assert [flip.kind for flip in report.flips] == ["order", "set", "set"]
    assert "without 2 tokens that have other experts; slots of 1 tokens in the reference's order" in str(report)
    for token in (0, 1, 3, 4):
        for name, row in (("weights", token), ("matmul2", token * K), ("output", token)):
            wrong = copy_of(exchanged)
            wrong[name][row] += 1
            broken = compare(stages, wrong)
            assert broken.first_divergent == name
            difference = next(found.difference for found in broken.rows if found.stage == name)
            assert difference is not None and difference.where is not None
            assert difference.where[0] // (K if name == "matmul2" else 1) == token


def test_where_every_token_has_other_experts_nothing_is_tested() -> None:
    stages = make_stages()
    flipped = copy_of(stages)
    for token in range(T):
        tie_token(stages, token, 1e-6)
        flipped["logits"][token] = stages["logits"][token]
        flip_token(flipped, token)
    report = compare(stages, flipped)
    assert all(flip.is_tie for flip in report.flips) and verdicts(report)["ids"] == "flip (tie within tolerance)"
    assert {verdicts(report)[name] for name in ("weights", "matmul2", "output")} == {"not tested"}
    assert not report.agrees and report.verdict == "not tested"
    with pytest.raises(AssertionError, match="NOT TESTED: all 6 tokens have other experts"):
        assert_parity(stages, flipped)


def test_logits_of_flipped_tokens_are_compared_wherever_they_stand() -> None:
    stages = make_stages()
    tie_token(stages, 4, 1e-6)
    flipped = copy_of(stages)
    flip_token(flipped, 4)
    flipped["logits"][4] += 1
    last = {name: stages[name] for name in ("ids", "weights", "matmul2", "output", "logits")}
    assert compare(last, flipped).first_divergent == "logits"


@pytest.mark.parametrize("ids", [[E, 0], [-1, 0], [3, 3]])
def test_ids_that_no_routing_gives_are_never_ties(ids: list[int]) -> None:
    stages = make_stages()
    stages["logits"][:] = 0
    stages["ids"][:] = [0, 1]
    broken = copy_of(stages)
    broken["ids"][5] = ids
    (flip,) = compare(stages, broken).flips
    assert flip.margin is None and not flip.is_tie
    assert "margin not known" in str(flip)


def test_flips_without_logits_fail() -> None:
    stages = make_stages()
    flipped = copy_of(stages)
    flip_token(flipped, 0)
    for side in (stages, flipped):
        del side["logits"]
    report = compare(stages, flipped)
    assert report.first_divergent == "ids" and report.flips[0].margin is None


def test_mixed_dtypes_take_the_tolerance_of_the_coarser() -> None:
    stages = make_stages()
    rounded = copy_of(stages)
    rounded["output"] = rounded["output"].astype(ml_dtypes.bfloat16)
    assert compare(stages, rounded).agrees
    assert not compare(stages, rounded | {"output": rounded["output"].astype(np.float32)}).agrees


def test_torch_and_jax_arrays_are_read() -> None:
    stages = make_stages(ml_dtypes.bfloat16)
    as_jax = {name: jnp.asarray(array) for name, array in stages.items()}
    as_torch = {
        name: torch.tensor(array.astype(np.float32)).to(torch.bfloat16)
        if array.dtype == ml_dtypes.bfloat16
        else torch.tensor(array)
        for name, array in stages.items()
    }
    assert compare(as_jax, as_torch).agrees
    assert compare(stages, as_torch).agrees
    with pytest.raises(InvalidInput, match="stage 'logits' must be a NumPy, torch or JAX array, got object"):
        compare({"logits": object()}, stages)


def test_assert_parity_shows_the_report_and_its_label() -> None:
    stages = make_stages()
    assert assert_parity(stages, copy_of(stages)).agrees
    broken = copy_of(stages)
    broken["weights"][0, 0] = 9
    with pytest.raises(AssertionError) as caught:
        assert_parity(stages, broken, label="my layer")
    message = str(caught.value)
    assert message.startswith("my layer: DIFFERS: first divergent stage is weights")
    assert "[0, 0]" in message and "vs 9" in message


def test_many_flips_are_counted_not_all_printed() -> None:
    stages = make_stages()
    flipped = copy_of(stages)
    for token in range(T):
        flip_token(flipped, token)
    report = compare(stages, flipped)
    assert len(report.flips) == T
    assert "and 1 more flipped tokens" in str(report)
    assert "6 of 6 tokens flipped" in str(report)
