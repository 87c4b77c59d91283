"""The page of a routing trace. Letters: L layers, T tokens, K top-k, E experts, B bins of tokens."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

import numpy as np

from moe_core.base.checks import as_integer
from moe_core.errors import InvalidInput
from moe_core.layers.spec import MoELayerSpec
from moe_core.monitor import load_entropy, load_imbalance
from moe_core.parallel.cost import simulate
from moe_core.parallel.machine import Machine
from moe_core.parallel.placement import Placement
from moe_core.parallel.spec import ExchangeSpec
from moe_core.parallel.traffic import traffic_of
from moe_core.trace import LayerRouting, RoutingTrace

#: Bytes of the tokens' ids and weights in a page, of the bins of tokens, and pairs of experts of a layer.
_TOKEN_BYTES, _BIN_BYTES, _PAIRS = 4 << 20, 1 << 20, 24
#: Tokens that the placement's traffic is counted from.
_SAMPLE = 2048
_MOST_RANKS = 64


def trace_content(
    trace: RoutingTrace,
    name: str,
    text: Sequence[str] | None = None,
    sizes: tuple[int, int] | None = None,
    machine: Machine | None = None,
) -> dict[str, Any]:
    """The JSON of one trace. text: of each token. sizes: (d_model, d_ff) for bytes and times of placements."""
    if len(seen := sorted({layer.ids.shape[0] for layer in trace})) > 1:
        raise InvalidInput(
            f"layers of the trace must have seen the same tokens, got {seen} tokens; pass layers_per_step (the "
            "number of MoE layers of the model) for a trace of several forwards"
        )
    T, experts = trace[0].ids.shape[0], [layer.num_experts for layer in trace]
    if text is not None and len(text) != T:
        raise InvalidInput(f"text must have one string for each of the {T} tokens, got {len(text)}; pass all tokens")
    E, K = max(experts), max(layer.ids.shape[1] for layer in trace)
    counts = np.zeros((len(trace), E), np.uint32)
    for number, layer in enumerate(trace):
        counts[number] = _counts(layer.ids, E)
    bins = int(np.clip(_BIN_BYTES // (len(trace) * E * 2), 1, min(64, max(T, 1))))
    edges = np.linspace(0, T, bins + 1).astype(int)
    over = np.zeros((len(trace), bins, E), np.uint16)
    for number, layer in enumerate(trace):
        for part in range(bins):
            over[number, part] = np.minimum(_counts(layer.ids[edges[part] : edges[part + 1]], E), 65535)
    weighed = trace[0].weights is not None
    shown = min(T, _TOKEN_BYTES // (len(trace) * K * (3 if weighed else 2)))
    ids = np.full((len(trace), shown, K), -1, np.result_type(np.int16, np.min_scalar_type(-E)))
    weights = np.zeros((len(trace), shown, K), np.uint8)
    largest = []
    for number, layer in enumerate(trace):
        width = layer.ids.shape[1]
        ids[number, :, :width] = layer.ids[:shown]
        if weighed:
            finite = np.nan_to_num(np.abs(layer.weights), posinf=0.0)
            largest.append(float(finite.max(initial=0.0)))
            scale = 255 / (largest[-1] or 1.0)
            weights[number, :, :width] = np.round(finite[:shown] * scale)
    return {
        "name": name, "tokens": T, "top_k": K, "experts": experts, "shown": shown, "bins": bins,
        "edges": edges.tolist(), "counts": _packed(counts), "over": _packed(over), "ids": _packed(ids),
        "weights": _packed(weights) if weighed else None, "largest": largest,
        "text": None if text is None else [str(one) for one in text[:shown]],
        "layers": [_statistics(layer, count[: layer.num_experts]) for layer, count in zip(trace, counts, strict=True)],
        "pairs": [_pairs(layer) for layer in trace],
        "placements": _placements(trace, sizes, machine),
    }  # fmt: skip


def trace_change(first: RoutingTrace, second: RoutingTrace) -> dict[str, Any] | None:
    """Per layer: the share of tokens with other experts, and the tokens that change most. None: not comparable."""
    if [(*one.ids.shape, one.num_experts) for one in first] != [(*one.ids.shape, one.num_experts) for one in second]:
        return None
    pairs = [(np.sort(a.ids, 1), np.sort(b.ids, 1)) for a, b in zip(first, second, strict=True)]
    other = np.stack([(a != b).any(1) for a, b in pairs])
    often = other.sum(0)
    most = np.argsort(-often, kind="stable")[:200]
    return {
        "layers": (other.mean(1) if other.shape[1] else np.zeros(len(other))).tolist(),
        "tokens": [[int(token), int(often[token])] for token in most if often[token]],
        "changed": int((often > 0).sum()),
    }


def join_steps(trace: RoutingTrace, layers_per_step: int) -> RoutingTrace:
    """Put the tokens of several forwards behind one another, layer by layer. Raises InvalidInput for other steps."""
    as_integer("layers_per_step", layers_per_step, 1)
    groups = [trace.layers[first::layers_per_step] for first in range(layers_per_step)]
    kinds = [{(layer.ids.shape[1], layer.num_experts) for layer in group} for group in groups]
    if len(trace) % layers_per_step or any(len(kind) != 1 for kind in kinds):
        raise InvalidInput(
            f"the trace must be whole steps of layers_per_step = {layers_per_step} layers, each with one (top_k, "
            f"num_experts), got {len(trace)} layers with {kinds}; pass the number of MoE layers of the model"
        )
    joined = []
    for group in groups:
        ids, *weights = [np.concatenate(arrays) for arrays in zip(*[one.arrays for one in group], strict=True)]
        joined.append(LayerRouting(ids, weights[0] if weights else None, group[0].num_experts))
    return RoutingTrace(tuple(joined))


def _counts(ids: np.ndarray, num_experts: int) -> np.ndarray:
    return np.bincount(ids[ids >= 0], minlength=num_experts)


def _packed(array: np.ndarray) -> dict[str, Any]:
    """An array for JavaScript: its little-endian bytes in base64, dtype and shape."""
    data = np.ascontiguousarray(array.astype(array.dtype.newbyteorder("<")))
    return {"dtype": array.dtype.name, "shape": list(array.shape), "data": base64.b64encode(data.tobytes()).decode()}


def _statistics(layer: LayerRouting, counts: np.ndarray) -> dict[str, Any]:
    """entropy: of the load, over ln E, so that 1 is even. imbalance: the busiest expert over the mean."""
    hottest = np.argsort(-counts.astype(np.int64), kind="stable")[:3]
    return {
        "experts": layer.num_experts, "entropy": load_entropy(counts),
        "imbalance": load_imbalance(counts),
        "hottest": [[int(expert), int(counts[expert])] for expert in hottest],
        "unused": [int(expert) for expert in np.flatnonzero(counts == 0)],
        "dropped": int((layer.ids < 0).sum()),
    }  # fmt: skip


def _pairs(layer: LayerRouting) -> list[list[float]]:
    """[a, b, tokens with both, their number over that of independent choices], the largest excess first."""
    E, (T, K) = layer.num_experts, layer.ids.shape
    if K < 2 or not T:
        return []
    both = np.zeros(E * E, np.int64)
    for i in range(K):
        for j in range(i + 1, K):
            one, other = layer.ids[:, i].astype(np.int64), layer.ids[:, j]
            both += np.bincount((one * E + other)[(one >= 0) & (other >= 0)], minlength=E * E)
    both = both.reshape(E, E) + both.reshape(E, E).T
    alone = _counts(layer.ids, E).astype(np.float64)
    expected = np.outer(alone, alone) * ((K - 1) / K) / T
    a, b = np.triu_indices(E, 1)
    excess = both[a, b] - expected[a, b]
    order = np.argsort(-excess, kind="stable")[:_PAIRS]
    rows = [(a[i], b[i], both[a[i], b[i]], both[a[i], b[i]] / max(expected[a[i], b[i]], 1e-9)) for i in order]
    return [[int(one), int(other), int(count), round(float(lift), 3)] for one, other, count, lift in rows if count]


def _placements(trace: RoutingTrace, sizes: tuple[int, int] | None, machine: Machine | None) -> list[dict[str, Any]]:
    """Of the layers' mean load on N ranks: experts in order, and balanced by the trace's load."""
    experts, widths = {layer.num_experts for layer in trace}, {layer.ids.shape[1] for layer in trace}
    if len(experts) > 1 or len(widths) > 1 or not trace[0].ids.size:
        return []
    E, K, T = *experts, *widths, len(trace[0].ids)
    sample = [LayerRouting(one.ids[:_SAMPLE], np.ones_like(one.ids[:_SAMPLE], np.float32), E) for one in trace]
    rows = []
    ranks = 2
    while ranks <= min(E, _MOST_RANKS):
        linear = Placement.linear(E, ranks)
        for kind in ("in order", "balanced"):
            shares = []
            for layer in sample:
                load = _counts(layer.ids, E)
                placement = linear if kind == "in order" else Placement.balanced(load, ranks, linear.per_rank)
                shares.append((traffic_of(layer.ids, placement), placement))
            visits = float(np.mean([share.tokens.sum() for share, _ in shares]))
            uneven = float(np.mean([share.slots.max() * ranks for share, _ in shares]))
            row: dict[str, Any] = {"ranks": ranks, "kind": kind, "visits": visits, "imbalance": uneven}
            if sizes is not None:
                d_model, d_ff = sizes
                spec = MoELayerSpec(d_model, d_ff, E, K)
                priced = [
                    simulate(spec, RoutingTrace((layer,)), T, placement, machine, ExchangeSpec("all_to_all"))
                    for layer, (_, placement) in zip(sample, shares, strict=True)
                ]
                # Rows in bf16 that leave their rank: a token's to each owner, and a slot's back.
                row["bytes"] = T * (visits + K) * (1 - 1 / ranks) * d_model * 2
                row["us"] = float(np.mean([one.us for one in priced]))
                row["alone_us"] = float(np.mean([one.alone_us for one in priced]))
            rows.append(row)
        ranks *= 2
    return rows
