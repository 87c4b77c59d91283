"""The router product against its NumPy twin, and how it is planned."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_core import Unsupported
from moe_core.base import dtypes
from moe_core.base.arrays import ArraySpec
from moe_core.base.target import Target
from moe_core.ops.router import reference
from moe_core.ops.router.forward import plan_router
from moe_core.parity.tolerance import assert_close, matmul_tolerance, router_tolerance
from moe_core.plan.steps import Constant, KernelLaunch, LaunchPlan
from moe_core.specs.routing import LogitsSpec
from tests.support import strategies
from tests.support.harness import H200, engine_target, run_plan, spec_of


def run_router(x: np.ndarray, weight: np.ndarray, bias: np.ndarray | None, spec: LogitsSpec) -> np.ndarray:
    plan = plan_router(spec_of(x), spec_of(weight), spec_of(bias), spec, engine_target())
    arrays = {"x": x, "weight": weight, "bias": bias}
    return run_plan(plan, {name: array for name, array in arrays.items() if array is not None})["logits"]


def draw_weight(rng: np.random.Generator, d: int, num_experts: int, layout: str, dtype: str) -> np.ndarray:
    return strategies.draw_array(rng, (d, num_experts) if layout == "in_out" else (num_experts, d), dtype)


def only_launch(plan: LaunchPlan) -> KernelLaunch:
    (launch,) = plan.steps
    assert isinstance(launch, KernelLaunch)
    return launch


def constants(launch: KernelLaunch) -> dict[str, object]:
    return {name: value.value for name, value in launch.arguments if isinstance(value, Constant)}


@given(
    num_tokens=st.sampled_from([0, 1, 5, 130]),
    d=strategies.widths(),
    num_experts=st.sampled_from([1, 6, 16, 60, 384]),
    x_dtype=strategies.matmul_dtypes(),
    weight_dtype=strategies.matmul_dtypes(),
    bias_dtype=st.sampled_from([None, *dtypes.MATMUL_DTYPES]),
    layout=strategies.weight_layouts(),
    logits_dtype=strategies.matmul_dtypes(),
    seed=strategies.seeds(),
)
def test_matches_the_reference(
    num_tokens, d, num_experts, x_dtype, weight_dtype, bias_dtype, layout, logits_dtype, seed
) -> None:
    rng = np.random.default_rng(seed)
    x = strategies.draw_array(rng, (num_tokens, d), x_dtype)
    weight = draw_weight(rng, d, num_experts, layout, weight_dtype)
    bias = None if bias_dtype is None else strategies.draw_array(rng, (num_experts,), bias_dtype)
    spec = LogitsSpec(layout, logits_dtype)
    logits = run_router(x, weight, bias, spec)
    # 16-bit products run on tensor cores, whose fp32 sums are truncated; the others are IEEE.
    in_dtype = x_dtype if x_dtype == weight_dtype else "float32"
    tolerance = matmul_tolerance(in_dtype, logits_dtype, d)
    assert_close(logits, reference.router(x, weight, bias, spec=spec), tolerance, "logits")


@pytest.mark.parametrize(("layout", "dtype"), [("in_out", "float32"), ("out_in", "float16")])
def test_tf32_only_when_asked_for(layout: str, dtype: str) -> None:
    rng = np.random.default_rng(0)
    x = strategies.draw_array(rng, (40, 128))
    weight = draw_weight(rng, 128, 24, layout, dtype)
    expected = reference.router(x, weight, spec=LogitsSpec(layout))
    exact = run_router(x, weight, None, LogitsSpec(layout))
    assert_close(exact, expected, router_tolerance(128), "IEEE logits")
    tf32 = run_router(x, weight, None, LogitsSpec(layout, allow_tf32=True))
    assert_close(tf32, expected, matmul_tolerance("float32", "float32", 128, allow_tf32=True), "TF32 logits")
    assert (tf32 != exact).any()


@pytest.mark.parametrize("layout", ["in_out", "out_in"])
def test_rows_of_x_may_be_strided(layout: str) -> None:
    """Only the first 1040 of 1056 columns, more than one block of every engine, belong to x; the others hold poison."""
    rng, spec = np.random.default_rng(0), LogitsSpec(layout)
    x, weight = strategies.draw_array(rng, (9, 1040)), draw_weight(rng, 1040, 8, layout, "float32")
    plan = plan_router(ArraySpec((9, 1040), "float32", (1056, 1)), spec_of(weight), None, spec, engine_target())
    logits = run_plan(plan, {"x": x, "weight": weight})["logits"]
    assert_close(logits, reference.router(x, weight, spec=spec), router_tolerance(1040), "logits")


def test_nan_stays_in_its_token_and_expert() -> None:
    rng = np.random.default_rng(0)
    x, weight = strategies.draw_array(rng, (33, 48)), strategies.draw_array(rng, (48, 17))
    x[4, 7], weight[3, 16] = np.nan, np.nan
    expected = np.zeros((33, 17), bool)
    expected[4], expected[:, 16] = True, True
    assert (np.isnan(run_router(x, weight, None, LogitsSpec())) == expected).all()


def test_reference_engine_is_the_twin() -> None:
    rng = np.random.default_rng(0)
    arrays = {"x": strategies.draw_array(rng, (5, 16), "bfloat16"), "weight": strategies.draw_array(rng, (16, 4))}
    plan = plan_router(spec_of(arrays["x"]), spec_of(arrays["weight"]), None, LogitsSpec(), Target("reference"))
    assert (run_plan(plan, arrays)["logits"] == reference.router(**arrays, spec=LogitsSpec())).all()


@pytest.mark.parametrize("num_experts", [8, 128, 256])
def test_few_tokens_are_spread_along_the_experts(num_experts: int) -> None:
    weight = ArraySpec((2048, num_experts), "bfloat16")
    launch = only_launch(plan_router(ArraySpec((1, 2048), "bfloat16"), weight, None, LogitsSpec(), H200))
    assert launch.grid == (1, -(-num_experts // 16), 1)


@pytest.mark.parametrize("dtype", dtypes.MATMUL_DTYPES)
@pytest.mark.parametrize("num_tokens", [1024, 2048, 4096, 16384, 65536])
def test_many_tokens_fill_the_device(num_tokens: int, dtype: str) -> None:
    weight = ArraySpec((2048, 128), dtype)
    launch = only_launch(plan_router(ArraySpec((num_tokens, 2048), dtype), weight, None, LogitsSpec(), H200))
    assert launch.grid[0] * launch.grid[1] >= 0.75 * H200.num_sms


def test_the_number_of_tokens_is_no_constant() -> None:
    weight = ArraySpec((2048, 128), "bfloat16")
    plans = [plan_router(ArraySpec((tokens, 2048), "bfloat16"), weight, None, LogitsSpec(), H200) for tokens in (3, 7)]
    assert constants(only_launch(plans[0])) == constants(only_launch(plans[1]))
    assert plans[0].summation == plans[1].summation != ()


def test_no_tokens_launch_nothing() -> None:
    plan = plan_router(ArraySpec((0, 64), "float32"), ArraySpec((64, 8), "float32"), None, LogitsSpec(), H200)
    assert plan.steps == ()


def test_sizes_beyond_int32_are_refused() -> None:
    weight = ArraySpec((1, 8), "bfloat16")
    # The last tile of 128 rows must end before 2**31.
    assert plan_router(ArraySpec((2**31 - 128, 1), "bfloat16"), weight, None, LogitsSpec(), H200).steps
    with pytest.raises(Unsupported, match="numbers tokens and weights in int32"):
        plan_router(ArraySpec((2**31 - 127, 1), "bfloat16"), weight, None, LogitsSpec(), H200)
