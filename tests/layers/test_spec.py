"""Layer specs, their parameters and presets, and the router losses, without any framework."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given

from moe_core.base import codec
from moe_core.checkpoint.presets import layer_spec_from_config
from moe_core.errors import InvalidInput, Unsupported
from moe_core.layers import HUGGING_FACE, MAXTEXT, ExpertsSpec, MoELayerSpec, SharedExpertsSpec, Storage
from moe_core.ops.routing.reference import layout, route
from moe_core.ops.routing.reference_backward import router_losses
from moe_core.parity.tolerance import Tolerance, assert_close
from moe_core.specs import Activation, LayoutSpec, MoESpec, RouterSpec
from tests.support.layers import CONFIGS, EVERYTHING, SPECS, D, E, F, K, S, layer_specs
from tests.support.strategies import RouterCase, router_cases


def shapes(spec: MoELayerSpec, default: Storage) -> dict[str, tuple[int, ...]]:
    return {parameter.name: parameter.shape for parameter in spec.parameters(default)}


def test_parameters_in_hugging_face_storage() -> None:
    assert shapes(EVERYTHING, HUGGING_FACE) == {
        "router.weight": (E, D),
        "router.bias": (E,),
        "router.correction_bias": (E,),
        "experts.gate_up": (E, 2 * F, D),
        "experts.down": (E, D, F),
        "experts.gate_up_bias": (E, 2 * F),
        "experts.down_bias": (E, D),
        "shared_experts.gate_up": (2 * S, D),
        "shared_experts.down": (D, S),
        "shared_experts.gate": (1, D),
    }


def test_parameters_in_maxtext_storage() -> None:
    assert shapes(EVERYTHING, MAXTEXT) == {
        "router.weight": (D, E),
        "router.bias": (E,),
        "router.correction_bias": (E,),
        "experts.gate_up": (E, D, F),
        "experts.up": (E, D, F),
        "experts.down": (E, F, D),
        "experts.gate_up_bias": (E, F),
        "experts.up_bias": (E, F),
        "experts.down_bias": (E, D),
        "shared_experts.gate_up": (D, S),
        "shared_experts.up": (D, S),
        "shared_experts.down": (S, D),
        "shared_experts.gate": (D, 1),
    }


def test_parameters_of_an_ungated_layer() -> None:
    spec = MoELayerSpec(D, F, E, K, experts=ExpertsSpec(Activation("relu2", gated=False)))
    assert shapes(spec, MAXTEXT) == {"router.weight": (D, E), "experts.gate_up": (E, D, F), "experts.down": (E, F, D)}


def test_every_axis_and_fan_in_is_what_it_says() -> None:
    sizes = {"experts": {E}, "d_model": {D}, "d_ff": {F, 2 * F, S, 2 * S}, None: {1}}
    for default in (HUGGING_FACE, MAXTEXT):
        for parameter in EVERYTHING.parameters(default):
            assert len(parameter.axes) == len(parameter.shape), parameter
            for axis, size in zip(parameter.axes, parameter.shape, strict=True):
                assert size in sizes[axis], parameter
            inside = {"down": F, "shared_experts.down": S}.get(parameter.name.removeprefix("experts."), D)
            assert parameter.fan_in == (inside if parameter.role == "weight" else 0), parameter


def test_stated_layouts_win_over_the_default() -> None:
    spec = MoELayerSpec(D, F, E, K, experts=ExpertsSpec(weight_layout="in_out", gate_layout="interleaved"))
    assert spec.storage(HUGGING_FACE) == Storage("in_out", "interleaved", "out_in")
    assert shapes(spec, HUGGING_FACE)["experts.gate_up"] == (E, D, 2 * F)
    moe_spec = spec.moe_spec(HUGGING_FACE)
    assert (moe_spec.weight_layout, moe_spec.activation.gate_layout) == ("in_out", "interleaved")
    assert spec.stored_as(MAXTEXT) == MoELayerSpec(
        D, F, E, K, experts=ExpertsSpec(weight_layout="in_out", gate_layout="separate")
    )


def test_a_gate_layout_may_be_stated_in_the_activation() -> None:
    stated = ExpertsSpec(Activation("silu", gate_layout="interleaved"))
    assert stated == ExpertsSpec(gate_layout="interleaved")
    assert ExpertsSpec(Activation("silu", gate_layout="interleaved"), gate_layout="interleaved") == stated
    assert ExpertsSpec().gate_layout is None
    with pytest.raises(InvalidInput, match="gate_layout must be the activation's 'interleaved', got 'separate'"):
        ExpertsSpec(Activation("silu", gate_layout="interleaved"), gate_layout="separate")


def test_top_k_is_filled_in() -> None:
    assert MoELayerSpec(D, F, E, K).router == RouterSpec(K)
    assert MoELayerSpec(D, F, E, K, RouterSpec(K)) == MoELayerSpec(D, F, E, K)
    with pytest.raises(InvalidInput, match=r"router.top_k must be the layer's top_k = 3, got 2; leave it out"):
        MoELayerSpec(D, F, E, 3, RouterSpec(2))


def test_ops_refuse_a_top_k_left_to_the_layer() -> None:
    with pytest.raises(InvalidInput, match="top_k must be an integer of at least 1, got None"):
        MoESpec(Activation("silu"), RouterSpec())
    with pytest.raises(InvalidInput, match="top_k must be an integer of at least 1, got None"):
        route(np.zeros((2, 4), np.float32), spec=RouterSpec())


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "zero size": ({"d_ff": 0}, "d_ff must be an integer of at least 1, got 0"),
    "top_k above E": ({"top_k": E + 1}, f"top_k must be at most num_experts = {E}"),
    "router": ({"router": "softmax"}, "router must be a RouterSpec, got str"),
    "experts": ({"experts": Activation("silu")}, "experts must be an ExpertsSpec, got Activation"),
    "shared": ({"shared_experts": 16}, "shared_experts must be a SharedExpertsSpec or None, got int"),
    "flag": ({"router_bias": 1}, "router_bias must be True or False, got 1"),
    "groups": ({"router": RouterSpec(num_groups=3)}, f"num_groups must divide num_experts = {E}"),
    "input weight": ({"apply_router_weight_on_input": True}, "top_k must be 1 with apply_router_weight_on_input"),
    "capacity": ({"capacity_factor": 0.0}, "capacity_factor must be a finite number of at least 0.001 or None"),
    "infinite": ({"capacity_factor": math.inf}, "capacity_factor must be a finite number"),
    "boolean": ({"capacity_factor": True}, "capacity_factor must be a finite number"),
    "logits": ({"logits_dtype": "int32"}, "logits_dtype must be one of"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_specs_say_what_is_wrong(name: str) -> None:
    changes, message = WRONG[name]
    arguments: dict[str, Any] = {"d_model": D, "d_ff": F, "num_experts": E, "top_k": K} | changes
    with pytest.raises(InvalidInput, match=message):
        MoELayerSpec(**arguments)


def test_wrong_parts_say_what_is_wrong() -> None:
    with pytest.raises(InvalidInput, match=r"shared_experts.d_ff must be an integer of at least 1"):
        SharedExpertsSpec(0)
    with pytest.raises(InvalidInput, match=r"shared_experts.activation must state no gate_layout, got 'separate'"):
        SharedExpertsSpec(S, activation=Activation("silu", gate_layout="separate"))
    with pytest.raises(InvalidInput, match=r"shared_activation must be gated and laid out as activation is"):
        MoELayerSpec(D, F, E, K, shared_experts=SharedExpertsSpec(S, activation=Activation("silu", gated=False)))
    with pytest.raises(InvalidInput, match="gate_layout must be None for an ungated activation"):
        ExpertsSpec(Activation("relu2", gated=False), gate_layout="halves")
    for layouts, name in ((("rows", "halves", "in_out"), "weight"), (("in_out", "halves", "rows"), "router_weight")):
        with pytest.raises(InvalidInput, match=f"^{name}_layout must be one of in_out, out_in"):
            Storage(*layouts)


@pytest.mark.parametrize(
    ("factor", "num_tokens", "expected"),
    [(1.0, 8, 3), (1.1, 80, 33), (1.25, 10, 5), (0.001, 1, 1), (1.0, 0, 0), (100.0, 8, 300)],
)
def test_capacity(factor: float, num_tokens: int, expected: int) -> None:
    """ceil(factor * T * K / E) without binary rounding: 1.1 * 80 * 3 / 8 is 33 exactly."""
    assert MoELayerSpec(D, F, 8, 3, capacity_factor=factor).capacity(num_tokens) == expected
    assert MoELayerSpec(D, F, 8, 3).capacity(num_tokens) == num_tokens * 3


@given(layer_specs())
def test_specs_survive_the_codec(spec: MoELayerSpec) -> None:
    assert codec.loads(codec.dumps(spec)) == spec


def test_an_activation_of_the_shared_experts_own() -> None:
    """It follows the experts' gate layout, and the experts' own is stated in one way."""
    experts, other = ExpertsSpec(Activation("silu", limit=7.0)), Activation("silu")
    spec = MoELayerSpec(D, F, E, K, experts=experts, shared_experts=SharedExpertsSpec(S, activation=other))
    for storage in (HUGGING_FACE, MAXTEXT):
        found = spec.moe_spec(storage)
        assert found.shared_activation == Activation("silu", gate_layout=storage.gate_layout)
        assert found.of_shared().activation == found.shared_activation and found.activation.limit == 7.0
    same = SharedExpertsSpec(S, activation=experts.activation)
    plain = MoELayerSpec(D, F, E, K, experts=experts, shared_experts=SharedExpertsSpec(S))
    assert MoELayerSpec(D, F, E, K, experts=experts, shared_experts=same) == plain != spec


def test_preset_of_deepseek_v3() -> None:
    assert SPECS["deepseek_v3"] == MoELayerSpec(
        D,
        F,
        E,
        K,
        RouterSpec(scoring="sigmoid", renormalize=True, scale=2.5, num_groups=4, topk_group=2),
        shared_experts=SharedExpertsSpec(2 * F),
        correction_bias=True,
    )


def test_preset_of_gpt_oss() -> None:
    assert SPECS["gpt_oss"] == MoELayerSpec(
        D,
        F,
        E,
        K,
        RouterSpec(order="topk_then_softmax"),
        ExpertsSpec(Activation("swiglu_oai", alpha=1.5, limit=0.75), bias=True),
        router_bias=True,
    )


def test_presets_from_files_and_objects(tmp_path: Any) -> None:
    settings = CONFIGS["qwen2_moe"]
    path = tmp_path / "config.json"
    path.write_text(json.dumps(settings))

    class Config:
        def to_dict(self) -> dict[str, Any]:
            return settings

    nested = {"model_type": "seen_and_heard", "text_config": settings}
    for config in (path, str(path), tmp_path, Config(), nested):
        assert layer_spec_from_config(config) == SPECS["qwen2_moe"]


@pytest.mark.parametrize(
    ("config", "error", "message"),
    [
        ({"model_type": "bert"}, Unsupported, "model_type of config must be one of the .* got 'bert'"),
        ({}, Unsupported, "model_type of config must be one of"),
        (3, InvalidInput, "config must be a dict, a config object with to_dict or a path, got int"),
        (type("Config", (), {"to_dict": lambda self: {}}), InvalidInput, "config must be a dict, .* got type; pass"),
        ("nowhere/config.json", InvalidInput, "config must be a config.json or a directory with one"),
        ({"model_type": "mixtral"}, InvalidInput, "config.json must give num_hidden_layers"),
        (CONFIGS["llama4_text"] | {"num_experts_per_tok": 2}, InvalidInput, "top_k must be 1 with apply_router_weight"),
        (CONFIGS["deepseek_v2"] | {"topk_method": "noaux_tc"}, Unsupported, "topk_method must be 'greedy' or"),
        (CONFIGS["deepseek_v2"] | {"norm_topk_prob": True}, Unsupported, "norm_topk_prob in config.json must be False"),
    ],
)
def test_presets_refuse(config: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        layer_spec_from_config(config)


def plain_losses(logits: np.ndarray, ids: np.ndarray, scoring: str, num_experts: int) -> tuple[float, float]:
    """Both losses in float64, one token after the other; masked tokens left out by the caller."""
    count, counts, shares, z = len(logits), np.zeros(num_experts), np.zeros(num_experts), 0.0
    for row, chosen in zip(logits.astype(np.float64), ids, strict=True):
        scores = {
            "softmax": np.exp(row - row.max()),
            "sigmoid": 1 / (1 + np.exp(-row)),
            "sqrt_softplus": np.sqrt(np.logaddexp(0, row)),
        }[scoring]
        shares += scores / scores.sum() / count
        np.add.at(counts, chosen, 1)
        z += np.logaddexp.reduce(row) ** 2 / count
    return float(num_experts * (counts / max(count * ids.shape[1], 1) * shares).sum()), float(z)


@given(router_cases(kinds=("normal", "ties", "spread")))
def test_router_losses_against_a_plain_sum(case: RouterCase) -> None:
    logits, bias, mask = case.arrays()
    ids, _ = route(logits, bias, mask, spec=case.spec)
    counts = layout(ids, layout=LayoutSpec(case.num_tokens, case.spec.require_top_k(), case.num_experts))[0]
    found = router_losses(logits, counts, mask, spec=case.spec)
    keep = np.ones(len(logits), bool) if mask is None else mask
    expected = plain_losses(logits[keep], ids[keep], case.spec.scoring, case.num_experts)
    # Sums of fp32 numbers over tokens and experts: a few hundred terms.
    for name, one, other in zip(("balance", "z"), found, expected, strict=True):
        assert_close(np.array(one), np.array(other), Tolerance(1e-5, 1e-5), name)


def test_a_balanced_router_has_loss_one() -> None:
    logits = np.tile(np.float32(2.0), (8, 4))
    balance, z = router_losses(logits, np.array([4, 4, 4, 4]), spec=RouterSpec(2))
    assert balance == 1.0
    assert_close(np.array(z), np.array((2 + math.log(4)) ** 2), Tolerance(1e-6, 1e-6), "z")


def test_masked_tokens_and_empty_batches_have_no_say() -> None:
    logits = np.array([[1.0, 2.0], [np.nan, np.inf]], np.float32)
    mask, counts = np.array([True, False]), np.array([0, 1])
    assert router_losses(logits, counts, mask, spec=RouterSpec(1)) == router_losses(
        logits[:1], counts, spec=RouterSpec(1)
    )
    assert router_losses(logits, np.zeros(2, int), np.zeros(2, bool), spec=RouterSpec(1)) == (0, 0)
    assert router_losses(logits[:0], np.zeros(2, int), spec=RouterSpec(1)) == (0, 0)


def test_equal_specs_hash_alike() -> None:
    changed = dataclasses.replace(EVERYTHING, capacity_factor=2)
    assert hash(changed) == hash(dataclasses.replace(EVERYTHING, capacity_factor=2.0)) != hash(EVERYTHING)
