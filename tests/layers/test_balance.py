"""Load-balancing losses of other formulas from MoEAux, against their libraries' own, in both front-ends."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")

import moe_jax.layers
import moe_torch
from moe_core.errors import InvalidInput
from moe_core.ops.routing.reference import route
from moe_core.ops.routing.reference_backward import route_backward, router_losses, router_losses_backward
from moe_core.specs import RouterSpec
from moe_torch import MoE
from moe_torch.layers import losses as torch_losses
from tests.support.strategies import low_logits

B, S, E, K = 3, 7, 8, 2


def drawn(seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """logits `[B, S, E]`, and ids `[B, S, K]` that a softmax chooses."""
    logits = np.random.default_rng(seed).standard_normal((B, S, E)).astype(np.float32) * 2
    return logits, np.argsort(-logits, axis=-1)[..., :K].astype(np.int32)


def both(logits: np.ndarray, ids: np.ndarray, **options: Any) -> tuple[float, np.ndarray]:
    """(loss, gradient) by torch, after comparing them with JAX's."""
    leaf = torch.from_numpy(logits).requires_grad_()
    for_torch = {key: torch.from_numpy(value) if key == "token_mask" else value for key, value in options.items()}
    loss = moe_torch.load_balance_loss(leaf, torch.from_numpy(ids), **for_torch)
    loss.backward()
    assert leaf.grad is not None
    other = jax.value_and_grad(lambda logits: moe_jax.layers.load_balance_loss(logits, ids, **options))
    value, gradient = jax.jit(other)(logits)
    np.testing.assert_allclose(value, loss.detach().numpy(), rtol=1e-6)
    # A gradient of softmax is a difference of numbers up to 0.1: a few units in their last place remain.
    np.testing.assert_allclose(gradient, leaf.grad.numpy(), rtol=1e-4, atol=1e-7)
    return loss.item(), leaf.grad.numpy()


def maxtext(logits: Any, top_k_indices: np.ndarray) -> Any:
    """MaxText's formula (its moe.py, `load_balance_loss`) before its weight: densities of each sequence, then means."""
    density = jax.nn.one_hot(top_k_indices, E).sum(axis=2).mean(axis=1) / K
    density_of_scores = jax.nn.softmax(logits, axis=-1).mean(axis=1)
    return (density * density_of_scores).mean() * E**2


def test_maxtext() -> None:
    logits, ids = drawn()
    found, gradient = both(logits, ids)
    expected, slope = jax.value_and_grad(maxtext)(logits, ids)
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    np.testing.assert_allclose(gradient, slope, rtol=1e-4, atol=1e-7)
    whole, _ = both(logits.reshape(-1, E), ids.reshape(-1, K))
    assert abs(whole - found) > 1e-3  # Tokens of a sequence by themselves are another loss.


@pytest.mark.parametrize("masked", [False, True])
def test_hugging_face(masked: bool) -> None:
    """Its own function, over the tokens of two layers."""
    mixtral = pytest.importorskip("transformers.models.mixtral.modeling_mixtral")
    mask = np.ones((B, S), np.int64)
    mask[1, 4:] = 0 if masked else 1
    layers = [drawn(seed) for seed in (0, 1)]
    logits, ids = (np.concatenate([part.reshape(B * S, -1) for part in parts]) for parts in zip(*layers, strict=True))
    leaves = tuple(torch.from_numpy(logits.reshape(-1, E)).reshape(2, -1, E).requires_grad_().unbind())
    expected = mixtral.load_balancing_loss_func(leaves, E, K, torch.from_numpy(mask) if masked else None)
    found, _ = both(logits, ids, scale=float(K), token_mask=np.tile(mask.reshape(-1), 2) == 1)
    np.testing.assert_allclose(found, expected.item(), rtol=1e-6)


def test_each_sequence_is_a_call_of_the_layer_by_itself() -> None:
    """The layer's own loss, sequence by sequence; without tokens a sequence has no say."""
    logits, ids = drawn(2)
    logits[0, 1] = -np.inf
    mask = np.arange(S) < np.array([S, 3, 0])[:, None]
    for scoring in ("softmax", "sigmoid", "sqrt_softplus"):
        losses = []
        for row in range(2):
            counts = np.bincount(ids[row][mask[row]].reshape(-1), minlength=E)
            losses.append(router_losses(logits[row], counts, mask[row], spec=RouterSpec(K, scoring=scoring))[0])
        wild = np.where(mask[..., None], logits, np.nan).astype(np.float32)
        found, gradient = both(wild, ids, scoring=scoring, token_mask=mask, scale=0.5)
        np.testing.assert_allclose(found, 0.5 * np.mean(losses), rtol=1e-5)
        assert not gradient[~mask].any() and np.isfinite(gradient).all()


@pytest.mark.parametrize("low", [-50.0, -100.0, -1e4])
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid", "sqrt_softplus"])
def test_very_negative_logits_have_their_gradient(scoring: str, low: float) -> None:
    logits = low_logits(low)
    ids = np.tile(np.array([0, 3], np.int32), (len(logits), 1))
    counts = np.bincount(ids.reshape(-1), minlength=logits.shape[1])
    _, gradient = both(logits, ids, scoring=scoring)
    expected = router_losses_backward(1.0, None, logits, counts, spec=RouterSpec(2, scoring=scoring))
    np.testing.assert_allclose(gradient, expected, rtol=1e-4, atol=1e-7)


def test_ids_without_an_expert_count_nowhere() -> None:
    logits, ids = drawn()
    ids[0, 0, 1], ids[1, 2, 0], ids[2, 1, 1] = -1, E, -7
    found, _ = both(logits, ids)
    shares = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    counts = np.stack([np.bincount(row[(row >= 0) & (row < E)], minlength=E) for row in ids.reshape(B, -1)])
    np.testing.assert_allclose(found, (E * counts / (S * K) * shares.mean(1)).sum(-1).mean(), rtol=1e-5)


@pytest.mark.parametrize("framework", ["torch", "nnx", "linen"])
def test_layers_give_logits(framework: str) -> None:
    """The layer's own loss is what the function gives of its MoEAux; its gradient reaches the router."""
    x = np.random.default_rng(0).standard_normal((B, S, 16)).astype(np.float32)
    layer = MoE(16, 8, E, K)
    if framework == "torch":
        _, aux = layer(torch.from_numpy(x), return_aux=True)
        loss = moe_torch.load_balance_loss(aux.logits.view(B, S, E), aux.ids.view(B, S, K), scale=2.0)
        expected = aux.load_balance_loss.item()
        again = moe_torch.load_balance_loss(aux.logits, aux.ids).item()
        (gradient,) = torch.autograd.grad(loss, [layer.router.weight])
    else:
        module = pytest.importorskip(f"moe_jax.{framework}")
        weights = layer.export_weights()
        spec = weights.layer_spec()
        if framework == "nnx":
            run = lambda parameters: moe_jax.layers.forward(parameters, x, spec, return_aux=True)[1]  # noqa: E731
            parameters = module.MoE.from_weights(weights).parameters()
        else:
            stated = module.MoE.from_spec(spec)
            parameters = stated.load_weights(weights)["params"]
            run = lambda parameters: stated.apply({"params": parameters}, x, return_aux=True)[1]  # noqa: E731
        aux = run(parameters)
        expected = aux.load_balance_loss
        again = module.load_balance_loss(aux.logits, aux.ids)

        def loss_of(parameters: Any) -> Any:
            aux = run(parameters)
            return module.load_balance_loss(aux.logits.reshape(B, S, E), aux.ids.reshape(B, S, K), scale=2.0)

        gradient = jax.grad(loss_of)(parameters)["gate"]["kernel"]
    np.testing.assert_allclose(again, expected, rtol=1e-6)
    assert np.isfinite(np.asarray(gradient)).all() and np.asarray(gradient).any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logits": np.zeros((S, E), np.float16)}, "logits must be float32"),
        ({"ids": np.zeros((S + 1, K), np.int32)}, "ids must be int32 .7, 'K'."),
        ({"scoring": "softmaxx"}, "scoring must be"),
        ({"scale": float("nan")}, "scale must be"),
        ({"token_mask": np.zeros(S, np.int32)}, "token_mask must be bool .7."),
    ],
)
def test_wrong_arguments(change: dict[str, Any], message: str) -> None:
    given = {"logits": np.zeros((S, E), np.float32), "ids": np.zeros((S, K), np.int32)} | change
    with pytest.raises(InvalidInput, match=message):
        moe_torch.load_balance_loss(
            **{key: torch.from_numpy(value) if isinstance(value, np.ndarray) else value for key, value in given.items()}
        )
    if "logits" not in change:
        with pytest.raises(InvalidInput, match=message):
            moe_jax.layers.load_balance_loss(**given)


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_losses_and_gradients_of_bounded_logits(scoring: str) -> None:
    """Both front-ends' losses are the core's, whose gradients are differences of float64."""
    router = RouterSpec(K, scoring, renormalize=True, softcap=1.5, logit_scale=0.5)
    if scoring == "sigmoid":
        router = dataclasses.replace(router, epsilon=0.25)
    logits, counts = drawn()[0][0].astype(np.float64), np.arange(E, dtype=np.int32)
    ids, _ = route(logits, spec=router)
    d_weights = np.random.default_rng(1).standard_normal((S, K))
    balance, z = router_losses(logits, counts, spec=router)
    by_torch = torch_losses.router_losses(torch.from_numpy(logits), torch.from_numpy(counts), None, router)
    np.testing.assert_allclose([float(one) for one in by_torch], [balance, z], rtol=1e-6)
    by_jax = moe_jax.layers.router_losses(jax.numpy.asarray(logits, "float32"), jax.numpy.asarray(counts), spec=router)
    np.testing.assert_allclose(by_jax, [balance, z], rtol=1e-5)

    def total(logits: np.ndarray) -> float:
        balance, z = router_losses(logits, counts, spec=router)
        return float((route(logits, given=ids, spec=router)[1] * d_weights).sum() + 0.8 * balance - 0.3 * z)

    found = route_backward(d_weights, logits, ids, spec=router)
    found += router_losses_backward(0.8, -0.3, logits, counts, spec=router)
    for place in np.ndindex(logits.shape):
        step = np.zeros_like(logits)
        step[place] = 1e-6
        assert abs((total(logits + step) - total(logits - step)) / 2e-6 - found[place]) < 1e-7
