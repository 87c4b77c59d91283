"""Experts that move between gloo ranks: every bit of one device before and after, and what a move costs."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

from moe_core.layers import ExpertsSpec, MoELayerSpec
from moe_core.parallel import ExchangeSpec, Placement
from moe_core.parallel.placement import Move
from moe_core.specs import RouterSpec, Tuning
from moe_torch import MoE
from moe_torch.layers.rebalance import HOLE, _Shares
from moe_torch.parallel import ExpertParallel, LayerMoves, MovingPlacement, Rebalancer, parallelize
from moe_torch.parallel.group import Ranks
from tests.support.parallel.pool import Pool, ranks
from tests.support.parallel.torch import mesh_of
from tests.support.quantized.layers import D_MODEL, quantized_weights
from tests.support.torch import REAL_KERNELS, running_on, to_numpy

__all__ = ["ranks"]

D, F, E, K = 16, 24, 9, 2
#: BLAS adds up rows of replicas, which are few, in another order than many.
SPEC = MoELayerSpec(
    D, F, E, K, RouterSpec(K, renormalize=True), ExpertsSpec(bias=True), tuning=Tuning(batch_invariant=True)
)
#: Bytes of an expert: two matrices and two biases of float32.
EXPERT = 4 * (3 * D * F + 2 * F + D)
TOKENS = 12


def make(seed: int = 0, hot: tuple[int, ...] = ()) -> MoE:
    """A layer; hot: experts that the router prefers."""
    torch.manual_seed(seed)
    layer = MoE.from_spec(dataclasses.replace(SPEC, router_bias=True))
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(std=0.3)
        for expert in hot:
            layer.router.bias[expert] += 3.0
    return layer


def rows(size: int, step: int) -> torch.Tensor:
    return torch.randn(size * TOKENS, D, generator=torch.Generator().manual_seed(step))


def broken(fault: str) -> Any:
    """A planted fault by name: rows that come in another order, tables or names of rows that stay as they were."""
    if not fault:
        return contextlib.nullcontext()
    owner, name = {"rows": (Ranks, "all_to_all"), "tables": (MovingPlacement, "change")}[fault]
    real = getattr(owner, name)

    def wrong(own: Any, given: Any, *others: Any) -> Any:
        if fault == "tables":
            return setattr(own, "current", given) if own.current is not given else real(own, given)
        found = real(own, given, *others)
        return found.flip(0) if others[0].startswith("experts.") else found

    return mock.patch.object(owner, name, wrong)


def serve(
    group: Any, way: ExchangeSpec, spare: int, kind: str, engine: str, fault: str = ""
) -> tuple[list[Any], list[Any], list[Any]]:
    """Outputs by step, moves by step, and addresses of all arrays before and after; the hot experts change halfway."""
    rank, size = torch.distributed.get_rank(group), torch.distributed.get_world_size(group)
    parallel = ExpertParallel(mesh_of(group), way, TOKENS)
    placement = None if kind == "linear" else Placement.round_robin(E, size)
    layers = [parallelize(make(seed, (0, 1)), parallel, placement=placement) for seed in range(2)]
    each = -(-E // size) + spare
    with running_on(engine), torch.no_grad(), broken(fault):
        rebalancer = Rebalancer(layers, parallel, every=2, window=2, places_per_rank=each)
        before, outputs, moved = addresses(layers), [], []
        for step in range(6):
            if step == 3:
                for layer in layers:
                    layer.router.bias[:2] -= 3.0
                    layer.router.bias[-1] += 4.0
            x = rows(size, step)[rank * TOKENS :][:TOKENS]
            for layer in layers:
                x = layer(x)
            outputs.append(to_numpy(x))
            moved.append(rebalancer.step())
        wholes = [to_numpy(layer.experts.down.full_tensor()) for layer in layers]
    assert [share.placement for share in moved[5]] == [rebalancer.placements[share.layer] for share in moved[5]]
    return outputs, moved, [before, addresses(layers), wholes]


def addresses(layers: list[MoE]) -> list[int]:
    arrays: list[Any] = [array for layer in layers for array in (*layer.experts.parameters(), *layer.experts.buffers())]
    tables = [table for layer in layers for table in tables_of(layer)]
    return [array.to_local().data_ptr() for array in arrays] + [table.data_ptr() for table in tables]


def tables_of(layer: MoE) -> tuple[torch.Tensor, ...]:
    moving = layer.experts.exchange.moving
    return moving.places, moving.start, moving.load


def compare(ranks: Pool, size: int, way: ExchangeSpec, spare: int, kind: str, engine: str = "reference") -> None:
    found = ranks.call(serve, [(way, spare, kind, engine)] * size)
    layers = [make(seed, (0, 1)) for seed in range(2)]
    with running_on(engine), torch.no_grad():
        for step in range(6):
            if step == 3:
                for layer in layers:
                    layer.router.bias[:2] -= 3.0
                    layer.router.bias[-1] += 4.0
            x = rows(size, step)
            for layer in layers:
                x = layer(x)
            np.testing.assert_array_equal(np.concatenate([out[step] for out, *_ in found]), to_numpy(x), f"step {step}")
    for _, moved, (before, after, wholes) in found:
        assert moved == found[0][1], "all ranks say the same"
        assert before == after, "graphs read these addresses"
        for layer, whole in zip(layers, wholes, strict=True):
            np.testing.assert_array_equal(whole, layer.experts.down.detach().numpy())
        assert moved[1] and moved[5] and not (moved[0] or moved[2] or moved[4])
        for one in (*moved[1], *moved[5]):
            assert isinstance(one, LayerMoves) and one.after > one.before and one.placement.version >= 1
            each = one.placement.per_rank
            away = sum(move.source // each != move.target // each for move in one.moves)
            assert one.bytes == away * EXPERT and away > 0 and f" {one.bytes} bytes" in str(one)


@pytest.mark.parametrize(
    "size, way, spare, kind",
    [
        (2, ExchangeSpec(), 1, "linear"),
        (4, ExchangeSpec("all_to_all", "slots"), 1, "linear"),
        (4, ExchangeSpec("padded"), 0, "round_robin"),
        (2, ExchangeSpec("all_gather"), 2, "round_robin"),
        (3, ExchangeSpec("padded", "slots"), 1, "linear"),
        (4, ExchangeSpec("peer"), 1, "linear"),
        (3, ExchangeSpec("peer", "slots"), 0, "round_robin"),
        (2, ExchangeSpec("peer", chunks=3), 2, "linear"),
        (3, ExchangeSpec("peer", "slots", receive=99), 1, "round_robin"),
    ],
    ids=str,
)
def test_outputs_keep_their_bits_while_experts_move(
    ranks: Pool, size: int, way: ExchangeSpec, spare: int, kind: str
) -> None:
    compare(ranks, size, way, spare, kind)


@pytest.mark.parametrize("way", [ExchangeSpec(), ExchangeSpec("peer")], ids=str)
@pytest.mark.parametrize("fault", ["rows", "tables"])
def test_planted_faults_are_found(ranks: Pool, way: ExchangeSpec, fault: str) -> None:
    good, bad = (ranks.call(serve, [(way, 1, "linear", "reference", own)] * 2) for own in ("", fault))
    for (expected, *_), (found, *_) in zip(good, bad, strict=True):
        assert any(not np.array_equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.skipif(REAL_KERNELS != "interpreter", reason="gloo ranks run kernels in the interpreter alone")
def test_interpreted_kernels_keep_their_bits(ranks: Pool) -> None:
    compare(ranks, 2, ExchangeSpec(), 1, "linear", "interpreter")


def quantised(group: Any, weights: Any, prepacked: str) -> tuple[list[np.ndarray], int, dict[str, Any]]:
    """Outputs before and after experts moved, the bytes, and what is exported afterwards."""
    rank, size = torch.distributed.get_rank(group), torch.distributed.get_world_size(group)
    parallel = ExpertParallel(mesh_of(group))
    layer = MoE.from_weights(weights)
    x = quantised_rows(size)[rank * TOKENS :][:TOKENS]
    with running_on("reference"), torch.no_grad():
        if prepacked == "before":
            layer.prepack_weights()
        parallelize(layer, parallel)
        rebalancer = Rebalancer([layer], parallel, every=1, window=1)
        if prepacked == "after":
            layer.prepack_weights()
        outputs = [to_numpy(layer(x).float())]
        # Of two ranks, one has both hot experts at first; three have room for replicas of others.
        layer.experts.exchange.moving.load.copy_(torch.tensor([8, 7, 1, 2 if size == 2 else 9]))
        moved = rebalancer.step()
        outputs.append(to_numpy(layer(x).float()))
        assert layer.is_prepacked == bool(prepacked)
        return outputs, sum(one.bytes for one in moved), layer.export_weights().named()


def quantised_rows(size: int) -> torch.Tensor:
    return torch.randn(size * TOKENS, D_MODEL, generator=torch.Generator().manual_seed(3)).bfloat16()


@pytest.mark.parametrize(
    "scheme, prepacked, size",
    [("mxfp4_w4a16", "before", 2), ("mxfp4_w4a16", "after", 3), ("fp8_block", "", 2), ("int4_w4a16_zp", "", 3)],
)
def test_quantised_matrices_move_too(ranks: Pool, scheme: str, prepacked: str, size: int) -> None:
    weights, _ = quantized_weights(scheme)
    found = ranks.call(quantised, [(weights, prepacked)] * size)
    with running_on("reference"), torch.no_grad():
        alone = to_numpy(MoE.from_weights(weights)(quantised_rows(size)).float())
    for number in range(2):
        np.testing.assert_array_equal(np.concatenate([outputs[number] for outputs, *_ in found]), alone)
    assert found[0][1] > 0 and len({size for _, size, _ in found}) == 1
    for *_, exported in found:
        for name, array in weights.named().items():
            np.testing.assert_array_equal(exported[name].view(np.uint8), array.view(np.uint8), name)


def balanced_already(group: Any) -> tuple[Any, ...]:
    """Moves without rows, by a load that does not change, and by one whose gain is too small."""
    parallel = ExpertParallel(mesh_of(group))
    layer = parallelize(make(hot=(7, 8)), parallel)
    with running_on("reference"), torch.no_grad():
        rebalancer = Rebalancer([layer], parallel, every=1, window=3, places_per_rank=6)
        found, x = [rebalancer.step()], rows(1, 0)
        for _ in range(2):
            layer(x)
            found.append(rebalancer.step())
        picky = parallelize(make(hot=(7, 8)), parallel)
        other = Rebalancer([picky], parallel, every=1, window=1, places_per_rank=6, least_gain=0.99)
        picky(x)
        found.append(other.step())
        found.append(rebalancer.rebalance())
    return tuple(len(moves) for moves in found)


def test_nothing_moves_without_need(ranks: Pool) -> None:
    for counts in ranks.call(balanced_already, [()] * 2):
        assert counts == (0, 1, 0, 0, 0)


def in_turn(group: Any) -> list[list[int]]:
    """The layers that move after each step, of two, one at a time."""
    parallel, x = ExpertParallel(mesh_of(group)), rows(1, 0)
    layers = [parallelize(make(seed, (0, 1, 2)), parallel) for seed in range(2)]
    found = []
    with running_on("reference"), torch.no_grad():
        rebalancer = Rebalancer(layers, parallel, every=2, window=1, layers_per_step=1)
        for step in range(4):
            for layer in layers:
                layer(x)
                if step == 1:
                    layer.experts.exchange.moving.load.copy_(torch.arange(E))
            found.append([one.layer for one in rebalancer.step()])
    return found


def test_layers_move_in_turn(ranks: Pool) -> None:
    for moved in ranks.call(in_turn, [()] * 2):
        assert moved[:3] == [[], [0], [1]]


def left_behind(group: Any, way: ExchangeSpec, fault: str) -> list[str]:
    """What calls raise where rank 1 missed a change, counted other steps, or cannot send."""
    rank, parallel = torch.distributed.get_rank(group), ExpertParallel(mesh_of(group), way, TOKENS)
    layer, x, errors = parallelize(make(hot=(0, 1)), parallel), rows(1, 0), []
    with running_on("reference"), torch.no_grad():
        rebalancer = Rebalancer([layer], parallel, every=1, window=1)
        layer(x)
        exchange: Any = layer.experts.exchange
        if fault == "version":
            old = exchange.placement
            assert rebalancer.step()
            if rank == 1:
                exchange.moving.change(dataclasses.replace(exchange.placement, version=old.version))
        elif fault == "step":
            rebalancer._steps += rank
            errors.append(raised(rebalancer.step))
            return errors
        else:
            with mock.patch.object(type(rebalancer._ranks), "all_to_all", side_effect=RuntimeError("no")):
                errors.append(raised(rebalancer.step))
        errors.append(raised(lambda: layer(x)))
    return errors


def raised(call: Any) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize("way", [ExchangeSpec(), *map(ExchangeSpec, ("padded", "all_gather", "peer"))], ids=str)
def test_a_rank_with_an_old_placement_raises_on_all(ranks: Pool, way: ExchangeSpec) -> None:
    for (error,) in ranks.call(left_behind, [(way, "version")] * 3):
        assert (
            error.startswith("InvalidInput: all ranks must agree before mode")
            and "got another version on rank 1" in error
        )


def test_ranks_rebalance_together_or_raise(ranks: Pool) -> None:
    for (error,) in ranks.call(left_behind, [(ExchangeSpec(), "step")] * 3):
        assert error.startswith("InvalidInput: all ranks must rebalance together, got another step on rank 1, 2: steps")


def test_experts_that_are_lost_are_not_used(ranks: Pool) -> None:
    for first, second in ranks.call(left_behind, [(ExchangeSpec(), "message")] * 2):
        assert first == "RuntimeError: no" and second.startswith("RuntimeError: the experts of layers[0] are lost")


def beside(group: Any) -> dict[str, Any]:
    """A copy of a layer after the layer's experts moved, a state_dict, a graph-free moving op, and what raises."""
    parallel = ExpertParallel(mesh_of(group))
    layer, x, found = parallelize(make(hot=(7, 8)), parallel), rows(1, 0), {}
    with running_on("reference"):
        rebalancer = Rebalancer([layer], parallel, every=1, window=1, places_per_rank=6)
        copied, old = copy.deepcopy(layer), layer.state_dict()
        with torch.no_grad():
            found["y"] = [layer(x)]
            assert rebalancer.step()
            found["y"] += [layer(x), copied(x)]
            found["old state"] = raised(lambda: layer.load_state_dict(old))
            layer.load_state_dict(make(hot=(7, 8)).state_dict())
            found["y"].append(layer(x))
            found["shared load"] = copied.experts.exchange.moving is None
        found["training"] = raised(lambda: layer(x.requires_grad_()))
        for name, call in (
            ("whole", lambda: Rebalancer([make()], parallel)),
            ("twice", lambda: Rebalancer([layer], parallel)),
            ("none", lambda: Rebalancer([], parallel)),
            ("places", lambda: Rebalancer([parallelize(make(), parallel)], parallel, places_per_rank=4)),
            ("too many", lambda: Rebalancer([parallelize(make(), parallel)], parallel, places_per_rank=E + 1)),
            ("every", lambda: Rebalancer([copied], parallel, every=0)),
            ("other ranks", lambda: Rebalancer([copied], ExpertParallel(mesh_of(group), ExchangeSpec()), window=0)),
            ("holes", lambda: MovingPlacement(Placement.linear(E, 2), "cpu")),
            ("meta", lambda: Rebalancer([parallelize(MoE.from_spec(SPEC, device="meta"), parallel)], parallel)),
            ("kind", lambda: Rebalancer([torch.nn.Linear(1, 1)], parallel)),
            ("sizes", lambda: layer.experts.exchange.moving.change(Placement.linear(E, 3))),
        ):
            found[name] = raised(call)
    return found


ERRORS = {
    "old state": "both arrays must have one placement",
    "training": "Unsupported: a layer with a Rebalancer must be called under torch.no_grad()",
    "whole": "InvalidInput: layers[0] must be shared out",
    "twice": "InvalidInput: layers[0] must have no Rebalancer yet",
    "none": "InvalidInput: layers must be MoE layers that are shared out, got none",
    "places": "InvalidInput: places_per_rank must be from 5, as many as layers[0] has, to 9, the experts, got 4",
    "too many": "InvalidInput: places_per_rank must be from 5, as many as layers[0] has, to 9, the experts, got 10",
    "every": "InvalidInput: every must be an integer of at least 1, got 0",
    "other ranks": "InvalidInput: window must be an integer of at least 1, got 0",
    "holes": "InvalidInput: placement must have an expert at every place, got 9 experts on 2 ranks of 5, 0 replicas",
    "meta": "InvalidInput: layers[0] must have memory, got experts on meta",
    "kind": "InvalidInput: layers[0] must be",
    "sizes": "InvalidInput: placement must have (9, 2, 6) experts, ranks and places, got (9, 3, 3)",
}


def test_copies_states_and_what_is_refused(ranks: Pool) -> None:
    for found in ranks.call(beside, [()] * 2):
        first, *others = found["y"]
        assert all(torch.equal(first, other) for other in others) and found["shared load"]
        for name, message in ERRORS.items():
            assert message in found[name], name


def test_moves_say_what_they_did() -> None:
    moves = LayerMoves(1, Placement.linear(4, 2), (Move(3, 3, 1),), 96, 0.5, 1.0)
    assert str(moves) == "layer 1: 1 experts moved, 96 bytes, balancedness 50 % before, 100 % after"


def test_layers_start_from_their_placement_if_it_is_full() -> None:
    full, sparse = Placement.linear(4, 2), Placement(4, ((0, 1, 2), (3, HOLE, HOLE)))
    for placement in (full, sparse):
        shares: Any = SimpleNamespace(exchange=SimpleNamespace(placement=placement), number=0)
        first = _Shares.first_placement(shares, None, 1)
        assert (first is placement) == (placement is full) and not any(HOLE in rank for rank in first.owners)
