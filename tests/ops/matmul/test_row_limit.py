"""Tiles under a limit of rows: chosen for the mean, of a height that divides each expert's rows."""

from __future__ import annotations

from moe_core.base.arrays import ArraySpec
from moe_core.ops.moe.forward import plan_moe
from moe_core.plan.steps import KernelLaunch
from moe_core.specs import Activation, LayoutSpec, MoESpec, RowLimit, TokenRounding
from moe_core.specs.operands import ExpertWeights, TopK
from tests.support.harness import H200


def heights(limit: RowLimit | None, tokens: int, top_k: int, width: int) -> list[str]:
    """The schedules that the products of a layer of gpt-oss' sizes walk."""
    ids = ArraySpec((tokens, width), "int32")
    experts = ExpertWeights(ArraySpec((128, 2880, 5760), "bfloat16"), ArraySpec((128, 2880, 2880), "bfloat16"))
    routing, spec = TopK(ids, ArraySpec(ids.shape, "float32")), MoESpec(Activation("silu"), row_limit=limit)
    plan = plan_moe(ArraySpec((tokens, 2880), "bfloat16"), experts, routing, spec, H200)
    names = [str(dict(step.arguments)["schedule"]) for step in plan.steps if isinstance(step, KernelLaunch)
             and "matmul.sm90" in step.kernel.name]  # fmt: skip
    assert len(names) == 2
    return names


def test_tiles_divide_the_multiple() -> None:
    """128 rows per expert get tiles of 160, unless they come in multiples of 128."""
    assert all("160" in name for name in heights(None, 4096, 4, 4))
    assert all("128" in name for name in heights(TokenRounding().row_limit(4), 4096, 4, 8))
    assert all("192" in name for name in heights(TokenRounding(192).row_limit(4), 4096, 4, 8))


def test_rows_follow_the_limit() -> None:
    layout = LayoutSpec(4096, 8, 128, limit=RowLimit(4, 64))
    assert (layout.rows, layout.capacity, layout.num_slots) == (24576, 24576, 32768)
    assert LayoutSpec(10, 2, 128, limit=RowLimit(1, 64)).rows == 20
