"""What the tests of layers share in any framework: small layers of every preset, random weights, plain twins."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from hypothesis import strategies as st

from moe_core.base.arrays import WEIGHT_LAYOUTS
from moe_core.checkpoint.presets import layer_spec_from_config
from moe_core.layers import HUGGING_FACE, ExpertsSpec, LayerWeights, MoELayerSpec, Parameter, SharedExpertsSpec, Storage
from moe_core.parity.tolerance import Tolerance, assert_close, stage_tolerances
from moe_core.specs.matmul import GATE_LAYOUTS, Activation
from tests.support.strategies import activations, draw_array, router_specs, seeds

D, F, E, K, S = 48, 32, 8, 3, 16
_COMMON = {"hidden_size": D, "num_hidden_layers": 2, "num_experts_per_tok": K, "hidden_act": "silu"}
_DEEPSEEK = {
    "moe_intermediate_size": F, "n_routed_experts": E, "n_shared_experts": 2, "n_group": 4, "topk_group": 2,
    "norm_topk_prob": True, "routed_scaling_factor": 2.5, "first_k_dense_replace": 1,
}  # fmt: skip
_QWEN = {"moe_intermediate_size": F, "num_experts": E, "norm_topk_prob": True}
_QWEN_SHARED = _QWEN | {"norm_topk_prob": False, "shared_expert_intermediate_size": S}
_MIXTRAL = {"intermediate_size": F, "num_local_experts": E}
#: name -> settings of a small config.json, as a user writes them; some families in several variants.
CONFIGS: dict[str, dict[str, Any]] = {
    "mixtral": {"model_type": "mixtral"} | _MIXTRAL,
    "minimax": {"model_type": "minimax"} | _MIXTRAL,
    "granitemoe": {"model_type": "granitemoe"} | _MIXTRAL,
    "qwen3_moe": {"model_type": "qwen3_moe"} | _QWEN,
    "qwen2_moe": {"model_type": "qwen2_moe"} | _QWEN_SHARED,
    "qwen3_next": {"model_type": "qwen3_next"} | _QWEN_SHARED | {"norm_topk_prob": True},
    "olmoe": {"model_type": "olmoe", "intermediate_size": F, "num_experts": E, "norm_topk_prob": False},
    "gpt_oss": {"model_type": "gpt_oss", "swiglu_limit": 0.75, "swiglu_alpha": 1.5} | _MIXTRAL,
    "deepseek_v3": {"model_type": "deepseek_v3"} | _DEEPSEEK,
    "deepseek_v2": {"model_type": "deepseek_v2"}
    | _DEEPSEEK
    | {"topk_method": "group_limited_greedy", "norm_topk_prob": False},
    "deepseek_v2_greedy": {"model_type": "deepseek_v2"}
    | _DEEPSEEK
    | {"topk_method": "greedy", "norm_topk_prob": False, "n_group": None, "topk_group": None},
    "glm4_moe": {"model_type": "glm4_moe"} | _DEEPSEEK | {"n_group": 1, "topk_group": 1},
    "dots1": {"model_type": "dots1"} | _DEEPSEEK | {"hidden_act": "gelu"},
    "llama4_text": {"model_type": "llama4_text", "num_experts_per_tok": 1} | _MIXTRAL,
}
CONFIGS = {name: _COMMON | settings for name, settings in CONFIGS.items()}
SPECS = {name: layer_spec_from_config(settings) for name, settings in CONFIGS.items()}
#: Every storage of a gated layer.
STORAGES = tuple(
    Storage(weight, gate, router) for weight in WEIGHT_LAYOUTS for gate in GATE_LAYOUTS for router in WEIGHT_LAYOUTS
)
#: Every optional part at once.
EVERYTHING = MoELayerSpec(
    d_model=D, d_ff=F, num_experts=E, top_k=K, experts=ExpertsSpec(Activation("swiglu_oai"), bias=True),
    shared_experts=SharedExpertsSpec(S, gate=True), router_bias=True, correction_bias=True,
)  # fmt: skip


def draw_weights(
    spec: MoELayerSpec, seed: int = 0, dtype: str = "float32", storage: Storage = HUGGING_FACE
) -> LayerWeights:
    """Random weights of a size that makes every part count, stored as `storage` where the spec states nothing."""
    random = np.random.default_rng(seed)

    def draw(parameter: Parameter) -> np.ndarray:
        if parameter.role == "weight":
            rms = (4.0 if parameter.name == "router.weight" else 1.0) * parameter.fan_in**-0.5
            return draw_array(random, parameter.shape, dtype, rms)
        return draw_array(random, parameter.shape, "float32" if parameter.role == "buffer" else dtype, 0.3)

    arrays = {parameter.name: draw(parameter) for parameter in spec.parameters(storage)}
    return LayerWeights.from_named(arrays, spec, storage)


def draw_x(shape: tuple[int, ...], seed: int = 0, dtype: str = "float32", d_model: int = D) -> np.ndarray:
    """Tokens `[*shape, d_model]` of rms 1."""
    return draw_array(np.random.default_rng([seed, 1]), (*shape, d_model), dtype)


def masked_rows(d_model: int) -> tuple[np.ndarray, np.ndarray]:
    """(x `[2, 7, d_model]`, a mask bool `[2, 7]` that leaves one token out)."""
    x = np.random.default_rng(2).standard_normal((2, 7, d_model)).astype(np.float32)
    mask = np.ones((2, 7), bool)
    mask[1, 3] = False
    return x, mask


def tolerances(spec: MoELayerSpec, dtype: str) -> dict[str, Tolerance]:
    """The tolerance of every stage of a forward from x."""
    return stage_tolerances(
        spec.moe_spec(HUGGING_FACE),
        dtype,
        d_model=spec.d_model,
        d_ff=max(spec.d_ff, spec.shared_experts.d_ff if spec.shared_experts else 0),
        top_k=spec.top_k,
        num_experts=spec.num_experts,
    )


def assert_same_where_ids_agree(
    found: tuple[np.ndarray, np.ndarray], expected: tuple[np.ndarray, np.ndarray], tolerance: Tolerance
) -> None:
    """(ids, output) of two forwards: a near tie may go either way, in few tokens; the rows of all others agree.

    Errors are measured against numbers of at least 1, the size of the activations: rows may be near zero.
    """
    same = (found[0] == expected[0]).all(axis=1)
    assert same.size == 0 or same.mean() >= 0.75, f"{(~same).sum()} of {same.size} tokens visit other experts"
    rows = expected[1][same]
    assert_close(found[1][same], rows, tolerance, "output", scale=np.maximum(np.abs(rows), 1.0))


def drop_slots(ids: np.ndarray, capacity: int) -> np.ndarray:
    """ids with -1 for every slot past the first `capacity` of its expert, one slot after the other."""
    kept, used = ids.copy().reshape(-1), dict[int, int]()
    for slot, expert in enumerate(kept.tolist()):
        if expert >= 0:
            used[expert] = used.get(expert, 0) + 1
            kept[slot] = expert if used[expert] <= capacity else -1
    return kept.reshape(ids.shape)


@st.composite
def layer_specs(draw: st.DrawFn) -> MoELayerSpec:
    """Any layer: routing, activation, biases, storage and shared experts; sizes around tile edges."""
    num_experts = draw(st.sampled_from((1, 2, 4, 6, 9, 12)))
    correction_bias = draw(st.booleans())
    router = draw(router_specs(num_experts, correction_bias))
    activation: Activation = draw(activations())
    experts = ExpertsSpec(
        activation, bias=draw(st.booleans()), weight_layout=draw(st.sampled_from((None, *WEIGHT_LAYOUTS)))
    )
    others = (None, Activation("silu", activation.gated), Activation("relu2", activation.gated))
    shared = st.builds(SharedExpertsSpec, st.sampled_from((1, 8, 17)), st.booleans(), st.sampled_from(others))
    return MoELayerSpec(
        d_model=draw(st.sampled_from((16, 17, 33))),
        d_ff=draw(st.sampled_from((1, 16, 17))),
        num_experts=num_experts,
        top_k=router.require_top_k(),
        router=dataclasses.replace(router, top_k=None),
        experts=experts,
        shared_experts=draw(st.one_of(st.none(), shared)),
        router_bias=draw(st.booleans()),
        correction_bias=correction_bias,
        apply_router_weight_on_input=router.top_k == 1 and draw(st.booleans()),
        logits_dtype=draw(st.sampled_from(("float32", "bfloat16"))),
    )


#: Leading axes of x: none, one, several; empty ones too.
leading_shapes = st.sampled_from(((), (1,), (7,), (0,), (2, 5), (3, 0), (2, 1, 3), (33,)))


@st.composite
def layer_cases(draw: st.DrawFn) -> tuple[MoELayerSpec, tuple[int, ...], np.ndarray | None, int]:
    """(spec, leading axes of x, token_mask of that shape or None, seed)."""
    shape, seed = draw(leading_shapes), draw(seeds())
    mask = np.random.default_rng(seed).random(shape) < 0.7 if draw(st.booleans()) else None
    return draw(layer_specs()), shape, None if mask is None else np.asarray(mask), seed
