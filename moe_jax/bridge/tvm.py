"""tvm_ffi, imported without torch where nobody has imported torch yet.

tvm_ffi imports torch wherever it is installed, which takes seconds and 200 MB, to accept torch's tensors, dtypes and
streams in functions that nothing here calls. It gets a stand-in instead, of which nothing is an instance. When somebody
imports torch, the stand-in is replaced, and tvm_ffi then does with torch what it would have done at once.
"""

from __future__ import annotations

import gc
import importlib
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class _Later(type):
    """The metaclass of what stands for the attributes of torch: classes without instances, and without attributes."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise ImportError(f"torch.{cls.__name__}.{name} needs torch, which is not imported yet; import torch first")


class _Torch(ModuleType):
    """What tvm_ffi takes for torch."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return vars(self).setdefault(name, _Later(name, (), {}))


class _AfterTorch:
    """A finder of modules that sees torch being imported, and then replaces the stand-in."""

    def __init__(self, stand_in: _Torch) -> None:
        self._stand_in = stand_in

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if name != "torch":
            return None
        finders: list[Any] = [finder for finder in sys.meta_path if finder is not self]
        spec = next((found for finder in finders if (found := finder.find_spec(name, path, target))), None)
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
                # Tables of dtypes are static variables of tvm_ffi's C code: reached by what was put into them.
                for table in [table for table in gc.get_referrers(key) if isinstance(table, dict) and key in table]:
                    value = table.pop(key)
                    if hasattr(torch, name):
                        table[getattr(torch, name)] = value
            importlib.reload(importlib.import_module("tvm_ffi._optional_torch_c_dlpack"))


def import_tvm_ffi() -> ModuleType:
    """tvm_ffi. Raises ModuleNotFoundError where it is not installed."""
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
