"""Ranks with empty places, and one without any expert: their experts are computed with as they lie."""

from __future__ import annotations

from typing import Any
from unittest import mock

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

from moe_core.layers import ExpertsSpec, MoELayerSpec
from moe_core.parallel import ExchangeSpec, Placement
from moe_core.specs import RouterSpec
from moe_torch import MoE
from moe_torch.layers import parallel
from moe_torch.parallel import ExpertParallel, parallelize
from tests.support.parallel.pool import Pool, ranks
from tests.support.parallel.torch import mesh_of
from tests.support.torch import running_on, to_numpy

__all__ = ["ranks"]

#: On four ranks of two places each the last has none, and one of the third is empty.
SPEC = MoELayerSpec(16, 24, 5, 2, RouterSpec(2, renormalize=True), ExpertsSpec(bias=True))
TOKENS = 6
WAYS = (ExchangeSpec(), ExchangeSpec("padded", "slots"), ExchangeSpec("all_gather"), ExchangeSpec("peer"))
WAYS += (ExchangeSpec("peer", "slots"),)


def make() -> MoE:
    torch.manual_seed(0)
    made = MoE.from_spec(SPEC)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_(std=0.3)
    return made


def results(own: MoE, x: torch.Tensor, d_y: torch.Tensor) -> dict[str, np.ndarray]:
    with torch.no_grad():
        inference = own(x)
    x = x.clone().requires_grad_()
    y = own(x)
    y.backward(d_y)
    found = {"inference": inference, "y": y, "d_x": x.grad}
    for name, parameter in own.experts.named_parameters():
        gradient: Any = parameter.grad
        found[f"d {name}"] = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
    return {name: to_numpy(array) for name, array in found.items()}


def rows() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x, d_y = (torch.randn(4 * TOKENS, 16, generator=generator) for _ in range(2))
    return x, d_y


def run(group: Any, way: ExchangeSpec) -> tuple[dict[str, np.ndarray], list[bool], list[list[int]]]:
    """The results of a rank, whether each call got the parameters' memory, and the rows that came for each place."""
    rank, shared, received = torch.distributed.get_rank(group), [], []
    own = parallelize(make(), ExpertParallel(mesh_of(group), way, TOKENS))
    real, down = parallel.called, own.experts.down

    def watched(operands: Any, *others: Any) -> Any:
        held = operands.experts.down
        shared.append(held.data_ptr() == down.to_local().data_ptr() and held.numel() > 0)
        found = real(operands, *others)
        received.append(found.received_per_expert.tolist())
        return found

    with running_on("reference"), mock.patch.object(parallel, "called", watched):
        return results(own, *(one[rank * TOKENS :][:TOKENS] for one in rows())), shared, received


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_empty_places_cost_no_copies(ranks: Pool, way: ExchangeSpec) -> None:
    found = ranks.call(run, [(way,)] * 4)
    with running_on("reference"):
        alone = results(make(), *rows())
    for name, expected in alone.items():
        parts = [own[name] for own, *_ in found]
        whole = np.concatenate(parts) if not name.startswith("d ") else parts[0]
        np.testing.assert_array_equal(whole, expected, name)
    placement = Placement.linear(5, 4)
    assert placement.occupied == (2, 2, 1, 0)
    for rank, (_, shared, received) in enumerate(found):
        assert shared == [rank < 3] * 2
        for own in received:
            assert len(own) == 2 and not any(own[placement.occupied[rank] :])
    assert sum(sum(received[0]) for *_, received in found) == 4 * TOKENS * 2
