"""Ctrl-C, a kill and lack of memory at chosen places of our code, and caches emptied so that all of it runs again."""

from __future__ import annotations

import ctypes
import random
import signal
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from tests.support.paths import ROOT

_OURS = tuple(f"{ROOT}/{name}/" for name in ("moe_core", "moe_torch", "moe_jax"))
#: The files of Triton between a request and the kernel that it keeps on the disk count as ours.
_COMPILES = ("/triton/compiler/compiler.py", "/triton/runtime/cache.py")
#: C functions that end with an error where memory is short.
_ALLOCATES = frozenset((
    "empty", "zeros", "ones", "full", "empty_like", "zeros_like", "empty_strided", "copy", "astype", "clone",
    "contiguous", "matmul", "take", "concatenate", "where", "arange", "argsort", "create_string_buffer",
))  # fmt: skip
#: Asks for the handler of Ctrl-C. Python calls it where it would after a real one: not here, as this is C, but at one
#: of the traced instructions that look for signals. Its arguments, those of a trace function, are ignored.
press_key = ctypes.PYFUNCTYPE(None, ctypes.py_object, ctypes.py_object, ctypes.py_object)(
    ("PyErr_SetInterrupt", ctypes.pythonapi)
)


def is_ours(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(_OURS) or frame.f_code.co_filename.endswith(_COMPILES)


class _Place:
    """The instruction number `place` of the call number `call` of a function of ours, where something shall happen."""

    def __init__(self, call: int, draw: random.Random, action: Callable[..., Any]) -> None:
        self.calls, self._call, self._draw, self._action = 0, call, draw, action
        self._left = 0
        self.reached = False

    def enter(self, frame: FrameType, event: str, argument: Any) -> Any:
        """What `sys.settrace` takes."""
        if not is_ours(frame):
            return None
        self.calls += 1
        if self.calls != self._call:
            return None
        self._left = self._draw.randrange(len(frame.f_code.co_code) // 2)
        frame.f_trace_opcodes = True
        return self._step

    def _step(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "return" and frame.f_back is not None:
            # It had fewer: the next instruction is the caller's.
            frame.f_back.f_trace, frame.f_back.f_trace_opcodes = self._step, True
            self._left = 0
        elif event == "opcode":
            self._left -= 1
        if self._left >= 0:
            return self._step
        self.reached = True
        return self._action


def count_calls(function: Callable[[], Any]) -> int:
    """How many functions of ours a call calls, one after the other."""
    place = _Place(0, random.Random(0), press_key)
    sys.settrace(place.enter)
    try:
        function()
    finally:
        sys.settrace(None)
    return place.calls


def interrupt(
    function: Callable[[], Any], call: int, draw: random.Random, action: Callable[..., Any] = press_key
) -> bool:
    """Call a function, and press Ctrl-C at a drawn instruction of its call number `call` of a function of ours.

    Returns whether that was reached. action: what happens instead.
    """

    def handle(number: int, frame: FrameType | None) -> None:
        sys.settrace(None)
        while frame is not None:
            frame.f_trace = None
            frame = frame.f_back
        raise KeyboardInterrupt

    place, before = _Place(call, draw, action), signal.signal(signal.SIGINT, handle)
    sys.settrace(place.enter)
    try:
        function()
    finally:
        sys.settrace(None)
        signal.signal(signal.SIGINT, before)
    return place.reached


def count_allocations(function: Callable[[], Any]) -> int:
    """How often our functions call one that allocates."""
    return _profile(function, 0, MemoryError)


def fail_allocation(function: Callable[[], Any], number: int, error: type[BaseException] = MemoryError) -> None:
    """Call a function whose allocation of this number, from 1, fails."""
    _profile(function, number, error)


def _profile(function: Callable[[], Any], number: int, error: type[BaseException]) -> int:
    count = 0

    def profile(frame: FrameType, event: str, called: Any) -> None:
        nonlocal count
        if event == "c_call" and called.__name__ in _ALLOCATES and is_ours(frame):
            count += 1
            if count == number:
                raise error("planted: out of memory")

    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count
