"""The tool end to end on a small package of its own: what is killed, what survives, and that a run goes on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.paths import ROOT
from tools.mutate.__main__ import share_killed, table
from tools.mutate.contexts import Contexts, imports, names_entry
from tools.mutate.operators import mutations
from tools.mutate.plugin import Plugin
from tools.mutate.run import Result, Run, draw, drawn_at
from tools.mutate.sources import Mutation, Source

PACKAGE = {
    "pyproject.toml": '[tool.pytest.ini_options]\npythonpath = ["."]\ntimeout = 60\n',
    "moe_core/__init__.py": "",
    "moe_core/plan/__init__.py": "",
    "moe_core/plan/sizes.py": (
        "def half(x):\n    if x < 0:\n        raise ValueError('negative')\n    return x // 2\n\n\n"
        "def loop(x):\n    while x > 1:\n        x -= 1\n    return x\n\n\n"
        "def unused(x):\n    return x - 1\n"
    ),
    "moe_core/specs/__init__.py": "",
    "moe_core/specs/other.py": "def unused(x):\n    return x + 2\n",
    "tests/__init__.py": "",
    "tests/plan/__init__.py": "",
    "tests/plan/test_sizes.py": (
        "import pytest\nfrom moe_core.plan.sizes import half, loop\n\n\n"
        "def test_half():\n    assert half(7) == 3\n\n\n"
        "def test_negative():\n    with pytest.raises(ValueError):\n        half(-2)\n\n\n"
        "def test_loop():\n    assert loop(3) == 1\n\n\n"
        "def test_that_fails():\n    assert half(7) == 4\n"
    ),
}
#: The tool on another root, with fewer things imported before the forks.
SCRIPT = """
import pathlib, sys
from tools.mutate import sources
sources.ROOT = pathlib.Path(sys.argv.pop(1))
from tools.mutate import forks
forks.SHARED = ("numpy", "hypothesis", "pytest")
from tools.mutate import run
run.PATIENCE = 2
from tools.mutate.__main__ import main
sys.exit(main())
"""


def mutate(root: Path, *options: str) -> tuple[list[dict[str, Any]], str]:
    command = [sys.executable, "-c", SCRIPT, str(root), "--count", "100", "--jobs", "2", "--seed", "5", *options]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert done.returncode == 1, done.stderr[-3000:]
    return json.loads((root / "build/mutate/results-5.json").read_text()), done.stdout


def test_a_small_package(tmp_path: Path) -> None:
    for name, text in PACKAGE.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    results, printed = mutate(tmp_path)
    of = {(r["before"], r["after"]): r for r in results}
    assert of["if x < 0:", "if (not (x < 0)):"]["status"] == "killed"
    assert of["raise ValueError('negative')", "pass"]["by"].endswith("test_negative")
    assert of["x -= 1", "pass"]["by"] == "out of time or memory"
    assert of["if x < 0:", "if (x <= 0):"]["status"] == "survived"
    assert of["return x - 1", "return (x + 1)"]["status"] == "survived", "the tests of its file ran"
    assert of["return x + 2", "return (x - 2)"]["status"] == "uncovered"
    assert not any(r["by"].endswith("test_that_fails") for r in results), "it fails without a mutation"
    assert "1/1 tests/plan/test_sizes.py: 3 tests, 1 failed" in printed
    assert 'after = "if (x <= 0):"' in printed and "| planners |" in printed
    for name, text in PACKAGE.items():
        assert (tmp_path / name).read_text() == text
    again, printed = mutate(tmp_path)
    assert sorted(r["key"] for r in again) == sorted(r["key"] for r in results)
    assert "killed drop_raise" not in printed and "survived compare" in printed, "what was killed is kept"


def test_related_tests_come_cheapest_and_nearest_first() -> None:
    contexts = Contexts()
    path = "moe_core/ops/reduction/reduce.py"
    for number, (file, seconds) in enumerate(
        [("a/test_a", 1.0), ("ops/reduction/test_reduce", 2.0), ("b/test_b", 0.5)]
    ):
        contexts.add(
            {
                "file": f"tests/{file}.py",
                "setup": 0.1,
                "functions": [f"{path}::plan", f"{path}::other"],
                "tests": {f"tests/{file}.py::test": [seconds, [number == 2]]},
            }
        )

    def files(function: str) -> list[str]:
        mutation = Mutation(path, function, "swap", 1, 0, 1, "")
        return [test.split("/")[1] for test in contexts.related(mutation)]

    assert files("plan") == ["ops", "a"]
    assert files("other") == ["ops", "b"], "the file's own tests, and those that call it"
    assert files("<module>") == ["ops", "b", "a"]
    assert files("nobody_calls") == ["ops"], "those of the folder"


def test_a_constant_has_the_tests_of_files_that_import_its_module() -> None:
    assert imports("tests/ops/test_declared_kernels.py", "moe_core/ops/router/forward.py")
    assert imports("tests/mutate/test_run.py", "tools/mutate/contexts.py")
    assert not imports("tests/mutate/test_run.py", "tools/mutate/equivalent.py")


def test_an_entry_of_a_table_has_the_tests_that_name_it() -> None:
    assert names_entry("tests/test_families.py::test_layers[mistral_large4-float32]", "mistral_large4_text")
    assert names_entry("tests/test_families.py::test_layers[dbrx_sums]", "dbrx")
    assert not names_entry("tests/test_families.py::test_layers[qwen3_moe]", "qwen2_moe")
    assert not names_entry("tests/test_families.py::test_layers[qwen3_moe]", "")
    source = Source("a.py", 'TABLE = {"dbrx": replace(_X, count={"one": 2}), **{"more": 1}}\n')
    assert {mutation.entry for mutation in mutations(source) if "count" in mutation.texts(source.text)[1]} == {
        "dbrx",
        "more",
    }


def result(area: str, status: str) -> Result:
    return Result(f"{area}{status}", area, "f", "swap", 1, "", "", status, "", 1, 1, 1.0)


def test_the_share_is_of_what_is_not_equivalent() -> None:
    results = [result("kernels", status) for status in ("killed", "equivalent", "survived", "uncovered", "unsure")]
    assert share_killed(results) == pytest.approx(1 / 4)
    assert table(results).splitlines()[2] == "| kernels | 5 | 1 | 1 | 1 | 1 | 1 | 25.0% |"
    assert share_killed([]) == 0


def test_a_run_again_keeps_only_which_test_killed_what(tmp_path: Path) -> None:
    drawn = draw(1, 0, ("moe_core/plan/steps.py",), gpu=False)
    mutation = drawn[0][1]
    contexts, store = Contexts({"a.py::a": 1.0, "b.py::b": 2.0}, {"a.py": 0.1, "b.py": 0.1}), tmp_path / "results.json"
    run = Run(drawn, contexts, store, 9.0)
    run.keep("planners", mutation, "killed", "b.py::b", 2, 1.0)
    run.save()
    assert run.first(mutation, ["a.py::a", "b.py::b"]) == ["a.py::a", "b.py::b"]
    assert Run(drawn, contexts, store, 9.0).results and not Run(drawn, contexts, store, 9.0, again=True).results
    again = Run(drawn, contexts, store, 9.0, again=True)
    assert again.first(mutation, ["a.py::a", "b.py::b"]) == ["b.py::b"]
    assert again.first(mutation, ["a.py::a"]) == ["a.py::a"]


def test_a_draw_depends_on_the_lines_alone() -> None:
    keys = [("f", str(before), str(after)) for before in range(9) for after in range(9)]
    order = sorted(keys, key=lambda key: drawn_at(3, key))
    assert sorted(keys[1:], key=lambda key: drawn_at(3, key)) == [key for key in order if key != keys[0]]
    assert sorted(keys, key=lambda key: drawn_at(4, key)) != order != keys


def test_code_without_a_name_belongs_to_its_function(tmp_path: Path) -> None:
    plugin = Plugin(tmp_path / "report", "/tree", None, record=True)
    space: dict[str, Any] = {}
    source = "def f():\n    return [lambda: [x for x in ()]]\ng = lambda: 0\n"
    exec(compile(source, "/tree/moe_core/a.py", "exec"), space)
    assert plugin.name(space["f"].__code__) == "moe_core/a.py::f"
    assert plugin.name(space["f"]()[0].__code__) == "moe_core/a.py::f"
    assert plugin.name(space["g"].__code__) == "moe_core/a.py::<module>"
    assert plugin.name(test_a_small_package.__code__) is None
