"""Routing as gpt-oss experts take it: rows sorted by expert, with the permutation there and back."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch

from moe_core.base.checks import require_at_least
from moe_core.errors import InvalidInput
from moe_torch import ops
from moe_torch.bridge.options import encode
from moe_torch.modular.into import write_into
from moe_torch.modular.rows import as_ids, as_weights, weight_of_row
from moe_torch.operators.table import PACK_BITMATRIX

_WORD_BITS = 32


@dataclass(frozen=True, eq=False)
class RoutingData:
    """gate_scal fp32 `[M * topk]`: the weight of each row, -1 for rows without an expert, which come last. expt_hist
    int32 `[E]`: rows of each expert. n_expts_tot: E. n_expts_act: topk. expt_data: the rows as a RaggedLayout."""

    gate_scal: torch.Tensor
    expt_hist: torch.Tensor
    n_expts_tot: int
    n_expts_act: int
    expt_data: ops.RaggedLayout


@dataclass(frozen=True, eq=False)
class GatherIndx:
    """src_indx int32 `[M * topk]`: the slot of each row, -1 = none; dst_indx: the row of each slot, -1 = none."""

    src_indx: torch.Tensor
    dst_indx: torch.Tensor


@dataclass(frozen=True, eq=False)
class ScatterIndx:
    """src_indx int32 `[M * topk]`: the row of each slot, -1 = none; dst_indx: the slot of each row, -1 = none."""

    src_indx: torch.Tensor
    dst_indx: torch.Tensor


def make_routing_data(
    topk_ids: torch.Tensor, topk_weights: torch.Tensor, num_local_experts: int
) -> tuple[RoutingData, GatherIndx, ScatterIndx]:
    """Rows sorted by expert, of one expert in slot order, from ids and weights `[M, topk]`.

    An id of -1, or outside [0, num_local_experts), has no row; its weight is -1 in gate_scal. ids are kept as int32 and
    weights as fp32, any topk works. Apply an expert_map to the ids before. Raises InvalidInput.
    """
    ids = as_ids(topk_ids)
    weights = as_weights(topk_weights, ids)
    layout = ops.make_layout(ids, num_local_experts)
    slots = layout.slot_of_row
    gate_scal = weight_of_row(weights, slots, absent=-1.0) if slots.shape[0] else weights.new_empty(0)
    routing_data = RoutingData(gate_scal, layout.group_sizes, num_local_experts, ids.shape[1], layout)
    return (routing_data, GatherIndx(slots, layout.row_of_slot), ScatterIndx(layout.row_of_slot, slots))


def layout_and_weights(
    routing_data: RoutingData, gather_indx: GatherIndx, scatter_indx: ScatterIndx
) -> tuple[ops.RaggedLayout, torch.Tensor]:
    """The layout and the weights by slot, fp32 `[M * topk]`, that three such objects describe together.

    Weights of slots without a row are 0.
    """
    layout = dataclasses.replace(
        routing_data.expt_data,
        group_sizes=routing_data.expt_hist,
        slot_of_row=gather_indx.src_indx,
        row_of_slot=scatter_indx.src_indx,
    )
    rows = layout.row_of_slot
    if not rows.shape[0]:
        return layout, routing_data.gate_scal
    return layout, weight_of_row(routing_data.gate_scal, rows)


def pack_bitmatrix(
    bitmatrix: torch.Tensor,
    topk_ids: torch.Tensor,
    n_rows: int,
    bm_cols: int,
    n_expts_act: int,
    BLOCK_SIZE_M: int = 512,
    BLOCK_SIZE_K: int = 32,
) -> None:
    """Write bitmatrix uint32 `[n_rows, bm_cols]`: bit `e % 32` of word `e // 32` of a row says that e is among its ids.

    topk_ids `[n_rows, n_expts_act]`, any topk; -1, and ids past the words, set nothing. BLOCK_SIZE_M and BLOCK_SIZE_K
    are the tile of a kernel that has no say in the result; they are checked, and our plan chooses its own.
    Raises InvalidInput.
    """
    for name, value in (("BLOCK_SIZE_M", BLOCK_SIZE_M), ("BLOCK_SIZE_K", BLOCK_SIZE_K), ("bm_cols", bm_cols)):
        require_at_least(name, value, 1)
    ids = as_ids(topk_ids)
    for name, array, shape in (("bitmatrix", bitmatrix, (n_rows, bm_cols)), ("topk_ids", ids, (n_rows, n_expts_act))):
        if tuple(array.shape) != shape:
            raise InvalidInput(f"{name} must be {list(shape)}, got {list(array.shape)}; pass the sizes it has")
    if bitmatrix.dtype != torch.uint32:
        raise InvalidInput(f"bitmatrix must be torch.uint32, got {bitmatrix.dtype}; allocate it so")
    write_into(PACK_BITMATRIX, {"bitmatrix": bitmatrix}, ids, encode(_WORD_BITS * bm_cols))
