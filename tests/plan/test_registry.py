"""Plans by key: registered, exported to files, and loaded by another process; the codec of those files."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import subprocess
import sys

import pytest

from moe_core.base import codec
from moe_core.base.arrays import ArraySpec
from moe_core.base.recent import Recent
from moe_core.base.target import Target
from moe_core.errors import InvalidInput
from moe_core.ops.reduction.reduce import plan_scale_rows
from moe_core.plan import registry as plan
from moe_core.plan import steps
from moe_core.plan.steps import LaunchPlan
from moe_core.specs import Activation, LayoutSpec
from tests.support.paths import ROOT
from tests.support.plans import CUDA, small_plan


def scaling_plan(rows: int = 10, target: Target = CUDA) -> LaunchPlan:
    return plan_scale_rows(ArraySpec((rows, 8), "float32"), ArraySpec((rows, 1), "float32"), target)


@pytest.fixture(autouse=True)
def _empty_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans of no kernel's stay out of files that other tests write."""
    monkeypatch.setattr(plan, "_plans", Recent())
    monkeypatch.setattr(plan, "_texts", Recent())


def test_register_and_lookup() -> None:
    made = small_plan(block=16)
    assert plan.register(made) == made.key
    assert plan.register(small_plan(block=16)) == made.key
    assert plan.lookup(made.key) is made


def test_an_unknown_key_names_the_fix() -> None:
    with pytest.raises(InvalidInput) as caught:
        plan.lookup("absent!")
    assert str(caught.value) == (
        "plan key must be registered in this process, got 'absent!'; call moe_core.plan.load_plans(path) on a "
        "file written by export_plans in the process that made the program"
    )


def test_a_taken_key_raises() -> None:
    first, second = small_plan(block=8), small_plan(block=4)
    plan.register(first)
    # Two plans with one truncated hash: too rare to find, so the second is told its key.
    second.__dict__["key"] = first.key
    with pytest.raises(RuntimeError, match=f"plan key {first.key} is taken by 'double'"):
        plan.register(second)
    assert plan.lookup(first.key) is first


def test_export_and_load_in_another_process(tmp_path: pathlib.Path) -> None:
    made = scaling_plan(23)
    path = tmp_path / "plans.json"
    assert plan.export_plans(path, [plan.register(made)]) == (made.key,)
    script = (
        "from moe_core import plan, specs; "
        f"(key,) = plan.load_plans({str(path)!r}); assert key == {made.key!r}; "
        "from moe_core.plan.registry import lookup; print(lookup(key).explain())"
    )
    printed = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    assert printed.strip() == made.explain()


def test_export_takes_everything_by_default_and_refuses_unknown_keys(tmp_path: pathlib.Path) -> None:
    made = scaling_plan(29)
    plan.register(made)
    assert made.key in plan.export_plans(tmp_path / "all.json")
    assert made.key in plan.load_plans(tmp_path / "all.json")
    with pytest.raises(InvalidInput, match="got 'nothing'"):
        plan.export_plans(tmp_path / "none.json", ["nothing"])


def test_plans_of_other_kernels_are_refused(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "plans.json"
    plan.export_plans(path, [plan.register(scaling_plan())])
    version, _, plans = json.loads(path.read_text())
    path.write_text(json.dumps([version, "0123456789abcdef", plans]))
    with pytest.raises(InvalidInput, match=r"path must hold plans of this version .* got '0123456789ab'; export the"):
        plan.load_plans(path)
    path.write_text(json.dumps([version + 1, steps.sources_version(), plans]))
    with pytest.raises(InvalidInput, match="path must hold plans of this version"):
        plan.load_plans(path)
    for bare in ({}, plans[0], [plans[0][:1]]):
        path.write_text(json.dumps([version, steps.sources_version(), bare]))
        with pytest.raises(InvalidInput, match="path must hold plans with their keys"):
            plan.load_plans(path)
    # What another version wrote need not be known here, neither its types nor their fields.
    (_, written), *_ = plans
    for others in ([{"type": "Unheard"}], [written | {"unheard": 1}], [{**written, "target": {"kind": "cuda"}}]):
        path.write_text(json.dumps([version, "0123456789abcdef", others]))
        with pytest.raises(InvalidInput, match="path must hold plans of this version"):
            plan.load_plans(path)


def test_plans_with_other_fields_are_refused(tmp_path: pathlib.Path) -> None:
    """Same kernels, but the classes that carry the plan have changed: no field is dropped and none gets a default."""
    path = tmp_path / "plans.json"
    plan.export_plans(path, [plan.register(scaling_plan())])
    version, sources, ((key, made),) = json.loads(path.read_text())
    more, fewer = made | {"unheard": 1}, {name: value for name, value in made.items() if name != "notes"}
    for changed, got in ((more, "target, unheard"), (fewer, "inputs, lent, name, outputs")):
        path.write_text(json.dumps([version, sources, [[key, changed]]]))
        with pytest.raises(InvalidInput, match=rf"must give LaunchPlan the fields inputs, .*, got .*{got}.*; load it"):
            plan.load_plans(path)


@pytest.mark.parametrize("content", [b"", b"{", b"7", b"null", b"[1, 2]", b'"text"', b"\xff\xfe\x00"])
def test_files_that_hold_no_plans_are_refused(content: bytes, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "plans.json"
    path.write_bytes(content)
    with pytest.raises(InvalidInput, match=r"path must be a file written by export_plans, got .*plans\.json.*; export"):
        plan.load_plans(path)
    with pytest.raises(FileNotFoundError):
        plan.load_plans(tmp_path / "absent.json")


def test_codec_keeps_dataclasses_and_floats() -> None:
    value = (LayoutSpec(3, 2, 5), Activation("swiglu_oai", limit=None), (0.1, float("inf"), -1, True, None, "text"))
    assert codec.loads(codec.dumps(value)) == value
    assert codec.dumps(value) == codec.dumps(codec.loads(codec.dumps(value)))
    assert codec.loads(codec.dumps(float("nan"))) != codec.loads(codec.dumps(float("nan")))


def test_codec_refuses_unknown_types() -> None:
    with pytest.raises(InvalidInput, match="plan data must use known types, got 'Unheard'; load it with the version"):
        codec.loads('{"type":"Unheard"}')
    with pytest.raises(InvalidInput, match="plan data must use known types, got None; load it with the version"):
        codec.loads('{"value":1}')
    with pytest.raises(InvalidInput, match="plan data must give Scalar the fields dtype, value, got value; load it"):
        codec.loads('{"type":"Scalar","value":1}')
    with pytest.raises(AssertionError, match="cannot be part of a plan"):
        codec.dumps(object())

    @dataclasses.dataclass(frozen=True)
    class Local:
        value: int

    with pytest.raises(AssertionError, match="Local is not a plan_type"):
        codec.dumps(Local(1))
