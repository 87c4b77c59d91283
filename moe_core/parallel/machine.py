"""The links and speeds of GPUs, measured or assumed, and the exchange mode that suits them."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from moe_core.base import INT32_LIMIT
from moe_core.base.checks import as_integer, finite_float, require_choice, require_flag, require_kind, set_integer
from moe_core.errors import InvalidInput
from moe_core.parallel.placement import Placement
from moe_core.specs.tile_table import read_record, require_provenance, write_record

#: Kinds of messages. peer: stores to other ranks' memory, peer_pull: loads. ragged_all_to_all: of XLA.
KINDS = ("all_gather", "all_to_all", "peer", "peer_pull", "ragged_all_to_all")
WHERE = ("domain", "network")
_MOST_BYTES = 2**63


@dataclass(frozen=True)
class Link:
    """A way between ranks: us until a message's first byte arrives, GB/s per direction, us that a further peer adds."""

    latency_us: float
    bandwidth: float
    peer_us: float = 0.0

    def __post_init__(self) -> None:
        for name in ("latency_us", "peer_us"):
            value = finite_float(name, getattr(self, name))
            object.__setattr__(self, name, value)
            if value < 0:
                raise InvalidInput(f"{name} must be at least 0, got {value}; measure it")
        set_positive(self, "bandwidth")

    def us(self, size: float, peers: int = 1) -> float:
        """size: bytes to or from all peers."""
        return self.latency_us + self.peer_us * (peers - 1) + size / self.bandwidth / 1e3 if size else 0.0


@dataclass(frozen=True)
class LinkTiming:
    """One measured message: of KINDS, by a backend, at WHERE, between ranks. bytes: the most that a rank exchanges with
    others. us: median over repeats of the slowest rank.
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


#: The environment variable for a file of `moebius-tune --links`.
VARIABLE = "MOEBIUS_MACHINE"
FORMAT_VERSION = 1
#: The most tokens of all ranks for mode `all_gather`, unmeasured.
FEW_TOKENS = 256
_ROW_BYTES = 8192
_KIND_OF_MODE = {"padded": "all_to_all"}
_NUMBERS = ("domain", "tflops", "memory")
_FIELDS = ("nvlink", "network", *_NUMBERS, "measured")


@dataclass(frozen=True)
class Machine:
    """GPUs as a cost model sees them.

    domain: consecutive ranks that nvlink connects. network: connects domains, None: there is one. tflops: 10^12
    operations per second of products. memory: GB/s. measured: (kind, Link) of messages within a domain, by
    `links.KINDS`; others take nvlink. products: measured microseconds of a layer's forward, of one rank's tokens with
    all experts, and of all ranks' tokens with one rank's experts; None: from tflops and memory. forwards: a token
    crosses the network once to a host, which forwards it and returns sums, as DeepEP does and Moebius does not.
    assumed: what was not measured of the network, for captions. Raises InvalidInput.
    """

    nvlink: Link
    network: Link | None
    domain: int
    tflops: float
    memory: float
    measured: tuple[tuple[str, Link], ...] = ()
    products: tuple[float, float] | None = None
    forwards: bool = False
    assumed: str = ""

    def __post_init__(self) -> None:
        require_kind("nvlink", self.nvlink, Link)
        require_kind("network", self.network, Link, optional=True)
        set_integer(self, "domain", 1, INT32_LIMIT)
        set_positive(self, "tflops")
        set_positive(self, "memory")
        require_flag("forwards", self.forwards)
        object.__setattr__(self, "measured", tuple(self.measured))
        for kind, link in self.measured:
            require_choice("kind of measured", kind, KINDS)
            require_kind("link of measured", link, Link)
        if self.products is not None:
            alone, share = (finite_float("products", us) for us in self.products)
            object.__setattr__(self, "products", (alone, share))

    def link(self, mode: str) -> Link:
        """Return the link of a mode within a domain."""
        return dict(self.measured).get(_KIND_OF_MODE.get(mode, mode), self.nvlink)


#: Hosts of eight H200. Links within a host: measured on four, benchmarks/results/machine-4-h200.json. Between hosts:
#: assumed, 45 of nominally 50 GB/s a GPU, and latencies as of DeepEP's published times (tests/parallel/test_cost.py).
#: tflops, memory: of bf16 layers in docs/user/performance.md.
H200 = Machine(
    Link(20.6, 278.0),
    Link(20.0, 45.0, 0.05),
    8,
    620.0,
    4500.0,
    (
        ("all_gather", Link(23.7, 277.0)),
        ("all_to_all", Link(20.6, 278.0)),
        ("peer", Link(5.0, 356.0)),
        ("peer_pull", Link(5.8, 307.0)),
        ("ragged_all_to_all", Link(78.4, 9.9)),
    ),
    assumed="an unmeasured network of 45 GB/s a GPU, and 20 us a message and 0.05 us a peer",
)


@dataclass(frozen=True)
class MachineRecord:
    """A record of `moebius-tune --links`. provenance: gpu, driver, versions, commit, command, date. not_measured:
    (kind, reason).
    """

    machine: Machine
    timings: tuple[LinkTiming, ...]
    provenance: Mapping[str, Any]
    not_measured: tuple[tuple[str, str], ...] = ()

    @staticmethod
    def of(
        timings: Sequence[LinkTiming],
        provenance: Mapping[str, Any],
        *,
        domain: int,
        tflops: float,
        memory: float,
        not_measured: Sequence[tuple[str, str]] = (),
    ) -> MachineRecord:
        """Fit a machine to timings, nvlink to all_to_all within the domain. Raises InvalidInput without these."""
        by_kind: dict[tuple[str, str], list[LinkTiming]] = {}
        for timing in timings:
            by_kind.setdefault((timing.where, timing.kind), []).append(timing)
        if ("domain", "all_to_all") not in by_kind:
            raise InvalidInput("timings must hold all_to_all within a domain, got none; measure it")
        links = {key: fit_link(samples) for key, samples in by_kind.items()}
        measured = tuple((kind, links["domain", kind]) for kind in KINDS if ("domain", kind) in links)
        network = links.get(("network", "all_to_all"))
        machine = Machine(links["domain", "all_to_all"], network, domain, tflops, memory, measured)
        return MachineRecord(machine, tuple(timings), dict(provenance), tuple(not_measured))

    def save(self, path: str | Path) -> None:
        """Write the file. Raises InvalidInput if provenance lacks a field."""
        require_provenance(self.provenance, "provenance")
        machine = {name: value for name, value in dataclasses.asdict(self.machine).items() if name in _FIELDS}
        machine["measured"] = {kind: dataclasses.asdict(link) for kind, link in self.machine.measured}
        content = {"format": FORMAT_VERSION, "provenance": dict(self.provenance), "machine": machine}
        head = content | {"not_measured": dict(self.not_measured)}
        write_record(path, head, "timings", map(dataclasses.asdict, self.timings))

    @staticmethod
    def load(path: str | Path) -> MachineRecord:
        """Read a file. Raises InvalidInput for other files."""
        where = f"of {str(path)!r}"
        content = read_record(path, "a record that moebius-tune --links wrote", FORMAT_VERSION)
        _fields(content, ("format", "provenance", "machine", "not_measured", "timings"), f"the record {where}")
        machine = _machine(content["machine"], f"machine {where}")
        timings = content["timings"]
        if not isinstance(timings, list):
            raise InvalidInput(f"timings {where} must be a list, got {type(timings).__name__}; measure again")
        names = tuple(field.name for field in dataclasses.fields(LinkTiming))
        made = [LinkTiming(**_fields(one, names, f"timing {number} {where}")) for number, one in enumerate(timings)]
        missing = content["not_measured"]
        if not isinstance(missing, dict) or not all(isinstance(reason, str) for reason in missing.values()):
            raise InvalidInput(f"not_measured {where} must map kinds to reasons, got {missing!r:.120}; measure again")
        return MachineRecord(machine, tuple(made), content["provenance"], tuple(missing.items()))


def machine_of(machine: Machine | str | Path | None) -> Machine:
    """The machine, a path's record, or for None MOEBIUS_MACHINE's. Raises InvalidInput for other files."""
    if machine is None:
        named = os.environ.get(VARIABLE)
        if not named:
            raise InvalidInput(
                f"machine must be a Machine or the path of a record, or {VARIABLE} must name one, got None; measure "
                "one with moebius-tune --links, or pass moe_core.parallel.machine.H200"
            )
        machine = named
    if isinstance(machine, (str, Path)):
        return MachineRecord.load(machine).machine
    require_kind("machine", machine, Machine)
    return machine


def _machine(content: Any, name: str) -> Machine:
    fields = _fields(content, _FIELDS, name)
    measured = fields["measured"]
    if not isinstance(measured, dict):
        raise InvalidInput(f"measured of {name} must map kinds to links, got {measured!r:.120}; measure again")
    links = tuple((kind, _link(link, f"{kind} of {name}")) for kind, link in measured.items())
    network = None if fields["network"] is None else _link(fields["network"], f"network of {name}")
    nvlink = _link(fields["nvlink"], f"nvlink of {name}")
    return Machine(nvlink, network, *[fields[number] for number in _NUMBERS], measured=links)


def _link(content: Any, name: str) -> Link:
    # Older records lack peer_us.
    content = {"peer_us": 0.0} | content if isinstance(content, dict) else content
    return Link(**_fields(content, ("latency_us", "bandwidth", "peer_us"), name))


def _fields(content: Any, names: Sequence[str], name: str) -> dict[str, Any]:
    if not isinstance(content, dict) or set(content) != set(names):
        raise InvalidInput(f"{name} must have the fields {', '.join(names)}, got {content!r:.120}; measure again")
    return content


def choose_mode(
    tokens: int,
    placement: Placement,
    machine: Machine | str | Path | None = None,
    *,
    capturable: bool = False,
    symmetric: bool = False,
    row_bytes: int = _ROW_BYTES,
) -> tuple[str, str]:
    """Choose the mode of an exchange, and say why.

    Args:
        machine: as for `predict`. If measured, tokens are few if their rows take at most a message's latency.
        capturable: the host reads nothing, as under a CUDA graph.
        symmetric: ranks of a domain can store to each other's memory; used unless other messages were faster.
        row_bytes: bytes of a token.
    """
    require_kind("placement", placement, Placement)
    machine = machine_of(machine)
    require_flag("capturable", capturable)
    require_flag("symmetric", symmetric)
    row_bytes, ranks = as_integer("row_bytes", row_bytes, 1), placement.num_ranks
    if ranks == 1:
        return "all_gather", "one rank has all experts"
    few, why = FEW_TOKENS, "latency counts, not bytes"
    if "all_gather" in dict(machine.measured):
        gather = machine.link("all_gather")
        few = int(gather.latency_us * gather.bandwidth * 1e3 / row_bytes)
        why = f"their rows take less than the measured latency of {gather.latency_us:.0f} us"
    is_few = ranks * tokens <= few
    if symmetric and ranks <= machine.domain:
        plain, peer = machine.link("all_gather" if is_few else "all_to_all"), machine.link("peer")
        if peer.us(tokens * row_bytes) <= plain.us(tokens * row_bytes):
            return "peer", f"{ranks} ranks of one domain of {machine.domain} store to each other's memory"
    if is_few:
        return "all_gather", f"{ranks * tokens} tokens of all ranks are at most {few}: {why}"
    if capturable:
        return "padded", "the host may read nothing, and blocks have one size"
    return "all_to_all", "exact counts move fewest rows, and the host may read them"
