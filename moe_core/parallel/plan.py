"""The messages of one exchange in order, and its memory, planned from shapes without a device."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass

from moe_core.base import INT32_LIMIT, dtypes, keep_plans, plan_type
from moe_core.base.checks import require_choice, require_flag, require_kind, set_integer
from moe_core.errors import InvalidInput, Unsupported
from moe_core.ops.exchange.direct import TOLD
from moe_core.parallel import bounds as limits
from moe_core.parallel.header import MOST_TOP_K, Header, header_of
from moe_core.parallel.messages import (
    BARRIER,
    Collective,
    DeepEPMessages,
    ExchangeBuffer,
    HostMessages,
    TensorMessages,
    peak_of,
    quantized_bytes,
)
from moe_core.parallel.placement import Placement
from moe_core.parallel.spec import ExchangeSpec, host_reads, ranks_of_host, refuse_chunks, why_not_exact
from moe_core.parallel.tensor import WHOLE, TensorSplit
from moe_core.specs.exchange import TableSpec, packed_row


@plan_type
@dataclass(frozen=True)
class ExchangePlan:
    """One exchange, made by `plan_exchange`.

    forward, backward: messages in order, backward only with training. buffers: of the worst case, all sets. host_reads:
    0 to 3. why_not_exact: empty if the bits are one device's. expected_tokens, expected_experts: for `Tuning`, so that
    sums have one device's order. expected_rows: slots of all ranks. experts: an `experts_digest`, 0: not compared.
    """

    tokens: int
    top_k: int
    d_model: int
    dtype: str
    placement: Placement
    spec: ExchangeSpec
    training: bool
    forward: tuple[Collective, ...]
    backward: tuple[Collective, ...]
    buffers: tuple[ExchangeBuffer, ...]
    host_reads: int
    why_not_exact: tuple[str, ...]
    expected_tokens: int
    expected_experts: int
    expected_rows: int
    tensor: TensorSplit = WHOLE
    experts: int = 0

    @property
    def brought(self) -> int:
        """Tokens that a rank brings: its own, or all of its tensor axis."""
        return self.tokens * self.tensor.token_ranks

    @property
    def exact(self) -> bool:
        return not self.why_not_exact

    @property
    def direct(self) -> bool:
        """See `is_direct`."""
        return limits.is_direct(self.spec)

    @functools.cached_property
    def bounds(self) -> limits.Bounds:
        """Bounds of one chunk."""
        return limits.bounds_of(self.spec, limits.tokens_at_once(self.brought, self.spec), self.top_k, self.placement)

    @functools.cached_property
    def header(self) -> Header:
        """The header that ranks compare with `compare_headers`."""
        sizes = self.brought, self.top_k, self.d_model, self.dtype
        header = header_of(*sizes, self.placement, self.spec, self.training, self.tensor)
        return header.of_experts(self.experts)

    def tensor_header(self, rank: int) -> Header:
        """The header that ranks of the tensor axis compare. rank: on the axis of experts."""
        others = self.header.tensor & ~(0x1FFF << 14)
        return self.header._replace(tokens=self.tokens, tensor=others | (rank & 0x1FFF) << 14)

    @functools.cached_property
    def tables(self) -> TableSpec:
        """Table sizes of `all_to_all`, `padded` and `all_gather`."""
        placement, spec = self.placement, self.spec
        sizes = placement.num_ranks, placement.per_rank, placement.num_experts
        return TableSpec(spec.mode, spec.rows, *sizes, self.bounds.block, self.bounds.back)

    def of_group(self, tokens: int) -> ExchangePlan:
        """Return the plan for `tokens` on all ranks together. Raises InvalidInput, and Unsupported for too many
        rows."""
        if tokens < self.brought:
            raise InvalidInput(f"tokens must be at least this rank's {self.brought}, got {tokens}; add up all ranks'")
        if max(tokens, self.placement.num_ranks * self.brought) * self.top_k >= INT32_LIMIT:
            raise Unsupported(
                f"rows of all ranks must stay below 2**31, got {tokens} tokens of {self.top_k}; split the batch"
            )
        # At an owner, a slot's row is a token with one expert.
        rows = tokens * (self.top_k if self.spec.rows == "slots" else 1)
        return dataclasses.replace(self, expected_tokens=max(1, rows), expected_rows=tokens * self.top_k)

    @functools.cached_property
    def _by_digest(self) -> dict[int, ExchangePlan]:
        return {}

    def of_experts(self, digest: int) -> ExchangePlan:
        """Return the plan that also compares an `experts_digest`."""
        if digest not in self._by_digest:
            self._by_digest[digest] = dataclasses.replace(self, experts=digest)
        return self._by_digest[digest]

    @property
    def stores(self) -> bool:
        """See `stores_results`."""
        return limits.stores_results(self.spec, self.top_k, self.d_model * dtypes.itemsize(self.dtype))

    def buffers_of(self, received: int, returned: int, own: int = 0) -> tuple[ExchangeBuffer, ...]:
        """Return a chunk's buffers for counts of rows received, results returned as an owner, and its own tokens'."""
        return _Planner(self).buffers(received, returned, own)

    def peak(
        self, received: int | None = None, returned: int | None = None, own: int = 0, *,
        scratch: int = 0, static: bool = False,
    ) -> int:  # fmt: skip
        """Return the most bytes that buffers and output of a forward take at once.

        received, returned, own: as for `buffers_of`. None: the worst case. scratch: bytes of the owner's op besides
        input and results. static: owners copy rows of slots, as in JAX and for adapters. Index arrays, a few int32 a
        slot, are left out. Only in training the op's input stays. Later calls of torch may hold 64 MB longer.
        """
        planner = _Planner(self, static)
        buffers, output = planner.buffers(received, returned, own), self.tokens * planner.row_bytes
        return peak_of(self.spec, self.training, buffers, output, scratch)

    def explain(self) -> str:
        """Return everything as text."""
        spec, rows = self.spec, "rows of tokens" if self.spec.rows == "tokens" else "rows of slots"
        lines = [
            f"exchange {spec.mode}: {self.tokens} tokens, top {self.top_k}, {self.dtype} [{self.d_model}], {rows}",
            f"  placement  {self.placement}",
        ]
        if self.tensor.size > 1:
            lines.append(f"  tensor     rank {self.tensor.index} of {self.tensor.size}, tokens {self.tensor.tokens}")
        for name, messages in (("forward", self.forward), ("backward", self.backward)):
            lines += [f"  {name:9}  {number}  {message}" for number, message in enumerate(messages)]
        for buffer in self.buffers:
            lines.append(f"  buffer     {buffer.name}: {buffer.bytes} bytes{', symmetric' if buffer.symmetric else ''}")
        lines.append(f"  peak       {self.peak()} bytes at once, with the output and without the op's scratch")
        bounds = self.bounds
        if bounds.block is not None:
            lines.append(f"  bound      {bounds.block} rows from each rank, {bounds.back} back; more are counted")
        elif bounds.receive is not None:
            lines.append(f"  bound      {bounds.receive} rows received; more are counted")
        reads = "reads nothing", "reads the counts once"
        reads += "reads a header, and the counts once", "reads a header, and counts twice"
        lines.append(f"  host       {reads[self.host_reads]}")
        lines.append(f"  tiles      as for {self.expected_tokens} tokens and {self.expected_experts} experts")
        lines += [f"  bits       not one device's: {reason}" for reason in self.why_not_exact]
        if self.exact:
            lines.append("  bits       one device's: slots come home and are added in order, k = 0..K-1, in fp32")
        return "\n".join(lines)


@keep_plans
def plan_exchange(
    tokens: int,
    top_k: int,
    d_model: int,
    dtype: str,
    placement: Placement,
    spec: ExchangeSpec,
    *,
    training: bool = False,
    tensor: TensorSplit = WHOLE,
) -> ExchangePlan:
    """Plan the exchange of a rank with x `[tokens, d_model]` of dtype and top_k experts per token.

    training: a backward follows. tensor: the rank on the tensor axis. Raises InvalidInput, and Unsupported for training
    with replicas, with a format or with chunks.
    """
    sizes = tokens, top_k, d_model, dtype, placement, spec, training
    draft = ExchangePlan(*sizes, (), (), (), 0, (), 0, 0, 0, tensor)
    for name, least, below in (("tokens", 0, INT32_LIMIT), ("top_k", 1, MOST_TOP_K), ("d_model", 1, INT32_LIMIT)):
        set_integer(draft, name, least, below)
    object.__setattr__(draft, "dtype", dtypes.canonical(dtype))
    require_choice("dtype", draft.dtype, dtypes.MATMUL_DTYPES)
    require_kind("placement", placement, Placement)
    require_kind("spec", spec, ExchangeSpec)
    require_kind("tensor", tensor, TensorSplit)
    require_flag("training", training)
    ranks_of_host(spec, placement.num_ranks)
    if spec.hosts > 1 and tensor.size > 1:
        raise Unsupported(f"hosts must be 1 beside a tensor axis, got {spec.hosts} with {tensor.size} ranks; pass 1")
    if training and placement.has_replicas:
        raise Unsupported(
            f"training needs every expert at one place, got {placement}: gradients of replicas are not added; use "
            "Placement.balanced(..., max_replicas=1), or ask for no gradient"
        )
    if training and spec.format is not None:
        raise Unsupported(
            f"training moves rows as they are, got format={spec.format}: rounding has no gradient; leave format out"
        )
    if training:
        refuse_chunks(spec)
    planner, over = _Planner(draft), _over_tensor(draft) if tensor.size > 1 else None
    backward = planner.backward() if training else ()
    return dataclasses.replace(
        draft,
        forward=planner.forward() if over is None else over.forward(planner.forward()),
        backward=backward if over is None or not training else over.backward(backward),
        buffers=planner.buffers(),
        host_reads=host_reads(spec, placement.num_ranks, over is not None),
        why_not_exact=why_not_exact(spec, tensor.size),
        expected_experts=placement.num_experts,
    ).of_group(placement.num_ranks * draft.brought)


def _over_tensor(plan: ExchangePlan) -> TensorMessages:
    size = len(Header._fields)
    return TensorMessages(plan.tensor, plan.tokens, plan.top_k, plan.d_model, plan.dtype, plan.spec.mode, size)


class _Planner:
    def __init__(self, plan: ExchangePlan, static: bool = False) -> None:
        self.plan, self.spec, self.bounds, self.stores = plan, plan.spec, plan.bounds, plan.stores and not static
        self.tokens = limits.tokens_at_once(plan.brought, plan.spec)
        self.ranks, self.top_k = plan.placement.num_ranks, plan.top_k
        self.width = plan.top_k if plan.spec.rows == "tokens" else 1
        self.row_bytes = plan.d_model * dtypes.itemsize(plan.dtype)

    @property
    def _over_hosts(self) -> HostMessages:
        hosts, local = self.spec.hosts, ranks_of_host(self.spec, self.ranks)
        sizes = self.tokens, self.top_k, self.plan.placement.per_rank, self.given
        return HostMessages(hosts, local, *sizes, self.plan.dtype, self.row_bytes, len(Header._fields))

    @property
    def _deep_ep(self) -> DeepEPMessages:
        sizes = self.sent, self.given, self.width, self.ranks
        return DeepEPMessages(*sizes, self.plan.dtype, self.row_bytes)

    @property
    def sent(self) -> int:
        if self.spec.mode == "all_gather":
            return self.tokens
        if self.bounds.block is not None:
            return self.ranks * self.bounds.block
        return self.tokens * (self.top_k if self.spec.rows == "slots" else min(self.top_k, self.ranks))

    @property
    def returned(self) -> int:
        """The most results at home."""
        if self._sums_at_owner:
            return self.tokens
        if self.bounds.back is not None:
            return self.ranks * self.bounds.back
        return self.tokens * self.top_k

    def _rows(self, kind: str) -> list[Collective]:
        if self.spec.format is None:
            return [Collective(kind, "rows", self.plan.dtype, self.sent, self.sent * self.row_bytes)]
        parts = quantized_bytes(self.spec, self.plan.d_model)
        return [Collective(kind, label, dtype, self.sent, self.sent * size) for label, dtype, size in parts]

    def _table(self, kind: str, what: str, dtype: str, rows: int, width: int) -> Collective:
        return Collective(kind, what, dtype, rows, rows * width * 4)

    def _results(self, what: str) -> Collective:
        kind, rows = "push" if self.spec.mode == "peer" else "all_to_all", self.given
        return Collective(kind, what, self.plan.dtype, rows, rows * self.row_bytes)

    @property
    def given(self) -> int:
        """The most results at an owner."""
        if self.bounds.back is not None:
            return self.ranks * self.bounds.back
        if self.plan.direct:
            return self.ranks * self.tokens * self.top_k
        received = limits.rows_received(self.spec, self.tokens, self.top_k, self.plan.placement)
        if self._sums_at_owner:
            return received
        return limits.slots_received(self.spec, received, self.top_k, self.plan.placement)

    @property
    def _sums_at_owner(self) -> bool:
        return self.spec.other and self.spec.rows == "tokens"

    def forward(self) -> tuple[Collective, ...]:
        mode, header = self.spec.mode, len(Header._fields)
        if self.spec.hosts > 1:
            return self._over_hosts.forward()
        if self.spec.other:
            return self._deep_ep.forward(header)
        if mode == "peer":
            return tuple(self._between_barriers()) * self.spec.chunks
        # Ids travel with the bits of weights. For counted rows of slots, weights travel without ids.
        width, label = (2 * self.width, "ids and weights") if self.width_of_ids else (self.width, "weights")
        rows = self._rows(self._rows_kind)
        if mode == "all_to_all":
            counts = header + self.spec.counts(self.plan.placement.per_rank) * self.spec.chunks
            first = [self._table("all_to_all", "header and counts", "int32", self.ranks, counts)]
            if self.spec.receive is not None:
                # With a bound, owners answer which rows fit.
                first.append(self._table("all_to_all", "rows that fit", "int32", self.ranks, 2))
            rows.append(self._table(self._rows_kind, label, "int32", self.sent, width))
            if self.spec.format is None:
                # Numbers travel behind their row.
                size = packed_row(self.plan.d_model, self.plan.dtype, width)[0] * dtypes.itemsize(self.plan.dtype)
                rows = [dataclasses.replace(rows[0], what=f"rows, {label}", bytes=self.sent * size)]
            # Counts of all chunks travel at once, for one host read.
            messages = [*first, *[*rows, self._results("results")] * self.spec.chunks]
        else:
            routing = self._table(self._rows_kind, f"header, {label}", "int32", self.sent, width)
            copies = 1 if mode == "all_gather" else self.ranks
            routing = dataclasses.replace(routing, bytes=routing.bytes + copies * header * 4)
            messages = [routing, *rows, self._results("results")] * self.spec.chunks
        if self.bounds.block is not None or self.bounds.receive is not None:
            messages.append(self._table("all_reduce", "overflow", "int32", 1, 1))
        return tuple(messages)

    def _between_barriers(self) -> list[Collective]:
        """One chunk with mode `peer`. A stage's stores are read behind the barrier that ends it."""
        if self.plan.direct:
            told = self._table("push", "header, ids and weights", "int32", self.tokens, 2 * self.top_k)
            told = dataclasses.replace(told, bytes=told.bytes + 4 * TOLD)
            first, results = [BARRIER] * self.plan.training, self._results("results")
            return [*first, told, *self._rows("push"), BARRIER, results, BARRIER]
        groups, by_token = self.plan.placement.num_places, self.spec.rows == "tokens"
        message = TOLD + groups + (self.ranks if by_token else 0)
        collectives = [self._table("push", "header and counts", "int32", 1, message), BARRIER]
        if by_token and self.spec.receive is not None:
            collectives += [self._table("push", "counts of what fits", "int32", 1, groups), BARRIER]
        slots = self.tokens * self.top_k
        collectives += [self._table("push", "weights and origins", "int32", slots, 3 + by_token), *self._rows("push")]
        return [*collectives, BARRIER, self._results("results"), BARRIER]

    @property
    def width_of_ids(self) -> int:
        """Local ids per row, 0 if counts give them."""
        return 0 if self.spec.rows == "slots" and self.spec.mode != "padded" else self.width

    def backward(self) -> tuple[Collective, ...]:
        if self.spec.hosts > 1:
            return self._over_hosts.backward()
        if self.spec.other:
            return self._deep_ep.backward()
        barrier = [BARRIER] * (self.spec.mode == "peer")
        rows = [dataclasses.replace(message, what="d_output") for message in self._rows(self._rows_kind)]
        results = self._results("d_x")
        weights = self._table(results.kind, "d_weights", "float32", self.given, 1)
        return (*barrier, *rows, *barrier, results, weights, *barrier)

    @property
    def _rows_kind(self) -> str:
        return {"peer": "push", "all_gather": "all_gather"}.get(self.spec.mode, "all_to_all")

    def buffers(
        self, received: int | None = None, given: int | None = None, own: int = 0
    ) -> tuple[ExchangeBuffer, ...]:
        if received is None or given is None:
            given, received = self.given, limits.rows_received(self.spec, self.tokens, self.top_k, self.plan.placement)
        incoming, symmetric = self.row_bytes, self.spec.mode == "peer"
        if self.spec.format is not None:
            incoming = sum(size for *_, size in quantized_bytes(self.spec, self.plan.d_model))
        buffers = [ExchangeBuffer("received rows", received * incoming, symmetric)]
        by_slot = self.spec.other or (self.spec.rows == "tokens" and not (self.plan.direct or self.stores))
        if self.plan.direct:
            numbers = (2 + self.plan.training) * self.top_k  # with gradients of weights
            buffers.append(ExchangeBuffer("received ids and weights", received * numbers * 4, True))
            if self.spec.format is not None or self.plan.training:
                buffers.append(ExchangeBuffer("rows by slot", received * self.row_bytes, False))
        elif symmetric:
            numbers = 3 + (self.spec.rows == "tokens") + self.plan.training
            buffers.append(ExchangeBuffer("received weights and origins", given * numbers * 4, True))
            by_slot |= self.plan.training or self.spec.format is not None
        else:
            buffers.append(ExchangeBuffer("received ids", received * self.width_of_ids * 4, False))
            buffers.append(ExchangeBuffer("received weights", received * self.width * 4, False))
        if self.spec.hosts > 1:
            buffers += self._over_hosts.buffers()
        if self.spec.mode not in ("all_gather", "peer"):
            buffers.insert(0, ExchangeBuffer("sent rows", self.sent * incoming, False))
        if by_slot:
            buffers.append(ExchangeBuffer("rows by slot", given * self.row_bytes, False))
        if not symmetric:
            buffers.append(ExchangeBuffer("results", (given - own * self.stores) * self.row_bytes, False))
        buffers.append(ExchangeBuffer("returned results", self.returned * self.row_bytes, symmetric))
        symmetric_sets = limits.sets_of_buffers(self.spec)
        over = _over_tensor(self.plan).buffers() if self.plan.tensor.size > 1 else ()
        sets = {True: symmetric_sets, False: min(symmetric_sets, 2)}
        return (*(dataclasses.replace(one, bytes=sets[one.symmetric] * one.bytes) for one in buffers), *over)
