"""Stores into peers' memory, on one host, also in CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from moe_core.errors import InvalidInput, Unsupported
from moe_core.modular.types import FusedMoEActivationFormat
from moe_core.specs.operands import RaggedLayout
from moe_core.specs.routing import LayoutSpec
from moe_torch import ops
from moe_torch.modular.calls import FinalizeCall, PrepareCall, PreparedTokens, handle_of, taking
from moe_torch.modular.parallel.exchange import AcrossRanks, Halves
from moe_torch.modular.weight_and_reduce import TopKWeightAndReduceDelegate


class PeerPrepareAndFinalize(AcrossRanks):
    """Store rows into other ranks' memory, format Standard. See `AcrossRanks`.

    max_tokens must be given: all calls share memory for that many tokens of each rank, so each call must be finalized
    before the next is prepared. Ranks may have different numbers of tokens, also none. On a GPU the host reads nothing,
    and ranks that disagree make the output NaN.
    """

    mode = "peer"

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        chunks = self.parallel.exchange.chunks
        if chunks != 1:
            raise Unsupported(f"exchange.chunks must be 1 for {type(self).__name__}, got {chunks!r}; leave it out")

    def _start_sum(self, routes: Any, rows: torch.Tensor) -> Callable[[torch.Tensor], Any]:
        total = routes.start_total(rows, "results")
        return lambda output: output.copy_(total(out_dtype=output.dtype))


class _Blocks(NamedTuple):
    """prepared: in the format Standard. layout: its rows, in blocks of experts."""

    prepared: PreparedTokens
    layout: RaggedLayout


class PeerBatchedPrepareAndFinalize(PeerPrepareAndFinalize):
    """Format BatchedExperts: a1q `[num_local_experts, max_tokens * ranks, K]`, unused rows zero.

    The experts need max_num_tokens = max_tokens and num_dispatchers, and leave weights and sums to finalize. The
    experts of a token must differ. No gradients.
    """

    activation_format = property(lambda self: FusedMoEActivationFormat.BatchedExperts)

    @taking(PrepareCall)
    def prepare_async(self, call: PrepareCall) -> Halves:
        hook, receiver = super().prepare_async(*call)
        return hook, lambda: self._in_blocks(receiver())

    def _in_blocks(self, prepared: PreparedTokens) -> PreparedTokens:
        most, ids = (self.parallel.max_tokens or 0) * self.placement.num_ranks, prepared.topk_ids
        assert ids is not None
        device, experts = ids.device, torch.arange(self.placement.per_rank, device=ids.device)
        counts = (ids == experts).sum(dim=0, dtype=torch.int32)
        start = counts.cumsum(0, dtype=torch.int32) - counts
        number = torch.arange(most, dtype=torch.int32, device=device)
        slot_of_row = torch.where(number < counts[:, None], start[:, None] + number, -1).view(-1)
        expert = ids[:, 0].clamp(min=0).long()
        row = torch.arange(len(ids), dtype=torch.int32, device=device) - start[expert]
        row_of_slot = torch.where((ids[:, 0] < 0) | (row >= most), -1, expert.to(torch.int32) * most + row)
        spec = LayoutSpec(len(ids), 1, 1, max_rows=len(slot_of_row))
        layout = RaggedLayout(spec, None, None, slot_of_row, row_of_slot, None)
        blocks = ops.gather_rows(prepared.a1q, layout).view(len(experts), most, -1)
        moved = prepared.adapter_ids
        if moved is not None:
            moved = torch.nn.functional.pad(moved, (0, 1), value=-1)[slot_of_row.long()]
        handle = _Blocks(prepared, layout)
        return PreparedTokens(blocks, None, counts, handle=handle, batch=prepared.batch, adapter_ids=moved)

    @taking(FinalizeCall)
    def finalize_async(self, call: FinalizeCall) -> Callable[[], None]:
        blocks = handle_of(self, call.prepared, _Blocks)
        if not isinstance(call.weight_and_reduce_impl, TopKWeightAndReduceDelegate):
            raise InvalidInput(
                f"weight_and_reduce_impl must be TopKWeightAndReduceDelegate, got {call.weight_and_reduce_impl}; "
                "choose batched experts that leave both to finalize"
            )
        rows = ops.reduce(call.fused_expert_output.flatten(0, 1).contiguous(), blocks.layout, order="row")
        call = call._replace(fused_expert_output=rows[:, None], prepared=blocks.prepared)
        return super().finalize_async(*call)
