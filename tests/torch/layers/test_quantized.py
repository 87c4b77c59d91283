"""Layers whose experts are quantised: weights in and out, state, casts, checkpoints, programs."""

from __future__ import annotations

import copy
import dataclasses
import json
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors")

from safetensors.numpy import save_file

import moe_torch
from moe_core.checkpoint import open_checkpoint
from moe_core.formats import QuantizedTensor, scheme_named
from moe_core.ops.quantize import reference
from moe_core.specs.operands import map_arrays
from moe_torch import ExpertsSpec, LayerWeights, MoE, MoELayerSpec, SharedExpertsSpec
from tests.support.quantized.files import MXFP4, mxfp4_layer, quantized_config
from tests.support.quantized.layers import D_FF, D_MODEL, layer_spec, quantized_weights
from tests.support.torch import require_equal, running_on

SCHEMES = ("mxfp4_w4a16", "fp8_block", "int4_w4a16_zp")


def same_state(first: Any, second: Any) -> None:
    """Raise AssertionError unless two state dicts hold the same bits."""
    assert list(first) == list(second)
    for name, tensor in first.items():
        require_equal(tensor, second[name], name)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_weights_in_and_out(scheme: str) -> None:
    """Loaded, copied, exported, saved and cast: the quantised bits stay, and so does what is computed with them."""
    with running_on("reference"):
        weights, plain = quantized_weights(scheme, shared_experts=SharedExpertsSpec(32))
        layer: Any = MoE.from_weights(weights)
        chosen = scheme_named(scheme)
        # What quantises activations too has no gradient.
        trained = {parameter.requires_grad for parameter in layer.parameters()}
        assert layer.spec.experts.scheme == chosen and trained == {chosen.activations is None}
        assert isinstance(layer.experts.gate_up.tensor(), QuantizedTensor)
        x = torch.randn(3, 5, D_MODEL).bfloat16()
        y = layer(x)
        expected = plain(x).float()
        assert (y.float() - expected).abs().max() <= 0.3 * expected.abs().max()
        other: Any = MoE.from_spec(layer.spec, device="meta", dtype=torch.bfloat16).to_empty(device="cpu")
        other.load_weights(weights)
        require_equal(other(x), y, "load_weights")
        same_state(other.state_dict(), layer.state_dict())
        for name, array in layer.export_weights().named().items():
            assert np.array_equal(array.view(np.uint8), weights.named()[name].view(np.uint8)), name
        third = MoE.from_spec(layer.spec, dtype=torch.bfloat16)
        third.load_state_dict(layer.state_dict())
        require_equal(third(x), y, "load_state_dict")
        cast = copy.deepcopy(layer).half().double().bfloat16().type(torch.bfloat16)
        for name in ("values", "scales"):
            kept = getattr(cast.experts.down, name)
            require_equal(kept, getattr(layer.experts.down, name), f"cast {name}")
        assert cast.shared_experts is not None and cast.router.weight.dtype == torch.bfloat16


def test_fresh_layers_are_zero() -> None:
    with running_on("reference"):
        for scheme in SCHEMES:
            layer: Any = MoE.from_spec(layer_spec(scheme))
            assert not moe_torch.dequantize(layer.experts.gate_up.tensor()).any(), scheme
            require_equal(layer(torch.randn(3, D_MODEL)), torch.zeros(3, D_MODEL), scheme)


def test_explanations_name_what_is_quantised() -> None:
    with running_on("reference"):
        layer = MoE.from_weights(quantized_weights("fp8_block")[0])
        assert "experts.gate_up.scales" in layer.explain(9) and "scheme=fp8_block" in repr(layer)
        assert not layer.warmup([1, 9]).kernels


def test_a_published_checkpoint(tmp_path: Any) -> None:
    """gpt-oss computes from the file's own bytes what the dequantised layer computes, and holds no other copy."""
    config = quantized_config("gpt_oss", MXFP4, 64, 96)
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(mxfp4_layer(64, 96), tmp_path / "model.safetensors")
    read = open_checkpoint(tmp_path).layer(0)
    with running_on("reference"):
        layer: Any = MoE.from_weights(LayerWeights.from_checkpoint(read))
        plain = MoE.from_weights(LayerWeights.from_checkpoint(read.dequantized("float32")))
        x = torch.randn(5, 64).bfloat16()
        found, expected = layer(x).float(), plain.float()(x.float())
        assert (found - expected).abs().max() <= 0.03 * expected.abs().max()
        assert layer.experts.gate_up.values.dtype == torch.uint8
        same = layer.export_weights().experts.gate_up
        assert np.array_equal(same.values, read.experts.gate_up.values)


def test_errors() -> None:
    invalid, unsupported = moe_torch.InvalidInput, moe_torch.Unsupported
    with running_on("reference"):
        weights, plain = quantized_weights("mxfp4_w4a16")
        layer, x = MoE.from_weights(weights), torch.randn(4, D_MODEL).bfloat16()
        apart = dataclasses.replace(layer.spec.experts, gate_layout="interleaved")
        interleaved = MoE.from_spec(dataclasses.replace(layer.spec, experts=apart), dtype=torch.bfloat16)
        static = dataclasses.replace(weights.experts, gate_up_input_scale=np.ones(1, np.float32))
        mixed = dataclasses.replace(weights.experts, down=plain.export_weights().experts.down)
        scheme, both = scheme_named("mxfp4_w4a16"), scheme_named("mxfp4_w4a8")
        rounding = MoE.from_spec(layer_spec("mxfp4_w4a8"), dtype=torch.bfloat16)
        cases: list[tuple[type[Exception], str, Any]] = [
            (invalid, "weights must be of this layer", lambda: plain.load_weights(weights)),
            (invalid, "weights must be of this layer", lambda: layer.load_weights(plain.export_weights())),
            (unsupported, "gate_layout must stay 'halves'", lambda: interleaved.load_weights(weights)),
            (invalid, "gate_up_input_scale must be None", lambda: dataclasses.replace(weights, experts=static)),
            (invalid, "gate_up must be plain like experts.down, got in mxfp4",
                lambda: dataclasses.replace(weights, experts=mixed)),
            (invalid, "recompute must be False with the scheme mxfp4_w4a8", lambda: MoELayerSpec(
                D_MODEL, D_FF, 4, 2, experts=ExpertsSpec(scheme=both), recompute=True)),
            (invalid, "main_grad must be False .* no shared experts", lambda: MoELayerSpec(
                D_MODEL, D_FF, 4, 2, experts=ExpertsSpec(scheme=scheme), main_grad=True)),
            (invalid, "input axis must be a multiple of 32", lambda: MoELayerSpec(
                40, D_FF, 4, 2, experts=ExpertsSpec(scheme=scheme))),
            (invalid, "scheme must be a Scheme or None", lambda: ExpertsSpec(scheme="mxfp4_w4a16")),  # pyright: ignore
            (invalid, "x must be torch.bfloat16", lambda: layer(x.float())),
            (unsupported, "no gradient with activations mxfp8", lambda: rounding(x.clone().requires_grad_())),
            (unsupported, "moe has no gradient", lambda: rounding.explain(4, training=True)),
            (unsupported, "moe has no gradient", lambda: rounding.warmup([4], training=True)),
        ]  # fmt: skip
        for error, message, act in cases:
            with pytest.raises(error, match=message):
                act()
        rounding.router.weight.requires_grad_()
        with pytest.raises(unsupported, match=r"what requires a gradient \(routing.weight\)"):
            rounding(x)


@pytest.mark.parametrize("assign", [False, True])
def test_a_state_of_other_dtypes_is_refused(assign: bool) -> None:
    """Copies would convert the numbers of codes and exponents. Narrower scales in fp32 widen exactly."""
    layer, (mx, _) = MoE.from_weights(quantized_weights("int4_w4a16")[0]), quantized_weights("mxfp4_w4a16")
    exponents, state = MoE.from_weights(mx), layer.state_dict()
    for target, name, dtype in (
        (layer, "experts.gate_up.values", torch.float32),
        (layer, "experts.down.scales", torch.int32),
        (exponents, "experts.down.scales", torch.float8_e8m0fnu),
        (exponents, "experts.down.scales", torch.float32),
    ):
        one = target.state_dict()
        wrong = one[name].to(torch.float32).to(dtype)
        with pytest.raises(RuntimeError, match=rf"{name} must be .*, got {dtype}, and copies convert numbers; load"):
            copy.deepcopy(target).load_state_dict(one | {name: wrong}, assign=assign)
    if not assign:
        layer.load_state_dict(state | {"experts.down.scales": state["experts.down.scales"].bfloat16()})


def test_quantised_shared_experts_of_a_checkpoint_are_dequantised(tmp_path: Any) -> None:
    (tmp_path / "config.json").write_text(json.dumps(quantized_config("gpt_oss", MXFP4, 64, 96)))
    save_file(mxfp4_layer(64, 96), tmp_path / "model.safetensors")
    read = open_checkpoint(tmp_path).layer(0)
    one = (
        map_arrays(read.experts.gate_up, lambda array: array[0]),
        map_arrays(read.experts.down, lambda array: array[0]),
    )
    weights = LayerWeights.from_checkpoint(dataclasses.replace(read, shared=moe_torch.SharedExpert(*one)))
    assert weights.shared is not None and weights.shared.down.dtype.name == weights.dtype == "bfloat16"
    assert np.array_equal(weights.shared.gate_up, reference.dequantize(one[0], "bfloat16"))
