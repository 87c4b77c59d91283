"""A plugin of pytest: `triton_kernels` with the names that our compat has replaced by ours.

References, helpers and whatever else compat does not have stay upstream's own. Without a GPU tests that ask for "cuda"
get the CPU, and those that are too large for it are left out. Tests that differ in tiles alone, which ours ignore, run
once.
"""

from __future__ import annotations

import collections
import enum
import importlib
import os
import pathlib
import re
from types import ModuleType
from typing import Any

import pytest
import torch
import triton
import triton.testing
from torch.overrides import TorchFunctionMode
from triton.language import target_info

from moe_core.errors import Unsupported
from moe_torch.compat import installed
from tools.upstream.refusals import TRITON_KERNELS
from tools.upstream.triton_tests import GENERATION, SHARE

#: Products of a CPU-sized test, fewer for the one with hundreds of cases, and elements of its weights.
_MOST_PRODUCTS, _MOST_WEIGHTS = {"test_op": 2e8}, 1e8
_MOST_SUMMED = 1e6
#: Parameters that choose tiles, and the value that is kept.
_TILES = {"block_m": 16, "is_persistent": False, "fused_scatter": False}


@triton.constexpr_function
def _is_no_target() -> bool:
    return False


def _replace_names() -> None:
    """Import upstream's modules and put our names over theirs, also where their references look them up."""
    # What later releases of Triton have.
    for module, name, value in (
        (target_info, "is_hip_gfx1250", _is_no_target),
        (triton.testing, "cuda_graph_without_gc", torch.cuda.graph),
    ):
        if not hasattr(module, name):
            setattr(module, name, value)
    for path, module in installed.paths(os.environ[GENERATION]).items():
        try:
            theirs = importlib.import_module(f"triton_kernels.{path}")
        except ModuleNotFoundError:
            continue
        ours = vars(importlib.import_module(module))
        for name, value in list(vars(theirs).items()):
            # References stay upstream's, with our members of enumerations as defaults.
            if name.endswith("_torch"):
                value.__defaults__ = tuple(_ours(default, ours) for default in value.__defaults__ or ())
            elif name in ours and not name.startswith("_") and not isinstance(ours[name], ModuleType):
                setattr(theirs, name, ours[name])


def _ours(default: Any, ours: dict[str, Any]) -> Any:
    kind = ours.get(type(default).__name__)
    return kind[default.name] if isinstance(default, enum.Enum) and kind is not None else default


class _OnCpu(TorchFunctionMode):
    """What is asked for on "cuda" is made on the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.histc and not args[0].is_floating_point():
            # Of integers it exists on CUDA alone.
            args = (args[0].double(), *args[1:])
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)


_mode = _OnCpu()


def pytest_configure(config: pytest.Config) -> None:
    _replace_names()
    if not torch.cuda.is_available():
        torch.cuda.get_device_capability = lambda *_: (9, 0)
        _mode.__enter__()


def pytest_unconfigure(config: pytest.Config) -> None:
    if not torch.cuda.is_available():
        _mode.__exit__(None, None, None)


def _left_out(item: pytest.Item) -> bool:
    given = getattr(getattr(item, "callspec", None), "params", {})
    if any(given.get(name, value) != value for name, value in _TILES.items()):
        return True
    if torch.cuda.is_available():
        return False
    if {"B", "M", "N"} <= set(given):
        return given["B"] * given["M"] * given["N"] > _MOST_SUMMED
    if not {"m", "n", "k"} <= set(given):
        return False
    m, n, k = given["m"], given["n"], given["k"]
    experts, chosen = given.get("n_expts_tot", given.get("n_slices", 1)), given.get("n_expts_act", 1)
    rows = m * (experts if given.get("mode") == "batched" else chosen)
    most = _MOST_PRODUCTS.get(getattr(item, "originalname", ""), 6e8)
    return rows * n * max(k, 16) > most or experts * n * k > _MOST_WEIGHTS


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    first, step = map(int, os.environ[SHARE].split("/"))
    kept = [item for item in items if not _left_out(item)][first::step]
    chosen = set(kept)
    left_out = [item for item in items if item not in chosen]
    items[:] = kept
    config.hook.pytest_deselected(items=left_out)


_failures: dict[str, list[str]] = collections.defaultdict(list)
_counts: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
_skipped: collections.Counter[str] = collections.Counter()
#: What tests of Triton 3.8 write ahead of the message of a NotImplementedError, which they skip without its cause.
_SKIP = "inapplicable opt_flags constraint "


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    outcome = yield
    report = outcome.get_result()
    raised = None if call.excinfo is None else call.excinfo.value
    if isinstance(raised, pytest.skip.Exception) and isinstance(raised.__context__, Unsupported):
        # Tests skip what raises NotImplementedError, which ours derives from.
        raised, result = raised.__context__, "refused"
    elif isinstance(raised, pytest.skip.Exception) and str(raised).startswith(_SKIP):
        raised, result = Unsupported(str(raised).removeprefix(_SKIP)), "refused"
    else:
        result = report.outcome
    if report.when == "call" or report.outcome != "passed":
        _counts[item.nodeid.partition("[")[0]][result] += 1
    if result == "skipped" and raised is not None:
        _skipped[str(raised)] += 1
    if raised is None or result not in ("failed", "refused"):
        return
    where = ""
    if isinstance(raised, AssertionError):
        assert call.excinfo is not None
        where = "".join(f" {pathlib.Path(entry.path).name}:{entry.lineno + 1}" for entry in call.excinfo.traceback[-2:])
    # Sizes and numbers differ between tests that fail alike.
    text = re.sub(r"\d+(\.\d+)?(e-?\d+)?", "N", " ".join(str(raised).split()))
    _failures[f"{type(raised).__name__}: {text[:240]}{where}"].append(item.nodeid)


def _reason(text: str) -> str | None:
    """Why tests that fail with a text do so by choice; None where nobody has said it."""
    return next((reason for part, reason in TRITON_KERNELS if part in text), None)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Failures by choice are no failures of the run, and refusals that nobody has documented are."""
    if session.exitstatus in (pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.OK):
        documented = all(map(_reason, _failures))
        session.exitstatus = pytest.ExitCode.OK if documented else pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: Any) -> None:
    terminalreporter.section("by test")
    for name, counts in _counts.items():
        parts = ", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items()))
        terminalreporter.line(f"{name}: {parts}")
    terminalreporter.section("skipped by upstream")
    for text, count in _skipped.most_common():
        terminalreporter.line(f"{count:>4} x {text}")
    terminalreporter.section("failures by what they say")
    for text, names in sorted(_failures.items(), key=lambda entry: -len(entry[1])):
        reason = _reason(text)
        terminalreporter.line(f"{len(names):>4} x {text}")
        terminalreporter.line(f"       {f'by choice: {reason}' if reason else 'NOT DOCUMENTED'}")
        terminalreporter.line(f"       such as {names[len(names) // 2]}")
