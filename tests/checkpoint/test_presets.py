"""The outside judge of the presets: transformers' own MoE blocks, built from its own config classes.

Each family's block gets random weights; the layer that `layer_spec_from_config` describes gets the same, and both must
give the same output in float32. A field lost or misread in a preset changes the output.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from moe_core.checkpoint.presets import layer_spec_from_config
from moe_core.layers import LayerWeights, MoELayerSpec, Storage
from moe_core.parity.tolerance import assert_close
from moe_core.specs.operands import ExpertWeights, RouterWeights, SharedExpert
from moe_core.specs.routing import RouterSpec
from tests.support.layers import CONFIGS, SPECS, D, draw_x, tolerances

torch = pytest.importorskip("torch", reason="the judge needs torch")
transformers = pytest.importorskip("transformers", reason="the judge needs transformers")

from tests.support.torch import running_on, to_numpy, to_torch
from tests.support.torch_layers import make

#: model_type -> (config class, block class).
CLASSES = {
    "mixtral": ("MixtralConfig", "MixtralSparseMoeBlock"),
    "minimax": ("MiniMaxConfig", "MiniMaxSparseMoeBlock"),
    "granitemoe": ("GraniteMoeConfig", "GraniteMoeMoE"),
    "qwen3_moe": ("Qwen3MoeConfig", "Qwen3MoeSparseMoeBlock"),
    "qwen2_moe": ("Qwen2MoeConfig", "Qwen2MoeSparseMoeBlock"),
    "qwen3_next": ("Qwen3NextConfig", "Qwen3NextSparseMoeBlock"),
    "olmoe": ("OlmoeConfig", "OlmoeSparseMoeBlock"),
    "gpt_oss": ("GptOssConfig", "GptOssMLP"),
    "deepseek_v3": ("DeepseekV3Config", "DeepseekV3MoE"),
    "deepseek_v2": ("DeepseekV2Config", "DeepseekV2Moe"),
    "glm4_moe": ("Glm4MoeConfig", "Glm4MoeMoE"),
    "dots1": ("Dots1Config", "Dots1MoE"),
    "llama4_text": ("Llama4TextConfig", "Llama4TextMoe"),
}
#: How transformers' fused storage lies in memory, where it is not `[E, 2F, D]` halves.
STORAGES = {"gpt_oss": Storage("in_out", "interleaved", "out_in"), "llama4_text": Storage("in_out", "halves", "out_in")}


@pytest.fixture(scope="module", autouse=True)
def _quiet() -> Iterator[None]:
    """No advice about rope settings in the test log."""
    log = transformers.utils.logging
    verbosity = log.get_verbosity()
    log.set_verbosity_error()
    yield
    log.set_verbosity(verbosity)


def config_of(name: str) -> Any:
    settings = dict(CONFIGS[name])
    package = "llama4" if settings["model_type"] == "llama4_text" else settings["model_type"]
    module = importlib.import_module(f"transformers.models.{package}.configuration_{package}")
    config_class, _ = CLASSES[settings.pop("model_type")]
    return getattr(module, config_class)(**settings, num_attention_heads=2, experts_implementation="eager")


def block_of(config: Any) -> Any:
    """transformers' block with random weights of a size that makes every part count."""
    package = "llama4" if config.model_type == "llama4_text" else config.model_type
    module = importlib.import_module(f"transformers.models.{package}.modeling_{package}")
    torch.manual_seed(0)
    block = getattr(module, CLASSES[config.model_type][1])(config).eval().requires_grad_(False)
    for name, parameter in block.named_parameters():
        router = name.startswith(("gate.", "router."))
        size = 0.5 if name.endswith("bias") else (4.0 if router else 1.5) * parameter.shape[-1] ** -0.5
        parameter.normal_(std=size)
    for buffer in block.buffers():
        buffer.normal_(std=0.3)
    if config.model_type == "gpt_oss" and not hasattr(transformers.GptOssConfig(), "swiglu_limit"):
        # Older releases have these two as constants of the block, whatever the settings say.
        block.experts.alpha, block.experts.limit = config.swiglu_alpha, config.swiglu_limit
    return block


def weights_of(block: Any, spec: MoELayerSpec, storage: Storage) -> LayerWeights:
    """The block's tensors under our names, as they are."""
    router = block.router if hasattr(block, "router") else block.gate
    experts = block.experts

    def array(module: Any, name: str) -> Any:
        tensor = getattr(module, name, None)
        return None if tensor is None else to_numpy(tensor)

    bundle = ExpertWeights(
        to_numpy(experts.gate_up_proj),
        to_numpy(experts.down_proj),
        gate_up_bias=array(experts, "gate_up_proj_bias"),
        down_bias=array(experts, "down_proj_bias"),
    )
    routing = RouterWeights(to_numpy(router.weight), array(router, "bias"), array(router, "e_score_correction_bias"))
    shared = None
    module = getattr(block, "shared_experts", getattr(block, "shared_expert", None))
    if module is not None:
        parts = [to_numpy(getattr(module, f"{name}_proj").weight) for name in ("gate", "up", "down")]
        gate = array(block.shared_expert_gate, "weight") if hasattr(block, "shared_expert_gate") else None
        turn = storage.weight_layout == "in_out"
        gate_up, down = np.concatenate(parts[:2]), parts[2]
        shared = SharedExpert(gate_up.T.copy(), down.T.copy()) if turn else SharedExpert(gate_up, down, gate=gate)
    return LayerWeights(spec.stored_as(storage).moe_spec(storage), bundle, routing, shared)


def judged(name: str) -> tuple[MoELayerSpec, LayerWeights, np.ndarray, np.ndarray]:
    """(spec of the preset, the block's weights, x, what the block gives)."""
    config = config_of(name)
    block, spec = block_of(config), layer_spec_from_config(config)
    x = draw_x((2, 6))
    output = block(to_torch(x))
    output = output[0] if isinstance(output, tuple) else output
    weights = weights_of(block, spec, STORAGES.get(config.model_type, Storage("out_in", "halves", "out_in")))
    return spec, weights, x, to_numpy(output).reshape(-1, D)


def layer_output(spec: MoELayerSpec, weights: LayerWeights, x: np.ndarray) -> np.ndarray:
    moe_spec = spec.stored_as(weights.storage).moe_spec(weights.storage)
    with running_on("reference"):
        return to_numpy(make(dataclasses.replace(weights, spec=moe_spec))(to_torch(x))).reshape(-1, D)


def test_every_config_is_judged() -> None:
    assert {settings["model_type"] for settings in CONFIGS.values()} == set(CLASSES)


@pytest.mark.parametrize("name", CONFIGS)
def test_transformers_own_config_gives_the_same_layer(name: str) -> None:
    """The object with all its defaults, its dict, and the hand-written settings."""
    config = config_of(name)
    assert layer_spec_from_config(config) == layer_spec_from_config(config.to_dict()) == SPECS[name]


@pytest.mark.parametrize("name", CONFIGS)
def test_layer_agrees_with_transformers(name: str) -> None:
    spec, weights, x, expected = judged(name)
    assert_close(layer_output(spec, weights, x), expected, tolerances(spec, "float32")["output"], name)


def _router(**changes: Any) -> Any:
    return lambda spec: dataclasses.replace(spec, router=dataclasses.replace(spec.router, **changes))


FAULTS = [
    ("mixtral", "not renormalised", _router(renormalize=False)),
    ("granitemoe", "softmax over all", lambda spec: dataclasses.replace(spec, router=RouterSpec())),
    ("qwen2_moe", "renormalised", _router(renormalize=True)),
    ("deepseek_v2", "groups ignored", _router(num_groups=1, topk_group=1)),
    ("deepseek_v2_greedy", "scale lost", _router(scale=1.0)),
    ("llama4_text", "weight on the output", lambda spec: dataclasses.replace(spec, apply_router_weight_on_input=False)),
    ("glm4_moe", "softmax", _router(scoring="softmax")),
]


@pytest.mark.parametrize(("name", "fault", "change"), FAULTS, ids=[f"{name}-{fault}" for name, fault, _ in FAULTS])
def test_the_judge_sees_every_fault(name: str, fault: str, change: Any) -> None:
    spec, weights, x, expected = judged(name)
    with pytest.raises(AssertionError, match=fault):
        assert_close(layer_output(change(spec), weights, x), expected, tolerances(spec, "float32")["output"], fault)
