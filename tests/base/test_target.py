"""What planners ask a target, for every kind of it."""

from __future__ import annotations

import pytest

from moe_core.base.arrays import ArraySpec
from moe_core.base.target import KINDS, Target
from moe_core.errors import InvalidInput, Unsupported
from moe_core.ops.moe.forward import plan_moe
from moe_core.plan.steps import KernelLaunch
from moe_core.runtime.devices import BACKENDS, prepared_class
from moe_core.runtime.prepare import prepare
from moe_core.specs import Activation, MoESpec, RouterSpec
from moe_core.specs.operands import ExpertWeights, RouterLogits

A100, L40, H200, B200 = (Target("cuda", arch, 100) for arch in (80, 89, 90, 100))
MI300X, INTERPRETER, REFERENCE = Target("hip", 942, 304), Target("interpreter"), Target("reference")
TARGETS = (A100, L40, H200, B200, MI300X, INTERPRETER, REFERENCE)


@pytest.mark.parametrize(
    ("question", "those"),
    {
        "on_gpu": (A100, L40, H200, B200, MI300X),
        "compiled": (A100, L40, H200, B200, MI300X, INTERPRETER),
        "interpreted": (INTERPRETER,),
        "has_fp8": (L40, H200, B200),
        "is_sm90": (H200,),
        "is_sm100": (B200,),
        "has_pdl": (H200, B200),
    }.items(),
)
def test_questions(question: str, those: tuple[Target, ...]) -> None:
    assert tuple(target for target in TARGETS if getattr(target, question)) == those


def test_names() -> None:
    assert Target("cuda", 90, 1).num_sms == 1, "a GPU may have one multiprocessor"
    assert Target("interpreter", 0, 0) == INTERPRETER and repr(REFERENCE) == repr(Target("reference", 0, 0))
    assert [str(target) for target in (H200, MI300X, REFERENCE)] == [
        "cuda sm_90 (100 SMs)", "hip gfx942 (304 SMs)", "reference"
    ]  # fmt: skip
    facts = [(target.vendor, target.engine, target.device_kind, target.warp_threads) for target in TARGETS[3:]]
    assert facts == [
        ("nvidia", "gpu", "cuda", 32), ("amd", "gpu", "hip", 64), ("", "interpreter", "cpu", 32),
        ("", "reference", "cpu", 32),
    ]  # fmt: skip


@pytest.mark.parametrize("arguments", [("cuda", 75, 40), ("cuda", 90, 0), ("hip", 90, 304), ("tpu", 4, 1)])
def test_what_is_no_target(arguments: tuple[str, int, int]) -> None:
    expected = f"a {arguments[0]} target needs arch >=" if arguments[0] in KINDS else "target kind must be one of cuda"
    with pytest.raises(InvalidInput, match=expected):
        Target(*arguments)


def test_plans_for_a_gpu_without_a_driver_are_made_and_not_run() -> None:
    def bf16(*shape: int) -> ArraySpec:
        return ArraySpec(shape, "bfloat16")

    experts, spec = ExpertWeights(bf16(8, 256, 512), bf16(8, 256, 256)), MoESpec(Activation("silu"), RouterSpec(2))
    plan = plan_moe(bf16(64, 256), experts, RouterLogits(ArraySpec((64, 8), "float32")), spec, MI300X)
    assert plan.steps and all(isinstance(step, KernelLaunch) and not step.dependent for step in plan.steps)
    assert MI300X.device_kind not in BACKENDS
    with pytest.raises(Unsupported, match=r"plans for hip gfx942 .* no driver runs them; run on one of cpu, cuda"):
        prepare(plan)
    assert prepared_class(H200) is not prepared_class(REFERENCE)
