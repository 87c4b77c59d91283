"""Predicted times of an expert-parallel layer: a model of links and products.

Rows travel over NVLink within a domain and over the network to others, both at once. The busiest rank decides. Ids and
weights, below 2 % of the rows of real models, are left out. Counts that the host reads grow with the square of ranks.
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
from moe_core.parallel.header import Header
from moe_core.parallel.machine import Link, Machine, machine_of
from moe_core.parallel.messages import quantized_bytes
from moe_core.parallel.placement import Placement
from moe_core.parallel.plan import plan_exchange
from moe_core.parallel.spec import ExchangeSpec, ranks_of_host, refuse_chunks
from moe_core.parallel.traffic import DRAWN, Traffic, Zipf, even_traffic, traffic_of
from moe_core.trace import RoutingTrace

_DTYPE = "bfloat16"
#: In lanes: the share of time that products lose, and of reading the weights that each further chunk adds. Fitted to
#: five models on four H200, docs/notebook/parallel.md.
_SHARING, _READ_AGAIN = 0.06, 0.68


@dataclass(frozen=True)
class Prediction:
    """Predicted microseconds of one layer on W ranks.

    stages: (name, us) of the busiest rank, in order, without overlap. us: all, with overlap. alone_us: one device with
    all experts and a rank's tokens. imbalance: rows of the busiest rank over the mean. bound: the longest part.
    buffers: bytes of the busiest rank's exchange if counts are exact, without scratch of the experts' op. static: with
    static shapes, as in JAX. assumed: statements that the numbers rest on.
    """

    ranks: int
    tokens: int
    stages: tuple[tuple[str, float], ...]
    us: float
    alone_us: float
    imbalance: float
    bound: str
    buffers: int
    static: int
    assumed: tuple[str, ...]

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
            f"{self.bound}; buffers {self.buffers / 1e9:.2f} GB, with static shapes (JAX) {self.static / 1e9:.2f} GB, "
            f"which receive= bounds; assumed: {'; '.join(self.assumed)}"
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
    """Predict a forward of `tokens` tokens on each rank, routed uniformly to experts in order, without replicas.

    Args:
        ranks: W, at most E. More need replicas: `simulate` takes them in a placement.
        machine: a Machine, the path of a record of `moebius-tune --links`, or None for the record that MOEBIUS_MACHINE
            names.
        imbalance: rows of the busiest rank over the mean; the others share the rest. At least what E experts on W
            ranks make of it.
        tensor: ranks of one NVLink domain that split each expert, each with its own tokens; there are tensor * `ranks`
            ranks.
        training: a forward and its backward.

    Raises InvalidInput, and Unsupported for training in chunks or with a format.
    """
    ranks = as_integer("ranks", ranks, 1, INT32_LIMIT)
    share = finite_float("imbalance", imbalance)
    if not 1 <= share <= ranks:
        raise InvalidInput(f"imbalance must be in [1, {ranks}], the number of ranks, got {imbalance}; 1 = none")
    require_kind("layer", layer, MoELayerSpec)
    E = layer.num_experts
    if ranks > E:
        raise InvalidInput(
            f"ranks must be at most the layer's {E} experts, got {ranks}: {ranks - E} would hold none; let {E} ranks "
            f"share them ({ranks // E} groups), or pass Placement.balanced with replicas to `simulate`"
        )
    machine = machine_of(machine)
    least = -(-E // ranks) * ranks / E
    traffic = even_traffic(layer, ranks, max(share, least), _domain(machine, tensor, spec, ranks))
    routing = "uniform routing" if share == 1 else f"the busiest rank has {share:g} times the mean"
    placement = Placement.linear(E, ranks)
    return _price(layer, tokens, machine, spec, _Loads(traffic, placement, routing), training, tensor)


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

    routing: routes the tokens of every rank. placement: of the layer's experts; replicas are named in the result, and
    `training` refuses them. Other arguments and errors: see `predict`.
    """
    require_kind("layer", layer, MoELayerSpec)
    require_kind("placement", placement, Placement)
    machine = machine_of(machine)
    if isinstance(routing, Zipf):
        groups = layer.router.num_groups, layer.router.topk_group
        samples, about = [routing.ids(DRAWN, layer.top_k, layer.num_experts, groups)], str(routing)
    else:
        require_kind("routing", routing, RoutingTrace)
        samples, about = [], f"a routing trace of {len(routing)} layers"
        for number, selection in enumerate(routing):
            selection.require_fits(number, len(selection.ids), layer.top_k, layer.num_experts)
            samples.append(np.asarray(selection.ids))
    if placement.num_experts != layer.num_experts:
        raise InvalidInput(
            f"placement must be of the layer's {layer.num_experts} experts, got {placement}; make one for them"
        )
    costs = []
    for ids in samples:
        domain = _domain(machine, tensor, spec, placement.num_ranks)
        loads = _Loads(traffic_of(ids, placement, domain), placement, about)
        costs.append(_price(layer, tokens, machine, spec, loads, training, tensor))
    names = [name for name, _ in costs[0].stages]
    stages = tuple((name, float(np.mean([dict(one.stages)[name] for one in costs]))) for name in names)
    means = {name: float(np.mean([getattr(one, name) for one in costs])) for name in ("us", "alone_us", "imbalance")}
    worst = max(costs, key=lambda one: one.us)
    return dataclasses.replace(worst, stages=stages, buffers=max(one.buffers for one in costs), **means)


class _Loads(NamedTuple):
    traffic: Traffic
    placement: Placement
    about: str


def _domain(machine: Machine, tensor: int, spec: ExchangeSpec, ranks: int) -> int:
    """Ranks of the expert axis within a domain, or on a host of an exchange of two levels."""
    tensor = as_integer("tensor", tensor, 1, INT32_LIMIT)
    if tensor > machine.domain:
        raise InvalidInput(
            f"tensor must be at most the machine's domain of {machine.domain}, got {tensor}; split experts within it"
        )
    require_kind("spec", spec, ExchangeSpec)
    domain, local = machine.domain // tensor, ranks_of_host(spec, ranks)
    if spec.hosts > 1 and local > domain:
        raise InvalidInput(
            f"exchange.hosts must leave at most the machine's domain of {domain} ranks on a host, got {spec.hosts} "
            f"hosts of {local}; name more hosts"
        )
    return domain if spec.hosts == 1 else local


def _price(
    layer: MoELayerSpec,
    tokens: int,
    machine: Machine,
    spec: ExchangeSpec,
    loads: _Loads,
    training: bool,
    tensor: int,
) -> Prediction:
    tokens = as_integer("tokens", tokens, 0, INT32_LIMIT)
    require_kind("spec", spec, ExchangeSpec)
    require_flag("training", training)
    if training:
        refuse_chunks(spec)
    (traffic, placement, _), per_rank = loads, loads.placement.per_rank
    ranks = len(traffic.slots)
    machine = dataclasses.replace(machine, domain=_domain(machine, tensor, spec, ranks))
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
    near, hosts, home = machine.link(spec.mode), None, None
    forwards = machine.forwards or (spec.other and spec.rows == "tokens")
    if forwards or spec.hosts > 1:
        hosts = home = tokens * tensor * traffic.hosts
    if forwards:
        # Each rank adds up a token's slots before they travel.
        back = out
    elif spec.hosts > 1:
        # A gateway passes them on as they are.
        home = np.add.reduceat(back, np.arange(0, ranks, machine.domain))
    stages = [
        ("dispatch", _push_us(out, sent, machine, near, hosts)),
        ("combine", _push_us(back, plain, machine, near, home)),
    ]
    if tensor > 1:
        rows, axis = tokens * (tensor - 1), machine.link("all_gather")
        stages = [("gather", axis.us(rows * plain)), *stages, ("scatter", axis.us(rows * layer.d_model * 4))]
    if training:
        # Gradients of the output travel as tokens, gradients of x as results.
        ways = ("dispatch", out, hosts), ("combine", back, home)
        more = {name: _push_us(one, plain, machine, near, over) for name, one, over in ways}
        stages = [(name, us + more.get(name, us)) for name, us in stages]
        alone, share = 3 * alone, 3 * share
    hidden = 0.0
    if spec.mode == "peer":
        # Rows travel home during product 2, one of 3 equal matrices, and the last product of a backward, the others.
        combine, matrices = _push_us(back, plain, machine, near, home), 3 if layer.gated else 2
        each = share / 3 / matrices
        hidden = min(combine, share / matrices)
        if training:
            hidden = min(combine, each) + min(combine, (matrices - 1) * each)
    if spec.mode == "all_to_all" and ranks > 1:
        stages.insert(0, ("counts", _counts_us(spec, ranks, per_rank, machine, near)))
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
    plan = plan_exchange(tokens * tensor, layer.top_k, layer.d_model, _DTYPE, placement, spec, training=training)
    static, assumed = plan.peak(static=True), _assumptions(layer, machine, spec, loads)
    received = math.ceil(float((traffic.slots * layer.top_k if spec.rows == "slots" else traffic.tokens).max()) * ranks)
    sizes = [-(-tokens * tensor * one // spec.chunks) for one in (received, math.ceil(uneven * layer.top_k))]
    buffers = plan.peak(*sizes) if spec.mode == "all_to_all" else plan.peak()
    us = share + exposed
    return Prediction(ranks * tensor, tokens, tuple(stages), us, alone, uneven, bound, buffers, static, assumed)


def _counts_us(spec: ExchangeSpec, ranks: int, per_rank: int, machine: Machine, near: Link) -> float:
    """Each rank sends a header and counts to each of its level. With a bound each answers which rows fit."""
    header = 4 * len(Header._fields)
    if spec.other:
        return _push_us(np.ones(ranks), header, machine, near)
    if spec.hosts == 1:
        told = header + 4 * spec.counts(per_rank) * spec.chunks
        answers = 0.0 if spec.receive is None else _push_us(np.ones(ranks), 8, machine, near)
        return _push_us(np.ones(ranks), told, machine, near) + answers
    local, network = ranks // spec.hosts, machine.network or near
    inside = near.us((local - 1) * (header + 8), local - 1)
    between = network.us((spec.hosts - 1) * (header + 8), spec.hosts - 1)
    return _push_us(np.ones(ranks), header, machine, near) + between + (inside if local > 1 else 0.0)


def _assumptions(layer: MoELayerSpec, machine: Machine, spec: ExchangeSpec, loads: _Loads) -> tuple[str, ...]:
    placement, router, forwards = loads.placement, layer.router, machine.forwards or spec.other
    ranks, far = placement.num_ranks, placement.num_ranks > machine.domain
    copies = int((placement.tables.expert_of_place >= 0).sum()) - placement.num_experts
    texts = {
        loads.about: True,
        f"{copies} replicas of {placement.num_experts} experts": copies > 0,
        f"a token's experts are in {router.topk_group} of {router.num_groups} groups": router.num_groups > 1,
        "a token crosses to a host once, which adds up its results, as DeepEP does": far and forwards,
        f"{spec.hosts} hosts: a token crosses to one once, and its results come back one by one": spec.hosts > 1,
        machine.assumed: far and bool(machine.assumed),
        "products and memory at the machine's rates": machine.products is None,
        "no time of the host, which eager calls of all_to_all wait for": spec.mode == "all_to_all" and ranks > 1,
    }
    return tuple(text for text, holds in texts.items() if holds)


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


def _push_us(rows: np.ndarray, size: int, machine: Machine, link: Link, hosts: np.ndarray | None = None) -> float:
    """Microseconds of the busiest rank. rows `[W]` of `size` bytes. link: within a domain. hosts: rows to each domain,
    which a rank there forwards; None: not forwarded."""
    ranks, domain = len(rows), min(machine.domain, len(rows))
    if ranks == 1:
        return 0.0
    group = np.arange(ranks) // domain
    members = np.bincount(group)
    within = np.bincount(group, rows)
    near_sent, near_received = within[group] - rows, rows * (members[group] - 1)
    far_sent, far_received = rows.sum() - within[group], rows * (ranks - members[group])
    peers = ranks - int(members.min())
    if hosts is not None:
        # A row arrives at one member of the host, which may be the rank itself.
        onward = (ranks - members) * (1 - 1 / members)
        near_sent, near_received = near_sent + (within / members * onward)[group], near_received + rows * onward[group]
        far_sent, far_received = hosts.sum() - hosts[group], (hosts * (ranks / members - 1))[group]
        peers = len(members) - 1
    near = link.us(float(np.maximum(near_sent, near_received).max()) * size, domain - 1)
    if machine.network is None or not peers:
        return near
    far = machine.network.us(float(np.maximum(far_sent, far_received).max()) * size, peers)
    return max(near, far + (0.0 if hosts is None else link.latency_us))


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
