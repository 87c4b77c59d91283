"""Prepacked weights on torch tensors: quantised weights put into the order of a kernel, and back, where they are."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import TypeVar

import torch
from torch.nn.functional import pad

from moe_core.formats import QuantizedTensor
from moe_core.ops.prepack import prepack as core
from moe_core.specs.descriptions import described
from moe_core.specs.moe import MoESpec
from moe_core.specs.operands import ExpertWeights, map_arrays, named_arrays
from moe_torch.bridge.operator import array_spec

Weights = TypeVar("Weights", QuantizedTensor, ExpertWeights)
_TORCH = core.ArrayFunctions(torch.permute, torch.stack, lambda array, rows, columns: pad(array, (0, columns, 0, rows)))


@torch.no_grad()
@described
def prepack_weights(weights: Weights, spec: MoESpec | None = None, *, gate_layout: str | None = None) -> Weights:
    """Put quantised weights into the order in which the kernels of bf16 rows on Hopper read and decode them."""
    return core.prepack_weights(weights, spec, gate_layout=gate_layout, tile=tile)


@torch.no_grad()
def restore_weights(weights: Weights) -> Weights:
    """Put prepacked weights back into the published layout, `out_in`: the inverse of `prepack_weights`, bit by bit.

    Weights that are not prepacked come back as they are. Raises InvalidInput.
    """
    return core.restore_weights(weights, untile)


def tile(tensor: QuantizedTensor, order: str) -> QuantizedTensor:
    """See `moe_core.ops.prepack.prepack.tile`."""
    return _by_matrix(tensor, lambda matrix: core.tile(matrix, order, _TORCH))


def untile(tensor: QuantizedTensor) -> QuantizedTensor:
    """See `moe_core.ops.prepack.prepack.untile`."""
    return _by_matrix(tensor, lambda matrix: core.untile(matrix, _TORCH))


def _by_matrix(tensor: QuantizedTensor, change: Callable[[QuantizedTensor], QuantizedTensor]) -> QuantizedTensor:
    """`change` of every matrix of a stack: one at a time, as intermediate results take a few times its memory."""
    for name, array in named_arrays(tensor, "weights."):
        array_spec(name, array)
    lead = tuple(tensor.shape[:-2])
    if not lead or 0 in lead:
        return map_arrays(change(tensor), torch.Tensor.contiguous)
    made = None
    for place in itertools.product(*(range(size) for size in lead)):
        matrix = map_arrays(tensor, lambda array, place=place: array[place])
        changed = change(matrix)
        if changed is matrix:
            return tensor
        if made is None:
            made = map_arrays(changed, lambda array: array.new_empty((*lead, *array.shape)))
        for (_, target), (_, array) in zip(named_arrays(made), named_arrays(changed), strict=True):
            target[place].copy_(array)
    assert made is not None
    return made
