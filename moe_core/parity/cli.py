"""The command `moe-parity`. Exit status: 0 all agree, 1 something differs, 2 not run, or an engine not truly tested."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import platform
import shlex
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import moe_core
from moe_core.base import command, require_at_least, require_choice
from moe_core.base.dtypes import MATMUL_DTYPES
from moe_core.errors import InvalidInput, Unsupported
from moe_core.parity.against import BUILD, LOADS, conclude, draw_problem, run_against
from moe_core.parity.builtin_cases import BUILT_IN, Draw, built_in_case
from moe_core.parity.case import Case
from moe_core.parity.checkpoint_case import CheckpointInput, checkpoint_case, print_progress
from moe_core.parity.devices import has_triton, prefer_interpreter, use_gpu
from moe_core.parity.engines import DEFAULT_ENGINES, REFERENCE, Engine, load_engines, registered_engines
from moe_core.parity.gradients import run_gradients
from moe_core.parity.ranks import run_ranks
from moe_core.parity.report import NOT_TESTED, CaseReport, case_lines, closing_table, untested_engines
from moe_core.parity.run import run_case
from moe_core.view.page import report_page, write_page

AGREE, DIFFER, COULD_NOT_RUN = 0, 1, command.COULD_NOT_RUN
#: Quantised cases take the first dtype.
_CASE_DTYPES = ("bfloat16", "float32")
#: They cover every gradient except biases.
_BACKWARD_CASES = ("deepseek_v3",)
_VERSIONED = ("numpy", "ml_dtypes", "triton", "torch", "jax")
_SECONDS_BETWEEN_LINES = 5.0
_EXPECTED = (InvalidInput, Unsupported, OSError)

_HOW_TO_TEST = "unset TRITON_INTERPRET (or set it to 1) and name other engines than the reference"
_NO_TRITON = "no kernel can run here, because Triton is not installed (it exists for Linux)"
_DEFAULT = ", ".join(name for name in DEFAULT_ENGINES if name != REFERENCE)

_DESCRIPTION = """\
Run one MoE layer through the NumPy reference and other engines, and tell whether, and where first, they differ.
Without a GPU the real kernels run in Triton's interpreter (TRITON_INTERPRET=1 asks for it on any machine).
"""
_EPILOG = "exit status: 0 all agree, 1 a stage differs, 2 could not run, or an engine was not truly tested"


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
    text = f"comma-separated; the reference is always what the others are compared with; default: those of {_DEFAULT} "
    parser.add_argument("--engines", metavar="NAMES", help=f"{text}that are installed")
    text = f"also compare gradients; default: of {', '.join(_BACKWARD_CASES)} where no case and no checkpoint is named"
    parser.add_argument("--backward", action=argparse.BooleanOptionalAction, help=text)
    text = (
        "compare W ranks that share the experts with one device, bit by bit, on this CPU (torch: gloo, JAX: devices of "
    )
    text += "the host), and every gradient too; TRITON_INTERPRET=0 takes the NumPy engine for both sides"
    parser.add_argument("--ranks", type=int, metavar="W", help=text)
    text = f"compare another expert-parallel stack under torchrun: a module or .py file with {BUILD}"
    parser.add_argument("--against", metavar="MODULE", help=f"{text}; --case then names of {', '.join(LOADS)}")
    parser.add_argument("--json", metavar="PATH", help="also write the report as JSON; - writes it to stdout alone")
    parser.add_argument("--html", metavar="PATH", help="also write the report as an HTML page (moebius-view)")
    parser.add_argument("--verbose", action="store_true", help="print every stage of every case, not only of failures")
    text = "list the built-in cases and the registered engines, and which of these cannot start here"
    parser.add_argument("--list", action="store_true", help=text)
    parser.add_argument("--version", action="version", version=f"%(prog)s {moe_core.__version__}")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    return command.run("moe-parity", lambda: _compare(options))


def _compare(options: argparse.Namespace) -> int:
    if options.list:
        print(_listing())
        return AGREE
    write = command.report_writer(options.json)
    if options.html is not None:
        command.require_writable("--html", options.html)
        if options.html == options.json:
            raise InvalidInput(f"--html must be another file than --json, got {options.html} twice; name another")
    # stdout must hold JSON only.
    text_file = sys.stderr if options.json == "-" else sys.stdout
    reports: list[CaseReport] = []
    seconds: list[float] = []
    error = None
    try:
        _check(options)
        total, made, left_out = _against(options) if options.against is not None else _started(options)
        began = time.monotonic()
        for report in made:
            reports.append(report)
            seconds.append(time.monotonic() - began)
            number = f"[{len(reports)}/{total}]"
            text = f"{report}\n" if options.verbose else "\n".join(case_lines(report, number))
            print(text, file=text_file, flush=True)
            began = time.monotonic()
        print("", *closing_table(reports, seconds), "", sep="\n", file=text_file)
        status, conclusion = _conclude_against(reports) if options.against is not None else _conclude(reports)
        conclusion = "; ".join([conclusion, *left_out])
    except Exception as problem:
        error = str(problem)
        if not isinstance(problem, _EXPECTED):
            traceback.print_exc()
            error = f"{type(problem).__name__}: {problem}"
        status, conclusion = COULD_NOT_RUN, f"could not run: {error}"
    print(f"moe-parity: {conclusion}", file=sys.stderr if error else text_file, flush=True)
    document = _document(options, reports, status, conclusion, error)
    write(json.dumps(document, indent=1, allow_nan=False))
    if options.html is not None:
        write_page(options.html, report_page([document], ["moe-parity"]))
    return status


def _started(options: argparse.Namespace) -> tuple[int, Iterator[CaseReport], list[str]]:
    """The number of cases, their reports, and engines that are left out."""
    steps = _steps(options)
    print(f"moe-parity: cases: {len(steps)}; starting {options.engines or _DEFAULT}", file=sys.stderr, flush=True)
    engines, left_out = _engines(options)
    return len(steps), _run(steps, engines, options.ranks), left_out


def _against(options: argparse.Namespace) -> tuple[int, Iterator[CaseReport], list[str]]:
    names = options.case or LOADS
    for name in names:
        require_choice("case", name, tuple(LOADS))
    problems = [
        draw_problem(name, options.ranks, dtype, options.seed, options.tokens)
        for name in names
        for dtype in ((options.dtype,) if options.dtype else _CASE_DTYPES)
    ]
    return len(problems), run_against(options.against, options.ranks, problems, _Progress(options.against)), []


def _conclude_against(reports: Sequence[CaseReport]) -> tuple[int, str]:
    differs, untested, text = conclude(reports)
    return DIFFER if differs else COULD_NOT_RUN if untested else AGREE, text


def _check(options: argparse.Namespace) -> None:
    if options.against is not None:
        for name in ("checkpoint", "engines", "backward"):
            if getattr(options, name) is not None:
                raise InvalidInput(f"--{name} must be left out with --against, got {getattr(options, name)!r}; drop it")
        if options.ranks is None:
            raise InvalidInput("--against must come with --ranks, got it alone; say how many ranks torchrun starts")
    for name in ("layer", "hidden_states", "dequantize"):
        value = getattr(options, name)
        if options.checkpoint is None and value is not None and value is not False:
            flag = "--" + name.replace("_", "-")
            raise InvalidInput(f"{flag} must come with --checkpoint, got it alone; name a checkpoint directory")
    require_at_least("--seed", options.seed, 0)
    if options.ranks is not None:
        require_at_least("--ranks", options.ranks, 1)


def _engines(options: argparse.Namespace) -> tuple[list[Engine], list[str]]:
    prefer_interpreter()
    if options.engines is None:
        # An installed engine that does not start is an error.
        engines, left_out = [], []
        for name in DEFAULT_ENGINES:
            if name == REFERENCE:
                continue
            try:
                engines += load_engines([name])
            except Unsupported as error:
                if (missing := _missing_module(error)) is None:
                    raise
                left_out.append(f"left out: {name}, which needs {missing}: install moebius with its extra `{name}`")
                print(f"moe-parity: {left_out[-1]}", file=sys.stderr, flush=True)
        if not engines:
            raise Unsupported(f"{_DEFAULT} or another engine must be installed, got none; {'; '.join(left_out)}")
        return engines, left_out
    names = list(dict.fromkeys(name.strip() for name in options.engines.split(",") if name.strip()))
    if not names:
        raise InvalidInput("engines must name at least one engine, got none; for example --engines reference,torch")
    # A lone reference is compared with itself: not tested.
    return load_engines([name for name in names if name != REFERENCE] or [REFERENCE]), []


def _missing_module(error: BaseException) -> str | None:
    cause = error.__cause__
    if isinstance(cause, ModuleNotFoundError):
        return None if str(cause.name).startswith("moe_") else cause.name
    return None if cause is None else _missing_module(cause)


@dataclass(frozen=True)
class _Step:
    """make: makes the case at its turn, because a layer can be large. None: the previous case."""

    label: str
    make: Callable[[], Case] | None


def _run(steps: Sequence[_Step], engines: Sequence[Engine], ranks: int | None) -> Iterator[CaseReport]:
    case = None
    for number, step in enumerate(steps, start=1):
        say = _Progress(f"[{number}/{len(steps)}] {step.label}")
        if step.make is not None:
            case = step.make()
            names = [engine.name for engine in engines]
            yield run_case(case, engines, say) if ranks is None else run_ranks(case, ranks, names, say)
        elif case is not None:
            yield run_gradients(case, engines, say)


def _steps(options: argparse.Namespace) -> list[_Step]:
    steps: list[_Step] = []

    def add(name: str, dtype: str, make: Callable[[], Case]) -> None:
        steps.append(_Step(f"{name}{dtype}", make))
        # Across ranks, gradients are stages like others.
        unasked = options.checkpoint is None and not options.case and name in _BACKWARD_CASES
        if options.ranks is None and (unasked if options.backward is None else options.backward):
            steps.append(_Step(f"{name} backward{dtype}", None))

    if options.checkpoint is not None:
        names = ("checkpoint", "layer", "hidden_states", "tokens", "seed", "dtype", "dequantize")
        source = CheckpointInput(*(getattr(options, name) for name in names))
        add(str(options.checkpoint), "", lambda: checkpoint_case(source, print_progress))
        return steps
    for name in options.case or BUILT_IN:
        quantized = name in BUILT_IN and BUILT_IN[name].scheme is not None
        for dtype in (options.dtype,) if options.dtype else _CASE_DTYPES[: 1 if quantized else None]:
            draw = Draw(dtype, options.seed, options.tokens, use_gpu())
            add(name, f" {dtype}", lambda name=name, draw=draw: built_in_case(name, draw))
    return steps


class _Progress:
    def __init__(self, label: str) -> None:
        self._label, self._start = label, time.monotonic()
        self._told = self._start

    def __call__(self, what: str) -> None:
        now = time.monotonic()
        if now - self._told < _SECONDS_BETWEEN_LINES:
            return
        self._told = now
        print(f"moe-parity: {self._label}: {what} ({now - self._start:.1f} s)", file=sys.stderr, flush=True)


def _conclude(reports: Sequence[CaseReport]) -> tuple[int, str]:
    failed = [f"{report.case} {report.dtype}" for report in reports if report.differs]
    every = [engine for report in reports for engine in report.reports]
    untested = dict.fromkeys(engine.engine for engine in every if engine.verdict == NOT_TESTED)
    if failed or untested:
        parts = [f"{len(failed)} of {len(reports)} cases DIFFER: {', '.join(failed)}"] if failed else []
        if untested:
            remedy = _HOW_TO_TEST if has_triton() else _NO_TRITON
            parts.append(f"NOT TESTED: {', '.join(untested)} ran the NumPy reference itself; {remedy}")
        return DIFFER if failed else COULD_NOT_RUN, "; ".join(parts)
    idle = untested_engines(reports)
    if idle:
        return COULD_NOT_RUN, f"could not run: {', '.join(idle)} supports none of these cases (see `skipped`)"
    compared = [report for report in reports if any(engine.tested for engine in report.reports)]
    skipped = [f"{report.case} {report.dtype}" for report in reports if report not in compared]
    agree = f"{len(compared)} {'case agrees' if len(compared) == 1 else 'cases agree'}"
    if len(compared) == len(reports) > 1:
        agree = f"all {agree}"
    rest = f"; {len(skipped)} skipped: {', '.join(skipped)}" if skipped else ""
    against = next(engine.against for engine in every)
    return AGREE, f"{agree} with {against}: {', '.join(_shares(compared))}{rest}"


def _shares(reports: Sequence[CaseReport]) -> Iterator[str]:
    counts = Counter(f"{part.engine} ({part.device}" for case in reports for part in case.reports if part.tested)
    for engine, count in counts.items():
        yield f"{engine})" if count == len(reports) else f"{engine}, {count} of {len(reports)})"


def _document(
    options: argparse.Namespace, reports: Sequence[CaseReport], status: int, conclusion: str, error: str | None
) -> dict[str, Any]:
    return {
        "tool": "moe-parity",
        "format": 1,
        "moebius": moe_core.__version__,
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in _VERSIONED},
        "exit_status": status,
        "conclusion": conclusion,
        "error": error,
        "cases": [report.as_dict() | {"repeat": _repeat(options, report)} for report in reports],
    }


def _repeat(options: argparse.Namespace, report: CaseReport) -> str:
    """The command that runs one case again."""
    words = ["moe-parity"]
    if options.checkpoint is None:
        words += ["--case", report.case]
    for name in ("checkpoint", "layer", "hidden_states", "tokens", "seed", "ranks", "against"):
        value = getattr(options, name)
        if value:
            words += ["--" + name.replace("_", "-"), str(value)]
    if options.dequantize:
        words.append("--dequantize")
    if report.scheme is None and options.checkpoint is None:
        words += ["--dtype", report.dtype]
    if options.backward is not None:
        words.append("--backward" if options.backward else "--no-backward")
    if options.against is not None:
        return shlex.join([*words, "--verbose"])
    engines = dict.fromkeys(one.engine for one in report.reports)
    return shlex.join([*words, "--engines", ",".join([REFERENCE, *engines]), "--verbose"])


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _listing() -> str:
    prefer_interpreter()
    width = max(map(len, BUILT_IN))
    cases = [f"  {name:{width}} {case.description}" for name, case in BUILT_IN.items()]
    engines = [f"  {name:15} {_state(name, point.value)}" for name, point in sorted(registered_engines().items())]
    return "\n".join(["cases:", *cases, "engines:", *engines])


def _state(name: str, place: str) -> str:
    try:
        load_engines([name])
    except Unsupported as error:
        return f"MISSING here: {error.__cause__ or error}"
    return place
