"""Choose experts and sort rows, with the objects of `moe_torch.modular`."""

from __future__ import annotations

import dataclasses

import torch

from moe_core.base.checks import require_at_least, require_flag
from moe_core.errors import InvalidInput
from moe_torch.bridge.options import require_instance
from moe_torch.compat.triton_kernels.tensor import Bitmatrix, bits_of
from moe_torch.compat.triton_kernels.topk import choose
from moe_torch.modular.into import Launchable
from moe_torch.modular.routing_data import (
    ExptData,
    GatherIndx,
    RoutingData,
    ScatterIndx,
    expert_data,
    sorted_by_expert,
    starts,
)

_WORD_BITS = 32


def compute_expt_data(expt_hist: torch.Tensor | None, n_expts_tot: int, n_gates: int) -> ExptData:
    """The ExptData of a histogram int32 `[n_expts_tot]` whose sum is at most n_gates."""
    if expt_hist is None:
        return ExptData(None, None, None, None)
    return expert_data(expt_hist, starts(expt_hist), n_gates)


compute_expt_data_torch = compute_expt_data


@Launchable
def _routing_clear_bitmatrix(
    bitmatrix: torch.Tensor, stride_bm: int, stride_bn: int, shape_bn: int, cutoff: int, BLOCK_N: int
) -> None:
    """Clear the bits of columns from cutoff on, in place. Sizes and strides are those of bitmatrix."""
    words, first = bitmatrix.view(torch.int32), _WORD_BITS * torch.arange(shape_bn, device=bitmatrix.device)
    kept = (cutoff - first).clamp(0, _WORD_BITS)
    words &= ((1 << kept) - 1).to(torch.int32)


def routing(
    logits: torch.Tensor,
    n_expts_act: int,
    sm_first: bool = False,
    expt_indx: torch.Tensor | None = None,
    simulated_ep: int = 1,
    n_rows: int | torch.Tensor | None = None,
) -> tuple[RoutingData, GatherIndx, ScatterIndx]:
    """Route logits `[T, E]` to n_expts_act experts each, up to E, in ascending order.

    sm_first: softmax over all experts, then the choice. False: over the chosen ones. expt_indx: `[T, n_expts_act]`,
    chosen ids, kept in their order. simulated_ep: keep only the first `E / simulated_ep` experts, with their weights
    among all. n_rows: an integer, or a tensor of one. Later tokens go nowhere. gate_scal is fp32. Rows without an
    expert come last with gate_scal 0.
    """
    require_flag("sm_first", sm_first)
    require_at_least("simulated_ep", simulated_ep, 1)
    num_experts = logits.shape[-1]
    if num_experts % simulated_ep:
        raise InvalidInput(f"simulated_ep must divide {num_experts} experts, got {simulated_ep}; choose a divisor")
    ids, values, complete = choose(logits, n_expts_act, "all" if sm_first else "chosen", expt_indx, n_rows)
    if simulated_ep > 1:
        num_experts //= simulated_ep
        kept = (ids >= 0) & (ids < num_experts)
        order = (~kept).to(torch.int32).argsort(dim=1, stable=True)
        ids, values = torch.where(kept, ids, -1).gather(1, order), torch.where(kept, values, 0.0).gather(1, order)
        complete = False
    return sorted_by_expert(ids, values, num_experts, absent=None if complete else 0.0)


def routing_from_bitmatrix(
    bitmatrix: Bitmatrix, expt_scal: torch.Tensor, expt_indx: torch.Tensor, n_expts_tot: int, n_expts_act: int
) -> tuple[RoutingData, GatherIndx, ScatterIndx]:
    """Route ids expt_indx and weights expt_scal, both `[T, n_expts_act]`, in their order.

    A slot has a row if its id is in [0, n_expts_tot), its bit is set and its token is within bitmatrix.shape[0].
    """
    require_instance("bitmatrix", bitmatrix, Bitmatrix)
    wanted = (bitmatrix.data.shape[0], n_expts_act)
    for name, array in (("expt_scal", expt_scal), ("expt_indx", expt_indx)):
        if tuple(array.shape) != wanted:
            raise InvalidInput(f"{name} must be {list(wanted)}, got {list(array.shape)}; pass one row per token")
    ids = expt_indx.to(torch.int32)
    exists = (ids < n_expts_tot) & bits_of(bitmatrix.data, ids)
    exists &= (torch.arange(wanted[0], device=ids.device) < bitmatrix.shape[0])[:, None]
    return sorted_by_expert(torch.where(exists, ids, -1), expt_scal.to(torch.float32), n_expts_tot, absent=0.0)


def filled(routing_data: RoutingData) -> RoutingData:
    """Add a missing ExptData from the histogram. Raises InvalidInput without one."""
    if routing_data.expt_data is not None or routing_data.expt_hist is None:
        return routing_data
    if routing_data.gate_scal is None:
        raise InvalidInput(
            "expt_data must be given where gate_scal is None, as tiles depend on the number of rows, got neither; pass "
            "that of compute_expt_data"
        )
    data = compute_expt_data(routing_data.expt_hist, routing_data.n_expts_tot, routing_data.gate_scal.shape[0])
    return dataclasses.replace(routing_data, expt_data=data)
