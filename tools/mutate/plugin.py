"""What a forked pytest does beside running tests: it keeps the wanted ones, fastest first, and writes what happened."""

from __future__ import annotations

import functools
import hashlib
import importlib
import json
import os
import pathlib
import re
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any

import pytest

#: One of the numbers that `sys.monitoring` leaves to tools that are no debugger, profiler or coverage.
MONITOR = 3
#: A test function is recorded for so many seconds, and so many of its tests at least; the rest are taken to be alike.
ENOUGH, FEWEST = 1.0, 2
#: Parameters that say which code of the packages runs: tests with different ones are not alike.
APART = frozenset({"torch", "jax", "reference", "interpreter"})


def seconds_on(began: float, used: float) -> float:
    """Seconds since a moment as an idle machine would need them: the processor's, or the clock's by the load."""
    load = os.getloadavg()[0] / (os.cpu_count() or 1)
    return round(max(time.process_time() - used, (time.monotonic() - began) / max(1.0, load)), 4)


def function_of(test: str) -> str:
    """Of a test: its name, and its parameters in APART."""
    name, _, parameters = test.partition("[")
    return "-".join([name, *sorted(APART.intersection(re.split(r"[\[\]-]", parameters)))])


class Calls:
    """The functions of the packages under a root that any thread of this process calls between `begin` and `end`."""

    def __init__(self, root: str) -> None:
        self.root = root
        self.called: set[CodeType] = set()

    def begin(self) -> None:
        self.called = set()
        if sys.version_info >= (3, 12):
            if sys.monitoring.get_tool(MONITOR) is None:
                sys.monitoring.use_tool_id(MONITOR, "tools.mutate")
            sys.monitoring.register_callback(MONITOR, sys.monitoring.events.PY_START, self.note)
            sys.monitoring.set_events(MONITOR, sys.monitoring.events.PY_START)
            sys.monitoring.restart_events()
        else:
            threading.settrace(self.trace)
            sys.settrace(self.trace)

    def end(self) -> set[str]:
        if sys.version_info >= (3, 12):
            sys.monitoring.set_events(MONITOR, 0)
        else:
            threading.settrace(None)  # type: ignore[arg-type]
            sys.settrace(None)
        return {name for code in self.called if (name := self.name(code))}

    def note(self, code: CodeType, offset: int) -> object:
        """Called once per function until the next `begin`: tracing every call would take several times as long."""
        self.called.add(code)
        return sys.monitoring.DISABLE  # type: ignore[attr-defined]

    def trace(self, frame: FrameType, event: str, argument: object) -> None:
        self.called.add(frame.f_code)

    def name(self, code: CodeType) -> str | None:
        """`path::qualified name` of a function of the packages; what lies in a function without a name is its."""
        if not code.co_filename.startswith(self.root + "/moe_"):
            return None
        qualified = code.co_qualname
        while qualified.endswith(">"):
            if ".<locals>." not in qualified:
                qualified = "<module>"
                break
            qualified = qualified.rpartition(".<locals>.")[0]
        return f"{code.co_filename[len(self.root) + 1 :]}::{qualified}"


def call_noted(folder: pathlib.Path, root: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """A call in a rank, which also writes to a file of a folder which functions it calls."""
    calls = Calls(root)
    calls.begin()
    try:
        return function(*arguments)
    finally:
        (folder / f"{os.getpid()}-{time.monotonic_ns()}").write_text("\n".join(calls.end()))


def note_ranks(folder: pathlib.Path, root: str) -> None:
    """Let ranks of `tests.support.parallel.pool` note what they call, once a test file has imported it."""
    pool = getattr(sys.modules.get("tests.support.parallel.pool"), "Pool", None)
    if pool is None or hasattr(pool.start, "__wrapped__"):
        return
    # Ranks know the tree's module, not the one of the process that forked.
    named, start = importlib.import_module(__name__).call_noted, pool.start

    @functools.wraps(start)
    def noting(self: Any, function: Callable[..., Any], arguments: Any) -> None:
        start(self, functools.partial(named, folder, root, function), arguments)

    pool.start = noting


def noted(folder: pathlib.Path) -> set[str]:
    """What ranks called since the last time."""
    found: set[str] = set()
    for file in folder.iterdir():
        found.update(file.read_text().split("\n"))
        file.unlink()
    return found - {""}


class Plugin:
    """order: the tests to run, in this order; None runs all. record: also note the functions that each test calls."""

    def __init__(self, report: pathlib.Path, root: str, order: list[str] | None, record: bool) -> None:
        self.report, self.root, self.record = report, root, record
        self.place = None if order is None else {name: index for index, name in enumerate(order)}
        self.began, self.used = time.monotonic(), time.process_time()
        self.calls = Calls(root)
        self.spent: defaultdict[str, float] = defaultdict(float)
        self.recorded: Counter[str] = Counter()
        self.of_ranks = pathlib.Path(tempfile.mkdtemp()) if record else report

    def write(self, **event: Any) -> None:
        with self.report.open("a") as file:
            file.write(json.dumps(event) + "\n")

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        if self.place is not None:
            place = self.place
            items[:] = sorted((i for i in items if i.nodeid in place), key=lambda item: place[item.nodeid])
        # Tests that plant faults look for texts in the sources: a mutation that changes the text is not found by them.
        items[:] = [item for item in items if "fault" not in item.nodeid and "planted" not in item.nodeid]
        if self.record:
            # Of many parameters those that are recorded lie anywhere among them.
            first = {name: index for index, name in reversed([*enumerate(function_of(item.nodeid) for item in items)])}
            digests = {item: hashlib.sha256(item.nodeid.encode()).digest() for item in items}
            items.sort(key=lambda item: (first[function_of(item.nodeid)], digests[item]))
        self.write(event="collected", tests=len(items), seconds=seconds_on(self.began, self.used))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        began, used, function = time.monotonic(), time.process_time(), function_of(item.nodeid)
        if self.record and self.spent[function] > ENOUGH and self.recorded[function] >= FEWEST:
            self.write(event="alike", test=item.nodeid)
            item.add_marker(pytest.mark.skip(reason="alike"))
            return (yield)
        if self.record:
            note_ranks(self.of_ranks, self.root)
            self.calls.begin()
        try:
            return (yield)
        finally:
            called = self.calls.end() | noted(self.of_ranks) if self.record else set()
            seconds = seconds_on(began, used)
            self.spent[function] += seconds
            self.recorded[function] += 1
            self.write(event="ran", test=item.nodeid, seconds=seconds, functions=sorted(called))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.write(event="failed", test=report.nodeid, text=str(report.longrepr)[-300:])

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.outcome != "passed":
            self.write(event=report.outcome, test=report.nodeid, text=str(report.longrepr)[-300:])
