"""Messages and memory of an exchange plan, and the part of a tensor axis."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from moe_core.base import dtypes, plan_type
from moe_core.formats import QuantizedSpec, quantized_shapes
from moe_core.parallel.bounds import is_direct, runs_in_lanes
from moe_core.parallel.spec import ExchangeSpec
from moe_core.parallel.tensor import TensorSplit


@plan_type
@dataclass(frozen=True)
class Collective:
    """One message of a rank: `dispatch` and `combine` are DeepEP's, `push` is stores to peers. rows, bytes: the most
    it sends, its own part included. axis: `experts`, `tensor`, `between hosts` or `inside a host`.
    """

    kind: str
    what: str
    dtype: str
    rows: int
    bytes: int
    axis: str = "experts"

    def __str__(self) -> str:
        over = {"experts": "", "tensor": " over the tensor axis"}.get(self.axis, f" {self.axis}")
        return f"{self.kind}{over} of {self.what}: {self.rows} rows, {self.bytes} bytes of {self.dtype}"


BARRIER = Collective("barrier", "arrival", "int32", 0, 0)


@plan_type
@dataclass(frozen=True)
class ExchangeBuffer:
    """Memory of a rank. symmetric: its peers have the address."""

    name: str
    bytes: int
    symmetric: bool


def deep_ep_unit(ranks: int) -> int:
    """Bytes that a row of DeepEP must be a multiple of: more beyond a node of 8."""
    return 32 if ranks <= 8 else 512


class DeepEPMessages(NamedTuple):
    """Messages through a buffer of DeepEP. rows: that a rank sends. results: of experts. width: ids of a row."""

    rows: int
    results: int
    width: int
    ranks: int
    dtype: str
    row_bytes: int

    def forward(self, header: int) -> tuple[Collective, ...]:
        routing = self.rows * (deep_ep_unit(self.ranks) + 12 * self.width)
        return (
            Collective("all_gather", "header", "int32", 1, 4 * header),
            Collective("dispatch", "numbers, ids and weights", "int32", self.rows, routing),
            *self._both("rows", "results", 0),
        )

    def backward(self) -> tuple[Collective, ...]:
        return self._both("d_output", "d_x and d_weights", 4 * self.width)

    def _both(self, out: str, home: str, more: int) -> tuple[Collective, ...]:
        return (
            Collective("dispatch", out, self.dtype, self.rows, self.rows * self.row_bytes),
            Collective("combine", home, self.dtype, self.results, self.results * (self.row_bytes + more)),
        )


class TensorMessages(NamedTuple):
    """Messages between the ranks that split each expert, around the exchange's. header: its number of int32."""

    split: TensorSplit
    tokens: int
    top_k: int
    d_model: int
    dtype: str
    mode: str
    header: int

    @property
    def _brought(self) -> int:
        return self.tokens * self.split.token_ranks

    @property
    def _row_bytes(self) -> int:
        return self.d_model * dtypes.itemsize(self.dtype)

    def _gather(self, what: str, dtype: str, rows: int, bytes: int) -> Collective:
        return Collective("all_gather", what, dtype, rows, bytes, "tensor")

    def _parts(self, what: str, width: int) -> Collective:
        kind = "all_to_all" if self.split.tokens == "split" else "all_gather"
        return Collective(kind, what, "float32", self._brought, self._brought * width * 4, "tensor")

    def forward(self, exchange: tuple[Collective, ...]) -> tuple[Collective, ...]:
        header, routing = self.header * 4, self.tokens * 2 * self.top_k * 4
        if self.split.tokens == "replicated":
            first = [self._gather("header", "int32", 1, header)]
        else:
            label, first = "ids and weights", []
            if self.mode == "all_to_all":
                first = [self._gather("header", "int32", 1, header)]
            else:
                label, routing = f"header, {label}", routing + header
            first.append(self._gather(label, "int32", self.tokens, routing))
            first.append(self._gather("rows", self.dtype, self.tokens, self.tokens * self._row_bytes))
        return (*first, *exchange, self._parts("parts", self.d_model))

    def backward(self, exchange: tuple[Collective, ...]) -> tuple[Collective, ...]:
        first = [self._gather("d_output", self.dtype, self.tokens, self.tokens * self._row_bytes)]
        last = self._parts("d_x", self.d_model), self._parts("d_weights", self.top_k)
        return (*first[: self.split.tokens == "split"], *exchange, *last)

    def buffers(self) -> tuple[ExchangeBuffer, ...]:
        sizes = {
            "gathered rows": self._brought * self._row_bytes if self.split.tokens == "split" else 0,
            "parts": self._brought * self.d_model * 4,
            "returned parts": self.split.size * self.tokens * self.d_model * 4,
        }
        return tuple(ExchangeBuffer(name, size, False) for name, size in sizes.items() if size)


class HostMessages(NamedTuple):
    """Messages between hosts, then inside them, of equally many tokens on each rank. results: the most of an owner."""

    hosts: int
    local: int
    tokens: int
    top_k: int
    per_rank: int
    results: int
    dtype: str
    row_bytes: int
    header: int

    @property
    def _arriving(self) -> int:
        """The most tokens at a gateway."""
        return self.hosts * self.tokens

    @property
    def _out(self) -> tuple[tuple[str, int], ...]:
        sent, passed = self.tokens * min(self.top_k, self.hosts), self._arriving * min(self.top_k, self.local)
        return ("between hosts", sent), ("inside a host", passed)

    @property
    def _home(self) -> tuple[tuple[str, int], ...]:
        passed = self._arriving * min(self.top_k, self.local * self.per_rank)
        return ("inside a host", self.results), ("between hosts", passed)

    @staticmethod
    def _send(ways: tuple[tuple[str, int], ...], what: str, dtype: str, each: int) -> list[Collective]:
        return [Collective("all_to_all", what, dtype, rows, rows * each, axis) for axis, rows in ways]

    def forward(self) -> tuple[Collective, ...]:
        messages = [Collective("all_gather", "header", "int32", 1, 4 * self.header)]
        for way, groups in zip(self._out, (self.hosts, self.local), strict=True):
            size = 4 * groups * (self.header + 2)
            messages.append(Collective("all_to_all", "header and counts", "int32", groups, size, way[0]))
            messages += self._send((way,), "ids and weights", "int32", 8 * self.top_k)
        messages += self._send(self._out[1:], "homes", "float32", 4)
        messages += self._send(self._out, "rows", self.dtype, self.row_bytes)
        return (*messages, *self._send(self._home, "results", self.dtype, self.row_bytes))

    def backward(self) -> tuple[Collective, ...]:
        kinds = (self._out, "d_output"), (self._home, "d_x")
        rows = [one for ways, what in kinds for one in self._send(ways, what, self.dtype, self.row_bytes)]
        return (*rows, *self._send(self._home, "d_weights", "float32", 4))

    def buffers(self) -> tuple[ExchangeBuffer, ...]:
        sizes = {"rows at a gateway": self._arriving, "results at a gateway": self._home[1][1]}
        return tuple(ExchangeBuffer(name, rows * self.row_bytes, False) for name, rows in sizes.items())


def quantized_bytes(spec: ExchangeSpec, d_model: int) -> list[tuple[str, str, int]]:
    """(array, dtype, bytes of a row) of quantised rows."""
    format = spec.format
    assert format is not None
    shapes = quantized_shapes(QuantizedSpec(format), (1, d_model))
    dtypes_of = {"values": format.own_element.dtype, "scales": format.scale_dtypes[0]}
    return [(name, dtype, getattr(shapes, name)[-1] * dtypes.itemsize(dtype)) for name, dtype in dtypes_of.items()]


def peak_of(spec: ExchangeSpec, training: bool, buffers: tuple[ExchangeBuffer, ...], output: int, scratch: int) -> int:
    """Return the most bytes that buffers and the output take at once, see `ExchangePlan.peak`."""
    size = {buffer.name: buffer.bytes for buffer in buffers}
    received, results = size["received rows"], size.get("results", 0)
    symmetric = sum(buffer.bytes for buffer in buffers if buffer.symmetric)
    returned = size.get("rows by slot", 0 if symmetric else received)
    kept = returned if training else 0
    gathered, parts = size.get("gathered rows", 0), size.get("parts", 0)
    ends = parts + size.get("returned parts", 0) + output + kept
    if spec.mode == "peer":
        # Gathered rows stay until the last chunk has been sent. Lanes compute two chunks at once.
        scratch *= 1 + runs_in_lanes(spec)
        behind, stays = parts or output, 0
        if spec.chunks > 1:
            # The output is allocated first, since each chunk writes to it.
            gathered, behind, stays = gathered + behind, 0, gathered + behind
        held = max(gathered + returned, stays + results + returned + scratch, stays + results + kept + behind)
        if is_direct(spec) and spec.chunks == 1 and not training:
            # A call like an earlier one has the memory of all its launches from the start.
            held = max(held, gathered + behind + scratch)
        return symmetric + max(held, ends)
    routing = size["received ids"] + size["received weights"]
    # Rows that are sent weigh less than what comes back for them.
    room = size["returned results"]
    # Experts store results of tokens' rows beside the room for those that come home.
    beside = room if (spec.mode, spec.rows, "rows by slot" in size) == ("all_to_all", "tokens", False) else 0
    passed, passed_back = size.get("rows at a gateway", 0), size.get("results at a gateway", 0)
    return routing + max(
        passed + gathered + received + size.get("rows by slot", 0),
        returned + results + beside + scratch,
        results + passed_back + room + (parts or output) + kept,
        ends,
    )
