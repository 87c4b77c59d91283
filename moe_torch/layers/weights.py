"""A layer's parameters and the canonical NumPy form, bit by bit."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import ml_dtypes
import numpy as np
import torch

from moe_core.base import dtypes
from moe_core.base.arrays import ALIGNMENT, TensorView, host_array
from moe_core.errors import InvalidInput, Unsupported
from moe_core.layers import FREE_FIELDS, HUGGING_FACE, LayerWeights, MoELayerSpec, Storage, placements
from moe_core.layers.convert import WHOLE
from moe_core.parallel.tensor import Cut
from moe_torch.bridge.arrays import require_plain
from moe_torch.bridge.options import DTYPE_NAMES, TORCH_DTYPES
from moe_torch.layers.shards import Own, is_shared_out, own_of, shared_like

#: Dtypes passed as bits: (NumPy's dtype, the bits, torch's dtype).
_BY_BITS: tuple[tuple[Any, Any, torch.dtype], ...] = (
    (ml_dtypes.bfloat16, np.int16, torch.bfloat16),
    (ml_dtypes.float8_e4m3fn, np.uint8, torch.float8_e4m3fn),
)


def from_numpy(array: np.ndarray) -> torch.Tensor:
    """Return a tensor on an array's memory, also of bfloat16, fp8 and read-only ones, which must stay unwritten."""
    if not (array.flags.writeable and array.dtype.isnative):
        view = TensorView.from_numpy(array)
        array = host_array(view.pointer, view.spec, owner=array)
    for numpy_dtype, bits, dtype in _BY_BITS:
        if array.dtype == numpy_dtype:
            return torch.from_numpy(array.view(bits)).view(dtype)
    return torch.from_numpy(array)


def to_numpy(tensor: torch.Tensor) -> np.ndarray:
    """Return a row-major NumPy array (ml_dtypes for bfloat16 and fp8). On a CPU it shares the memory."""
    tensor = tensor.detach().cpu().contiguous()
    for numpy_dtype, bits, dtype in _BY_BITS:
        if tensor.dtype == dtype:
            return tensor.view(torch.from_numpy(np.empty(0, bits)).dtype).numpy().view(numpy_dtype)
    return tensor.numpy()


def require_same_layer(spec: MoELayerSpec, weights: LayerWeights) -> None:
    """Raise InvalidInput with the first field that differs from `spec`."""
    expected, stored = (one.stored_as(HUGGING_FACE) for one in (spec, weights.layer_spec()))
    stored = dataclasses.replace(stored, **{name: getattr(expected, name) for name in FREE_FIELDS})
    scheme = expected.experts.scheme
    if scheme is not None and stored.experts.scheme is not None and stored.experts.scheme.weights == scheme.weights:
        # The layer also decides how rows are quantised.
        stored = dataclasses.replace(stored, experts=dataclasses.replace(stored.experts, scheme=scheme))
    for field in dataclasses.fields(MoELayerSpec):
        mine, theirs = getattr(expected, field.name), getattr(stored, field.name)
        if mine != theirs:
            raise InvalidInput(
                f"weights must be of this layer, whose {field.name} is {mine}, got {theirs}; make the layer with "
                "MoE.from_weights(weights)"
            )


def unmerged(part: torch.nn.Module) -> bool:
    """Return True if adapters of PEFT change what the part's arrays give."""
    tuned: list[Any] = [module for module in part.modules() if hasattr(module, "merged")]
    return any(one.active_adapters and not (one.merged or one.disable_adapters) for one in tuned)


def copy_weights(weights: LayerWeights, tensors: Mapping[str, torch.Tensor], storage: Storage) -> None:
    parts = list(placements(weights, storage))
    for name, _, array in parts:
        _require_writable(name, array, tensors[name])
    with torch.no_grad():
        for name, place, array in parts:
            part = own_of(tensors[name])
            array = array if part.experts is None else array[part.experts]
            for target, source in _slices(part, place, array.shape):
                part.local[target].copy_(from_numpy(array[source]))


def _slices(own: Own, place: Any, shape: tuple[int, ...]) -> Iterator[tuple[Any, Any]]:
    """(index in a rank's part, part of an array) of one placement of whole experts."""
    cut, size = own.cut, own.split.size
    if cut is None:
        yield place, ...
    elif place == WHOLE:
        for number, taken in enumerate(cut.slices(shape[cut.axis], own.split)):
            each = taken.stop - taken.start
            yield cut.index(slice(number * each, (number + 1) * each)), cut.index(taken)
    else:
        columns = place[cut.axis]
        if columns.step is None:
            start, stop = (None if end is None else end // size for end in (columns.start, columns.stop))
            columns = slice(start, stop)
        (taken,) = Cut(cut.axis).slices(shape[cut.axis], own.split)
        yield cut.index(columns), cut.index(taken)


def _require_writable(name: str, array: np.ndarray, tensor: torch.Tensor) -> None:
    if tensor.is_meta:
        raise InvalidInput(f"{name} must have memory, got a meta tensor; call to_empty(device=...) on the layer first")
    if not is_shared_out(tensor) or (hasattr(tensor, "placements") and not name.startswith("experts.")):
        raise Unsupported(
            f"{name} is a sharded DTensor, and whole arrays cannot be written into it; load the weights before sharding"
        )
    dtype, stored = dtypes.canonical(array.dtype), DTYPE_NAMES[tensor.dtype]
    if dtype != stored and stored != "float32":
        raise InvalidInput(
            f"{name} must be {stored}, got {dtype}, which would be rounded; make the layer with "
            "MoE.from_weights(weights) or cast the array yourself"
        )


def placed_tensors(
    weights: LayerWeights, device: torch.device | str | None, copy: bool
) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor on the device) of every array: a copy, or if possible its memory."""
    for name, array in weights.named().items():
        target = torch.empty(array.shape, dtype=TORCH_DTYPES[dtypes.canonical(array.dtype)], device=device)
        usable = array.flags.writeable and array.ctypes.data % ALIGNMENT == 0
        if not copy and usable and target.device.type == "cpu":
            yield name, from_numpy(array)
        else:
            yield name, target.copy_(from_numpy(array))


def hold(layer: torch.nn.Module, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    for name, tensor in tensors:
        path, _, field = name.rpartition(".")
        group = layer.get_submodule(path)
        if field not in group._buffers and not isinstance(tensor, torch.nn.Parameter):
            tensor = torch.nn.Parameter(tensor, requires_grad=group.get_parameter(field).requires_grad)
        setattr(group, field, tensor)


def gathered(name: str, tensor: Any) -> np.ndarray:
    """A NumPy array of a parameter or buffer. A collective for a DTensor."""
    if tensor.is_meta:
        raise InvalidInput(f"{name} must have memory, got a meta tensor; call to_empty(device=...) on the layer first")
    if hasattr(tensor, "device_mesh") and tensor.dtype.itemsize == 1:
        # Bytes: not every backend moves 8-bit floats.
        local = tensor.to_local()
        return to_numpy(shared_like(tensor, local.view(torch.uint8)).full_tensor().view(tensor.dtype))
    if hasattr(tensor, "full_tensor"):
        return to_numpy(tensor.full_tensor())
    require_plain(name, tensor)
    return to_numpy(tensor)
