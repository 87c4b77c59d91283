"""Layers with prepacked experts: the same results, and checkpoints that are never read the wrong way."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx as flax_nnx

import moe_jax
import moe_torch
from moe_core.base.target import Target
from moe_core.errors import InvalidInput, Unsupported
from moe_core.formats import scheme_named
from moe_core.layers import ExpertsSpec, LayerWeights, MoELayerSpec
from moe_core.ops.prepack.prepack import prepack_weights
from moe_core.specs import Activation
from moe_core.specs.operands import map_arrays
from moe_jax import layers, linen, nnx
from moe_torch import MoE
from tests.support.training.lora import drawn_in_tiles, prepacked

D, F, E, K, LAYERS = 96, 64, 3, 2, 2
MXFP4 = scheme_named("mxfp4_w4a16")


@pytest.fixture(autouse=True)
def jax_on_a_cpu() -> Iterator[None]:
    """Float32 rows of prepacked weights have no kernel: what JAX computes here, the reference does."""
    with jax.default_device(jax.devices("cpu")[0]):
        yield


def torch_layer(seed: int, gate_layout: str = "halves") -> MoE:
    """Biased experts of any codes, with scales that keep numbers small."""
    experts = ExpertsSpec(bias=True, gate_layout=gate_layout, weight_layout="out_in", scheme=MXFP4)
    layer = MoE(D, F, E, K, experts=experts)
    random = torch.Generator().manual_seed(seed)
    for matrix in (layer.experts.gate_up, layer.experts.down):
        matrix.values.random_(0, 256, generator=random)
        matrix.scales.random_(115, 127, generator=random)
    return layer.requires_grad_(False)


def arrays_of(weights: LayerWeights) -> list[bytes]:
    return [array.tobytes() for array in weights.named().values()]


@pytest.mark.parametrize("gate_layout", ["halves", "interleaved"])
def test_torch_layers_keep_published_checkpoints(gate_layout: str) -> None:
    layer, other = torch_layer(0, gate_layout), torch_layer(1, gate_layout)
    x = torch.randn(5, D)
    published, expected = {name: array.clone() for name, array in layer.state_dict().items()}, layer.export_weights()
    with moe_torch.cpu_engine("reference"):
        y = layer(x)
        layer.prepack_weights()
        layer.prepack_weights()
        assert layer.is_prepacked and torch.equal(layer(x), y)
        assert layer.experts.gate_up.values.shape == (E, 2, 1, 4096) and "prepacked" in layer.extra_repr()
        stored = layer.state_dict()
        assert stored.keys() == published.keys()
        assert all(torch.equal(stored[name], array) for name, array in published.items())
        assert arrays_of(layer.export_weights()) == arrays_of(expected)
        assert torch.equal(copy.deepcopy(layer)(x), y)
        other.load_state_dict(stored)
        assert torch.equal(other(x), y) and not other.is_prepacked
        for load in (lambda layer: layer.load_state_dict(stored), lambda layer: layer.load_weights(expected)):
            other = torch_layer(2, gate_layout)
            other.prepack_weights()
            load(other)
            assert other.is_prepacked and torch.equal(other(x), y)
        half = {"experts.down.values": stored["experts.down.values"]}
        with pytest.raises(
            InvalidInput, match=r"got experts\.down\.values without experts\.down\.scales; load them in"
        ):
            other.load_state_dict(half, strict=False)
        assert torch.equal(other(x), y)
        with pytest.raises(RuntimeError, match=r"size mismatch for experts\.down\.values"):
            torch_layer(3, gate_layout).load_state_dict(dict(layer.named_buffers()), strict=False)
        layer.router.weight.requires_grad_()
        with pytest.raises(Unsupported, match="prepacked weights; train with the weights that restore_weights gives"):
            layer(x)
        layer.restore_weights()
        assert not layer.is_prepacked and torch.equal(layer(x), y)
        layer(x).sum().backward()


def test_adapters_of_prepared_layers() -> None:
    """With the bits of published weights, and one result in both front-ends."""
    layer, x, ids = torch_layer(0), torch.randn(5, D), torch.tensor([0, 1, -1, 0, 0], dtype=torch.int32)
    layer.add_lora(moe_torch.LoRA(rank=4, alpha=8, slots=2))
    for parameter in layer.lora.parameters():
        torch.nn.init.normal_(parameter)
    with moe_torch.cpu_engine("reference"), torch.no_grad():
        y = layer(x, adapter_ids=ids)
        layer.prepack_weights()
        assert torch.equal(layer(x, adapter_ids=ids), y)
    problem = prepacked(drawn_in_tiles(Activation("silu"), sizes=(64, 64, 3, 2), dtype="float32"))
    x, experts, routing, lora, ids = (
        jnp.asarray(one) if isinstance(one, np.ndarray) else map_arrays(one, jnp.asarray)
        for one in (problem.x, problem.experts, problem.routing, problem.lora, problem.adapter_ids)
    )
    with moe_jax.cpu_engine("reference"):
        made = moe_jax.moe(x, experts, routing, problem.spec, lora=lora, adapter_ids=ids)
    np.testing.assert_array_equal(np.asarray(made.output), problem.forward(Target("reference"))["output"])


def test_a_program_of_a_prepared_layer() -> None:
    """Widths come from the tiling, not from the buffers' axes."""
    layer, x = torch_layer(0), torch.randn(5, D)
    with moe_torch.cpu_engine("reference"), torch.no_grad():
        y = layer(x)
        layer.prepack_weights()
        assert torch.equal(torch.compile(layer, fullgraph=True, backend="eager")(x), y)


def test_nnx_layers_tell_layouts_apart() -> None:
    """A stack; what updates put beside each other is refused."""
    weights = [torch_layer(seed, "interleaved").export_weights() for seed in range(LAYERS)]
    x = jnp.asarray(np.random.default_rng(0).standard_normal((5, D)), jnp.float32)

    def made() -> nnx.MoE:
        spec = weights[0].layer_spec()
        layer = flax_nnx.eval_shape(lambda: nnx.MoE.from_spec(spec, rngs=flax_nnx.Rngs(0), num_layers=LAYERS))
        layer.load_weights(weights)
        return layer

    with moe_jax.cpu_engine("reference"):
        layer, other = made(), made()
        y, before = layer(x, layer_index=1), flax_nnx.state(other)
        exported: Any = layer.export_weights()
        layer.prepack_weights()
        assert layer.is_prepacked and not hasattr(layer.wo, "values")
        assert layer.wi.tiled_values.get_value().shape == (LAYERS, E, 2, 1, 4096)
        assert jnp.array_equal(layer(x, layer_index=1), y)
        restored: Any = layer.export_weights()
        assert [arrays_of(one) for one in restored] == [arrays_of(one) for one in exported]
        layer.load_weights(weights)
        assert layer.is_prepacked and jnp.array_equal(layer(x, layer_index=1), y)
        with pytest.raises(Unsupported, match="prepacked weights; train with"):
            jax.grad(lambda x: layer(x, layer_index=1).sum())(x)
        flax_nnx.update(other, flax_nnx.state(layer))
        with pytest.raises(InvalidInput, match="wi must hold values or tiled_values, got both"):
            other(x, layer_index=1)
        layer.restore_weights()
        assert not layer.is_prepacked and jnp.array_equal(layer.wo.values.get_value(), other.wo.values.get_value())
        layer.prepack_weights()
        flax_nnx.update(layer, before)
        with pytest.raises(InvalidInput, match="wi must hold values or tiled_values, got both"):
            layer(x, layer_index=1)


def test_linen_variables_are_prepared() -> None:
    weights = torch_layer(0, "interleaved").export_weights()
    x = jnp.asarray(np.random.default_rng(0).standard_normal((5, D)), jnp.float32)
    module = linen.MoE.from_spec(weights.layer_spec())
    variables = module.load_weights(weights)
    prepared = module.prepack_weights(variables)
    assert set(prepared["quantized"]["wo"]) == {"tiled_values", "tiled_scales"}
    with moe_jax.cpu_engine("reference"):
        found, expected = (np.asarray(module.apply(given, x)) for given in (prepared, variables))
        np.testing.assert_array_equal(found, expected)
    same = jax.tree.map(jnp.array_equal, module.restore_weights(prepared), variables)
    assert all(jax.tree.leaves(same))


def test_layers_that_cannot_be_prepared_are_refused() -> None:
    for experts, message in (
        (ExpertsSpec(), "quantised experts stored out_in, got scheme None"),
        (ExpertsSpec(scheme=MXFP4, weight_layout="in_out"), "stored out_in, got scheme mxfp4_w4a16 and in_out"),
        (ExpertsSpec(scheme=MXFP4, gate_layout="separate"), "gate_layout must be None, 'interleaved' or 'halves'"),
        (ExpertsSpec(scheme=scheme_named("mxfp8")), "tiling must be None for mxfp8"),
    ):
        with pytest.raises(InvalidInput, match=message):
            MoE(D, F, E, K, experts=experts).prepack_weights()
    with pytest.raises(InvalidInput, match="quantised experts stored out_in, got scheme mxfp4_w4a16 and in_out"):
        layers.prepack_weights({}, MoELayerSpec(D, F, E, K, experts=ExpertsSpec(scheme=MXFP4)))
    weights = torch_layer(0).export_weights()
    prepared = prepack_weights(weights.experts, weights.spec)
    with pytest.raises(InvalidInput, match=r"experts\.gate_up must be in its published layout.*restore_weights"):
        LayerWeights(weights.spec, prepared, weights.router)
