"""Installs the corrections into `triton.runtime.interpreter`. Imports Triton."""

from __future__ import annotations

import functools
import inspect
import os
import threading
import types
from collections.abc import Callable, Generator, Sequence
from typing import Any

import numpy as np
import triton.language as tl
from triton.language.extra import libdevice
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

from moe_core.base import dtypes
from moe_core.errors import Unsupported
from moe_core.runtime.interpreter.builder import Builder, numpy_dtype
from moe_core.runtime.interpreter.reductions import Reduction, Scan
from moe_core.runtime.interpreter.semantic import Semantic, block_type_init, tensor_init, with_element_type


class PatchedLanguage:
    """`triton.language`, replaced by NumPy implementations during a turn. Turns may nest; threads take turns."""

    def __init__(self, replace: Callable[[Any], Any], semantic: TritonSemantic) -> None:
        scope = replace(types.FunctionType((lambda: None).__code__, {"tl": tl, "core": tl.core}))
        originals: dict[tuple[int, str], tuple[Any, str, Any]] = {}
        for owner, name, original in scope._changes:
            originals.setdefault((id(owner), name), (owner, name, original))
        self._originals = list(originals.values())
        replaced = [(owner, name, getattr(owner, name)) for owner, name, _ in self._originals]
        self._replacements = [(owner, name, _rebind(value, semantic)) for owner, name, value in replaced]
        self._depth, self._lock = 0, threading.RLock()
        scope.restore()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._start_again)

    def turn(self) -> Generator[None]:
        """A generator that replaces the language when started and restores it when closed.

        No context manager: an interrupt could end its `__enter__` or `__exit__` half way. It cannot hit `close`, the
        `with` of a lock, or between a change of `_depth` and its block.
        """
        with self._lock:
            self._depth += 1
            try:
                if self._depth == 1:
                    _set(self._replacements)
                yield
            finally:
                self._depth -= 1
                if self._depth == 0:
                    _set(self._originals)

    def scope(self, function: Any) -> Any:
        """For Triton's own launches, which end it by `restore`."""
        turn = self.turn()
        try:
            next(turn)
            return types.SimpleNamespace(restore=turn.close)
        except BaseException:
            turn.close()
            raise

    def _start_again(self) -> None:
        """Reset in a child process, where the turns of its parent's threads never end."""
        self._depth, self._lock = 0, threading.RLock()
        _set(self._originals)


def _set(attributes: Sequence[tuple[Any, str, Any]]) -> None:
    for owner, name, value in attributes:
        if value is not interpreter._MISSING:
            setattr(owner, name, value)
        elif name in vars(owner):
            delattr(owner, name)


def _rebind(replacement: Any, semantic: TritonSemantic) -> Any:
    builtin = (getattr(replacement, "__kwdefaults__", None) or {}).get("member")
    if builtin is None:
        return replacement
    function = getattr(builtin, "__wrapped__", builtin)

    def call(*arguments: Any, **keywords: Any) -> Any:
        keywords["_semantic"] = semantic
        return function(*arguments, **keywords)

    return call


def _refuse_libdevice(name: str, function: Any) -> Any:
    """libdevice's stubs would return None."""

    @functools.wraps(function)
    def refuse(*arguments: Any, **keywords: Any) -> Any:
        raise Unsupported(f"libdevice.{name} is not interpreted; write it with triton.language")

    return refuse


# Taken on import, so that `install` can run again after an interrupt.
_patch_language = interpreter._patch_lang


def install() -> PatchedLanguage:
    interpreter.interpreter_builder = Builder()
    # Earlier kernels refer to this object: change it in place.
    interpreter.interpreter_semantic.__class__ = Semantic
    interpreter.interpreter_semantic.builder = interpreter.interpreter_builder
    interpreter._get_np_dtype = numpy_dtype
    interpreter.ReduceOps = Reduction
    interpreter.ScanOps = Scan

    def replace(function: Any) -> Any:
        scope = _patch_language(function)
        scope.set_attr(tl.core.tensor, "__index__", lambda self: int(self.handle.data.item()))
        scope.set_attr(tl.core.dtype, "to_ir", lambda self, builder: self)
        scope.set_attr(tl.core.tensor, "__init__", tensor_init)
        scope.set_attr(tl.core.block_type, "__init__", block_type_init)
        scope.set_attr(tl.core.block_type, "with_element_ty", with_element_type)
        return scope

    language = PatchedLanguage(replace, interpreter.interpreter_semantic)
    interpreter._patch_lang = language.scope
    # A call of another `@triton.jit` function: the language is already replaced.
    interpreter.InterpretedFunction.__call__ = lambda self, *given, **keywords: self.rewrite()(*given, **keywords)
    for name, function in inspect.getmembers(libdevice, inspect.isfunction):
        setattr(libdevice, name, _refuse_libdevice(name, function))
    return language


def is_interpreted(kernel: Any) -> bool:
    return isinstance(kernel, interpreter.InterpretedFunction)


def begin(kernel: Any, grid: tuple[int, int, int]) -> tuple[Callable[..., Any], Callable[[int, int, int], None]]:
    builder = interpreter.interpreter_builder
    builder.set_grid_dim(*grid)
    return kernel.rewrite(), builder.set_grid_idx


def scalar(value: int | float, dtype: str) -> Any:
    data, kind = np.array([value], dtype=dtypes.numpy_dtype(dtype)), getattr(tl, dtype)
    return tl.tensor(interpreter.TensorHandle(data, kind), kind)


def pointer(address: int, dtype: str) -> Any:
    name = "fp8e4nv" if dtype == "float8_e4m3fn" else dtypes.triton_name(dtype)
    kind: Any = tl.str_to_ty("*" + name, None)
    return tl.tensor(interpreter.TensorHandle(np.array([address], dtype=np.uint64), kind), kind)
