"""A stand-in for `deep_ep.Buffer` over gloo, written from DeepEP's documentation: its calls, its checks, its layouts.

It is as unfriendly as the real one may be: memory that nothing was received into is NaN, blocks of the low-latency
layout have their sources in another order than the ranks, and what a hook or an event brings is NaN until then.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

HIDDEN_SIZES = (2048, 2560, 3072, 4096, 5120, 6144, 7168, 8192)


class Event:
    """`EventOverlap`. finish: what becomes true when it is waited for."""

    def __init__(self, finish: Callable[[], None] | None) -> None:
        self.finish = finish

    def current_stream_wait(self) -> None:
        assert self.finish is not None, "an event exists with async_finish alone"
        self.finish()


def _later(*pairs: tuple[torch.Tensor, torch.Tensor]) -> Callable[[], None]:
    """Poisons each first tensor now, and gives it the values of the second one later."""
    for place, _ in pairs:
        if place.element_size() == 1:
            # NaN, in e4m3 and in the bytes of bf16.
            place.view(torch.uint8).fill_(0xFF)
        else:
            place.fill_(torch.nan if place.is_floating_point() else -1)

    def finish() -> None:
        for place, values in pairs:
            place.copy_(values)

    return finish


def _event(finish: Callable[[], None], waits: bool) -> Event:
    if not waits:
        finish()
    return Event(finish if waits else None)


class Buffer:
    def __init__(
        self, group: Any, num_nvl_bytes: int = 0, num_rdma_bytes: int = 0, low_latency_mode: bool = False
    ) -> None:
        self.group, self.rank, self.group_size = group, dist.get_rank(group), dist.get_world_size(group)
        self.num_nvl_bytes, self.num_rdma_bytes = num_nvl_bytes, num_rdma_bytes
        self.low_latency_mode = low_latency_mode

    def _everybody(self, given: Any) -> list[Any]:
        found: list[Any] = [None] * self.group_size
        dist.all_gather_object(found, given, self.group)
        return found

    @staticmethod
    def get_low_latency_rdma_size_hint(
        num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int
    ) -> int:
        """Two sets of: messages to send, messages to receive, counts."""
        dispatch = 16 + max(2 * hidden, hidden + hidden // 128 * 4)
        combine = hidden // 128 * 4 + 2 * hidden
        received = num_experts * num_max_dispatch_tokens_per_rank * max(dispatch, combine)
        sent = max(
            num_max_dispatch_tokens_per_rank * dispatch, num_experts * num_max_dispatch_tokens_per_rank * combine
        )
        return 2 * (sent + received + -(-num_experts * 4 // 128) * 128) // 128 * 128 + 128

    def get_dispatch_layout(
        self,
        topk_idx: torch.Tensor,
        num_experts: int,
        previous_event: Event | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> Any:
        assert topk_idx.dim() == 2 and topk_idx.is_contiguous() and topk_idx.dtype == torch.int64 and num_experts > 0
        assert (topk_idx < num_experts).all() and (topk_idx >= -1).all()
        each = num_experts // self.group_size
        in_rank = torch.zeros(len(topk_idx), self.group_size, dtype=torch.bool)
        for token, slot in (topk_idx >= 0).nonzero().tolist():
            in_rank[token, int(topk_idx[token, slot]) // each] = True
        per_expert = torch.bincount(topk_idx[topk_idx >= 0], minlength=num_experts).int()
        return in_rank.sum(0).int(), None, per_expert, in_rank, Event(None)

    def dispatch(
        self,
        x: Any,
        handle: Any = None,
        num_tokens_per_rank: torch.Tensor | None = None,
        num_tokens_per_rdma_rank: torch.Tensor | None = None,
        is_token_in_rank: torch.Tensor | None = None,
        num_tokens_per_expert: torch.Tensor | None = None,
        topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        expert_alignment: int = 1,
        num_worst_tokens: int = 0,
        config: Any = None,
        previous_event: Event | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> Any:
        if handle is not None:
            assert topk_idx is None and topk_weights is None
            assert x.dim() == 2 and x.is_contiguous() and x.dtype == torch.bfloat16 and len(x) == len(handle[1])
            theirs, place = self._everybody(x), x.new_empty(len(handle[0]), x.shape[1])
            rows = [theirs[rank][token] for rank, token in handle[0]]
            finish = _later((place, torch.stack(rows) if rows else place.clone()))
            return place, None, None, None, None, _event(finish, async_finish)
        assert num_tokens_per_rank is not None and num_tokens_per_rdma_rank is None
        assert is_token_in_rank is not None and num_tokens_per_expert is not None
        assert topk_idx is not None and topk_weights is not None
        rows, scales = x if isinstance(x, tuple) else (x, None)
        assert rows.dim() == 2 and rows.is_contiguous() and rows.shape[1] * rows.element_size() % 16 == 0
        assert rows.dtype == (torch.bfloat16 if scales is None else torch.float8_e4m3fn)
        if scales is not None:
            assert scales.dtype == torch.float32 and scales.shape == (len(rows), rows.shape[1] // 128)
        assert is_token_in_rank.dtype == torch.bool and is_token_in_rank.shape == (len(rows), self.group_size)
        assert num_tokens_per_rank.dtype == num_tokens_per_expert.dtype == torch.int32
        assert topk_idx.dtype == torch.int64 and topk_weights.dtype == torch.float32
        assert topk_idx.shape == topk_weights.shape and topk_idx.is_contiguous() and topk_weights.is_contiguous()
        assert topk_idx.shape[1] <= 32
        each = len(num_tokens_per_expert) // self.group_size
        arrays = (rows.view(torch.uint8), scales, topk_idx, topk_weights, is_token_in_rank)
        came, source = [], []
        for rank, theirs in enumerate(self._everybody(arrays)):
            here = theirs[4][:, self.rank]
            came.append([None if array is None else array[here] for array in theirs[:4]])
            source += [(rank, token) for token in here.nonzero().flatten().tolist()]
        values, found_scales, ids, weights = (
            None if part[0] is None else torch.cat(part) for part in zip(*came, strict=True)
        )
        assert values is not None and ids is not None and weights is not None
        own = ids - self.rank * each
        ids = torch.where((own >= 0) & (own < each), own, -1)
        weights = torch.where(ids >= 0, weights, 0.0)
        counts = torch.bincount(ids[ids >= 0], minlength=each)
        counts = -(-counts // expert_alignment) * expert_alignment
        places = [torch.empty_like(array) for array in (values, ids, weights)]
        finish = _later(*zip(places, (values, ids, weights), strict=True))
        recv_x: Any = places[0].view(rows.dtype)
        if found_scales is not None:
            recv_x = (recv_x, found_scales)
        handle = (source, is_token_in_rank)
        return recv_x, places[1], places[2], counts.tolist(), handle, _event(finish, async_finish)

    def combine(
        self,
        x: torch.Tensor,
        handle: Any,
        topk_weights: torch.Tensor | None = None,
        bias: Any = None,
        config: Any = None,
        previous_event: Event | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> Any:
        source, in_rank = handle
        assert x.dim() == 2 and x.is_contiguous() and x.dtype == torch.bfloat16 and len(x) == len(source)
        if topk_weights is not None:
            assert topk_weights.dtype == torch.float32 and topk_weights.is_contiguous() and len(topk_weights) == len(x)
        totals = [None if one is None else torch.zeros(len(in_rank), one.shape[1]) for one in (x, topk_weights)]
        for *arrays, tokens in self._everybody((x, topk_weights, source)):
            for total, rows in zip(totals, arrays, strict=True):
                for row, (rank, token) in zip(rows if total is not None else (), tokens, strict=total is not None):
                    if total is not None and rank == self.rank:
                        total[token] += row.float()
        pairs = [
            (torch.empty_like(one, dtype=dtype), one.to(dtype))
            for one, dtype in zip(totals, (x.dtype, torch.float32), strict=True)
            if one is not None
        ]
        found = [place for place, _ in pairs]
        return found[0], found[1] if len(found) > 1 else None, _event(_later(*pairs), async_finish)

    def low_latency_dispatch(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int,
        cumulative_local_expert_recv_stats: Any = None,
        dispatch_wait_recv_cost_stats: Any = None,
        use_fp8: bool = True,
        round_scale: bool = False,
        use_ue8m0: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
    ) -> Any:
        most, hidden = num_max_dispatch_tokens_per_rank, x.shape[1]
        assert self.low_latency_mode and x.dim() == 2 and x.is_contiguous() and x.dtype == torch.bfloat16
        assert hidden in HIDDEN_SIZES, "Unsupported hidden"
        assert topk_idx.dim() == 2 and topk_idx.is_contiguous() and topk_idx.dtype == torch.int64
        assert len(x) == len(topk_idx) <= most and topk_idx.shape[1] <= 11
        assert num_experts % self.group_size == 0 and self.group_size * most % 4 == 0
        assert self.get_low_latency_rdma_size_hint(most, hidden, self.group_size, num_experts) <= self.num_rdma_bytes
        assert not (async_finish and return_recv_hook)
        each = num_experts // self.group_size
        values = torch.full((each, self.group_size * most, hidden), torch.nan, dtype=torch.bfloat16)
        counts, sources = torch.zeros(each, dtype=torch.int32), [[] for _ in range(each)]
        for rank, (rows, ids) in reversed(list(enumerate(self._everybody((x, topk_idx))))):
            for token, slot in (ids // each == self.rank).logical_and(ids >= 0).nonzero().tolist():
                expert = int(ids[token, slot]) % each
                values[expert, counts[expert]] = rows[token]
                counts[expert] += 1
                sources[expert].append((rank, token, slot))
        place = torch.empty_like(values)
        pairs, recv_x = [(place, values)], place
        if use_fp8:
            groups = values.float().unflatten(2, (-1, 128))
            scales = groups.abs().amax(3).clamp(min=1e-4) / 448
            codes = (groups / scales[..., None]).to(torch.float8_e4m3fn).flatten(2)
            place = torch.empty_like(codes)
            # Column-major, for TMA.
            places = torch.empty(each, hidden // 128, self.group_size * most).mT
            pairs, recv_x = [(place, codes), (places, scales)], (place, places)
        recv_count = torch.empty_like(counts)
        finish = _later(*pairs, (recv_count, counts))
        if not return_recv_hook:
            finish()
        handle = (sources, None, most, hidden, num_experts)
        return recv_x, recv_count, handle, Event(None), finish if return_recv_hook else None

    def low_latency_combine(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
        handle: Any,
        use_logfmt: bool = False,
        zero_copy: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        out: torch.Tensor | None = None,
        combine_wait_recv_cost_stats: Any = None,
    ) -> Any:
        sources, _, most, hidden, num_experts = handle
        assert x.is_contiguous() and x.dtype == torch.bfloat16
        assert x.shape == (num_experts // self.group_size, self.group_size * most, hidden)
        assert topk_idx.dtype == torch.int64 and topk_weights.dtype == torch.float32
        assert topk_idx.shape == topk_weights.shape and topk_idx.is_contiguous() and topk_weights.is_contiguous()
        total = torch.zeros(len(topk_idx), hidden)
        for blocks, theirs in self._everybody((x, sources)):
            for block, places in zip(blocks, theirs, strict=True):
                for row, (rank, token, slot) in zip(block, places, strict=False):
                    if rank == self.rank:
                        total[token] += topk_weights[token, slot] * row.float()
        found = torch.empty(total.shape, dtype=x.dtype) if out is None else out
        assert found.shape == total.shape and found.is_contiguous() and found.dtype == x.dtype
        finish = _later((found, total.to(x.dtype)))
        if not return_recv_hook:
            finish()
        return found, Event(None), finish if return_recv_hook else None


class ElasticBuffer:
    """DeepEP 2: rows arrive in any order, another one in each first dispatch."""

    def __init__(self, group: Any, num_max_tokens_per_rank: int) -> None:
        self._older, self.num_max_tokens_per_rank, self._number = Buffer(group), num_max_tokens_per_rank, 0
        self.rank_idx, self.num_ranks = self._older.rank, self._older.group_size

    def dispatch(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        num_experts: int | None = None,
        async_with_compute_stream: bool = False,
        handle: Any = None,
    ) -> Any:
        if handle is not None:
            assert topk_idx is None and topk_weights is None
            came, *_, event = self._older.dispatch(x, handle, async_finish=async_with_compute_stream)
            return came, None, None, handle, event
        assert topk_idx is not None and num_experts is not None and len(x) <= self.num_max_tokens_per_rank
        per_rank, _, per_expert, in_rank, _ = self._older.get_dispatch_layout(topk_idx, num_experts)
        came, ids, weights, _, (source, in_rank), _ = self._older.dispatch(
            x, num_tokens_per_rank=per_rank, is_token_in_rank=in_rank, num_tokens_per_expert=per_expert,
            topk_idx=topk_idx, topk_weights=topk_weights,
        )  # fmt: skip
        self._number += 1
        order = torch.randperm(len(came), generator=torch.Generator().manual_seed(self._number))
        places = [torch.empty_like(array) for array in (came, ids, weights)]
        finish = _later(*((place, array[order]) for place, array in zip(places, (came, ids, weights), strict=True)))
        handle = ([source[row] for row in order.tolist()], in_rank)
        return *places, handle, _event(finish, async_with_compute_stream)

    def combine(
        self,
        x: torch.Tensor,
        handle: Any,
        topk_weights: torch.Tensor | None = None,
        async_with_compute_stream: bool = False,
    ) -> Any:
        return self._older.combine(x, handle, topk_weights, async_finish=async_with_compute_stream)
