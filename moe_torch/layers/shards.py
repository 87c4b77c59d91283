"""What is done to every expert's arrays by itself, done on the ranks that have them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from moe_core.errors import Unsupported
from moe_core.specs.operands import map_arrays, named_arrays

B = TypeVar("B")


def on_own_experts(function: Callable[..., B], bundle: B, *arguments: Any) -> B:
    """`function(bundle, *arguments)`. Arrays that are shared out among ranks by their first axis are so in the result.

    Raises Unsupported for arrays that are sharded in another way.
    """
    for name, array in named_arrays(bundle):
        placed = getattr(array, "placements", None)
        if placed is not None and (len(placed) != 1 or not placed[0].is_shard(0)):
            raise Unsupported(
                f"experts.{name} must be sharded by experts alone, got {placed}; lay weights out before sharding"
            )
    first: Any = next(array for _, array in named_arrays(bundle))
    if not hasattr(first, "to_local"):
        return function(bundle, *arguments)
    found = function(map_arrays(bundle, lambda array: array.to_local()), *arguments)
    return map_arrays(found, lambda array: shared_like(first, array))


def shared_like(shared: Any, local: torch.Tensor) -> Any:
    """This rank's part `[held, ...]` as a shared-out array `[E, ...]`, on the ranks of another one."""
    if not hasattr(shared, "device_mesh"):
        return shared.of_local(local)
    shape = (shared.shape[0], *local.shape[1:])
    sizes: Any = {"shape": shape, "stride": torch.empty(shape, device="meta").stride()}
    return type(shared).from_local(local, shared.device_mesh, shared.placements, run_check=False, **sizes)
