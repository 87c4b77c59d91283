"""Installed packages and GPUs."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import platform
import re
from dataclasses import dataclass
from typing import Any

import moe_core
from moe_core.base import Target
from moe_core.errors import Unsupported
from moe_core.runtime.cuda import cuda_available, cuda_target, driver

#: Distribution -> (module, first supported version, first unsupported one), as in pyproject.toml.
PACKAGES: dict[str, tuple[str, str | None, str | None]] = {
    "numpy": ("numpy", "2", None),
    "ml_dtypes": ("ml_dtypes", "0.5", None),
    "triton": ("triton", "3.6", "3.10"),
    "torch": ("torch", "2.11", None),
    "jax": ("jax", "0.10", None),
    "jaxlib": ("jaxlib", None, None),
    "jax-tvm-ffi": ("jax_tvm_ffi", "0.1.3", None),
    "apache-tvm-ffi": ("tvm_ffi", "0.1", None),
    "flax": ("flax", "0.12.7", None),
    "safetensors": ("safetensors", "0.5", None),
    "transformers": ("transformers", "5.17", None),
    "matplotlib": ("matplotlib", "3.9", None),
}
TUNED_ARCH = 90


@dataclass(frozen=True)
class Package:
    """version: None: not importable here. problem: why it is unsupported, or ""."""

    name: str
    version: str | None
    problem: str = ""


@dataclass(frozen=True)
class Gpu:
    """A CUDA device. target: None: refused, for the reason."""

    index: int
    name: str
    target: Target | None
    refused: str = ""

    def as_dict(self) -> dict[str, Any]:
        target = None if self.target is None else str(self.target)
        return {"index": self.index, "name": self.name, "target": target, "refused": self.refused}


def packages() -> tuple[Package, ...]:
    base = [Package("python", platform.python_version()), Package("moebius", moe_core.__version__)]
    return (*base, *(_package(name) for name in PACKAGES))


def _package(name: str) -> Package:
    module, least, below = PACKAGES[name]
    module_spec = None
    with contextlib.suppress(ModuleNotFoundError):
        module_spec = importlib.util.find_spec(module)
    if module_spec is None:
        return Package(name, None)
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return Package(name, "unknown")
    if least is not None and _release(version) < _release(least):
        return Package(name, version, f"{name} {version} is older than {least}, the oldest that is supported")
    if below is not None and _release(version) >= _release(below):
        return Package(name, version, f"{name} {version} is not supported: it must be below {below}")
    return Package(name, version)


def _release(version: str) -> tuple[int, ...]:
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, match[0].split("."))) if match else ()


def gpus() -> tuple[Gpu, ...]:
    return tuple(_gpu(index) for index in range(driver().device_count)) if cuda_available() else ()


def _gpu(index: int) -> Gpu:
    name = driver().name(index)
    try:
        return Gpu(index, name, cuda_target(index))
    except (Unsupported, RuntimeError) as error:
        return Gpu(index, name, None, str(error))
