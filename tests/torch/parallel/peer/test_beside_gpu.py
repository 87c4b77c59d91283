"""Steps of layers with shared experts on NCCL ranks: beside rows that travel they have the bits of one stream."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest

pytest.importorskip("torch")

import torch
import torch.distributed as dist

from moe_core.parallel import ExchangeSpec, Placement
from moe_core.specs.matmul import Activation
from moe_core.specs.moe import MoESpec
from moe_core.specs.operands import ExpertWeights, RouterWeights, SharedExpert
from moe_core.specs.routing import RouterSpec
from moe_torch.parallel import ExpertParallel, moe
from moe_torch.parallel.peer import chunks, streams
from tests.support.parallel.pool import Pool, ranks_with_gpus
from tests.support.parallel.ways import PEER, over

GPUS = ranks_with_gpus()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")]
D, F, LOCAL, LAYERS, STEPS = 512, 384, 4, 3, 8


@pytest.fixture(scope="module")
def gpus() -> Iterator[Pool]:
    pool = Pool(2 if GPUS < 4 else 4, backend="nccl")
    yield pool
    pool.close()


class InOrder(streams.Streams):
    """One stream."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(torch.device("cpu"))


def trained(group: Any, tokens: int, way: ExchangeSpec) -> list[tuple[int, int]]:
    """(step, result) of those that differ from the step of one stream."""
    device, size = torch.device("cuda", torch.cuda.current_device()), dist.get_world_size(group)
    rank = dist.get_rank(group)
    parallel, placement = ExpertParallel(group, way, tokens), Placement.linear(LOCAL * size, size)
    spec, random = MoESpec(Activation("silu"), RouterSpec(4)), torch.Generator(device).manual_seed(rank)

    def drawn(*shape: int) -> torch.Tensor:
        return (0.05 * torch.randn(shape, generator=random, device=device)).bfloat16().requires_grad_()

    x, leaves = drawn(tokens, D), []
    layers: list[tuple[ExpertWeights, SharedExpert, RouterWeights]] = []
    for _ in range(LAYERS):
        experts = ExpertWeights(drawn(LOCAL, D, 2 * F), drawn(LOCAL, F, D))
        shared, router = SharedExpert(drawn(D, 4 * D), drawn(2 * D, D)), RouterWeights(drawn(D, LOCAL * size))
        layers.append((experts, shared, router))
        leaves += [experts.gate_up, experts.down, shared.gate_up, shared.down, router.weight]
    d_y = torch.randn(tokens, D, generator=random, device=device).bfloat16()

    def step() -> list[torch.Tensor]:
        y = x
        for experts, shared, router in layers:
            y = y + moe(y, experts, router, spec, parallel=parallel, placement=placement, shared=shared).output
        return [y.detach(), *torch.autograd.grad(y, [x, *leaves], d_y)]

    with mock.patch.object(chunks, "Streams", InOrder):
        wanted = step()
    found = [step() for _ in range(STEPS)]
    return [
        (turn, number)
        for turn, own in enumerate(found)
        for number, (one, other) in enumerate(zip(own, wanted, strict=True))
        if not torch.equal(one, other)
    ]


@pytest.mark.parametrize("tokens", [1, 4096])
@over(PEER)
def test_training_beside_shared_experts(gpus: Pool, way: ExchangeSpec, tokens: int) -> None:
    assert gpus.call(trained, [(tokens, way)] * len(gpus.processes)) == [[]] * len(gpus.processes)
