"""Canonical layer weights: what they refuse, and conversions that move numbers without changing one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_core.checkpoint import open_checkpoint
from moe_core.errors import InvalidInput
from moe_core.layers import (
    HUGGING_FACE,
    MAXTEXT,
    ExpertsSpec,
    LayerWeights,
    MoELayerSpec,
    SharedExpertsSpec,
    Storage,
    convert_weights,
    placements,
)
from moe_core.ops.moe.reference.forward import moe_stages
from moe_core.parity.tolerance import assert_close
from moe_core.specs.matmul import Activation
from tests.support.checkpoint_files import write_family
from tests.support.layers import (
    EVERYTHING,
    SPECS,
    STORAGES,
    D,
    E,
    F,
    K,
    assert_same_where_ids_agree,
    draw_weights,
    draw_x,
    layer_specs,
    tolerances,
)
from tests.support.strategies import seeds

UNGATED = MoELayerSpec(D, F, E, K, experts=ExpertsSpec(Activation("relu2", gated=False), bias=True))
#: D = 2F = E, and D = F = E: axes that could be each other.
SQUARE = MoELayerSpec(16, 8, 16, 2, experts=ExpertsSpec(bias=True), shared_experts=SharedExpertsSpec(16, gate=True))
ALL_SQUARE = MoELayerSpec(16, 16, 16, 2, experts=ExpertsSpec(gate_layout="separate"))
LAYERS = {"everything": EVERYTHING, "ungated": UNGATED, "square": SQUARE}


def require_equal(one: LayerWeights, other: LayerWeights) -> None:
    assert (one.spec, list(one.named())) == (other.spec, list(other.named()))
    for name, array in one.named().items():
        second = other.named()[name]
        assert (array.dtype, array.shape, array.tobytes()) == (second.dtype, second.shape, second.tobytes()), name


def plain_gate_and_up(weights: LayerWeights, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Gate and up matrices as `[..., inputs, F]` (biases `[..., F]`), taken apart column by column."""
    arrays, bias = weights.named(), name.endswith("bias")
    stored = arrays[name]

    def columns(array: np.ndarray) -> np.ndarray:
        return array if bias or weights.spec.weight_layout == "in_out" else np.moveaxis(array, -2, -1)

    gate_layout = weights.spec.activation.gate_layout
    if gate_layout == "separate":
        up = arrays[name.replace("gate_up", "up")]
        return columns(stored), columns(up)
    both = columns(stored)
    width = both.shape[-1] // 2
    pick = {
        "halves": (list(range(width)), list(range(width, 2 * width))),
        "interleaved": (list(range(0, 2 * width, 2)), list(range(1, 2 * width, 2))),
    }[str(gate_layout)]
    return both[..., pick[0]], both[..., pick[1]]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", LAYERS)
def test_every_conversion_and_its_way_back(name: str, dtype: str) -> None:
    for source in STORAGES:
        weights = draw_weights(LAYERS[name], dtype=dtype, storage=source)
        for target in STORAGES:
            converted = convert_weights(weights, target)
            assert all(array.flags.c_contiguous for array in converted.named().values())
            assert converted.layer_spec().stored_as(source) == weights.layer_spec().stored_as(source)
            require_equal(convert_weights(converted, weights.storage), weights)


@pytest.mark.parametrize("source", STORAGES, ids=str)
def test_columns_land_where_their_layout_says(source: Storage) -> None:
    """Against gate and up taken apart by index lists, and down transposed by hand."""
    weights = draw_weights(EVERYTHING, storage=source)
    for target in STORAGES:
        converted = convert_weights(weights, target)
        for name in ("experts.gate_up", "experts.gate_up_bias", "shared_experts.gate_up"):
            for one, other in zip(plain_gate_and_up(weights, name), plain_gate_and_up(converted, name), strict=True):
                np.testing.assert_array_equal(one, other, err_msg=f"{name} {source} {target}")
        turned = source.weight_layout != target.weight_layout
        down = weights.experts.down
        np.testing.assert_array_equal(converted.experts.down, np.swapaxes(down, 1, 2) if turned else down)
        turned = source.router_weight_layout != target.router_weight_layout
        router = weights.router.weight
        np.testing.assert_array_equal(converted.router.weight, router.T if turned else router)


@pytest.mark.parametrize("name", LAYERS)
def test_placements_write_every_element_once(name: str) -> None:
    for source in STORAGES:
        weights = draw_weights(LAYERS[name], storage=source)
        for target in STORAGES:
            shapes = {p.name: p.shape for p in weights.layer_spec().stored_as(target).parameters(target)}
            written = {key: np.zeros(shape, int) for key, shape in shapes.items()}
            for key, place, array in placements(weights, target):
                assert any(np.shares_memory(array, owned) for owned in weights.named().values()), "a copy"
                assert written[key][place].shape == array.shape
                written[key][place] += 1
            assert all((count == 1).all() for count in written.values())


def test_unchanged_arrays_are_shared() -> None:
    weights = draw_weights(EVERYTHING)
    same = convert_weights(weights, weights.storage).named()
    assert all(same[name] is array for name, array in weights.named().items())
    turned = convert_weights(weights, dataclasses.replace(HUGGING_FACE, gate_layout="interleaved"))
    assert turned.experts.down is weights.experts.down


@given(layer_specs(), st.sampled_from(STORAGES), st.sampled_from(STORAGES), seeds())
def test_any_layer_computes_the_same_in_any_storage(
    spec: MoELayerSpec, source: Storage, target: Storage, seed: int
) -> None:
    weights = draw_weights(spec, seed, storage=source)
    converted = convert_weights(weights, target)
    x = draw_x((6,), seed, d_model=spec.d_model)
    one, other = (
        moe_stages(x, each.experts, each.router, each.spec, shared=each.shared) for each in (weights, converted)
    )
    allowed = tolerances(spec, "float32")
    assert_close(one["logits"], other["logits"], allowed["logits"], "logits")
    found, expected = ((each["ids"], each["output"]) for each in (one, other))
    assert_same_where_ids_agree(found, expected, allowed["output"])


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss", "deepseek_v3"])
def test_weights_of_a_checkpoint(tmp_path: Path, family: str) -> None:
    path, _ = write_family(tmp_path, family)
    checkpoint = open_checkpoint(path)
    layer = checkpoint.layer(checkpoint.moe_layers[0])
    weights = LayerWeights.from_checkpoint(layer)
    assert weights.experts is layer.experts and weights.dtype == "bfloat16"
    spec = weights.layer_spec()
    assert (spec.d_model, spec.d_ff, spec.num_experts) == (layer.d_model, layer.d_ff, layer.num_experts)
    assert spec.correction_bias == (family == "deepseek_v3") and spec.router_bias == (family == "gpt_oss")
    require_equal(LayerWeights.from_named(weights.named(), spec, weights.storage), weights)
    require_equal(convert_weights(convert_weights(weights, MAXTEXT), weights.storage), weights)


def test_preset_and_weights_describe_one_layer() -> None:
    for name, spec in SPECS.items():
        stored = spec.stored_as(HUGGING_FACE)
        assert draw_weights(spec).layer_spec() == stored, name


def _replace_experts(weights: LayerWeights, **changes: Any) -> LayerWeights:
    return dataclasses.replace(weights, experts=dataclasses.replace(weights.experts, **changes))


def _replace_router(weights: LayerWeights, **changes: Any) -> LayerWeights:
    return dataclasses.replace(weights, router=dataclasses.replace(weights.router, **changes))


FAULTS: dict[str, tuple[Callable[[LayerWeights], LayerWeights], str]] = {
    "router not an array": (lambda w: _replace_router(w, weight=w.router.weight.tolist()),
        "router.weight must be a NumPy array, got list"),
    "no router weight": (lambda w: _replace_router(w, weight=None), "router.weight must be an array, got None"),
    "no down": (lambda w: _replace_experts(w, down=None), "experts.down must be an array, got None"),
    "stack": (lambda w: _replace_experts(w, layer_index=np.zeros(1, np.int32)), "experts.layer_index must be None"),
    "rank": (lambda w: _replace_experts(w, down=w.experts.down[0]), r"experts.down must have 3 axes, got \(48, 32\)"),
    "wrong shape": (
        lambda w: _replace_experts(w, gate_up=w.experts.gate_up[:, :-2]),
        r"experts.gate_up must be \[8, 64, 48\] \(experts, d_ff, d_model\) by the layouts of spec .* got \(8, 62, 48\)",
    ),
    "wrong tag": (lambda w: dataclasses.replace(w, spec=dataclasses.replace(w.spec, weight_layout="in_out")),
        "experts.gate_up must be .* by the layouts of spec"),
    "one bias lost": (lambda w: _replace_experts(w, gate_up_bias=None),
        "weights must hold .* got one that lacks experts.gate_up_bias"),
    "a bias too many": (lambda w: _replace_experts(w, down_bias=None),
        "got one that has experts.gate_up_bias, which this layer does not"),
    "up of fused gates": (lambda w: _replace_experts(w, up=w.experts.gate_up),
        "got one that has experts.up, which this layer does not"),
    "integers": (lambda w: _replace_experts(w, down=w.experts.down.astype(np.int32)),
        "experts.down's dtype must be one of bfloat16, float16, float32, got 'int32'"),
    "mixed dtypes": (lambda w: _replace_experts(w, gate_up=w.experts.gate_up.astype(np.float16)),
        "experts.gate_up must be float32, got float16; cast it to float32"),
    "correction bias": (lambda w: _replace_router(w, correction_bias=w.router.correction_bias.astype(np.float16)),
        "router.correction_bias must be float32, got float16"),
    "no routing rule": (lambda w: dataclasses.replace(w, spec=dataclasses.replace(w.spec, router=None)),
        "spec.router must be a RouterSpec, got None"),
    "no spec": (lambda w: dataclasses.replace(w, spec=EVERYTHING), "spec must be a MoESpec, got MoELayerSpec"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_weights_refuse(fault: str) -> None:
    change, message = FAULTS[fault]
    with pytest.raises(InvalidInput, match=message):
        change(draw_weights(EVERYTHING))


def test_square_weights_are_told_apart_by_their_tags() -> None:
    """Every tag fits the shapes; each means another layer, and none is guessed."""
    weights, x = draw_weights(ALL_SQUARE), draw_x((5,), d_model=ALL_SQUARE.d_model)
    tags = ({}, {"router_weight_layout": "in_out"}, {"weight_layout": "in_out"})
    outputs = set()
    for tag in tags:
        tagged = dataclasses.replace(weights, spec=dataclasses.replace(weights.spec, **tag))
        outputs.add(moe_stages(x, tagged.experts, tagged.router, tagged.spec)["output"].tobytes())
    assert len(outputs) == len(tags)


def test_names_are_checked_both_ways() -> None:
    arrays = draw_weights(EVERYTHING).named()
    with pytest.raises(InvalidInput, match=r"arrays must hold .* got one that lacks router\.bias"):
        LayerWeights.from_named({k: v for k, v in arrays.items() if k != "router.bias"}, EVERYTHING, HUGGING_FACE)
    with pytest.raises(InvalidInput, match=r"got one that has gate\.kernel, which this layer does not"):
        LayerWeights.from_named(arrays | {"gate.kernel": arrays["router.weight"]}, EVERYTHING, HUGGING_FACE)
    with pytest.raises(InvalidInput, match="storage must be a Storage, got str"):
        convert_weights(draw_weights(EVERYTHING), "maxtext")  # type: ignore[arg-type]
