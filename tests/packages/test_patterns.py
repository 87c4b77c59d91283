"""Patterns, paths and names in pyproject.toml, the Makefile and .ci lead somewhere: one that a move left behind would
otherwise be passed over without a word."""

from __future__ import annotations

import importlib
import pathlib
import re
import subprocess
import tomllib

import pytest

from tests.support.paths import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
TOOLS = PROJECT["tool"]
MAKEFILE = (ROOT / "Makefile").read_text()
TARGETS = tuple(re.findall(r"^([a-z-]+):(?! RECORD)", MAKEFILE, re.MULTILINE))
PIPELINES = {path.name: path.read_text() for path in sorted((ROOT / ".ci").iterdir())}
PATH = re.compile(
    r"(?<![\w/.-])(?:tests|tools|benchmarks|docs|examples|moe_core|moe_torch|moe_jax|\.ci)(?:/[\w.-]*\w)+"
)


def matches(pattern: str, below: pathlib.Path = ROOT) -> set[pathlib.Path]:
    return {path for path in below.glob(pattern) if "__pycache__" not in path.parts}


def kernels() -> set[pathlib.Path]:
    """Files of Triton's language."""
    files = (ROOT / "moe_core" / "ops").rglob("*.py")
    return {path for path in files if path.parent.name == "kernels" or path.stem.endswith("kernel")}


def patterns() -> list[tuple[pathlib.Path, str]]:
    """(folder, pattern) of everything in pyproject.toml that names files."""
    setuptools, pyright = TOOLS["setuptools"], TOOLS["pyright"]
    found = [(ROOT, name) for name in PROJECT["project"]["license-files"]]
    found += [(ROOT, pattern) for pattern in setuptools["packages"]["find"]["include"]]
    for package, data in setuptools["package-data"].items():
        folders = [ROOT / name for name in ("moe_core", "moe_torch", "moe_jax")] if package == "*" else [ROOT / package]
        found += [(folder, pattern) for folder in folders for pattern in data]
    found += [(ROOT, pattern) for pattern in TOOLS["ruff"]["lint"]["per-file-ignores"]]
    found += [(ROOT, pattern) for pattern in (*pyright["include"], *pyright["ignore"])]
    found += [(ROOT, pattern) for pattern in TOOLS["pytest"]["ini_options"]["testpaths"]]
    return found


@pytest.mark.parametrize(("folder", "pattern"), patterns(), ids=lambda value: str(value).removeprefix(f"{ROOT}/"))
def test_patterns_of_the_project_match_files(folder: pathlib.Path, pattern: str) -> None:
    assert matches(pattern, folder), f"pyproject.toml: {pattern} matches no file below {folder}"


def test_a_pattern_without_files_is_found() -> None:
    assert not matches("specs/tables/*.toml", ROOT / "moe_core")


def test_the_linters_know_every_kernel() -> None:
    """A kernel outside of the patterns is checked as Python, or rewritten into what Triton compiles worse."""
    files = kernels()
    spared = [pattern for pattern, rules in TOOLS["ruff"]["lint"]["per-file-ignores"].items() if "SIM" in rules]
    assert len(files) >= 36 and files <= set().union(*map(matches, spared))
    untyped = set().union(*map(matches, TOOLS["pyright"]["ignore"]))
    assert all(path in untyped or path.parent in untyped for path in files)


def test_every_data_file_is_packaged() -> None:
    """What is no Python in a package, whatever it is, goes into the wheel."""
    data = TOOLS["setuptools"]["package-data"]
    for package in ("moe_core", "moe_torch", "moe_jax"):
        below = ROOT / package
        files = {path for path in below.rglob("*") if path.is_file() and "__pycache__" not in path.parts}
        packaged = set().union(*(matches(pattern, below) for pattern in (*data["*"], *data.get(package, ()))))
        assert {path for path in files if path.suffix != ".py"} == packaged


@pytest.mark.parametrize("name", sorted(PROJECT["project"]["scripts"]))
def test_console_scripts_exist(name: str) -> None:
    module, _, function = PROJECT["project"]["scripts"][name].partition(":")
    assert callable(getattr(importlib.import_module(module), function))


@pytest.mark.parametrize("target", TARGETS)
def test_paths_of_a_make_target_exist(target: str) -> None:
    shown = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    missing = {path for path in PATH.findall(shown.stdout) if not (ROOT / path).exists()}
    assert not missing, f"make {target} names {missing}"
    for module in re.findall(r"-m (benchmarks\.\w+)", shown.stdout):
        assert (ROOT / f"{module.replace('.', '/')}.py").exists(), module


def test_the_checkers_of_memory_see_every_op() -> None:
    """Ops whose kernels `make memcheck` runs: all that have any."""
    shown = subprocess.run(["make", "-n", "memcheck"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    seen = {path.split("/")[2] for path in PATH.findall(shown.stdout) if path.startswith("tests/ops/")}
    ops = {path.relative_to(ROOT / "moe_core" / "ops").parts[0] for path in kernels()}
    # The helpers in common are part of all others.
    assert seen == ops - {"common"}


@pytest.mark.parametrize("name", PIPELINES)
def test_steps_of_a_pipeline_exist(name: str) -> None:
    text = PIPELINES[name]
    assert set(re.findall(r"^ *make ([a-z-]+)", text, re.MULTILINE)) <= set(TARGETS)
    missing = {path for path in PATH.findall(text) if not (ROOT / path).exists()}
    assert not missing, f".ci/{name} names {missing}"
    for framework, other in re.findall(r"^ *only (\w+) (\w+)$", text, re.MULTILINE):
        assert (ROOT / "tests" / framework).is_dir() and {framework, other} == {"torch", "jax"}
    assert "make" in text and (ROOT / ".ci" / name).stat().st_mode & 0o111, "a pipeline is a program"
