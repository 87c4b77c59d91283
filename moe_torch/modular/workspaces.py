"""Scratch memory of modular kernels."""

from __future__ import annotations

import math
import threading
from typing import Any

import torch

from moe_torch.bridge import eager, private


class _Local(threading.local):
    def __init__(self) -> None:
        self.known: dict[Any, Scratch] = {}


class Workspaces:
    """Scratch tensors that grow and are kept until `clear`, one set per thread, device and stream.

    Several kernels, such as all layers of a model, may share one object, unless one forward begins inside another. In
    grad mode (autograd may save tensors), under `torch.compile` and in CUDA graphs every call gets new tensors.
    """

    def __init__(self) -> None:
        self._local = _Local()

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A dense uninitialised tensor of this shape, valid until the next `take` of the same name."""
        return self.here(device).take(name, shape, dtype)

    def here(self, device: torch.device) -> Scratch:
        """The memory for one forward on a device and the current stream."""
        if torch.compiler.is_compiling() or not eager.plain_thread():
            return Scratch(device, owned=None, plain=False)
        if torch.is_grad_enabled():
            return Scratch(device, owned=None)
        # Tensors of inference mode cannot be written outside.
        key: tuple[Any, ...] = (device, torch.is_inference_mode_enabled())
        if device.type == "cuda":
            if torch.cuda.is_current_stream_capturing():
                return Scratch(device, owned=None)
            key = (*key, private.current_stream(device.index or 0))
        scratch = self._local.known.get(key)
        if scratch is None:
            scratch = self._local.known[key] = Scratch(device, owned={})
        return scratch

    @property
    def nbytes(self) -> int:
        return sum(scratch.nbytes for scratch in self._local.known.values())

    def clear(self) -> None:
        self._local.known.clear()

    def __reduce__(self) -> Any:
        """Scratch is not copied with the module that owns it."""
        return Workspaces, ()


class Scratch:
    """owned: by name, the bytes and the last tensor taken. plain: nothing on this thread watches allocations."""

    def __init__(
        self,
        device: torch.device,
        owned: dict[str, tuple[torch.Tensor, tuple[int, ...], torch.dtype, torch.Tensor]] | None,
        plain: bool = True,
    ) -> None:
        self._device, self._owned, self._plain = device, owned, plain

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """See `Workspaces.take`."""
        if self._owned is None:
            return torch.empty(shape, dtype=dtype, device=self._device)
        stored = self._owned.get(name)
        if stored is not None and stored[1] == shape and stored[2] == dtype:
            return stored[3]
        size, buffer = math.prod(shape) * dtype.itemsize, None if stored is None else stored[0]
        if buffer is None or buffer.numel() < size:
            buffer = torch.empty(size, dtype=torch.uint8, device=self._device)
        tensor = buffer[:size].view(dtype).view(shape)
        self._owned[name] = (buffer, shape, dtype, tensor)
        return tensor

    def new(self, rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
        if self._plain:
            return private.allocator(self._device)((rows, columns), (columns, 1), dtype)
        return torch.empty((rows, columns), dtype=dtype, device=self._device)

    @property
    def nbytes(self) -> int:
        return 0 if self._owned is None else sum(buffer.numel() for buffer, *_ in self._owned.values())
