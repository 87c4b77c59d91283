"""`moe-parity --against`: a stack that agrees, one that fails in several ways, and faults that the judge must see."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from moe_core.errors import InvalidInput
from moe_core.ops.moe.reference.backward import moe_backward_stages
from moe_core.parity import against, cli
from moe_core.parity.against import LOADS, Outcome, draw_problem, run_against
from moe_core.parity.reference_engine import reference_stages
from moe_core.parity.report import case_lines
from moe_core.specs import MoEOperands, OutputGradients, TopK

STACK = """
import torch.distributed as dist
from moe_core.parallel import Placement
from moe_core.specs import Activation, ExpertWeights, MoESpec, TopK
from moe_torch.parallel import ExpertParallel, moe

def build(experts, num_experts):
    placement = Placement.linear(num_experts, dist.get_world_size())
    mine = list(placement.owners[dist.get_rank()])
    shard = ExpertWeights(experts["gate_up"][mine], experts["down"][mine])
    spec = MoESpec(Activation("silu", gate_layout="halves"), weight_layout="out_in")
    parallel = ExpertParallel(dist.group.WORLD)
    options = {"parallel": parallel, "placement": placement}
    return lambda x, ids, weights: moe(x, shard, TopK(ids, weights), spec, **options).output
"""
#: It forgets a slot of the only token, and rank 1 raises where ids are -1.
FAULTY = """
LEFT_OUT = {"nan": "it has no finite check"}
whole = build

def build(experts, num_experts):
    forward = whole(experts, num_experts)

    def broken(x, ids, weights):
        if dist.get_rank() == 1 and (ids < 0).any():
            raise ValueError("ids below 0")
        return forward(x, ids, weights * (weights != weights[:1, :1]) if len(x) == 1 else weights)

    return broken
"""


@pytest.fixture()
def stack(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    pytest.importorskip("torch")
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    path = tmp_path / "stack.py"
    path.write_text(STACK)
    return path


def command(path: Any, *cases: str, **options: str) -> list[str]:
    words = ["--ranks", "2", "--against", str(path), "--dtype", "float32"]
    words += [word for case in cases for word in ("--case", case)]
    return [*words, *(word for name, value in options.items() for word in (f"--{name}", value))]


def test_a_stack_that_agrees(stack: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*command(stack, "uneven", "no_tokens", "nan"), "--verbose"]) == 0
    said = capsys.readouterr().out
    assert "3 of 3 cases agree with one device" in said and "on 2 ranks, gloo (cpu)" in said
    assert said.count("d_experts.gate_up") == 2 and "skipped" not in said


def test_a_stack_that_fails(stack: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Differences count before what could not run; the reports name both."""
    stack.write_text(STACK + FAULTY)
    path = tmp_path / "report.json"
    assert cli.main(command(stack, "even", "one_token", "nan", "absent", json=str(path))) == 1
    said = capsys.readouterr().out
    assert "1 of 4 cases agree" in said and "1 DIFFER: one_token float32" in said and "1 left out: nan float32" in said
    assert "1 did not run: absent float32 (rank 1 in absent: ValueError: ids below 0)" in said
    report = json.loads(path.read_text())
    assert report["exit_status"] == 1 and f"--against {stack}" in report["cases"][0]["repeat"]


def sound(module: str, ranks: int, problems: Any, progress: Any) -> Iterator[Outcome]:
    """Ranks that give one device's results."""
    for problem in problems:
        case, arrays = against._case(problem), problem.arrays
        routing = TopK(arrays["ids"], arrays["weights"])
        stages = reference_stages(case, routing)
        spec = dataclasses.replace(case.spec, router=None)
        operands, d_output = MoEOperands(case.x, case.experts, routing), OutputGradients(arrays["d_output"])
        found = moe_backward_stages(d_output, operands, spec, stages)
        parts, whole = [], dict(arrays) | {"output": stages["output"], **found}
        for rank in range(ranks):
            owned = (np.arange(4 * ranks) // 4 == rank)[:, None, None]
            part = {name: against.Problem(problem.load, problem.counts, whole).of_rank(rank, name).copy()
                    for name in ("output", "d_x", "d_routing.weights")}  # fmt: skip
            names = ("d_experts.gate_up", "d_experts.down")
            parts.append(part | {name: np.where(owned, found[name], 0).astype(found[name].dtype) for name in names})
        yield Outcome("NumPy", parts)


@pytest.fixture()
def module(tmp_path: pathlib.Path) -> str:
    (tmp_path / "any.py").write_text("def build(experts, num_experts): ...")
    return str(tmp_path / "any.py")


def report_of(module: str, load: str, run: Any, ranks: int = 3, dtype: str = "float32") -> Any:
    (found,) = run_against(module, ranks, [draw_problem(load, ranks, dtype, 0, None)], print, run)
    return found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_routing_is_judged_with_gradients(module: str, dtype: str) -> None:
    for load in LOADS:
        found = report_of(module, load, sound, dtype=dtype)
        stages = [row.stage for row in found.reports[0].rows]
        assert found.agrees and len(stages) == (1 if load == "nan" else 5), str(found)
    even, other = (draw_problem("even", 3, dtype, seed, None) for seed in (0, 1))
    assert (even.arrays["x"] != other.arrays["x"]).any()


def test_routings_are_what_they_say() -> None:
    drawn = {load: draw_problem(load, 3, "float32", 0, 16) for load in LOADS}
    ids = {load: problem.arrays["ids"] for load, problem in drawn.items()}
    assert len(set(drawn["uneven"].counts)) == 3 and drawn["no_tokens"].counts[1] == 0
    assert drawn["one_token"].counts == (0, 0, 1) and (ids["hot_expert"] == 1).any(axis=1).all()
    assert set(ids["hot_rank"].ravel()) <= {8, 9, 10, 11} and ids["empty_rank"].max() < 8
    assert ids["all_experts"].shape[1] == 12 and ids["one_expert"].shape[1] == 1
    assert (ids["absent"] < 0).all(axis=1).any() and (ids["absent"] >= 0).any()
    assert np.isnan(drawn["nan"].arrays["x"]).any(axis=1).sum() == 1


def planted(name: str, change: Any) -> Any:
    def run(*arguments: Any) -> Iterator[Outcome]:
        for outcome in sound(*arguments):
            outcome.ranks[1][name] = change(outcome.ranks[1][name].copy())  # type: ignore[index]
            yield outcome

    return run


def altered(array: np.ndarray) -> np.ndarray:
    array.reshape(-1)[-1] += 1
    return array


@pytest.mark.parametrize("name", ["output", "d_x", "d_routing.weights", "d_experts.gate_up", "d_experts.down"])
def test_a_planted_fault_differs(module: str, name: str) -> None:
    for change in (altered, lambda array: array * 2, lambda array: array * np.nan):
        found = report_of(module, "even", planted(name, change))
        assert found.differs and found.reports[0].first_divergent == name
        assert cli._conclude_against([found])[0] == 1
    # A token may not get NaN from another.
    if name == "output":
        assert report_of(module, "nan", planted(name, lambda array: array * np.nan)).differs


def test_results_of_another_form_differ(module: str) -> None:
    for change in (lambda array: array[1:], lambda array: array.astype(np.float64)):
        found = report_of(module, "even", planted("output", change))
        assert found.differs and "rank 1 must return float32 [24, 64], got" in str(found)


def test_gradients_that_a_stack_lacks_are_named(module: str) -> None:
    def run(*arguments: Any) -> Iterator[Outcome]:
        for outcome in sound(*arguments):
            yield Outcome("NumPy", [{"output": rank["output"]} for rank in outcome.ranks])

    found = report_of(module, "even", run)
    assert found.agrees and str(found).count("the stack gave no such gradient") == 4
    assert "1 stages agree; skipped: d_x, d_routing.weights, d_exp" in "".join(case_lines(found, ""))
    # Of some ranks only: the others count as zeros, which is wrong here.
    assert report_of(module, "even", planted("d_x", lambda array: None)).differs


def test_what_could_not_run_is_no_difference(module: str) -> None:
    failed = report_of(module, "even", lambda *arguments: iter([Outcome("", (), "rank 0 in even: OSError: x")]))
    sound_one = report_of(module, "even", sound)
    for reports in ([failed], [failed, sound_one]):
        status, text = cli._conclude_against(reports)
        assert status == 2 and "1 did not run: even float32 (rank 0 in even: OSError: x)" in text
    assert cli._conclude_against([sound_one])[0] == 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"a module with build\(experts, num_experts\) -> forward\(x, ids, weights\), got"),
        ("build = len\nLEFT_OUT = {'evn': 'x'}", "LEFT_OUT of .* must map cases of even, .* to reasons, got"),
        ("build = len\nLEFT_OUT = {'even': ''}", "LEFT_OUT of"),
    ],
)
def test_modules_without_their_functions_are_refused(tmp_path: pathlib.Path, text: str, message: str) -> None:
    (tmp_path / "other.py").write_text(text)
    with pytest.raises(InvalidInput, match=message):
        report_of(str(tmp_path / "other.py"), "even", sound)
    with pytest.raises(InvalidInput, match=r"must name a module or a \.py file, got 'no_such.module'"):
        report_of("no_such.module", "even", sound)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--against", "x"], "--against must come with --ranks"),
        (["--against", "x", "--ranks", "2", "--engines", "torch"], "--engines must be left out with --against"),
        (["--against", "x", "--ranks", "2", "--checkpoint", "y"], "--checkpoint must be left out"),
        (["--against", "x", "--ranks", "2", "--case", "mixtral"], "case must be one of even"),
        (["--against", "no_such_module", "--ranks", "2"], "got 'no_such_module'"),
        (["--against", "x", "--ranks", "0"], "--ranks must be"),
    ],
)
def test_wrong_options_end_with_2(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(options) == 2 and message in capsys.readouterr().err
