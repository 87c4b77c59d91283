"""Fuzzes ops and layers against an oracle in float64: `python -m tools.fuzz [--cases N] [--seconds S] [--seed SEED]`.

A failure prints one line that repeats it: `python -m tools.fuzz --engines reference --case "kind=moe T=3 ..."`.
Without --engines every engine of the process runs: the reference and the GPU, or under TRITON_INTERPRET=1 the
interpreter. docs/developer/testing.md says what is drawn and how a right answer is told from a wrong one.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys

from tools.fuzz.case import Case, has_any
from tools.fuzz.draw import packed_sets, sets_of
from tools.fuzz.engines import engines
from tools.fuzz.legal import parse
from tools.fuzz.run import examine, fuzz


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.fuzz", description=__doc__)
    parser.add_argument(
        "--cases", type=int, help="how many on each engine; default 1000, or without end with --seconds"
    )
    parser.add_argument("--seconds", type=float, help="stop after so many on each engine")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--engines", help="reference, interpreter, cuda, divided by commas")
    parser.add_argument(
        "--packed", help="FORWARD,GRADIENT: so many small problems, packed; then others while time is left"
    )
    parser.add_argument("--having", help="FIELD,FIELD: of what is drawn, only cases that have one of these options")
    parser.add_argument("--case", help="run this one case, as a failure prints it")
    parser.add_argument("--jobs", type=int, default=1, help="processes that work side by side")
    parser.add_argument("--failures", type=int, default=5, help="stop after so many on each engine")
    parser.add_argument("--keep", action="store_true", help="do not make failing cases smaller")
    options = parser.parse_args(arguments)
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # several processes and torch share a GPU
    chosen = options.engines.split(",") if options.engines else engines()
    if options.case is not None:
        try:
            case = parse(options.case)
        except ValueError as error:
            parser.error(str(error))
        complaints = [f"{name}: {text}" for name in chosen for text in examine(case, name).complaints]
        print("\n".join(complaints) or f"nothing wrong with {case} on {', '.join(chosen)}")
        return int(bool(complaints))
    having = options.having.split(",") if options.having else []
    unknown = [name for name in having if not hasattr(Case, name)]
    if unknown:
        parser.error(f"a case has no field {', '.join(unknown)}")
    count = options.cases or (None if options.seconds else 1000)
    packed = [int(number) for number in options.packed.split(",")] if options.packed else []
    fine = True
    for engine in chosen:
        sets = (drawn for drawn in sets_of(options.seed, engine, count) if has_any(drawn.static, having))
        if packed:  # then others, for as long as there is time
            sets = itertools.chain(packed_sets(options.seed, engine, *packed), sets if options.seconds else ())
        print(f"{engine}, seed {options.seed}", flush=True)
        report = fuzz(sets, engine, options.seconds, options.jobs, not options.keep, options.failures)
        fine = fine and not report.failures
        for wanted, gradient in zip(packed, (False, True), strict=False):
            if report.count(gradient, packed=True) < wanted:
                print(f"{engine}: not all of the {wanted} packed cases {'with' if gradient else 'without'} gradients")
                fine = False
    return int(not fine)


if __name__ == "__main__":
    sys.exit(main())
