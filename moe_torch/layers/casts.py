"""Dtypes of layers under autocast."""

from __future__ import annotations

from typing import Any

import torch

#: `torch.autocast` leaves others, such as float64.
_AUTOCAST_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def autocast(tensor: Any, name: str = "x") -> Any:
    """Cast a parameter as `torch.autocast` does for torch.nn.Linear, but no float32 bias, gate or quantised tensor."""
    if not isinstance(tensor, torch.Tensor) or tensor.dtype not in _AUTOCAST_DTYPES or name == "gate":
        return tensor
    kind = autocast_device(tensor)
    if not torch.is_autocast_enabled(kind) or (name.endswith("bias") and tensor.dtype == torch.float32):
        return tensor
    return tensor.to(torch.get_autocast_dtype(kind))


def autocast_dtype(tensor: torch.Tensor) -> torch.dtype:
    """The dtype of a tensor that `torch.autocast` casts, on the device of this one."""
    return torch.get_autocast_dtype(autocast_device(tensor)) if tensor.dtype in _AUTOCAST_DTYPES else tensor.dtype


def autocast_device(tensor: torch.Tensor) -> str:
    """The kind of device that torch.autocast is asked of: it knows no `meta`."""
    return "cuda" if tensor.is_cuda else "cpu"


def at_least_float32(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()
