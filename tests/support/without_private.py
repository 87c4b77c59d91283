"""Torch without the private names that `moe_torch` uses, hidden while `moe_torch` takes them.

`pytest -p tests.support.without_private` runs tests so, all names hidden. Torch's own functions keep theirs.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from tests.support.paths import ROOT

_MODULE = "moe_torch.bridge.private"


def load_private() -> Any:
    """The module of the private names, before the rest of the package is imported."""
    spec = importlib.util.spec_from_file_location(_MODULE, ROOT / "moe_torch/bridge/private.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@contextlib.contextmanager
def hidden(paths: Iterable[str]) -> Iterator[None]:
    """Torch has no such names in the block. Left out: what is not there, and what a class or an operator always has."""
    kept: list[tuple[Any, str, Any]] = []
    for path in paths:
        *owners, name = path.split(".")
        owner: Any = torch
        for step in owners:
            owner = getattr(owner, step, None)
        if name in getattr(owner, "__dict__", ()):
            kept.append((owner, name, getattr(owner, name)))
            delattr(owner, name)
    try:
        yield
    finally:
        for owner, name, value in kept:
            setattr(owner, name, value)


def use_without(paths: Iterable[str]) -> None:
    """Let this process's `moe_torch` find no such names."""
    assert "moe_torch" not in sys.modules
    with hidden(paths):
        sys.modules[_MODULE] = load_private()


if any(argument.endswith("without_private") for argument in sys.argv):
    use_without(load_private().NAMES)
