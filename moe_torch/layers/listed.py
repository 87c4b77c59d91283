"""Operators on lists of whole tensors and parts of ranks. Norms and checks for infinity are of all ranks' parts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from moe_core.base.checks import finite_float
from moe_core.errors import InvalidInput, Unsupported
from moe_torch.bridge.private import FOREACH_NORM, UNSCALE, local_tensor, tree_map
from moe_torch.parallel.group import Ranks, ranks_of

#: These return a number of every tensor, which only norms add up over ranks.
_REDUCING = ("_foreach_max", "_foreach_powsum")


def is_of_lists(func: Any) -> bool:
    name = func.overloadpacket.__name__
    return name.startswith(("_foreach_", "_fused_", "_amp_foreach_")) and name not in _REDUCING


def is_whole_norm(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Return True for the norm of a whole tensor."""
    return func == torch.ops.aten.linalg_vector_norm.default and len(args) <= 2 and not {"dim", "keepdim"} & set(kwargs)


def whole_norm(tensor: torch.Tensor, order: Any = 2.0, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    return norms_of([tensor], order, dtype)[0]


def part_of(tensor: Any) -> Any:
    """This rank's part of a tensor on several ranks; anything else as it is."""
    if isinstance(tensor, DTensor):
        return local_tensor(tensor)
    return tensor._local if hasattr(tensor, "of_local") else tensor


def axes_of(tensor: Any) -> tuple[Ranks, ...]:
    """The groups that share a tensor out, none for a whole one."""
    if isinstance(tensor, DTensor):
        if any(placed.is_partial() for placed in tensor.placements):
            raise Unsupported(f"{list(tensor.shape)} must not be parts of a sum, got {tensor.placements}; add them up")
        axes = [axis for axis, placed in enumerate(tensor.placements) if not placed.is_replicate()]
        return tuple(Ranks(tensor.device_mesh.get_group(axis), None, "a norm") for axis in axes)
    if not hasattr(tensor, "of_local"):
        return ()
    meshes = [tensor._where[0], *([tensor.part.mesh] if tensor.part and tensor.part.cut else [])]
    return tuple(ranks_of(mesh, None, "a norm") for mesh in meshes)


def run_on_lists(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    if func == FOREACH_NORM:
        return norms_of(args[0], *args[1:2], **kwargs)
    first: Any = next(one for one in args if isinstance(one, (list, tuple)))
    results = func(*tree_map(part_of, tuple(args)), **tree_map(part_of, kwargs))
    if func == UNSCALE:
        for ranks in dict.fromkeys(axis for tensor in first for axis in axes_of(tensor)):
            args[1].copy_(ranks.all_gather(args[1].view(1), "infinite gradients").amax())
    if not isinstance(results, (list, tuple)):
        return results
    return [like.of_local(one) if hasattr(like, "of_local") else one for like, one in zip(first, results, strict=True)]


def norms_of(tensors: Sequence[Any], order: Any = 2.0, dtype: torch.dtype | None = None) -> list[torch.Tensor]:
    """The norm of each tensor, whole, on every rank: 0-d tensors."""
    parts, order = [part_of(tensor) for tensor in tensors], float(order)
    norms = [
        torch.linalg.vector_norm(part, order, dtype=dtype) if part.numel() else part.new_zeros((), dtype=dtype)
        for part in parts
    ]
    by_axes: dict[tuple[Ranks, ...], list[int]] = {}
    for number, tensor in enumerate(tensors):
        by_axes.setdefault(axes_of(tensor), []).append(number)
    for axes, numbers in by_axes.items():
        for ranks in axes:
            came = ranks.all_gather(torch.stack([norms[number].double() for number in numbers]), "norms")
            # No order of ranks counts, so all get the same bits.
            whole = torch.linalg.vector_norm(came, order, dim=0) if order else came.sum(0)
            for number, norm in zip(numbers, whole, strict=True):
                norms[number] = norm.to(norms[number].dtype)
    return norms


@torch.no_grad()
def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> torch.Tensor:
    """Clip gradients as `torch.nn.utils.clip_grad_norm_`, for parameters of several meshes. A collective.

    Whole gradients must be equal on all ranks, and experts' be divided as theirs. Returns the norm before clipping, a
    0-d tensor, equal on all ranks.

    Args:
        parameters: whole tensors, DTensors of any meshes, and `PlacedTensor`s, in one order on all ranks.
        max_norm: the largest norm of all gradients together.
        norm_type: the order of the norm, `math.inf` included.
        error_if_nonfinite: raise RuntimeError if the norm is NaN or infinite.
    """
    parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    if finite_float("max_norm", max_norm) < 0:
        raise InvalidInput(f"max_norm must be at least 0, got {max_norm}; pass the largest norm")
    gradients = [one.grad for one in parameters if one.grad is not None]
    if not gradients:
        return torch.tensor(0.0)
    device = gradients[0].device
    norms = torch.stack([norm.to(device, torch.float32) for norm in norms_of(gradients, norm_type)])
    total = torch.linalg.vector_norm(norms, float(norm_type)) if norm_type else norms.sum()
    if error_if_nonfinite and not math.isfinite(total.item()):
        raise RuntimeError(f"the norm of gradients must be finite, got {total.item()}; look for NaN in the loss")
    scale = (max_norm / (total + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        part_of(gradient).mul_(scale.to(gradient.device))
    return total
