"""The parameters of Flax layers: names, shapes, logical axes, how they start, and weights in and out."""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Iterator
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx as flax_nnx
from flax import traverse_util
from jax.sharding import PartitionSpec as P

from moe_core.layers import (
    HUGGING_FACE,
    MAXTEXT,
    ExpertsSpec,
    LayerWeights,
    MoELayerSpec,
    SharedExpertsSpec,
    Storage,
    convert_weights,
)
from moe_core.specs import Activation, RouterSpec
from moe_core.specs.operands import map_arrays
from moe_jax import InvalidInput, layers, linen, nnx
from tests.support.flax import draw_weights, linen_layer, nnx_layer, preset

D, F, E, S = 32, 24, 4, 40
EVERYTHING = MoELayerSpec(
    D, F, E, 2, router=RouterSpec(scoring="sigmoid"), experts=ExpertsSpec(bias=True),
    shared_experts=SharedExpertsSpec(S, gate=True), router_bias=True, correction_bias=True,
)  # fmt: skip
#: path -> (shape, logical axes), as MaxText 0.2.5 has them.
PARAMETERS = {
    "gate/kernel": ((D, E), ("embed_router", None)),
    "gate/bias": ((E,), (None,)),
    "wi_0": ((E, D, F), ("exp", "embed_moe", "mlp_moe")),
    "wi_1": ((E, D, F), ("exp", "embed_moe", "mlp_moe")),
    "wo": ((E, F, D), ("exp", "mlp_moe", "embed_moe")),
    "wi_0_bias": ((E, F), ("exp", "activation_mlp")),
    "wi_1_bias": ((E, F), ("exp", "activation_mlp")),
    "wo_bias": ((E, D), ("exp", "activation_embed")),
    "shared_experts/wi_0/kernel": ((D, S), ("embed", "mlp")),
    "shared_experts/wi_1/kernel": ((D, S), ("embed", "mlp")),
    "shared_experts/wo/kernel": ((S, D), ("mlp", "embed")),
    "shared_experts/gate/kernel": ((D, 1), ("embed", None)),
}
STATE = {"gate/correction_bias": ((E,), (None,))}
OTHER_NAMES = {
    "halves": {"wi": (E, D, 2 * F), "wo": (E, F, D)},
    "interleaved": {"wi": (E, D, 2 * F), "wo": (E, F, D)},
    "out_in": {"wi_0": (E, F, D), "wi_1": (E, F, D), "wo": (E, D, F)},
    "ungated": {"wi": (E, D, F), "wo": (E, F, D)},
}


def flat(tree: Any) -> dict[str, Any]:
    return traverse_util.flatten_dict(tree, sep="/")


def made(spec: MoELayerSpec, **options: Any) -> nnx.MoE:
    return nnx.MoE.from_spec(spec, **options, rngs=flax_nnx.Rngs(0))


def shapes_of(layer: nnx.MoE) -> dict[str, tuple[int, ...]]:
    return {path: array.shape for path, array in flat(layer.parameters()).items()}


def abstract(spec: MoELayerSpec, **options: Any) -> nnx.MoE:
    """An NNX layer without arrays."""
    return flax_nnx.eval_shape(lambda: made(spec, **options))


def with_layers(table: dict[str, Any], num_layers: int | None) -> dict[str, Any]:
    if num_layers is None:
        return table
    return {path: ((num_layers, *shape), ("layers", *axes)) for path, (shape, axes) in table.items()}


@pytest.mark.parametrize("num_layers", [None, 3])
def test_nnx_parameters_are_those_of_maxtext(num_layers: int | None) -> None:
    layer = abstract(EVERYTHING, num_layers=num_layers)
    for kind, table in ((flax_nnx.Param, PARAMETERS), (nnx.CorrectionBias, STATE)):
        state = flax_nnx.state(layer, kind)
        found = {
            "/".join(map(str, path)): (variable.get_value().shape, variable.get_metadata("out_sharding"))
            for path, variable in flax_nnx.to_flat_state(state)
        }
        assert found == with_layers(table, num_layers)


@pytest.mark.parametrize("num_layers", [None, 3])
def test_linen_parameters_are_those_of_maxtext(num_layers: int | None) -> None:
    module = linen.MoE.from_spec(EVERYTHING, num_layers=num_layers)
    index = None if num_layers is None else 0
    x = jax.ShapeDtypeStruct((3, D), jnp.float32)
    variables = jax.eval_shape(lambda x: module.init(jax.random.key(0), x, layer_index=index), x)
    assert set(variables) == {"params", linen.STATE}
    for collection, table in (("params", PARAMETERS), (linen.STATE, STATE)):
        found = {path: (box.value.shape, box.names) for path, box in flat(variables[collection]).items()}
        assert found == with_layers(table, num_layers)
    assert nn.get_partition_spec(variables)["params"]["gate"]["kernel"] == P(
        *with_layers(PARAMETERS, num_layers)["gate/kernel"][1]
    )


@pytest.mark.parametrize("storage", OTHER_NAMES)
def test_names_of_other_layouts(storage: str) -> None:
    ungated = storage == "ungated"
    experts = ExpertsSpec(
        Activation("relu2", gated=False) if ungated else Activation("silu"),
        weight_layout="out_in" if storage == "out_in" else None,
        gate_layout=storage if storage in ("halves", "interleaved") else None,
    )
    layer = abstract(MoELayerSpec(D, F, E, 2, experts=experts))
    assert shapes_of(layer) == {"gate/kernel": (D, E), **OTHER_NAMES[storage]}


@pytest.mark.parametrize("weight_layout", ["in_out", "out_in"])
def test_every_matrix_is_drawn_by_itself(weight_layout: str) -> None:
    """The initialiser sees one matrix [inputs, outputs]; keys differ; biases and state start at zero."""
    seen = []

    @functools.partial(jax.jit, static_argnums=(1, 2))
    def kernel_init(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
        seen.append((shape, dtype))
        first_output = jnp.arange(shape[1]) == 0
        return jnp.where(first_output, jax.random.uniform(key, (), dtype, 1, 2), 0) * jnp.ones(shape, dtype)

    experts = dataclasses.replace(EVERYTHING.experts, weight_layout=weight_layout)
    spec = dataclasses.replace(EVERYTHING, experts=experts)
    layer = made(spec, kernel_init=kernel_init, num_layers=2)
    assert set(seen) == {(shape, jnp.float32) for shape in ((D, E), (D, F), (F, D), (D, S), (S, D), (D, 1))}
    parameters = layer.parameters()
    first = parameters["wi_0"].swapaxes(2, 3) if weight_layout == "out_in" else parameters["wi_0"]
    drawn = np.asarray(first[:, :, 0, 0])
    assert len(np.unique(drawn)) == drawn.size and not np.asarray(first[..., 1:]).any()
    for path in ("wi_0_bias", "wo_bias", "gate/bias", "gate/correction_bias"):
        assert not np.asarray(flat(parameters)[path]).any()
    halved = flat(abstract(spec, param_dtype=jnp.bfloat16).parameters())
    assert {path for path, array in halved.items() if array.dtype != jnp.bfloat16} == {"gate/correction_bias"}
    assert halved["gate/correction_bias"].dtype == jnp.float32


def test_the_default_scale_depends_on_the_inputs_alone() -> None:
    layer = made(MoELayerSpec(64, 256, 16, 2))
    for path, fan_in in (("wi_0", 64), ("wo", 256), ("gate/kernel", 64)):
        deviation = float(np.std(np.asarray(flat(layer.parameters())[path])))
        np.testing.assert_allclose(deviation, fan_in**-0.5, rtol=0.05)


def test_initialize_makes_the_same_table() -> None:
    arrays = jax.eval_shape(lambda key: layers.initialize(EVERYTHING, key, num_layers=2), jax.random.key(0))
    expected = with_layers(PARAMETERS | STATE, 2)
    assert {path: array.shape for path, array in flat(arrays).items()} == {
        path: shape for path, (shape, _) in expected.items()
    }


STORAGES = (HUGGING_FACE, MAXTEXT, Storage("in_out", "interleaved", "out_in"))


def same_arrays(first: LayerWeights, second: LayerWeights) -> None:
    left, right = first.named(), second.named()
    assert list(left) == list(right)
    for name, array in left.items():
        assert array.dtype == right[name].dtype, name
        np.testing.assert_array_equal(array.view(np.uint8), right[name].view(np.uint8), err_msg=name)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("storage", STORAGES, ids=str)
@pytest.mark.parametrize("family", ["mixtral", "gpt_oss", "deepseek_v3", "qwen2_moe"])
def test_weights_in_and_out(family: str, storage: Storage, dtype: str) -> None:
    """Exact permutations, square matrices (gpt_oss: d_model = d_ff) included."""
    spec = preset(family)
    weights = draw_weights(spec, dtype, storage=storage)
    layer = nnx_layer(weights, spec, param_dtype=dtype)
    exported = layer.export_weights()
    assert isinstance(exported, LayerWeights) and exported.storage.weight_layout == "in_out"
    same_arrays(convert_weights(exported, storage), weights)
    module, variables = linen_layer(exported, spec, param_dtype=dtype)
    back = module.export_weights(variables)
    assert isinstance(back, LayerWeights)
    same_arrays(back, exported)


def test_stacks_take_and_give_the_weights_of_every_layer() -> None:
    spec = preset("deepseek_v3")
    every = [draw_weights(spec, seed=seed) for seed in range(3)]
    layer = nnx_layer(iter(every), spec, num_layers=3)
    module, variables = linen_layer(every, spec, num_layers=3)
    assert layer.wo.get_value().shape[0] == variables["params"]["wo"].shape[0] == 3
    for exported in (layer.export_weights(), module.export_weights(variables)):
        assert isinstance(exported, list)
        for got, wanted in zip(exported, every, strict=True):
            same_arrays(convert_weights(got, HUGGING_FACE), wanted)


def test_a_stack_holds_one_layer_of_the_source_at_a_time() -> None:
    spec = preset("mixtral")
    alive: list[weakref.ref[LayerWeights]] = []

    def read() -> Iterator[LayerWeights]:
        for seed in range(3):
            assert all(reference() is None for reference in alive), f"an earlier layer is alive at layer {seed}"
            weights = draw_weights(spec, seed=seed)
            alive.append(weakref.ref(weights))
            yield weights
            del weights

    layers.load_weights(read(), spec, num_layers=3)
    assert len(alive) == 3


@pytest.mark.parametrize("aligned", [False, True])
def test_layers_share_no_memory_with_the_callers_arrays(aligned: bool) -> None:
    spec = preset("mixtral")

    def aligned_copy(array: np.ndarray) -> np.ndarray:
        room = np.empty(array.nbytes + 64, np.uint8)
        start = -room.ctypes.data % 64
        copy = room[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
        copy[...] = array
        return copy

    weights = draw_weights(spec, storage=MAXTEXT)
    if aligned:
        weights = dataclasses.replace(weights, experts=map_arrays(weights.experts, aligned_copy))
    layer, (module, variables) = nnx_layer(weights, spec), linen_layer(weights, spec)
    weights.experts.down[:] = 7.0
    exported = module.export_weights(variables)
    assert isinstance(exported, LayerWeights)
    assert not (np.asarray(layer.wo.get_value()) == 7.0).any() and not (exported.experts.down == 7.0).any()


def test_dtypes_of_loaded_weights() -> None:
    """Wider is exact; narrower is refused for matrices, while gates and biases keep theirs."""
    spec = preset("gpt_oss")
    wide = nnx_layer(draw_weights(spec, "bfloat16"), spec)
    assert {array.dtype.name for array in flat(wide.parameters()).values()} == {"float32"}
    with pytest.raises(InvalidInput, match=r"experts\.gate_up must be bfloat16, the layer's param_dtype, got float32"):
        nnx_layer(draw_weights(spec), spec, param_dtype=jnp.bfloat16)
    weights = draw_weights(spec, "bfloat16")
    to_wide = lambda array: array.astype(np.float32)  # noqa: E731
    weights = dataclasses.replace(weights, router=map_arrays(weights.router, to_wide))
    mixed = flat(nnx_layer(weights, spec, param_dtype=jnp.bfloat16).parameters())
    assert {name for name, array in mixed.items() if array.dtype == jnp.float32} == {"gate/kernel", "gate/bias"}


def wrong_weights() -> list[Any]:
    """(what load_weights is given, num_layers, message)"""
    spec = preset("mixtral")
    other_rule = dataclasses.replace(spec, router=RouterSpec(renormalize=False))
    return [
        pytest.param(draw_weights(preset("qwen3_moe")), None, r"d_ff = 40, got 24; .*from_spec", id="sizes"),
        pytest.param(draw_weights(other_rule), None, r"layer with router = RouterSpec.*renormalize=True", id="rule"),
        pytest.param({"wo": 1}, None, r"weights must be LayerWeights, got dict", id="kind"),
        pytest.param([draw_weights(spec)], None, r"weights must be LayerWeights, got list", id="list for one"),
        pytest.param(draw_weights(spec), 2, r"iterable of 2 LayerWeights, got one LayerWeights", id="one for a stack"),
        pytest.param([draw_weights(spec)], 2, r"num_layers = 2 layers, got 1", id="too few"),
        pytest.param([draw_weights(spec)] * 3, 2, r"num_layers = 2 layers, got 3", id="too many"),
        pytest.param(
            [draw_weights(spec, "bfloat16"), {}], 2, r"weights must be LayerWeights, got dict", id="kind in a stack"
        ),
    ]


@pytest.mark.parametrize(("weights", "num_layers", "message"), wrong_weights())
def test_wrong_weights_are_refused(weights: Any, num_layers: int | None, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        nnx_layer(weights, preset("mixtral"), num_layers=num_layers)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_layer_from_weights_keeps_their_storage(dtype: str) -> None:
    weights = draw_weights(preset("qwen2_moe"), dtype)
    exported = nnx.MoE.from_weights(weights).export_weights()
    assert isinstance(exported, LayerWeights) and exported.storage == Storage("out_in", "halves", "in_out")
    same_arrays(convert_weights(exported, HUGGING_FACE), weights)
    with pytest.raises(InvalidInput, match=r"weights must be LayerWeights, got list"):
        nnx.MoE.from_weights([weights])  # type: ignore[arg-type]


def test_weights_are_taken_over_when_asked() -> None:
    weights = draw_weights(preset("mixtral"))
    raw = np.empty(weights.experts.down.nbytes + 64, np.uint8)
    start = -raw.ctypes.data % 64
    down = raw[start : start + weights.experts.down.nbytes].view(np.float32).reshape(weights.experts.down.shape)
    down[...] = weights.experts.down
    weights = dataclasses.replace(weights, experts=dataclasses.replace(weights.experts, down=down))
    for copy in (True, False):
        with jax.default_device(jax.devices("cpu")[0]):
            held = nnx.MoE.from_weights(weights, copy=copy).parameters()["wo"]
        assert np.shares_memory(np.asarray(held), down) != copy and (np.asarray(held) == down).all()


def test_what_weights_do_not_depend_on_may_differ() -> None:
    spec = dataclasses.replace(preset("mixtral"), capacity_factor=1.5, logits_dtype="bfloat16")
    nnx_layer(draw_weights(preset("mixtral")), spec)


def test_constructors() -> None:
    """Positional sizes and options by name in both flavours; wrong ones are refused where they are written."""
    options: dict[str, Any] = {"router": RouterSpec(renormalize=True), "capacity_factor": 2.0, "router_bias": True}
    module = linen.MoE(D, F, E, 2, **options)
    layer = flax_nnx.eval_shape(lambda: nnx.MoE(D, F, E, 2, **options, rngs=flax_nnx.Rngs(0)))
    assert module.spec == layer.spec == MoELayerSpec(D, F, E, 2, **options)
    with pytest.raises(InvalidInput, match=r"bias is no option of a layer; MoELayerSpec has .*router_bias"):
        nnx.MoE(D, F, E, 2, bias=True, rngs=flax_nnx.Rngs(0))
    with pytest.raises(InvalidInput, match=r"top_k must be at most num_experts = 4, got 5"):
        linen.MoE(D, F, E, 5)
    with pytest.raises(InvalidInput, match=r"num_layers must be an integer of at least 1, got 0"):
        linen.MoE(D, F, E, 2, num_layers=0)


def test_missing_parameters_are_named() -> None:
    x = jnp.ones((2, D))
    with pytest.raises(InvalidInput, match=r"parameters must hold gate/kernel, got bias in gate"):
        layers.forward({"gate": {"bias": x}, "wo": x}, x, MoELayerSpec(D, F, E, 2))
