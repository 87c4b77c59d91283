"""Files that a page is made of."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from moe_core.base.files import open_regular, path_of
from moe_core.errors import InvalidInput


def kind_of(file: str | Path) -> str:
    """`trace`, `report` or `plans`, by the first bytes."""
    with open_regular(path_of(file)) as opened:
        head = opened.read(64)
    if head[8:9] == b"{":
        return "trace"
    return "report" if b'"tool"' in head else "plans"


def read_json(file: str | Path, what: str) -> Any:
    with open_regular(path_of(file)) as opened:
        try:
            return json.loads(opened.readall())
        except (ValueError, RecursionError) as error:
            raise InvalidInput(f"{file} must be {what}, got other content ({error!s:.120}); write it again") from error


def measured_times(path: str | Path) -> dict[str, list[float]]:
    """Microseconds of kernels by name, in order, from a trace of `torch.profiler` (`export_chrome_trace`)."""
    content = read_json(path, "a trace of torch.profiler's export_chrome_trace")
    events = content.get("traceEvents") if isinstance(content, dict) else None
    times: dict[str, list[float]] = {}
    kernels = [event for event in events or () if isinstance(event, dict) and event.get("cat") == "kernel"]
    for event in sorted(kernels, key=lambda event: event.get("ts", 0)):
        times.setdefault(str(event.get("name")), []).append(float(event.get("dur", 0)))
    if not times:
        raise InvalidInput(f"profile must hold kernels, got none in {str(path)!r}; profile CUDA activities of one call")
    return times
