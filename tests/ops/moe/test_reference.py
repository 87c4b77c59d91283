"""The whole MoE reference against a float64 loop over tokens that rounds where the contract rounds."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_core.errors import InvalidInput
from moe_core.ops.moe.reference.forward import moe_stages
from moe_core.parity.tolerance import assert_close, stage_tolerances
from moe_core.specs import Activation, MatmulSpec, MoESpec, RouterSpec
from moe_core.specs.operands import (
    ExpertWeights,
    RouterLogits,
    RouterWeights,
    SharedExpert,
    TopK,
    map_arrays,
    named_arrays,
)
from moe_core.specs.routing import RowLimit
from tests.support import strategies
from tests.support.exact import draw_experts, exact_row, transposed
from tests.support.strategies import HARD_ROUTINGS, RoutingCase, draw_array, hard_routing, numpy_dtype

F64 = np.float64
STAGES = ["logits", "ids", "weights", "matmul1", "activation", "matmul2", "output", "tokens_per_expert", "invalid_ids"]


def cast(values: np.ndarray, dtype: str) -> np.ndarray:
    return values.astype(np.float32).astype(numpy_dtype(dtype))


class TokenLoop:
    """One MoE forward, token by token and slot by slot; weights as `in_out`."""

    def __init__(self, x: np.ndarray, experts: ExpertWeights, case: RoutingCase, spec: MoESpec) -> None:
        self.x, self.experts, self.case, self.spec = x, experts, case, spec
        self.dtype = x.dtype.name
        arrays = dict(named_arrays(experts))
        names = {"gate_up": "weight", "up": "up", "gate_up_bias": "bias", "up_bias": "up_bias"}
        self.first = {names[name]: array for name, array in arrays.items() if name in names}
        self.activate = MatmulSpec("in_out", activation=spec.activation)
        self.plain = MatmulSpec("in_out")
        d_model, d_ff = experts.down.shape[2], experts.down.shape[1]
        slots = case.num_tokens * case.top_k
        self.stages = {
            "activation": np.zeros((slots, d_ff), x.dtype),
            "matmul2": np.zeros((slots, d_model), x.dtype),
            "output": np.zeros((case.num_tokens, d_model), numpy_dtype(spec.out_dtype or self.dtype)),
            "tokens_per_expert": np.zeros(case.num_experts, np.int32),
        }

    def local(self, token: int, k: int) -> int:
        case, expert = self.case, int(self.case.ids[token, k])
        known = case.num_experts if case.expert_map is None else len(case.expert_map)
        if not 0 <= expert < known or (case.token_mask is not None and not case.token_mask[token]):
            return -1
        return expert if case.expert_map is None else int(case.expert_map[expert])

    def run(self, shared: SharedExpert | None = None) -> dict[str, np.ndarray]:
        for token in range(self.case.num_tokens):
            total = np.zeros(self.x.shape[1])
            for k in range(self.case.top_k):
                expert = self.local(token, k)
                if expert >= 0:
                    total += self._slot(token, k, expert).astype(F64)
            if shared is not None:
                total += self._shared(self.x[token], shared)
            self.stages["output"][token] = cast(total, self.stages["output"].dtype.name)
        return self.stages

    def _slot(self, token: int, k: int, expert: int) -> np.ndarray:
        slot, weight = token * self.case.top_k + k, float(self.case.weights[token, k])
        x = self.x[token]
        if self.spec.apply_router_weight_on_input:
            x, weight = cast(x.astype(F64) * weight, self.dtype), 1.0
        first = {name: array[expert] for name, array in self.first.items()}
        hidden = cast(exact_row(x, first, self.activate), self.dtype)
        second = {"weight": self.experts.down[expert], "bias": self.experts.down_bias[expert]}
        result = cast(exact_row(hidden, second, self.plain) * weight, self.dtype)
        self.stages["activation"][slot], self.stages["matmul2"][slot] = hidden, result
        self.stages["tokens_per_expert"][expert] += 1
        return result

    def _shared(self, x: np.ndarray, shared: SharedExpert) -> np.ndarray:
        first = {"weight": shared.gate_up} | ({} if shared.up is None else {"up": shared.up})
        activate = dataclasses.replace(self.activate, activation=self.spec.of_shared().activation)
        hidden = cast(exact_row(x, first, activate), self.dtype)
        result = exact_row(hidden, {"weight": shared.down}, self.plain)
        gate = 1.0 if shared.gate is None else 1 / (1 + np.exp(-(x.astype(F64) @ shared.gate.astype(F64))[0]))
        return result * gate


def check(x: np.ndarray, experts: ExpertWeights, case: RoutingCase, spec: MoESpec, shared: SharedExpert | None) -> None:
    """Compare every stage of the reference with the loop's; ids and weights are given."""
    wanted = TokenLoop(x, experts, case, spec).run(shared)
    if spec.weight_layout == "out_in":
        experts, shared = transposed(experts), None if shared is None else transposed(shared)
    routing = TopK(case.ids, case.weights)
    for bundle in (experts, routing, *([shared] if shared else [])):
        for _, array in named_arrays(bundle):
            array.flags.writeable = False
    found = moe_stages(x, experts, routing, spec, token_mask=case.token_mask, expert_map=case.expert_map, shared=shared)
    assert list(found) == STAGES[1:]
    tolerances = stage_tolerances(
        spec, x.dtype.name, d_model=x.shape[1], d_ff=wanted["activation"].shape[1], top_k=case.top_k,
        num_experts=case.num_experts, routed_from="ids",
    )  # fmt: skip
    for stage, expected in wanted.items():
        assert found[stage].dtype == expected.dtype, stage
        assert_close(found[stage], expected, tolerances[stage], stage)


@st.composite
def specs(draw: st.DrawFn, top_k: int) -> MoESpec:
    return MoESpec(
        activation=draw(strategies.activations()),
        weight_layout=draw(strategies.weight_layouts()),
        apply_router_weight_on_input=top_k == 1 and draw(st.booleans()),
        out_dtype=draw(st.one_of(st.none(), strategies.matmul_dtypes())),
    )


@given(st.data())
def test_every_stage_follows_the_contract(data: st.DataObject):
    case = data.draw(strategies.routings(max_tokens=12, max_experts=6))
    spec, dtype = data.draw(specs(case.top_k)), data.draw(strategies.matmul_dtypes())
    rng = np.random.default_rng(data.draw(strategies.seeds()))
    d_model, d_ff = data.draw(strategies.wide_widths()), data.draw(strategies.wide_widths())
    experts = draw_experts(rng, case.num_experts, d_model, d_ff, spec.activation, dtype)
    shared = None
    if data.draw(st.booleans()):
        one = draw_experts(rng, 1, d_model, d_ff + 3, spec.activation, dtype)
        gate = draw_array(rng, (d_model, 1), dtype, 0.3) if data.draw(st.booleans()) else None
        shared = SharedExpert(one.gate_up[0], one.down[0], None if one.up is None else one.up[0], gate)
        if data.draw(st.booleans()):
            other = Activation("gelu", spec.activation.gated, spec.activation.gate_layout)
            spec = dataclasses.replace(spec, shared_activation=other)
    check(draw_array(rng, (case.num_tokens, d_model), dtype), experts, case, spec, shared)


@pytest.mark.parametrize("name", HARD_ROUTINGS)
def test_hard_routings(name: str):
    rng, case = np.random.default_rng(7), hard_routing(name)
    spec = MoESpec(Activation("silu"))
    experts = draw_experts(rng, case.num_experts, 32, 17, spec.activation, "bfloat16")
    check(draw_array(rng, (case.num_tokens, 32), "bfloat16"), experts, case, spec, None)


def small_layer(dtype: str = "float32") -> tuple[np.ndarray, ExpertWeights, RouterWeights]:
    rng = np.random.default_rng(8)
    experts = draw_experts(rng, 6, 32, 48, Activation("silu"), dtype)
    weight, bias = draw_array(rng, (32, 6), dtype, 0.3), draw_array(rng, (6,), dtype)
    return draw_array(rng, (20, 32), dtype), experts, RouterWeights(weight, bias, draw_array(rng, (6,), rms=0.1))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_routing_from_x_from_logits_and_from_ids_agree_bitwise(dtype: str):
    x, experts, router = small_layer(dtype)
    spec = MoESpec(Activation("silu"), RouterSpec(2, "sigmoid", renormalize=True, scale=2.5), logits_dtype="bfloat16")
    whole = moe_stages(x, experts, router, spec)
    assert list(whole) == STAGES
    assert np.array_equal(whole["logits"], cast(whole["logits"], "bfloat16").astype(np.float32))
    from_logits = moe_stages(x, experts, RouterLogits(whole["logits"], router.correction_bias), spec)
    from_ids = moe_stages(x, experts, TopK(whole["ids"], whole["weights"]), MoESpec(Activation("silu")))
    for stages in (from_logits, from_ids):
        assert all(np.array_equal(whole[name], array) for name, array in stages.items())


def test_masked_tokens_are_left_out_everywhere():
    x, experts, router = small_layer()
    mask = np.arange(20) % 4 > 0
    x[~mask] = np.nan
    stages = moe_stages(x, experts, router, MoESpec(Activation("silu"), RouterSpec(2)), token_mask=mask)
    assert (stages["ids"][~mask] == -1).all() and not stages["output"][~mask].any()
    assert stages["tokens_per_expert"].sum() == 2 * mask.sum() and stages["invalid_ids"].tolist() == [0]
    assert np.isfinite(stages["output"]).all()


def test_slots_past_a_row_limit_have_no_row():
    x, experts, _ = small_layer()
    routing = TopK(np.stack([np.arange(20), np.arange(20) + 1], 1).astype(np.int32) % 6, np.ones((20, 2), np.float32))
    wide, narrow = (
        moe_stages(x, experts, routing, MoESpec(Activation("silu"), row_limit=RowLimit(each))) for each in (2, 1)
    )
    assert wide["invalid_ids"].tolist() == [0] and narrow["invalid_ids"].tolist() == [20]
    assert narrow["tokens_per_expert"].sum() == 20


def test_stacked_layers_separate_buffers_and_transposed_weights_change_nothing():
    x, experts, router = small_layer("bfloat16")
    spec = MoESpec(Activation("silu"), RouterSpec(2))
    plain = moe_stages(x, experts, router, spec)
    stack = map_arrays(experts, lambda array: np.stack([np.zeros_like(array), array, np.zeros_like(array)]))
    stacked = moe_stages(x, dataclasses.replace(stack, layer_index=np.array([1], np.int32)), router, spec)
    assert experts.gate_up_bias is not None
    halves = dataclasses.replace(
        experts,
        gate_up=experts.gate_up[..., :48],
        up=experts.gate_up[..., 48:],
        gate_up_bias=experts.gate_up_bias[:, :48],
        up_bias=experts.gate_up_bias[:, 48:],
    )
    separate = moe_stages(x, halves, router, MoESpec(Activation("silu", True, "separate"), RouterSpec(2)))
    turned = dataclasses.replace(spec, weight_layout="out_in", router_weight_layout="out_in")
    again = moe_stages(x, transposed(experts), transposed(router), turned)
    assert all(np.array_equal(plain[name], stacked[name]) for name in STAGES)
    # BLAS may sum these in another order.
    tolerances = stage_tolerances(spec, "bfloat16", d_model=32, d_ff=48, top_k=2, num_experts=6)
    for name in STAGES:
        assert_close(separate[name], plain[name], tolerances[name], f"separate {name}")
        assert_close(again[name], plain[name], tolerances[name], f"out_in {name}")


def test_bad_combinations_are_refused():
    x, experts, router = small_layer()
    ids, weights = np.zeros((20, 2), np.int32), np.ones((20, 2), np.float32)
    on_input = MoESpec(Activation("silu"), apply_router_weight_on_input=True)
    with pytest.raises(InvalidInput, match="top_k must be 1 with apply_router_weight_on_input, got 2; "):
        moe_stages(x, experts, TopK(ids, weights), on_input)
    with pytest.raises(InvalidInput, match="router must be a RouterSpec where ids are not given, got None; "):
        moe_stages(x, experts, router, MoESpec(Activation("silu")))
