"""Routers that go by other rows than the experts, or by ids that something else chose: torch and JAX."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")

import moe_jax.layers
import moe_jax.ops
import moe_torch
from moe_core.errors import InvalidInput
from moe_core.ops.routing import reference, reference_backward
from moe_core.specs import RouterSpec
from moe_jax.layers import RoutedBy
from moe_torch import MoE, MoELayerSpec, SharedExpertsSpec
from tests.support.jax import on_a_cpu as on_a_cpu
from tests.support.layer_reference import layer_stages
from tests.support.torch import REAL_KERNELS, running_on, to_numpy, to_torch

T, D, E, K = 9, 16, 12, 3
ROUTERS = (
    RouterSpec(K),
    RouterSpec(K, renormalize=True, scale=2.5),
    RouterSpec(K, order="topk_then_softmax"),
    RouterSpec(K, scoring="sigmoid", num_groups=4, topk_group=2),
    RouterSpec(K, scoring="sqrt_softplus", renormalize=True, slot_order="expert"),
)
SPEC = MoELayerSpec(D, 8, E, K, RouterSpec(renormalize=True), shared_experts=SharedExpertsSpec(8))


def drawn() -> tuple[np.ndarray, np.ndarray]:
    """logits and distinct ids, two tokens of which have an id without an expert."""
    rng = np.random.default_rng(0)
    ids = np.stack([rng.permutation(E)[:K] for _ in range(T)]).astype(np.int32)
    ids[3, 1], ids[4, 0] = -1, E
    return rng.standard_normal((T, E)).astype(np.float32), ids


@pytest.mark.parametrize("spec", ROUTERS)
def test_weights_of_given_ids(spec: RouterSpec) -> None:
    """The reference, the real kernels and both front-ends against plain sums; the gradient of the ids' logits."""
    logits, ids = drawn()
    mask = np.arange(T) != 6
    scores = logits if spec.order == "topk_then_softmax" else reference.scores_of(logits, spec.scoring)
    wanted = np.take_along_axis(scores, np.clip(ids, 0, E - 1), -1).astype(np.float64)
    if spec.order == "topk_then_softmax":
        wanted = np.exp(wanted) / np.exp(wanted).sum(-1, keepdims=True)
    wanted = spec.scale * (wanted / wanted.sum(-1, keepdims=True) if spec.renormalize else wanted)
    gone = ~mask | (ids < 0).any(-1) | (ids >= E).any(-1)
    wanted[gone] = 0
    d_weights = np.random.default_rng(1).standard_normal((T, K)).astype(np.float32)
    expected = reference_backward.route_backward(d_weights, logits, np.where(gone[:, None], -1, ids), spec=spec)
    for engine in ("reference", REAL_KERNELS):
        with running_on(engine) as device:
            leaf = to_torch(logits, device).requires_grad_()
            found = moe_torch.route(leaf, spec, token_mask=to_torch(mask, device), ids=to_torch(ids, device))
            found.weights.backward(to_torch(d_weights, device))
        np.testing.assert_array_equal(to_numpy(found.ids), np.where(gone[:, None], -1, ids))
        np.testing.assert_allclose(to_numpy(found.weights), wanted, rtol=1e-5, atol=1e-7)
        np.testing.assert_allclose(to_numpy(leaf.grad), expected, rtol=1e-4, atol=1e-6)
    by_torch = moe_torch.route(torch.from_numpy(logits), spec, ids=torch.from_numpy(ids)).weights
    run = lambda logits: moe_jax.ops.route(logits, spec, ids=ids).weights  # noqa: E731
    np.testing.assert_array_equal(jax.jit(run)(logits), by_torch)
    slope = jax.grad(lambda logits: (run(logits) * d_weights)[mask].sum())(logits)
    np.testing.assert_allclose(slope, expected, rtol=1e-4, atol=1e-6)


def torch_layer() -> MoE:
    torch.manual_seed(0)
    return MoE.from_spec(SPEC)


def inputs() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(2)
    x, other = (rng.standard_normal((3, 5, D)).astype(np.float32) for _ in range(2))
    return x, other, np.stack([rng.permutation(E)[:K] for _ in range(15)]).reshape(3, 5, K).astype(np.int32)


def test_its_own_choice_is_the_plain_layer() -> None:
    layer, (x, _, _) = torch_layer(), inputs()
    rows = torch.from_numpy(x)
    y, aux = layer(rows, return_aux=True)
    again, of_ids = layer(rows, gate_inputs=rows, expert_ids=aux.ids.view(3, 5, K), return_aux=True)
    torch.testing.assert_close(again, y, rtol=0, atol=0)
    torch.testing.assert_close(of_ids.tokens_per_expert, aux.tokens_per_expert)


def test_ids_without_an_expert_are_counted() -> None:
    layer, (x, _, ids) = torch_layer(), inputs()
    ids[0, 1, 0], ids[2, 2, 2] = -1, E
    _, aux = layer(torch.from_numpy(x), expert_ids=torch.from_numpy(ids), return_aux=True)
    assert aux.invalid_ids.tolist() == [1] and aux.tokens_per_expert.sum() == K * 13
    assert aux.ids[1].tolist() == aux.ids[12].tolist() == [-1] * K
    mask = np.arange(15).reshape(3, 5) != 12  # the ids of masked tokens are in no statistic
    _, aux = layer(torch.from_numpy(x), torch.from_numpy(mask), expert_ids=torch.from_numpy(ids), return_aux=True)
    assert aux.invalid_ids.tolist() == [0] and aux.tokens_per_expert.sum() == K * 13
    nnx = pytest.importorskip("moe_jax.nnx")
    flax_layer = nnx.MoE.from_weights(layer.export_weights())
    assert flax_layer(x, token_mask=mask, expert_ids=ids, return_aux=True)[1].invalid_ids.tolist() == [0]
    assert flax_layer(x, expert_ids=ids, return_aux=True)[1].invalid_ids.tolist() == [1]


def test_the_hash_layers_of_deepseek_v4() -> None:
    """transformers' own router of these layers: ids from its table, weights from its scores."""
    v4 = pytest.importorskip("transformers.models.deepseek_v4.modeling_deepseek_v4")
    names = {"num_experts_per_tok": K, "num_local_experts": E, "n_routed_experts": E, "hidden_size": D}
    names |= {"vocab_size": 20, "routed_scaling_factor": 1.5, "scoring_func": "sqrtsoftplus", "num_experts": E}
    router = v4.DeepseekV4HashRouter(SimpleNamespace(**names))
    torch.manual_seed(0)
    torch.nn.init.normal_(router.weight)
    router.tid2eid.copy_(torch.stack([torch.randperm(E)[:K] for _ in range(20)]))
    x, tokens = torch.randn(2, 5, D), torch.randint(20, (2, 5))
    logits, weights, ids = router(x, tokens)
    spec = MoELayerSpec(D, 8, E, K, RouterSpec(scoring="sqrt_softplus", renormalize=True, scale=1.5))
    layer = MoE.from_spec(spec)
    with torch.no_grad():
        layer.router.weight.copy_(router.weight)
    _, aux = layer(x, expert_ids=router.tid2eid[tokens].int(), return_aux=True)
    torch.testing.assert_close(aux.logits, logits.view(-1, E), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(aux.weights, weights, rtol=1e-4, atol=1e-6)
    assert torch.equal(aux.ids, ids.int())
    slope, expected = (
        torch.autograd.grad(value.square().sum(), weight)[0]
        for value, weight in ((aux.weights, layer.router.weight), (weights, router.weight))
    )
    torch.testing.assert_close(slope, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("engine", ["reference", REAL_KERNELS])
def test_a_table_of_ids_in_both_frameworks(engine: str) -> None:
    nnx, linen = pytest.importorskip("moe_jax.nnx"), pytest.importorskip("moe_jax.linen")
    from tests.support.jax import running_on as jax_running_on

    layer: Any = MoE.from_spec(dataclasses.replace(SPEC, token_table=20))
    table = layer.router.table
    assert (
        table is not None
        and all(len(set(row)) == K for row in table.tolist())
        and set(table.unique().tolist()) == {*range(E)}
    )
    x, tokens = inputs()[0], np.random.default_rng(1).integers(-1, 21, (3, 5))
    with running_on(engine) as device, torch.no_grad():
        layer.router.table.copy_(torch.stack([torch.randperm(E)[:K] for _ in range(20)]))
        assert layer.to(torch.bfloat16).router.table.dtype == torch.int32
        layer = layer.float().to(device)
        y, aux = layer(to_torch(x, device), input_ids=to_torch(tokens, device), return_aux=True)
        weights = layer.export_weights()
    stages = layer_stages(weights, x.reshape(-1, D), input_ids=tokens.ravel())
    np.testing.assert_array_equal(stages["ids"], to_numpy(aux.ids))
    np.testing.assert_allclose(stages["output"], to_numpy(y).reshape(-1, D), rtol=1e-4, atol=1e-5)
    outside = (tokens < 0) | (tokens == 20)
    assert outside.any() and int(aux.invalid_ids) == K * outside.sum()
    with jax_running_on(engine):
        other = nnx.MoE.from_weights(weights)
        assert isinstance(other.gate.table, nnx.TokenTable)
        by_jax, also = jax.jit(lambda layer, x: layer(x, input_ids=tokens, return_aux=True))(other, x)
        np.testing.assert_array_equal(by_jax, to_numpy(y))
        np.testing.assert_array_equal(also.invalid_ids, to_numpy(aux.invalid_ids))
        stack = linen.MoE.from_spec(weights.layer_spec(), num_layers=2)
        variables = stack.load_weights([weights, weights])
        assert variables["router_state"]["gate"]["table"].dtype == np.int32
        of_stack = stack.apply(variables, x, input_ids=tokens, layer_index=1)
        np.testing.assert_array_equal(of_stack, by_jax)
        made = stack.init(jax.random.key(0), x, input_ids=tokens, layer_index=0)
        assert jax.tree.structure(linen.nn.meta.unbox(made)) == jax.tree.structure(variables)


@pytest.mark.parametrize(
    ("table", "options", "message"),
    [
        (0, {"input_ids": np.zeros((3, 5), np.int64)}, "input_ids must be None for a layer without a table"),
        (20, {}, "input_ids or expert_ids must be given for a layer with a table of ids, got neither"),
        (20, {"input_ids": np.zeros((3, 4), np.int64)}, r"input_ids must be .* \(3, 5\), one for each token of x"),
        (20, {"input_ids": np.zeros((3, 5), np.float32)}, r"input_ids must be .* \(3, 5\), one for each token of x"),
    ],
)
def test_wrong_ids_of_tokens(table: int, options: dict[str, np.ndarray], message: str) -> None:
    spec, (x, _, _) = dataclasses.replace(SPEC, token_table=table), inputs()
    with pytest.raises(InvalidInput, match=message):
        MoE.from_spec(spec)(torch.from_numpy(x), **{name: torch.from_numpy(one) for name, one in options.items()})
    parameters = moe_jax.layers.initialize(spec, jax.random.key(0))
    with pytest.raises(InvalidInput, match=message):
        moe_jax.layers.forward(parameters, x, spec, routed_by=RoutedBy(**options))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gate_inputs": np.zeros((3, 4, D), np.float32)}, "gate_inputs must be .* like x"),
        ({"expert_ids": np.zeros((3, 5, K + 1), np.int32)}, "expert_ids must be .*int32"),
        ({"expert_ids": np.zeros((3, 5, K), np.float32)}, "expert_ids must be integers|expert_ids must be .*int32"),
    ],
)
def test_wrong_arguments(options: dict[str, np.ndarray], message: str) -> None:
    layer, (x, _, _) = torch_layer(), inputs()
    with pytest.raises(InvalidInput, match=message):
        layer(torch.from_numpy(x), **{name: torch.from_numpy(array) for name, array in options.items()})
    parameters = moe_jax.layers.initialize(SPEC, jax.random.key(0))
    with pytest.raises(InvalidInput, match=message):
        moe_jax.layers.forward(parameters, x, SPEC, routed_by=RoutedBy(**options))


def test_ids_leave_nothing_to_a_correction_bias() -> None:
    logits, ids = drawn()
    with pytest.raises(InvalidInput, match="correction_bias must be None with ids"):
        moe_torch.route(
            torch.from_numpy(logits), RouterSpec(K), correction_bias=torch.zeros(E), ids=torch.from_numpy(ids)
        )
    with pytest.raises(InvalidInput, match="ids must be"):
        moe_torch.route(torch.from_numpy(logits), RouterSpec(K), ids=torch.from_numpy(ids[:, :2].copy()))
