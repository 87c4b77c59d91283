"""What ops say of wrong arguments: each alone, and every axis and dtype that two arguments must agree on."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from moe_core.base.arrays import ArraySpec
from moe_core.base.target import Target
from moe_core.errors import InvalidInput
from tests.support.bad_arguments import CASES, sample
from tests.support.bad_arguments.case import KINDS, PLANNERS, Case, case_id
from tests.support.bad_arguments.relations import BACKWARDS, CALLS, Call, broken, call_id, front_end, replaced
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


def check(call: Call, run: Callable[..., Any], make: Callable[[ArraySpec], Any]) -> None:
    """Run a call, then with everything changed in it, one by one."""
    wrong = []
    run(**replaced(call.arguments, lambda path, spec: make(spec)))
    for what, path, other in broken(call):

        def changed(at: str, spec: ArraySpec, path: str = path, other: ArraySpec = other) -> Any:
            return make(other if at == path else spec)

        try:
            run(**replaced(call.arguments, changed))
        except InvalidInput as error:
            if what in call.free:
                wrong.append(f"{what} = {other} was refused: {error}")
            elif "; " not in str(error):
                wrong.append(f"{what} = {other}: no fix in {error}")
        except Exception as error:
            wrong.append(f"{what} = {other}: {type(error).__name__}: {error}")
        else:
            if what not in call.free:
                wrong.append(f"{what} = {other} was accepted")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("call", CALLS, ids=call_id)
@pytest.mark.parametrize("package", ["moe_torch", "moe_jax"])
def test_front_ends_compare_every_size(package: str, call: Call) -> None:
    module, make = front_end(package)
    with module.cpu_engine("reference"):
        check(call, getattr(module, call.op), make)


@pytest.mark.parametrize("target", [H200, Target("interpreter"), Target("reference")], ids=lambda one: one.kind)
@pytest.mark.parametrize("call", BACKWARDS, ids=call_id)
def test_backwards_compare_every_size(call: Call, target: Target) -> None:
    assert call.planner is not None
    planner = call.planner
    check(call, lambda **arguments: planner(**arguments, target=target), lambda spec: spec)
