"""The whole backward reference against torch's autograd of a plain loop in float64."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from hypothesis import given
from hypothesis import strategies as st

from moe_core.errors import InvalidInput
from moe_core.ops.moe.reference.backward import moe_backward_stages
from moe_core.ops.moe.reference.forward import moe_stages
from moe_core.ops.routing.reference import layout as make_layout
from moe_core.parity.tolerance import Tolerance, assert_close
from moe_core.specs import Activation, LayoutSpec, MoESpec, RouterSpec
from moe_core.specs.operands import ExpertWeights, MoEOperands, OutputGradients, named_arrays
from tests.support import strategies
from tests.support.strategies import HARD_ROUTINGS, RoutingCase, hard_routing
from tests.support.training.loop import Loop, Problem, draw_problem, routed
from tests.support.training.tolerances import BF16_LOOP, FP32

#: A pre-activation rounded across a clamp loses or gains its whole gradient.
BF16_CLAMPED = Tolerance(3e-2, 1.0)
STAGES = ("d_hidden", "d_pre", "weighted_hidden", "d_slots")


def run(problem: Problem) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """(what the reference returns, ids). Rows of the kept pre-activation that belong to no slot are poisoned."""
    arguments, options = problem.arguments()
    stages = moe_stages(*arguments, **options)
    num_experts = problem.experts.down.shape[0 if problem.experts.layer_index is None else 1]
    layout = LayoutSpec(*stages["ids"].shape, num_experts)
    row_of_slot = make_layout(stages["ids"], problem.expert_map, problem.token_mask, layout=layout)[3]
    stages["matmul1"] = stages["matmul1"].copy()
    stages["matmul1"][row_of_slot < 0] = np.nan
    operands = MoEOperands(*arguments[:3], **options)
    return moe_backward_stages(problem.gradients, operands, arguments[3], stages), stages["ids"]


def check(problem: Problem, tolerance: Tolerance = FP32) -> dict[str, np.ndarray]:
    """Compare every gradient of the reference with autograd of the loop; what the reference returned."""
    found, ids = run(problem)
    wanted = Loop(problem, ids).autograd(torch.float64)
    results = {name for name in found if name.startswith(("d_x", "d_experts.", "d_routing.", "d_shared."))}
    assert results == {f"d_{name}" for name in wanted}
    for name, expected in wanted.items():
        actual = found[f"d_{name}"]
        assert actual.dtype == problem.arrays()[name].dtype and actual.shape == expected.shape, name
        rms = np.sqrt(np.square(expected).sum() / max(expected.size, 1))
        assert_close(actual, expected, tolerance, f"d_{name}", scale=rms)
    return found


TINY = RoutingCase(np.array([[0, 2], [2, 0], [-1, 2], [-1, -1]], np.int32), np.full((4, 2), 0.6, np.float32), 4)


@st.composite
def specs(draw: st.DrawFn, top_k: int) -> MoESpec:
    return MoESpec(
        activation=draw(strategies.activations()),
        weight_layout=draw(strategies.weight_layouts()),
        router_weight_layout=draw(strategies.weight_layouts()),
        apply_router_weight_on_input=top_k == 1 and draw(st.booleans()),
    )


@given(st.data())
def test_given_ids_against_autograd(data: st.DataObject) -> None:
    case = data.draw(strategies.routings(max_tokens=16))
    spec = data.draw(specs(case.top_k))
    check(draw_problem(case, spec, seed=data.draw(strategies.seeds()), with_shared=data.draw(st.booleans())))


def test_a_shared_expert_with_an_activation_of_its_own() -> None:
    spec = MoESpec(Activation("silu"), shared_activation=Activation("gelu", limit=0.75))
    check(draw_problem(hard_routing("missing_ids"), spec, with_shared=True))


@pytest.mark.parametrize("name", HARD_ROUTINGS)
@pytest.mark.parametrize("weight_layout", ["in_out", "out_in"])
def test_hard_routings(name: str, weight_layout: str) -> None:
    case = hard_routing(name)
    spec = MoESpec(Activation("swiglu_oai", limit=1.0), weight_layout=weight_layout)
    found = check(draw_problem(case, spec))
    sizes, _, _, row_of_slot, _ = make_layout(case.ids, case.expert_map, case.token_mask, layout=case.layout())
    for key, array in found.items():
        assert np.isfinite(array).all(), key
        if key.startswith("d_experts."):
            assert not array[sizes == 0].any(), f"{key} of an expert without tokens"
        if key in STAGES:
            assert not array[row_of_slot < 0].any(), f"{key} of a slot without an expert"
    absent = row_of_slot.reshape(case.ids.shape) < 0
    assert not found["d_x"][absent.all(axis=1)].any(), "d_x of a token without an expert"
    assert not found["d_routing.weights"][absent].any(), "d_weights of a slot without an expert"


@given(st.data())
def test_routers_against_autograd(data: st.DataObject) -> None:
    num_experts = data.draw(st.sampled_from((1, 2, 6, 12, 30)))
    router = data.draw(strategies.router_specs(num_experts, has_bias=True))
    num_tokens = data.draw(st.sampled_from((0, 1, 5, 9)))
    seed = data.draw(strategies.seeds())
    rng = np.random.default_rng(seed)
    masked, mapped = data.draw(st.booleans()), data.draw(st.booleans())
    local = np.arange(num_experts, dtype=np.int32)
    local[num_experts - num_experts // 2 :] = -1
    case = RoutingCase(
        np.zeros((num_tokens, router.require_top_k()), np.int32),
        np.zeros((num_tokens, router.require_top_k()), np.float32),
        num_experts - num_experts // 2 if mapped else num_experts,
        local if mapped else None,
        rng.random(num_tokens) < 0.6 if masked else None,
    )
    spec = data.draw(specs(router.require_top_k()))
    with_shared = data.draw(st.booleans())
    problem = draw_problem(case, spec, seed=seed, with_shared=with_shared, poison=False)
    problem = routed(problem, router, num_experts, seed=seed, from_logits=data.draw(st.booleans()))
    if masked:
        absent = ~case.token_mask
        given = problem.gradients
        given.weights[absent] = given.logits[absent] = np.nan
        if not with_shared:
            problem.x[absent] = given.output[absent] = np.inf
    check(problem)


@pytest.mark.parametrize("activation", [Activation("silu"), Activation("gelu", gate_layout="separate")], ids=str)
@pytest.mark.parametrize("weight_layout", ["in_out", "out_in"])
def test_one_layer_of_a_stack(activation: Activation, weight_layout: str) -> None:
    case = hard_routing("missing_ids")
    single = draw_problem(case, MoESpec(activation, weight_layout=weight_layout), with_shared=True)

    def stacked(bundle, **changes):
        arrays = {name: np.stack([np.full_like(array, np.nan), array]) for name, array in named_arrays(bundle)}
        return dataclasses.replace(bundle, **arrays | changes)

    layer = np.array([1], np.int32)
    shared = stacked(single.shared, gate=single.shared.gate)
    problem = single.replace(experts=stacked(single.experts, layer_index=layer), shared=shared)
    found, alone = check(problem), run(single)[0]
    for name in found:
        if name.startswith(("d_experts.", "d_shared.")) and name != "d_shared.gate":
            assert not found[name][0].any()
            np.testing.assert_array_equal(found[name][1], alone[name])
        else:
            np.testing.assert_array_equal(found[name], alone[name])


@pytest.mark.parametrize("activation", strategies.all_activations(), ids=str)
def test_bfloat16(activation: Activation) -> None:
    case = hard_routing("expert_map")
    problem = draw_problem(case, MoESpec(activation), d_model=48, d_ff=32, dtype="bfloat16", with_shared=True)
    clamped = activation.limit is not None and activation.name != "softcapped_silu"
    check(routed(problem, RouterSpec(3, renormalize=True), 12), BF16_CLAMPED if clamped else BF16_LOOP)


def test_six_of_384() -> None:
    case = hard_routing("many_experts")
    problem = draw_problem(case, MoESpec(Activation("silu")), poison=False)
    router = RouterSpec(6, "sigmoid", renormalize=True, scale=2.5, num_groups=8, topk_group=4)
    check(routed(problem, router, 384))


def test_output_gradients_of_another_dtype_are_rounded_once() -> None:
    case = hard_routing("top_1")
    problem = draw_problem(case, MoESpec(Activation("silu"), out_dtype="float32"), dtype="bfloat16")
    wide = problem.gradients.output.astype(np.float32) * np.float32(1.001)
    found, _ = run(problem.replace(gradients=OutputGradients(wide)))
    wanted, _ = run(problem.replace(gradients=OutputGradients(wide.astype(problem.x.dtype))))
    for name in wanted:
        np.testing.assert_array_equal(found[name], wanted[name], name)


@pytest.mark.parametrize("name", ["weights", "logits", "load_balance", "z"])
def test_gradients_of_what_was_given_are_refused(name: str) -> None:
    problem = draw_problem(TINY, MoESpec(Activation("silu")))
    given = dataclasses.replace(problem.gradients, **{name: np.float32(1)})
    with pytest.raises(InvalidInput, match=rf"gradients\.{name} must be None where ids and weights are given"):
        run(problem.replace(gradients=given))


def test_the_loop_sees_a_planted_fault() -> None:
    problem = draw_problem(hard_routing("missing_ids"), MoESpec(Activation("silu")))
    found, ids = run(problem)
    wanted = Loop(problem, ids).autograd(torch.float64)
    wrong = found["d_experts.down"].copy()
    wrong[0, 0, 0] += 0.01 * np.abs(wrong).max()
    with pytest.raises(AssertionError, match=r"d_experts\.down"):
        assert_close(wrong, wanted["experts.down"], FP32, "d_experts.down")


def test_experts_bundle_names_every_gradient() -> None:
    """A new array of a bundle must get a gradient or be named a constant."""
    known = {"gate_up", "down", "up", "gate_up_bias", "up_bias", "down_bias", "layer_index"}
    # Scales of quantised rows, which have no backward.
    known |= {"gate_up_input_scale", "down_input_scale"}
    assert {field.name for field in dataclasses.fields(ExpertWeights)} == known
