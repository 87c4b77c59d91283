"""What experts of any generation return, and what each chunk of tokens is handed."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from moe_core.errors import InvalidInput
from moe_torch.modular import FusedMoEModularKernel
from tests.support.torch import ENGINES, running_on
from tools.generations import GENERATIONS, TOPK, K, M, experts_class, part_class, problem

#: Generations whose calls hold scales. Those of newer ones lie in the configuration.
HOLDS_SCALES = [generation for generation in GENERATIONS if generation.name not in ("gpt-oss", "newest")]


def drawn(device: Any = "cpu") -> list[Any]:
    x, w1, w2, weights, ids = problem(False)[0]
    return [one.to(device) for one in (x[:M], w1, w2, weights[:M, :TOPK], ids[:M, :TOPK])]


@pytest.mark.parametrize("rows", [TOPK * M, M])
def test_a_returned_output_has_the_shape_of_workspace_shapes(rows: int) -> None:
    class Returning(experts_class(GENERATIONS[-1])):
        def apply(
            self, hidden_states, w1, w2, topk_weights, topk_ids, activation, global_num_experts, expert_map, a1q_scale,
            a2_scale, workspace13, workspace2, expert_tokens_meta, apply_router_weight_on_input,
        ):  # fmt: skip
            return torch.zeros(rows, K)

    with running_on("reference"), torch.no_grad():
        kernel: Any = FusedMoEModularKernel(part_class(GENERATIONS[-1])(), Returning())
        if rows == TOPK * M:
            assert not kernel(*drawn()).any()
            return
        with pytest.raises(
            InvalidInput, match=rf"must return its output, \[{TOPK * M}, {K}\] of workspace_shapes, got"
        ):
            kernel(*drawn())


@pytest.mark.parametrize("engine", [engine for engine in ENGINES if engine != "reference"])
@pytest.mark.parametrize("generation", HOLDS_SCALES, ids=lambda generation: generation.name)
def test_a_chunk_has_its_rows_of_scales(generation: Any, engine: str) -> None:
    experts: Any = experts_class(generation)()
    experts.supports_chunking = lambda: True
    with running_on(engine) as device, torch.no_grad():
        x, w1, w2, weights, ids = drawn(device)
        x, weights, ids = (torch.cat([one] * 3)[:40] for one in (x, weights, ids))
        kernel: Any = FusedMoEModularKernel(part_class(generation)(), experts, chunk_size=16)
        kernel(x, w1, w2, weights, ids, a2_scale=torch.arange(40.0, device=device)[:, None])
    found = [call["a2_scale"].flatten().tolist() for call in experts.calls_of_apply]
    assert found == [list(range(begin, min(begin + 16, 40))) for begin in (0, 16, 32)]
