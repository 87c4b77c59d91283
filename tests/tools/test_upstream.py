"""The harness of `make upstream` itself: changed imports, placeholders, what counts as a failure."""

from __future__ import annotations

import importlib
import pathlib
import sys
import zipfile

import pytest

torch = pytest.importorskip("torch")

from moe_core.errors import InvalidInput, Unsupported
from moe_torch.compat.triton_kernels import matmul_ogs
from tools.upstream import imports, published
from tools.upstream.problems import complaint, draw, draw_mxfp4
from tools.upstream.running import Answer, Case, run_cases, table
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
