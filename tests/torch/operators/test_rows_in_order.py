"""`MoESpec.rows_in_order`: rows that lie by expert are the output as they are, whatever lies behind them."""

from __future__ import annotations

import dataclasses

import pytest

pytest.importorskip("torch")

import torch

import moe_torch
from moe_core.base.arrays import ArraySpec
from moe_core.base.target import Target
from moe_core.errors import InvalidInput
from moe_core.ops.moe.forward import plan_moe
from moe_core.specs import Activation, MoESpec, RouterSpec
from moe_core.specs.operands import ExpertWeights, TopK
from tests.support.torch import REAL_KERNELS, running_on

R, D, F, L, USED = 50, 32, 24, 3, 26
PLAIN = MoESpec(Activation("silu"))
IN_ORDER = dataclasses.replace(PLAIN, rows_in_order=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("engine", ["reference", REAL_KERNELS])
def test_rows_and_gradients_are_those_of_the_sum(engine: str, dtype: torch.dtype) -> None:
    """Unused rows hold NaN, in x, weights and the gradient of the output."""
    generator = torch.Generator().manual_seed(0)
    found = []
    with running_on(engine) as device:
        drawn = [torch.randn(*shape, generator=generator) for shape in ((R, D), (L, D, 2 * F), (L, F, D), (R, 1))]
        x, gate_up, down, weights = (one.to(device, dtype if one.shape != (R, 1) else None) for one in drawn)
        counts = torch.tensor([[9, 0, USED - 9]], dtype=torch.int32, device=device)
        ids, _ = moe_torch.layout_of_runs(counts, R)
        for spec in (PLAIN, IN_ORDER):
            leaves = [one.clone() for one in (x, gate_up, down, weights)]
            d_y = torch.ones(R, D, device=device, dtype=dtype)
            if spec is IN_ORDER:
                for one in (leaves[0], leaves[3], d_y):
                    one[USED:] = torch.nan
            routing = TopK(ids, leaves[3].requires_grad_())
            experts = ExpertWeights(leaves[1].requires_grad_(), leaves[2].requires_grad_())
            y = moe_torch.moe(leaves[0].requires_grad_(), experts, routing, spec).output
            y.backward(d_y)
            with torch.no_grad():
                again = moe_torch.moe(leaves[0], experts, routing, spec).output
            torch.testing.assert_close(again[:USED], y[:USED], rtol=0, atol=0)
            gradients = [one.grad for one in leaves]
            found.append([y[:USED].detach(), gradients[0][:USED], *gradients[1:3], gradients[3][:USED]])  # type: ignore[index]
    for alone, in_order in zip(*found, strict=True):
        torch.testing.assert_close(in_order, alone, rtol=0, atol=0)


def plan_of(spec: MoESpec, top_k: int = 1) -> str:
    experts = ExpertWeights(ArraySpec((L, 256, 512), "bfloat16"), ArraySpec((L, 256, 256), "bfloat16"))
    routing = TopK(ArraySpec((4096, top_k), "int32"), ArraySpec((4096, top_k), "float32"))
    return plan_moe(ArraySpec((4096, 256), "bfloat16"), experts, routing, spec, Target("cuda", 90, 132)).explain()


def test_no_pass_copies_them() -> None:
    assert "reduce" in plan_of(PLAIN) and "reduce" not in plan_of(IN_ORDER)


def test_what_they_cannot_have_is_named() -> None:
    for options in ({"router": RouterSpec(1)}, {"out_dtype": "float32"}):
        with pytest.raises(InvalidInput, match=f"{next(iter(options))} must be None with rows_in_order"):
            dataclasses.replace(IN_ORDER, **options)
    with pytest.raises(InvalidInput, match="top_k must be 1, got 2"):
        plan_of(IN_ORDER, 2)
    ids, mask = torch.zeros(2, 1, dtype=torch.int32), torch.ones(2, dtype=torch.bool)
    experts = ExpertWeights(torch.zeros(L, D, 2 * F), torch.zeros(L, F, D))
    with pytest.raises(InvalidInput, match="token_mask must be None"):
        moe_torch.moe(torch.zeros(2, D), experts, TopK(ids, torch.ones(2, 1)), IN_ORDER, token_mask=mask)
