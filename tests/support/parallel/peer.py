"""Buffers that ranks store into, filled with NaN, and faults of mode `peer`."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch

from moe_torch.operators import pushed
from moe_torch.parallel.peer import counted, direct, symmetric
from moe_torch.parallel.route import ExchangeCall

#: Faults of this mode alone, then those of all modes.
PEER_FAULTS = (
    *("wrong_row", "counts_off_by_one_place", "weights_of_another", "barrier_left_out"),
    *("result_of_another", "result_at_wrong_home"),
)
_FAULTS = (*PEER_FAULTS, "gradient_not_returned", "output_gradient_of_another", "weight_gradient_of_another")
#: Faults where every token has its place.
DIRECT_FAULTS = (
    *("ids_of_another", "weights_not_sent", "other_place", "rows_not_waited_for"),
    *("result_of_another", "result_at_wrong_home"),
)


#: Faults of chunks whose products run side by side.
CHUNK_FAULTS = ("one_set_of_buffers", "product_2_left_out", "result_of_another_chunk", "too_few_sets_of_buffers")


#: What ranks that need no counts store into, of all calls.
_direct: list[direct.Memory] = []


def _poison(*regions: symmetric.Region) -> None:
    """NaN, and -1 in integers."""
    for region in regions:
        if region.own.dtype.itemsize == 1:
            region.own.view(torch.uint8).fill_(0x7F)
        else:
            region.own.fill_(torch.nan if region.own.is_floating_point() else -1)


@contextlib.contextmanager
def poisoned_peer() -> Iterator[None]:
    """What ranks store into holds NaN, and -1 in integers, before each call."""
    with_counts, known, allocate, check = counted.memory_of, direct.memory_of, symmetric._on_cpu, ExchangeCall.check

    def filled(*arguments: Any) -> counted.Memory:
        found = with_counts(*arguments)
        # Before this rank says how many rows it sends, no peer stores here, and nothing is read.
        _poison(found.rows, found.scales, found.weights, found.tokens, found.sources)
        return found

    def noticed(*arguments: Any) -> direct.Memory:
        found = known(*arguments)
        if all(found.memory is not one.memory for one in _direct):
            _direct.append(found)
        return found

    def allocated(ranks: Any, size: int) -> list[torch.Tensor]:
        found = allocate(ranks, size)
        found[ranks.rank].fill_(0xFF)
        symmetric._told(ranks, None)
        return found

    def checked(*arguments: Any, backward: bool = False) -> None:
        # Before this rank tells its header, no peer stores here.
        for found in () if backward else _direct:
            # But that others load from here, of the step before.
            _poison(*(one for one in found[1:] if one is not found.d_weights))
        check(*arguments, backward=backward)

    with (
        mock.patch.object(counted, "memory_of", filled),
        mock.patch.object(direct, "memory_of", noticed),
        mock.patch.object(symmetric, "_on_cpu", allocated),
        mock.patch.object(ExchangeCall, "check", checked),
    ):
        yield


@contextlib.contextmanager
def broken_chunks(fault: str) -> Iterator[None]:
    """A fault of `CHUNK_FAULTS`, where every token has its place."""
    sets = {"one_set_of_buffers": 1, "too_few_sets_of_buffers": 2}.get(fault)
    if sets is not None:
        # Rows of later chunks come to where those of an earlier one have not been read.
        memory = direct.memory_of

        def fewer(ranks: Any, plan: Any, device: Any, number: int = 0) -> direct.Memory:
            return memory(ranks, plan, device, number % sets)

        with mock.patch.object(direct, "memory_of", fewer):
            yield
        return
    begun = pushed.BegunExperts
    real = begun.finish
    waiting: list[Any] = []

    def left_out(self: Any) -> Any:
        behind = self.begun._replace(steps=slice(len(self.begun.ready.prepared.plan.steps), None))
        return real(self._replace(begun=behind))

    def of_another(self: Any) -> Any:
        # The hidden rows of the chunk before.
        waiting.append(self)
        first = waiting[-2] if len(waiting) > 1 else self
        return real(first)

    with mock.patch.object(begun, "finish", left_out if fault == "product_2_left_out" else of_another):
        yield


@contextlib.contextmanager
def broken_direct(fault: str | None) -> Iterator[None]:
    """A fault planted where every token has its place, by name; none where the name is of another way's."""
    if fault in CHUNK_FAULTS:
        with broken_chunks(fault):
            yield
        return
    if fault not in DIRECT_FAULTS:
        yield
        return
    owner, name = {
        "ids_of_another": (direct.peer_ops, "push_tokens_once"),
        "weights_not_sent": (direct.peer_ops, "push_tokens_once"),
        "other_place": (direct.peer_ops, "push_tokens_once"),
        "result_of_another": (direct.peer_ops, "experts_push"),
        "result_at_wrong_home": (direct.peer_ops, "experts_push"),
        "rows_not_waited_for": (direct.DirectRoutes, "start_push"),
    }[fault]
    real = getattr(owner, name)

    def wrong(*arguments: Any, **options: Any) -> Any:
        first, second, *rest = arguments
        if fault == "ids_of_another":
            return real(first._replace(ids=first.ids.flip(0)), second, *rest, **options)
        if fault == "weights_not_sent":
            return real(first._replace(weights=torch.ones_like(first.weights)), second, *rest, **options)
        if fault == "other_place":
            table = torch.arange(options["placement"].num_experts, dtype=torch.int32)
            return real(first._replace(places_of_experts=table.flip(0)), second, *rest, **options)
        if fault == "result_of_another":
            return real(first, second, *rest[:2], rest[2].view(-1, 2).flip(1).reshape(-1))
        if fault == "result_at_wrong_home":
            return real(first, second, *rest[:2], rest[2].roll(len(rest[2]) // 2))
        # The last rank is slow, and nobody waits for its rows.
        time.sleep(0.3 * (first.ranks.rank == first.ranks.size - 1))
        first.send(second)
        return first.rows

    with mock.patch.object(owner, name, wrong):
        yield


@contextlib.contextmanager
def broken_peer(fault: str | None) -> Iterator[None]:
    """A planted fault, by name; none where the name is of another mode's."""
    if fault not in _FAULTS:
        yield
        return
    owner, name = {
        "wrong_row": (counted.peer_ops, "peer_places"),
        "counts_off_by_one_place": (counted.peer_ops, "push_counts"),
        "weights_of_another": (counted.peer_ops, "push_routing"),
        "barrier_left_out": (symmetric.Symmetric, "barrier"),
        "result_of_another": (counted.peer_ops, "result_addresses"),
        "result_at_wrong_home": (counted.peer_ops, "result_addresses"),
        "gradient_not_returned": (counted.peer_ops, "experts_push"),
        "output_gradient_of_another": (counted.CountedRoutes, "start_push"),
        "weight_gradient_of_another": (direct.peer_ops, "combine_pull_weights"),
    }[fault]

    def wrong(real: Any, *arguments: Any, **options: Any) -> Any:
        first, second, *rest = arguments
        if fault == "weight_gradient_of_another":
            return real(first._replace(rows=first.rows.flip(0)), second, **options)
        if fault == "counts_off_by_one_place":
            return real(torch.cat([first[:12], first[12:].roll(1)]), second, **options)
        if fault == "weights_of_another":
            return real(first.flip(0), second, *rest, **options)
        if fault == "result_of_another":
            return real(first.flip(0), second, *rest, **options)
        if fault == "result_at_wrong_home":
            return real(first * torch.tensor([-1, 1]) + torch.tensor([1, 0]), second, *rest, **options)
        if fault == "gradient_not_returned":
            return real(*arguments, gradients_at=options["gradients_at"].flip(0))
        if fault == "barrier_left_out":
            # The last rank is slow, and nobody waits for its rows.
            if rest[0] == "rows":
                return None
            real(*arguments, **options)
            time.sleep(0.3 * (second.rank == second.size - 1))
            return None
        if fault == "output_gradient_of_another":
            return real(first, second.flip(0) if rest == ["d_output"] else second, *rest)
        found = real(*arguments, **options)
        return found._replace(rows=found.rows.flip(0))

    owners = {owner, direct.DirectRoutes} if name == "start_push" else {owner}
    with contextlib.ExitStack() as stack:
        for one in owners:
            # A function, which becomes a method of a class.
            real = getattr(one, name)
            planted = lambda *given, real=real, **options: wrong(real, *given, **options)  # noqa: E731
            stack.enter_context(mock.patch.object(one, name, planted))
        yield
