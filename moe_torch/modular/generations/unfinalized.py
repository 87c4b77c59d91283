"""Outputs of experts that leave the last sum to others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from moe_core.errors import InvalidInput
from moe_torch.modular.stages import as_ids, as_weights
from moe_torch.modular.weight_and_reduce import sum_placed


@dataclass
class UnfinalizedMoEOutput:
    """The newest generation's result of experts that have written nothing to `output`.

    gemm2_permuted: `[R, K]`, rows after the second product, not weighted. expert_weights: floats `[M, topk]`.
    expanded_idx_to_permuted_idx: int32 `[M, topk]`, the row of each slot, -1 = no row. route_major: row `t * topk + k`
    is that of slot `(t, k)`.
    """

    gemm2_permuted: torch.Tensor
    expert_weights: torch.Tensor
    expanded_idx_to_permuted_idx: torch.Tensor
    route_major: bool = False


def parts_of(result: Any, wanted: str) -> list[torch.Tensor]:
    """Rows, weights and places of an UnfinalizedMoEOutput, of any library. Raises InvalidInput."""
    fields = ("gemm2_permuted", "expert_weights", "expanded_idx_to_permuted_idx")
    arrays: list[Any] = [getattr(result, field, None) for field in fields]
    if not all(isinstance(array, torch.Tensor) and array.dim() == 2 for array in arrays):
        raise InvalidInput(
            f"{wanted} an UnfinalizedMoEOutput with {', '.join(fields)} of two axes, got {type(result).__name__}; "
            "return one of these"
        )
    return arrays


def write_finalized(result: Any, output: torch.Tensor, name: str) -> None:
    """Weight and sum an UnfinalizedMoEOutput, of any library, into output `[M, K]`, in fp32 and in order, one cast."""
    rows, weights, places = parts_of(result, f"{name} must write output and return None, or return")
    if (len(places), rows.shape[1]) != tuple(output.shape):
        raise InvalidInput(
            f"{name} must return an UnfinalizedMoEOutput of {list(output.shape)}, got {[len(places), rows.shape[1]]}; "
            "return a row of expanded_idx_to_permuted_idx for each token"
        )
    places = as_ids(places)
    if not rows.shape[0]:
        output.zero_()
        return
    sum_placed(output, rows, places.reshape(-1), places.shape[1], as_weights(weights, places))
