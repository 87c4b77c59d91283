"""Where a forward's time goes: device time by kernel."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from typing import Any

from benchmarks.timing import KernelSpan


def summarize(replays: Sequence[Sequence[KernelSpan]]) -> dict[str, Any]:
    """{"span_us", "busy_us", "kernels": [{"kernel", "us"}]} of replays of one forward: medians over the replays.

    span: from the first kernel's start to the last one's end; busy: the sum of the kernels' times. One entry per
    launch, in the order of the first replay: both products may be launches of one kernel.
    """
    times: dict[tuple[str, int], list[float]] = {}
    for spans in replays:
        seen: Counter[str] = Counter()
        for span in spans:
            times.setdefault((span.name, seen[span.name]), []).append(span.end - span.start)
            seen[span.name] += 1
    spanned = [max(span.end for span in spans) - min(span.start for span in spans) for spans in replays]
    busy = [sum(span.end - span.start for span in spans) for spans in replays]
    return {
        "span_us": statistics.median(spanned),
        "busy_us": statistics.median(busy),
        "kernels": [{"kernel": name, "us": statistics.median(found)} for (name, _), found in times.items()],
    }


def breakdown_table(row: dict[str, Any]) -> str:
    """The breakdowns of one row of a record as a table."""
    title = f"{row['shape']}, {row['routing']}, {row['tokens']} tokens"
    lines = [f"| {title} | kernel | us | share |", "| --- | --- | --- | --- |"]
    for name, found in row["breakdown"].items():
        for kernel in found["kernels"]:
            label = kernel["kernel"].replace("|", "\\|")
            lines.append(f"| {name} | {label} | {kernel['us']:.1f} | {kernel['us'] / found['span_us']:.0%} |")
        gaps = found["span_us"] - found["busy_us"]
        lines.append(f"| {name} | between kernels | {gaps:.1f} | {gaps / found['span_us']:.0%} |")
    return "\n".join(lines)
