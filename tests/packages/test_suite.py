"""The house of the tests: what several of them need lives in tests/support, and no test module imports another."""

from __future__ import annotations

import ast
import pathlib
import re
from collections.abc import Iterator

import pytest

from tests.support.paths import ROOT

FILES = {
    path.relative_to(ROOT).as_posix(): path
    for top in ("tests", "benchmarks", "examples", "tools", "moe_core", "moe_torch", "moe_jax")
    for path in sorted((ROOT / top).rglob("*.py"))
}
#: An import in the script of a subprocess, and a dotted path to a test module, such as an entry point's.
IN_TEXT = re.compile(r"\b(?:from|import) +(tests(?:\.\w+)*)|\b(tests(?:\.\w+)*\.test_\w+)")
#: How many files a folder may hold.
MOST_FILES = 18


def shared(module: str) -> bool:
    return f"{module}.".startswith("tests.support.")


def imports_of_tests(source: str) -> Iterator[tuple[int, str]]:
    """(line, what is imported) of every import of something under tests that does not live in tests/support."""
    if "tests" not in source:
        return
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: imports must be absolute"
            # `from tests import support` names its package last.
            found = [node.module if node.module != "tests" else f"tests.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            found = [alias.name for alias in node.names]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found = [code or dotted for code, dotted in IN_TEXT.findall(node.value)]
        else:
            continue
        own = {module for module in found if module and module.split(".")[0] == "tests" and not shared(module)}
        yield from ((node.lineno, module) for module in sorted(own))


def test_no_test_module_is_imported_by_another() -> None:
    assert "tests/support/harness.py" in FILES and "tests/packages/test_suite.py" in FILES
    own = pathlib.Path(__file__).relative_to(ROOT).as_posix()
    wrong = [
        f"{name}:{line} imports {module}; what two test modules need belongs in tests/support"
        for name, path in FILES.items()
        if name != own
        for line, module in imports_of_tests(path.read_text())
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    "line",
    [
        "from tests.ops.moe.test_forward import Layer",
        "from tests.ops.moe import test_forward",
        "import tests.conftest",
        "from tests import conftest",
        "def test():\n    from tests.ops.moe.test_forward import Layer",
        "script = 'import numpy; from tests.plan.test_plan import small_plan'",
        "entry = 'tests.parity.test_cli:FaultyEngine'",
    ],
)
def test_a_planted_import_is_found(line: str) -> None:
    assert len(list(imports_of_tests(line))) == 1
    assert not list(imports_of_tests("from tests.support.moe import Layer\nfrom tests import support"))


def test_files_and_folders_stay_small() -> None:
    tests = {name: path for name, path in FILES.items() if name.startswith("tests/")}
    long = {name: count for name, path in tests.items() if (count := path.read_text().count("\n")) > 400}
    assert not long, f"files have at most 400 lines: {long}"
    folders = {path.parent for path in tests.values()}
    full = {
        str(folder): count
        for folder in folders
        if (count := sum(path.name != "__init__.py" for path in folder.glob("*.py"))) > MOST_FILES
    }
    assert not full, f"folders have at most {MOST_FILES} files: {full}"


def test_every_file_outside_of_support_is_collected() -> None:
    """pytest passes over a file of tests whose name does not begin with `test_`, without a word."""
    known = ("__init__.py", "conftest.py")
    passed_over = [
        name
        for name, path in FILES.items()
        if name.startswith("tests/") and not name.startswith("tests/support/")
        if not path.name.startswith("test_") and path.name not in known
    ]
    assert not passed_over, passed_over
