"""Prepared weights on torch tensors: quantised weights put into the order of a kernel, and back, where they are."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import TypeVar

import torch
from torch.nn.functional import pad

from moe_core import prepared
from moe_core.formats import QuantizedTensor
from moe_core.operands import ExpertWeights, map_arrays, named_arrays
from moe_core.specs import MoESpec
from moe_torch.dispatch import array_spec

Weights = TypeVar("Weights", QuantizedTensor, ExpertWeights)
_TORCH = prepared.ArrayFunctions(
    torch.permute, torch.stack, lambda array, rows, columns: pad(array, (0, columns, 0, rows))
)


@torch.no_grad()
def prepare_weights(weights: Weights, spec: MoESpec | None = None, *, gate_layout: str | None = None) -> Weights:
    """Quantised weights in the order in which Hopper's kernels of bf16 rows read and decode them; once, at load.

    weights: a `QuantizedTensor` `[..., N, D]` in mxfp4, mxfp4_ceil, or integers of 4 or 8 bits with a scale for each
    row or for 32, 64, 128, ... columns of it, or an `ExpertWeights` of such (one layer or a stack). gate_layout, of a
    tensor: `interleaved` or `halves` where its rows are gate and up, else None. spec, of ExpertWeights: the MoESpec
    that they are used with, whose activation says how gate and up lie. Biases, plain matrices and the logical shape
    stay what they are; prepared weights go wherever the published ones go, except into
    gradients (docs/quantization.md). `in_out` tensors are transposed, exactly: what comes back is `out_in`, as
    `MoESpec.weight_layout` then must be.

    Computed on the weights' device, a matrix at a time: no number changes, and `restore_weights` is the inverse. What
    is prepared already comes back as it is. Raises InvalidInput for other formats and types, gate_layout `separate`,
    sizes that do not divide into blocks (`moe_core.formats.Tiling`), and weights prepared for another gate_layout.
    """
    return prepared.prepare(weights, spec, gate_layout, tile)


@torch.no_grad()
def restore_weights(weights: Weights) -> Weights:
    """The inverse of `prepare_weights`: the published layout, `out_in`, bit by bit. Weights that are not prepared come
    back as they are. Raises InvalidInput."""
    return prepared.restore(weights, untile)


def tile(tensor: QuantizedTensor, order: str) -> QuantizedTensor:
    """See `moe_core.reference.tiling.tile`."""
    return _by_matrix(tensor, lambda matrix: prepared.tile(matrix, order, _TORCH))


def untile(tensor: QuantizedTensor) -> QuantizedTensor:
    """See `moe_core.reference.tiling.untile`."""
    return _by_matrix(tensor, lambda matrix: prepared.untile(matrix, _TORCH))


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
