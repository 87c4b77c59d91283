"""Import tvm_ffi without torch, which takes seconds: it gets a stand-in, until torch itself is imported."""

from __future__ import annotations

import gc
import importlib
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class _Later(type):
    """The metaclass of stand-ins: classes without instances or attributes."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise ImportError(f"torch.{cls.__name__}.{name} needs torch, which is not imported yet; import torch first")


class _Torch(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return vars(self).setdefault(name, _Later(name, (), {}))


class _AfterTorch:
    """A module finder that replaces the stand-in when torch is imported."""

    def __init__(self, stand_in: _Torch) -> None:
        self._stand_in = stand_in

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if name != "torch":
            return None
        finders: list[Any] = [finder for finder in sys.meta_path if finder is not self]
        spec = next((spec for finder in finders if (spec := finder.find_spec(name, path, target))), None)
        loader: Any = None if spec is None else spec.loader
        if loader is not None:
            execute = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                self._replace(module)

            loader.exec_module = exec_module
        return spec

    def _replace(self, torch: ModuleType) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)  # type: ignore[arg-type]
            for name, module in list(sys.modules.items()):
                if name.startswith("tvm_ffi") and vars(module).get("torch") is self._stand_in:
                    vars(module)["torch"] = torch
            for name, key in vars(self._stand_in).items():
                if not isinstance(key, _Later):
                    continue
                # tvm_ffi's C code holds dtype tables in static variables, reached by their contents.
                for table in [table for table in gc.get_referrers(key) if isinstance(table, dict) and key in table]:
                    value = table.pop(key)
                    if hasattr(torch, name):
                        table[getattr(torch, name)] = value
            importlib.reload(importlib.import_module("tvm_ffi._optional_torch_c_dlpack"))


def import_tvm_ffi() -> ModuleType:
    if {"torch", "tvm_ffi"} & set(sys.modules):
        return importlib.import_module("tvm_ffi")
    stand_in = _Torch("torch")
    sys.modules["torch"] = stand_in
    try:
        module = importlib.import_module("tvm_ffi")
    finally:
        del sys.modules["torch"]
    sys.meta_path.insert(0, _AfterTorch(stand_in))  # type: ignore[arg-type]
    return module
