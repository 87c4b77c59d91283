"""Arrays of other libraries as JAX arrays, without a copy."""

from __future__ import annotations

from typing import Any

import jax

from moe_core.errors import InvalidInput, Unsupported

_FIX = "pass a dense, row-major, writable array of a dtype that both sides have, or copy it with jax.numpy.array"


def from_dlpack(exporter: Any) -> jax.Array:
    """A JAX array on the memory of any DLPack exporter (a torch tensor, a NumPy array, ...), never a copy.

    Neither side may write to the memory afterwards. Finish writing on the exporter's current stream: JAX's stream waits
    for it. The other library's `from_dlpack(jax_array)` goes back in the same way.

    Raises InvalidInput for a 64-bit dtype while `jax_enable_x64` is off, dtypes that either side lacks, strided or
    transposed arrays, tensors that require gradients, CPU memory not aligned to 64 bytes, and Unsupported for a
    platform that JAX does not have here.
    """
    kind = f"{type(exporter).__module__}.{type(exporter).__qualname__}"
    if not hasattr(exporter, "__dlpack__") or not hasattr(exporter, "__dlpack_device__"):
        raise InvalidInput(f"exporter must have __dlpack__ and __dlpack_device__, got {kind}; use jax.numpy.asarray")
    if getattr(exporter, "requires_grad", False):
        raise InvalidInput(f"exporter must not require gradients, got {kind} that does; pass exporter.detach()")
    try:
        # JAX then converts nothing, and the check below sees the dtype.
        with jax.enable_x64(True):
            array = jax.dlpack.from_dlpack(exporter, copy=False)
    except jax.errors.JaxRuntimeError as error:
        raise InvalidInput(f"exporter must be row-major contiguous, got {kind}: {error}; {_FIX}") from error
    except RuntimeError as error:
        raise Unsupported(
            f"exporter's device has no JAX platform in this process: {error}; move it to the CPU"
        ) from error
    except (BufferError, TypeError, ValueError) as error:
        raise InvalidInput(f"exporter cannot travel as it is, got {kind}: {error}; {_FIX}") from error
    if jax.dtypes.canonicalize_dtype(array.dtype) != array.dtype:
        raise InvalidInput(
            f"exporter must have a dtype that JAX keeps, got {array.dtype} while jax_enable_x64 is off; "
            f"convert it to {jax.dtypes.canonicalize_dtype(array.dtype)} first"
        )
    layout: Any = array.format.layout  # type: ignore[attr-defined]
    axes = [axis for axis in layout.major_to_minor if array.shape[axis] > 1]
    if axes != sorted(axes):
        raise InvalidInput(f"exporter must be row-major contiguous, got a transposed {kind}; make it contiguous first")
    return array
