"""Arrays of other libraries as torch tensors, without a copy."""

from __future__ import annotations

from typing import Any

import torch

from moe_core.base.dlpack import import_array
from moe_core.errors import InvalidInput

_DLPACK_CUDA = 2


def from_dlpack(exporter: Any) -> torch.Tensor:
    """Return a tensor on the memory of any DLPack exporter (a JAX array, a NumPy array, ...), without a copy.

    Neither side may write to the memory while the other uses it, and never to JAX arrays. No synchronisation is needed:
    the exporter makes torch's current stream wait. For the way back use the other library's function, such as
    `jax.dlpack.from_dlpack(tensor)`.

    dtypes: float32, float16, bfloat16, float64, float8_e4m3fn, integers and bool.

    Raises:
        InvalidInput: other dtypes (pass sub-byte data packed as uint8), NumPy arrays of bfloat16 (NumPy cannot export
            them), negative strides, and tensors that require gradients.
        Unsupported: devices other than CPU and CUDA.
    """
    imported = import_array(exporter, _consumer_stream(exporter))
    # torch ends the process on a negative stride.
    if imported.strides is not None and min(imported.strides, default=0) < 0:
        raise InvalidInput(
            f"exporter must not have negative strides, got {imported.strides}; copy it into a row-major array first"
        )
    return torch.from_dlpack(imported.capsule)


def _consumer_stream(exporter: Any) -> int | None:
    try:
        kind, index = exporter.__dlpack_device__()
    except (AttributeError, BufferError, TypeError, ValueError, RuntimeError):
        return None  # The import asks the same question and reports what is wrong.
    return torch.cuda.current_stream(index).cuda_stream if int(kind) == _DLPACK_CUDA else None
