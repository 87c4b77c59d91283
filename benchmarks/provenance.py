"""What a recorded figure must carry."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import sys
import time
from typing import Any

from moe_core import __version__
from moe_core.runtime.cuda import cuda_available, driver

_PACKAGES = ("torch", "jax", "jaxlib", "jax-tvm-ffi", "apache-tvm-ffi", "triton", "numpy", "transformers", "tokamax")


def provenance(module: str) -> dict[str, Any]:
    """Device, driver, versions, commit, command and date. module: the benchmark, as `benchmarks.forward`.

    The commit is MOEBIUS_COMMIT where it is set (a copy without its repository), else that of the checkout.
    """
    command = ["git", "rev-parse", "HEAD"]
    commit = os.environ.get("MOEBIUS_COMMIT")
    if commit is None:
        commit = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    return {
        "device": driver().name(0) if cuda_available() else platform.processor() or platform.machine(),
        "driver": _driver_version(),
        "versions": {"python": platform.python_version(), "moebius": __version__, **_versions()},
        "commit": commit,
        "command": " ".join(["python -m", module, *sys.argv[1:]]),
        "date": time.strftime("%Y-%m-%d"),
    }


def _versions() -> dict[str, str]:
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def _driver_version() -> str:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
    try:
        return subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "none"
