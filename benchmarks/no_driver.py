"""CPU tensors in place of a GPU's, and a driver whose functions return at once: the host's own part of a call."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from moe_core.base.recent import forget_plans
from moe_core.base.target import Target
from moe_core.runtime import cuda, devices
from moe_core.runtime.cuda import CudaPrepared, Driver
from moe_torch.bridge import operator, private, seen

_TARGET = Target("cuda", 90, 132)


class IdleDriver(Driver):
    """No context is current, and none is a device's; nothing is loaded. Launches cost what calling C costs."""

    def __init__(self) -> None:
        # Takes any arguments and returns 0, rounding to nearest.
        self.launch = ctypes.CDLL("libm.so.6").fegetround
        self.get_context = ctypes.PyDLL("libm.so.6").fegetround

    def context(self, device_index: int) -> ctypes.c_void_p:
        return ctypes.c_void_p()

    def load(self, cubin: bytes, function_name: str, shared_bytes: int, device_index: int) -> ctypes.c_void_p:
        return ctypes.c_void_p()


@contextlib.contextmanager
def no_driver() -> Iterator[None]:
    """Inside of the block, whole forwards of CPU tensors launch an H200's plans, which compute nothing."""
    driver, ready = IdleDriver(), operator.Ready
    compiled = SimpleNamespace(metadata=SimpleNamespace(name="", shared=0, num_warps=4), asm={"cubin": b""})

    def ready_on_gpu(*fields: Any) -> Any:
        return dataclasses.replace(ready(*fields), device=torch.device("cuda", 0))

    with (
        mock.patch.dict(devices.BACKENDS, cpu=devices.Backend(lambda index: _TARGET, CudaPrepared)),
        mock.patch.multiple(cuda, driver=lambda: driver, cuda_target=lambda index: _TARGET),
        mock.patch.multiple(cuda, compile_launch=lambda *_: compiled, _load=lambda *_: (ctypes.c_void_p(), 0, 4)),
        mock.patch.multiple(private, _empty_cuda=private._empty_cpu, _current_device=int, current_stream=(0).__and__),
        mock.patch.object(operator, "Ready", ready_on_gpu),
        # CPU tensors have an engine, which a GPU's have not.
        mock.patch.object(seen, "cpu_target", lambda: None),
    ):
        try:
            forget_plans()
            yield
        finally:
            forget_plans()
