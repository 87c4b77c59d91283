"""Hidden rows with one scale: product 1 finds the largest magnitudes, to the bits of a launch that looks for them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from moe_core.base.target import Target
from moe_core.formats import FP8_CHANNEL, FP8_TENSOR, INT8_CHANNEL, Format, Scheme, scheme_named
from moe_core.ops.matmul.quantized.plan import MATMUL_QUANTIZED, QUANTIZED
from moe_core.ops.matmul.sm90.fp8_plan import MATMUL_FP8, SM90_FP8
from moe_core.ops.moe.forward import plan_moe
from moe_core.ops.moe.options import ForwardOptions
from moe_core.ops.quantize.reference import quantize
from moe_core.ops.quantize.rows import PARTIAL_MAXIMA
from moe_core.plan.steps import Kernel, KernelLaunch, LaunchPlan
from moe_core.specs import Activation, MoESpec
from moe_core.specs.operands import TopK, named_arrays
from tests.support.harness import H200, engine_target, run_plan, spec_of
from tests.support.quantized.operands import draw_experts
from tests.support.strategies import draw_array

FP8, CHANNELS = scheme_named("fp8_tensor"), Scheme("fp8_channels", FP8_CHANNEL, FP8_TENSOR)
INT8 = Scheme("int8_one", INT8_CHANNEL, Format("int8_tensor", "int8", None, None))
SILU = Activation("silu")
HIDDEN, MAXIMA = ("quantized_hidden.values", "quantized_hidden.scales"), "hidden.maxima"
#: The token that a mask leaves out.
MASKED = 4


@dataclasses.dataclass(frozen=True)
class Layer:
    """A forward of given ids: a masked token, slots of no expert and, of more than two, an expert without rows."""

    tokens: int
    width: int
    activation: Activation
    dtype: str = "bfloat16"
    scheme: Scheme = FP8
    layout: str = "out_in"
    experts: int = 3
    d_model: int = 40
    fast: bool = False

    def arrays(self) -> dict[str, Any]:
        """x, experts, routing and token_mask."""
        rng = np.random.default_rng(self.width)
        experts = draw_experts(rng, (self.experts,), self.d_model, self.width, self.scheme, self.spec)
        ids = rng.integers(-1, max(self.experts - 1, 1), (self.tokens, 2)).astype(np.int32)
        return {
            "x": draw_array(rng, (self.tokens, self.d_model), self.dtype),
            "experts": experts,
            "routing": TopK(ids, rng.random(ids.shape, np.float32)),
            "token_mask": np.arange(self.tokens) != MASKED,
        }

    @property
    def spec(self) -> MoESpec:
        return MoESpec(
            self.activation, weight_layout=self.layout, activations=self.scheme.activations, fast_accumulate=self.fast
        )


def planned(layer: Layer, arrays: dict[str, Any], target: Target) -> LaunchPlan:
    """With the hidden rows' codes and scale, and the largest magnitudes, among the outputs."""
    x, experts, routing, mask = (spec_of(arrays[name]) for name in ("x", "experts", "routing", "token_mask"))
    plan = plan_moe(x, experts, routing, layer.spec, target, options=ForwardOptions(token_mask=mask))
    hidden = tuple(buffer for buffer in plan.scratch if buffer.name in (*HIDDEN, MAXIMA))
    rest = tuple(buffer for buffer in plan.scratch if buffer.name not in (*HIDDEN, MAXIMA))
    return dataclasses.replace(plan, outputs=(*plan.outputs, *hidden), scratch=rest)


def kernels(plan: LaunchPlan) -> list[Kernel]:
    return [step.kernel for step in plan.steps if isinstance(step, KernelLaunch)]


def run(plan: LaunchPlan, arrays: dict[str, Any]) -> dict[str, np.ndarray]:
    given = {"x": arrays["x"], "token_mask": arrays["token_mask"], **dict(named_arrays(arrays["experts"], "experts."))}
    return run_plan(plan, given | dict(named_arrays(arrays["routing"], "routing.")))


@pytest.fixture
def plan_apart(monkeypatch: pytest.MonkeyPatch) -> Callable[..., LaunchPlan]:
    """The plan with a launch that finds the largest magnitudes."""

    def plan(layer: Layer, arrays: dict[str, Any], target: Target) -> LaunchPlan:
        with monkeypatch.context() as context:
            for family in (QUANTIZED, SM90_FP8):
                context.setattr(type(family), "finds_maxima", False)
            plan_moe.cache_clear()
            found = planned(layer, arrays, target)
        plan_moe.cache_clear()
        return found

    return plan


def assert_same_bits(layer: Layer, arrays: dict[str, Any], apart: LaunchPlan, kernel: Kernel) -> np.ndarray:
    """One plan's results are the other's; the scale of the hidden rows."""
    one = planned(layer, arrays, engine_target())
    # Of a product without tiles, as of no tokens, there is no launch.
    assert kernels(one).count(kernel) == 2 * bool(layer.tokens)
    assert kernels(one).count(PARTIAL_MAXIMA) + 1 == kernels(apart).count(PARTIAL_MAXIMA)
    found, expected = run(one, arrays), run(apart, arrays)
    assert set(found) == {*expected, MAXIMA} > set(HIDDEN)
    # Memory holds -1 before.
    assert found[MAXIMA].min() >= 0
    for name, wanted in expected.items():
        assert found[name].tobytes() == wanted.tobytes(), name
    return found[HIDDEN[1]].reshape(1)


FEW = {
    "halves": Layer(9, 40, SILU),
    "interleaved": Layer(9, 72, Activation("silu", gate_layout="interleaved"), "float16"),
    "separate": Layer(9, 72, Activation("silu", gate_layout="separate"), layout="in_out", scheme=CHANNELS),
    "ungated": Layer(9, 40, Activation("relu2", False), "float32", INT8, experts=2),
    "many blocks": Layer(70, 200, SILU, experts=2, d_model=130),
}


@pytest.mark.parametrize("value", [0.0, np.nan, np.inf])
@pytest.mark.parametrize("name", FEW)
def test_the_scale_is_that_of_a_launch(name: str, value: float, plan_apart: Callable[..., LaunchPlan]) -> None:
    """Whatever a token holds that no expert gets."""
    layer, arrays = FEW[name], FEW[name].arrays()
    arrays["x"][[MASKED, *np.flatnonzero((arrays["routing"].ids < 0).all(axis=1))]] = value
    scale = assert_same_bits(layer, arrays, plan_apart(layer, arrays, engine_target()), MATMUL_QUANTIZED)
    assert 1e-4 < scale[0] < 1


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("name", FEW)
def test_one_number_that_is_not_finite_makes_the_scale_nan(
    name: str, value: float, plan_apart: Callable[..., LaunchPlan]
) -> None:
    """Of the last column, of a single expert that has rows."""
    layer, arrays = FEW[name], FEW[name].arrays()
    bias = "up_bias" if layer.activation.gate_layout == "separate" else "gate_up_bias"
    getattr(arrays["experts"], bias)[arrays["routing"].ids.max(), -1] = value
    scale = assert_same_bits(layer, arrays, plan_apart(layer, arrays, engine_target()), MATMUL_QUANTIZED)
    assert np.isnan(scale[0])


def test_a_given_scale_of_x(plan_apart: Callable[..., LaunchPlan]) -> None:
    layer, arrays = FEW["interleaved"], FEW["interleaved"].arrays()
    arrays["experts"] = dataclasses.replace(arrays["experts"], gate_up_input_scale=np.array([0.01], np.float32))
    assert_same_bits(layer, arrays, plan_apart(layer, arrays, engine_target()), MATMUL_QUANTIZED)


def beside_the_result() -> tuple[Layer, dict[str, Any]]:
    """A product whose result is small, and large in what its tiles hold behind the last column and the last row."""
    layer = Layer(5, 40, Activation("relu2", False), experts=1)
    arrays = layer.arrays()
    experts = draw_experts(np.random.default_rng(0), (1,), 40, 40, FP8, layer.spec)
    weight = quantize(np.full((1, 40, 40), 1, np.float32), FP8.weights)
    arrays["x"][...], arrays["routing"].ids[...] = 1, 0
    # Rows of no token have the bias alone, and columns behind the last one none.
    experts.gate_up_bias[...], weight.values[:, :-1] = 39, -weight.values[:, :-1]
    experts.gate_up_bias[:, -1] = -39
    return layer, arrays | {"experts": dataclasses.replace(experts, gate_up=weight)}


def test_what_lies_beside_the_result_is_not_looked_at(plan_apart: Callable[..., LaunchPlan]) -> None:
    layer, arrays = beside_the_result()
    scale = assert_same_bits(layer, arrays, plan_apart(layer, arrays, engine_target()), MATMUL_QUANTIZED)
    assert scale[0] * np.float32(448) <= 2


@pytest.mark.parametrize("tokens", [0, 9])
def test_without_rows_the_scale_is_that_of_zeros(tokens: int, plan_apart: Callable[..., LaunchPlan]) -> None:
    layer = Layer(tokens, 40, SILU)
    arrays = layer.arrays()
    arrays["routing"].ids[...], arrays["x"][...] = -1, np.nan
    scale = assert_same_bits(layer, arrays, plan_apart(layer, arrays, engine_target()), MATMUL_QUANTIZED)
    assert scale[0] == np.float32(1e-10) / np.float32(448)


def test_magnitudes_are_those_of_rounded_numbers(plan_apart: Callable[..., LaunchPlan]) -> None:
    """Which lie between two numbers of bf16 here."""
    layer, arrays = Layer(5, 40, Activation("relu2", False), experts=1), beside_the_result()[1]
    arrays["experts"].gate_up_bias[...] = 41.03
    assert_same_bits(layer, arrays, plan_apart(layer, arrays, engine_target()), MATMUL_QUANTIZED)


MANY = {
    "halves": Layer(600, 208, SILU, d_model=144),
    "halves, fast": Layer(600, 256, SILU, d_model=144, fast=True),
    "interleaved, fast": Layer(
        600, 208, Activation("silu", gate_layout="interleaved"), "float16", d_model=144, fast=True
    ),
    "separate": Layer(600, 208, Activation("silu", gate_layout="separate"), d_model=144),
    "channels": Layer(600, 256, Activation("silu", gate_layout="interleaved"), d_model=256, scheme=CHANNELS),
    "ungated": Layer(600, 208, Activation("relu2", False), d_model=144),
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", MANY)
def test_the_sm90_family_finds_the_scale_of_a_launch(name: str, plan_apart: Callable[..., LaunchPlan]) -> None:
    target = engine_target()
    if target.kind != "cuda" or not target.is_sm90:
        pytest.skip(f"the sm90 family needs sm_90, this machine has {target}")
    layer, arrays = MANY[name], MANY[name].arrays()
    arrays["x"][[MASKED, *np.flatnonzero((arrays["routing"].ids < 0).all(axis=1))]] = np.nan
    scale = assert_same_bits(layer, arrays, plan_apart(layer, arrays, target), MATMUL_FP8)
    assert 1e-4 < scale[0] < 1
    bias = "up_bias" if layer.activation.gate_layout == "separate" else "gate_up_bias"
    for value in (np.inf, np.nan):
        getattr(arrays["experts"], bias)[arrays["routing"].ids.max(), -1] = value
        assert np.isnan(assert_same_bits(layer, arrays, plan_apart(layer, arrays, target), MATMUL_FP8)[0])


@pytest.mark.parametrize(("tokens", "kernel"), [(9, MATMUL_QUANTIZED), (600, MATMUL_FP8)])
def test_which_launches_a_plan_has(tokens: int, kernel: Kernel, plan_apart: Callable[..., LaunchPlan]) -> None:
    layer = Layer(tokens, 208, SILU, d_model=144)
    arrays = layer.arrays()
    one, apart, words = planned(layer, arrays, H200), plan_apart(layer, arrays, H200), "largest magnitudes of"
    assert kernels(one).count(kernel) == 2
    assert [len(kernels(plan)) for plan in (one, apart)] == [7, 8]
    assert f"{words} what it stores are found too" in one.explain()
    assert f"{words} hidden rows are found by a launch" in apart.explain()
    scales = {name: np.ones(1, np.float32) for name in ("gate_up_input_scale", "down_input_scale")}
    given = arrays | {"experts": dataclasses.replace(arrays["experts"], **scales)}
    for plan in (planned(layer, given, H200), planned(layer, arrays, Target("reference"))):
        assert words not in plan.explain()
