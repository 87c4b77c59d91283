"""Layers with token rounding: torch and Flax alike in training, plain top-k in evaluation, refusals."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("flax")

import jax
import jax.numpy as jnp
from flax import nnx

import moe_jax.linen
import moe_jax.nnx
import moe_torch
from moe_core import InvalidInput, Unsupported
from moe_core.layers import MoELayerSpec, SharedExpertsSpec
from moe_core.specs import RouterSpec, TokenRounding

pytestmark = pytest.mark.usefixtures("reference_engine_of_torch")
T, D, F, E, K = 64, 16, 24, 6, 2
ROUNDED = MoELayerSpec(
    D, F, E, K, RouterSpec(renormalize=True), shared_experts=SharedExpertsSpec(8), token_rounding=TokenRounding(16)
)
PLAIN = dataclasses.replace(ROUNDED, token_rounding=None)
X = np.random.default_rng(0).standard_normal((2, T // 2, D), np.float32)


def torch_layer(spec: MoELayerSpec = ROUNDED) -> Any:
    torch.manual_seed(0)
    return moe_torch.MoE.from_spec(spec)


def test_training_rounds_and_evaluation_does_not() -> None:
    layer, plain = torch_layer(), torch_layer(PLAIN)
    x = torch.from_numpy(X)
    y, aux = layer(x, return_aux=True)
    sizes = np.bincount(aux.ids[aux.ids >= 0], minlength=E)
    assert aux.ids.shape == (T, 2 * K) and not (sizes % 16).any() and aux.invalid_ids.tolist() == [0]
    wanted, plain_aux = plain(x, return_aux=True)
    assert torch.equal(aux.tokens_per_expert, plain_aux.tokens_per_expert) and (aux.tokens_per_expert % 16).any()
    assert aux.load_balance_loss == plain_aux.load_balance_loss and not torch.equal(y, wanted)
    assert torch.equal(layer.eval()(x), wanted) and torch.equal(layer.train()(x), y)
    assert "token_rounding=nearest 16" in repr(layer)


def test_flax_layers_evaluate_without_rounding() -> None:
    layer = torch_layer()
    x, weights = jnp.asarray(X), layer.export_weights()
    rounded = layer(torch.from_numpy(X)).detach()
    wanted = layer.eval()(torch.from_numpy(X)).detach()
    own = moe_jax.nnx.MoE.from_spec(ROUNDED, rngs=nnx.Rngs(0))
    own.load_weights(weights)
    own.eval()
    np.testing.assert_allclose(np.asarray(own(x)), wanted, atol=1e-6)
    own.train()
    found, aux = own(x, return_aux=True)
    np.testing.assert_allclose(np.asarray(found), rounded, atol=1e-6)
    assert aux.invalid_ids.tolist() == [0]
    linen = moe_jax.linen.MoE.from_spec(ROUNDED)
    found = linen.clone(token_rounding=None).apply(linen.load_weights(weights), x)
    np.testing.assert_allclose(np.asarray(found), wanted, atol=1e-6)


def test_a_hook_and_a_mask() -> None:
    """A part with a call of its own gets the wide table; masked tokens are never added."""
    layer, seen = torch_layer(), []
    layer.experts.register_forward_pre_hook(lambda module, arguments: seen.append(arguments[1]))
    x, mask = torch.from_numpy(X), torch.arange(T).view(2, -1) % 9 != 4
    y, aux = layer(x, mask, return_aux=True)
    assert seen[0].shape == (T, 2 * K) and torch.equal(seen[0], aux.ids)
    assert (aux.ids[~mask.view(-1)] == -1).all()
    np.testing.assert_allclose(y.detach(), torch_layer()(x, mask).detach(), atol=1e-6)


def test_plans_of_training_show_the_rounding() -> None:
    text = torch_layer().explain(T, training=True)
    assert "TokenRounding(tile=16, mode='nearest', candidates=None): of training alone" in text
    assert "route_rounded_backward" in text and "rounding" not in torch_layer().explain(T)
    assert "route_rounded" in moe_jax.nnx.MoE.from_spec(ROUNDED, rngs=nnx.Rngs(0)).explain(T, training=True)


@pytest.mark.parametrize("options, message", [
    ({"router": RouterSpec(slot_order="expert")}, "token rounding keeps slots by score"),
    ({"token_rounding": TokenRounding(candidates=1)}, "candidates must be from top_k = 2 to num_experts = 6, got 1"),
    ({"token_rounding": 128}, "token_rounding must be"),
], ids=str)  # fmt: skip
def test_contradictions(options: dict[str, Any], message: str) -> None:
    with pytest.raises((InvalidInput, Unsupported), match=message):
        dataclasses.replace(ROUNDED, **options)


def test_calls_that_cannot_be_rounded() -> None:
    x, ids = torch.from_numpy(X), torch.zeros(2, T // 2, K, dtype=torch.int32)
    with pytest.raises(InvalidInput, match="expert_ids must be None for a layer with token_rounding in training"):
        torch_layer()(x, expert_ids=ids)
    torch_layer().eval()(x, expert_ids=ids + torch.arange(K, dtype=torch.int32))
    own = moe_jax.nnx.MoE.from_spec(ROUNDED, rngs=nnx.Rngs(0))
    with pytest.raises(InvalidInput, match="expert_ids must be None for a layer with token_rounding in training"):
        own(jnp.asarray(X), expert_ids=jnp.asarray(ids.numpy()))
    with pytest.raises(InvalidInput, match="tile must be at most num_tokens = 4, got 16"):
        torch_layer()(x[0, :4])


def test_expert_parallelism_is_refused_by_name() -> None:
    own = moe_jax.nnx.MoE.from_spec(ROUNDED, rngs=nnx.Rngs(0))
    mesh = jax.make_mesh((1,), ("ep",), axis_types=(jax.sharding.AxisType.Auto,))
    own.parallelize(mesh)
    with jax.set_mesh(mesh), pytest.raises(Unsupported, match="token_rounding is not there for a layer on several"):
        own(jnp.asarray(X))
