"""Zero experts, and the sum of an unfinalised output with a residual and a norm, in both front-ends."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from moe_core.errors import InvalidInput
from moe_torch import NormSpec, modular, ops
from tests.support.modular.problems import E, K, draw_problem
from tests.support.torch import ENGINES, REAL_KERNELS, require_equal, running_on, to_numpy, to_torch


@pytest.mark.parametrize("kind", ["identity", "zero"])
@pytest.mark.parametrize("tokens", [0, 1, 40])
def test_zero_experts_pass_tokens_through_or_add_zero(kind: str, tokens: int) -> None:
    """Also with all slots, or none, at zero experts. A token without one gets exact zeros, even if it is NaN."""
    drawn = draw_problem("bfloat16", topk=3)
    problem = drawn._replace(hidden_states=drawn.hidden_states[:tokens], topk_weights=drawn.topk_weights[:tokens])
    ids = np.random.default_rng(3).integers(-1, E + 3, (tokens, 3)).astype(np.int32)
    if tokens > 4:
        ids[:2], ids[2:4], ids[4] = E + 1, 0, -1
        problem.hidden_states[3:5] = np.nan
    x, weights = problem.hidden_states.astype(np.float32), problem.topk_weights
    total = np.where(ids >= E, weights, 0).sum(1, keepdims=True)
    expected = np.where((ids >= E).any(1, keepdims=True), x * total, 0) * (kind == "identity")
    found = {}
    for engine in ("reference", REAL_KERNELS):
        with running_on(engine) as device, torch.no_grad():
            hidden, given, chosen = to_torch((problem.hidden_states, weights, ids), device)
            split = modular.zero_experts(
                hidden, given, chosen.to(torch.uint8 if (ids >= 0).all() else torch.int64), E, kind
            )
            assert isinstance(split, modular.ZeroExperts) and torch.equal(chosen, to_torch(ids, device))
            output, left, kept = (to_numpy(array) for array in split)
            found[engine] = output
            np.testing.assert_array_equal(kept, np.where(ids >= E, -1, ids))
            np.testing.assert_array_equal(left, np.where(ids >= E, 0, weights))
            np.testing.assert_allclose(output.astype(np.float32), expected, rtol=1 / 128)
    jax = pytest.importorskip("jax")
    from moe_jax import modular as other
    from tests.support import jax as jax_support

    with jax_support.running_on("reference"):
        ours = other.zero_experts(*jax_support.to_jax((problem.hidden_states, weights, ids)), E, kind)
    for array, torch_array in zip(ours, (found["reference"], left, kept), strict=True):
        np.testing.assert_array_equal(np.asarray(array), torch_array)
    assert jax is not None


def test_a_layer_with_zero_experts_is_the_sum_of_both_parts() -> None:
    """The experts see -1 for them, and gradients reach x and the weights of both kinds of slots."""
    problem = draw_problem(tokens=6)
    ids = np.array([[0, E], [E + 1, E], [1, 2], [-1, E], [3, 4], [E, 0]], np.int32)
    with running_on("reference") as device:
        x, w1, w2, weights, chosen = to_torch(tuple(problem._replace(topk_ids=ids)), device)
        x.requires_grad_(), weights.requires_grad_()
        split = modular.zero_experts(x, weights, chosen, E)
        kernel = modular.FusedMoEModularKernel(modular.MoEPrepareAndFinalizeNoEP(), modular.TritonExperts())
        output = kernel(x, w1, w2, split.topk_weights, split.topk_ids) + split.output
        # Identity experts as real ones of a wider layer: rows of slots from E on are x itself.
        slots = torch.zeros(6, 2, K, device=device)
        for column in (0, 1):
            alone = torch.where(chosen[:, column : column + 1] >= E, -1, chosen[:, column : column + 1])
            slots[:, column] = kernel(x, w1, w2, torch.ones(6, 1, device=device), alone)
        slots = torch.where((chosen >= E)[:, :, None], x[:, None], slots)
        expected = (slots * weights[:, :, None]).sum(1)
        torch.testing.assert_close(output, expected)
        wanted = torch.autograd.grad(expected.square().sum(), (x, weights), retain_graph=True)
        for found, grad in zip(torch.autograd.grad(output.square().sum(), (x, weights)), wanted, strict=True):
            torch.testing.assert_close(found, grad)
    for wrong, message in (
        ((x, weights, chosen, 0), "num_experts"),
        ((x, weights, chosen, E, "copy"), "zero_expert_type"),
    ):
        with pytest.raises(InvalidInput, match=message):
            modular.zero_experts(*wrong)


def test_what_does_not_fit_is_refused() -> None:
    config, scores = modular.FUSED_MOE_UNQUANTIZED_CONFIG, torch.rand(1, 8)
    for wrong in ({"moe_config": config}, {"quant_config": config}):
        with pytest.raises(InvalidInput, match=r"configs must be .* each once, got 2 by place and some"):
            modular.TritonExperts(None, config, **wrong)
    assert modular.TritonExperts(config, moe_config=modular).moe_config is modular
    for trained in (False, True):
        scores.requires_grad_(trained)
        with pytest.raises(InvalidInput, match=r"the memory of y must be torch.float32 \[1, 4\].*, got .* \[3, 4\]"):
            modular.apply_moe_activation(modular.MoEActivation.SILU, torch.empty(3, 4), scores)
    with pytest.raises(InvalidInput, match=r"unfinalized must be an UnfinalizedMoEOutput with .*, got Tensor; return"):
        modular.finalize_and_norm(scores, scores, scores[0])


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("shared", [False, True])
def test_one_call_has_the_bits_of_its_steps(engine: str, shared: bool) -> None:
    """Finalise, add the shared expert and the residual, normalise; rows may be permuted, and NaN where nobody reads."""
    random = np.random.default_rng(0)
    tokens, topk, columns = 7, 3, 32
    rows = random.standard_normal((tokens * topk, columns)).astype(np.float32)
    weights = random.random((tokens, topk)).astype(np.float32)
    residual, other, norm_weight = (
        random.standard_normal(shape).astype(np.float32) for shape in ((tokens, columns), (tokens, columns), (columns,))
    )
    order = random.permutation(tokens * topk).astype(np.int32)
    places = order.reshape(tokens, topk).copy()
    rows[places[0, 1]], places[0, 1], places[3] = np.nan, -1, -1
    norm, results = NormSpec(1e-5, centred=True), {}
    for dtype in (torch.float32, torch.bfloat16):
        with running_on(engine) as device, torch.no_grad():
            arrays: Any = to_torch((rows, weights, places, residual, norm_weight, other), device)
            permuted, given, where, before, scale, extra = arrays
            permuted, before, extra = permuted.to(dtype), before.to(dtype), extra.to(dtype) if shared else None
            output = SimpleNamespace(
                gemm2_permuted=permuted, expert_weights=given, expanded_idx_to_permuted_idx=where, route_major=False
            )
            found = modular.finalize_and_norm(
                output, before, scale, norm, shared_output=extra, routed_scaling_factor=2.5
            )
            slots = permuted[where.clamp(min=0).long()]
            ids = torch.where(where >= 0, 0, -1)
            routed = modular.TopKWeightAndReduceContiguous().apply(None, slots, given * 2.5, ids, False)
            assert isinstance(found, modular.FinalizedNorm)
            if not shared:
                require_equal(found.hidden, before + routed, "hidden")
            torch.testing.assert_close(
                found.hidden.float(), (before + routed + (extra if shared else 0)).float(), rtol=2e-2, atol=2e-2
            )
            require_equal(found.normalized, ops.rms_norm(found.hidden, scale, norm), "normalized")
            assert found.hidden.isfinite().all()
            results[dtype] = [to_numpy(slots), to_numpy(given), to_numpy(ids), to_numpy(before), to_numpy(scale)]
            results[dtype] += [None if extra is None else to_numpy(extra), found]
            with pytest.raises(InvalidInput, match="residual must be"):
                modular.finalize_and_norm(output, before[:2], scale)
    pytest.importorskip("jax")
    from moe_jax import modular as ours
    from tests.support import jax as jax_support

    for *arrays, extra, expected in results.values():
        with jax_support.running_on(engine):
            given_extra = None if extra is None else jax_support.to_jax(extra)
            result = ours.finalize_and_norm(
                *jax_support.to_jax(tuple(arrays)), norm, shared_output=given_extra, routed_scaling_factor=2.5
            )
        for array, one in zip(result, expected, strict=True):
            np.testing.assert_array_equal(np.asarray(array), to_numpy(one))
