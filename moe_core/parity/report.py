"""Results, as text and for JSON."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from moe_core.formats import Scheme
from moe_core.parity.flips import Flip
from moe_core.parity.tolerance import EXACT, Difference, Tolerance

AGREE, TIE, GIVEN = "agree", "flip (tie within tolerance)", "given"
DIFFER, MISSING, NOT_TESTED, SKIPPED = "differ", "missing", "not tested", "skipped"
PASSING = (AGREE, TIE, GIVEN, SKIPPED)
_FLIPS_SHOWN = 5
_FLIP = ("token", "reference", "candidate", "kind", "margin", "allowed", "verdict", "own_choice")
_HEADER = ("stage", "verdict", "rel. error", "limit", "worst", "limit", "worst element: reference vs candidate", "")


@dataclass(frozen=True)
class StageRow:
    """difference and tolerance: None if nothing was compared."""

    stage: str
    verdict: str
    difference: Difference | None = None
    tolerance: Tolerance | None = None
    note: str = ""

    @property
    def passes(self) -> bool:
        return self.verdict in PASSING

    def cells(self) -> tuple[str, ...]:
        difference, tolerance = self.difference, self.tolerance
        if difference is None or tolerance is None:
            return (self.stage, self.verdict, "", "", "", "", "", self.note)
        limits = (f"{difference.frobenius_limit(tolerance):.1e}", f"{tolerance.worst:.1e}")
        frobenius, largest = ("exact", "exact") if tolerance == EXACT else limits
        worst = ""
        if difference.where is not None and difference.worst:
            worst = f"{list(difference.where)}: {difference.expected:.6g} vs {difference.actual:.6g}"
        numbers = (f"{difference.relative_frobenius:.1e}", frobenius, f"{difference.worst:.1e}", largest)
        return (self.stage, self.verdict, *numbers, worst, self.note)

    def as_dict(self) -> dict[str, Any]:
        difference, tolerance = self.difference, self.tolerance
        numbers: dict[str, Any] = {"relative_error": None, "relative_tolerance": None, "worst": None}
        if difference is not None and tolerance is not None:
            numbers["relative_error"] = _plain(difference.relative_frobenius)
            numbers["relative_tolerance"] = _plain(difference.frobenius_limit(tolerance))
            names = ("index", "reference", "candidate", "error", "tolerance")
            worst = (difference.where, difference.expected, difference.actual, difference.worst, tolerance.worst)
            numbers["worst"] = dict(zip(names, map(_plain, worst), strict=True))
        return {"stage": self.stage, "verdict": self.verdict, **numbers, "note": self.note}


@dataclass(frozen=True)
class Report:
    """A candidate compared with the reference. skipped: why the case was not run, or "". against: the other side."""

    engine: str
    device: str
    rows: tuple[StageRow, ...]
    flips: tuple[Flip, ...] = ()
    skipped: str = ""
    against: str = "the reference"

    @property
    def agrees(self) -> bool:
        return all(row.passes for row in self.rows)

    @property
    def tested(self) -> bool:
        return any(row.verdict not in (GIVEN, SKIPPED, NOT_TESTED) for row in self.rows)

    @property
    def first_divergent(self) -> str | None:
        return next((row.stage for row in self.rows if not row.passes), None)

    @property
    def verdict(self) -> str:
        if self.skipped:
            return SKIPPED
        if self.agrees:
            return AGREE
        return DIFFER if any(row.verdict in (DIFFER, MISSING) for row in self.rows) else NOT_TESTED

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def lines(self) -> Iterator[str]:
        """A table, its verdict last."""
        title = f"{self.engine} on {self.device}" if self.device else self.engine
        if self.skipped:
            yield f"{title}: skipped: {self.skipped}"
            return
        if not self.tested and not self.agrees:
            yield f"{title}: {self.conclusion()}"
            return
        table = [_HEADER, *(row.cells() for row in self.rows)]
        widths = [max(len(line[column]) for line in table) for column in range(len(_HEADER))]
        yield title
        for line in table:
            yield ("  " + "  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True))).rstrip()
        for flip in self.flips[:_FLIPS_SHOWN]:
            yield f"  {flip}"
        if len(self.flips) > _FLIPS_SHOWN:
            yield f"  and {len(self.flips) - _FLIPS_SHOWN} more flipped tokens"
        yield f"  {self.conclusion()}"

    def conclusion(self) -> str:
        """One line: the verdict and the first divergent stage."""
        if self.verdict == NOT_TESTED:
            return f"NOT TESTED: {next(row.note for row in self.rows if row.verdict == NOT_TESTED)}"
        if self.agrees:
            return f"agrees with {self.against} ({len(self.flips)} router flips)"
        return f"DIFFERS: first divergent stage is {self.first_divergent}"

    def as_dict(self) -> dict[str, Any]:
        """The report for JSON. NaN and infinities become strings."""
        return {
            "engine": self.engine,
            "device": self.device,
            "verdict": self.verdict,
            "skipped": self.skipped,
            "first_divergent_stage": self.first_divergent,
            "stages": [{"engine": self.engine, "device": self.device} | row.as_dict() for row in self.rows],
            "flips": [{name: _plain(getattr(flip, name)) for name in _FLIP} for flip in self.flips],
        }


@dataclass(frozen=True)
class BitwiseRow:
    """equal: two engines of one family gave the same bits. None: not compared, see `note`."""

    engines: tuple[str, str]
    device: str
    equal: bool | None
    note: str = ""

    def __str__(self) -> str:
        answer = {True: "yes", False: "NO", None: "not compared"}[self.equal]
        note = f" ({self.note})" if self.note else ""
        return f"{self.engines[0]} and {self.engines[1]} bitwise equal: {answer}{note}"

    def as_dict(self) -> dict[str, Any]:
        return {"engines": list(self.engines), "device": self.device, "equal": self.equal, "note": self.note}


@dataclass(frozen=True)
class CaseReport:
    """All results of one case. scheme: of quantised experts."""

    case: str
    dtype: str
    sizes: dict[str, int]
    description: str
    reports: tuple[Report, ...]
    bitwise: tuple[BitwiseRow, ...] = ()
    scheme: Scheme | None = None

    @property
    def agrees(self) -> bool:
        """Required bits must be equal too."""
        return all(report.agrees for report in self.reports) and all(row.equal is not False for row in self.bitwise)

    @property
    def differs(self) -> bool:
        """Engines that were not tested do not count."""
        bits_differ = any(row.equal is False for row in self.bitwise)
        return bits_differ or any(report.verdict == DIFFER for report in self.reports)

    def __str__(self) -> str:
        sizes = " ".join(f"{letter}={size}" for letter, size in self.sizes.items())
        lines = [f"== {self.case}, {self.dtype}, {sizes}", f"   {self.description}"]
        if self.scheme is not None:
            activations = self.scheme.activations or "as they are"
            lines.append(f"   {self.scheme}: products of weights {self.scheme.weights}, activations {activations}")
        for report in self.reports:
            lines += report.lines()
        lines += [str(row) for row in self.bitwise]
        return "\n".join(lines)

    def as_dict(self) -> dict[str, Any]:
        scheme = self.scheme and {name: part and str(part) for name, part in vars(self.scheme).items()}
        return {
            "case": self.case,
            "dtype": self.dtype,
            "scheme": scheme,
            "sizes": self.sizes,
            "description": self.description,
            "agrees": self.agrees,
            "engines": [report.as_dict() for report in self.reports],
            "bitwise": [row.as_dict() for row in self.bitwise],
        }


def untested_engines(reports: Sequence[CaseReport]) -> tuple[str, ...]:
    """Requested engines that compared nothing on any case."""
    every = [report for case in reports for report in case.reports]
    tested = {report.engine for report in every if report.tested}
    return tuple(dict.fromkeys(report.engine for report in every if report.engine not in tested))


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return list(value)
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


_NO_BITS = "-"
_BITS = {True: "equal", False: "DIFFER", None: "not compared"}


def case_lines(case: CaseReport, number: str) -> Iterator[str]:
    """A line per engine and pair, and whole tables of failing engines."""
    sizes = " ".join(f"{letter}={size}" for letter, size in case.sizes.items())
    yield f"== {number} {case.case}, {case.dtype}, {sizes}"
    for report in case.reports:
        yield from (report.lines() if report.skipped or not report.agrees else [_engine_line(report)])
    yield from (str(row) for row in case.bitwise)


def _engine_line(report: Report) -> str:
    compared = [row for row in report.rows if row.difference is not None]
    flips = f", {len(report.flips)} router flips" if report.flips else ""
    nearest = max(compared, key=_share_of_limit, default=None)
    share = 0.0 if nearest is None else _share_of_limit(nearest)
    near = f"; nearest to its limit: {nearest.stage}, {100 * share:.0f} % of it" if nearest and share else ""
    skipped = [row.stage for row in report.rows if row.verdict == SKIPPED]
    left = f"; skipped: {', '.join(skipped)}" if skipped else ""
    return f"{report.engine} on {report.device}: {len(report.rows) - len(skipped)} stages agree{flips}{near}{left}"


def _share_of_limit(row: StageRow) -> float:
    gap, tolerance = row.difference, row.tolerance
    if gap is None or tolerance is None:
        return 0.0
    pairs = ((gap.relative_frobenius, gap.frobenius_limit(tolerance)), (gap.worst, tolerance.worst))
    return max(error / limit if limit else float(error > 0) for error, limit in pairs)


def closing_table(cases: Sequence[CaseReport], seconds: Sequence[float]) -> Iterator[str]:
    """A row per case: verdicts, equal bits, seconds."""
    engines = list(dict.fromkeys(report.engine for case in cases for report in case.reports))
    table = [("case", "dtype", *engines, "bits", "seconds")]
    for case, duration in zip(cases, seconds, strict=True):
        verdicts = {report.engine: report.verdict for report in case.reports}
        bits = ", ".join(dict.fromkeys(_BITS[row.equal] for row in case.bitwise)) or _NO_BITS
        cells = (verdicts.get(name, _NO_BITS) for name in engines)
        table.append((case.case, case.dtype, *cells, bits, f"{duration:.1f}"))
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
    for row in table:
        yield "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()
