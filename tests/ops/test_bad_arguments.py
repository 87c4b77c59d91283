"""Wrong arguments of every op: the error's type, and a message with name, expectation, value and fix, from planners.

Front-ends plan with what they are given, so their tests look at the delivery of a sample alone.
"""

from __future__ import annotations

import re

import pytest

from moe_core.base.target import Target
from tests.support.bad_arguments import CASES, sample
from tests.support.bad_arguments.case import KINDS, PLANNERS, Case, case_id
from tests.support.harness import H200

TARGETS = (H200, Target("interpreter"), Target("reference"))


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_planners_name_what_is_wrong(case: Case) -> None:
    for target in TARGETS:
        if case.kind == "unsupported" and target.kind == "reference":
            PLANNERS[case.op](target, **case.arguments)
            continue
        with pytest.raises(case.error, match=case.text) as caught:
            PLANNERS[case.op](target, **case.arguments)
        assert type(caught.value) is case.error
        assert re.search(r"; \w", str(caught.value)), "a remedy follows a semicolon"


def test_the_sample_has_every_op_and_every_kind() -> None:
    assert {case.kind for case in CASES} == set(KINDS)
    assert {case.op for case in CASES} == set(PLANNERS) == {case.op for case in sample(without=("strides", "missing"))}
    assert {case.kind for case in sample(without=("strides", "missing"))} == set(KINDS) - {"size", "strides", "missing"}
    assert len({(case.op, case.kind, case.name) for case in CASES}) == len(CASES)
