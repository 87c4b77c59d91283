"""Ranks that die: the others go on in the same processes, and every bit is that of a run that lost none."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

from moe_core.layers import MoELayerSpec
from moe_core.parallel import ExchangeSpec, Placement
from moe_core.parallel.placement import HOLE
from moe_core.specs import Tuning
from moe_torch import MoE
from moe_torch.parallel import ExpertParallel, Mirror, PlacedTensor, move_experts, parallelize, reform
from tests.support.parallel.placements import placement_of
from tests.support.parallel.pool import Pool, ranks
from tests.support.parallel.torch import mesh_of
from tests.support.torch import running_on

__all__ = ["ranks"]

#: Seconds in which a rank finds out that others, which wait for nothing, have left a message.
WAITS = 8
D, E, TOKENS, STEPS = 16, 6, 24, 4
KEPT: dict[str, Any] = {}


def model_of(parallel: ExpertParallel | None = None, placement: Placement | None = None) -> Any:
    """Two layers; routers stay, since sums over ranks depend on their number."""
    torch.manual_seed(3)
    layers = [MoE.from_spec(MoELayerSpec(D, 24, E, 2, tuning=Tuning(batch_invariant=True))) for _ in range(2)]
    for layer in layers:
        layer.router.requires_grad_(False)
        if parallel is not None:
            parallelize(layer, parallel, placement=placement)
    return torch.nn.Sequential(*layers)


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    made = torch.Generator().manual_seed(step)
    x, target = (torch.randn(TOKENS, D, generator=made) for _ in range(2))
    return x, target


def train(model: Any, optimizer: Any, step: int, rank: int = 0, size: int = 1) -> np.ndarray:
    """A rank's part of a step; its tokens' outputs."""
    x, target = (one.chunk(size)[rank] for one in batch(step))
    with running_on("reference"):
        y = model(x) + x
        optimizer.zero_grad()
        (y - target).square().sum().backward()
        optimizer.step()
    return y.detach().numpy()


def optimizer_of(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(trained_of(model), 1e-2, weight_decay=0.1)


def trained_of(model: Any) -> list[Any]:
    return [one for one in model.parameters() if one.requires_grad]


def alone() -> list[np.ndarray]:
    model = model_of()
    optimizer = optimizer_of(model)
    return [train(model, optimizer, step) for step in range(STEPS)]


def of_ranks(group: Any) -> ExpertParallel:
    """All ranks, or those that a death has left."""
    if "parallel" not in KEPT:
        KEPT["parallel"] = ExpertParallel(mesh_of(group), max_tokens=TOKENS, timeout=WAITS)
    return KEPT["parallel"]


def answers(model: Any, parallel: ExpertParallel) -> np.ndarray:
    with torch.no_grad(), running_on("reference"):
        return model(batch(0)[0].chunk(parallel.ranks().size)[parallel.ranks().rank]).numpy()


def serve(group: Any, dies: int) -> Any:
    """Outputs of two modes before and after a rank's death, and the error between."""
    parallel = of_ranks(group)
    others = dataclasses.replace(parallel, exchange=ExchangeSpec("peer"))
    models = [model_of(one, placement_of("replicas", E, 4, 1)) for one in (parallel, others)]
    found = [answers(model, parallel) for model in models]
    if parallel.ranks().rank == dies:
        os._exit(3)
    with pytest.raises(RuntimeError) as caught:
        answers(models[0], parallel)
    left = KEPT["parallel"] = reform(models[0], seconds=30)
    again = reform(models[1], [rank for rank in range(4) if rank != dies])
    assert again.exchange.mode == "peer" and left.max_tokens == TOKENS
    return str(caught.value), [*found, *(answers(model, left) for model in models)]


def train_on(group: Any, dies: int, at: str) -> list[np.ndarray]:
    """Steps, in the third of which a rank ends: before its backward, or behind the last message of its save."""
    parallel = of_ranks(group)
    full = parallel.ranks().size
    model = model_of(parallel, Placement.round_robin(E, full) if at == "save" else None)
    optimizer, outputs, step = optimizer_of(model), [], 0
    mirror = Mirror(model, optimizer)
    mirror.save()
    while step < STEPS:
        ranks = parallel.ranks()
        if step == 2 and ranks.rank == dies and ranks.size == full:
            if at == "save":
                mirror._whole = lambda: os._exit(3)
            else:
                trained_of(model)[-1].register_hook(lambda _: os._exit(3))
        try:
            outputs[step:] = [train(model, optimizer, step, ranks.rank, ranks.size)]
            mirror.save()
        except RuntimeError:
            # What a step did before the death is known is undone.
            optimizer.step()
            parallel = KEPT["parallel"] = mirror.reform(seconds=30)
            del outputs[mirror.step :]
        step = mirror.step
    assert all(isinstance(one, PlacedTensor) for one in trained_of(model))
    assert parallel.ranks().size == full - 1
    return outputs


def test_ranks_die_one_after_another() -> None:
    """In inference with replicas, in a backward, and in a save: four ranks, three, two and the last one."""
    pool, alive, expected = Pool(4), [0, 1, 2, 3], alone()
    with torch.no_grad(), running_on("reference"):
        answer = model_of()(batch(0)[0]).numpy()

    def run(function: Any, dies: int, *rest: Any) -> list[Any]:
        """dies: the number among those alive."""
        for rank in alive:
            pool.pipes[rank].send((function, 4, (dies, *rest)))
        del alive[dies]
        results = [pool.result(rank) for rank in alive]
        assert all(good for good, _ in results), results
        return [value for _, value in results]

    try:
        served = run(serve, 1)
        for error, _ in served:
            assert "rank 1 is gone" in error
        for after in (2, 3):
            np.testing.assert_array_equal(np.concatenate([found[after] for _, found in served]), answer)
        for at, dies in (("backward", 1), ("save", 1)):
            left = run(train_on, dies, at)
            # In its save a rank had sent all: the step was done.
            for step in (2, 3) if at == "backward" else (3,):
                found = np.concatenate([outputs[step] for outputs in left])
                np.testing.assert_array_equal(found, expected[step], f"{at}, step {step}")
        assert alive == [0]
    finally:
        pool.close()


def moved(group: Any, rank: int) -> list[np.ndarray]:
    """Outputs of steps between which experts move, with the states of AdamW."""
    model = model_of(ExpertParallel(mesh_of(group)))
    optimizer, outputs = optimizer_of(model), []
    for step in range(STEPS):
        outputs.append(train(model, optimizer, step, rank, 4))
        first = Placement(E, ((HOLE, 0), (4, 1), (HOLE, 2), (5, 3))) if step % 2 else Placement.round_robin(E, 4)
        for layer, placement in zip(model, (first, placement_of("balanced", E, 4, step)), strict=True):
            move_experts(layer, placement, optimizer)
    return outputs


def test_experts_move_in_training_with_their_states(ranks: Pool) -> None:
    found = ranks.call(moved, [(rank,) for rank in range(4)])
    for step, expected in enumerate(alone()):
        np.testing.assert_array_equal(np.concatenate([outputs[step] for outputs in found]), expected, f"step {step}")


def undone(group: Any, rank: int) -> list[list[np.ndarray]]:
    """Outputs of two steps, and of the same ones again, after the state before them has come back."""
    model = model_of(ExpertParallel(mesh_of(group)))
    optimizer, outputs = optimizer_of(model), []
    mirror = Mirror(model, optimizer)
    for step in range(2):
        train(model, optimizer, step, rank, 2)
        mirror.save()
    for _ in range(2):
        outputs.append([train(model, optimizer, step, rank, 2) for step in (2, 3)])
        for layer in model:
            layer.router.weight.neg_()
        mirror.reform([0, 1])
        assert mirror.step == 1
    return outputs


def test_a_state_comes_back_where_all_survive(ranks: Pool) -> None:
    for first, again in ranks.call(undone, [(rank,) for rank in range(2)]):
        np.testing.assert_array_equal(first, again)


def refused(group: Any, rank: int) -> list[str]:
    texts, model = [], model_of(ExpertParallel(mesh_of(group)))
    mirror, optimizer = Mirror(model, optimizer_of(model)), optimizer_of(model)
    steps = [mirror.step]
    mirror.save()
    assert [*steps, mirror.step] == [-1, 0]
    for call in (
        lambda: reform(model, [0, 1]) if rank < 2 else reform(model, [2, 3]),
        lambda: reform(model, [rank ^ 1]),
        lambda: reform(torch.nn.Linear(2, 2)),
        lambda: mirror.reform([0, 1] if rank < 2 else [2, 3]),
        lambda: (mirror if rank else Mirror(model, optimizer)).save(),
        lambda: move_experts(model[0], Placement.linear(E, 3)),
        lambda: move_experts(model[0], E),  # type: ignore[arg-type]
    ):
        try:
            call()
        except ValueError as error:
            texts.append(str(error))
    return texts


def test_errors(ranks: Pool) -> None:
    expected = ("survivors must hold every expert, got none of [", "survivors must hold this rank, ",
                "model must have layers of parallelize on the same ranks, got 0", "survivors must hold a copy of every",
                "all ranks must save after the same step, got [-1, 0, 0, 0] by rank; call save on all of them",
                "placement must be of the layer's 6 experts and 4 ranks, got ",
                "placement must be a Placement, got int")  # fmt: skip
    for texts in ranks.call(refused, [(rank,) for rank in range(4)]):
        assert [text.startswith(start) for text, start in zip(texts, expected, strict=True)] == [True] * 7, texts
