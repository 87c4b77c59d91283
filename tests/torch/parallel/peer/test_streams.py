"""Streams of a GPU by stand-ins of torch's: which there are, what is noted on one, and what another waits for."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

pytest.importorskip("torch")

import torch

from moe_core.specs import Activation
from moe_torch.parallel.peer import chunks
from moe_torch.parallel.peer.streams import GradientOverlap, Streams, _stream

GPU = torch.device("cuda", 0)


@pytest.fixture
def calls() -> Iterator[list[tuple[Any, ...]]]:
    """What is asked of streams, in order."""
    found: list[tuple[Any, ...]] = []

    class Stream:
        def __init__(self, device: torch.device, priority: int = 0) -> None:
            assert device == GPU
            self.priority = priority

        def wait_event(self, event: Event) -> None:
            found.append((self, event.stream))

    class Event:
        stream: Stream | None = None

        def record(self, stream: Stream) -> None:
            self.stream = stream

    @contextlib.contextmanager
    def entered(stream: Stream) -> Iterator[None]:
        found.append(("on", stream))
        yield
        found.append(("off", stream))

    current = Stream(GPU)
    with mock.patch.multiple(
        torch.cuda, Stream=Stream, Event=Event, stream=entered, current_stream=lambda device: current
    ):
        _stream.cache_clear()
        yield found
        _stream.cache_clear()


def test_streams_of_a_gpu(calls: list[tuple[Any, ...]]) -> None:
    """Copies go ahead of what is computed, and every call has the same streams."""
    one, other = Streams(GPU), Streams(GPU)
    every = one.computes, one.copies, one.stores
    assert len({id(stream) for stream in every}) == 3 and every == (other.computes, other.copies, other.stores)
    assert [stream.priority for stream in every] == [0, -1, 0]  # type: ignore[union-attr]
    one.wait(one.copies, one.marked(one.stores))
    with one.on(one.copies):
        one.wait(one.computes, None)
    assert calls == [(one.copies, one.stores), ("on", one.copies), ("off", one.copies)]


def test_rows_of_gradients_travel_beside_what_is_computed(calls: list[tuple[Any, ...]]) -> None:
    """They are waited for once; before they have left there is nothing to wait for."""
    streams, rows, values = Streams(GPU), torch.ones(2), torch.zeros(2)
    overlap = GradientOverlap(streams)
    overlap.wait()
    assert not calls

    def push() -> torch.Tensor:
        calls.append(("push",))
        return rows

    assert overlap.start(push, values) is rows
    computes, copies, stores = streams.computes, streams.copies, streams.stores
    assert calls == [(copies, computes), ("on", copies), ("push",), ("off", copies)]
    calls.clear()
    for _ in range(2):
        overlap.wait()
    assert calls == [(computes, copies), (computes, stores)]


def test_a_cpu_has_one_order() -> None:
    streams = Streams(torch.device("cpu"))
    assert (streams.computes, streams.copies, streams.stores) == (None, None, None)
    assert streams.marked(None) is None
    with streams.on(None):
        streams.wait(None, None)


@pytest.mark.parametrize(
    ("number", "count", "limits"), [(0, 1, (None, None)), (0, 3, (None, 44)), (1, 3, (88, 44)), (2, 3, (88, None))]
)
def test_products_of_two_chunks_share_the_multiprocessors(number: int, count: int, limits: tuple[Any, Any]) -> None:
    owner: Any = SimpleNamespace(spec=SimpleNamespace(activation=Activation("silu")))
    card = SimpleNamespace(multi_processor_count=132)
    with mock.patch.object(torch.cuda, "get_device_properties", lambda device: card):
        assert chunks._limits(number, count, owner, GPU) == limits
    assert chunks._limits(number, count, owner, torch.device("cpu")) == (None, None)
