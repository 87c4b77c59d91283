"""The command `moe-parity`.

Exit status: 0 every engine agrees with the reference on every stage, 1 something differs or was not truly tested, 2 the
comparison could not run.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import math
import platform
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import moe_core
from moe_core.base.dtypes import MATMUL_DTYPES
from moe_core.errors import InvalidInput, Unsupported
from moe_core.parity.builtin_cases import BUILT_IN, Draw, built_in_case
from moe_core.parity.case import Case
from moe_core.parity.checkpoint_case import CheckpointInput, checkpoint_case, print_progress
from moe_core.parity.devices import prefer_interpreter, use_gpu
from moe_core.parity.engines import DEFAULT_ENGINES, REFERENCE, load_engines, registered_engines
from moe_core.parity.gradients import run_gradients
from moe_core.parity.report import NOT_TESTED, CaseReport, untested_engines
from moe_core.parity.run import run_case

AGREE, DIFFER, COULD_NOT_RUN = 0, 1, 2
#: Both dtypes of the built-in cases; of quantised ones, whose weights have no dtype, the first.
_CASE_DTYPES = ("bfloat16", "float32")
#: Built-in cases whose gradients are compared where nobody says which: every gradient there is but that of biases.
_BACKWARD_CASES = ("deepseek_v3",)
#: Distributions whose versions a report names.
_VERSIONED = ("numpy", "ml_dtypes", "triton", "torch", "jax")
#: Stages of one engine that follow each other faster are not told one by one.
_SECONDS_BETWEEN_LINES = 2.0
#: Raised by what a user passes or by what this machine lacks: the message says all there is to say.
_EXPECTED = (InvalidInput, Unsupported, OSError)

_HOW_TO_TEST = "unset TRITON_INTERPRET (or set it to 1) and name other engines than the reference"

_DESCRIPTION = """\
Run one MoE layer through the NumPy reference and other engines, and tell whether, and where first, they differ.
Without a GPU the real kernels run in Triton's interpreter (TRITON_INTERPRET=1 asks for it on any machine).
"""
_EPILOG = "exit status: 0 all agree, 1 a stage differs or an engine was not truly tested, 2 could not run"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "moe-parity", description=_DESCRIPTION, epilog=_EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--case", action="append", metavar="NAME", help="a built-in case (repeatable); default: all")
    source.add_argument("--checkpoint", metavar="DIR", help="a Hugging Face checkpoint directory")
    parser.add_argument("--layer", type=int, metavar="N", help="layer of the checkpoint; default: its first MoE layer")
    parser.add_argument("--hidden-states", metavar="FILE", help=".npy or .safetensors [T, d_model] for --checkpoint")
    parser.add_argument("--tokens", type=int, metavar="T", help="tokens to draw, or to take of --hidden-states")
    parser.add_argument("--seed", type=int, default=0, help="seed of everything drawn; default 0")
    parser.add_argument(
        "--dtype",
        choices=MATMUL_DTYPES,
        help="dtype of input and plain weights; default: bfloat16 and float32 for built-in cases (quantised ones: "
        "bfloat16), as stored for a checkpoint",
    )
    parser.add_argument(
        "--dequantize", action="store_true", help="dequantise the experts of --checkpoint first, for plain products"
    )
    what = "comma-separated; the reference is always what the others are compared with; default: %(default)s"
    parser.add_argument("--engines", default=",".join(DEFAULT_ENGINES), metavar="NAMES", help=what)
    what = f"also compare gradients; default: of {', '.join(_BACKWARD_CASES)} where no case and no checkpoint is named"
    parser.add_argument("--backward", action=argparse.BooleanOptionalAction, help=what)
    parser.add_argument("--json", metavar="PATH", help="also write the report as JSON; - writes it to stdout alone")
    parser.add_argument("--list", action="store_true", help="list the built-in cases and the registered engines")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line, run, print the report; returns the exit status (argparse exits with 2 by itself)."""
    options = _parser().parse_args(arguments)
    if options.list:
        print(_listing())
        return AGREE
    # Whatever reads the JSON from stdout must find nothing else there.
    text_file = sys.stderr if options.json == "-" else sys.stdout
    reports: list[CaseReport] = []
    error = None
    try:
        _check(options)
        for report in _run(options):
            reports.append(report)
            print(report, end="\n\n", file=text_file, flush=True)
        status, conclusion = _conclude(reports)
    except Exception as problem:
        error = str(problem)
        if not isinstance(problem, _EXPECTED):
            traceback.print_exc()
            error = f"{type(problem).__name__}: {problem}"
        status, conclusion = COULD_NOT_RUN, f"could not run: {error}"
    print(f"moe-parity: {conclusion}", file=sys.stderr if error else text_file, flush=True)
    if options.json is not None:
        text = json.dumps(_document(reports, status, conclusion, error), indent=1, allow_nan=False)
        if options.json == "-":
            print(text)
        else:
            Path(options.json).write_text(text + "\n")
    return status


def _check(options: argparse.Namespace) -> None:
    for name in ("layer", "hidden_states", "dequantize"):
        given = getattr(options, name)
        if options.checkpoint is None and given is not None and given is not False:
            flag = "--" + name.replace("_", "-")
            raise InvalidInput(f"{flag} must come with --checkpoint, got it alone; name a checkpoint directory")


def _run(options: argparse.Namespace) -> Iterator[CaseReport]:
    prefer_interpreter()
    names = list(dict.fromkeys(name.strip() for name in options.engines.split(",") if name.strip()))
    if not names:
        raise InvalidInput("engines must name at least one engine, got none; for example --engines reference,torch")
    # Named alone, the reference is compared with itself, which the report then calls not tested.
    engines = load_engines([name for name in names if name != REFERENCE] or [REFERENCE])
    makers = _cases(options)
    for number, (label, make) in enumerate(makers, start=1):
        say = _Progress(f"[{number}/{len(makers)}] {label}")
        say("inputs")
        case = make()
        yield run_case(case, engines, say)
        if _with_backward(options, case):
            say("backward")
            yield run_gradients(case, engines, say)


def _with_backward(options: argparse.Namespace, case: Case) -> bool:
    unasked = options.checkpoint is None and not options.case and case.name in _BACKWARD_CASES
    return unasked if options.backward is None else options.backward


def _cases(options: argparse.Namespace) -> list[tuple[str, Callable[[], Case]]]:
    """(label, maker) of every case: made one at a time, since a layer can be large."""
    if options.checkpoint is not None:
        names = ("checkpoint", "layer", "hidden_states", "tokens", "seed", "dtype", "dequantize")
        source = CheckpointInput(*(getattr(options, name) for name in names))
        return [(str(options.checkpoint), lambda: checkpoint_case(source, print_progress))]
    makers: list[tuple[str, Callable[[], Case]]] = []
    for name in options.case or BUILT_IN:
        quantized = name in BUILT_IN and BUILT_IN[name].scheme is not None
        for dtype in (options.dtype,) if options.dtype else _CASE_DTYPES[: 1 if quantized else None]:
            draw = Draw(dtype, options.seed, options.tokens, use_gpu())
            makers.append((f"{name} {dtype}", lambda name=name, draw=draw: built_in_case(name, draw)))
    return makers


class _Progress:
    """Tells on stderr what begins, with the seconds since the case began: engines always, stages in slow runs."""

    def __init__(self, label: str) -> None:
        self._label, self._start, self._engine, self._told = label, time.monotonic(), "", -math.inf

    def __call__(self, what: str) -> None:
        now = time.monotonic()
        engine = what.partition(":")[0]
        if engine == self._engine and now - self._told < _SECONDS_BETWEEN_LINES:
            return
        self._engine, self._told = engine, now
        print(f"moe-parity: {self._label}: {what} ({now - self._start:.1f} s)", file=sys.stderr, flush=True)


def _conclude(reports: Sequence[CaseReport]) -> tuple[int, str]:
    """(exit status, last line)."""
    failed = [f"{report.case} {report.dtype}" for report in reports if report.differs]
    every = [engine for report in reports for engine in report.reports]
    untested = dict.fromkeys(engine.engine for engine in every if engine.verdict == NOT_TESTED)
    if failed or untested:
        parts = [f"{len(failed)} of {len(reports)} cases DIFFER: {', '.join(failed)}"] if failed else []
        if untested:
            parts.append(f"NOT TESTED: {', '.join(untested)} ran the NumPy reference itself; {_HOW_TO_TEST}")
        return DIFFER, "; ".join(parts)
    idle = untested_engines(reports)
    if idle:
        return COULD_NOT_RUN, f"could not run: {', '.join(idle)} supports none of these cases (see `skipped`)"
    engines = dict.fromkeys(f"{engine.engine} ({engine.device})" for engine in every if engine.tested)
    return AGREE, f"all {len(reports)} cases agree with the reference: {', '.join(engines)}"


def _document(reports: Sequence[CaseReport], status: int, conclusion: str, error: str | None) -> dict[str, Any]:
    return {
        "tool": "moe-parity",
        "format": 1,
        "moebius": moe_core.__version__,
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in _VERSIONED},
        "exit_status": status,
        "conclusion": conclusion,
        "error": error,
        "cases": [report.as_dict() for report in reports],
    }


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _listing() -> str:
    width = max(map(len, BUILT_IN))
    cases = [f"  {name:{width}} {case.description}" for name, case in BUILT_IN.items()]
    engines = [f"  {name:15} {point.value}" for name, point in sorted(registered_engines().items())]
    return "\n".join(["cases:", *cases, "engines:", *engines])
