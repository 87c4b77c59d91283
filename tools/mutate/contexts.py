"""Which tests call which functions: recorded once per test file, kept under build/mutate/contexts."""

from __future__ import annotations

import collections
import functools
import hashlib
import json
import pathlib
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from tools.mutate import forks, sources
from tools.mutate.plugin import function_of
from tools.mutate.sources import ROOT, Mutation

#: Tests of texts, of whole pages and of other programs: they see a mutation as a changed text, or take minutes.
LEFT_OUT = (
    *("tests/packages/", "tests/docs/", "tests/examples/", "tests/benchmarks/", "tests/faults/", "tests/tools/"),
    *(
        "tests/runtime/test_compile_gate.py",
        "tests/recipes/test_accelerate.py",
        "tests/recipes/test_peft.py",
        "tests/mutate/",
    ),
)
#: What commands do has tests among those of packages.
BUT = ("tests/packages/test_commands.py",)
#: Folders whose tests are quick are recorded first, so that a recording that was cut short is of use.
FIRST = ("tests/ops", "tests/plan", "tests/formats", "tests/checkpoint", "tests/specs", "tests/layers", "tests/base")
#: They see in a second what any planner makes.
BROAD = ("tests/plan/test_gpu_plans.py",)
#: Seconds of a processor that recording a file may take.
RECORDING = 900


def test_files() -> list[str]:
    names = [path.relative_to(ROOT).as_posix() for path in sorted((ROOT / "tests").rglob("test_*.py"))]
    wanted = [name for name in names if name in BUT or not name.startswith(LEFT_OUT)]
    return sorted(wanted, key=lambda n: (not n.startswith(FIRST), n))


def folder_of(path: str) -> str:
    return path.rpartition("/")[0] + "/"


@functools.cache
def imports(file: str, path: str) -> bool:
    """Whether a test file imports the module at a path by its name."""
    package, _, name = path.removesuffix(".py").replace("/", ".").rpartition(".")
    text = (ROOT / file).read_text() if (ROOT / file).exists() else ""
    return bool(re.search(rf"from {re.escape(package)} import [^\n]*\b{name}\b|{re.escape(package)}\.{name}\b", text))


@functools.cache
def words_of(path: str) -> set[str]:
    return set(re.split(r"[/_.]", path)) - {"moe", "py", "test", "tests"}


def names_entry(test: str, entry: str) -> bool:
    """Whether the parameters of a test name this entry of a table, perhaps with more words."""
    parameters = re.split(r"[\[\]-]", test.partition("[")[2])
    return bool(entry) and any(len(p) > 3 and (p.startswith(entry) or entry.startswith(p)) for p in parameters)


@dataclass
class Contexts:
    """seconds: of a test; setup: of collecting a file; callers: the tests of a function, of a file and of a folder;
    alike: tests that other parameters of their function were recorded for; passed: tests and files of today's text that
    were recorded with today's packages."""

    seconds: dict[str, float] = field(default_factory=dict)
    setup: dict[str, float] = field(default_factory=dict)
    callers: dict[str, set[str]] = field(default_factory=dict)
    alike: set[str] = field(default_factory=set)
    passed: set[str] = field(default_factory=set)

    def related(self, mutation: Mutation) -> list[str]:
        """Tests that call the function, those of files that import its module, those that name its entry of a table,
        and those of the file that is named like it; cheapest first, and those with words of the file's path in theirs
        before others. Behind them come those in folders and files of the folder's name, which may call it in other
        processes.

        What runs when a module is imported has the tests of every function of the module and, behind them, those of its
        folder: tables are often read by a neighbour.
        """
        folder, _, name = mutation.path.removeprefix("moe_core/").removeprefix("moe_").rpartition("/")
        files = {file for file in self.setup if imports(file, mutation.path)} | {f"tests/{folder}/test_{name}"}
        near = {test for test in self.seconds if test.split("::")[0] in files or names_entry(test, mutation.entry)}
        whole = self.callers.get(mutation.path, set()) | near
        tests = self.callers.get(f"{mutation.path}::{mutation.function}", set()) | near
        if mutation.function == "<module>":
            tests = whole | self.callers.get(folder_of(mutation.path), set())
        first = tests
        tests = tests | (whole & self.alike)
        shared, package = sources.folder_of(mutation.path), folder.partition("/")[0]
        if shared not in (None, "."):
            beginnings = (f"tests/{shared}/", f"tests/{package}/{shared}/")
            named = f"/test_{shared.rpartition('/')[2]}"
            tests = tests | {t for t in self.seconds if t.startswith(beginnings) or named in t.partition("::")[0]}

        def cost(test: str) -> tuple[bool, float, str]:
            shared = len(words_of(mutation.path) & words_of(test.split("::")[0]))
            broad = names_entry(test, mutation.entry) or test.startswith(BROAD)
            late = not broad and (test not in first or (mutation.function == "<module>" and test not in whole))
            return late, self.seconds[test] * 4.0 ** -(shared + 4 * broad), test

        # Of one function each further test tells less.
        before: collections.Counter[str] = collections.Counter()
        ranked = []
        for late, seconds, test in sorted(map(cost, tests)):
            before[function := test.partition("[")[0]] += 1
            ranked.append((late, seconds * before[function], test))
        return [test for _, _, test in sorted(ranked)]

    def add(self, record: dict[str, Any]) -> None:
        functions, file = record["functions"], record["file"]
        self.setup[file] = record["setup"]
        recorded: dict[str, list[str]] = {}
        for test, (seconds, called) in record["tests"].items():
            self.seconds[test] = seconds
            recorded.setdefault(function_of(test), []).append(test)
            self._note(test, {functions[index] for index in called})
        for test in record.get("alike", ()):
            if others := recorded.get(function_of(test)):
                self.alike.add(test)
                self.seconds[test] = sum(map(self.seconds.__getitem__, others)) / len(others)
                called = [{functions[index] for index in record["tests"][other][1]} for other in others]
                self._note(test, set.intersection(*called), {name.split("::")[0] for name in set.union(*called)})

    def _note(self, test: str, functions: set[str], paths: Iterable[str] = ()) -> None:
        paths = {name.split("::")[0] for name in functions}.union(paths)
        for name in functions | paths | set(map(folder_of, paths)):
            self.callers.setdefault(name, set()).add(test)


def place(folder: pathlib.Path, name: str) -> pathlib.Path:
    return folder / (name.replace("/", "-") + ".json")


def digest(name: str) -> str:
    return hashlib.sha256((ROOT / name).read_bytes()).hexdigest()[:16] if (ROOT / name).exists() else ""


def packages() -> str:
    """A digest of what is mutated: with another text of it a test may fail without a mutation."""
    texts = [path.read_bytes() for path in sorted(ROOT.glob("moe_*/**/*.py"))]
    return hashlib.sha256(b"".join(texts)).hexdigest()[:16]


def recorded(folder: pathlib.Path, name: str) -> dict[str, Any] | None:
    path = place(folder, name)
    return json.loads(path.read_text()) if path.exists() else None


def load(folder: pathlib.Path) -> Contexts:
    """What is recorded of the files that are there, of an earlier text of theirs where they changed since."""
    contexts, today = Contexts(), packages()
    for name in test_files():
        if record := recorded(folder, name):
            contexts.add(record)
            known = (record["digest"], record.get("packages")) == (digest(name), today)
            contexts.passed |= {name, *record["tests"]} if known else set()
    return contexts


def record(
    slots: list[pathlib.Path],
    scratch: pathlib.Path,
    folder: pathlib.Path,
    say: Callable[[str], None],
    tests: tuple[str, ...],
    until: float,
) -> None:
    """Record the test files that have no record, or whose text has changed since, if they begin with one of `tests`."""
    folder.mkdir(parents=True, exist_ok=True)
    # Of the texts that the trees have: they may change while others are recorded.
    digests, today = {name: digest(name) for name in test_files() if name.startswith(tests)}, packages()
    missing = [name for name, known in digests.items() if (recorded(folder, name) or {}).get("digest") != known]

    left = iter(missing)

    def make(tree: pathlib.Path) -> forks.Job | None:
        name = next(left, None)
        return forks.Job(name, tree, [name], None, RECORDING, record=True) if name else None

    for number, outcome in enumerate(forks.run(slots, scratch, make, until), 1):
        if outcome.status not in (0, 1, 5):
            say(f"{outcome.job.name}: status {outcome.status}, not recorded\n{outcome.log[-800:]}")
            continue
        bad = {str(event["test"]) for kind in ("failed", "skipped") for event in outcome.of(kind)}
        ran = {e["test"]: (e["seconds"], e["functions"]) for e in outcome.of("ran") if e["test"] not in bad}
        alike = [event["test"] for event in outcome.of("alike")]
        functions = sorted({name for _, called in ran.values() for name in called})
        index = {name: position for position, name in enumerate(functions)}
        text = {
            "file": outcome.job.name,
            "digest": digests[outcome.job.name],
            "packages": today,
            "setup": next((event["seconds"] for event in outcome.of("collected")), 0.0),
            "functions": functions,
            "tests": {test: (seconds, [index[name] for name in called]) for test, (seconds, called) in ran.items()},
            "alike": alike,
        }
        place(folder, outcome.job.name).write_text(json.dumps(text))
        failed = len(outcome.of("failed"))
        counts = f"{len(ran)} tests, {failed} failed, {len(alike)} alike"
        say(f"{number}/{len(missing)} {outcome.job.name}: {counts}, {outcome.wall:.1f} s")
