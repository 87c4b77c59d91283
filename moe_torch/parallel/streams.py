"""Streams of a GPU on which rows travel, and products store theirs, beside what is computed."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch


@functools.cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    """Where rows are copied, ahead of what is computed."""
    return torch.cuda.Stream(device, priority=-1)


@functools.cache
def _store_stream(device: torch.device) -> torch.cuda.Stream:
    """Where products 2 store rows while `copies` wait, and products 1 go on."""
    return torch.cuda.Stream(device)


class Streams:
    """Of a GPU: what runs in order, and what runs beside it. On a CPU there is one order."""

    def __init__(self, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self.computes = torch.cuda.current_stream(device) if on_gpu else None
        self.copies = _copy_stream(device) if on_gpu else None
        #: Of products 2 beside products 1, and of a shared expert beside rows that travel, with gradients.
        self.stores = _store_stream(device) if on_gpu else None

    @staticmethod
    def on(stream: torch.cuda.Stream | None) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext() if stream is None else torch.cuda.stream(stream)

    @staticmethod
    def marked(stream: torch.cuda.Stream | None) -> torch.cuda.Event | None:
        """What another stream can wait for."""
        if stream is None:
            return None
        event = torch.cuda.Event()
        event.record(stream)
        return event

    @staticmethod
    def wait(stream: torch.cuda.Stream | None, event: torch.cuda.Event | None) -> None:
        if stream is not None and event is not None:
            stream.wait_event(event)


class Beside:
    """Rows of gradients that travel on `copies` until the stream that computes waits for them."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._under_way: Any = None

    def start(self, push: Callable[[], torch.Tensor], values: torch.Tensor) -> torch.Tensor:
        """What push returns, which sends values; nothing may read it before `wait`."""
        streams = self._streams
        streams.wait(streams.copies, streams.marked(streams.computes))
        with streams.on(streams.copies):
            rows = push()
        # The values stay until then: their memory is of the stream that computes.
        self._under_way = streams.marked(streams.copies), values
        return rows

    def wait(self) -> None:
        """The stream that computes waits for them, and for what has run beside them, whose memory it may be given."""
        if self._under_way is not None:
            streams, (arrived, _) = self._streams, self._under_way
            streams.wait(streams.computes, arrived)
            streams.wait(streams.computes, streams.marked(streams.stores))
            self._under_way = None
