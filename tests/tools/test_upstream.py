"""The harness of `make upstream` itself: changed imports, placeholders, what counts as a failure."""

from __future__ import annotations

import importlib
import itertools
import pathlib
import sys
import zipfile
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from moe_core.errors import InvalidInput, Unsupported
from moe_core.parity.tolerance import measure
from moe_torch.compat.triton_kernels import matmul_ogs
from tools.upstream import engines, imports, published
from tools.upstream.problems import SAME_ROUNDINGS, complaint, draw, draw_mxfp4
from tools.upstream.running import Answer, Case, Result, run_cases, table
from tools.upstream.stand_ins import STAND_INS

_FILES = {
    "vllm/model_executor/layers/fused_moe/moe_output.py": (
        "from triton_kernels.matmul_ogs import PrecisionConfig\n"
        "from vllm.nowhere import Thing\n"
        "from vllm.logger import init_logger\n"
        "from vllm import envs\n"
        "KIND, HINT, NAME, SET = PrecisionConfig, Thing | None, 'published', envs.ANYTHING\n"
        "def use():\n"
        "    return Thing()\n"
    ),
    "vllm/model_executor/layers/fused_moe/experts/other.cu": "no Python",
    "vllm/unrelated.py": "raise AssertionError",
}


@pytest.fixture
def files(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    """A folder unpacked from a wheel of ours, through the functions that unpack vLLM's."""
    monkeypatch.setattr(published, "CACHE", tmp_path)
    with zipfile.ZipFile(tmp_path / "vllm.whl", "w") as archive:
        for name, text in _FILES.items():
            archive.writestr(name, text)
    return published.vllm_files(tmp_path / "vllm.whl")


def test_imports_are_changed_and_forgotten(files: pathlib.Path) -> None:
    name = f"{imports.MOE}.moe_output"
    with imports.world(files, STAND_INS, {}):
        module = importlib.import_module(name)
        assert module.KIND is matmul_ogs.PrecisionConfig and module.SET is None
        with pytest.raises(NotImplementedError, match=r"vllm\.nowhere\.Thing"):
            module.use()
    with imports.world(files, STAND_INS, {name: {"NAME": "ours"}}):
        assert importlib.import_module(name).NAME == "ours"
    with imports.world(files, STAND_INS, {name: {"NAME": "ours", imports.WHOLE: True}}):
        assert not hasattr(importlib.import_module(name), "KIND")
    assert not {"vllm", "triton_kernels", name} & set(sys.modules)


@pytest.mark.parametrize("problem", [draw(), draw().on_rank(), draw_mxfp4()], ids=["bf16", "map", "mxfp4"])
def test_a_wrong_row_is_found(problem) -> None:
    expected = problem.expected("silu")
    rounded = torch.tensor(expected).to(torch.bfloat16)
    assert complaint(rounded, expected) is None
    wrong = rounded.clone()
    wrong[3] += 1
    assert "error" in (complaint(wrong, expected) or "")
    assert "shape" in (complaint(rounded[None], expected) or "")


@pytest.mark.parametrize("problem", [draw(), draw().on_rank(), draw_mxfp4()], ids=["bf16", "map", "mxfp4"])
def test_a_missing_rounding_is_found(problem) -> None:
    problem = problem._replace(weights=problem.weights * 1.001)
    variants = [{}, {"before": True}, {"weights": True}, {"before": True, "weights": True}]
    outputs = [problem.rounded("swigluoai", **options) for options in variants]
    for (at, one), (other, expected) in itertools.permutations(enumerate(outputs), 2):
        assert complaint(torch.tensor(one), expected, SAME_ROUNDINGS["cuda"]) is not None, (at, other)
    plain = problem.expected("swigluoai")
    assert all(SAME_ROUNDINGS["cpu"] < measure(one, plain).relative_frobenius < 0.01 for one in outputs)


def test_every_kind_of_result_is_told_apart(files: pathlib.Path) -> None:
    def raising(error: Exception):
        def run(device: str) -> Answer:
            raise error

        return run

    def answering(factor: float):
        expected = draw().expected("silu")
        return lambda device: Answer(factor * torch.tensor(expected, device=device), expected)

    runs = {
        "agrees": answering(1.0),
        "refused": raising(Unsupported("no such format; convert it")),
        "REFUSED": raising(InvalidInput("x must be smaller")),
        "WRONG": answering(1.1),
        "raises": raising(AttributeError("moe_config")),
    }
    cases = [Case(name, dict, run) for name, run in runs.items()]
    results = run_cases(cases, "reference", files, {"refused": ("no such format", "by choice")})
    assert [result.status for result in results] == list(runs)
    assert [result.failed for result in results] == [False, False, True, True, True]
    assert table(results).endswith("5 cases, 2 as documented, 3 not") and "by choice" in table(results)


@pytest.mark.parametrize(("generation", "tag"), [("3.5", "v3.5.1"), ("3.8", "v3.8.0")])
def test_missing_tests_of_triton_kernels_name_the_tag(generation: str, tag: str, tmp_path: pathlib.Path) -> None:
    with pytest.raises(published.Missing, match=tag):
        published.triton_kernels_files(tmp_path, generation)


def test_wheels_are_those_that_pip_chooses(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pinned release first, the newest once, and the reason where there is none."""
    said = {
        "sglang": "Collecting\nSaved ./sglang-9.1.post2-cp312-x.whl\n",
        "vllm": "File was ./vllm-0.33.0-cp38-x.whl\n",
    }

    def pip(command: list[str], **_: object) -> SimpleNamespace:
        return SimpleNamespace(returncode=command[-1] not in said, stdout=said.get(command[-1], ""), stderr="offline")

    monkeypatch.setattr(published, "CACHE", tmp_path)
    monkeypatch.setattr(published.subprocess, "run", pip)
    assert published.releases("sglang") == [published.PINNED["sglang"], "9.1.post2"]
    assert published.releases("vllm") == ["0.33.0"]
    with pytest.raises(published.Missing, match="transformers could not be downloaded"):
        published.releases("transformers")
    with pytest.raises(published.Missing, match=r"fused_moe_triton\.py of .*TensorRT-LLM at commit"):
        published.tensorrt_llm_files(tmp_path)


def _unused(device: str) -> Answer:
    raise AssertionError(device)


def _row(name: str, entry: str, release: str, statuses: tuple[str, ...], bound: float) -> list[engines.Row]:
    ran = [
        (Case(f"{entry}, {at}", dict, _unused), Result("reference", "", one, bound=bound))
        for at, one in enumerate(statuses)
    ]
    return engines.rows(name, release, ran)


def test_releases_with_one_outcome_share_a_line() -> None:
    table = [row for release in ("1", "2") for row in _row("sglang", "forward", release, ("agrees", "refused"), 0.0)]
    table += _row("sglang", "forward", "3", ("WRONG", "agrees"), 0.02) + _row("vllm", "b NoDPEP", "1", ("agrees",), 0.0)
    lines = engines.render(table).splitlines()[2:]
    assert lines == [
        "| sglang | 1, 2 | `forward` | 3.5 | 2 of 2 | bitwise |",
        "| sglang | 3 | `forward` | 3.5 | 1 of 2 | within 0.02 |",
    ]


def test_rows_of_absent_files_stay(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page, row = tmp_path / "page.md", "| tensorrt-llm | 1 |"
    page.write_text(f"a\n{engines.BEGIN}\n| vllm | 1 |\n{row}\n{engines.END}\nb")
    monkeypatch.setattr(engines, "PAGE", page)
    for text, rows in (("| vllm | 2 |", f"| vllm | 2 |\n{row}"), ("| tensorrt-llm | 2 |", "| tensorrt-llm | 2 |")):
        engines.write(text)
        assert page.read_text() == f"a\n{engines.BEGIN}\n{rows}\n{engines.END}\nb"


@pytest.mark.parametrize("name", engines.ENGINES)
def test_the_page_shows_every_entry_point_and_no_failure(name: str) -> None:
    page = engines.PAGE.read_text("utf-8").partition(engines.BEGIN)[2].partition(engines.END)[0]
    shown = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith(f"| {name} ")]
    cases = [case for module in engines.case_modules(name) for case in module.cases()]
    expected = engines.rows(name, "", ((case, Result("", "", "agrees")) for case in cases))
    assert {(row[2], row[3], row[4]) for row in shown} == {row[2:5] for row in expected}
    assert any(published.PINNED.get(name, published.TENSORRT_LLM) in row[1] for row in shown)
