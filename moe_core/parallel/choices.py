"""Choose the number of chunks and of ranks that share experts, by `predict`."""

from __future__ import annotations

from pathlib import Path

from moe_core.base import INT32_LIMIT, as_integer
from moe_core.formats import Format
from moe_core.layers.spec import MoELayerSpec
from moe_core.parallel.cost import predict
from moe_core.parallel.machine import Machine
from moe_core.parallel.spec import ExchangeSpec

#: More are not measured.
_MOST = 4
#: The least gain of chunks as share of a forward: the predictions' error, tests/parallel/test_choices.py.
_LEAST_GAIN = 0.05


def choose_chunks(
    layer: MoELayerSpec, tokens: int, ranks: int, machine: Machine | str | Path | None, *, format: Format | None = None
) -> tuple[int, str]:
    """Choose the chunks of forwards without gradients with `ExchangeSpec("peer", format=format)`, and say why.

    Chunks pay if rows travel for about as long as products compute. A layer that mostly gets far fewer tokens should
    have one chunk.

    Args:
        tokens: of each rank, as `max_tokens`.
        ranks: that share the experts.
        machine: see `predict`, for errors too.
        format: of rows of tokens as they travel. None: not quantised.
    """
    estimates = {
        chunks: predict(layer, tokens, ranks, machine, ExchangeSpec("peer", format=format, chunks=chunks))
        for chunks in range(1, _MOST + 1)
    }
    best = min(estimates, key=lambda chunks: estimates[chunks].us)
    whole, gain = estimates[1], 1 - estimates[best].us / estimates[1].us if estimates[1].us else 0.0
    times = f"rows travel for {whole.exchange_us:.0f} us and products take {dict(whole.stages)['compute']:.0f} us"
    if gain < _LEAST_GAIN:
        return 1, f"{times}: chunks would gain less than {100 * _LEAST_GAIN:.0f} %"
    return best, f"{times}: {best} chunks gain {100 * gain:.0f} %"


def choose_ranks(
    layer: MoELayerSpec, tokens: int, ranks: int, machine: Machine | str | Path | None, spec: ExchangeSpec | None = None
) -> tuple[int, str]:
    """Choose how many of these ranks share the experts, if any number of them could hold all, and say why.

    It is the fewest with a forward hardly slower than the fastest. `choose_parallelism` of `moe_core.tools.choose` also
    counts memory.

    Args:
        tokens: of all ranks together.
        ranks: that there are. Only its divisors up to the number of experts are considered.
        machine: see `predict`, for errors too.
        spec: of the exchange. None: mode `peer`.
    """
    tokens, ranks = as_integer("tokens", tokens, 0, INT32_LIMIT), as_integer("ranks", ranks, 1, INT32_LIMIT)
    spec = ExchangeSpec("peer") if spec is None else spec
    sizes = [size for size in range(1, min(ranks, layer.num_experts) + 1) if ranks % size == 0]
    us = {size: predict(layer, -(-tokens // size), size, machine, spec).us for size in sizes}
    least = min(us.values())
    chosen = next(size for size in sizes if us[size] * (1 - _LEAST_GAIN) <= least)
    others = ", ".join(f"{size}: {us[size]:.0f}" for size in sizes)
    return chosen, f"predicted us of {tokens} tokens by ranks that share the experts: {others}"
