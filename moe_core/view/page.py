"""One HTML file of a content: style, script and data in it, nothing else."""

from __future__ import annotations

import html
import json
import os
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import moe_core
from moe_core.base.files import path_of, whole_file
from moe_core.errors import InvalidInput
from moe_core.parallel.machine import H200, Machine, machine_of
from moe_core.plan.registry import read_plans
from moe_core.plan.steps import LaunchPlan
from moe_core.trace import RoutingTrace
from moe_core.view.plan import plan_content
from moe_core.view.reading import kind_of, measured_times, read_json
from moe_core.view.trace import join_steps, trace_change, trace_content


def view_page(
    files: Sequence[str | Path],
    *,
    layers_per_step: int | None = None,
    text: Sequence[str] | None = None,
    sizes: tuple[int, int] | None = None,
    machine: str | Path | None = None,
    profile: str | Path | None = None,
) -> str:
    """The page of one or two files of one kind: routing traces, parity reports, or plans.

    Args:
        layers_per_step: MoE layers of the model, where a trace holds several forwards. None: one forward.
        sizes: (d_model, d_ff) of the layers, for bytes and times of placements.
        machine: the path of a record of `moebius-tune --links`. None: an H200.
        profile: a trace of torch.profiler with the plans' launches, for measured times.
    """
    kinds = [kind_of(file) for file in files]
    if not 1 <= len(files) <= 2 or len(set(kinds)) != 1:
        raise InvalidInput(
            f"files must be one file, or two of one kind, got {', '.join(map(str, files))} ({', '.join(kinds)}); view "
            "them one by one"
        )
    chosen = None if machine is None else machine_of(machine)
    of_traces = {"--layers": layers_per_step, "--text": text, "--sizes": sizes}
    options = of_traces | {"--machine": machine, "--profile": profile}
    takes = {"trace": (*of_traces, "--machine"), "report": (), "plans": ("--machine", "--profile")}[kinds[0]]
    for name, value in options.items():
        if value is not None and name not in takes:
            raise InvalidInput(f"{name} must not be given for {kinds[0]}, got {value!r:.80}; leave it out")
    names = [path_of(file).name for file in files]
    if kinds[0] == "trace":
        traces = [RoutingTrace.load(file) for file in files]
        return trace_page(traces, names, layers_per_step=layers_per_step, text=text, sizes=sizes, machine=chosen)
    if kinds[0] == "report":
        return report_page([read_json(file, "a report of moe-parity --json") for file in files], names)
    times = None if profile is None else measured_times(profile)
    return plan_page([read_plans(file) for file in files], names, machine=chosen, measured=times)


def trace_page(
    traces: Sequence[RoutingTrace],
    names: Sequence[str] = ("trace", "other trace"),
    *,
    layers_per_step: int | None = None,
    text: Sequence[str] | None = None,
    sizes: tuple[int, int] | None = None,
    machine: Machine | None = None,
) -> str:
    """The page of one or two routing traces, see `view_page`."""
    if layers_per_step is not None:
        traces = [join_steps(trace, layers_per_step) for trace in traces]
    named = _named("traces", traces, names)
    contents = [trace_content(trace, name, text, sizes, machine or H200) for name, trace in named]
    change = trace_change(*traces) if len(traces) == 2 else None
    return _page("Routing", {"kind": "trace", "traces": contents, "change": change})


def report_page(reports: Sequence[Mapping[str, Any]], names: Sequence[str] = ("report", "other report")) -> str:
    """The page of one or two reports of `moe-parity --json`."""
    named = _named("reports", reports, names)
    for name, report in named:
        if report.get("tool") != "moe-parity" or report.get("format") != 1:
            raise InvalidInput(
                f"{name} must be a report of moe-parity --json, got {str(report)[:80]!r}; write it again"
            )
    return _page("Parity", {"kind": "report", "reports": [{"name": name, "report": report} for name, report in named]})


def plan_page(
    plans: Sequence[Sequence[LaunchPlan]],
    names: Sequence[str] = ("plans", "other plans"),
    *,
    machine: Machine | None = None,
    measured: Mapping[str, list[float]] | None = None,
) -> str:
    """The page of plans, as in `view_page`. measured: microseconds of one call's launches, by kernel function."""
    named = _named("plans", plans, names)
    if measured is not None and len(named) > 1:
        raise InvalidInput("measured must be of one call, got two lists of plans; view the profiled plans alone")
    left = None if measured is None else {name: list(times) for name, times in measured.items()}
    groups = [{"name": name, "plans": [plan_content(plan, machine, left) for plan in group]} for name, group in named]
    return _page("Plans", {"kind": "plans", "groups": groups})


def _named(what: str, things: Sequence[Any], names: Sequence[str]) -> list[tuple[str, Any]]:
    if not 1 <= len(things) <= min(2, len(names)):
        raise InvalidInput(
            f"{what} must be one or two, each with a name, got {len(things)} and {list(names)}; pass two"
        )
    return list(zip(names, things, strict=False))


def write_page(path: str | os.PathLike[str], page: str) -> None:
    with whole_file(path) as partial:
        partial.write_text(page, encoding="utf-8")


def _page(title: str, content: Mapping[str, Any]) -> str:
    parts = resources.files("moe_core.view")
    page, style, script = ((parts / name).read_text("utf-8") for name in ("page.html", "page.css", "page.js"))
    # "</" would end the script element.
    data = json.dumps(content, separators=(",", ":"), allow_nan=False).replace("</", "<\\/")
    fields = {"TITLE": html.escape(title), "VERSION": moe_core.__version__, "STYLE": style, "SCRIPT": script}
    for name, value in fields.items():
        page = page.replace(f"%{name}%", value)
    return page.replace("%DATA%", data)
