"""What the tests of the Flax layers share: presets at tiny sizes, drawn weights, the layer in NumPy."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from flax import nnx as flax_nnx

from moe_core.checkpoint.presets import layer_spec_from_config
from moe_core.layers import HUGGING_FACE, MAXTEXT, LayerWeights, MoEAux, MoELayerSpec, Storage, convert_weights
from moe_core.ops.moe.reference.forward import moe_stages
from moe_core.ops.router.reference import router
from moe_core.ops.routing.reference import route
from moe_core.ops.routing.reference_backward import router_losses
from moe_core.specs import LogitsSpec
from moe_core.specs.operands import ExpertWeights, RouterWeights, SharedExpert, TopK
from moe_jax import linen, nnx
from tests.support.jax import to_jax
from tests.support.layers import draw_weights as any_weights
from tests.support.layers import draw_x, drop_slots

_SIZES = {"num_hidden_layers": 2, "hidden_size": 48, "hidden_act": "silu", "num_experts_per_tok": 2}
CONFIGS: dict[str, dict[str, Any]] = {
    "mixtral": {**_SIZES, "intermediate_size": 40, "num_local_experts": 4},
    "qwen3_moe": {**_SIZES, "moe_intermediate_size": 24, "num_experts": 8, "norm_topk_prob": True},
    "gpt_oss": {**_SIZES, "intermediate_size": 48, "num_local_experts": 6},
    "deepseek_v3": {**_SIZES, "moe_intermediate_size": 24, "n_routed_experts": 8, "n_shared_experts": 2,
        "norm_topk_prob": True, "routed_scaling_factor": 2.5, "first_k_dense_replace": 0, "n_group": 4,
        "topk_group": 2},
    "qwen2_moe": {**_SIZES, "moe_intermediate_size": 24, "num_experts": 5, "norm_topk_prob": False,
        "shared_expert_intermediate_size": 40},
}  # fmt: skip


def preset(name: str) -> MoELayerSpec:
    """The layer of a family, tiny."""
    return layer_spec_from_config({"model_type": name, **CONFIGS[name]})


def draw_weights(
    spec: MoELayerSpec, dtype: str = "float32", *, seed: int = 0, storage: Storage = HUGGING_FACE
) -> LayerWeights:
    """Weights as a checkpoint would store them."""
    return any_weights(spec, seed, dtype, storage)


def draw_tokens(spec: MoELayerSpec, dtype: str = "float32", *shape: int, seed: int = 1) -> np.ndarray:
    """x `[*shape, D]`."""
    return draw_x(shape, seed, dtype, spec.d_model)


def nnx_layer(weights: Any, spec: MoELayerSpec, **options: Any) -> nnx.MoE:
    """An NNX layer that holds the weights (in float32 unless param_dtype says otherwise); nothing is drawn for it."""
    layer = flax_nnx.eval_shape(lambda: nnx.MoE.from_spec(spec, **options, rngs=flax_nnx.Rngs(0)))
    layer.load_weights(weights)
    return layer


def linen_layer(weights: Any, spec: MoELayerSpec, **options: Any) -> tuple[linen.MoE, dict[str, Any]]:
    """A Linen layer, and variables that hold the weights (in float32 unless param_dtype says otherwise)."""
    layer = linen.MoE.from_spec(spec, **options)
    return layer, layer.load_weights(weights)


def assert_same_bits(found: LayerWeights, expected: LayerWeights) -> None:
    """The same layer: equal tags and bits, `expected` brought to the storage of `found`."""
    expected = convert_weights(expected, found.storage)
    assert found.layer_spec() == expected.layer_spec()
    assert list(found.named()) == list(expected.named())
    for name, array in expected.named().items():
        assert found.named()[name].dtype == array.dtype, name
        assert found.named()[name].tobytes() == array.tobytes(), name


class Bundles(NamedTuple):
    """A layer's weights as the ops take them."""

    experts: ExpertWeights
    router: RouterWeights
    shared: SharedExpert | None


def stored_for_flax(weights: LayerWeights, spec: MoELayerSpec) -> Bundles:
    """The weights on the default device in the storage of a Flax layer of spec."""
    stored = convert_weights(weights, spec.storage(MAXTEXT))
    return to_jax(Bundles(stored.experts, stored.router, stored.shared))


def in_numpy(
    x: np.ndarray, weights: LayerWeights, spec: MoELayerSpec, token_mask: np.ndarray | None = None
) -> tuple[np.ndarray, MoEAux]:
    """(y, aux) of the layer by the NumPy twins, from weights in any storage."""
    tokens, mask = x.reshape(-1, spec.d_model), None if token_mask is None else token_mask.reshape(-1)
    chosen, own = weights.router, weights.spec
    logits_spec = LogitsSpec(own.router_weight_layout, spec.logits_dtype)
    logits = router(tokens, chosen.weight, chosen.bias, spec=logits_spec)
    ids, slot_weights = route(logits, chosen.correction_bias, mask, spec=spec.router)
    counts = np.bincount(ids[ids >= 0], minlength=spec.num_experts).astype(np.int32)
    kept = drop_slots(ids, spec.capacity(len(tokens)))
    own = dataclasses.replace(own, router=None, logits_dtype="float32")
    stages = moe_stages(tokens, weights.experts, TopK(kept, slot_weights), own, shared=weights.shared)
    losses = router_losses(logits, counts, mask, spec=spec.router)
    aux = MoEAux(*losses, counts, kept, slot_weights, np.zeros(1, np.int32), logits)
    return stages["output"].reshape(x.shape), aux


def as_numpy(aux: MoEAux) -> MoEAux:
    return MoEAux(*(np.asarray(value) for value in aux))


def jax_array(array: np.ndarray | None) -> Any:
    return None if array is None else jnp.asarray(array)
