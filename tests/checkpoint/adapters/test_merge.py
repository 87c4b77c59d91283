"""Merging adapters into plain and quantised experts, in every storage, and undoing it."""

from __future__ import annotations

import dataclasses
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from moe_core.base import dtypes
from moe_core.checkpoint.adapters import Adapter, ExpertAdapter, LoRAPair, merge_adapter, verify_adapter
from moe_core.checkpoint.adapters.form import AdapterBase
from moe_core.errors import InvalidInput
from moe_core.formats import QuantizedTensor, format_named
from moe_core.layers import ExpertsSpec, LayerWeights, MoELayerSpec, convert_weights
from moe_core.layers.storage import HUGGING_FACE, Storage
from moe_core.ops.quantize.reference import dequantize, quantize
from moe_core.specs.operands import named_arrays

E, D, F, R = 3, 64, 32, 4


def layer(dtype: str = "float32", layout: str = "out_in", gate_layout: str = "halves") -> LayerWeights:
    spec = MoELayerSpec(D, F, E, 2, experts=ExpertsSpec(weight_layout=layout, gate_layout=gate_layout))
    random = np.random.default_rng(0)
    arrays = {
        one.name: (0.1 * random.standard_normal(one.shape)).astype(dtypes.numpy_dtype(dtype))
        for one in spec.parameters(HUGGING_FACE)
    }
    return LayerWeights.from_named(arrays, spec, HUGGING_FACE)


def adapter(size: float = 0.5, dtype: Any = np.float32) -> ExpertAdapter:
    """Expert 1 has no change."""
    random = np.random.default_rng(1)

    def pair(inputs: int, outputs: int) -> LoRAPair:
        a, b = (size * random.standard_normal(shape) for shape in ((E, inputs, R), (E, R, outputs)))
        b[1] = 0
        return LoRAPair(a.astype(dtype), b.astype(dtype), np.array([2, 3, 0.5], np.float32), np.full(E, R, np.int32))

    return ExpertAdapter(pair(D, 2 * F), pair(F, D))


def exact(weights: LayerWeights, part: ExpertAdapter) -> dict[str, np.ndarray]:
    """gate_up `[E, D, 2F]` in halves and down `[E, F, D]` in float64."""
    plain = convert_weights(weights, Storage("in_out", "halves", "out_in"))
    result = {}
    for name, pair in part.pairs().items():
        change = np.einsum("e,eir,ero->eio", pair.scale, pair.a.astype(float), pair.b.astype(float))
        result[name] = getattr(plain.experts, name).astype(float) + change
    return result


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("layout", ["out_in", "in_out"])
@pytest.mark.parametrize("gate_layout", ["halves", "interleaved", "separate"])
def test_plain(dtype: str, layout: str, gate_layout: str) -> None:
    weights = layer(dtype, layout, gate_layout)
    part = adapter(dtype=ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float32)
    kept = {name: array.tobytes() for name, array in weights.named().items()}
    own = part if gate_layout == "separate" else part.with_gate_layout(gate_layout)
    merged = merge_adapter(weights, own)
    wanted = exact(weights, part)
    plain = convert_weights(merged.weights, Storage("in_out", "halves", "out_in")).experts
    for name, array in wanted.items():
        rtol = 2**-8 if dtype == "bfloat16" else 1e-5
        np.testing.assert_allclose(getattr(plain, name).astype(float), array, rtol, 1e-6, err_msg=name)
    assert merged.base is weights and not merged.errors
    assert {name: array.tobytes() for name, array in weights.named().items()} == kept, "unmerge returns these bits"
    changed = {name for name, array in merged.weights.named().items() if array.tobytes() != kept[name]}
    assert changed == {name for name in kept if name.startswith("experts.")}


def test_one_rounding() -> None:
    """W + s a b is rounded once: a change below half a unit of W, rounded alone first, would be lost twice."""
    weights, part = layer("bfloat16"), adapter(0.01)
    wanted = exact(weights, part)["down"].swapaxes(1, 2).astype(np.float32).astype(ml_dtypes.bfloat16)
    down = merge_adapter(weights, part).weights.experts.down
    assert (down != wanted).mean() < 1e-3


@pytest.mark.parametrize("format", ["mxfp4", "mxfp8", "int8_row", "int4_g32_zp", "fp8_tensor", "fp8_block"])
def test_quantised(format: str) -> None:
    kind, plain = format_named(format), layer()
    fields = {name: quantize(getattr(plain.experts, name), kind) for name in ("gate_up", "down")}
    weights = dataclasses.replace(plain, experts=dataclasses.replace(plain.experts, **fields))
    kept = {name: array.tobytes() for name, array in weights.named().items()}
    part = adapter()
    merged = merge_adapter(weights, part)
    for name in ("gate_up", "down"):
        before, after = (getattr(one.experts, name) for one in (weights, merged.weights))
        assert isinstance(after, QuantizedTensor) and after.spec == before.spec
        pair, errors = part.pairs()[name], []
        for expert in range(E):
            change = (pair.scale[expert] * pair.a[expert].astype(float) @ pair.b[expert]).T
            target = dequantize(before)[expert] + change
            size = np.linalg.norm(change)
            errors.append(np.linalg.norm(dequantize(after)[expert] - target) / size if size else 0.0)
        np.testing.assert_allclose(merged.errors[name], errors, rtol=1e-4, err_msg=name)
        assert merged.errors[name][1] == 0 and 0 < merged.errors[name][0] < 0.5
        for (_, old), (_, new) in zip(named_arrays(before), named_arrays(after), strict=True):
            np.testing.assert_array_equal(new[1], old[1], err_msg="an expert without a change keeps its bytes")
    assert {name: array.tobytes() for name, array in weights.named().items()} == kept

    small = adapter(0.01)
    with pytest.raises(InvalidInput, match=r"allow_losses must be True where requantising gate_up .* of expert"):
        merge_adapter(weights, small)
    assert merge_adapter(weights, small, allow_losses=True).errors["gate_up"].max() >= 1


def test_refusals() -> None:
    weights, part = layer(), adapter()
    with pytest.raises(InvalidInput, match="gate_layout of the adapter must be interleaved"):
        merge_adapter(layer(gate_layout="interleaved"), part)
    other = dataclasses.replace(part, down=part.gate_up)
    with pytest.raises(InvalidInput, match=r"down of the adapter must have .* \(3, 32, 64\), got \(3, 64, 64\)"):
        merge_adapter(weights, other)
    assert part.down is not None
    part.down.a[2, 0, 0] = np.nan
    with pytest.raises(InvalidInput, match="factors of down must be finite, got others for expert 2"):
        merge_adapter(weights, part)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_verify_tells_wrong_adapters(dtype: str) -> None:
    """B's columns in the other order, a missing scale, and one that is 5 % off."""
    weights, part = layer(dtype), adapter()
    base = AdapterBase(E, D, F, 2 * F, "out_in", "halves")
    merged = merge_adapter(weights, part).weights
    verify_adapter(Adapter(base, {"layers.0": part}, {}, "peft"), 0, weights, merged)
    pair = part.down
    assert pair is not None
    order = pair.b.transpose(2, 1, 0).reshape(D, E, R).transpose(1, 2, 0)
    wrongs = [{"b": order}, {"scale": np.ones(E, np.float32)}]
    wrongs += [{"scale": pair.scale * np.float32(1.05)}] if dtype == "float32" else []
    for changes in wrongs:
        wrong = dataclasses.replace(pair, **changes)
        planted = Adapter(base, {"layers.0": dataclasses.replace(part, down=wrong)}, {}, "peft")
        with pytest.raises(InvalidInput, match="verify must agree with the adapter, got weights of down, layer 0"):
            verify_adapter(planted, 0, weights, merged)
