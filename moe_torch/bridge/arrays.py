"""ArraySpecs and targets of tensors."""

from __future__ import annotations

import mmap
from typing import Any

import torch

from moe_core.base.arrays import ALIGNMENT, ArraySpec
from moe_core.base.target import Target
from moe_core.errors import InvalidInput, Unsupported
from moe_core.formats import QuantizedTensor
from moe_core.runtime.devices import target_of
from moe_torch.bridge.options import DTYPE_NAMES, TORCH_DTYPES, constant_result
from moe_torch.bridge.private import plain_tensor

MAKE_MEMORY = (
    "call to_empty(device=...) on the module that holds it, then load or initialise its values (offloaded by "
    "accelerate: preload_module_classes=['MoE'])"
)


def require_dense(name: str, tensor: Any) -> None:
    """Raise InvalidInput unless it is a dense tensor."""
    if not isinstance(tensor, torch.Tensor):
        fix = "dequantize" if isinstance(tensor, QuantizedTensor) else "from_dlpack"
        raise InvalidInput(
            f"{name} must be a torch.Tensor, got {type(tensor).__name__}; convert it with moe_torch.{fix}"
        )
    if tensor.is_nested:
        raise InvalidInput(
            f"{name} must be one dense tensor, got a nested tensor; call .to_padded_tensor(0) or pass its .values()"
        )
    if tensor.layout != torch.strided:
        raise InvalidInput(f"{name} must be a dense tensor, got layout {tensor.layout}; call to_dense() on it")


def array_spec(name: str, tensor: Any) -> ArraySpec:
    """Return the spec of a tensor, with hints for symbolic sizes. Raises InvalidInput unless it is a dense tensor."""
    require_dense(name, tensor)
    if tensor.dtype not in DTYPE_NAMES:
        raise InvalidInput(f"{name} must have a dtype among {', '.join(TORCH_DTYPES)}, got {tensor.dtype}; cast it")
    sizes, strides = [_hint(size) for size in tensor.shape], [_hint(step) for step in tensor.stride()]
    return ArraySpec(tuple(sizes), DTYPE_NAMES[tensor.dtype], tuple(strides))


def require_same_device(name: str, tensor: torch.Tensor, first: str, one: torch.Tensor) -> None:
    """Raise InvalidInput unless a tensor is on the device of the first one."""
    if tensor.device != one.device:
        fix = f"move it with .to({str(one.device)!r})" if tensor.device.type != "meta" else MAKE_MEMORY
        raise InvalidInput(f"{name} must be on {one.device} like {first}, got {tensor.device}; {fix}")


def require_memory(name: str, tensor: torch.Tensor) -> None:
    """An emptied storage would crash torch's own operations."""
    if plain_tensor(tensor) and tensor.numel() and not tensor.data_ptr():
        raise InvalidInput(
            f"{name} must have memory for {array_spec(name, tensor)}, got a null address, as of a storage emptied by "
            "resize_(0); allocate it again before the call"
        )


@constant_result
def _package(kind: type) -> str:
    return kind.__module__.partition(".")[0]


def package_of(tensor: torch.Tensor) -> str:
    """The package of the tensor's class: `torch`, or that of a subclass with arithmetic of its own."""
    return _package(type(tensor))


def require_plain(name: str, tensor: torch.Tensor) -> None:
    """Raise Unsupported for a subclass with arithmetic of its own, such as torchao's quantised tensors."""
    kind = type(tensor)
    if package_of(tensor) != "torch":
        raise Unsupported(
            f"{name} must be a plain tensor, got {kind.__module__}.{kind.__qualname__}; leave it out where the model "
            "is quantised (filter_fn of torchao's quantize_), or run a model's experts by moe_torch.transformers.use"
        )


def align(name: str, tensor: torch.Tensor) -> bool:
    """Copy a parameter with an address that kernels do not take, and return True if so. It stays the same object.
    Raises InvalidInput for a part of a larger storage that is no mapped file, as of an engine with a flat buffer.
    """
    if tensor.data_ptr() % ALIGNMENT == 0:
        return False
    storage = tensor.untyped_storage()
    if storage.nbytes() > tensor.numel() * tensor.element_size() and not _is_file(tensor):
        raise InvalidInput(
            f"{name} must start at a multiple of {ALIGNMENT} bytes, got a view of {storage.nbytes()} bytes that starts "
            f"at {tensor.storage_offset()} elements, and that a copy would leave; pad the buffer that holds it, or "
            "clone() it before the buffer's owner takes it"
        )
    tensor.data = tensor.data.clone()
    return True


def _is_file(tensor: torch.Tensor) -> bool:
    """Return True if a tensor's memory is a file mapped for this process alone, as safetensors does."""
    address = tensor.data_ptr()
    try:
        with open("/proc/self/maps", encoding="utf-8", errors="replace") as file:
            lines = [line.split(maxsplit=5) for line in file]
    except OSError:
        # Maps begin at a page, and allocations behind their header.
        return tensor.untyped_storage().data_ptr() % mmap.PAGESIZE == 0
    for span, access, _, _, inode, *_ in lines:
        start, end = (int(number, 16) for number in span.split("-"))
        if start <= address < end:
            return access[3] == "p" and inode != "0"
    return False


class NoHintError(Exception):
    """A symbolic size without an example value."""


def _hint(size: int | torch.SymInt) -> int:
    if not isinstance(size, torch.SymInt):
        return size
    if not size.node.has_hint():
        raise NoHintError
    return int(size.node.hint)


def target_of_device(device: torch.device) -> Target:
    """Return the target of a CPU or CUDA device. Raises InvalidInput for meta tensors, Unsupported for others."""
    if device.type == "meta":
        raise InvalidInput(f"arrays must have memory, got tensors on meta; {MAKE_MEMORY}")
    return target_of((device.type, device.index or 0))
