"""Token rounding on torch tensors: results, gradients, programs, refusals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import moe_torch
from moe_core.specs import RowLimit, Tuning
from moe_torch import InvalidInput, MoESpec, RouterSpec, TokenRounding, Unsupported
from tests.support.torch import on_engines, running_on, to_numpy, to_torch

T, K, E = 48, 2, 6
RULE, ROUNDING = RouterSpec(K, renormalize=True), TokenRounding(16)


def logits_of(tokens: int = T, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((tokens, E), np.float32)


def step(logits: Any, x: Any, experts: Any) -> Any:
    """A layer's output with rounded routing."""
    routed = moe_torch.route_rounded(logits, RULE, ROUNDING)
    spec = MoESpec(moe_torch.Activation("silu"))
    return moe_torch.moe(x, experts, moe_torch.TopK(routed.ids, routed.weights), spec).output


@on_engines
def test_a_training_step_against_a_loop(engine: str) -> None:
    """Experts, rows and the logits get the gradients of a dense loop over the experts that each token visits."""
    random = np.random.default_rng(1)
    arrays = [logits_of()] + [
        random.standard_normal(shape, np.float32) / 4 for shape in ((T, 8), (E, 8, 12), (E, 6, 8))
    ]
    with running_on(engine) as device:
        logits, x, gate_up, down = given = [to_torch(one, device).requires_grad_() for one in arrays]
        value = step(logits, x, moe_torch.ExpertWeights(gate_up, down))
        (value * value).sum().backward()
        ids = moe_torch.route_rounded(logits.detach(), RULE, ROUNDING).ids.cpu()
        other = [one.detach().cpu().double().requires_grad_() for one in given]
        shares = other[0].softmax(1)
        top = shares.detach().topk(K, 1).indices
        chosen = torch.zeros_like(shares).scatter(1, top, 1.0)
        weights = torch.where(chosen > 0, shares / (shares * chosen).sum(1, keepdim=True), shares)
        visits = torch.zeros(T, E + 1, dtype=torch.double).scatter(1, torch.where(ids < 0, E, ids).long(), 1.0)[:, :E]
        total = torch.zeros(T, 8, dtype=torch.double)
        for expert in range(E):
            gate, up = (other[1] @ other[2][expert]).chunk(2, 1)
            rows = (torch.nn.functional.silu(gate) * up) @ other[3][expert]
            total = total + (visits * weights)[:, expert, None] * rows
        (total * total).sum().backward()
        np.testing.assert_allclose(to_numpy(value.detach()), total.detach(), atol=1e-5)
        for name, one, wanted in zip(("logits", "x", "gate_up", "down"), given, other, strict=True):
            np.testing.assert_allclose(to_numpy(one.grad), wanted.grad, atol=2e-5, err_msg=name)
        assert ((visits > chosen).any() or engine != "reference") and (visits < chosen).any()


@on_engines
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_row_limit_changes_memory_alone(engine: str, dtype: str) -> None:
    """The same bits, from fewer saved rows, where tiles do not follow the number of rows."""
    random, kind = np.random.default_rng(2), getattr(torch, dtype)
    arrays = [random.standard_normal(shape, np.float32) / 4 for shape in ((T, 32), (E, 32, 64), (E, 32, 32), (E, 64))]
    with running_on(engine) as device:
        routed = moe_torch.route_rounded(to_torch(logits_of(), device), RULE, ROUNDING)
        limit = ROUNDING.row_limit(K)
        most = T * K + E * 8
        assert most < routed.ids.numel() and int((routed.ids >= 0).sum()) <= most
        results = []
        for option in (None, limit):
            spec = MoESpec(moe_torch.Activation("silu"), row_limit=option, tuning=Tuning(batch_invariant=True))
            x, gate_up, down, bias = (to_torch(one, device).to(kind).requires_grad_() for one in arrays)
            weights = routed.weights.clone().requires_grad_()
            experts = moe_torch.ExpertWeights(gate_up, down, gate_up_bias=bias)
            shapes: list[tuple[int, ...]] = []

            def pack(one: Any, into: list[tuple[int, ...]] = shapes) -> Any:
                into.append(tuple(one.shape))
                return one

            with torch.autograd.graph.saved_tensors_hooks(pack, lambda one: one):
                output = moe_torch.moe(x, experts, moe_torch.TopK(routed.ids, weights), spec).output
            output.float().square().sum().backward()
            results.append([output.detach(), *[one.grad for one in (x, gate_up, down, bias, weights)]])
            rows = most if option else routed.ids.numel()
            assert (rows, 64) in shapes
        for one, other in zip(*results, strict=True):
            assert torch.equal(one, other)


def test_row_limits_are_of_given_ids() -> None:
    with pytest.raises(InvalidInput, match="router must be left out with row_limit, which is of given ids"):
        MoESpec(moe_torch.Activation("silu"), RULE, row_limit=ROUNDING.row_limit(K))


@on_engines
def test_compiled_for_any_number_of_tokens(engine: str) -> None:
    with running_on(engine) as device:
        run = torch.compile(lambda x: moe_torch.route_rounded(x, RULE, ROUNDING), fullgraph=True, dynamic=True)
        for tokens in (T, T + 9):
            logits = to_torch(logits_of(tokens), device)
            for one, other in zip(run(logits), moe_torch.route_rounded(logits, RULE, ROUNDING), strict=True):
                assert torch.equal(one, other)


def test_second_derivatives_are_refused() -> None:
    logits = torch.from_numpy(logits_of()).requires_grad_()
    weights = moe_torch.route_rounded(logits, RULE, ROUNDING).weights
    (first,) = torch.autograd.grad(weights.square().sum(), logits, create_graph=True)
    with pytest.raises(Unsupported, match="route_rounded has no second derivative"):
        first.sum().backward()


@on_engines
@pytest.mark.parametrize("tokens", [64, 3000])
def test_slots_past_a_row_limit_are_counted(engine: str, tokens: int) -> None:
    """Few and many slots are laid out by different kernels."""
    with running_on(engine) as device:
        ids = torch.arange(tokens, dtype=torch.int32)[:, None] % E
        ids = torch.cat([ids, (ids + 1) % E], 1)
        ids[0, 0] = E + 7
        experts = moe_torch.ExpertWeights(torch.randn(E, 8, 8, device=device), torch.randn(E, 4, 8, device=device))
        routing = moe_torch.TopK(ids.to(device), torch.ones(tokens, 2, device=device))
        x, counted = torch.randn(tokens, 8, device=device), {}
        for limit in (None, RowLimit(1), RowLimit(2)):
            spec = MoESpec(moe_torch.Activation("silu"), row_limit=limit)
            counted[limit] = moe_torch.moe(x, experts, routing, spec).invalid_ids.item()
        assert counted == {None: 1, RowLimit(1): tokens, RowLimit(2): 1}
