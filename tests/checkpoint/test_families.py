"""The outside judge of every family: tiny models that transformers built, saved and reads back.

Each family's model is saved as it is published and under transformers' own names. Both are read, and the layer is
compared with transformers' block: ids equal, outputs within rounding. What we write, transformers must read back bit by
bit, and its files must be those that transformers writes itself.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moe_core.checkpoint import MoELayer, convert_checkpoint, open_checkpoint, other_tensors, save_checkpoint
from moe_core.checkpoint.presets import layer_spec_from_config
from moe_core.errors import InvalidInput, Unsupported
from moe_core.formats import format_named
from moe_core.layers import HUGGING_FACE, LayerWeights, OutputSpec, convert_weights
from moe_core.parity.tolerance import assert_close
from moe_core.specs import NormSpec
from moe_core.specs.operands import RouterWeights
from tests.support.layers import tolerances

torch = pytest.importorskip("torch", reason="the judge needs torch")
transformers = pytest.importorskip("transformers", reason="the judge needs transformers")

from safetensors.numpy import load_file

from tests.support.families import ROWS, VARIANTS, row_named, tiny
from tests.support.families.judge import (
    assert_same_layer,
    assert_same_state,
    block_of,
    hidden_states,
    judge,
    saved,
    tensors_of,
    weights_of,
)
from tests.support.torch import running_on, to_numpy
from tools.sweep import models


@pytest.fixture(scope="module", autouse=True)
def _quiet() -> Iterator[None]:
    """No advice about rope settings and no progress bars in the test log."""
    log = transformers.utils.logging
    verbosity = log.get_verbosity()
    log.set_verbosity_error()
    log.disable_progress_bar()
    yield
    log.set_verbosity(verbosity)
    log.enable_progress_bar()


@pytest.mark.parametrize("row", ROWS)
def test_family(tmp_path: Path, row: str) -> None:
    family, changes = row_named(row)
    model = tiny(family, **changes)
    published = saved(model, tmp_path / "published")
    fused = saved(model, tmp_path / "fused", published=False)
    settings = json.loads((tmp_path / "published" / "config.json").read_text())
    spec = layer_spec_from_config(model.config)
    assert spec == layer_spec_from_config(settings) == layer_spec_from_config(tmp_path / "published")
    assert published.moe_layers == fused.moe_layers and len(published.moe_layers) == len(models.moe_blocks(model)) > 0
    for number in published.architecture.tables:
        assert_same_layer(published.layer(number), judge(model, number, hidden_states()), f"{row} with a table")

    number = published.moe_layers[-1]
    verdict, layer = judge(model, number, hidden_states()), published.layer(number)
    assert_same_layer(layer, verdict, row)
    assert LayerWeights.from_checkpoint(layer).layer_spec() == spec.stored_as(
        LayerWeights.from_checkpoint(layer).storage
    )
    one, other = (LayerWeights.from_checkpoint(checkpoint.layer(number)).named() for checkpoint in (published, fused))
    assert {name: array.tobytes() for name, array in one.items()} == {k: v.tobytes() for k, v in other.items()}

    for storage, source in ((None, published), ("fused", fused)):
        path = tmp_path / f"written_{storage}"
        written = save_checkpoint(
            path, settings, weights_of(source), storage=storage, other_tensors=other_tensors(source)
        )
        assert written.moe_layers == source.moe_layers
        assert tensors_of(path) == tensors_of(source.path)
        assert_same_state(model, path)


@pytest.mark.parametrize("row", ROWS)
def test_torch_layer_agrees(tmp_path: Path, row: str) -> None:
    from moe_torch import MoE

    family, changes = row_named(row)
    model = tiny(family, **changes)
    checkpoint = saved(model, tmp_path)
    number = checkpoint.moe_layers[-1]
    weights = LayerWeights.from_checkpoint(checkpoint.layer(number))
    with running_on("reference") as device:
        layer = MoE.from_spec(layer_spec_from_config(model.config), dtype=torch.float32, device=device)
        layer.load_weights(weights)
        output = to_numpy(layer.requires_grad_(False)(hidden_states().to(device)))
    allowed = tolerances(layer.spec, "float32")["output"]
    assert_close(output, judge(model, number, hidden_states()).output, allowed, f"{row} output")


@pytest.mark.parametrize(
    "row",
    [
        *("aria", "axk1", "cohere2_moe", "ernie4_5_moe", "hy_v4", "jetmoe", "minimax_m3_vl", "muse_spark"),
        "nemotron_h_latent",
    ],
)
def test_flax_layer_agrees(tmp_path: Path, row: str) -> None:
    """One family for each part that the others lack: transposed shared experts, softmax with a correction bias, halves
    of swiglu_oai, ungated experts, shared experts with an activation of their own, and what is around experts."""
    nnx = pytest.importorskip("moe_jax.nnx", reason="the JAX front-end needs jax and flax")
    from tests.support import jax as jax_support

    family, changes = row_named(row)
    model = tiny(family, **changes)
    checkpoint = saved(model, tmp_path)
    number = checkpoint.moe_layers[-1]
    with jax_support.running_on("reference"):
        layer = nnx.MoE.from_weights(LayerWeights.from_checkpoint(checkpoint.layer(number)))
        output = jax_support.to_numpy(layer(jax_support.to_jax(to_numpy(hidden_states()))))
    allowed = tolerances(layer.spec, "float32")["output"]
    assert_close(output, judge(model, number, hidden_states()).output, allowed, f"{row} output")


@pytest.mark.parametrize(
    "row", ["aria", "dbrx", "granitemoe", "inkling2", "mistral4", "nemotron_h", "qwen3_vl_moe", "step3p7"]
)
def test_experts_of_every_layout_are_converted(tmp_path: Path, row: str) -> None:
    """`[E, D, N]` with and without `.weight`, `[E, N, D]`, ungated, rows of gate and up in turn, all experts in one
    matrix, and gate and up of all experts in a tensor each."""
    family, changes = row_named(row)
    checkpoint = saved(tiny(family, **changes), tmp_path / "plain")
    convert_checkpoint(checkpoint.path, tmp_path / "int8", format_named("int8_channel"), loader="moebius")
    number = checkpoint.moe_layers[-1]
    read = open_checkpoint(tmp_path / "int8").layer(number)
    assert read.scheme is not None
    plain, found = (
        convert_weights(LayerWeights.from_checkpoint(layer), HUGGING_FACE).named()
        for layer in (checkpoint.layer(number), read.dequantized("float32"))
    )
    for name, array in plain.items():
        # A correction bias may be zeros.
        error, allowed = np.linalg.norm(found[name] - array), 0.01 if name.startswith("experts.") else 1e-12
        assert error <= allowed * np.linalg.norm(array), (name, error)


#: Multimodal model -> settings of its parts beside the text model's.
_VISION = {"hidden_size": 16, "depth": 1, "num_heads": 2, "intermediate_size": 16, "out_hidden_size": models.D}
_VISION |= {"num_hidden_layers": 1, "num_attention_heads": 2, "vision_output_dim": 16, "projector_input_dim": 16}
_VISION |= {"projector_output_dim": 16, "image_size": 28, "patch_size": 14}
_AUDIO = {"d_model": 16, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 16, "output_dim": 16}
_AUDIO |= {"downsample_hidden_size": 8, "num_mel_bins": 16}
NESTED = {
    "aria": "AriaForConditionalGeneration",
    "glm4v_moe": "Glm4vMoeForConditionalGeneration",
    "llama4": "Llama4ForConditionalGeneration",
    "mistral_large4": "MistralLarge4ForConditionalGeneration",
    "minimax_m3_vl": "MiniMaxM3SparseForConditionalGeneration",
    "qwen3_5_moe": "Qwen3_5MoeForConditionalGeneration",
    "qwen3_omni_moe": "Qwen3OmniMoeThinkerForConditionalGeneration",
    "step3p7": "Step3p7ForConditionalGeneration",
    "qwen3_vl_moe": "Qwen3VLMoeForConditionalGeneration",
}


@pytest.mark.parametrize("family", NESTED)
def test_multimodal_models_nest_the_text_model(tmp_path: Path, family: str) -> None:
    text = tiny(family, **VARIANTS.get(family, ("", {}))[1])
    made = getattr(transformers, NESTED[family])
    kind = made.config_class.sub_configs["vision_config"]
    known = set(vars(kind())) if kind is not transformers.AutoConfig else {*_VISION, "model_type"}
    vision = {name: value for name, value in _VISION.items() if name in known}
    parts = {"text_config": text.config.to_dict(), "vision_config": vision}
    if "audio_config" in made.config_class.sub_configs:
        parts["audio_config"] = _AUDIO
    model = made(made.config_class(**parts)).float().eval()
    state = text.state_dict()
    with torch.no_grad():
        for name, parameter in [*model.named_parameters(), *model.named_buffers()]:
            ours = [key for key in state if "layers." in key and name.endswith(key[key.index("layers.") :])]
            if ours and "vision" not in name and "audio" not in name:
                parameter.copy_(state[ours[0]])
    checkpoint = saved(model, tmp_path / "published")
    assert checkpoint.nested
    number = checkpoint.moe_layers[-1]
    assert_same_layer(checkpoint.layer(number), judge(text, number, hidden_states()), family)
    for storage in (None, "fused"):
        path = tmp_path / f"written_{storage}"
        others = other_tensors(saved(model, tmp_path / "fused", published=False) if storage else checkpoint)
        save_checkpoint(path, model.config, weights_of(checkpoint), storage=storage, other_tensors=others)
        assert_same_state(model, path)


LIMITS = {"swiglu_limits": [0, 0.3, None], "swiglu_limits_shared": [0.0, 0.6, 0.4]}


def step_with_limits() -> Any:
    """Three layers: without limits, with two, and with one of the shared experts."""
    return tiny("step3p7", num_hidden_layers=3, mlp_layer_types=["sparse"] * 3, layer_types=None, **LIMITS)


def test_limits_of_every_layer(tmp_path: Path) -> None:
    from moe_torch import MoE

    model = step_with_limits()
    checkpoint, x = saved(model, tmp_path / "read"), hidden_states()
    assert checkpoint.moe_layers == (0, 1, 2)
    for number, limits in enumerate([(None, None), (0.3, 0.6), (None, 0.4)]):
        verdict = judge(model, number, x)
        assert_same_layer(checkpoint.layer(number), verdict, f"layer {number}")
        spec = layer_spec_from_config(model.config, number)
        assert spec.shared_experts is not None
        shared = spec.shared_experts.activation or spec.experts.activation
        assert (spec.experts.activation.limit, shared.limit) == limits
        with running_on("reference") as device, torch.no_grad():
            layer = MoE.from_block(block_of(model, number)[0], model.config)
            output = to_numpy(layer.to(device)(x.to(device)))
        assert_close(output, verdict.output, tolerances(layer.spec, "float32")["output"], f"block {number}")
        if any(limits):
            with pytest.raises(AssertionError):
                plain = dataclasses.replace(checkpoint.layer(number), spec=checkpoint.layer(0).spec)
                assert_same_layer(plain, verdict, f"layer {number} without limits")
    others = other_tensors(checkpoint)
    save_checkpoint(tmp_path / "written", model.config, weights_of(checkpoint), other_tensors=others)
    assert_same_state(model, tmp_path / "written")
    swapped = [(number, weights_of(checkpoint)[2 - number][1]) for number in range(3)]
    with pytest.raises(InvalidInput, match=r"weights of layer 0 must have shared_experts = "):
        save_checkpoint(tmp_path / "swapped", model.config, swapped, other_tensors=others)


def test_layers_that_differ_have_no_spec_in_common() -> None:
    from moe_torch import MoE

    model = step_with_limits()
    with pytest.raises(InvalidInput, match=r"layer must be given .*\[1, 2\] have other activations than layer 0"):
        layer_spec_from_config(model.config)
    with pytest.raises(InvalidInput, match=r"layer must be one with experts .* got 3; the model's are \[0, 1, 2\]"):
        layer_spec_from_config(model.config, 3)
    block, settings = block_of(model, 1)[0], model.config.to_dict()
    with pytest.raises(InvalidInput, match=r"block must clamp as a layer of its config"):
        MoE.from_block(block, settings | {"swiglu_limits": [0, 0.2, 0]})
    with pytest.raises(InvalidInput, match=r"swiglu_limits in config.json must be a list of numbers of at least 0"):
        layer_spec_from_config(settings | {"swiglu_limits": [0, -1.0, 0]})
    with pytest.raises(Unsupported, match=r"hidden_act in config.json must be 'silu' for step3p5, got 'gelu'"):
        layer_spec_from_config(settings | {"hidden_act": "gelu"})


def test_either_orientation_of_qwen3_vl(tmp_path: Path) -> None:
    """Published files hold `[E, D, 2F]` and `[E, F, D]`; transformers writes the transposes under the same names."""
    from safetensors.numpy import save_file

    model = tiny("qwen3_vl_moe")
    own = saved(model, tmp_path / "own")
    tensors = load_file(own.path / "model.safetensors")
    turned = {name: array.swapaxes(1, 2).copy() if array.ndim == 3 else array for name, array in tensors.items()}
    path = tmp_path / "published"
    path.mkdir()
    save_file(turned, path / "model.safetensors")
    (path / "config.json").write_text((own.path / "config.json").read_text())
    for one, other in zip(weights_of(own), weights_of(open_checkpoint(path)), strict=True):
        for name, array in one[1].named().items():
            np.testing.assert_array_equal(other[1].named()[name], array, err_msg=name)


def _router(**changes: Any) -> Any:
    def change(layer: MoELayer) -> MoELayer:
        assert layer.spec.router is not None
        router = dataclasses.replace(layer.spec.router, **changes)
        return dataclasses.replace(layer, spec=dataclasses.replace(layer.spec, router=router))

    return change


def _part(bundle: str, **changes: Any) -> Any:
    def change(layer: MoELayer) -> MoELayer:
        return dataclasses.replace(layer, **{bundle: dataclasses.replace(getattr(layer, bundle), **changes)})

    return change


def _weight_on_output(layer: MoELayer) -> MoELayer:
    return dataclasses.replace(layer, spec=dataclasses.replace(layer.spec, apply_router_weight_on_input=False))


def _activation(**changes: Any) -> Any:
    def change(layer: MoELayer) -> MoELayer:
        activation = dataclasses.replace(layer.spec.activation, **changes)
        return dataclasses.replace(layer, spec=dataclasses.replace(layer.spec, activation=activation))

    return change


def _changed(name: str, function: Any, *arguments: Any) -> Any:
    def change(layer: MoELayer) -> MoELayer:
        return _part("experts", **{name: function(getattr(layer.experts, name), *arguments)})(layer)

    return change


def _shared_as_experts(layer: MoELayer) -> MoELayer:
    return dataclasses.replace(layer, spec=dataclasses.replace(layer.spec, shared_activation=None))


def _output(**changes: Any) -> Any:
    def change(layer: MoELayer) -> MoELayer:
        assert layer.output is not None and isinstance(layer.output.spec, OutputSpec)
        spec = dataclasses.replace(layer.output.spec, **changes)
        return dataclasses.replace(layer, output=dataclasses.replace(layer.output, spec=spec))

    return change


FAULTS = [
    ("phimoe", "softmax over all", lambda layer: dataclasses.replace(layer, router=RouterWeights(layer.router.weight))),
    ("axk1", "norm with another epsilon", _output(norm=NormSpec(1.0))),
    ("cohere2_moe", "the sum", lambda layer: dataclasses.replace(layer, output=None)),
    ("jetmoe", "bias lost", lambda layer: dataclasses.replace(layer, output=None)),
    ("muse_spark", "weight behind the norm", _output(norm=NormSpec(1e-8, centred=True))),
    ("aria", "softmax over all", _router(order="softmax_then_topk")),
    ("beam", "scale lost", _router(scale=1.0)),
    ("cohere2_moe_sigmoid", "not renormalised", _router(renormalize=False)),
    ("deepseek_v2_groups", "groups ignored", _router(num_groups=1, topk_group=1)),
    ("deepseek_v4", "clamps lost", _activation(limit=None)),
    ("hy_v4", "shared experts clamped too", _shared_as_experts),
    ("gemma4", "scales of experts lost", _part("router", expert_scale=None)),
    ("diffusion_gemma", "norm of the router lost", _part("router", norm=None, spec=None)),
    ("ernie4_5_moe", "correction bias lost", _part("router", correction_bias=None)),
    ("mistral4_groups", "groups by their best", _router(group_score=None)),
    ("kolibri1", "bias on the scores", _router(bias_on="scores")),
    ("laguna_capped", "cap lost", _router(softcap=None)),
    ("jamba", "renormalised", _router(renormalize=True)),
    ("llama4", "weight on the output", _weight_on_output),
    ("mixtral", "not renormalised", _router(renormalize=False)),
    ("qwen2_moe", "shared gate lost", _part("shared", gate=None)),
    ("qwen3_next", "shared experts lost", lambda layer: dataclasses.replace(layer, shared=None)),
    ("mixtral", "gate and up swapped", _changed("gate_up", np.roll, models.F, 1)),
    ("mixtral", "experts moved", _changed("down", np.roll, 1, 0)),
    ("gpt_oss_clamped", "halves", _activation(gate_layout="halves")),
    ("gpt_oss_clamped", "no limit", _activation(limit=None)),
    ("gpt_oss_clamped", "router bias lost", _part("router", bias=None)),
    ("gpt_oss_clamped", "first bias lost", _changed("gate_up_bias", np.zeros_like)),
    ("gpt_oss_clamped", "second bias lost", _changed("down_bias", np.zeros_like)),
    ("gpt_oss_clamped", "softmax over all", _router(order="softmax_then_topk")),
    ("deepseek_v3", "correction bias lost", _part("router", correction_bias=None)),
    ("deepseek_v3", "groups ignored", _router(num_groups=1, topk_group=1)),
    ("deepseek_v3", "scale lost", _router(scale=1.0)),
]


@pytest.mark.parametrize(("row", "fault", "change"), FAULTS, ids=[f"{row}-{fault}" for row, fault, _ in FAULTS])
def test_the_judge_sees_every_fault(tmp_path: Path, row: str, fault: str, change: Any) -> None:
    family, changes = row_named(row)
    model = tiny(family, **changes)
    checkpoint = saved(model, tmp_path)
    number = checkpoint.moe_layers[-1]
    verdict = judge(model, number, hidden_states())
    with pytest.raises(AssertionError):
        assert_same_layer(change(checkpoint.layer(number)), verdict, row)
