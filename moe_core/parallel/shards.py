from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from moe_core.errors import InvalidInput
from moe_core.formats import QuantizedTensor
from moe_core.parallel.placement import HOLE, Placement
from moe_core.specs import ExpertWeights, map_arrays, named_fields

_WHOLE = ("layer_index", "gate_up_input_scale", "down_input_scale")


def shard_experts(experts: ExpertWeights, placement: Placement) -> tuple[ExpertWeights, ...]:
    """Return the experts of each rank, `[L, ...]`, from all, `[E, ...]` (behind the layers of a stack).

    An empty place holds NaN, or an expert's numbers if the dtype has no NaN. Raises InvalidInput for another number
    than E.
    """
    axis = 0 if experts.layer_index is None else 1
    shards = []
    for owners in placement.owners:
        holes = np.array(owners) == HOLE

        def take(array: np.ndarray, owners: tuple[int, ...] = owners, holes: np.ndarray = holes) -> np.ndarray:
            if array.shape[axis] != placement.num_experts:
                raise InvalidInput(
                    f"experts must hold the placement's {placement.num_experts} experts, got {array.shape}; pass all"
                )
            part = np.take(array, np.maximum(owners, 0), axis)
            if np.issubdtype(part.dtype, np.inexact) or part.dtype.name == "bfloat16":
                part[(slice(None),) * axis + (holes,)] = np.nan
            return part

        parts = {
            name: map_arrays(array, take) if isinstance(array, QuantizedTensor) else take(array)
            for name, array in named_fields(experts)
            if name not in _WHOLE
        }
        shards.append(dataclasses.replace(experts, **parts))
    return tuple(shards)


def gather_experts(parts: Sequence[Any], placement: Placement, axis: int = 0) -> np.ndarray:
    """Join each rank's experts `[L, ...]`, with the first place of replicas."""
    by_place = np.concatenate(parts, axis)
    _, places, start = placement.tables
    return np.take(by_place, places[start[:-1]], axis)
