"""Run features times features, and write the page: `python -m tools.combinations [--framework torch] [--write]`.

JAX needs four devices of the host: XLA_FLAGS=--xla_force_host_platform_device_count=4.
"""

from __future__ import annotations

import argparse
import importlib
import re
import sys
import time

from tools.combinations import page
from tools.combinations.cover import Row
from tools.combinations.features import WAYS, cover, label, refused, rows


def complaints(framework: str, row: Row, pattern: str | None = None, seed: int = 0) -> list[str]:
    """What is wrong with a row that runs, or that is refused with a text that fits the pattern."""
    ways = importlib.import_module(f"tools.combinations.{framework}_ways")
    try:
        wrong = ways.examine(row, seed=seed)
    except Exception as error:
        if pattern is not None and re.search(pattern, str(error)):
            return []
        raise
    return wrong if pattern is None else [f"not refused by {pattern!r}"]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.combinations", description=__doc__)
    parser.add_argument("--framework", choices=list(WAYS), help="only this one")
    parser.add_argument("--write", action="store_true", help=f"write the tables into {page.PAGE.name}")
    options = parser.parse_args()
    failures = 0
    for framework in [options.framework] if options.framework else WAYS:
        begin, array = time.monotonic(), cover(framework)
        every: list[tuple[Row, str | None]] = [(row, None) for row in rows(framework)]
        tests = len(every)
        every += [(array.plainest(values), pattern) for values, pattern in refused(framework)]
        for row, pattern in every:
            wrong = complaints(framework, row, pattern)
            failures += bool(wrong)
            print(*([f"{framework}, {label(row, framework)}: {wrong}"] if wrong else []), sep="\n", end="")
        seconds = time.monotonic() - begin
        print(f"{framework}: {tests} rows, {len(array.pairs())} pairs, {len(every) - tests} refusals, {seconds:.0f} s")
    if options.write and not failures and not options.framework:
        page.write()
    return min(failures, 1)


if __name__ == "__main__":
    sys.exit(main())
