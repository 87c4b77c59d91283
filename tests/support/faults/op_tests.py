"""Copies of kernels with the faults that tests of ops find, and the process that runs the tests on each copy.

Run as a script: `python -m tests.support.faults.op_tests CONTROL COPIES`. COPIES is JSON: a list of [folder of kernels,
file of tests, its test that is known to find the fault]. pytest collects the tests once; a fork for each folder runs
the known test first, then the others up to the first failure, and leaves pytest's exit status in `status` in the
folder, its output in `log` and the test that failed in `failed`. CONTROL holds unchanged kernels: the last fork runs on
them every test that failed in another.

finders.json holds the test that finds each fault. `op_tests --record` writes it anew, and keeps those that still do.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.faults.backward import FAULTS, TESTS
from tests.support.faults.kernel_copies import INTERPRETER, NO_FAULT, OpFault, plant, prepare_forks, run_on_copy
from tests.support.faults.quantized import FAULTS as QUANTIZED_FAULTS
from tests.support.paths import ROOT

#: Packages of kernels whose faults share a process, since it takes longer to begin than to find a fault.
PACKAGES = (
    ("routing",),
    ("exchange",),
    ("lora",),
    ("common", "matmul", "quantize"),
    ("activation", "norm", "reduction"),
)
#: By name of a fault: the test that finds it.
FINDERS = Path(__file__).with_name("finders.json")


def faults_of(packages: tuple[str, ...]) -> Iterator[tuple[str, str, str, OpFault]]:
    """(name, tests, kernel file, fault) of what the tests of ops find."""
    planted = [(TESTS[kernel_file], kernel_file, fault) for kernel_file, found in FAULTS.items() for fault in found]
    planted += [(tests, *found) for tests, faults in QUANTIZED_FAULTS.items() for found in faults]
    for tests, kernel_file, fault in planted:
        if kernel_file.partition(".")[0] in packages:
            yield f"{kernel_file}: {fault.old} -> {fault.new}", tests, kernel_file, fault


def run_tests_on_copies(packages: tuple[str, ...], folder: Path, finders: dict[str, str]) -> dict[str, Path]:
    """The folder of each fault by its name, and of the `control`, after this script has run on them."""
    folders, copies = {"control": folder / "control"}, []
    plant("", NO_FAULT, folder / "control")
    for number, (name, tests, kernel_file, fault) in enumerate(faults_of(packages)):
        folders[name] = folder / str(number)
        plant(kernel_file, fault, folders[name])
        copies.append((str(folders[name]), tests, finders.get(name)))
    command = [sys.executable, "-m", "tests.support.faults.op_tests", str(folders["control"]), json.dumps(copies)]
    subprocess.run(command, cwd=ROOT, env=os.environ | {"TRITON_INTERPRET": "1"}, check=True)
    return folders


class _OnCopies:
    """Runs the collected tests once per folder, each time in a fork."""

    def __init__(self, control: Path, copies: list[tuple[str, str, str | None]]) -> None:
        self._control, self._copies = control, copies

    @staticmethod
    def pytest_collection() -> None:
        """That a drawn example fails is enough; making it smaller takes a hundred times as long. Chosen after
        conftest.py chose its profile and before the tests, which take the one of that moment."""
        from hypothesis import Phase, settings

        settings.register_profile("faults", settings.get_profile("moebius"), phases=[Phase.generate])
        settings.load_profile("faults")

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """In the place of pytest's own loop. What every fork imports and is no kernel is imported before."""
        prepare_forks(INTERPRETER)
        # The first case of every test, then the second: most faults fail all cases of a test. Drawn examples come late,
        # since another release of Hypothesis draws others; the costliest, hundreds of experts, last.
        cases: Counter[str] = Counter()
        ranked = []
        for item in session.items:
            assert isinstance(item, pytest.Function)
            ranked.append(
                ("many_experts" in item.name, hasattr(item.obj, "hypothesis"), cases[_test(item.nodeid)], item)
            )
            cases[_test(item.nodeid)] += 1
        items = [item for *_, item in sorted(ranked, key=lambda entry: entry[:3])]
        failed: set[str] = set()
        for place, tests, finder in self._copies:
            folder, chosen = Path(place), [item for item in items if item.nodeid.startswith(tests)]
            assert chosen, f"no test was collected of {tests}"
            chosen.sort(key=lambda item: _test(item.nodeid) != finder)
            run_on_copy(folder, lambda folder=folder, chosen=chosen: _run_until_one_fails(session, chosen, folder))
            if (folder / "failed").exists():
                failed.add((folder / "failed").read_text())
        found = [item for item in items if item.nodeid in failed]
        run_on_copy(self._control, lambda: _run_until_one_fails(session, found, self._control))
        return True

    @staticmethod
    def pytest_runtest_logreport(report: pytest.TestReport) -> None:
        """Forks end before pytest would show what failed."""
        if report.failed:
            print(f"\n{report.nodeid}\n{report.longreprtext}")


def _test(nodeid: str) -> str:
    return nodeid.partition("[")[0]


def finder_in(folder: Path) -> str:
    """The test that found the fault in a folder, whichever of its cases."""
    return _test((folder / "failed").read_text())


def _run_until_one_fails(session: pytest.Session, items: list[pytest.Item], folder: Path) -> int:
    for item in items:
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=None)
        if session.testsfailed:
            (folder / "failed").write_text(item.nodeid)
            return int(pytest.ExitCode.TESTS_FAILED)
    return int(pytest.ExitCode.OK)


def record() -> None:
    known, found = json.loads(FINDERS.read_text()), {}
    for packages in PACKAGES:
        with tempfile.TemporaryDirectory() as folder:
            folders = run_tests_on_copies(packages, Path(folder), known)
            found |= {name: finder_in(place) for name, place in folders.items() if name != "control"}
    FINDERS.write_text(json.dumps(found, indent=0, sort_keys=True) + "\n")


if __name__ == "__main__":
    if sys.argv[1:] == ["--record"]:
        record()
    else:
        paths = sorted({tests for _, tests, _ in json.loads(sys.argv[2])})
        plugin = _OnCopies(Path(sys.argv[1]), json.loads(sys.argv[2]))
        # Without capturing, what the forks print lies in their logs.
        sys.exit(pytest.main(["-q", "-s", "-p", "no:cacheprovider", *paths], plugins=[plugin]))
