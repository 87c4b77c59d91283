"""Work on every expert's arrays, on the ranks that have them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch

from moe_core.errors import Unsupported
from moe_core.parallel.tensor import WHOLE, Cut, TensorSplit
from moe_core.specs.operands import map_arrays, named_arrays

B = TypeVar("B")


class Own(NamedTuple):
    """A rank's part of an array of all experts. experts, cut, split: None: all."""

    local: torch.Tensor
    experts: slice | list[int] | None = None
    cut: Cut | None = None
    split: TensorSplit = WHOLE

    def taken(self, array: Any) -> Any:
        if self.cut is None:
            return array
        parts = [array[self.cut.index(part)] for part in self.cut.slices(array.shape[self.cut.axis], self.split)]
        return torch.cat(parts, self.cut.axis)


def is_shared_out(tensor: Any) -> bool:
    """True for a tensor that is whole, or sharded by experts and perhaps by a tensor axis."""
    placed = getattr(tensor, "placements", ())
    return not placed or (
        placed[0].is_shard(0) and (len(placed) == 1 or (len(placed) == 2 and not placed[1].is_shard(0)))
    )


def own_of(tensor: Any) -> Own:
    held = getattr(tensor, "held", None)
    if held is not None:
        part = tensor.part
        return Own(tensor.to_local(), held) if part is None else Own(tensor.to_local(), held, part.cut, part.split)
    placed = getattr(tensor, "placements", None)
    if placed is None:
        return Own(tensor)
    mesh = tensor.device_mesh
    rank, each = mesh.get_local_rank(0), -(-tensor.shape[0] // mesh.size(0))
    experts = slice(rank * each, (rank + 1) * each)
    if len(placed) == 1:
        return Own(tensor.to_local(), experts)
    split = TensorSplit(mesh.size(1), mesh.get_local_rank(1))
    cut = Cut(placed[1].dim - tensor.ndim) if placed[1].is_shard() else None
    return Own(tensor.to_local(), experts, cut, split)


def on_own_experts(function: Callable[..., B], bundle: B, *arguments: Any) -> B:
    """Return `function(bundle, *arguments)`, with arrays sharded as in the bundle."""
    for name, array in named_arrays(bundle):
        if not is_shared_out(array):
            raise Unsupported(
                f"experts.{name} must be sharded by experts alone, got {array.placements}; lay weights out before "
                "sharding"
            )
        if own_of(array).split.size > 1:
            raise Unsupported(
                f"experts.{name} must not be split over a tensor axis to be laid out anew; leave its slices as they are"
            )
    first: Any = next(array for _, array in named_arrays(bundle))
    if not hasattr(first, "to_local"):
        return function(bundle, *arguments)
    result = function(map_arrays(bundle, lambda array: array.to_local()), *arguments)
    return map_arrays(result, lambda array: shared_like(first, array))


def shared_like(shared: Any, local: torch.Tensor) -> Any:
    """This rank's part `[held, ...]` as an array `[E, ...]` on the ranks of `shared`."""
    if not hasattr(shared, "device_mesh"):
        return shared.of_local(local)
    shape = [shared.shape[0], *local.shape[1:]]
    for axis, placed in enumerate(shared.placements[1:], 1):
        if placed.is_shard():
            shape[placed.dim] *= shared.device_mesh.size(axis)
    sizes: Any = {"shape": torch.Size(shape), "stride": torch.empty(shape, device="meta").stride()}
    return type(shared).from_local(local, shared.device_mesh, shared.placements, run_check=False, **sizes)


def moved_bytes(buffer: Any, fn: Any) -> torch.Tensor:
    """Apply fn to the bytes of a buffer, which keeps its dtype."""
    if hasattr(buffer, "device_mesh"):
        # DTensor confuses views of one shape in two dtypes.
        return shared_like(buffer, moved_bytes(buffer.to_local(), fn))
    raw = buffer.view(torch.uint8)
    moved = fn(raw)
    return (moved if moved.dtype == raw.dtype else raw.to(moved.device)).view(buffer.dtype)
