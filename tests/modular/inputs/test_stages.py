"""Tunings of the stages of modular layers, maps of experts that are no arrays, and results without rows."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

jax = pytest.importorskip("jax")

from moe_core.errors import InvalidInput
from moe_core.specs.tuning import TileConfig, Tuning
from moe_jax import modular
from moe_jax.modular import experts
from tests.support.jax import running_on, to_jax
from tests.support.modular.problems import E, draw_problem


@pytest.mark.parametrize("in_blocks", [False, True])
def test_each_product_has_its_tuning(in_blocks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    tuning, seen, product = Tuning(TileConfig(16, 32, 64), TileConfig(16, 64, 32)), [], experts._product
    monkeypatch.setattr(experts, "_product", lambda *call: (seen.append(call[2].tuning), product(*call))[1])
    with running_on("reference"):
        x, w1, w2, weights, ids = to_jax(tuple(draw_problem()))
        if in_blocks:
            prepared: Any = modular.prepare_batched(x, weights, ids, E, 40)
            modular.batched_experts(prepared.a1q, w1, w2, prepared.expert_num_tokens, tuning=tuning)
        else:
            modular.unfused_experts(x, w1, w2, weights, ids, weight_layout="out_in", tuning=tuning)
    assert seen == [tuning.of_product(1), tuning.of_product(2)]


def test_a_map_of_experts_is_an_array() -> None:
    wrong: Any = [0] * E
    with running_on("reference"), pytest.raises(InvalidInput, match=r"expert_map must be a jax\.Array, got"):
        x, _, _, weights, ids = to_jax(tuple(draw_problem()))
        modular.prepare_batched(x, weights, ids, E, 40, expert_map=wrong)


def test_an_output_without_rows_adds_nothing() -> None:
    torch = pytest.importorskip("torch")
    from moe_torch.modular import finalize_and_norm
    from tests.support.torch import require_equal
    from tests.support.torch import running_on as torch_running_on

    residual = torch.randn(3, 8)
    output: Any = SimpleNamespace(
        gemm2_permuted=torch.zeros(0, 8),
        expert_weights=torch.ones(3, 2),
        expanded_idx_to_permuted_idx=torch.full((3, 2), -1, dtype=torch.int32),
        route_major=False,
    )
    with torch_running_on("reference"):
        require_equal(finalize_and_norm(output, residual, torch.ones(8)).hidden, residual, "hidden")
