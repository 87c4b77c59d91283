"""The documentation is true: its Python runs, its links lead somewhere, its commands exist."""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)#\s]+)\)")


def python_blocks() -> list[tuple[str, str]]:
    """(page:line, source) of every fenced Python block."""
    blocks = []
    for page in PAGES:
        text = page.read_text()
        for fence in FENCE.finditer(text):
            if fence[1] == "python":
                line = text.count("\n", 0, fence.start()) + 2
                # Blank lines in front make a traceback name the page's line.
                blocks.append((f"{page.relative_to(ROOT)}:{line}", "\n" * (line - 1) + fence[2]))
    return blocks


BLOCKS = python_blocks()


def run_as_a_user_would(*arguments: str) -> str:
    """Run Python in a fresh process with neither the interpreter nor the test suite's settings; returns its output."""
    hidden = ("TRITON_INTERPRET", "XLA_FLAGS")
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    inherited = environment.get("PYTHONPATH")
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *([inherited] if inherited else [])])
    command = [sys.executable, *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, f"{done.stdout}{done.stderr}"
    return done.stdout


@pytest.mark.parametrize(("place", "source"), BLOCKS, ids=[place for place, _ in BLOCKS])
def test_python_blocks_run(place: str, source: str, tmp_path: pathlib.Path) -> None:
    script = tmp_path / "block.py"
    script.write_text(source)
    run_as_a_user_would(str(script))


def test_readme_shows_both_front_ends() -> None:
    shown = [source for place, source in BLOCKS if place.startswith("README.md")]
    assert any("import torch" in source for source in shown) and any("import jax" in source for source in shown)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_examples_run(example: pathlib.Path) -> None:
    assert run_as_a_user_would(str(example)).strip(), "an example shows something"


def test_examples_exist() -> None:
    assert {"torch_forward.py", "jax_forward.py"} <= {path.name for path in EXAMPLES}


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_links_lead_somewhere(page: pathlib.Path) -> None:
    targets = [link for link in LINK.findall(page.read_text()) if "://" not in link]
    broken = [link for link in targets if not (page.parent / link).exists()]
    assert not broken, f"{page.name} links to {broken}"


def test_make_targets_exist() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {name for page in PAGES for name in re.findall(r"^    make ([a-z]+)", page.read_text(), re.MULTILINE)}
    assert {"parity", "test", "lint"} <= named <= targets


def test_files_that_pages_name_exist() -> None:
    pattern = re.compile(r"`((?:moe_core|moe_torch|moe_jax|tests|tools|benchmarks|docs)/[\w./]*)`")
    named = {(page.name, name) for page in PAGES for name in pattern.findall(page.read_text())}
    missing = [(page, name) for page, name in named if not (ROOT / name).exists()]
    assert named and not missing, missing


STAGE_ROW = re.compile(r"^  (\w+)(?: \(composed\))?  +agree", re.MULTILINE)


def test_readme_shows_what_the_parity_tool_prints() -> None:
    """The README's sample is real output: its command prints the same stages, in the same order, for each engine."""
    readme = (ROOT / "README.md").read_text()
    command, sample = next(fence[2] for fence in FENCE.finditer(readme) if fence[1] == "text").split("\n", 1)
    assert command.startswith("$ moe-parity ")
    printed = run_as_a_user_would("-m", "moe_core.parity", *command.split()[2:])
    assert STAGE_ROW.findall(sample)
    assert STAGE_ROW.findall(sample) == STAGE_ROW.findall(printed)
