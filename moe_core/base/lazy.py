"""Modules that are imported by name and not loaded: `keep_unloaded(__name__)` in a package gives `UnloadedModule`s."""

from __future__ import annotations

import importlib.util
import sys


class UnloadedFunction:
    def __init__(self, module: str, name: str) -> None:
        self.__module__, self.__name__ = module, name


class UnloadedModule:
    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __getattr__(self, name: str) -> UnloadedFunction:
        return UnloadedFunction(self.__name__, name)


def keep_unloaded(package: str, suffix: str = "") -> None:
    """Let a package give modules named `*suffix` as `UnloadedModule`s until they are loaded."""

    def attribute(name: str) -> UnloadedModule:
        if name.startswith("_") or not name.endswith(suffix) or not importlib.util.find_spec(f"{package}.{name}"):
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return UnloadedModule(f"{package}.{name}")

    vars(sys.modules[package])["__getattr__"] = attribute
