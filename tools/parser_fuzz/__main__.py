"""Change the files that the package reads at random: `python -m tools.parser_fuzz [--cases 100000] [--seed 0]`.

Every case changes one file and reads it. Whatever it then holds, the reader must accept it or raise InvalidInput or
Unsupported, within a second of computing and 200 MB of memory. Anything else is printed with the command that repeats
it, and the exit status is 1. Cases run in processes of their own, so that one that crashes is found too.
"""

from __future__ import annotations

import argparse
import collections
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from moe_core.errors import InvalidInput, Unsupported
from tools.parser_fuzz.subjects import Subject, scratch_folder, subjects

MOST_SECONDS, MOST_MEGABYTES = 1.0, 200
#: Cases of one process, and seconds that it may take in all: a reader that waits computes nothing.
_CHUNK, _CHUNK_SECONDS = 10_000, 1200


class TooSlow(BaseException):
    """A case took more than MOST_SECONDS of the processor. No reader may catch it."""


def _stop(number: int, frame: FrameType | None) -> None:
    raise TooSlow


def run(cases: int, seed: int, first: int = 0, keep: Path | None = None) -> dict[str, Any]:
    """Run cases `first` to `first + cases - 1` of a seed: numbers of outcomes, and what failed, once per place.

    keep: a directory for the files that failed.
    """
    counts: collections.Counter[str] = collections.Counter()
    failures: dict[str, str] = {}
    before = signal.signal(signal.SIGPROF, _stop)
    try:
        with tempfile.TemporaryDirectory(dir=scratch_folder()) as folder, warnings.catch_warnings():
            warnings.simplefilter("error")
            found = subjects(Path(folder))
            weights = [subject.weight for subject in found]
            for case in range(first, first + cases):
                draw = random.Random(f"{seed}:{case}")
                subject = draw.choices(found, weights)[0]
                content = subject.run(draw)
                outcome, place = _read(subject)
                subject.restore()
                counts[outcome] += 1
                if place is not None:
                    repeat = f"python -m tools.parser_fuzz --seed {seed} --first {case} --cases 1"
                    failures.setdefault(f"{subject.name}: {place}", repeat)
                    if keep is not None:
                        keep.mkdir(parents=True, exist_ok=True)
                        (keep / f"{seed}-{case}-{subject.file}").write_bytes(content)
    finally:
        signal.signal(signal.SIGPROF, before)
    return {"counts": dict(counts), "failures": failures}


def _read(subject: Subject) -> tuple[str, str | None]:
    """(outcome, where and what of a failure)."""
    start = _memory("VmRSS:", reset=True)
    signal.setitimer(signal.ITIMER_PROF, MOST_SECONDS)
    try:
        try:
            subject.read(subject.directory)
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
        outcome, place = "accepted", None
    except (InvalidInput, Unsupported) as error:
        outcome, place = type(error).__name__, None
        if len(str(error)) > 4000:
            outcome, place = "long message", f"a message of {len(str(error))} characters: {error!s:.100}"
    except (Exception, TooSlow) as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        own = [frame for frame in traceback.extract_tb(error.__traceback__) if "moe_core" in frame.filename] or [last]
        where = f"{Path(own[-1].filename).name}:{own[-1].lineno}"
        outcome, place = "foreign", f"{type(error).__name__} at {where}: {error!s:.200}"
    grown = _memory("VmHWM:") - start
    if grown > MOST_MEGABYTES:
        outcome, place = "memory", f"{grown:.0f} MB"
    return outcome, place


def _memory(field: str, reset: bool = False) -> float:
    """Megabytes of the process; 0 where the system does not tell. reset: the most so far becomes what there is now."""
    try:
        if reset:
            Path("/proc/self/clear_refs").write_text("5")
        return int(Path("/proc/self/status").read_text().partition(field)[2].split()[0]) / 1000
    except OSError:
        return 0.0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        "tools.parser_fuzz", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--cases", type=int, default=100_000, metavar="N")
    parser.add_argument("--seed", type=int, default=0, metavar="S")
    parser.add_argument("--first", type=int, default=0, metavar="N", help="the number of the first case")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="write files that failed to this folder")
    parser.add_argument("--here", action="store_true", help="in this process; prints JSON")
    options = parser.parse_args(arguments)
    if options.here:
        print(json.dumps(run(options.cases, options.seed, options.first, options.keep)))
        return 0
    counts: collections.Counter[str] = collections.Counter()
    failures: dict[str, str] = {}
    start, end = time.perf_counter(), options.first + options.cases
    for first in range(options.first, end, _CHUNK):
        cases = min(_CHUNK, end - first)
        command = [sys.executable, "-m", "tools.parser_fuzz", "--here", "--seed", str(options.seed)]
        command += ["--first", str(first), "--cases", str(cases)] + (
            ["--keep", str(options.keep)] if options.keep else []
        )
        try:
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=_CHUNK_SECONDS, check=False)
            end_of_process = f"the process ended with status {done.returncode}" if done.returncode else ""
        except subprocess.TimeoutExpired:
            done, end_of_process = None, f"a case waited, or all took more than {_CHUNK_SECONDS} s"
        if done is None or end_of_process:
            failures[end_of_process] = " ".join(["python", *command[1:]])
            counts["lost"] += cases
            continue
        found = json.loads(done.stdout)
        counts.update(found["counts"])
        failures = found["failures"] | failures
    for failure, repeat in sorted(failures.items()):
        print(f"{failure}\n    {repeat}")
    outcomes = ", ".join(f"{name} {count}" for name, count in sorted(counts.items()))
    print(f"{options.cases} cases, seed {options.seed}, {time.perf_counter() - start:.0f} s: {outcomes}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
