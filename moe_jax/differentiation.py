"""What every op with a gradient shares: its residuals, and arrays alike under shard_map."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp


@dataclass(frozen=True)
class Kept:
    """What a forward hands to its backward.

    JAX may run one forward rule for several sets of differentiated arguments, and then reads the residuals of all by
    the structure of the latest: so this has one structure for all of them, and says which gradients are asked for in
    the shape of an array without elements, which survives scan, vmap, remat and shard_map.
    """

    arrays: dict[str, Any]
    outputs: dict[str, Any]
    asked: jax.Array

    @classmethod
    def make(cls, arrays: dict[str, Any], outputs: dict[str, Any], asked: Iterable[bool]) -> Kept:
        bits = sum(1 << place for place, is_asked in enumerate(asked) if is_asked)
        return cls(arrays, outputs, jnp.zeros((0, bits), bool))

    def wanted(self, names: tuple[str, ...]) -> tuple[str, ...]:
        """Those of the names, in the order given to `make`, that are asked for."""
        return tuple(name for place, name in enumerate(names) if self.asked.shape[1] >> place & 1)


jax.tree_util.register_dataclass(Kept, data_fields=["arrays", "outputs", "asked"], meta_fields=[])


def varying_alike(arrays: Iterable[Any]) -> list[Any]:
    """Arrays that vary over the same axes of a mesh, as the results do.

    Under shard_map a gradient varies like what it is the gradient of: here all of them vary, and JAX sums the gradients
    of arrays that did not.
    """
    arrays = list(arrays)
    axes = [jax.typeof(array).manual_axis_type.varying for array in arrays]
    every = frozenset().union(*axes)
    return [
        array if own == every else jax.lax.pcast(array, tuple(every - own), to="varying")
        for array, own in zip(arrays, axes, strict=True)
    ]
