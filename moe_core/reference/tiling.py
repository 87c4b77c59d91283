"""NumPy twin of prepared weights: between the published layout of quantised weights and their tiling, exactly."""

from __future__ import annotations

from typing import Any

import numpy as np

from moe_core import prepared
from moe_core.formats import QuantizedTensor
from moe_core.operands import map_arrays
from moe_core.specs import MoESpec


def _pad(array: np.ndarray, rows: int, columns: int) -> np.ndarray:
    return np.pad(array, [(0, 0)] * (array.ndim - 2) + [(0, rows), (0, columns)])


_NUMPY = prepared.ArrayFunctions(np.transpose, np.stack, _pad)


def tile(tensor: QuantizedTensor, order: str) -> QuantizedTensor:
    """A quantised weight `[..., N, D]` with the arrays of `Tiling(N, D, order)`, row-major; an `in_out` one is
    transposed first.

    One that is tiled so comes back as it is. Raises InvalidInput for formats and sizes that cannot be tiled, and for a
    tensor tiled in another order.
    """
    found = prepared.tile(tensor, order, _NUMPY)
    return found if found is tensor else map_arrays(found, np.ascontiguousarray)


def untile(tensor: QuantizedTensor) -> QuantizedTensor:
    """The inverse of `tile`: row-major arrays in the published layout, `out_in`, without padding. A tensor that is not
    tiled comes back as it is."""
    found = prepared.untile(tensor, _NUMPY)
    return found if found is tensor else map_arrays(found, np.ascontiguousarray)


def prepare_weights(weights: Any, spec: MoESpec | None = None, *, gate_layout: str | None = None) -> Any:
    """`moe_torch.prepare_weights` in NumPy."""
    return prepared.prepare(weights, spec, gate_layout, tile)


def restore_weights(weights: Any) -> Any:
    """`moe_torch.restore_weights` in NumPy."""
    return prepared.restore(weights, untile)
