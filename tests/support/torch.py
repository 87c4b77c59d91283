"""What the tests of the torch front-end share: engines, small layers, arrays there and back."""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import torch

import moe_torch
from moe_core.specs.operands import map_arrays
from tests.support.frontends.small import (
    D_FF,
    D_MODEL,
    ENGINES,
    NUM_EXPERTS,
    REAL_KERNELS,
    Layer,
    draw,
    full_layer,
    on_engines,
    small_layer,
)

__all__ = [
    "D_FF", "D_MODEL", "ENGINES", "NUM_EXPERTS", "REAL_KERNELS", "Layer", "draw", "full_layer", "on_engines",
    "small_layer",
]  # fmt: skip


@contextlib.contextmanager
def running_on(engine: str) -> Iterator[torch.device]:
    """The device whose tensors run on this engine."""
    if engine == "cuda":
        yield torch.device("cuda", 0)
    else:
        with moe_torch.cpu_engine(engine):
            yield torch.device("cpu")


def to_torch(tree: Any, device: torch.device | str = "cpu") -> Any:
    """NumPy (or ml_dtypes) arrays, alone or in a bundle, as tensors of their own."""
    if tree is None:
        return None
    if isinstance(tree, np.ndarray):
        tree = np.ascontiguousarray(tree)
        if tree.dtype == ml_dtypes.bfloat16:
            return torch.tensor(tree.view(np.int16), device=device).view(torch.bfloat16)
        return torch.tensor(tree, device=device)
    if isinstance(tree, tuple):
        return tuple(to_torch(item, device) for item in tree)
    return map_arrays(tree, lambda array: to_torch(array, device))


def to_numpy(tensor: torch.Tensor) -> np.ndarray:
    """A tensor as a NumPy (or ml_dtypes) array."""
    tensor = tensor.detach().cpu().contiguous()
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()


def torch_layer(device: torch.device | str = "cpu", **options: Any) -> Layer:
    """`small_layer` as tensors."""
    layer = small_layer(**options)
    return Layer(*to_torch(tuple(layer[:3]), device), layer.spec)


def require_equal(first: Any, second: Any, label: str) -> None:
    """Raise AssertionError unless two tensors, or tuples of tensors and None, have equal shapes, dtypes and bits."""
    if isinstance(first, tuple):
        assert len(first) == len(second), label
        for number, (one, other) in enumerate(zip(first, second, strict=True)):
            require_equal(one, other, f"{label}[{number}]")
        return
    assert (first is None) == (second is None), label
    if first is not None:
        assert (first.dtype, first.shape) == (second.dtype, second.shape), f"{label}: {first.dtype} {second.dtype}"
        same = torch.equal(first.contiguous().view(torch.uint8), second.contiguous().view(torch.uint8))
        assert same, f"{label} differs:\n{first}\n{second}"


TOKEN_COUNTS = (5, 9, 6, 33)


def mapped(path: pathlib.Path, tensor: Any, offset: int = 2) -> Any:
    """The tensor in a private mapping of a file, behind so many elements, where safetensors might leave it."""
    path.write_bytes(bytes((tensor.numel() + offset) * tensor.element_size()))
    storage = torch.from_file(str(path), shared=False, size=tensor.numel() + offset, dtype=tensor.dtype)
    return storage[offset:].view(tensor.shape).copy_(tensor.detach())


def in_flat_buffer(module: Any, offset: int = 1) -> Any:
    """Move a module's parameters into one buffer, as training engines do, and return it."""
    parameters = list(module.parameters())
    flat = torch.zeros(offset + sum(one.numel() for one in parameters), dtype=parameters[0].dtype)
    for one in parameters:
        view = flat[offset : offset + one.numel()].view(one.shape)
        one.data, offset = view.copy_(one.detach()), offset + one.numel()
    return flat
