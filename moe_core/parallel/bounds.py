"""How many rows there can be, whatever the routing."""

from __future__ import annotations

from typing import NamedTuple

from moe_core.parallel.placement import Placement
from moe_core.parallel.spec import ExchangeSpec
from moe_core.specs.matmul import Activation


class Bounds(NamedTuple):
    """Rows: of the block from each source, None = no blocks; of the block that comes back; of the receive buffer at
    most, None = as many as come."""

    block: int | None
    back: int | None
    receive: int | None


def bounds_of(spec: ExchangeSpec, tokens: int, top_k: int, placement: Placement) -> Bounds:
    """Those of ranks that have `tokens` tokens each. Blocks are as large as distinct ids of a token need."""
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
    """Whether each token has its own row at every owner, home after home: then ranks need no counts of each other.

    With mode `peer`, where rows of tokens have no bound.
    """
    return (spec.mode, spec.rows, spec.receive) == ("peer", "tokens", None)


def runs_in_lanes(spec: ExchangeSpec) -> bool:
    """Whether product 2 of a chunk runs beside product 1 of the next, on multiprocessors of its own.

    With mode `peer`, where product 2 stores its rows at their homes: the link then works all the time. Measured on four
    H200, docs/notebook/parallel.md.
    """
    return spec.mode == "peer" and spec.chunks > 1


def sets_of_buffers(spec: ExchangeSpec) -> int:
    """Sets of buffers, which chunks use by turns. In lanes two chunks are computed while others travel.

    No more than there are chunks: then all sets are together as large as one without chunks.
    """
    return min(spec.chunks, 4 if runs_in_lanes(spec) else 2)


def second_multiprocessors(most: int, activation: Activation) -> int:
    """Of `most` multiprocessors those of product 2 beside product 1 of other rows, so that both take equally long:
    product 2 multiplies with one matrix of three, or of two without gates."""
    return max(1, most // (1 + activation.input_width(1)))


def tokens_at_once(tokens: int, spec: ExchangeSpec) -> int:
    """Tokens of a rank that travel in one chunk; the last one may have fewer."""
    return -(-tokens // spec.chunks)


def rows_received(spec: ExchangeSpec, tokens: int, top_k: int, placement: Placement) -> int:
    """Rows that an owner receives at most; of ranks that have `tokens` tokens each."""
    bounds = bounds_of(spec, tokens, top_k, placement)
    nearest = min(top_k, placement.per_rank) if spec.rows == "slots" else 1
    worst = placement.num_ranks * tokens * nearest
    return worst if bounds.receive is None else min(worst, bounds.receive)


def slots_received(spec: ExchangeSpec, received: int, top_k: int, placement: Placement) -> int:
    """Results by slot that an owner has of so many received rows at most."""
    return received * (min(top_k, placement.per_rank) if spec.rows == "tokens" else 1)
