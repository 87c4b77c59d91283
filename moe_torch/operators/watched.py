"""Counts of a layer's forwards on the device, for `moe_torch.monitor`."""

from __future__ import annotations

import time
import weakref
from dataclasses import dataclass
from typing import Any

import torch

from moe_torch.bridge.operator import LIBRARY
from moe_torch.bridge.private import in_backward

LIBRARY.define(
    "watched(Tensor(a!) counts, Tensor(b!) sums, Tensor? ids, Tensor? tokens_per_expert, Tensor? logits, "
    "Tensor? token_mask, Tensor? overflow, int number) -> ()",
    tags=(torch.Tag.pt2_compliant_tag,),
)
#: Behind the counts of E experts: slots without an expert, kept slots, overflow, and forwards with losses.
NO_EXPERT, KEPT, OVERFLOW, FORWARDS, BEHIND = 0, 1, 2, 3, 4


@dataclass
class Sampling:
    """Of all layers of a monitor. due: this step's losses are read. began: when the window's first forward ran."""

    due: bool = False
    began: float | None = None


class Watch:
    """Counts of one layer. counts int64 `[E + BEHIND]`, sums fp32 `[2]` of (load-balancing loss, z-loss).

    losses: a function of (logits, tokens_per_expert, token_mask) for these. drops: a capacity limit may drop slots.
    Copies and pickles of a layer have none.
    """

    def __init__(self, sampling: Sampling, counts: Any, sums: Any, losses: Any, top_k: int, drops: bool) -> None:
        self.sampling, self.counts, self.sums, self.losses = sampling, counts, sums, losses
        self.top_k, self.drops = top_k, drops
        self.number = 1 + max(_watches, default=0)
        _watches[self.number] = self

    def __reduce__(self) -> Any:
        return type(None), ()

    def __call__(
        self,
        ids: Any = None,
        tokens_per_expert: Any = None,
        logits: Any = None,
        token_mask: Any = None,
        overflow: Any = None,
    ) -> None:
        """ids alone are counted; logits alone give the z-loss."""
        if torch.compiler.is_compiling():
            logits = None if logits is None else logits.detach()
            arguments = (ids, tokens_per_expert, logits, token_mask, overflow, self.number)
            torch.ops.moebius.watched(self.counts, self.sums, *arguments)
            return
        self.add(ids, tokens_per_expert, logits, token_mask, overflow)

    @torch.no_grad()
    def add(self, ids: Any, tokens_per_expert: Any, logits: Any, token_mask: Any, overflow: Any) -> None:
        # A checkpoint's backward runs forwards again.
        if in_backward():
            return
        sampling, counts = self.sampling, self.counts
        size = len(counts) - BEHIND
        if sampling.began is None:
            sampling.began = time.perf_counter()
        if tokens_per_expert is not None:
            counts[:size].add_(tokens_per_expert)
        elif ids is not None:
            self.top_k = ids.shape[-1]
            # Ids outside [0, E) are no expert.
            places = ids.reshape(-1).long().clamp(-1, size).remainder(size + 1)
            counts.scatter_add_(0, places, counts.new_ones(()).expand(len(places)))
        if self.drops and ids is not None:
            counts[size + KEPT].add_((ids >= 0).sum())
        if overflow is not None:
            counts[size + OVERFLOW].add_(overflow.sum())
        if logits is not None and (sampling.due or (logits.is_cuda and torch.cuda.is_current_stream_capturing())):
            self.sums.add_(torch.stack(self.losses(logits, tokens_per_expert, token_mask)))
            counts[size + FORWARDS].add_(1)


_watches: weakref.WeakValueDictionary[int, Watch] = weakref.WeakValueDictionary()


def _add(counts: Any, sums: Any, *arguments: Any) -> None:
    # The compiler may pass copies of a layer's counts.
    *arrays, number = arguments
    watch = _watches.get(number)
    if watch is not None:
        watch.add(*arrays)
        if counts.data_ptr() != watch.counts.data_ptr():
            counts.copy_(watch.counts)
            sums.copy_(watch.sums)


LIBRARY.impl("watched", _add, "CPU")
LIBRARY.impl("watched", _add, "CUDA")
torch.library.register_fake("moebius::watched", lambda *arguments: None, lib=LIBRARY)
