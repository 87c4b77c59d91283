"""The origin of a table."""

from __future__ import annotations

import importlib.metadata
import os
import pathlib
import platform
import subprocess
import time
from collections.abc import Mapping, Sequence
from typing import Any

import moe_core
from moe_core.errors import InvalidInput
from moe_core.plan.steps import sources_version
from moe_core.runtime.cuda import driver

_SAME = ("gpu", "versions", "commit")


def provenance(
    device_index: int | None, arguments: Sequence[str], packages: Sequence[str] = ("triton",)
) -> dict[str, Any]:
    """GPU, driver, versions, commit, command and date. device_index: None: no GPU was measured."""
    versions = {"moebius": moe_core.__version__, "kernels": sources_version()[:12]}
    versions |= {name: importlib.metadata.version(name) for name in packages}
    versions |= {"python": platform.python_version()}
    version = 0 if device_index is None else driver().number(driver().lib.cuDriverGetVersion, "cuDriverGetVersion")
    return {
        "gpu": f"none, {platform.machine()} CPU" if device_index is None else driver().name(device_index),
        "driver": "none" if device_index is None else f"CUDA {version // 1000}.{version % 1000 // 10}",
        "versions": versions,
        "commit": _commit(),
        "command": " ".join(["moebius-tune", *arguments]),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
    }


def joined(known: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """The provenance of two runs. Raises InvalidInput if they are not comparable."""
    for field in _SAME:
        if known.get(field) != own[field]:
            raise InvalidInput(
                f"{field} of the table to extend must be {own[field]!r}, got {known.get(field)!r}; "
                "write to another file, or measure everything again"
            )
    commands = [*known["command"].split("; "), own["command"]]
    return {**own, "command": "; ".join(dict.fromkeys(commands))}


def _commit() -> str:
    """MOEBIUS_COMMIT (in a copy without repository), or the checkout's."""
    if commit := os.environ.get("MOEBIUS_COMMIT"):
        return commit
    command = ["git", "-C", str(pathlib.Path(moe_core.__file__).parent), "rev-parse", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "none: an installed package"
