"""Options of how rows travel between ranks."""

from __future__ import annotations

from dataclasses import dataclass

from moe_core.base import INT32_LIMIT, plan_type, require_choice, require_kind, set_integer
from moe_core.errors import InvalidInput, Unsupported
from moe_core.formats import Format

MODES = ("all_gather", "all_to_all", "padded", "peer")
TRANSPORTS = ("framework", "deep_ep")
#: Six bits of the header.
_MOST_CHUNKS = 64


@plan_type
@dataclass(frozen=True)
class ExchangeSpec:
    """How rows travel from the ranks with tokens (homes) to the ranks with experts (owners), and back.

    Args:
        mode: `all_gather`: every rank gets all tokens, for few of them. `all_to_all`: exact counts, which the host
            reads once. `padded`: blocks of one size, no host read. `peer`: rows are stored at peers' addresses.
        rows: `tokens` sends a token once to an owner, `slots` once per expert.
        receive: the most rows that a rank takes; more are counted. None: the worst case. `padded` divides it among
            sources.
        on_overflow: of rows beyond `receive`. `error`: all ranks raise where the host knows, in torch with `all_to_all`
            and on a CPU; elsewhere as `nan`. `nan`: tokens that lost a row are NaN. `drop`: such rows add nothing.
        format: quantises rows of tokens before they travel. None: not.
        chunks: parts of the tokens, so that one travels while another is computed; see `choose_chunks`. Without
            gradients.
        hosts: of consecutive ranks. A token then crosses to a host once, and a rank there passes it on; results come
            home as rows of slots on the same way. Needs `all_to_all` of tokens without a bound. 1: one level.
        transport: `framework`: collectives of torch or XLA, and with `peer` symmetric memory. `deep_ep`: the buffer of
            `ExpertParallel`, in torch. Needs `all_to_all` without a bound. Rows of `tokens` are added up on each rank,
            in bf16. With `slots` the bits are one device's.

    Raises InvalidInput for options that contradict each other.
    """

    mode: str = "all_to_all"
    rows: str = "tokens"
    receive: int | None = None
    on_overflow: str = "error"
    format: Format | None = None
    chunks: int = 1
    hosts: int = 1
    transport: str = "framework"

    def __post_init__(self) -> None:
        require_choice("mode", self.mode, MODES)
        require_choice("rows", self.rows, ("tokens", "slots"))
        require_choice("on_overflow", self.on_overflow, ("error", "nan", "drop"))
        require_kind("format", self.format, Format, optional=True)
        set_integer(self, "chunks", 1, _MOST_CHUNKS)
        set_integer(self, "hosts", 1, INT32_LIMIT)
        if self.receive is not None:
            set_integer(self, "receive", 0, INT32_LIMIT)
        plain = ("all_to_all", "tokens", None, None, 1)
        if self.hosts > 1 and (self.mode, self.rows, self.receive, self.format, self.chunks) != plain:
            raise InvalidInput(
                f"hosts must be 1 unless mode='all_to_all' moves tokens without receive, format and chunks, got "
                f"{self.hosts} with mode={self.mode!r}, rows={self.rows!r}, receive={self.receive}, "
                f"format={self.format}, chunks={self.chunks}; pass hosts=1 or leave these out"
            )
        require_choice("transport", self.transport, TRANSPORTS)
        plain = ("all_to_all", None, None, 1, 1)
        if self.other and (self.mode, self.receive, self.format, self.chunks, self.hosts) != plain:
            raise InvalidInput(
                f"transport must be 'framework' unless mode='all_to_all' moves rows without receive, format, chunks "
                f"and hosts, got {self.transport!r} with mode={self.mode!r}, receive={self.receive}, "
                f"format={self.format}, chunks={self.chunks}, hosts={self.hosts}; leave these out"
            )
        if self.rows == "slots" and self.mode == "all_gather":
            raise InvalidInput("rows must be 'tokens' with mode='all_gather', got 'slots'; leave it out")
        if self.receive is not None and self.mode == "all_gather":
            raise InvalidInput(
                f"receive must be None with mode='all_gather', which takes all tokens, got {self.receive}; leave it out"
            )

    @property
    def other(self) -> bool:
        """The transport is not the framework's."""
        return self.transport != "framework"

    def counts(self, per_rank: int) -> int:
        """Counts for an owner of per_rank places: of slots by place, or of tokens and slots."""
        return per_rank if self.rows == "slots" else 2

    @property
    def compares_first(self) -> bool:
        """Ranks compare headers in a message of their own, ahead of counts."""
        return self.hosts > 1 or self.other


def ranks_of_host(spec: ExchangeSpec, num_ranks: int) -> int:
    """Return the ranks of each host. Raises InvalidInput unless hosts have equally many."""
    if num_ranks % spec.hosts:
        raise InvalidInput(
            f"hosts must divide the {num_ranks} ranks, got {spec.hosts}; start equally many on each host"
        )
    return num_ranks // spec.hosts


def refuse_chunks(spec: ExchangeSpec) -> None:
    if spec.chunks > 1:
        raise Unsupported(
            f"training moves all tokens at once, got chunks={spec.chunks}, which make a step 11 to 16 % slower; pass "
            "chunks=1 and split the batch into micro-batches, or call under torch.no_grad()"
        )


def why_not_exact(spec: ExchangeSpec, slices: int) -> tuple[str, ...]:
    """Return why the bits are not one device's, empty if they are. slices: ranks that split each expert."""
    reasons = []
    if slices > 1:
        reasons.append(
            f"tensor={slices}: each rank adds up its part of F and rounds it as a slot; parts are added in the "
            "order of ranks, in fp32"
        )
    if spec.format is not None:
        reasons.append(f"format={spec.format}: rows are rounded before they travel")
    if spec.receive is not None and spec.on_overflow == "drop":
        reasons.append(f"receive={spec.receive}: rows beyond it are dropped")
    if spec.other and spec.rows == "tokens":
        reasons.append(f"transport={spec.transport!r}: each rank adds up a token's rows in bf16; pass rows='slots'")
    return tuple(reasons)


def host_reads(spec: ExchangeSpec, num_ranks: int, over_tensor: bool) -> int:
    """How often the host waits for the device to tell it counts."""
    counts = num_ranks > 1 or spec.receive is not None  # one rank keeps all rows
    return 3 if spec.hosts > 1 else 2 if spec.other else (spec.mode == "all_to_all") * (counts + over_tensor)
