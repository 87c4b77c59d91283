"""Mutate the sources and run the related tests: `python -m tools.mutate [--count 500] [--seed 0] [--folders layers]`.

A first run records which tests call which functions. Results go to build/mutate/results-SEED.json and a table; a run
that was cut short goes on where it stopped. What survives and is not listed in tools/mutate/equivalent.toml is printed.
"""

from __future__ import annotations

import argparse
import collections
import json
import math
import os
import pathlib
import shutil
import sys
import tempfile
import time

from tools.mutate import contexts, forks, sources
from tools.mutate.run import Result, Run, draw
from tools.mutate.tree import Tree

FOLDER = sources.ROOT / "build" / "mutate"
#: A folder with this many mutations is judged by itself.
MANY = 50
STATUSES = ("killed", "equivalent", "survived", "uncovered", "unsure")


def share_killed(results: list[Result]) -> float:
    """Of those that change anything."""
    real = [result for result in results if result.status != "equivalent"]
    return sum(result.status == "killed" for result in real) / max(len(real), 1)


def by_folder(results: list[Result]) -> dict[str, list[Result]]:
    return {folder: [r for r in results if r.folder == folder] for folder in sorted({r.folder for r in results})}


def table(results: list[Result]) -> str:
    """A row for each folder, one for all, and the folder with the least share."""
    lines = [
        "| folder | mutants | " + " | ".join(STATUSES) + " | killed of the rest |",
        "|---" * (len(STATUSES) + 3) + "|",
    ]
    rows = by_folder(results)
    for folder, own in {**rows, "all": results}.items():
        counts = collections.Counter(result.status for result in own)
        cells = [folder, str(len(own)), *(str(counts[status]) for status in STATUSES), f"{share_killed(own):.1%}"]
        lines.append("| " + " | ".join(cells) + " |")
    least = min(rows, key=lambda folder: share_killed(rows[folder]), default="all")
    return "\n".join([*lines, f"least: {share_killed(rows.get(least, [])):.1%} in {least}"])


def survivors(results: list[Result]) -> str:
    """Every mutation that no test killed, in the form of tools/mutate/equivalent.toml."""
    left = [result for result in results if result.status in ("survived", "uncovered", "unsure")]
    return "\n".join(
        f"# {r.status}, line {r.line}, {r.operator}: {r.ran} of {r.related} tests ran. {r.by}\n[[mutant]]\n"
        f"function = {json.dumps(r.function)}\nbefore = {json.dumps(r.before, ensure_ascii=False)}\n"
        f"after = {json.dumps(r.after, ensure_ascii=False)}\n"
        for r in sorted(left, key=lambda result: result.function)
    )


def size_of(name: str) -> int:
    return (sources.ROOT / name).stat().st_size


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.mutate", description=__doc__)
    parser.add_argument("--count", type=int, default=500, help="how many mutations, spread evenly over the folders")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folders", nargs="*", default=[], help="only these folders of packages, ops/exchange for one")
    parser.add_argument("--paths", nargs="*", default=[], help="only files whose path begins with one of these")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="how many mutations at a time")
    parser.add_argument("--budget", type=float, default=60, help="at most this many seconds of tests for a mutation")
    parser.add_argument(
        "--least",
        type=float,
        default=0.97,
        help=f"the share that must be killed of all, and of each folder with {MANY} or more; below it the status is 1",
    )
    parser.add_argument(
        "--as-recorded", action="store_true", help="record nothing: only what earlier runs recorded counts"
    )
    parser.add_argument("--tests", nargs="*", default=["tests/"], help="record only test files that begin so")
    parser.add_argument(
        "--seconds", type=float, default=math.inf, help="end after so long, with what there is: recording after half"
    )
    parser.add_argument(
        "--alone", action="store_true", help="each fork imports the frameworks; chosen by itself where forks die"
    )
    parser.add_argument("--again", action="store_true", help="keep no earlier result, only which test killed what")
    options = parser.parse_args()
    known = sources.files(sources.ROOT, (), gpu=True)
    if unknown := sorted(set(options.folders) - set(known)):
        parser.error(f"--folders must be of {', '.join(known)}, got {', '.join(unknown)}")
    begin = time.monotonic()
    FOLDER.mkdir(parents=True, exist_ok=True)
    # Sockets of servers of ranks lie below, and a path of one is short.
    scratch = pathlib.Path(tempfile.mkdtemp(prefix="mutate-"))
    forks.prepare(options.alone)
    slots = [Tree.at(FOLDER / f"trees-{options.seed}" / str(number)).folder for number in range(options.jobs)]

    def say(text: str) -> None:
        print(text, flush=True)

    if not options.alone and forks.die(slots[0], scratch, min(contexts.test_files(), key=size_of)):
        say("forks that have the frameworks imported die here: each imports them itself")
        os.execv(sys.executable, [sys.executable, "-m", "tools.mutate", *sys.argv[1:], "--alone"])
    if not options.as_recorded:
        contexts.record(slots, scratch, FOLDER / "contexts", say, tuple(options.tests), begin + options.seconds / 2)
    gpu = os.environ["TRITON_INTERPRET"] != "1"
    drawn = draw(options.count, options.seed, tuple(options.paths), gpu, tuple(options.folders))
    recorded, store = contexts.load(FOLDER / "contexts"), FOLDER / f"results-{options.seed}.json"
    run = Run(drawn, recorded, store, options.budget, again=options.again)
    run.run(slots, scratch, say, begin + options.seconds)
    shutil.rmtree(scratch, ignore_errors=True)
    results = list(run.results.values())
    print(survivors(results))
    print(table(results))
    judged = [results, *(own for own in by_folder(results).values() if len(own) >= MANY)]
    return 0 if min(map(share_killed, judged)) >= options.least else 1


if __name__ == "__main__":
    sys.exit(main())
