"""MaxText's and Tunix's layers, replaced by ours."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType

from moe_core.checkpoint.maxtext import from_maxtext
from moe_core.errors import Unsupported
from moe_jax.layers import Activation, RouterSpec
from moe_jax.maxtext import RoutedMoE, spec_of
from moe_jax.tunix import MoELayer
from tests.support.jax import running_on

MIXTRAL = {
    "emb_dim": 8,
    "mlp_activations": ["silu", "linear"],
    "decoder_block": "mixtral",
    "model_name": "mixtral-8x7b",
}
DEEPSEEK = MIXTRAL | {
    **{
        "decoder_block": "deepseek",
        "model_name": "deepseek3-671b",
        "routed_score_func": "sigmoid",
        "routed_bias": True,
    },
    **{"routed_scaling_factor": 2.5, "n_routing_groups": 2, "topk_routing_group": 1, "routed_bias_update_rate": 0.01},
}
GPT_OSS = MIXTRAL | {
    **{"decoder_block": "gpt_oss", "model_name": "gpt-oss-20b", "mlp_activations": ["sigmoid", "linear"]},
    **{"mlp_activations_limit": 7.0, "routed_bias": True, "mlp_bias": True},
}


def draw(key: jax.Array, shape: Any, dtype: Any, in_axis: Any, out_axis: Any) -> jax.Array:
    assert (*in_axis, *out_axis) == (0, 1)
    return jax.random.normal(key, shape, dtype) / 4


def make(config: dict[str, Any]) -> Any:
    mesh = jax.make_mesh((1,), ("expert",), devices=jax.devices("cpu")[:1])
    return RoutedMoE(SimpleNamespace(**config), 4, 2, mesh, draw, ("embed", None), nnx.Rngs(0), intermediate_dim=12)


def test_specs_of_configs() -> None:
    def of(config: dict[str, Any], **options: Any) -> Any:
        return spec_of(SimpleNamespace(**config | options), 4, 2, 12)

    assert of(MIXTRAL).router == RouterSpec(2, order="topk_then_softmax") and of(MIXTRAL).d_ff == 12
    assert of(MIXTRAL, prefuse_moe_weights=True).experts.gate_layout == "halves"
    assert of(MIXTRAL, mlp_activations=["gelu", "linear"]).experts.activation == Activation(
        "gelu_tanh", gate_layout="separate"
    )
    assert of(DEEPSEEK).router == RouterSpec(
        2, scoring="sigmoid", renormalize=True, epsilon=1e-20, scale=2.5, num_groups=2, topk_group=1, group_score="pair"
    )
    assert of(DEEPSEEK).correction_bias and not of(DEEPSEEK).router_bias
    deepseek2 = of(DEEPSEEK, model_name="deepseek2-16b", routed_score_func="softmax", routed_bias=False)
    assert deepseek2.router == RouterSpec(2, scale=2.5)
    assert of(GPT_OSS).router_bias and of(GPT_OSS).experts.bias
    assert of(GPT_OSS).experts.activation == Activation("swiglu_oai", limit=7.0, gate_layout="separate")


@pytest.mark.parametrize("config", [MIXTRAL, DEEPSEEK, GPT_OSS], ids=lambda config: config["model_name"])
def test_names_checkpoints_losses_and_updates(config: dict[str, Any]) -> None:
    with running_on("reference"):
        layer = make(config | {"load_balance_loss_weight": 0.5})
        x = jnp.asarray(np.random.default_rng(0).standard_normal((2, 6, 8), np.float32))
        y, loss, updates = layer(x)
        tree = nnx.to_pure_dict(nnx.state(layer))
        weights = from_maxtext(tree, layer.spec)
        for name, array in weights.named().items():
            np.testing.assert_array_equal(array, layer.export_weights().named()[name])
        again, aux = type(layer).__mro__[1].__call__(layer, x, return_aux=True)  # the NNX layer's call
        np.testing.assert_array_equal(y, again)
        assert type(layer.gate).__name__ == "GateLogit" and not hasattr(layer.gate, "correction_bias")
        scores = jax.nn.sigmoid(aux.logits) if config is DEEPSEEK else aux.logits
        probabilities = jax.nn.softmax(scores.reshape(2, 6, 4)).mean(axis=1)
        density = jax.nn.one_hot(aux.ids.reshape(2, 12), 4).mean(axis=1)
        np.testing.assert_allclose(loss, 0.5 * (density * probabilities).mean() * 16, rtol=1e-6)
        if config is DEEPSEEK:
            np.testing.assert_allclose(updates, 0.01 * np.sign(6 - np.asarray(aux.tokens_per_expert)))
            layer.gate.bias.set_value(layer.gate.bias.get_value() + 10 * jnp.arange(4))
            forced = layer(x, forced_routed_experts=aux.ids.reshape(2, 6, 2))[0]
            np.testing.assert_allclose(forced, y, rtol=1e-6)
            assert not np.array_equal(layer(x)[0], y)
        else:
            assert updates is None
            np.testing.assert_allclose(layer(x, gate_inputs=x)[0], y, atol=1e-6)


@pytest.mark.parametrize(
    "options",
    [
        *({name: value} for name, value in (("capacity_factor", 1.0), ("use_random_routing", True))),
        *({name: value} for name, value in (("decoder_block", "llama4"), ("attention", "vllm_rpa"))),
        *({name: value} for name, value in (("mlp_activations", ["relu", "linear"]), ("routed_score_func", "sigmoid"))),
        *({name: value} for name, value in (("mlp_activations", ["sigmoid", "linear"]), ("te_moe_block", True))),
        {"prefuse_moe_weights": True, "mlp_bias": True},
        {"padded_base_moe_mlp_dim": 128},
        {"moe_use_megatron_seq_aux_loss": True},
    ],
    ids=str,
)
def test_options_that_change_numbers_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(Unsupported, match=f"{next(iter(options))} must not be .*; use MaxText's RoutedMoE"):
        spec_of(SimpleNamespace(**MIXTRAL | options), 4, 2, 12)


D, F, E, K = 8, 12, 4, 2
AXES = SimpleNamespace(exp_weight_edf=("fsdp", None, "tp"), exp_weight_efd=("fsdp", "tp", None))
CONFIG = SimpleNamespace(
    **{"embed_dim": D, "hidden_dim": F, "num_experts": E, "num_experts_per_tok": K, "shd_config": AXES},
    **{"dtype": jnp.float32, "param_dtype": jnp.float32},
)


def test_parameters_and_results() -> None:
    """Names and shapes of checkpoints, the sum over the chosen experts, and the same on devices that share them."""
    with running_on("reference"):
        layer = MoELayer(CONFIG, rngs=nnx.Rngs(0))
        x = jnp.asarray(np.random.default_rng(1).standard_normal((4, 3, D), np.float32))
        state = nnx.to_pure_dict(nnx.state(layer))
        shapes = {"gate_proj": (E, D, F), "up_proj": (E, D, F), "down_proj": (E, F, D)}
        assert jax.tree.map(jnp.shape, state) == shapes | {"router": {"kernel": (D, E)}}

        @jax.jit
        def plain(state: Any, x: jax.Array) -> jax.Array:
            weights, ids = jax.lax.top_k(jax.nn.softmax(x @ state["router"]["kernel"]), K)
            hidden = jnp.einsum("btd,edf->btef", x, state["gate_proj"])
            hidden = jax.nn.silu(hidden) * jnp.einsum("btd,edf->btef", x, state["up_proj"])
            every = jnp.einsum("btef,efd->bted", hidden, state["down_proj"])
            chosen = jnp.take_along_axis(every, ids[..., None], axis=2)
            return (chosen * (weights / weights.sum(-1, keepdims=True))[..., None]).sum(2)

        y = layer(x, use_megablox=False)
        np.testing.assert_allclose(y, plain(state, x), rtol=1e-3, atol=1e-9)
        mesh = jax.make_mesh((2, 1), ("fsdp", "tp"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices("cpu")[:2])
        with jax.set_mesh(mesh):
            text = jax.jit(lambda layer, x: layer(x)).lower(layer, x).as_text()
            np.testing.assert_array_equal(jax.jit(lambda layer, x: layer(x))(layer, x), y)
        split = text.partition("in_shardings=")[2].partition("out_shardings=")[0]
        assert split.count('"fsdp"') == 4, "x and three matrices"
