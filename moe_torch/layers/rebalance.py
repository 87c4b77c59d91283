"""Experts that move between ranks while a model serves, so that ranks have equal work (EPLB)."""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from moe_core.base.checks import as_integer, finite_float
from moe_core.errors import InvalidInput, Unsupported
from moe_core.parallel.placement import HOLE, Move, Placement
from moe_torch.bridge.options import require_instance
from moe_torch.layers.moe import MoE
from moe_torch.layers.parallel import LayerExchange, refuse_adapters
from moe_torch.layers.placed import PlacedTensor
from moe_torch.parallel.forward import ExpertParallel
from moe_torch.parallel.group import Ranks, Way, as_bytes
from moe_torch.parallel.moving import MovingPlacement

_WIDEST = (torch.int64, torch.int32, torch.int16)


@dataclass(frozen=True)
class LayerMoves:
    """The moves of one layer.

    layer: its number in the Rebalancer. moves: experts that moved. bytes: of weights sent between ranks. before, after:
    balancedness of the counted rows, mean over maximum of ranks, by the old and the new placement.
    """

    layer: int
    placement: Placement
    moves: tuple[Move, ...]
    bytes: int
    before: float
    after: float

    def __str__(self) -> str:
        return (
            f"layer {self.layer}: {len(self.moves)} experts moved, {self.bytes} bytes, balancedness "
            f"{100 * self.before:.0f} % before, {100 * self.after:.0f} % after"
        )


class Rebalancer:
    """Moves the experts of expert-parallel layers between ranks as their load changes, for inference.

    Call `step()` on every rank after each step of the model. Forwards count the rows of each expert on the device, also
    in CUDA graphs. Every `every` steps, ranks add the counts of the last `window` steps and compute a new placement,
    with replicas of the hottest experts in spare places. Weights move between steps into the memory of the parameters,
    so CUDA graphs captured after the Rebalancer was made stay valid. Outputs keep their bits.

    A move needs memory for the experts that a rank sends and receives, of one array of one layer at a time. Parameters
    become `PlacedTensor`s. A step invalidates earlier state_dicts.

    Args:
        layers: `moe_torch.MoE` layers that `parallelize` has shared out, in the same order on every rank.
        places_per_rank: from E / W to E, in each layer. None: as now.
        nodes: of consecutive ranks. An expert's replicas stay on one node.
        least_gain: share of the slowest rank's rows that a new placement must save.
        layers_per_step: the most layers that the host places anew, and that move, after one step. None: all.

    Raises:
        InvalidInput: layers that are not shared out, or have a Rebalancer, wrong numbers, or ranks that disagree.
        Unsupported: a tensor axis, experts sharded in another way, or forwards that need a gradient.
    """

    def __init__(
        self,
        layers: Sequence[Any],
        parallel: ExpertParallel,
        *,
        every: int = 3000,
        window: int = 1000,
        places_per_rank: int | None = None,
        nodes: int = 1,
        least_gain: float = 0.02,
        layers_per_step: int | None = None,
    ) -> None:
        require_instance("parallel", parallel, ExpertParallel)
        if parallel.split.size > 1:
            raise Unsupported(
                "parallel must have no tensor axis, whose ranks would move slices apart; leave tensor out"
            )
        self.parallel, self._every = parallel, as_integer("every", every, 1)
        self._nodes, self._least_gain = as_integer("nodes", nodes, 1), finite_float("least_gain", least_gain)
        self._most = None if layers_per_step is None else as_integer("layers_per_step", layers_per_step, 1)
        window, self._steps = as_integer("window", window, 1), 0
        self._ranks: Ranks = parallel.ranks("rebalancing")
        moe_layers = list(layers)
        if not moe_layers:
            raise InvalidInput("layers must be MoE layers that are shared out, got none; pass those of the model")
        self._layers = [_Shares(layer, number, self._ranks) for number, layer in enumerate(moe_layers)]
        first = [share.first_placement(places_per_rank, self._nodes) for share in self._layers]
        self._agree(first)
        sizes = [placement.num_experts for placement in first]
        with torch.inference_mode(False):
            self._load = torch.zeros(sum(sizes), dtype=torch.int32, device=self._layers[0].device)
            self._window = self._load.new_zeros((window, sum(sizes)))
        for share, placement, load in zip(self._layers, first, self._load.split(sizes), strict=True):
            share.begin(placement, load)
        self._waiting: deque[tuple[_Shares, np.ndarray]] = deque()

    @property
    def placements(self) -> tuple[Placement, ...]:
        return tuple(share.exchange.placement for share in self._layers)

    @torch.no_grad()
    def step(self) -> tuple[LayerMoves, ...]:
        """Count a step of the model, and move experts if it is time. A collective. Returns the layers that moved.

        Raises InvalidInput if ranks disagree, and RuntimeError if a message failed: that layer's experts are lost.
        """
        if self._load.is_cuda and torch.cuda.is_current_stream_capturing():
            raise InvalidInput("step must be called between replays, got a stream that is captured; call it outside")
        self._window[self._steps % len(self._window)].copy_(self._load)
        self._load.zero_()
        self._steps += 1
        if self._steps % self._every == 0:
            self._choose()
        return self._move(self._most)

    @torch.no_grad()
    def rebalance(self) -> tuple[LayerMoves, ...]:
        """Move all experts now, by the counts so far; otherwise as `step`."""
        self._choose()
        return self._move(None)

    def _choose(self) -> None:
        self._agree(self.placements)
        total = self._ranks.total(self._window.sum(dim=0, dtype=torch.int64), "counts").cpu().numpy()
        self._waiting.clear()
        start = 0
        for share in self._layers:
            old = share.exchange.placement
            self._waiting.append((share, total[start : start + old.num_experts]))
            start += old.num_experts

    def _move(self, most: int | None) -> tuple[LayerMoves, ...]:
        done, turns = [], len(self._waiting) if most is None else min(most, len(self._waiting))
        for share, load in [self._waiting.popleft() for _ in range(turns)]:
            # The host places a layer in its turn, so that no step waits for all.
            old = share.exchange.placement
            new = Placement.balanced(load, old.num_ranks, old.per_rank, nodes=self._nodes).near(old, nodes=self._nodes)
            before, after = old.balancedness(load), new.balancedness(load)
            if new is not old and load.any() and 1 - before / after > self._least_gain:
                moves = old.moved(new)
                done.append(LayerMoves(share.number, new, moves, share.bytes_of(moves), before, after))
                share.move(moves, new)
        return tuple(done)

    def _agree(self, placements: Sequence[Placement]) -> None:
        """Raise InvalidInput on all ranks if one has another step, placement or option."""
        options = repr((self._every, self._nodes, self._least_gain, self._most))
        known = [(one.num_experts, one.per_rank, one.version, one.digest) for one in placements]
        digest = zlib.crc32(repr((options, known)).encode())
        state = torch.tensor([self._steps, digest], dtype=torch.int64, device=self._layers[0].device)
        told = self._ranks.all_gather(state, "step and placements").cpu().numpy()
        other = np.flatnonzero((told != told[0]).any(axis=1)).tolist()
        if other:
            kind = "step" if (told[:, 0] != told[0, 0]).any() else "placements or options"
            raise InvalidInput(
                f"all ranks must rebalance together, got another {kind} on rank {', '.join(map(str, other))}: steps "
                f"{told[:, 0].tolist()}; call step() after every step on all of them, with the same options"
            )


class _Shares:
    def __init__(self, layer: Any, number: int, ranks: Ranks) -> None:
        require_instance(f"layers[{number}]", layer, MoE)
        self._experts: Any = layer._parts()["experts"]
        exchange = self._experts.exchange
        if exchange is None:
            raise InvalidInput(f"layers[{number}] must be shared out, got one that is whole; call parallelize first")
        refuse_adapters(layer)
        if exchange.moving is not None:
            raise InvalidInput(f"layers[{number}] must have no Rebalancer yet, got one that has; keep a single one")
        if exchange.parallel.ranks().group is not ranks.group:
            raise InvalidInput(f"layers[{number}] must be shared out over parallel's ranks, got others; pass its own")
        self.number, self.exchange, self._ranks = number, exchange, ranks
        for name, array in self._arrays():
            placed = getattr(array, "placements", ())
            if not isinstance(array, PlacedTensor) and not (
                isinstance(array, DTensor) and len(placed) == 1 and placed[0].is_shard(0)
            ):
                raise Unsupported(
                    f"experts.{name} of layers[{number}] must be shared out by experts alone, got "
                    f"{type(array).__name__} {placed or list(array.shape)}; keep experts that move out of fully_shard"
                )
            if array.is_meta:
                raise InvalidInput(f"layers[{number}] must have memory, got experts on meta; call to_empty first")
        self.device = next(iter(self._arrays()))[1].device

    exchange: LayerExchange

    def _arrays(self) -> Iterator[tuple[str, Any]]:
        """(name, array), looked up anew since prepacking replaces them."""
        yield from self._experts.named_parameters()
        yield from self._experts.named_buffers()

    def first_placement(self, places_per_rank: int | None, nodes: int) -> Placement:
        """The present placement if it is full and has so many places, else one with spare places."""
        now = self.exchange.placement
        each = now.per_rank if places_per_rank is None else as_integer("places_per_rank", places_per_rank, 1)
        if not now.per_rank <= each <= now.num_experts:
            raise InvalidInput(
                f"places_per_rank must be from {now.per_rank}, as many as layers[{self.number}] has, to "
                f"{now.num_experts}, the experts, got {each}; choose such a number"
            )
        if each == now.per_rank and all(HOLE not in rank for rank in now.owners):
            return now
        return Placement.balanced(np.ones(now.num_experts), now.num_ranks, each, nodes=nodes).near(now, nodes=nodes)

    def begin(self, placement: Placement, load: torch.Tensor) -> None:
        now, each = self.exchange.placement, placement.per_rank
        owners = tuple((*rank, *[HOLE] * (each - len(rank))) for rank in now.owners)
        now = Placement(now.num_experts, owners, now.version)
        for module in self._experts.modules():
            for arrays in (module._parameters, module._buffers):
                for name, array in arrays.items():
                    if array is not None:
                        arrays[name] = self._with_places(array, now)
        self.exchange.placement = now
        if placement.owners != owners:
            self._move_arrays(now.moved(placement))
        self._name(placement)
        self.exchange.moving = MovingPlacement(placement, self.device, load=load)

    def _with_places(self, array: Any, placement: Placement) -> Any:
        local = array.detach().to_local()
        if len(local) < placement.per_rank or not local.is_contiguous():
            wider = local.new_empty((placement.per_rank, *local.shape[1:]))
            wider[: len(local)] = local
            local = wider
        placed = PlacedTensor(local, (self.exchange.parallel.axis, self._ranks.rank, placement))
        if not isinstance(array, torch.nn.Parameter):
            return placed
        return torch.nn.Parameter(placed, requires_grad=array.requires_grad)

    def bytes_of(self, moves: Sequence[Move]) -> int:
        each, expert = self.exchange.placement.per_rank, 0
        for _, array in self._arrays():
            expert += array._local[:1].numel() * array._local.element_size()
        return expert * sum(move.source // each != move.target // each for move in moves)

    def move(self, moves: Sequence[Move], placement: Placement) -> None:
        moving = self.exchange.moving
        assert moving is not None
        moving.why_broken = (
            f"the experts of layers[{self.number}] are lost, since a message failed while they moved; load its weights "
            "into a new layer"
        )
        self._move_arrays(moves)
        self._name(placement)
        moving.change(placement)
        moving.why_broken = None

    def _name(self, placement: Placement) -> None:
        for _, array in self._arrays():
            array._where = (*array._where[:2], placement)
        self.exchange.placement = placement

    def _move_arrays(self, moves: Sequence[Move]) -> None:
        ranks, each = self._ranks, self.exchange.placement.per_rank
        # Rows go out by target rank, as moves are ordered, and come by source rank.
        out = [move for move in moves if move.source // each == ranks.rank]
        into = sorted((m for m in moves if m.target // each == ranks.rank), key=lambda move: move.source // each)
        sent, received = (
            np.bincount(np.array(places, np.int64) // each, minlength=ranks.size).tolist()
            for places in ([move.target for move in out], [move.source for move in into])
        )
        source, target = (
            torch.tensor([place % each for place in places], dtype=torch.long, device=self.device)
            for places in ([move.source for move in out], [move.target for move in into])
        )
        for name, array in self._arrays():
            # Rows leave before any arrives, since a place may be source and target.
            rows = _wide_rows(array._local)
            came = ranks.all_to_all(rows[source], f"experts.{name} of layers[{self.number}]", Way(sent, received))
            rows[target] = came


def _wide_rows(local: torch.Tensor) -> torch.Tensor:
    """An array `[L, ...]` as rows of the widest integers that fit."""
    rows = as_bytes(local)
    for dtype in _WIDEST:
        size = dtype.itemsize
        if rows.shape[1] and not any(one % size for one in (rows.shape[1], rows.data_ptr(), rows.storage_offset())):
            return rows.view(dtype)
    return rows
