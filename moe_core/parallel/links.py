"""The cost of a message: a line through measured times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from moe_core.base.checks import as_integer, finite_float, require_choice, set_integer
from moe_core.base.sizes import INT32_LIMIT
from moe_core.errors import InvalidInput

#: Kinds of messages. peer: stores to other ranks' memory, peer_pull: loads. ragged_all_to_all: of XLA.
KINDS = ("all_gather", "all_to_all", "peer", "peer_pull", "ragged_all_to_all")
WHERE = ("domain", "network")
_MOST_BYTES = 2**63


@dataclass(frozen=True)
class Link:
    """A way between two ranks: microseconds until a message's first byte arrives, and GB/s per direction."""

    latency_us: float
    bandwidth: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "latency_us", finite_float("latency_us", self.latency_us))
        if self.latency_us < 0:
            raise InvalidInput(f"latency_us must be at least 0, got {self.latency_us}; measure it")
        set_positive(self, "bandwidth")

    def us(self, size: float) -> float:
        return self.latency_us + size / self.bandwidth / 1e3 if size else 0.0


@dataclass(frozen=True)
class LinkTiming:
    """One measured message.

    kind: of KINDS. backend: such as `nccl`, `gloo` or `xla`. where: of WHERE. ranks: that took part. bytes: the most
    that a rank exchanges with others. us: median over repeats of the slowest rank. Raises InvalidInput.
    """

    kind: str
    backend: str
    where: str
    ranks: int
    bytes: int
    us: float

    def __post_init__(self) -> None:
        require_choice("kind", self.kind, KINDS)
        require_choice("where", self.where, WHERE)
        if not isinstance(self.backend, str) or not self.backend:
            raise InvalidInput(f"backend must be a name, got {self.backend!r}; say what moved the message")
        set_integer(self, "ranks", 2, INT32_LIMIT)
        object.__setattr__(self, "bytes", as_integer("bytes", self.bytes, 1, _MOST_BYTES))
        set_positive(self, "us")

    @property
    def gb_s(self) -> float:
        """GB/s of the busiest rank per direction, latency included."""
        return self.bytes / self.us / 1e3


def fit_link(timings: Sequence[LinkTiming]) -> Link:
    """Fit a link to timings, by squares of relative errors, so that all sizes count equally.

    One size gives a latency of 0. Example: 1000 bytes in 11 us and 1000000 bytes in 20 us fit a latency of 10.99 us and
    111 GB/s. Raises InvalidInput without a timing.
    """
    if not timings:
        raise InvalidInput("timings must hold at least one message, got none; measure some")
    size, us = np.array([[timing.bytes, timing.us] for timing in timings], np.float64).T
    if np.ptp(size):
        # Scaled columns keep the arithmetic exact enough.
        columns = np.stack([us.min() / us, size / us * (us / size).min()], axis=1)
        latency, per_byte = np.linalg.lstsq(columns, np.ones(len(us)), rcond=None)[0] * (us.min(), (us / size).min())
    else:
        latency, per_byte = 0.0, float(np.mean(us / size))
    if latency < 0:
        latency, per_byte = 0.0, float((size / us).sum() / (size / us).dot(size / us))
    if per_byte <= 0:
        # Only latency shows. The largest message bounds the bandwidth from below.
        last = int(size.argmax())
        latency, per_byte = float(np.median(us)), us[last] / size[last]
    return Link(float(latency), float(1 / per_byte / 1e3))


def set_positive(options: object, name: str) -> None:
    value = finite_float(name, getattr(options, name))
    if value <= 0:
        raise InvalidInput(f"{name} must be above 0, got {value}; measure it, or take it from a data sheet")
    object.__setattr__(options, name, value)
