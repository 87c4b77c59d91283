"""Which launches begin before the one ahead has ended, and that nothing else changes."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moe_core.base import codec, dtypes
from moe_core.base.arrays import ArraySpec
from moe_core.base.target import Target
from moe_core.errors import InvalidInput
from moe_core.ops.matmul.portable.plan import MATMUL_OGS
from moe_core.ops.matmul.sm90.plan import SM90_MATMUL_OGS
from moe_core.ops.moe import forward as moe
from moe_core.ops.moe import pdl
from moe_core.plan.builder import PlanBuilder
from moe_core.plan.steps import Constant, KernelLaunch, LaunchPlan
from moe_core.specs.tuning import Tuning
from tests.support.compile_gate.cover import unrecorded_faults
from tests.support.compile_gate.pdl_order import adapted_plan, layer_plan, order_violation, quantized_plan
from tests.support.faults import pdl as faults
from tests.support.harness import engine_target, run_plan

H200, B200, A100 = Target("cuda", 90, 132), Target("cuda", 100, 148), Target("cuda", 80, 108)


def launches(plan: LaunchPlan) -> list[KernelLaunch]:
    assert all(isinstance(step, KernelLaunch) for step in plan.steps)
    return [step for step in plan.steps if isinstance(step, KernelLaunch)]


def constant(step: KernelLaunch, name: str) -> object:
    """The value of a constant; `absent` where the kernel has none of the name."""
    value = dict(step.arguments).get(name, Constant("absent"))
    assert isinstance(value, Constant)
    return value.value


def described(plan: LaunchPlan) -> list[tuple[str, bool, object]]:
    return [(step.kernel.function, step.dependent, constant(step, "PDL")) for step in launches(plan)]


FEW = [
    ("route_and_layout", False, "start"),
    ("matmul_ogs", True, "start"),
    ("matmul_ogs", True, "layout"),
    ("reduce", True, "layout"),
]


@pytest.fixture(autouse=True)
def stages_apart(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every stage is a launch of its own, as it is where there are reasons against sharing."""
    monkeypatch.setattr(moe, "why_not_fused", lambda *_, **__: "the tests want launches that overlap")
    moe.plan_moe.cache_clear()
    yield
    moe.plan_moe.cache_clear()


@pytest.mark.parametrize("target", [H200, B200])
@pytest.mark.parametrize("tokens", [1, 4, 16, 64])
def test_few_tokens_overlap(tokens: int, target: Target) -> None:
    """Every launch but the first; what looks at its layout before it waits is no neighbour of what writes it."""
    plan = layer_plan(target, tokens)
    assert described(plan) == FEW
    assert plan.notes[-1].startswith(
        f"3 of 4 launches begin before the one ahead has ended, as {tokens} tokens are few"
    )
    assert [" stages, dependent; " in line for line in plan.explain().splitlines() if "  step " in line] == [
        False, True, True, True,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("target", "tokens", "tuning", "reason"),
    [
        (H200, 65, None, "overlapping gains nothing above 64 tokens, got 65"),
        (A100, 1, None, "dependent launches need a cuda device of sm_90 or newer, got cuda sm_80"),
        (H200, 1, Tuning(batch_invariant=True), "batch_invariant runs the same kernels for every number of tokens"),
    ],
)
def test_other_plans_launch_ordinarily(target: Target, tokens: int, tuning: Tuning | None, reason: str) -> None:
    plan = layer_plan(target, tokens, tuning=tuning)
    assert {(dependent, value) for _, dependent, value in described(plan)} <= {(False, None), (False, "absent")}
    assert f"note    launches follow one another: {reason}" in plan.explain()


def test_cpu_plans_say_nothing_of_it() -> None:
    interpreted = layer_plan(Target("interpreter"), 4)
    assert {(dependent, value) for _, dependent, value in described(interpreted)} <= {(False, None), (False, "absent")}
    for plan in (interpreted, layer_plan(Target("reference"), 4)):
        assert not [note for note in plan.notes if "launches" in note and "one ahead" in note]


def test_no_tokens_have_one_launch() -> None:
    """Of the same kernel as few."""
    assert described(layer_plan(H200, 0)) == FEW[:1]


def test_launches_between_the_layout_and_its_readers() -> None:
    """A neighbour of the layout waits first; one launch later the layout lies there."""
    assert described(layer_plan(H200, 4, routed="ids")) == [("layout_at_once", False, "start"), *FEW[1:]]
    weighted = described(layer_plan(H200, 4, 1, on_input=True))
    assert weighted == [
        FEW[0], ("scale_rows", True, "start"), ("matmul_ogs", True, "layout"), *FEW[2:],
    ]  # fmt: skip
    shared = described(layer_plan(H200, 4, shared=True))
    assert shared == [*FEW[:3], ("matmul_ogs", True, "layout"), ("matmul_ogs", True, "layout"), FEW[3]]


@pytest.mark.parametrize("target", [H200, B200])
def test_quantised_stages_overlap(target: Target) -> None:
    """Rows are quantised between the layout and product 1, which has its layout before it waits.

    Product 1 finds the largest magnitude of its result, from which one scale of all follows."""
    product = ("matmul_quantized", True, "layout")
    groups = ("quantize_groups", True, "start")
    assert described(quantized_plan(target, 4)) == [FEW[0], groups, product, groups, product, FEW[3]]
    whole = ("quantize_whole_rows", True, "start")
    found = [("partial_maxima", True, "start"), whole]
    assert described(quantized_plan(target, 4, "fp8_tensor")) == [FEW[0], *found, product, whole, product, FEW[3]]
    given = described(quantized_plan(target, 4, "fp8_tensor", static=True))
    assert given == [FEW[0], whole, product, whole, product, FEW[3]]
    decoded = described(quantized_plan(target, 4, "int4_w4a16_zp"))
    assert decoded == [FEW[0], ("matmul_quantized", True, "start"), product, FEW[3]]
    assert not any(step.dependent for step in launches(quantized_plan(target, 65)))


def test_quantised_stages_that_know_nothing_of_it_launch_ordinarily() -> None:
    """Many rows per expert: columns are put in order by a launch of their own, and fp8 takes the sm90 family."""
    order, product = ("order_columns", False, "absent"), ("matmul_quantized", True, "layout")
    decoded = described(quantized_plan(H200, 64, "int4_w4a16_zp", 2))
    assert decoded == [FEW[0], order, product, order, product, FEW[3]]
    codes = described(quantized_plan(H200, 64, "fp8_block", 2))
    assert [name for name, dependent, _ in codes if not dependent] == [FEW[0][0], "matmul_fp8", "matmul_fp8"]


def test_kernels_that_take_whole_multiprocessors_overlap_for_any_number_of_tokens() -> None:
    """Few experts have many rows each, which the sm90 family multiplies, if 64 divides the reduction."""
    plan = layer_plan(H200, 64, 4, 4, width=96)
    assert described(plan) == FEW
    assert [step.kernel for step in launches(plan)][1:3] == [SM90_MATMUL_OGS, MATMUL_OGS]
    plan = layer_plan(H200, 4096, 4, 4, width=8192)
    starts = [(name, name != "route", "start") for name in ("route", "place_blocks", "order_rows", *2 * ["matmul_ogs"])]
    assert described(plan) == [*starts, FEW[3]]


def test_large_experts_launch_ordinarily() -> None:
    """Of D = 192 in bf16 these have 3 * 192 * F numbers."""
    width = pdl.MOST_EXPERT_BYTES // (2 * 3 * 192) // 64 * 64
    assert described(layer_plan(H200, 4, width=width)) == FEW
    plan = layer_plan(H200, 4, width=width + 64)
    assert not any(step.dependent for step in launches(plan))
    reason = f"overlapping gains nothing where an expert has more than 16000000 bytes, got {6 * 192 * (width + 64)}"
    assert f"note    launches follow one another: {reason}" in plan.explain()


def test_sums_do_not_wait_for_the_rows_of_their_tails() -> None:
    """Of large experts, too, and with many tokens these launches alone overlap."""
    shrunk, product = ("shrink", True, "start"), ("matmul_ogs", True, "tail")
    ahead = [("route", False, "start"), ("layout_at_once", True, "start")]
    width = pdl.MOST_EXPERT_BYTES // (2 * 3 * 192) // 64 * 64 + 64
    for plan in (adapted_plan(H200, 4), adapted_plan(H200, 4, width=width)):
        assert described(plan) == [*ahead, *2 * [shrunk, product], FEW[3]]
    plan, apart = adapted_plan(H200, 65), ("shrink", False, "start")
    ordinary = [(name, False, None) for name, *_ in ahead], ("reduce", False, None)
    assert described(plan) == [*ordinary[0], *2 * [apart, product], ordinary[1]]
    assert "note    launches follow one another but for products with adapters" in plan.explain()
    invariant = described(adapted_plan(H200, 4, tuning=Tuning(batch_invariant=True)))
    assert not any(dependent for _, dependent, _ in invariant)


@pytest.fixture
def ordinary_plan(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., LaunchPlan]]:
    """The plan that a function makes, its launches one after another."""

    def plan(make: Callable[..., LaunchPlan], *arguments: Any, **options: Any) -> LaunchPlan:
        with monkeypatch.context() as context:
            context.setattr(moe, "use_pdl", lambda plan, *_, **__: plan)
            moe.plan_moe.cache_clear()
            return make(*arguments, **options)

    yield plan
    moe.plan_moe.cache_clear()


def test_only_flags_differ_from_the_ordinary_plan(ordinary_plan: Callable[..., LaunchPlan]) -> None:
    """Same kernels, grids, buffers and sums under another key, which exported plans keep."""
    plan = layer_plan(H200, 4, shared=True)
    ordinary = ordinary_plan(layer_plan, H200, 4, shared=True)
    flags = {"PDL": Constant(None)}
    steps = tuple(
        dataclasses.replace(
            step, dependent=False, arguments=tuple((name, flags.get(name, value)) for name, value in step.arguments)
        )
        for step in launches(plan)
    )
    assert dataclasses.replace(plan, steps=steps, notes=ordinary.notes) == ordinary
    assert plan.key != ordinary.key
    restored = codec.loads(codec.dumps(plan))
    assert (restored, restored.key) == (plan, plan.key) and described(restored) == described(plan)


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"shared": True}, {"routed": "ids"}], ids=str)
@pytest.mark.parametrize("tokens", [1, 16, 64])
def test_overlapping_changes_no_bit(
    tokens: int, options: dict[str, Any], ordinary_plan: Callable[..., LaunchPlan]
) -> None:
    require_equal_bits(ordinary_plan, layer_plan, tokens, top_k=4, num_experts=32, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("scheme", ["fp8_block", "fp8_tensor", "int4_w4a16_zp"])
@pytest.mark.parametrize("tokens", [1, 16, 64])
def test_overlapping_changes_no_bit_of_quantised_stages(
    tokens: int, scheme: str, ordinary_plan: Callable[..., LaunchPlan]
) -> None:
    require_equal_bits(ordinary_plan, quantized_plan, tokens, scheme=scheme, num_experts=32)


@pytest.mark.gpu
@pytest.mark.parametrize("width", [128, 16384])
@pytest.mark.parametrize("tokens", [1, 16, 64])
def test_tails_change_no_bit(tokens: int, width: int, ordinary_plan: Callable[..., LaunchPlan]) -> None:
    require_equal_bits(ordinary_plan, adapted_plan, tokens, top_k=4, num_experts=32, width=width)


def require_equal_bits(
    ordinary_plan: Callable[..., LaunchPlan], make: Callable[..., LaunchPlan], tokens: int, **options: Any
) -> None:
    """Many runs in a row on other numbers, scratch and outputs poisoned before each."""
    target, random = engine_target(), np.random.default_rng(tokens)
    ordinary = ordinary_plan(make, target, tokens, **options)
    moe.plan_moe.cache_clear()
    plan = make(target, tokens, **options)
    assert any(step.dependent for step in launches(plan)) == (target.arch >= 90)
    for _ in range(20):
        arrays = {buffer.name: drawn(buffer.spec, random, tokens) for buffer in plan.inputs}
        if "adapter_ids" in arrays:
            arrays["adapter_ids"] = random.integers(-1, 2, tokens, np.int32)
            arrays["lora.ranks"] = random.integers(0, 17, arrays["lora.scale"].shape, np.int32)
        found, expected = run_plan(plan, arrays), run_plan(ordinary, arrays)
        for name, value in expected.items():
            assert found[name].tobytes() == value.tobytes(), name


def drawn(spec: ArraySpec, random: np.random.Generator, tokens: int) -> np.ndarray:
    """Random ids (int32), codes (uint8), or numbers."""
    if spec.dtype == "int32":
        return np.argsort(random.random((tokens, 32)), axis=1)[:, :4].astype(np.int32)
    if spec.dtype == "uint8":
        return random.integers(0, 256, spec.shape, np.uint8)
    return random.standard_normal(spec.shape, np.float32).astype(dtypes.numpy_dtype(spec.dtype))


def test_a_plan_cannot_begin_with_a_dependent_launch() -> None:
    plan = layer_plan(H200, 4)
    with pytest.raises(AssertionError, match="first launch must not be dependent"):
        dataclasses.replace(plan, steps=plan.steps[1:])


def test_inlined_plans_keep_their_dependent_launches() -> None:
    inner = layer_plan(H200, 4)
    outer = PlanBuilder("outer", H200)
    for buffer in inner.inputs:
        outer.input(buffer.name, buffer.spec)
    outer.call(inner, "inner", {buffer.name: buffer.name for buffer in inner.inputs})
    assert described(outer.build()) == FEW


WAIT, ALLOW = "griddepcontrol.wait;\n", "griddepcontrol.launch_dependents;\n"
BOTH = WAIT + ALLOW
LOOK, LOAD, STORE = "ld.global.cg.b32 {%r1};\n", "ld.global.b32 {%r1};\n", "st.global.b32 [%rd1];\n"


@pytest.mark.parametrize(
    ("step", "ptx", "violation"),
    [
        (1, WAIT + ALLOW + LOAD + STORE, ""),
        (1, LOOK + WAIT + ALLOW + STORE, "ld.global.cg.b32 before the wait"),
        (2, LOOK + BOTH + BOTH, ""),
        (2, LOOK + BOTH, "a block without an expert that never waits"),
        (1, LOAD + STORE, "never waits"),
        (1, ALLOW + WAIT + STORE, "allowed before this one has waited"),
        (1, WAIT + STORE, "behind another one never"),
        (2, LOOK + BOTH + LOAD + BOTH, ""),
        (2, LOAD + BOTH + BOTH, "ld.global.b32 before the wait"),
        (2, LOOK + STORE + BOTH + BOTH, "st.global.b32 before the wait"),
        (2, LOOK + "cp.async.cg.shared.global [%r1];\n" + BOTH + BOTH, "cp.async.cg.shared.global before the wait"),
        (3, LOOK + WAIT + LOAD + STORE, ""),
        (3, LOOK + WAIT + ALLOW + STORE, "behind the plan's last kernel"),
    ],
)  # fmt: skip
def test_orders_are_judged(step: int, ptx: str, violation: str) -> None:
    found = order_violation(launches(layer_plan(H200, 4))[step], ptx)
    assert (violation in found) if violation else found == ""


def test_ordinary_launches_must_not_wait_nor_dependent_ones_forget_to() -> None:
    ordinary = launches(layer_plan(H200, 65))[-1]
    assert order_violation(ordinary, LOAD + STORE) == ""
    assert "ordinary launch" in order_violation(ordinary, WAIT + LOAD)
    assert "never waits" in order_violation(dataclasses.replace(ordinary, dependent=True), LOAD)


@pytest.mark.skipif("MOEBIUS_GATE" not in os.environ, reason="make gate compiles copies with planted faults")
def test_faults_of_the_order_are_found(tmp_path: Path) -> None:
    planted = faults.FAULTS if os.environ["MOEBIUS_GATE"] == "all" else unrecorded_faults(faults)
    faults.assert_faults_show(tmp_path, planted)


@pytest.mark.parametrize("at_addresses", [True, False])
@pytest.mark.parametrize("tokens", [4, 4096])
def test_a_plan_in_two_parts(tokens: int, at_addresses: bool) -> None:
    """Launches behind product 1 wait for none ahead; blocks that stay are as many as they are allowed."""
    whole = layer_plan(H200, tokens, routed="ids")
    slots = whole.spec("routing.ids").size
    results_at = ArraySpec((slots,), "int64") if at_addresses else None
    found = layer_plan(H200, tokens, routed="ids", results_at=results_at, multiprocessors=(60, 40))
    apart = moe.launches_behind_hidden(results_at)
    assert apart == 2 - at_addresses
    assert [step.dependent for step in launches(found)[-apart:]] == [False] * apart
    names = [step.kernel.function for step in launches(found)]
    assert names[-apart:] == ["matmul_ogs", "reduce"][:apart] and names[-apart - 1] == "matmul_ogs"
    if tokens == 4096:
        assert [step.grid[0] for step in launches(found) if step.kernel.function == "matmul_ogs"] == [60, 40]
        assert [step.grid[0] for step in launches(whole) if step.kernel.function == "matmul_ogs"] == [71, 71]


def test_wrong_multiprocessors() -> None:
    with pytest.raises(InvalidInput, match="multiprocessors must be an integer of at least 1, got 0"):
        layer_plan(H200, 4, routed="ids", multiprocessors=(0, 4))
    with pytest.raises(InvalidInput, match="save must be False with multiprocessors"):
        layer_plan(H200, 4, routed="ids", save=True, multiprocessors=(4, 4))
