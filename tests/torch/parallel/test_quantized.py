"""Quantised experts on several gloo ranks: every bit of one device, and weights that are loaded slice by slice."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

from moe_core.errors import Unsupported
from moe_core.formats import QuantizedTensor, format_named
from moe_core.parallel import ExchangeSpec
from moe_core.specs.operands import map_arrays, named_arrays, named_fields
from moe_torch import LayerWeights, MoE
from moe_torch.parallel import ExpertParallel, parallelize
from tests.support.parallel.placements import placement_of
from tests.support.parallel.pool import Pool, ranks
from tests.support.parallel.torch import mesh_of
from tests.support.quantized.layers import D_MODEL, layer_spec, quantized_weights
from tests.support.torch import REAL_KERNELS, running_on, to_numpy

__all__ = ["ranks"]

TOKENS = 4


def results(layer: MoE, x: torch.Tensor) -> dict[str, np.ndarray]:
    """y, and where only matrices are quantised the gradient of x."""
    x = x.clone().requires_grad_(layer.router.weight.requires_grad)
    y = layer(x)
    found = {"y": y}
    if x.requires_grad:
        y.float().square().sum().backward()
        assert x.grad is not None
        found["d_x"] = x.grad
    return {name: to_numpy(array.float()) for name, array in found.items()}


def rows(ranks: int) -> torch.Tensor:
    return torch.randn(ranks * TOKENS, D_MODEL, generator=torch.Generator().manual_seed(1)).bfloat16()


def spoilt(weights: LayerWeights, held: tuple[int, ...]) -> LayerWeights:
    """The same with other bytes in the experts of other ranks, which must not be read."""
    others = [expert for expert in range(4) if expert not in held]

    def changed(array: np.ndarray) -> np.ndarray:
        array = array.copy()
        array.view(np.uint8)[others] = 0x7E
        return array

    fields = named_fields(weights.experts)
    new: dict[str, Any] = {
        name: map_arrays(one, changed) if isinstance(one, QuantizedTensor) else changed(one) for name, one in fields
    }
    return dataclasses.replace(weights, experts=dataclasses.replace(weights.experts, **new))


def run(group: Any, weights: LayerWeights, kind: str, way: ExchangeSpec, engine: str) -> dict[str, np.ndarray]:
    rank, size = torch.distributed.get_rank(group), torch.distributed.get_world_size(group)
    placement = placement_of(kind, 4, size, 1)
    layer = MoE.from_spec(weights.layer_spec(), device="meta", dtype=torch.bfloat16)
    parallelize(layer, ExpertParallel(mesh_of(group), way, TOKENS), placement=placement)
    layer.to_empty(device="cpu").load_weights(spoilt(weights, placement.owners[rank]))
    with running_on(engine):
        return results(layer, rows(size)[rank * TOKENS :][:TOKENS])


def compare(ranks: Pool, scheme: str, kind: str, way: ExchangeSpec, engine: str) -> None:
    weights, _ = quantized_weights(scheme, top_k=3)
    found = ranks.call(run, [(weights, kind, way, engine)] * 2)
    with running_on(engine):
        expected = results(MoE.from_weights(weights), rows(2))
    for name, array in expected.items():
        assert np.isfinite(array).all() and array.any()
        np.testing.assert_array_equal(np.concatenate([rank[name] for rank in found]), array, name)


@pytest.mark.parametrize(
    "scheme, kind, way",
    [
        ("mxfp4_w4a16", "linear", ExchangeSpec()),
        ("mxfp4_w4a8", "linear", ExchangeSpec("all_gather")),
        ("fp8_block", "round_robin", ExchangeSpec("padded", "slots")),
        ("fp8_channel", "linear", ExchangeSpec("all_to_all", "slots")),
        ("int4_w4a16_zp", "balanced", ExchangeSpec()),
        ("int8_w8a16", "round_robin", ExchangeSpec("all_gather")),
        ("int8_w8a8", "linear", ExchangeSpec("padded")),
        ("mxfp4_w4a8", "round_robin", ExchangeSpec("peer")),
        ("fp8_block", "linear", ExchangeSpec("peer", "slots")),
    ],
)
def test_every_bit_of_one_device(ranks: Pool, scheme: str, kind: str, way: ExchangeSpec) -> None:
    compare(ranks, scheme, kind, way, "reference")


@pytest.mark.skipif(REAL_KERNELS != "interpreter", reason="gloo ranks run kernels in the interpreter alone")
def test_interpreted_kernels_give_every_bit_of_one_device(ranks: Pool) -> None:
    compare(ranks, "mxfp4_w4a16", "round_robin", ExchangeSpec(), "interpreter")


def rounded(group: Any, weights: LayerWeights, mutable: bool) -> np.ndarray:
    """Outputs of rows that travel as fp8, perhaps in torch's mode for writes to saved tensors."""
    way = ExchangeSpec("peer", format=format_named("fp8_group"))
    mode = torch.autograd.graph.allow_mutation_on_saved_tensors() if mutable else contextlib.nullcontext()
    with torch.no_grad(), mode:
        return run(group, weights, "linear", way, "reference")["y"]


def test_rounded_rows_where_saved_tensors_may_be_written(ranks: Pool) -> None:
    """Their counts are stored without an x."""
    weights, _ = quantized_weights("fp8_channel", top_k=3)
    found, expected = (ranks.call(rounded, [(weights, mutable)] * 2) for mutable in (True, False))
    np.testing.assert_array_equal(found, expected)


def prepacked(group: Any, weights: LayerWeights, kind: str, first: bool) -> tuple[list[np.ndarray], dict[str, Any]]:
    """Outputs of a layer whose matrices are tiled, loaded, and laid out as they were; and its exported arrays.

    first: tiled before they are shared out."""
    rank, size = torch.distributed.get_rank(group), torch.distributed.get_world_size(group)
    layer, x, found = MoE.from_weights(weights), rows(size)[rank * TOKENS :][:TOKENS], []
    with running_on("reference"), torch.no_grad():
        if first:
            layer.prepack_weights()
        parallelize(layer, ExpertParallel(mesh_of(group)), placement=placement_of(kind, 4, size))
        if not first:
            layer.prepack_weights()
        assert layer.is_prepacked
        found.append(layer(x))
        state = layer.state_dict()
        assert all(tuple(state[f"experts.{name}"].shape) == array.shape for name, array in arrays_of(weights).items())
        layer.load_state_dict(state)
        layer.load_weights(weights)
        found.append(layer(x))
        exported = layer.export_weights().named()
        layer.restore_weights()
        found.append(layer(x))
    return [to_numpy(y.float()) for y in found], exported


def arrays_of(weights: LayerWeights) -> dict[str, np.ndarray]:
    return dict(named_arrays(weights.experts))


@pytest.mark.parametrize("kind, first", [("linear", True), ("round_robin", False), ("linear", False)])
def test_prepacked_matrices_are_shared_out(ranks: Pool, kind: str, first: bool) -> None:
    """On three ranks: with the linear placement the last one has no expert."""
    weights, _ = quantized_weights("mxfp4_w4a16")
    found = ranks.call(prepacked, [(weights, kind, first)] * 3)
    with running_on("reference"), torch.no_grad():
        expected = to_numpy(MoE.from_weights(weights)(rows(3)).float())
    for number in range(3):
        np.testing.assert_array_equal(np.concatenate([outputs[number] for outputs, _ in found]), expected)
    for _, exported in found:
        for name, array in weights.named().items():
            np.testing.assert_array_equal(exported[name].view(np.uint8), array.view(np.uint8), name)


def one_scale(group: Any) -> str:
    layer = parallelize(MoE.from_spec(layer_spec("fp8_tensor")), ExpertParallel(mesh_of(group)))
    with running_on("reference"), pytest.raises(Unsupported) as caught:
        layer(rows(1).float())
    return str(caught.value)


def test_one_scale_of_all_rows_is_refused(ranks: Pool) -> None:
    for message in ranks.call(one_scale, [()] * 2):
        assert message.startswith("activations must have a scale for each row across ranks, or given scales")
