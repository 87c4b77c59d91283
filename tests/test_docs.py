"""The documentation is true: its Python runs, its links lead somewhere, its commands exist.

Python that names one framework runs where the other does not exist, as on a user's machine that has only one.
"""

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
#: Package -> what Python that needs it names.
PACKAGES = {
    "torch": re.compile(r"\b(moe_)?torch\b"),
    "transformers": re.compile(r"\btransformers\b"),
    "jax": re.compile(r"\b(moe_)?jax\b"),
    "flax": re.compile(r"\bflax\b|\bmoe_jax(\.| import )(nnx|linen)\b"),
}


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


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_python_is_fenced(page: pathlib.Path) -> None:
    """Blocks set apart by four spaces alone are not run, so none of them may be Python."""
    unfenced = FENCE.sub("", page.read_text())
    hidden = re.findall(r"^ {4}.*\bimport\b.*", unfenced, re.MULTILINE)
    assert not hidden, f"{page.name} has Python outside of a fence, which no test runs: {hidden}"


def without_others(source: str) -> str:
    """The source behind a first line after which no package can be imported that it does not name."""
    others = [package for package, name in PACKAGES.items() if not name.search(source)]
    # To the import system None means that the package does not exist.
    return f"import sys; sys.modules.update(dict.fromkeys({others!r}))\n{source.removeprefix(chr(10))}"


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
    script.write_text(without_others(source))
    run_as_a_user_would(str(script))


@pytest.mark.parametrize(("source", "missing"), [("import jax", "torch"), ("import moe_jax", "flax")])
def test_packages_that_a_block_does_not_name_are_missing(source: str, missing: str, tmp_path: pathlib.Path) -> None:
    script = tmp_path / "block.py"
    script.write_text(without_others(f"\n{source}\n") + f"__import__({missing!r})\n")
    with pytest.raises(AssertionError, match=f"ModuleNotFoundError: import of {missing}"):
        run_as_a_user_would(str(script))


def test_readme_shows_both_front_ends() -> None:
    shown = [source for place, source in BLOCKS if place.startswith("README.md")]
    for layer in ("from moe_torch import MoE", "from moe_jax.nnx import MoE"):
        assert any(layer in source for source in shown), layer


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_examples_run(example: pathlib.Path) -> None:
    assert run_as_a_user_would(str(example)).strip(), "an example shows something"


def test_examples_exist() -> None:
    names = {path.name for path in EXAMPLES}
    assert {"torch_forward.py", "jax_forward.py", "torch_layer.py", "flax_layer.py"} <= names


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
    """The README's sample is real output, one engine's rows left out: its command prints the same stages, in the same
    order, for each engine."""
    readme = (ROOT / "README.md").read_text()
    command, sample = next(fence[2] for fence in FENCE.finditer(readme) if fence[1] == "text").split("\n", 1)
    assert command.startswith("$ moe-parity ")
    printed = run_as_a_user_would("-m", "moe_core.parity", *command.split()[2:])
    shown = STAGE_ROW.findall(sample)
    assert shown and "  ... the same rows" in sample
    assert STAGE_ROW.findall(printed) == shown * 2
