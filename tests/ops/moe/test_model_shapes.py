"""What whole forwards of real models cost before anything runs: launches and scratch."""

from __future__ import annotations

import pytest

from moe_core.base.arrays import ArraySpec
from moe_core.base.target import Target
from moe_core.ops.matmul.sm90.plan import SM90_MATMUL_OGS, SM90_TALL_MATMUL_OGS
from moe_core.ops.moe.forward import plan_moe
from moe_core.plan.steps import KernelLaunch, LaunchPlan
from moe_core.specs import Activation, MoESpec, RouterSpec
from moe_core.specs.operands import ExpertWeights, RouterLogits

#: d_model, d_ff, experts, top_k.
SHAPES = {
    "gptoss120b": (2880, 2880, 128, 4), "gptoss20b": (2880, 2880, 32, 4), "qwen3": (2048, 768, 128, 8),
    "mixtral": (4096, 14336, 8, 2), "dsv3": (7168, 2048, 256, 8),
}  # fmt: skip
ALLOWANCE = 2 * 10**6


def forward(name: str, tokens: int) -> LaunchPlan:
    d, f, experts, top_k = SHAPES[name]
    weights = ExpertWeights(
        ArraySpec((experts, d, 2 * f), "bfloat16"),
        ArraySpec((experts, f, d), "bfloat16"),
        gate_up_bias=ArraySpec((experts, 2 * f), "float32"),
        down_bias=ArraySpec((experts, d), "float32"),
    )
    spec = MoESpec(Activation("silu"), RouterSpec(top_k))
    logits = RouterLogits(ArraySpec((tokens, experts), "float32"))
    return plan_moe(ArraySpec((tokens, d), "bfloat16"), weights, logits, spec, Target("cuda", 90, 132))


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("tokens", [1, 16, 64, 256, 1024, 4096, 16384])
def test_scratch_is_activations_results_and_two_megabytes(name: str, tokens: int) -> None:
    d, f, _, top_k = SHAPES[name]
    assert forward(name, tokens).scratch_bytes <= tokens * top_k * (f + d) * 2 + ALLOWANCE


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize(("tokens", "launches"), [(1, 2), (16, 2), (64, 2), (256, 3), (16384, 5)])
def test_launches_of_a_forward_from_logits(name: str, tokens: int, launches: int) -> None:
    if (name, tokens) in (("mixtral", 256), ("gptoss20b", 256)):
        launches = 5  # 64 and 32 rows per expert: blocks so high that their products are launches of their own.
    if tokens == 64 and SHAPES[name][3] == 8:
        launches = 3  # 512 slots: routed by many blocks, placed by a second launch.
    if tokens == 16384 and name in ("mixtral", "gptoss120b", "gptoss20b"):
        launches = 6  # Rows of x are written in order.
    steps = forward(name, tokens).steps
    assert len(steps) == launches and all(isinstance(step, KernelLaunch) for step in steps)


def test_tables_leave_other_heights_to_the_heuristics() -> None:
    """160 rows per expert, in the bucket of 256 of Mixtral's product 1: product 2 has no entry there."""
    kernels = [step.kernel for step in forward("mixtral", 640).steps if isinstance(step, KernelLaunch)]
    assert [kernel for kernel in kernels if kernel.function == "matmul_ogs"] == [SM90_TALL_MATMUL_OGS] * 2


@pytest.mark.parametrize("name", SHAPES)
def test_many_rows_per_expert_take_the_sm90_family(name: str) -> None:
    """Mixtral's product 1 in its tall blocks, which were measured for it."""
    kernels = [step.kernel for step in forward(name, 16384).steps if isinstance(step, KernelLaunch)]
    products = [kernel for kernel in kernels if kernel.function == "matmul_ogs"]
    first = SM90_TALL_MATMUL_OGS if name == "mixtral" else SM90_MATMUL_OGS
    assert products == [first, SM90_MATMUL_OGS]
    few = [step.kernel for step in forward(name, 1).steps if isinstance(step, KernelLaunch)]
    assert few and not [kernel for kernel in few if kernel.name.startswith("matmul.sm90.")]
