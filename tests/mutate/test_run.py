"""The tool end to end on a small package of its own: what is killed, what survives, and that a run goes on."""

from __future__ import annotations

import collections
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.paths import ROOT
from tools.mutate import contexts, forks
from tools.mutate.contexts import Contexts
from tools.mutate.run import Run, draw, drawn_at
from tools.mutate.sources import Mutation

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
    "moe_core/base/__init__.py": "",
    "moe_core/base/far.py": "def double(x):\n    return x + x\n",
    "tests/__init__.py": "",
    "tests/support/__init__.py": "",
    "tests/support/parallel/__init__.py": "",
    "tests/support/parallel/torch.py": "import moe_core.base.far\n",
    "tests/support/parallel/pool.py": (
        "import multiprocessing\n\n\n"
        "def serve(pipe):\n    function, given = pipe.recv()\n    pipe.send(function(*given))\n\n\n"
        "class Pool:\n    def __init__(self):\n        context = multiprocessing.get_context('forkserver')\n"
        "        self.pipe, there = context.Pipe()\n"
        "        context.Process(target=serve, args=(there,), daemon=True).start()\n\n"
        "    def start(self, function, arguments):\n        self.pipe.send((function, arguments[0]))\n"
    ),
    "tools/mutate/plugin.py": (ROOT / "tools/mutate/plugin.py").read_text(),
    "tests/ops/__init__.py": "",
    "tests/ops/test_ranks.py": (
        "from tests.support.parallel.pool import Pool\nfrom tests.support.parallel.torch import moe_core\n\n\n"
        "def test_rank():\n    pool = Pool()\n    pool.start(moe_core.base.far.double, [(3,)])\n"
        "    assert pool.pipe.recv() == 6\n"
    ),
    "tests/plan/__init__.py": "",
    "tests/plan/test_sizes.py": (
        "import pytest\nfrom moe_core.plan.sizes import half, loop\n\n\n"
        "def test_half():\n    assert half(7) == 3\n\n\n"
        "def test_negative():\n    with pytest.raises(ValueError):\n        half(-2)\n\n\n"
        "@pytest.mark.parametrize('x', [3, 4, 5])\ndef test_loop(x):\n    assert loop(x) == 1\n\n\n"
        "def test_that_fails():\n    assert half(7) == 4\n"
    ),
}
#: The tool on another root, with fewer things imported before the forks.
SCRIPT = """
import pathlib, sys
from tools.mutate import sources
sources.ROOT = pathlib.Path(sys.argv.pop(1))
from tools.mutate import contexts, forks
forks.SHARED = ("numpy", "hypothesis", "pytest")
from tools.mutate import plugin, run
run.PATIENCE, plugin.ENOUGH, plugin.FEWEST = 2, 0.0, 2
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
    far = of["return x + x", "return (x - x)"]
    assert far["by"].endswith("test_rank") and far["related"] == 1, "a rank calls it"
    assert not any(r["by"].endswith("test_that_fails") for r in results), "it fails without a mutation"
    assert "/2 tests/plan/test_sizes.py: 4 tests, 1 failed, 1 alike" in printed
    assert 'after = "if (x <= 0):"' in printed and "| plan |" in printed and "least: 0.0% in specs" in printed
    for name, text in PACKAGE.items():
        assert (tmp_path / name).read_text() == text
    again, printed = mutate(tmp_path)
    assert sorted(r["key"] for r in again) == sorted(r["key"] for r in results)
    assert "killed drop_raise" not in printed and "survived compare" in printed, "what was killed is kept"


def test_related_tests_come_cheapest_and_nearest_first() -> None:
    contexts = Contexts()
    path = "moe_core/ops/reduction/reduce.py"
    for number, (file, seconds) in enumerate(
        [("a/test_a", 1.0), ("ops/reduction/test_reduce", 2.0), ("b/test_b", 0.5), ("ops/reduction/test_ranks", 0.1),
         ("c/test_reduction", 4.0)]
    ):  # fmt: skip
        contexts.add(
            {
                "file": f"tests/{file}.py",
                "setup": 0.1,
                "functions": [f"{path}::plan", f"{path}::other", "moe_core/x.py::f"],
                "tests": {f"tests/{file}.py::test": [seconds, [[0, 0, 1, 2, 2][number]]]},
            }
        )

    def files(function: str) -> list[str]:
        mutation = Mutation(path, function, "swap", 1, 0, 1, "")
        return [test.split("test_")[1].partition(".")[0] for test in contexts.related(mutation)]

    named = ["ranks", "reduction"]
    assert files("plan") == ["reduce", "a", *named]
    assert files("other") == ["reduce", "b", *named], "the file's own, those that call it, and those of the folder"
    assert files("<module>") == ["reduce", "b", "a", *named]
    assert files("nobody_calls") == ["reduce", *named]
    elsewhere = Mutation("moe_torch/ops/reduction/deeper/x.py", "f", "swap", 1, 0, 1, "")
    assert len(contexts.related(elsewhere)) == 3, "of the folder in any package"


def test_what_is_not_recorded_calls_what_all_others_of_its_function_call() -> None:
    contexts, path, test = Contexts(), "moe_core/ops/reduction/sum.py", "tests/a/test_a.py::test"
    functions = [f"{path}::both", f"{path}::one"]
    tests = {f"{test}[1]": [1.0, [0, 1]], f"{test}[2]": [3.0, [0]]}
    file = {"file": "tests/a/test_a.py", "setup": 0.1, "functions": functions, "tests": tests}
    contexts.add(file | {"alike": [f"{test}[3]", f"{test}[3-jax]", "tests/a/test_a.py::unknown[3]"]})
    assert contexts.seconds[f"{test}[3]"] == 2.0 and contexts.alike == {f"{test}[3]"}
    assert contexts.related(Mutation(path, "both", "swap", 1, 0, 1, "")) == [f"{test}[{n}]" for n in (1, 3, 2)]
    of_one = contexts.related(Mutation(path, "one", "swap", 1, 0, 1, ""))
    assert of_one == [f"{test}[1]", f"{test}[3]"], "perhaps, and so behind those that are known to"


@pytest.mark.parametrize(
    ("by", "status", "ran", "why"),
    [
        *(("::t", 5, [], "is no more"), ("::t", 1, ["::t"], "fails"), ("::t", 0, ["::t"], "")),
        *(("::t", -11, [], "fails"), ("", 2, [""], "fails"), ("", 5, [], "")),
    ],
)
def test_only_what_passes_without_the_change_kills_it(
    by: str, status: int, ran: list[str], why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A test, or a file that cannot be collected."""
    file = "tests/mutate/test_run.py"
    mutation, test = Mutation("moe_core/errors.py", "<module>", "swap", 1, 0, 1, ""), file + by
    kinds = ["ran"] * bool(by) + ["failed"] * (status in (1, 2))
    events = [{"event": kind, "test": file + one} for one in ran for kind in kinds]
    recorded = Contexts(seconds={file + "::t": 1.0}, setup={file: 1.0})

    def outcomes(slots: Any, scratch: Any, make: Any, until: float) -> Iterator[forks.Outcome]:
        monkeypatch.setattr(run, "make", lambda tree: None)
        while job := make(tmp_path):
            yield forks.Outcome(job, status, events, "", 1.0)

    monkeypatch.setattr(forks, "run", outcomes)
    run, again = (Run([("", mutation)], recorded, tmp_path / "r.json", 1.0) for _ in "12")
    run.queue.clear()
    run.keep("", mutation, "killed", test, 1, 1.0)
    said: list[str] = []
    run.run([tmp_path], tmp_path, said.append, math.inf)
    assert len(run.results) == (not why) and len(run.queue) == bool(why) and why in "".join(said)
    again.controls = json.loads(again.controls_at.read_text())
    assert again.passes(test) == (not why), "kept for the next run"
    run.keep("", mutation, "killed", test, 1, 1.0)
    run.save()
    third = Run([("", mutation)], recorded, tmp_path / "r.json", 1.0)
    assert len(third.queue) == bool(why) and len(third.results) == (not why)


def test_a_test_is_trusted_with_the_packages_that_it_passed_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, mutation = "tests/base/test_memory.py", Mutation("moe_core/errors.py", "<module>", "swap", 1, 0, 1, "")
    text = {
        "file": file,
        "digest": contexts.digest(file),
        "setup": 1.0,
        "functions": [],
        "tests": {f"{file}::t": [1.0, []]},
    }
    for packages, trusted in ((contexts.packages(), True), ("others", None), (None, None)):
        contexts.place(tmp_path, file).write_text(json.dumps(text | {"packages": packages}))
        run = Run([("", mutation)], contexts.load(tmp_path), tmp_path / "r.json", 1.0)
        assert run.passes(f"{file}::t") is trusted
    run.controls[f"{file}::t"] = [run.digest(file), True]
    assert run.passes(f"{file}::t")
    monkeypatch.setattr(contexts, "packages", lambda: "others")
    other = Run([("", mutation)], contexts.load(tmp_path), tmp_path / "r.json", 1.0)
    other.controls = run.controls
    assert other.passes(f"{file}::t") is None


def test_folders_and_their_directories_are_drawn_alike_and_small_ones_whole() -> None:
    paths = ("moe_core/errors.py", "moe_jax/parallel", "moe_torch/parallel", "moe_core/formats/")
    drawn = draw(100, 0, paths, gpu=False)
    folders = collections.Counter(folder for folder, _ in drawn)
    assert folders.total() == 100 and 0 < folders["."] < 33, "a file with less than a third"
    assert folders["parallel"] - folders["formats"] in (0, 1)
    directories = collections.Counter(m.path.rpartition("/")[0] for folder, m in drawn if folder == "parallel")
    assert len(directories) == 4 and max(directories.values()) - min(directories.values()) <= 1
    assert draw(10, 0, paths, gpu=False, folders=("parallel",))[0][0] == "parallel"


def test_a_draw_depends_on_the_lines_alone() -> None:
    keys = [("f", str(before), str(after)) for before in range(9) for after in range(9)]
    order = sorted(keys, key=lambda key: drawn_at(3, key))
    assert sorted(keys[1:], key=lambda key: drawn_at(3, key)) == [key for key in order if key != keys[0]]
    assert sorted(keys, key=lambda key: drawn_at(4, key)) != order != keys
