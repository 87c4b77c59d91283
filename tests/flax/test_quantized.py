"""Flax layers with quantised experts: from checkpoints, in stacks, as state, and in the backward."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as orbax
import pytest
from flax import nnx as flax_nnx
from flax import serialization

from moe_core.checkpoint import open_checkpoint
from moe_core.formats import QuantizedTensor, scheme_named
from moe_core.layers import ExpertsSpec, LayerWeights, MoELayerSpec, SharedExpertsSpec
from moe_core.ops.quantize.reference import quantize
from moe_core.specs import Activation, MoESpec, RouterSpec
from moe_core.specs.operands import ExpertWeights, RouterWeights, SharedExpert, named_arrays
from moe_jax import InvalidInput, Unsupported, linen, moe, nnx
from tests.support.checkpoint_files import write
from tests.support.flax import linen_layer, nnx_layer
from tests.support.jax import draw, program_text, running_on, to_jax, weight_copies
from tests.support.quantized.files import MXFP4, mxfp4_layer, quantized_config

E, D, F, LAYERS = 4, 64, 32, 3
W4A4 = scheme_named("mxfp4_w4a4")
OPTIONS: dict[str, Any] = {"param_dtype": jnp.bfloat16}


def layer_weights(seed: int = 0, activations: Any = W4A4.activations) -> LayerWeights:
    """mxfp4 experts, interleaved gate and up, with biases and a shared expert."""
    random = np.random.default_rng(seed)

    def plain(*shape: int) -> np.ndarray:
        return draw(random, *shape, dtype="bfloat16")

    experts = ExpertWeights(
        quantize(draw(random, E, 2 * F, D), W4A4.weights),
        quantize(draw(random, E, D, F), W4A4.weights),
        gate_up_bias=plain(E, 2 * F),
        down_bias=plain(E, D),
    )
    spec = MoESpec(
        Activation("silu", gate_layout="interleaved"), RouterSpec(2), weight_layout="out_in", activations=activations
    )
    return LayerWeights(spec, experts, RouterWeights(plain(D, E)), SharedExpert(plain(2 * F, D), plain(D, F)))


def tokens() -> jax.Array:
    return jnp.asarray(np.random.default_rng(9).standard_normal((2, 3, D)), jnp.bfloat16)


def assert_same_weights(found: Any, expected: LayerWeights) -> None:
    assert found.layer_spec() == expected.layer_spec()
    wanted = expected.named()
    assert list(found.named()) == list(wanted)
    for name, array in found.named().items():
        np.testing.assert_array_equal(array.view(np.uint8), np.ascontiguousarray(wanted[name]).view(np.uint8), name)


def test_a_layer_holds_a_checkpoint_as_it_is_stored(tmp_path: pathlib.Path) -> None:
    path = write(tmp_path, quantized_config("gpt_oss", MXFP4, D, 96), {0: mxfp4_layer(D, 96)})
    weights = LayerWeights.from_checkpoint(open_checkpoint(path).layer(0))
    x = tokens()
    with running_on("reference"):
        layer = nnx.MoE.from_weights(weights)
        variables = flax_nnx.to_flat_state(flax_nnx.state(layer, nnx.QuantizedArray))
        stored = {
            "/".join(map(str, key)): (value.get_value().shape, str(value.get_value().dtype)) for key, value in variables
        }
        assert stored == {
            "wi/values": ((E, 192, D // 2), "uint8"),
            "wi/scales": ((E, 192, D // 32), "uint8"),
            "wo/values": ((E, D, 48), "uint8"),
            "wo/scales": ((E, D, 3), "uint8"),
        }
        assert_same_weights(layer.export_weights(), dataclasses.replace(weights, **in_out_router(weights)))
        y = jax.jit(nnx.MoE.__call__)(layer, x)
        experts, router = to_jax((weights.experts, weights.router))
        expected = moe(x.reshape(-1, D), experts, router, weights.spec).output
        np.testing.assert_array_equal(np.asarray(y), np.asarray(expected).reshape(y.shape))
        twin, held = linen_layer(weights, weights.layer_spec(), **OPTIONS)
        assert set(held) == {"params", linen.QUANTIZED} and "wo" not in held["params"]
        np.testing.assert_array_equal(np.asarray(jax.jit(twin.apply)(held, x)), np.asarray(y))
        assert layer.explain(8) == twin.explain(8, held) and "mxfp4" in layer.explain(8)
    assert y.dtype == jnp.bfloat16


def in_out_router(weights: LayerWeights) -> dict[str, Any]:
    """What a Flax layer changes: its router's weight is `[D, E]`."""
    router = dataclasses.replace(weights.router, weight=weights.router.weight.T)
    return {"router": router, "spec": dataclasses.replace(weights.spec, router_weight_layout="in_out")}


def test_a_stack_is_scanned_by_index_without_a_copy() -> None:
    """Also where the shared experts are stored in another dtype and cast layer by layer."""
    every = [layer_weights(seed) for seed in range(LAYERS)]
    x, spec = tokens(), every[0].layer_spec()
    with running_on("reference"):
        expected = x
        for weights in every:
            expected = expected + nnx.MoE.from_weights(weights)(expected)

        def run(stacked: nnx.MoE, x: jax.Array) -> jax.Array:
            indices = jnp.arange(LAYERS, dtype=jnp.int32)
            return jax.lax.scan(lambda x, index: (x + stacked(x, layer_index=index), None), x, indices)[0]

        for dtype in (jnp.bfloat16, jnp.float32):
            stacked = nnx_layer(every, spec, num_layers=LAYERS, dtype=jnp.bfloat16, param_dtype=dtype)
            np.testing.assert_array_equal(np.asarray(jax.jit(run)(stacked, x)), np.asarray(expected))
            held = stacked.parameters()
            matrices = ExpertWeights(*(QuantizedTensor.unchecked(spec, **held[name]) for name in ("wi", "wo")))  # type: ignore[arg-type]
            assert weight_copies(program_text(jax.jit(run).lower(stacked, x)), matrices) == []
        exported: Any = stacked.export_weights()
        for found, weights in zip(exported, every, strict=True):
            for name in ("gate_up", "down"):
                arrays = zip(*(named_arrays(getattr(one.experts, name)) for one in (found, weights)), strict=True)
                assert all(np.array_equal(array, stored) for (_, array), (_, stored) in arrays), name


def test_state_goes_through_checkpoints(tmp_path: pathlib.Path) -> None:
    weights, x = layer_weights(), tokens()
    with running_on("reference"):
        layer = nnx.MoE.from_weights(weights)
        y = np.asarray(layer(x))
        graph, state = flax_nnx.split(layer)
        pure = flax_nnx.to_pure_dict(state)
        with orbax.StandardCheckpointer() as checkpointer:
            checkpointer.save(tmp_path / "state", pure)
            checkpointer.wait_until_finished()
            restored = checkpointer.restore(tmp_path / "state", pure)
        flax_nnx.replace_by_pure_dict(state, restored)
        np.testing.assert_array_equal(np.asarray(flax_nnx.merge(graph, state)(x)), y)
        twin, variables = linen_layer(weights, weights.layer_spec(), **OPTIONS)
        unpacked: Any = serialization.msgpack_restore(serialization.msgpack_serialize(variables))
        np.testing.assert_array_equal(np.asarray(twin.apply(unpacked, x)), y)


def test_fresh_layers_are_zeros_to_be_loaded() -> None:
    experts = ExpertsSpec(Activation("silu"), scheme=scheme_named("mxfp4_w4a16"))
    x = tokens()
    with running_on("reference"):
        layer = nnx.MoE(D, F, E, 2, experts=experts, rngs=flax_nnx.Rngs(0))
        assert not np.asarray(layer(x)).any()
        twin = linen.MoE(D, F, E, 2, experts=experts)
        variables = twin.init(jax.random.key(0), x)
        assert not np.asarray(twin.apply(variables, x)).any()
        assert {name: set(arrays) for name, arrays in variables[linen.QUANTIZED].items()} == {
            name: {"values", "scales"} for name in ("wi_0", "wi_1", "wo")
        }
        assert twin.explain(8) == layer.explain(8)
        with pytest.raises(Unsupported, match="gate_layout must stay 'interleaved' for quantised experts"):
            spec = dataclasses.replace(
                layer_weights(activations=None).layer_spec(), experts=dataclasses.replace(experts, bias=True)
            )
            nnx_layer(layer_weights(activations=None), spec, **OPTIONS)
        with pytest.raises(InvalidInput, match="parameters must hold wi_0/values, got nothing in the top level"):
            twin.explain(8, {"params": variables["params"]})
        with pytest.raises(
            InvalidInput, match="parameters must hold one array as wi_0, got scales, values, as a quant"
        ):
            plain = linen.MoE(D, F, E, 2)
            plain.explain(8, {"params": {**variables["params"], **variables[linen.QUANTIZED]}})


def test_the_spec_describes_the_layer() -> None:
    spec = layer_weights().layer_spec()
    assert isinstance(spec, MoELayerSpec) and spec.experts.scheme == W4A4
    assert spec.shared_experts == SharedExpertsSpec(F)
    assert linen.MoE.from_spec(spec).spec == spec
