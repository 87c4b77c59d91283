"""Buffers that ranks store into, filled with NaN, and faults of mode `peer`."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch

from moe_torch.parallel import peer, symmetric

#: Faults of this mode alone, then those of all modes.
PEER_FAULTS = ("wrong_row", "counts_off_by_one_place", "weights_of_another", "barrier_left_out", "result_of_another")
_FAULTS = (*PEER_FAULTS, "gradient_not_returned", "output_gradient_of_another")


@contextlib.contextmanager
def poisoned_peer() -> Iterator[None]:
    """What ranks store into holds NaN, and -1 in integers, before each call."""
    real = peer.memory_of

    def filled(*arguments: Any) -> peer.Memory:
        found = real(*arguments)
        # Before this rank says how many rows it sends, no peer stores here, and nothing is read.
        for region in (found.rows, found.scales, found.beside, found.tokens, found.sources):
            if region.own.dtype.itemsize == 1:
                region.own.view(torch.uint8).fill_(0x7F)
            else:
                region.own.fill_(torch.nan if region.own.is_floating_point() else -1)
        return found

    with mock.patch.object(peer, "memory_of", filled):
        yield


@contextlib.contextmanager
def broken_peer(fault: str | None) -> Iterator[None]:
    """A planted fault, by name; none where the name is of another mode's."""
    if fault not in _FAULTS:
        yield
        return
    owner, name = {
        "wrong_row": (peer.peer_ops, "peer_places"),
        "counts_off_by_one_place": (peer.peer_ops, "push_counts"),
        "weights_of_another": (peer.peer_ops, "push_routing"),
        "barrier_left_out": (symmetric.Symmetric, "barrier"),
        "result_of_another": (peer.peer_ops, "combine_push"),
        "gradient_not_returned": (peer.PeerRoutes, "start_total"),
        "output_gradient_of_another": (peer.PeerRoutes, "push"),
    }[fault]
    real = getattr(owner, name)

    def wrong(*arguments: Any, **options: Any) -> Any:
        first, second, *rest = arguments
        if fault == "counts_off_by_one_place":
            return real(torch.cat([first[:12], first[12:].roll(1)]), second, **options)
        if fault == "weights_of_another":
            return real(first.flip(0), second, *rest, **options)
        if fault == "result_of_another":
            return real(first, second.flip(0), *rest, **options)
        if fault == "gradient_not_returned" and rest[0].startswith("d_x"):
            return real(first, second.flip(0), *rest)
        if fault == "barrier_left_out":
            # The last rank is slow, and nobody waits for its rows.
            if rest[0] == "rows":
                return None
            real(*arguments, **options)
            time.sleep(0.3 * (second.rank == second.size - 1))
            return None
        found = real(*arguments, **options)
        if fault == "wrong_row":
            return found._replace(rows=found.rows.flip(0))
        return found.flip(0) if rest[-1:] == ["d_output"] else found

    with mock.patch.object(owner, name, wrong):
        yield
