"""How many chunks an exchange of mode `peer` should have, and how many ranks should share experts: by `predict`."""

from __future__ import annotations

from pathlib import Path

from moe_core.base.checks import as_integer
from moe_core.base.sizes import INT32_LIMIT
from moe_core.formats import Format
from moe_core.layers.spec import MoELayerSpec
from moe_core.parallel.cost import predict
from moe_core.parallel.machine import Machine
from moe_core.parallel.spec import ExchangeSpec

#: More have not been measured.
_MOST = 4
#: Of a forward: predicted gains were up to as much too large, as tests/parallel/test_choices.py compares them.
_LEAST_GAIN = 0.05


def choose_chunks(
    layer: MoELayerSpec, tokens: int, ranks: int, machine: Machine | str | Path | None, *, format: Format | None = None
) -> tuple[int, str]:
    """The chunks of forwards without gradients with `ExchangeSpec("peer", format=format)`, and why.

    They pay where rows travel for about as long as products compute. The number suits calls of about `tokens` tokens;
    a layer that is mostly called with far fewer should have one chunk.

    Args:
        layer: sizes of the layer.
        tokens: of each rank; what `max_tokens` is.
        ranks: that share the experts.
        machine: as for `machine_of`.
        format: of the rows of tokens as they travel, None = they are not quantised.

    Returns:
        a number of chunks, and the reason.

    Raises:
        InvalidInput: as `predict`.
    """
    found = {
        chunks: predict(layer, tokens, ranks, machine, ExchangeSpec("peer", format=format, chunks=chunks))
        for chunks in range(1, _MOST + 1)
    }
    best = min(found, key=lambda chunks: found[chunks].us)
    whole, gain = found[1], 1 - found[best].us / found[1].us if found[1].us else 0.0
    times = f"rows travel for {whole.exchange_us:.0f} us and products take {dict(whole.stages)['compute']:.0f} us"
    if gain < _LEAST_GAIN:
        return 1, f"{times}: chunks would gain less than {100 * _LEAST_GAIN:.0f} %"
    return best, f"{times}: {best} chunks gain {100 * gain:.0f} %"


def choose_ranks(
    layer: MoELayerSpec, tokens: int, ranks: int, machine: Machine | str | Path | None, spec: ExchangeSpec | None = None
) -> tuple[int, str]:
    """How many of these ranks should share the experts, where any number of them could hold all, and why.

    The fewest whose forward takes hardly longer than the fastest. Few tokens need few experts, which one rank may read
    in less time than an exchange takes.

    Args:
        layer: sizes of the layer.
        tokens: of all ranks together, as evenly on ranks as can be.
        ranks: there are; only numbers that divide it are considered, so that groups of that size use all.
        machine: as for `machine_of`.
        spec: of the exchange; None = mode `peer`.

    Returns:
        a number of ranks, 1 where one should hold all experts, and the reason.

    Raises:
        InvalidInput: as `predict`, and for negative tokens.
    """
    tokens, ranks = as_integer("tokens", tokens, 0, INT32_LIMIT), as_integer("ranks", ranks, 1, INT32_LIMIT)
    spec = ExchangeSpec("peer") if spec is None else spec
    sizes = [size for size in range(1, ranks + 1) if ranks % size == 0]
    us = {size: predict(layer, -(-tokens // size), size, machine, spec).us for size in sizes}
    least = min(us.values())
    chosen = next(size for size in sizes if us[size] * (1 - _LEAST_GAIN) <= least)
    others = ", ".join(f"{size}: {us[size]:.0f}" for size in sizes)
    return chosen, f"predicted us of {tokens} tokens by ranks that share the experts: {others}"
