"""Training of torch layers with a capacity limit, and of the stage operators `router` and `route`, against a loop."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")


import moe_torch
from moe_core.layers import MoELayerSpec
from moe_core.parity.tolerance import assert_close
from moe_core.specs.routing import LogitsSpec, RouterSpec
from moe_torch.operators.stages import ROUTE_BACKWARD, ROUTER_BACKWARD
from tests.support.layers import SPECS, draw_weights, draw_x, drop_slots
from tests.support.torch import on_engines, running_on, to_numpy, to_torch
from tests.support.training.loop import Loop
from tests.support.training.tolerances import FP32
from tests.support.training.torch import Seen
from tests.support.training.torch_layers import (
    layer_name,
    problem_of,
    trainable,
)


class LimitedLoop(Loop):
    """A loop over tokens in which experts take the first `capacity` slots, one after the other."""

    def __init__(self, problem: Any, ids: np.ndarray, capacity: int) -> None:
        super().__init__(problem, ids)
        self.allowed = drop_slots(np.where(self.kept[:, None], ids, -1), capacity) >= 0

    def expert_of(self, token: int, k: int) -> int:
        return super().expert_of(token, k) if self.allowed[token, k] else -1


def limited(spec: MoELayerSpec, factor: float, **changes: Any) -> MoELayerSpec:
    return dataclasses.replace(spec, capacity_factor=factor, **changes)


def make(spec: MoELayerSpec, device: Any = "cpu", dtype: str = "float32") -> Any:
    layer = moe_torch.MoE.from_spec(spec, device=device, dtype=getattr(torch, dtype))
    layer.load_weights(draw_weights(spec, dtype=dtype))
    return layer


@on_engines
@pytest.mark.parametrize(
    ("name", "factor", "masked", "recompute"),
    [
        ("mixtral", 0.5, False, False),
        ("deepseek_v3", 0.7, True, True),
        ("llama4_text", 0.4, True, False),
        ("olmoe", 0.6, True, False),
    ],
)
def test_gradients_are_those_of_a_loop(engine: str, name: str, factor: float, masked: bool, recompute: bool) -> None:
    """Slots behind the limit get none, but those they share a token with had their weights normalised beside them."""
    spec, x = limited(SPECS[name], factor, recompute=recompute), draw_x((10,))
    mask = np.arange(10) % 4 != 1 if masked else None
    with running_on(engine) as device:
        layer = make(spec, device)
        rows, live = to_torch(x, device), None if mask is None else to_torch(mask, device)
        if live is not None and spec.shared_experts is None:
            rows = rows.masked_fill(~live[:, None], float("nan"))
        with torch.no_grad():
            ids = trainable(SPECS[name], device)(to_torch(x, device), live, return_aux=True)[1].ids
        leaf = rows.clone().requires_grad_()
        y, aux = layer(leaf, live, return_aux=True)
        upstream = torch.ones_like(y) if live is None else live[:, None].to(y.dtype).expand_as(y)
        total = (y * upstream).sum() + 0.7 * aux.load_balance_loss - 0.3 * aux.z_loss
        leaves = {"x": leaf, **dict(layer.named_parameters())}
        found = dict(zip(leaves, torch.autograd.grad(total, list(leaves.values())), strict=True))
    assert (to_numpy(aux.ids) < 0).sum() > (0 if mask is None else (~mask).sum() * spec.top_k), "something was dropped"
    problem = problem_of(spec, x, to_numpy(upstream).astype(np.float32)).replace(token_mask=mask)
    wanted = LimitedLoop(problem, to_numpy(ids), spec.capacity(10)).autograd(torch.float64)
    assert {layer_name(key) for key in wanted} == found.keys()
    for key, expected in wanted.items():
        actual = to_numpy(found[layer_name(key)])
        rms = np.sqrt(np.square(expected).mean())
        assert_close(actual, expected, FP32, f"d_{key}", scale=rms)


@on_engines
def test_gradients_may_start_anywhere(engine: str) -> None:
    """Those of two halves of one array: the second starts behind the first, 12 or 24 bytes from a multiple of 16."""
    with running_on(engine) as device:
        x, weight = torch.randn(3, 8, device=device), torch.randn(8, 3, device=device, requires_grad=True)
        logits = [moe_torch.router(part, weight) for part in (x[:1], x[1:])]
        weights = [moe_torch.route(one, RouterSpec(1))[1] for one in logits]
        value = torch.cat(logits).square().sum() + torch.cat(weights).sum()
        (found,) = torch.autograd.grad(value, weight)
        whole = moe_torch.router(x, weight)
        value = whole.square().sum() + moe_torch.route(whole, RouterSpec(1))[1].sum()
        (wanted,) = torch.autograd.grad(value, weight)
    torch.testing.assert_close(found, wanted)


def test_only_what_is_asked_for_is_computed() -> None:
    x, weight = torch.randn(4, 8), torch.randn(8, 3, requires_grad=True)
    with running_on("reference"), Seen() as seen:
        moe_torch.router(x, weight).sum().backward()
    (results,) = [results for name, _, results in seen.calls if name == "router_backward"]
    assert len(results) == 1 and x.grad is None


def test_second_derivatives_and_vmap_are_refused() -> None:
    x, weight = torch.randn(4, 8, requires_grad=True), torch.randn(8, 3)
    with running_on("reference"):
        logits = moe_torch.router(x, weight)
        (slope,) = torch.autograd.grad(logits.square().sum(), x, create_graph=True)
        with pytest.raises(moe_torch.Unsupported, match="has no second derivative"):
            slope.sum().backward()
        _, weights = moe_torch.route(moe_torch.router(x, weight), RouterSpec(2))
        (slope,) = torch.autograd.grad(weights.square().sum(), x, create_graph=True)
        with pytest.raises(moe_torch.Unsupported, match="has no second derivative"):
            slope.sum().backward()
        with pytest.raises(moe_torch.Unsupported, match=r"no gradient inside of torch\.func\.vmap"):
            torch.func.vmap(torch.func.grad(lambda x: moe_torch.router(x, weight).sum()))(x.detach()[None])
        found = torch.func.grad(lambda x: moe_torch.router(x, weight).sum())(x.detach())
        torch.testing.assert_close(found, weight.sum(1).expand(4, 8))


def test_opcheck() -> None:
    utilities = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    logits, ids = torch.randn(6, 5), torch.tensor([[0, 1], [4, 2], [3, 0]] * 2, dtype=torch.int32)
    encode = moe_torch.bridge.options.encode
    calls = (
        (
            ROUTER_BACKWARD,
            (logits, torch.randn(6, 8), torch.randn(8, 5), None, encode(LogitsSpec(), ("d_x", "d_weight"))),
        ),
        (ROUTE_BACKWARD, (torch.randn(6, 2), logits, ids, None, encode(RouterSpec(2)))),
    )
    with running_on("reference"):
        for operator, arguments in calls:
            results = torch.library.opcheck(operator.overload, arguments, test_utils=utilities)
            assert set(results.values()) == {"SUCCESS"}, f"{operator.name}: {results}"
