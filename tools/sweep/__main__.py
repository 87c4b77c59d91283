"""Sweep over every family of transformers that has experts: `python -m tools.sweep [--only gpt_oss,mixtral] [--write]`.

Each family's tiny random model runs with our experts beside its own, becomes layers by `MoE.from_block`, is saved, read
back and written by us for transformers to load. Anything that runs and gives another result ends the sweep.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import sys

from tools.sweep.measure import measure
from tools.sweep.models import families, quiet
from tools.sweep.page import PAGE, render, write


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.sweep", description=__doc__)
    parser.add_argument("--only", help="only these families, divided by commas")
    parser.add_argument("--write", action="store_true", help=f"write the table into {PAGE.name}")
    options = parser.parse_args()
    if options.write and options.only:
        parser.error("--write must come without --only: the page has every family")
    quiet()
    rows = [measure(family) for family in (options.only.split(",") if options.only else families())]
    version = importlib.metadata.version("transformers")
    print(render(rows, version))
    if options.write:
        write(rows, version)
    return 0


if __name__ == "__main__":
    sys.exit(main())
