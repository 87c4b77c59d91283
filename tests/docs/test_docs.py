"""The documentation is true: its Python runs, its links lead somewhere, its commands exist.

Python that names one framework runs where the other does not exist, as on a user's machine that has only one.
"""

from __future__ import annotations

import ast
import os
import pathlib
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator

import pytest

from tests.support.pages import commands, skip_without_its_transformers
from tests.support.paths import ROOT
from tests.support.runtime.script_server import ScriptServer


def found(pattern: str) -> list[pathlib.Path]:
    """Files below the root that match, in order; none at all is an error, since tests over none would pass."""
    paths = sorted(ROOT.glob(pattern))
    if not paths:
        raise FileNotFoundError(f"{pattern} matches no file below {ROOT}")
    return paths


PAGES = [*found("*.md"), *found("docs/**/*.md")]
EXAMPLES = found("examples/*.py")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
#: Package -> what Python that needs it names.
PACKAGES = {
    "torch": re.compile(r"\b(moe_)?torch\b"),
    "transformers": re.compile(r"\btransformers\b|\bpeft\b"),
    "jax": re.compile(r"\b(moe_)?jax\b"),
    "flax": re.compile(r"(\b|_)flax(\b|_)|\bmoe_jax(\.| import )(nnx|linen)\b"),
}
#: What takes long to import, and is imported once for all scripts that import it.
SLOW_MODULES = ("moe_torch", "transformers", "moe_jax", "moe_jax.nnx")


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


def page_name(page: pathlib.Path) -> str:
    """A page's path, for names of tests and messages: several folders have a README.md."""
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_python_is_fenced(page: pathlib.Path) -> None:
    """Blocks set apart by four spaces alone are not run, so none of them may be Python."""
    unfenced = FENCE.sub("", page.read_text())
    hidden = re.findall(r"^ {4}.*\bimport\b.*", unfenced, re.MULTILINE)
    assert not hidden, f"{page_name(page)} has Python outside of a fence, which no test runs: {hidden}"


def a_users_environment() -> dict[str, str]:
    """Variables with neither the interpreter nor the test suite's settings."""
    hidden = ("TRITON_INTERPRET", "XLA_FLAGS")
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    inherited = environment.get("PYTHONPATH")
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *([inherited] if inherited else [])])
    return environment


def missing_packages(source: str) -> tuple[str, ...]:
    """The packages that a script does not name."""
    return tuple(package for package, name in PACKAGES.items() if not name.search(source))


def common_imports(source: str) -> tuple[str, ...]:
    """Of SLOW_MODULES those that a script imports itself.

    None if it sets variables for its imports, nor if it has both frameworks: where there is a GPU, the FFI of one then
    asks the other for it when it is imported, and forks could not use it.
    """
    if "environ" in source or not {"torch", "jax"} & set(missing_packages(source)):
        return ()
    nodes = list(ast.walk(ast.parse(source)))
    found = [f"{alias.name}." for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    found += [f"{node.module}." for node in nodes if isinstance(node, ast.ImportFrom)]
    return tuple(module for module in SLOW_MODULES if any(name.startswith(f"{module}.") for name in found))


@pytest.fixture(scope="module")
def run_script(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[pathlib.Path], str]]:
    """Runs a script in a process of its own without the packages that it does not name; returns its output."""
    servers: dict[tuple[tuple[str, ...], ...], ScriptServer] = {}

    def run(script: pathlib.Path) -> str:
        source = script.read_text()
        skip_without_its_transformers(source)
        key = (missing_packages(source), common_imports(source))
        if key not in servers:
            servers[key] = ScriptServer(*key, a_users_environment())
        done = servers[key].run(script, tmp_path_factory.mktemp("script"))
        assert done.status == 0, f"{done.status}: {done.output}{done.errors}"
        return done.output

    yield run
    for server in servers.values():
        server.close()


@pytest.mark.parametrize(("place", "source"), BLOCKS, ids=[place for place, _ in BLOCKS])
def test_python_blocks_run(
    place: str, source: str, tmp_path: pathlib.Path, run_script: Callable[[pathlib.Path], str]
) -> None:
    script = tmp_path / "block.py"
    script.write_text(source)
    run_script(script)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("import jax\n__import__('tor' + 'ch')", "ModuleNotFoundError: import of torch"),
        ("import moe_jax\n__import__('fla' + 'x')", "ModuleNotFoundError: import of flax"),
        ("import moe_jax\njax", "NameError: name 'jax' is not defined"),
        ("jax = 1\nimport sys\nassert 'jax' not in sys.modules\nsys.exit(7)", "^7: "),
        ("import os\nos.kill(os.getpid(), 9)", "^-9: "),
    ],
)
def test_scripts_find_only_what_they_name_and_import(
    source: str, message: str, tmp_path: pathlib.Path, run_script: Callable[[pathlib.Path], str]
) -> None:
    script = tmp_path / "block.py"
    script.write_text(source)
    with pytest.raises(AssertionError, match=message):
        run_script(script)


def test_readme_shows_both_front_ends() -> None:
    shown = [source for place, source in BLOCKS if place.startswith("README.md")]
    for layer in ("from moe_torch import MoE", "from moe_jax.nnx import MoE"):
        assert any(layer in source for source in shown), layer


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_examples_run(example: pathlib.Path, run_script: Callable[[pathlib.Path], str]) -> None:
    assert run_script(example).strip(), "an example shows something"


def test_pages_of_every_folder_are_read() -> None:
    folders = {page_name(page.parent) for page in PAGES}
    assert {".", "docs", "docs/user", "docs/developer", "docs/notebook"} <= folders


def anchors(page: pathlib.Path) -> set[str]:
    """What a link to a page may name behind `#`: its headings, as GitHub writes them."""
    headings = HEADING.findall(FENCE.sub("", page.read_text()))
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings}


def broken_links(page: pathlib.Path) -> list[str]:
    """Links to files, or to headings of pages, that do not exist."""
    broken = []
    for link in LINK.findall(FENCE.sub("", page.read_text())):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    return broken


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_links_lead_somewhere(page: pathlib.Path) -> None:
    assert not broken_links(page), f"{page_name(page)} links to {broken_links(page)}"


def test_broken_links_are_found(tmp_path: pathlib.Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# A `B` c\n[a](#a-b-c) [b](page.md#a-b-c) [c](#d) [d](none.md) [e](page.md#e) [f](https://f.org/#f)\n"
    )
    assert broken_links(page) == ["#d", "none.md", "page.md#e"]


def test_make_targets_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    lines = [line for page in PAGES for line in commands(page.read_text())]
    named = {name for line in lines for name in re.findall(r"(?:^| )make ([a-z-]+)", line)}
    assert {"parity", "test", "lint"} <= named <= targets


def test_commands_exist() -> None:
    """Scripts, modules and examples that pages run."""
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    lines = [line for page in PAGES for line in commands(page.read_text())]
    named = {match[1] for line in lines if (match := re.match(r"(moe-[a-z]+|moebius-[a-z]+)\b", line))}
    assert (
        {"moe-parity", "moebius-doctor", "moebius-tune", "moebius-convert", "moebius-view", "moebius-choose"}
        == named
        == set(scripts)
    )
    modules = {name for line in lines for name in re.findall(r"python -m (benchmarks(?:\.\w+)+)", line)}
    files = {name for line in lines for name in re.findall(r"python (examples/\w+\.py)", line)}
    files |= {f"{name.replace('.', '/')}.py" for name in modules}
    missing = sorted(name for name in files if not (ROOT / name).exists())
    assert modules and files and not missing, missing


@pytest.mark.parametrize("page", [*found("docs/user/*.md"), *found("docs/developer/*.md")], ids=page_name)
def test_pages_begin_with_readers_and_an_example(page: pathlib.Path) -> None:
    """Whom it is for in the first paragraph, and something to run before the second heading and within 20 lines."""
    _, readers, *_ = page.read_text().split("\n\n")
    assert re.match(r"For |This page is for ", readers), f"{page_name(page)} must say whom it is for first"
    fence = re.search(r"^```(python|sh|bash)$", page.read_text(), re.MULTILINE)
    assert fence, f"{page_name(page)} must have an example"
    before = page.read_text()[: fence.start()]
    assert before.count("\n## ") <= 1 and before.count("\n") < 20, f"{page_name(page)} must begin with its example"


def test_files_that_pages_name_exist() -> None:
    pattern = re.compile(r"`((?:moe_core|moe_torch|moe_jax|tests|tools|benchmarks|docs)/[\w./]*)`")
    named = {(page_name(page), name) for page in PAGES for name in pattern.findall(page.read_text())}
    missing = [(page, name) for page, name in named if not (ROOT / name).exists()]
    assert named and not missing, missing


STAGE_ROW = re.compile(r"^  (\w+)(?: \(composed\))?  +agree", re.MULTILINE)


def test_the_page_on_parity_shows_what_the_tool_prints() -> None:
    """Its sample is real output, one engine's rows left out: its command prints the same stages, in the same
    order, for each engine."""
    page = (ROOT / "docs/user/parity.md").read_text()
    command, sample = next(fence[2] for fence in FENCE.finditer(page) if fence[1] == "text").split("\n", 1)
    assert command.startswith("$ moe-parity ")
    done = subprocess.run(
        [sys.executable, "-m", "moe_core.parity", *command.split()[2:]], cwd=ROOT, env=a_users_environment(),
        capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stdout}{done.stderr}"
    shown = STAGE_ROW.findall(sample)
    assert shown and "  ... the same rows" in sample
    assert STAGE_ROW.findall(done.stdout) == shown * 2
