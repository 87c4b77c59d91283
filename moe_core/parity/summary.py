"""Lines per case, tables of failures, and one table at the end."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from moe_core.parity.report import CaseReport, Report, StageRow

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
    return f"{report.engine} on {report.device}: {len(report.rows)} stages agree{flips}{near}"


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
