"""The most rows of an exchange, for any routing."""

from __future__ import annotations

from typing import NamedTuple

from moe_core.base.arrays import ALIGNMENT
from moe_core.parallel.placement import Placement
from moe_core.parallel.spec import ExchangeSpec
from moe_core.specs import Activation


class Bounds(NamedTuple):
    """Rows of the blocks from each source and back (None: no blocks), and the most received (None: any)."""

    block: int | None
    back: int | None
    receive: int | None


def bounds_of(spec: ExchangeSpec, tokens: int, top_k: int, placement: Placement) -> Bounds:
    """Bounds for `tokens` on each rank. Blocks suit distinct ids of a token."""
    nearest = min(top_k, placement.per_rank)
    if spec.mode == "all_gather":
        return Bounds(tokens, tokens * nearest, placement.num_ranks * tokens)
    if spec.mode != "padded":
        return Bounds(None, None, spec.receive)
    block = tokens * (nearest if spec.rows == "slots" else 1)
    if spec.receive is not None:
        block = min(block, spec.receive // placement.num_ranks)
    back = block * nearest if spec.rows == "tokens" else block
    return Bounds(block, min(back, tokens * top_k), placement.num_ranks * block)


def is_direct(spec: ExchangeSpec) -> bool:
    """Return True if tokens have a row at every owner, without counts: mode `peer`, rows of tokens, no bound."""
    return (spec.mode, spec.rows, spec.receive) == ("peer", "tokens", None)


def stores_results(spec: ExchangeSpec, top_k: int, row_bytes: int) -> bool:
    """Return True if owners store results of tokens' rows where they leave from, or at home: mode `all_to_all`, unless
    something else, such as adapters, needs them as rows. With two experts per token stores by address cost more than
    the copies that they replace; docs/notebook/parallel.md."""
    wanted = (spec.mode, spec.rows, spec.hosts, spec.other) == ("all_to_all", "tokens", 1, False)
    return wanted and top_k > 2 and row_bytes % ALIGNMENT == 0


def runs_in_lanes(spec: ExchangeSpec) -> bool:
    """Return True if product 2 of a chunk runs beside product 1 of the next, on other multiprocessors: mode `peer`,
    where links then always work. Measured on four H200, docs/notebook/parallel.md."""
    return spec.mode == "peer" and spec.chunks > 1


def sets_of_buffers(spec: ExchangeSpec) -> int:
    """Sets of buffers that chunks use in turn. Lanes compute two chunks while others travel."""
    return min(spec.chunks, 4 if runs_in_lanes(spec) else 2)


def second_multiprocessors(most: int, activation: Activation) -> int:
    """Multiprocessors of product 2 beside product 1, for equal times: it has a third of the matrices, or half."""
    return max(1, most // (1 + activation.input_width(1)))


def tokens_at_once(tokens: int, spec: ExchangeSpec) -> int:
    """A rank's tokens in one chunk; the last may have fewer."""
    return -(-tokens // spec.chunks)


def rows_received(spec: ExchangeSpec, tokens: int, top_k: int, placement: Placement) -> int:
    bounds = bounds_of(spec, tokens, top_k, placement)
    nearest = min(top_k, placement.per_rank) if spec.rows == "slots" else 1
    worst = placement.num_ranks * tokens * nearest
    return worst if bounds.receive is None else min(worst, bounds.receive)


def slots_received(spec: ExchangeSpec, received: int, top_k: int, placement: Placement) -> int:
    return received * (min(top_k, placement.per_rank) if spec.rows == "tokens" else 1)
