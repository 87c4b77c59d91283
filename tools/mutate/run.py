"""Draws mutations, runs the related tests on each, and keeps what came out so that a run that was cut short goes on."""

from __future__ import annotations

import ast
import collections
import functools
import hashlib
import itertools
import json
import math
import pathlib
import random
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from tools.mutate import contexts, equivalent, forks
from tools.mutate.contexts import Contexts
from tools.mutate.operators import mutations, parses
from tools.mutate.sources import ROOT, Mutation, Source, files
from tools.mutate.tree import Tree

#: A first fork runs this many seconds of tests out of this many files; what survives has the rest, up to the budget.
FIRST_SECONDS, FIRST_FILES = 4.0, 3
#: Seconds at most that a file beside the first is taken to need for its collection.
SETUP = 1.0
#: What a fork may take beside three times the recorded seconds, before it counts as one that never ends.
PATIENCE = 8
#: pytest's statuses that say that tests failed, or could not even be collected; and that none failed, or none is left.
FAILED, PASSED = (1, 2, 4), (0, 5)


@dataclass(frozen=True)
class Result:
    """status: killed, survived, equivalent, uncovered (no test calls the function) or unsure (the test that killed
    fails without the mutation as well, or is no more). ran, related: tests. by: the test that failed, or how the
    process ended."""

    key: str
    folder: str
    function: str
    operator: str
    line: int
    before: str
    after: str
    status: str
    by: str
    ran: int
    related: int
    seconds: float


def draw(
    count: int, seed: int, paths: tuple[str, ...], gpu: bool, folders: tuple[str, ...] = ()
) -> list[tuple[str, Mutation]]:
    """(folder, mutation): as many of each folder as of any other, and in a folder of each directory; all where few.

    The same for the same seed and sources. Each mutation's place in the order is a digest of its lines, so a draw
    hardly changes when other lines do.
    """
    texts: dict[str, str] = {}
    queues: dict[str, list[Mutation]] = {}
    for folder, names in files(ROOT, paths, gpu).items():
        if folders and folder not in folders:
            continue
        texts |= {name: (ROOT / name).read_text() for name in names}
        by_directory: dict[str, list[Mutation]] = {}
        for name in names:
            by_directory.setdefault(name.rpartition("/")[0], []).extend(mutations(Source(name, texts[name])))
        for found in by_directory.values():
            found.sort(key=lambda mutation: drawn_at(seed, equivalent.key_of(mutation, texts[mutation.path])))
        queues[folder] = [one for turn in itertools.zip_longest(*by_directory.values()) for one in turn if one]
    drawn: list[tuple[str, Mutation]] = []
    for number, folder in enumerate(sorted(queues, key=lambda folder: len(queues[folder]))):
        share = (count - len(drawn)) // (len(queues) - number)
        valid = (mutation for mutation in queues[folder] if parses(mutation, texts[mutation.path]))
        drawn += [(folder, mutation) for mutation in itertools.islice(valid, share)]
    random.Random(seed).shuffle(drawn)
    return drawn


def drawn_at(seed: int, key: tuple[str, ...]) -> bytes:
    return hashlib.sha256(repr((seed, *key)).encode()).digest()


def version(mutation: Mutation) -> str:
    """Of the innermost function around it, or the statement of the module: where it lies there, and its text."""
    source = (ROOT / mutation.path).read_text()
    data, pieces = source.encode(), _pieces(mutation.path, source)
    begin, end = min((p for p in pieces if p[0] <= mutation.start and mutation.end <= p[1]), key=lambda p: p[1] - p[0])
    digest = hashlib.sha256(data[begin:end]).hexdigest()[:12]
    where = f"{mutation.path}::{mutation.function}:{mutation.start - begin}:{mutation.end - begin}"
    return f"{where}:{mutation.operator}:{mutation.new} {digest}"


@functools.cache
def _pieces(path: str, text: str) -> list[tuple[int, int]]:
    source = Source(path, text)
    functions = [node for node in source.parents if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return [source.span(node) for node in (*functions, *source.tree.body)]


class Run:
    """The state of one run; `results` by the version of their mutation.

    controls: of tests that killed and are not known to pass, the digest of file and packages and whether they pass
    without a change; kept beside the results. unproven: those of them that are still to run, by file.
    again: no earlier result is kept. The test that killed a mutation before is its first either way.
    """

    def __init__(
        self,
        drawn: list[tuple[str, Mutation]],
        recorded: Contexts,
        store: pathlib.Path,
        budget: float,
        *,
        again: bool = False,
    ) -> None:
        self.contexts, self.store, self.budget = recorded, store, budget
        self.results: dict[str, Result] = {}
        kept = self.kept = {r["key"]: Result(**r) for r in json.loads(store.read_text())} if store.exists() else {}
        self.killers = {(r.function, r.before, r.after): r.by for r in kept.values() if r.status == "killed"}
        self.known = {entry.key for entry in equivalent.load()}
        self.queue: collections.deque[tuple[str, Mutation, int]] = collections.deque()
        self.drawn = {version(mutation): (folder, mutation) for folder, mutation in drawn}
        path = self.controls_at = store.with_name("controls.json")
        self.controls: dict[str, list[Any]] = json.loads(path.read_text()) if path.exists() else {}
        self.unproven: dict[str, list[str]] = {}
        packages = contexts.packages()
        self.digest = functools.cache(lambda file: f"{contexts.digest(file)} {packages}")
        for folder, mutation in drawn:
            old = None if again else kept.get(version(mutation))
            listed = equivalent.key_of(mutation, (ROOT / mutation.path).read_text()) in self.known
            if old and old.status == "killed" and self.passes(old.by) is not False:
                self.results[old.key] = old
                self.prove(old.by)
            elif listed:
                self.keep(folder, mutation, "equivalent", "", 0, 0.0)
            else:
                self.queue.append((folder, mutation, 0))
        # What no test killed before takes longest: it comes last.
        self.queue = collections.deque(sorted(self.queue, key=lambda one: version(one[1]) in kept))
        self.running: dict[str, tuple[str, Mutation, int, list[str]]] = {}

    def keep(self, folder: str, mutation: Mutation, status: str, by: str, ran: int, seconds: float) -> Result:
        before, after = mutation.texts((ROOT / mutation.path).read_text())
        function = f"{mutation.path}::{mutation.function}"
        key, related = version(mutation), len(self.related(mutation))
        result = Result(
            *(key, folder, function, mutation.operator, mutation.line, before, after, status, by, ran, related),
            round(seconds, 2),
        )
        self.results[key] = result
        if status == "killed":
            self.prove(by)
        return result

    def save(self) -> None:
        """Write the results, and those of earlier runs on this seed."""
        text = json.dumps([asdict(result) for result in (self.kept | self.results).values()], indent=1)
        self.store.parent.mkdir(parents=True, exist_ok=True)
        self.store.write_text(text)
        self.controls_at.write_text(json.dumps(self.controls, indent=1))

    def passes(self, test: str) -> bool | None:
        """Whether a test passes, or a file of tests is collected, without a change; None where nobody knows."""
        file = test.split("::")[0]
        for name in (file, test):
            known = self.controls.get(name)
            if known and known[0] == self.digest(file) and (name == test or not known[1]):
                return known[1]
        return True if test in self.contexts.passed else None

    def prove(self, test: str) -> None:
        waiting = self.unproven.setdefault(test.split("::")[0], [])
        if self.recorded(test) and self.passes(test) is None and test not in waiting:
            waiting.append(test)

    def recorded(self, by: str) -> bool:
        """Whether what killed is a test, or a file of tests."""
        return by in self.contexts.seconds or by in self.contexts.setup

    def related(self, mutation: Mutation) -> list[str]:
        return [test for test in self.contexts.related(mutation) if self.passes(test) is not False]

    def choose(self, tests: list[str], seconds: float, most_files: int) -> list[str]:
        """The first of these tests that fit: in seconds, collection of their files included, and in files."""
        chosen, collected, left = [], set(), seconds
        for test in tests:
            file = test.split("::")[0]
            # What several files import counts once.
            setup = min(self.contexts.setup[file], SETUP) if collected else self.contexts.setup[file]
            cost = self.contexts.seconds[test] + (0 if file in collected else setup)
            if (cost > left and chosen) or (file not in collected and len(collected) == most_files):
                continue
            left -= cost
            collected.add(file)
            chosen.append(test)
        return chosen

    def first(self, mutation: Mutation, related: list[str]) -> list[str]:
        """The tests of the first fork: the one that killed the mutation before, or the first that fit."""
        killer = self.killers.get(equivalent.key_of(mutation, (ROOT / mutation.path).read_text()))
        return [killer] if killer in related else self.choose(related, FIRST_SECONDS, FIRST_FILES)

    def make(self, tree: pathlib.Path) -> forks.Job | None:
        while self.queue:
            folder, mutation, skip = self.queue.popleft()
            related = self.related(mutation)
            if not related:
                self.keep(folder, mutation, "uncovered", "", 0, 0.0)
                continue
            first = self.first(mutation, related)
            tests = first
            if skip:
                done = set(first)
                tests = self.choose([test for test in related if test not in done], self.budget, 1000)
            named = list(dict.fromkeys(test.split("::")[0] for test in tests))
            seconds = sum(self.contexts.seconds[t] for t in tests) + sum(self.contexts.setup[name] for name in named)
            Tree.at(tree).put(mutation)
            self.running[str(tree)] = (folder, mutation, skip, tests)
            return forks.Job(mutation.key, tree, named, tests, PATIENCE + 3 * seconds)
        return None

    def done(self, outcome: forks.Outcome) -> Result | None:
        """Note an outcome; None where the rest of the tests comes first."""
        folder, mutation, skip, tests = self.running.pop(str(outcome.job.tree))
        Tree.at(outcome.job.tree).restore(pathlib.Path(mutation.path))
        ran = skip + len(outcome.of("ran"))
        if outcome.status in PASSED and not skip and len(self.related(mutation)) > len(tests):
            # Of a test that is recorded and is no more none runs.
            self.queue.append((folder, mutation, max(ran, 1)))
            return None
        if outcome.status in PASSED:
            return self.keep(folder, mutation, "survived", "", ran, outcome.wall)
        failed = outcome.of("failed")
        by = (
            failed[0]["test"]
            if failed
            else "out of time or memory"
            if outcome.status is None
            else f"status {outcome.status}"
        )
        killed = outcome.status is None or outcome.status < 0 or outcome.status in FAILED or outcome.status > 100
        if killed and self.passes(by) is False:
            # Meanwhile it failed without a change.
            self.queue.append((folder, mutation, skip))
            return None
        if not killed:
            by += f": {outcome.log[-500:]}"
        return self.keep(folder, mutation, "killed" if killed else "unsure", by, ran, outcome.wall)

    def run(self, slots: list[pathlib.Path], scratch: pathlib.Path, say: Callable[[str], None], until: float) -> None:
        """Run the controls and what is queued. `until` is a time of `time.monotonic`: no change begins in the last
        eighth of what is left now, so that the controls of those before it end."""
        total = len(self.results) + len(self.queue)
        end = until - (until - time.monotonic()) / 8 if until < math.inf else until
        proving: dict[str, list[str]] = {}

        def make(tree: pathlib.Path) -> forks.Job | None:
            if tests := next(filter(None, (self.unproven.pop(file) for file in list(self.unproven))), None):
                proving[str(tree)] = tests
                file = tests[0].split("::")[0]
                return forks.Job(file, tree, [file], tests, 300, keep_going=True)
            return self.make(tree) if time.monotonic() < end else None

        for number, outcome in enumerate(forks.run(slots, scratch, make, until)):
            if tests := proving.pop(str(outcome.job.tree), None):
                self.control(outcome, tests, say)
                continue
            result = self.done(outcome)
            if result is not None:
                say(f"{len(self.results)}/{total} {result.status} {result.operator} {result.function}:{result.line}")
                if result.status != "killed":
                    say(f"    {result.before}\n    {result.after}")
            if number % 10 == 0:
                self.save()
        for tree, (_, mutation, _, _) in self.running.items():
            Tree.at(pathlib.Path(tree)).restore(pathlib.Path(mutation.path))
        for key, result in self.results.items():
            if result.status == "killed" and self.recorded(result.by) and self.passes(result.by) is None:
                self.results[key] = replace(result, status="unsure")
        if len(self.results) < total:
            say(f"out of time: {total - len(self.results)} of {total} changes have no result")
        self.save()

    def control(self, outcome: forks.Outcome, tests: list[str], say: Callable[[str], None]) -> None:
        """Note which of these tests pass without a change. What others killed is queued anew, for other tests."""
        file = outcome.job.files[0]
        ran, bad = ({str(event["test"]) for event in outcome.of(kind)} for kind in ("ran", "failed"))
        ran |= {file} - bad
        crashed = outcome.status not in (*FAILED, *PASSED)
        left = [test for test in tests if test not in ran]
        for test in left[1:] if crashed else ():
            self.unproven.setdefault(file, []).append(test)
        for test in [test for test in tests if test in ran] + (left[:1] if crashed else left):
            self.controls[test] = [self.digest(file), test in ran and test not in bad]
            if not self.controls[test][1]:
                say(f"no proof: {test} {'fails without a change' if test in bad or crashed else 'is no more'}")
                for key in [key for key, result in self.results.items() if result.by == test]:
                    del self.results[key]
                    self.kept.pop(key, None)
                    self.queue.append((*self.drawn[key], 0))
