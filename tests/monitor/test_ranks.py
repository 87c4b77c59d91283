"""Layers with experts on several ranks: every rank writes the counts and norms of one device with all tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

from moe_core.layers import MoELayerSpec
from moe_core.parallel import ExchangeSpec
from moe_torch import MoE
from moe_torch.monitor import Monitor
from moe_torch.parallel import ExpertParallel, parallelize
from tests.support.parallel.placements import placement_of
from tests.support.parallel.pool import Pool, ranks
from tests.support.parallel.torch import mesh_of
from tests.support.torch import running_on

__all__ = ["ranks"]

SPEC = MoELayerSpec(16, 24, 7, 3, capacity_factor=0.8)
TOKENS = (5, 9, 0, 4)


def values(layer: MoE, x: torch.Tensor, group: Any = None) -> dict[str, Any]:
    monitor = Monitor(layer, None, every=1, group=group)
    with running_on("reference"):
        layer(x).square().sum().backward()
    found = monitor.step()
    assert found is not None
    return found | {"n": monitor.counted}


def make() -> tuple[MoE, torch.Tensor]:
    torch.manual_seed(0)
    return MoE.from_spec(SPEC), torch.randn(sum(TOKENS), 16)


def run(group: Any, kind: str) -> dict[str, Any]:
    layer, x = make()
    rank = torch.distributed.get_rank(group)
    parallel = ExpertParallel(mesh_of(group), ExchangeSpec())
    parallelize(layer, parallel, placement=placement_of(kind, 7, len(TOKENS), 1))
    return values(layer, x[sum(TOKENS[:rank]) :][: TOKENS[rank]], group)


@pytest.mark.parametrize("kind", ["linear", "round_robin"])
def test_ranks_write_what_one_device_writes(ranks: Pool, kind: str) -> None:
    expected = values(*make())
    for found in ranks.call(run, [(kind,)] * len(TOKENS)):
        assert found.keys() - expected.keys() == {"moe/overflow", "moe/MoE/overflow"}
        # Losses are means over ranks, and the router's gradient is that of a rank's tokens.
        for name in expected.keys() - {"moe/tokens_per_second"}:
            if not name.endswith(("_loss", "router")):
                np.testing.assert_allclose(found[name], expected[name], 1e-4, err_msg=name)


def overflowed(group: Any) -> tuple[int, int]:
    layer, x = make()
    parallelize(layer, ExpertParallel(mesh_of(group), ExchangeSpec(receive=4, on_overflow="drop")))
    monitor = Monitor(layer, None, every=1, group=group, gradients=False)
    with running_on("reference"), torch.no_grad():
        _, aux = layer(x[:5], return_aux=True)
    written = monitor.step()
    assert written is not None
    return written["moe/overflow"], int(aux.overflow)


def test_rows_without_memory_count_once(ranks: Pool) -> None:
    """An exchange tells every rank those of all ranks."""
    for written, told in ranks.call(overflowed, [()] * len(TOKENS)):
        assert written == told > 0
