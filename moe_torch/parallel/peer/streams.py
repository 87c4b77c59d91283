"""Streams of a GPU: rows travel while other work computes."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch


@functools.cache
def _stream(device: torch.device, priority: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device, priority=priority)


class Streams:
    """Three streams of a GPU. On a CPU all are None, and everything runs in order."""

    def __init__(self, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self.computes = torch.cuda.current_stream(device) if on_gpu else None
        self.copies = _stream(device, -1) if on_gpu else None
        #: Products 2 beside products 1; in training a shared expert beside rows that travel.
        self.stores = _stream(device, 0) if on_gpu else None

    @staticmethod
    def on(stream: torch.cuda.Stream | None) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext() if stream is None else torch.cuda.stream(stream)

    @staticmethod
    def marked(stream: torch.cuda.Stream | None) -> torch.cuda.Event | None:
        if stream is None:
            return None
        event = torch.cuda.Event()
        event.record(stream)
        return event

    @staticmethod
    def wait(stream: torch.cuda.Stream | None, event: torch.cuda.Event | None) -> None:
        if stream is not None and event is not None:
            stream.wait_event(event)


class GradientOverlap:
    """Rows of gradients travel on `copies`, see `moe_torch.parallel.route.Overlap`."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._under_way: Any = None

    def start(self, push: Callable[[], torch.Tensor], values: torch.Tensor) -> torch.Tensor:
        streams = self._streams
        streams.wait(streams.copies, streams.marked(streams.computes))
        with streams.on(streams.copies):
            rows = push()
        # Memory of the computing stream, held until it waits.
        self._under_way = streams.marked(streams.copies), values
        return rows

    def wait(self) -> None:
        if self._under_way is not None:
            streams, (arrived, _) = self._streams, self._under_way
            streams.wait(streams.computes, arrived)
            # It may be given the memory of what ran meanwhile.
            streams.wait(streams.computes, streams.marked(streams.stores))
            self._under_way = None
