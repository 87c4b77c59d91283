"""A router's norm and its experts' scales: torch and JAX, bit for bit, against plain sums in float64."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")

import moe_torch
from moe_core.errors import InvalidInput
from moe_core.layers import LayerWeights
from moe_core.ops.moe.reference.forward import moe_stages
from moe_core.parity.tolerance import assert_close
from moe_core.specs import NormSpec, RouterSpec
from moe_torch import MoE, MoELayerSpec, SharedExpertsSpec
from tests.support.jax import on_a_cpu as on_a_cpu
from tests.support.layers import draw_weights, masked_rows, tolerances
from tests.support.torch import REAL_KERNELS, running_on, to_numpy, to_torch

D, E, K = 24, 6, 3
NORM = NormSpec(1e-5, D**-0.5)
SPEC = MoELayerSpec(
    D, 16, E, K, RouterSpec(renormalize=True), shared_experts=SharedExpertsSpec(8), router_norm=NORM, expert_scale=True
)


def weights_of(spec: MoELayerSpec) -> LayerWeights:
    weights = draw_weights(spec, 3)
    weights.router.weight[:] *= 20
    return weights


def plain(weights: LayerWeights, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(ids, weights) of rows x by the formulas, in float64."""
    router: Any = weights.router
    rows = x.astype(np.float64)
    rows = rows / np.sqrt((rows**2).mean(-1, keepdims=True) + NORM.epsilon) * router.norm * NORM.scale
    scores = np.exp(rows @ router.weight.T)
    ids = np.argsort(-scores, axis=-1)[:, :K]
    chosen = np.take_along_axis(scores, ids, -1)
    return ids, chosen / chosen.sum(-1, keepdims=True) * router.expert_scale[ids]


@pytest.mark.parametrize("engine", ["reference", REAL_KERNELS])
def test_forward(engine: str) -> None:
    weights, (x, mask) = weights_of(SPEC), masked_rows(D)
    with running_on(engine) as device, torch.no_grad():
        layer = MoE.from_weights(weights, device=device)
        assert layer.spec.router_norm == NORM and layer.spec.expert_scale
        y, aux = layer(to_torch(x, device), to_torch(mask, device), return_aux=True)
        ids, chosen = plain(weights, x.reshape(-1, D))
        kept = mask.reshape(-1)
        np.testing.assert_array_equal(to_numpy(aux.ids)[kept], ids[kept])
        np.testing.assert_allclose(to_numpy(aux.weights)[kept], chosen[kept], rtol=1e-4)
        assert not to_numpy(aux.weights)[~kept].any() and (to_numpy(aux.ids)[~kept] == -1).all()
        stages = moe_stages(
            x.reshape(-1, D), weights.experts, weights.router, weights.spec, token_mask=kept, shared=weights.shared
        )
        allowed = tolerances(SPEC, "float32")["output"]
        assert_close(to_numpy(y).reshape(-1, D), stages["output"], allowed, label="output")
        for name in ("norm", "expert_scale"):
            wrong = dataclasses.replace(weights.router, **{name: np.ones_like(getattr(weights.router, name))})
            other = MoE.from_weights(dataclasses.replace(weights, router=wrong), device=device)
            assert not torch.allclose(other(to_torch(x, device)), y, atol=1e-3), name


@pytest.mark.parametrize("limit", [None, 1.0])
@pytest.mark.parametrize("engine", ["reference", REAL_KERNELS])
def test_both_frameworks_train_to_the_same_bits(engine: str, limit: float | None) -> None:
    pytest.importorskip("flax")
    from tests.support.training.both import train_both

    ours, theirs = train_both(dataclasses.replace(SPEC, capacity_factor=limit), weights_of(SPEC), engine)
    np.testing.assert_array_equal(theirs.y, ours.y)
    np.testing.assert_array_equal(theirs.d_x, ours.d_x)
    for name in ("router.norm", "router.expert_scale", "router.weight"):
        assert ours.gradients[name].any()
        np.testing.assert_array_equal(theirs.gradients[name], ours.gradients[name], err_msg=name)


def test_gradients_are_derivatives() -> None:
    """In float64, by torch's own check."""
    layer = MoE.from_spec(SPEC, dtype=torch.float64)
    with torch.no_grad():
        layer.router.weight.mul_(5)
        layer.router.norm.normal_()  # pyright: ignore[reportOptionalMemberAccess]
        layer.router.expert_scale.normal_()  # pyright: ignore[reportOptionalMemberAccess]
    x = torch.randn(4, D, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    names = ("router.norm", "router.expert_scale", "router.weight")
    held = [layer.get_parameter(name) for name in names]

    def run(x: Any, *values: Any) -> Any:
        return torch.func.functional_call(layer, dict(zip(names, values, strict=True)), (x,))

    with running_on("reference"):
        assert torch.autograd.gradcheck(run, (x, *held), eps=1e-6, atol=1e-6)


def test_what_layers_do_with_them() -> None:
    layer = MoE.from_spec(SPEC, dtype=torch.float32)
    assert list(layer.state_dict())[:3] == ["router.weight", "router.norm", "router.expert_scale"]
    assert layer.router.norm is not None and layer.router.norm.eq(1).all()
    text = layer.explain(5, training=True)
    for name in ("rms_norm", "rms_norm_backward", "router_backward", "routing_backward"):
        assert f"{name} on " in text, name
    weights = layer.export_weights()
    with pytest.raises(InvalidInput, match=r"routing must be .*RouterWeights.* got LayerRouter"):
        bundle = dataclasses.replace(weights.router, **{n: torch.ones(1) for n in ("weight", "norm", "expert_scale")})
        moe_torch.ops.moe(torch.ones(2, D), layer.experts.operands(), bundle, layer.moe_spec)
    with pytest.raises(InvalidInput, match=r"router\.spec must be a NormSpec where router\.norm is given"):
        dataclasses.replace(weights, router=dataclasses.replace(weights.router, spec=None))
