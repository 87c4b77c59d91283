"""Scratch memory of modular kernels, owned and used again."""

from __future__ import annotations

import math
import threading
from typing import Any

import torch

from moe_torch import eager


class Workspaces:
    """Scratch tensors that grow and are kept until `clear`, one set per thread, device and stream.

    Several kernels may share one object, all the layers of a model for example: a stream runs one forward after the
    other, and what a forward leaves behind nobody reads. One forward must not begin inside another one that uses the
    same object.

    Memory is owned outside of grad mode only. With gradients, autograd may keep what lies in it; under `torch.compile`
    the compiler plans memory; while a CUDA graph is captured, memory must come from the graph's own pool, which lives
    as long as the graph. There every call gets new tensors from torch's allocator.
    """

    def __init__(self) -> None:
        self._local = threading.local()

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """A dense tensor of that shape, its values anything; valid until the next `take` of the same name."""
        if torch.compiler.is_compiling() or torch.is_grad_enabled() or not eager.plain_thread():
            return torch.empty(shape, dtype=dtype, device=device)
        # Tensors of inference mode cannot be written outside of it.
        key: tuple[Any, ...] = (name, device, torch.is_inference_mode_enabled())
        if device.type == "cuda":
            if torch.cuda.is_current_stream_capturing():
                return torch.empty(shape, dtype=dtype, device=device)
            key = (*key, eager.current_stream(device.index or 0))
        taken = self._taken()
        found = taken.get(key)
        if found is not None:
            buffer, known_shape, known_dtype, tensor = found
            if known_shape == shape and known_dtype == dtype:
                return tensor
        else:
            buffer = None
        size = math.prod(shape) * dtype.itemsize
        if buffer is None or buffer.numel() < size:
            buffer = torch.empty(size, dtype=torch.uint8, device=device)
        tensor = buffer[:size].view(dtype).view(shape)
        taken[key] = (buffer, shape, dtype, tensor)
        return tensor

    @property
    def nbytes(self) -> int:
        """Bytes that this thread owns."""
        return sum(buffer.numel() for buffer, *_ in self._taken().values())

    def clear(self) -> None:
        """Give back what this thread owns."""
        self._taken().clear()

    def _taken(self) -> dict[Any, tuple[torch.Tensor, tuple[int, ...], torch.dtype, torch.Tensor]]:
        """By name, device and stream: the bytes, and as what they were taken last."""
        if not hasattr(self._local, "taken"):
            self._local.taken = {}
        return self._local.taken

    def __deepcopy__(self, memo: Any) -> Workspaces:
        """Scratch is not copied with the module that owns it."""
        return Workspaces()

    def __reduce__(self) -> Any:
        return Workspaces, ()
