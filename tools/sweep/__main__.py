"""Sweep over every family of transformers that has experts: `python -m tools.sweep [--only gpt_oss,mixtral] [--recipes]
[--write]`.

Each family's tiny random model runs with our experts beside its own, becomes layers by `MoE.from_block`, is saved, read
back and written by us for transformers to load. Anything that runs and gives another result ends the sweep. --recipes
runs the chains of `tools.sweep.recipes` instead, on the families that people run most.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import itertools
import sys

from tools.sweep.measure import measure
from tools.sweep.models import families, quiet
from tools.sweep.page import PAGE, render, write, write_recipes
from tools.sweep.recipes import FAMILIES, every_case, run


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.sweep", description=__doc__)
    parser.add_argument("--only", help="only these families, divided by commas")
    parser.add_argument("--recipes", action="store_true", help="run chains of calls on the families run most")
    parser.add_argument("--write", action="store_true", help=f"write the table into {PAGE.name}")
    options = parser.parse_args()
    if options.write and options.only:
        parser.error("--write must come without --only: the page has every family")
    quiet()
    if options.recipes:
        reasons = {}
        for case in itertools.chain(*map(every_case, options.only.split(",") if options.only else FAMILIES)):
            reasons[case] = run(case)
            print(*case, reasons[case], flush=True)
        if options.write:
            write_recipes(reasons)
        return 0
    rows = [measure(family) for family in (options.only.split(",") if options.only else families())]
    version = importlib.metadata.version("transformers")
    print(render(rows, version))
    if options.write:
        write(rows, version)
    return 0


if __name__ == "__main__":
    sys.exit(main())
