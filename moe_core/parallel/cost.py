"""Predicted times of an expert-parallel layer: a model of links and products.

Rows travel over NVLink within a domain and over the network to others, both at once. The busiest rank decides. Ids,
weights and counts, below 2 % of the rows of real models, are left out, except one latency if the host reads counts.
Products take the longer of their operations at `Machine.tflops` and a rank's weights at `Machine.memory`, or measured
times of `Machine.products`.

Stages follow one another, with two exceptions. With mode `peer` the last product stores its rows at their homes, so the
way back counts only beyond this product. With chunks, only one chunk's messages do not overlap with products; product 2
of a chunk and product 1 of the next slow each other down, and each further chunk reads the weights again.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from moe_core.base import INT32_LIMIT, dtypes
from moe_core.base.checks import as_integer, finite_float, require_flag, require_kind
from moe_core.errors import InvalidInput
from moe_core.layers.spec import HUGGING_FACE, MoELayerSpec
from moe_core.parallel.bounds import bounds_of, runs_in_lanes
from moe_core.parallel.exchange import owners_of, physical_ids
from moe_core.parallel.machine import Link, Machine, machine_of
from moe_core.parallel.messages import quantized_bytes
from moe_core.parallel.placement import Placement
from moe_core.parallel.spec import ExchangeSpec, refuse_chunks
from moe_core.trace import RoutingTrace

_DTYPE = "bfloat16"
#: Tokens drawn from a law.
_DRAWN = 8192
#: In lanes: the share of time that products lose, and of reading the weights that each further chunk adds. Fitted to
#: five models on four H200, docs/notebook/parallel.md.
_SHARING, _READ_AGAIN = 0.06, 0.68


@dataclass(frozen=True)
class Zipf:
    """A law of routing: expert r has probability proportional to r^-exponent, distinct in a token. The seed draws their
    order."""

    exponent: float
    seed: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "exponent", finite_float("exponent", self.exponent))
        object.__setattr__(self, "seed", as_integer("seed", self.seed, 0))
        if self.exponent < 0:
            raise InvalidInput(f"exponent must be at least 0, got {self.exponent}; 0 is uniform")

    def ids(self, tokens: int, top_k: int, num_experts: int) -> np.ndarray:
        """Draw ids int32 `[T, K]`, the same for equal arguments."""
        random = np.random.default_rng(self.seed)
        share = random.permutation(np.arange(1, num_experts + 1) ** -self.exponent)
        # Gumbel's trick: the largest noisy logarithms, without replacement.
        scores = np.log(share) + random.gumbel(size=(tokens, num_experts))
        return np.argpartition(-scores, top_k - 1, axis=1)[:, :top_k].astype(np.int32)

    def load(self, top_k: int, num_experts: int) -> np.ndarray:
        """Return counts int64 `[E]` of the ids of `simulate`, for `Placement.balanced`."""
        return np.bincount(self.ids(_DRAWN, top_k, num_experts).reshape(-1), minlength=num_experts)


class Traffic(NamedTuple):
    """Shares of every rank, fp64 `[W]`: tokens that visit it, and slots that it computes (sum 1)."""

    tokens: np.ndarray
    slots: np.ndarray


@dataclass(frozen=True)
class Prediction:
    """Predicted microseconds of one layer on W ranks.

    stages: (name, us) of the busiest rank, in order, without overlap. us: all, with overlap. alone_us: one device with
    all experts and a rank's tokens. imbalance: rows of the busiest rank over the mean. bound: the longest part.
    """

    ranks: int
    tokens: int
    stages: tuple[tuple[str, float], ...]
    us: float
    alone_us: float
    imbalance: float
    bound: str

    @property
    def efficiency(self) -> float:
        """A rank's throughput over that of one device alone."""
        return self.alone_us / self.us if self.us else 1.0

    @property
    def exchange_us(self) -> float:
        """All stages but compute."""
        return sum(us for name, us in self.stages if name != "compute")

    def __str__(self) -> str:
        stages = ", ".join(f"{name} {us:.0f}" for name, us in self.stages)
        return (
            f"predicted, not measured: {self.us:.0f} us on {self.ranks} ranks of {self.tokens} tokens ({stages}), "
            f"{100 * self.efficiency:.0f} % of {self.ranks} single devices, imbalance {self.imbalance:.2f}, bound by "
            f"{self.bound}"
        )


def predict(
    layer: MoELayerSpec,
    tokens: int,
    ranks: int,
    machine: Machine | str | Path | None,
    spec: ExchangeSpec,
    *,
    imbalance: float = 1.0,
    tensor: int = 1,
    training: bool = False,
) -> Prediction:
    """Predict a forward of `tokens` tokens on each rank, routed uniformly.

    Args:
        layer: sizes of the layer.
        tokens: of each rank.
        ranks: W.
        machine: a Machine, the path of a record of `moebius-tune --links`, or None for the record that MOEBIUS_MACHINE
            names.
        spec: how rows travel.
        imbalance: rows of the busiest rank over the mean; the others share the rest.
        tensor: ranks of one NVLink domain that split each expert, each with its own tokens; there are tensor * `ranks`
            ranks.
        training: a forward and its backward.

    Raises:
        InvalidInput: wrong arguments.
        Unsupported: training in chunks.
    """
    ranks = as_integer("ranks", ranks, 1, INT32_LIMIT)
    share = finite_float("imbalance", imbalance)
    if not 1 <= share <= ranks:
        raise InvalidInput(f"imbalance must be in [1, {ranks}], the number of ranks, got {imbalance}; 1 = none")
    require_kind("layer", layer, MoELayerSpec)
    E, K = layer.num_experts, layer.top_k
    slots = np.full(ranks, (1 - share / ranks) / max(ranks - 1, 1))
    slots[0] = share / ranks
    # The probability that none of K distinct experts is on a rank.
    nothing = math.prod(max(0.0, E - E / ranks - i) / (E - i) for i in range(K))
    visits = np.minimum(1.0, slots * ranks * (1 - nothing))
    traffic = Traffic(visits, slots)
    return _price(layer, tokens, machine, spec, traffic, -(-E // ranks), training, tensor)


def simulate(
    layer: MoELayerSpec,
    routing: RoutingTrace | Zipf,
    tokens: int,
    placement: Placement,
    machine: Machine | str | Path | None,
    spec: ExchangeSpec,
    *,
    tensor: int = 1,
    training: bool = False,
) -> Prediction:
    """Predict with counts from a routing trace, averaged over its layers, or from a law, on a placement.

    Args:
        routing: routes the tokens of every rank.
        placement: of the layer's experts.

    Other arguments and errors are those of `predict`.
    """
    require_kind("layer", layer, MoELayerSpec)
    require_kind("placement", placement, Placement)
    if isinstance(routing, Zipf):
        samples = [routing.ids(_DRAWN, layer.top_k, layer.num_experts)]
    else:
        require_kind("routing", routing, RoutingTrace)
        samples = []
        for number, selection in enumerate(routing):
            selection.require_fits(number, len(selection.ids), layer.top_k, layer.num_experts)
            samples.append(np.asarray(selection.ids))
    if placement.num_experts != layer.num_experts:
        raise InvalidInput(
            f"placement must be of the layer's {layer.num_experts} experts, got {placement}; make one for them"
        )
    costs = []
    for ids in samples:
        traffic = traffic_of(ids, placement)
        costs.append(_price(layer, tokens, machine, spec, traffic, placement.per_rank, training, tensor))
    names = [name for name, _ in costs[0].stages]
    stages = tuple((name, float(np.mean([dict(one.stages)[name] for one in costs]))) for name in names)
    us, alone, uneven = (
        float(np.mean([getattr(one, name) for one in costs])) for name in ("us", "alone_us", "imbalance")
    )
    worst = max(costs, key=lambda one: one.us)
    return Prediction(placement.num_ranks * tensor, tokens, stages, us, alone, uneven, worst.bound)


def traffic_of(ids: np.ndarray, placement: Placement) -> Traffic:
    """Return the shares of ranks in a routing of ids int32 `[T, K]`. Replicas take equal parts."""
    ranks, (held, _, start) = placement.num_ranks, placement.tables
    load = np.bincount(ids[ids >= 0], minlength=placement.num_experts) / max(int((ids >= 0).sum()), 1)
    part = np.where(held < 0, 0.0, (load / np.diff(start))[np.maximum(held, 0)])
    slots = part.reshape(ranks, -1).sum(axis=1)
    owners = owners_of(physical_ids(ids, placement).places, placement.per_rank)
    tokens, k = np.nonzero(owners >= 0)
    visited = np.zeros((len(ids), ranks), bool)
    visited[tokens, owners[tokens, k]] = True
    visits, sent = visited.sum(axis=0), np.bincount(owners[tokens, k], minlength=ranks)
    once = np.where(sent > 0, visits / np.maximum(sent, 1), 1.0)
    return Traffic(slots * len(tokens) / max(len(ids), 1) * once, slots)


def _price(
    layer: MoELayerSpec,
    tokens: int,
    machine: Machine | str | Path | None,
    spec: ExchangeSpec,
    traffic: Traffic,
    per_rank: int,
    training: bool,
    tensor: int,
) -> Prediction:
    tokens = as_integer("tokens", tokens, 0, INT32_LIMIT)
    tensor = as_integer("tensor", tensor, 1, INT32_LIMIT)
    machine = machine_of(machine)
    require_kind("spec", spec, ExchangeSpec)
    require_flag("training", training)
    if training:
        refuse_chunks(spec)
    ranks = len(traffic.slots)
    if tensor > machine.domain:
        raise InvalidInput(
            f"tensor must be at most the machine's domain of {machine.domain}, got {tensor}; split experts within it"
        )
    machine = dataclasses.replace(machine, domain=machine.domain // tensor)
    if machine.network is None and ranks > machine.domain:
        raise InvalidInput(
            f"machine must have a network for {ranks} ranks in domains of {machine.domain}, got None; pass a Link"
        )
    uneven = float(traffic.slots.max() * ranks)
    slot, token, expert, dense = _work(layer)
    most = float(traffic.slots.max()) * ranks * tokens * layer.top_k
    read = min(per_rank, most * tensor) * expert / tensor
    if machine.products is None:
        touched = min(layer.num_experts, tokens * layer.top_k)
        alone = _roofline_us(machine, tokens * (layer.top_k * slot + token), touched * expert + dense)
        share = _roofline_us(machine, most * slot + tokens * token, read + dense)
    else:
        alone, share = machine.products[0], machine.products[1] * uneven
    plain = layer.d_model * dtypes.itemsize(_DTYPE)
    sent = plain if spec.format is None else sum(size for *_, size in quantized_bytes(spec, layer.d_model))
    out, back = _rows(layer, tokens * tensor, spec, traffic, per_rank)
    near = machine.link(spec.mode)
    stages = [("dispatch", _push_us(out, sent, machine, near)), ("combine", _push_us(back, plain, machine, near))]
    if tensor > 1:
        rows, axis = tokens * (tensor - 1), machine.link("all_gather")
        stages = [("gather", axis.us(rows * plain)), *stages, ("scatter", axis.us(rows * layer.d_model * 4))]
    if training:
        # Gradients of the output travel as tokens, gradients of x as results.
        more = {"dispatch": _push_us(out, plain, machine, near), "combine": _push_us(back, plain, machine, near)}
        stages = [(name, us + more.get(name, us)) for name, us in stages]
        alone, share = 3 * alone, 3 * share
    hidden = 0.0
    if spec.mode == "peer":
        # Rows travel home during product 2, one of 3 equal matrices, and the last product of a backward, the others.
        combine, matrices = _push_us(back, plain, machine, near), 3 if layer.gated else 2
        each = share / 3 / matrices
        hidden = min(combine, share / matrices)
        if training:
            hidden = min(combine, each) + min(combine, (matrices - 1) * each)
    if spec.mode == "all_to_all" and ranks > 1:
        far = machine.network if machine.network is not None and ranks > machine.domain else near
        stages.insert(0, ("counts", far.latency_us))
    # The last product already sent its rows. The rest of their way does not overlap.
    stored = sum(us for name, us in stages if name == "combine") if hidden else 0.0
    others = sum(us for _, us in stages) - stored
    if runs_in_lanes(spec):
        # The first chunk's arrival and the last product 2 do not overlap.
        again = _SHARING * share + _READ_AGAIN * (read / machine.memory / 1e3) * (spec.chunks - 1)
        exposed = (others + stored - hidden) / spec.chunks + max(0.0, others + stored - share) + again
    else:
        # The first chunk's arrival and the last chunk's way back do not overlap.
        uncovered = max(0.0, (others - share) * (1 - 1 / spec.chunks))
        exposed = stored - hidden + others / spec.chunks + uncovered
    lost = share - share / uneven if uneven else 0.0
    parts = {"compute": share - lost, "exchange": exposed, "imbalance": lost}
    stages.insert(1 + [name for name, _ in stages].index("dispatch"), ("compute", share))
    bound = max(parts, key=lambda name: parts[name])
    return Prediction(ranks * tensor, tokens, tuple(stages), share + exposed, alone, uneven, bound)


def _rows(
    layer: MoELayerSpec, tokens: int, spec: ExchangeSpec, traffic: Traffic, per_rank: int
) -> tuple[np.ndarray, np.ndarray]:
    """Rows `[W]` from each home to every rank, and back."""
    ranks = len(traffic.slots)
    visits, slots = tokens * traffic.tokens, tokens * layer.top_k * traffic.slots
    if spec.mode in ("all_gather", "padded"):
        # Only the numbers of ranks and places matter.
        places = Placement(1, ((0, *[-1] * (per_rank - 1)), *[(-1,) * per_rank] * (ranks - 1)))
        bounds = bounds_of(spec, tokens, layer.top_k, places)
        assert bounds.block is not None and bounds.back is not None
        return np.full(ranks, float(bounds.block)), np.full(ranks, float(bounds.back))
    return (slots if spec.rows == "slots" else visits), slots


def _push_us(rows: np.ndarray, size: int, machine: Machine, link: Link) -> float:
    """Microseconds of the busiest rank. rows `[W]` of `size` bytes. link: within a domain."""
    ranks, domain = len(rows), min(machine.domain, len(rows))
    if ranks == 1:
        return 0.0
    group = np.arange(ranks) // domain
    members = np.bincount(group)
    within = np.bincount(group, rows)
    near_sent, near_received = within[group] - rows, rows * (members[group] - 1)
    far_sent, far_received = rows.sum() - within[group], rows * (ranks - members[group])
    near = link.us(float(np.maximum(near_sent, near_received).max()) * size)
    if machine.network is None:
        return near
    return max(near, machine.network.us(float(np.maximum(far_sent, far_received).max()) * size))


def _work(layer: MoELayerSpec) -> tuple[float, float, float, float]:
    """Operations of a slot and of a token without slots; bytes of an expert and of other parameters."""
    D, gates = layer.d_model, 3 if layer.gated else 2
    shared = layer.shared_experts
    dense = 2 * D * layer.num_experts + (0 if shared is None else 2 * D * (shared.d_ff * gates + shared.gate))
    sizes = {True: 0, False: 0}
    for parameter in layer.parameters(HUGGING_FACE):
        size = math.prod(parameter.shape) * dtypes.itemsize(parameter.dtype or _DTYPE)
        sizes[parameter.name.startswith("experts.")] += size
    return 2.0 * D * layer.d_ff * gates, float(dense), sizes[True] / layer.num_experts, float(sizes[False])


def _roofline_us(machine: Machine, operations: float, size: float) -> float:
    return max(operations / machine.tflops / 1e6, size / machine.memory / 1e3)
