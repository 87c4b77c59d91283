"""Arrays of other libraries as torch tensors, without a copy."""

from __future__ import annotations

from typing import Any

import torch

from moe_core.base.dlpack import import_array
from moe_core.errors import InvalidInput

_DLPACK_CUDA = 2


def from_dlpack(exporter: Any) -> torch.Tensor:
    """A tensor on the memory of any DLPack exporter (a JAX array, a NumPy array, ...); never a copy.

    Neither side may write to the memory while the other uses it; JAX arrays, which are immutable, must not be written
    to at all. Stream order: torch's current stream is passed to the exporter, which makes it wait for the exporter's
    own work, so no synchronisation is needed. The way back is the other library's own function, as in
    `jax.dlpack.from_dlpack(tensor)`, ordered alike: torch makes the consumer's stream wait.

    Travel: float32, float16, bfloat16, float64, float8_e4m3fn, int64, int32, int8, uint32, uint8 and bool. Raises
    InvalidInput for other dtypes (sub-byte data travels packed as uint8), for NumPy arrays of bfloat16 (NumPy cannot
    export them), negative strides and tensors that require gradients; Unsupported for devices that are neither CPU nor
    CUDA.
    """
    imported = import_array(exporter, _consumer_stream(exporter))
    # torch ends the process on a negative stride instead of raising.
    if imported.strides is not None and min(imported.strides, default=0) < 0:
        raise InvalidInput(
            f"exporter must not have negative strides, got {imported.strides}; copy it into a row-major array first"
        )
    return torch.from_dlpack(imported.capsule)


def _consumer_stream(exporter: Any) -> int | None:
    """The handle of torch's current stream on a CUDA exporter's device; None for what is not on one."""
    try:
        kind, index = exporter.__dlpack_device__()
    except (AttributeError, BufferError, TypeError, ValueError, RuntimeError):
        return None  # The import asks the same question and reports what is wrong.
    return torch.cuda.current_stream(index).cuda_stream if int(kind) == _DLPACK_CUDA else None
