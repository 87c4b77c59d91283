"""The parity run's verdicts on engines made of altered copies of the reference: every kind of fault, and its stage."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from moe_core import InvalidInput
from moe_core.ops.routing.reference import route
from moe_core.parity.builtin_cases import BUILT_IN, Draw, built_in_case
from moe_core.parity.case import Case
from moe_core.parity.engines import EngineRun
from moe_core.parity.flips import RouterScores, topk_scores
from moe_core.parity.quantized_rows import QUANTIZED_HIDDEN, QUANTIZED_X
from moe_core.parity.reference_engine import reference_stages
from moe_core.parity.report import CaseReport, untested_engines
from moe_core.parity.run import ORDER, run_case
from moe_core.specs.routing import RouterSpec
from tests.support.parity import AlteredEngine, Change


def small_case(name: str = "mixtral", dtype: str = "float32") -> Case:
    return built_in_case(name, Draw(dtype, num_tokens=8))


def run_on(case: Case, *engines: AlteredEngine) -> CaseReport:
    return run_case(case, engines, lambda started: None)


def altered(change: Change | None = None, case: Case | None = None, **options: Any) -> Any:
    """The report of one altered engine."""
    (report,) = run_on(case or small_case(), AlteredEngine(change, **options)).reports
    return report


@pytest.mark.parametrize("name", BUILT_IN)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_an_unaltered_copy_agrees_on_every_built_in_case(name: str, dtype: str) -> None:
    report = altered(case=small_case(name, dtype))
    assert report.agrees, str(report)
    rows = () if quantises_rows(name) else (QUANTIZED_X, QUANTIZED_HIDDEN)
    assert [row.stage for row in report.rows] == [*(stage for stage in ORDER if stage not in rows), "moe (composed)"]


def quantises_rows(name: str) -> bool:
    """Whether a built-in case quantises rows."""
    scheme = BUILT_IN[name].scheme
    return scheme is not None and scheme.activations is not None


@pytest.mark.parametrize(
    ("name", "stage"),
    [
        (name, stage)
        for name in ("mixtral", "deepseek_v3_fp8_block")
        for stage in ORDER
        if name != "mixtral" or stage not in (QUANTIZED_X, QUANTIZED_HIDDEN)
    ],
)
def test_a_fault_in_a_stage_is_named(name: str, stage: str) -> None:
    def change(stages: dict[str, Any], composed: dict[str, Any]) -> None:
        if stages[stage].dtype == np.uint8:
            # One code, to its neighbour.
            stages[stage][2, 0] ^= 1
        else:
            stages[stage][2:4] = stages[stage][2:4] * 1.5 + 1

    report = altered(change, small_case(name))
    assert report.verdict == "differ"
    assert report.first_divergent == stage


def test_an_engine_without_quantised_rows_is_told() -> None:
    def forget(stages: dict[str, Any], composed: dict[str, Any]) -> None:
        del stages[QUANTIZED_X], stages[QUANTIZED_HIDDEN]

    report = altered(forget, small_case("deepseek_v3_fp8_block"))
    assert {row.stage: row.verdict for row in report.rows} == {QUANTIZED_X: "missing", QUANTIZED_HIDDEN: "missing"}


def test_faults_of_the_composed_op_are_named() -> None:
    def wrong_output(stages: dict[str, Any], composed: dict[str, Any]) -> None:
        composed["output"] = composed["output"] * 2

    def wrong_count(stages: dict[str, Any], composed: dict[str, Any]) -> None:
        composed["tokens_per_expert"][0] += 1

    def wrong_ids(stages: dict[str, Any], composed: dict[str, Any]) -> None:
        composed["ids"][0] = composed["ids"][0, ::-1]

    def wrong_weights(stages: dict[str, Any], composed: dict[str, Any]) -> None:
        composed["weights"][0, 0] = np.nextafter(composed["weights"][0, 0], np.float32(2))

    for change, note in (
        (wrong_output, ""),
        (wrong_count, "wrong tokens_per_expert"),
        (wrong_ids, "other ids than its stages"),
        (wrong_weights, "other weights than its stages"),
    ):
        report = altered(change)
        assert report.first_divergent == "moe (composed)"
        assert note in report.rows[-1].note


def test_a_wrong_dtype_differs() -> None:
    def change(stages: dict[str, Any], composed: dict[str, Any]) -> None:
        stages["output"] = stages["output"].astype(np.float32)

    report = altered(change, small_case(dtype="bfloat16"))
    assert report.first_divergent == "output"
    assert "dtype float32, expected bfloat16" in str(report)


def test_a_routing_of_other_shapes_is_compared_no_further() -> None:
    def change(stages: dict[str, Any], composed: dict[str, Any]) -> None:
        stages["ids"] = stages["ids"][:, :1]

    report = altered(change)
    assert report.first_divergent == "ids"
    assert [row.stage for row in report.rows] == ["logits", "ids", "weights"]
    assert "shape (8, 1), expected (8, 2)" in str(report)


def test_missing_stages_are_reported() -> None:
    def change(stages: dict[str, Any], composed: dict[str, Any]) -> None:
        del stages["matmul2"]

    report = altered(change)
    assert report.first_divergent == "matmul2" and report.rows[0].verdict == "missing"


def test_the_reference_under_another_name_is_not_tested() -> None:
    report = run_on(small_case(), AlteredEngine(is_reference=True))
    assert report.reports[0].verdict == "not tested" and not report.agrees and not report.differs
    assert untested_engines([report]) == ("altered",)
    assert "NOT TESTED" in str(report)


def test_a_skipped_case_keeps_its_reason() -> None:
    report = run_on(small_case(), AlteredEngine(reason="no such semantics"))
    assert report.agrees and untested_engines([report]) == ("altered",)
    assert "altered: skipped: no such semantics" in str(report)
    both = run_on(small_case(), AlteredEngine())
    assert untested_engines([report, both]) == ()


def test_given_stages_are_not_counted_as_tested() -> None:
    report = altered(given=("logits",))
    assert report.agrees and report.rows[0].verdict == "given"


def near_tie(case: Case, gap: float) -> tuple[Case, int]:
    """The case with two columns of its router nearly equal, and a token that chooses exactly one of the two."""
    weight = case.routing.weight.copy()
    assert case.spec.router_weight_layout == "out_in" and case.routing.bias is None
    ids = reference_stages(case)["ids"]
    last = int(ids[0, -1])
    other = next(expert for expert in range(case.num_experts) if expert not in ids[0])
    weight[other] = weight[last] * np.float32(1 - gap)
    near = dataclasses.replace(case, routing=dataclasses.replace(case.routing, weight=weight))
    return near, other


def test_drifted_logits_may_flip_a_tie_and_the_rest_is_still_compared() -> None:
    case, _ = near_tie(small_case(), 1e-7)
    original = reference_stages(case)
    token = 0
    order = np.argsort(-original["logits"][token], kind="stable")
    first, second = order[case.top_k - 1], order[case.top_k]

    def drift(stages: dict[str, Any], composed: dict[str, Any]) -> None:
        stages["logits"][token, [first, second]] = stages["logits"][token, [second, first]]
        stages["logits"][token, second] += np.float32(2e-6)
        stages["ids"], stages["weights"] = route(stages["logits"], spec=case.router)

    report = altered(case=case, routing=drift)
    assert report.agrees, str(report)
    assert report.rows[1].verdict == "flip (tie within tolerance)"
    assert [flip.token for flip in report.flips] == [token]

    def fault(stages: dict[str, Any], composed: dict[str, Any]) -> None:
        stages["matmul2"] = stages["matmul2"] * 2

    report = altered(fault, case, routing=drift)
    assert report.first_divergent == "matmul2"


def test_a_tie_that_the_own_logits_decide_otherwise_is_a_fault_of_the_routing() -> None:
    case, _ = near_tie(small_case(), 1e-7)

    def wrong_choice(stages: dict[str, Any], composed: dict[str, Any]) -> None:
        order = np.argsort(-stages["logits"][0], kind="stable")
        stages["ids"][0, -1] = order[case.top_k]

    report = altered(case=case, routing=wrong_choice)
    assert report.first_divergent == "ids"
    assert "its own logits say" in str(report)
    assert report.flips[0].margin is not None and report.flips[0].margin <= report.flips[0].allowed


def test_a_tie_broken_towards_the_higher_id_is_a_fault() -> None:
    case = small_case()
    same = case.routing.weight.copy()
    same[:] = same[0]
    case = dataclasses.replace(case, routing=dataclasses.replace(case.routing, weight=same))

    def wrong_choice(stages: dict[str, Any], composed: dict[str, Any]) -> None:
        stages["logits"][:] = stages["logits"][:, :1]
        stages["ids"][:] = [1, 0]

    report = altered(case=case, routing=wrong_choice)
    assert report.first_divergent == "ids" and len(report.flips) == 8
    # No weight is left that could agree.
    assert report.verdict == "differ" and report.rows[2].verdict == "not tested"


def test_a_wrong_group_is_measured_between_groups() -> None:
    case = small_case("deepseek_v3")
    members = case.num_experts // case.router.num_groups

    def wrong_group(stages: dict[str, Any], composed: dict[str, Any]) -> None:
        groups = set((stages["ids"][3] // members).tolist())
        stranger = next(group for group in range(case.router.num_groups) if group not in groups)
        stages["ids"][3, -1] = stranger * members

    report = altered(case=case, routing=wrong_group)
    (flip,) = report.flips
    assert report.first_divergent == "ids" and not flip.is_tie and flip.margin is not None


def test_engines_with_another_slot_order_meet_the_reference_in_that_order() -> None:
    case = small_case("gpt_oss")
    rule = dataclasses.replace(case.router, slot_order="expert")
    ascending = dataclasses.replace(case, spec=dataclasses.replace(case.spec, router=rule))

    class Ascending(AlteredEngine):
        def run(self, case: Case, progress: Callable[[str], object]) -> EngineRun:
            return super().run(ascending, progress)

    (report,) = run_on(case, Ascending(slot_order="expert")).reports
    assert report.agrees, str(report)
    (report,) = run_on(case, Ascending()).reports
    assert report.first_divergent == "ids"


def test_engines_of_a_family_must_be_bitwise_equal() -> None:
    def last_bit(stages: dict[str, Any], composed: dict[str, Any]) -> None:
        composed["output"][0, 0] = np.nextafter(composed["output"][0, 0], np.float32(9))

    first = AlteredEngine(family="ours", name="one")
    report = run_on(small_case(), first, AlteredEngine(family="ours", name="two"))
    assert report.agrees and report.bitwise[0].equal
    report = run_on(small_case(), first, AlteredEngine(last_bit, family="ours", name="two"))
    assert all(engine.agrees for engine in report.reports)
    assert not report.agrees and report.differs
    assert "one and two bitwise equal: NO (first difference in composed output)" in str(report)
    report = run_on(small_case(), first, AlteredEngine(last_bit, family="theirs", name="two"))
    assert report.agrees and report.bitwise == ()


def test_built_in_cases_are_repeatable_and_refuse_bad_options() -> None:
    first, again = (built_in_case("gpt_oss", Draw(seed=3)) for _ in range(2))
    assert first.x.tobytes() == again.x.tobytes()
    assert first.x.tobytes() != built_in_case("gpt_oss", Draw(seed=4)).x.tobytes()
    with pytest.raises(InvalidInput, match=r"case must be one of mixtral, .*, got 'gpt2'; name one of these"):
        built_in_case("gpt2")
    with pytest.raises(InvalidInput, match="tokens must be at least 1, got 0"):
        built_in_case("mixtral", Draw(num_tokens=0))
    with pytest.raises(InvalidInput, match="dtype must be one of bfloat16, float16, float32, got 'int8'"):
        built_in_case("mixtral", Draw("int8"))


def test_built_in_cases_reach_the_clamp() -> None:
    case = built_in_case("gpt_oss", Draw("float32"))
    before = reference_stages(case)["matmul1"]
    limit = case.spec.activation.limit
    assert limit is not None
    assert (before > limit).any() and (before < -limit).any()


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid", "sqrt_softplus"])
def test_selection_scores_rank_like_the_reference(scoring: str) -> None:
    random = np.random.default_rng(1)
    logits = random.standard_normal((16, 12)).astype(np.float32)
    bias = random.standard_normal(12).astype(np.float32)
    rule = RouterSpec(3, scoring)
    for given in (None, bias):
        ids, _ = route(logits, given, spec=rule)
        scores = topk_scores(logits, rule, given)
        assert np.array_equal(np.argsort(-scores, axis=1, kind="stable")[:, :3], ids)
        assert RouterScores.of(logits, rule, given).allowed(0, 1e-6) > 0
