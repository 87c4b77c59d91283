"""The modular composition as pure JAX functions: against the reference, in jit and grad; LoRA is in examples."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")

import jax.numpy as jnp

import moe_jax
from moe_core.errors import InvalidInput, Unsupported
from moe_core.parity.tolerance import assert_close
from moe_core.specs import Activation, MoESpec
from moe_core.specs.operands import ExpertWeights, TopK
from moe_jax import modular
from tests.support.jax import REAL_KERNELS, running_on, to_jax
from tests.support.modular.problems import (
    TOPK,
    E,
    K,
    draw_problem,
    expected_output,
    expected_stages,
    expert_maps,
    output_tolerance,
)

SILU = Activation("silu")


def fused(x: Any, w1: Any, w2: Any, weights: Any, ids: Any, **options: Any) -> Any:
    prepared = modular.prepare(x, weights, ids, options.get("apply_router_weight_on_input", False))
    return modular.fused_experts(prepared.a1q, w1, w2, weights, ids, **options)


def unfused(x: Any, w1: Any, w2: Any, weights: Any, ids: Any, **options: Any) -> Any:
    prepared = modular.prepare(x, weights, ids, options.get("apply_router_weight_on_input", False))
    return modular.unfused_experts(prepared.a1q, w1, w2, weights, ids, weight_layout="out_in", **options)


def batched(x: Any, w1: Any, w2: Any, weights: Any, ids: Any, expert_map: Any = None, **options: Any) -> Any:
    on_input = options.pop("apply_router_weight_on_input", False)
    options.pop("global_num_experts", None)
    prepared = modular.prepare_batched(
        x, weights, ids, w1.shape[0], 40, expert_map=expert_map, apply_router_weight_on_input=on_input
    )
    rows = modular.batched_experts(prepared.a1q, w1, w2, prepared.expert_num_tokens, **options)
    return modular.finalize_batched(rows, weights, prepared, on_input)


COMPOSITIONS = {fused: "fused", unfused: "stages", batched: "rows"}


@pytest.mark.parametrize("composition", COMPOSITIONS)
def test_compositions_agree_with_the_reference(composition: Any) -> None:
    problem, rounds = draw_problem("bfloat16"), COMPOSITIONS[composition]
    with running_on(REAL_KERNELS):
        result = jax.jit(composition)(*to_jax(tuple(problem)))
    tolerance = output_tolerance("bfloat16", rounds)
    assert_close(np.asarray(result), expected_output(problem, rounds), tolerance, composition.__name__)


@pytest.mark.parametrize("composition", COMPOSITIONS)
def test_options_and_ranks(composition: Any) -> None:
    """The activation by name; the weight on the input; four ranks with maps sum to the whole; no tokens."""
    once, problem = draw_problem(topk=1), draw_problem(experts=8)
    with running_on("reference"):
        static = ("global_num_experts", "apply_router_weight_on_input", "activation")
        run = jax.jit(composition, static_argnames=static)
        result = run(*to_jax(tuple(once)), apply_router_weight_on_input=True)
        expected = expected_stages(once, on_input=True)["output"]
        np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-5)
        result = run(*to_jax(tuple(once)), activation="swiglu_oai")
        expected = expected_stages(once, "swiglu_oai")["output"]
        np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-5)
        x, w1, w2, weights, ids = to_jax(tuple(problem))
        whole, total = run(x, w1, w2, weights, ids), 0
        for expert_map in expert_maps(8, 4):
            own = np.flatnonzero(expert_map >= 0)
            options = {"expert_map": jnp.asarray(expert_map), "global_num_experts": 8}
            total += run(x, w1[own], w2[own], weights, ids, **options)
        np.testing.assert_allclose(total, whole, rtol=1e-5, atol=1e-6)
        assert run(x[:0], w1, w2, weights[:0], ids[:0]).shape == (0, K)


def test_both_biases_enter() -> None:
    with running_on("reference"):
        arguments = x, w1, *_ = to_jax(tuple(draw_problem()))
        random = np.random.default_rng(3)
        biases = [jnp.asarray(random.standard_normal((E, width)), jnp.float32) for width in (w1.shape[1], x.shape[1])]
        config = modular.FusedMoEQuantConfig(w1_bias=biases[0], w2_bias=biases[1])
        options: dict[str, Any] = {"quant_config": config, "weight_layout": "out_in"}
        expected = modular.fused_experts(*arguments, **options)
        for run in (modular.unfused_experts, batched):
            found = run(*arguments, **options)
            np.testing.assert_allclose(np.asarray(found), np.asarray(expected), rtol=1e-5, atol=1e-5)


def test_finalize_weights_and_reduces_slots() -> None:
    problem = draw_problem()
    plain = problem._replace(topk_weights=np.ones_like(problem.topk_weights))
    slots = expected_stages(plain)["matmul2"].reshape(40, TOPK, K)
    # Nobody writes the rows of slots without an expert.
    slots[problem.topk_ids < 0] = np.nan
    with running_on("reference"):
        result = modular.finalize(*to_jax((slots, problem.topk_weights, problem.topk_ids)))
    np.testing.assert_allclose(result, expected_output(problem, "rows"), rtol=1e-5, atol=1e-6)


def test_gradients_are_those_of_the_composed_op() -> None:
    with running_on("reference"):
        x, w1, w2, weights, ids = to_jax(tuple(draw_problem(tokens=20)))

        def whole(x: Any, w1: Any, w2: Any, weights: Any) -> Any:
            spec = MoESpec(SILU, weight_layout="out_in")
            return jnp.square(moe_jax.moe(x, ExpertWeights(w1, w2), TopK(ids, weights), spec).output).sum()

        expected = jax.grad(whole, (0, 1, 2, 3))(x, w1, w2, weights)
        for composition in (fused, unfused):
            found = jax.grad(lambda *leaves, run=composition: jnp.square(run(*leaves, ids)).sum(), (0, 1, 2, 3))(
                x, w1, w2, weights
            )
            for one, other in zip(found, expected, strict=True):
                np.testing.assert_allclose(one, other, rtol=2e-4, atol=2e-4)


def test_wrong_calls_are_refused() -> None:
    with running_on("reference"):
        x, w1, w2, weights, ids = to_jax(tuple(draw_problem()))
        prepared = modular.prepare(x, weights, ids)
        batched = modular.prepare_batched(x, weights, ids, E, 40)
        modular.prepare_batched(x[:1], weights[:1], ids[:1], E, 1)
        fp8 = modular.FusedMoEQuantConfig.make(use_fp8_w8a8=True)
        modular.fused_experts(x, w1, w2, weights, ids, global_num_experts=E)  # that many are there
        wrong: list[tuple[str, Any]] = [
            ("topk must be 1 with", lambda: modular.prepare(x, weights, ids, True)),
            ("topk_ids must be integers", lambda: modular.prepare(x, weights, weights)),
            ("topk_weights must be floats", lambda: modular.prepare(x, weights[:3], ids)),
            ("a row for each of the 3 tokens", lambda: modular.prepare_batched(x[:3], weights, ids, E, 40)),
            ("those of the tokens that were prepared", lambda: modular.finalize_batched(x[None], weights[:1], batched)),
            ("at most max_num_tokens = 8", lambda: modular.prepare_batched(x, weights, ids, E, 8)),
            ("must come from prepare_batched", lambda: modular.finalize_batched(x, weights, prepared)),
            (r"must be \[M, topk, K\]", lambda: modular.finalize(x, weights, ids)),
            ("pass an expert_map", lambda: modular.fused_experts(x, w1, w2, weights, ids, global_num_experts=9)),
            ("pass an expert_map", lambda: modular.unfused_experts(x, w1, w2, weights, ids, global_num_experts=9)),
            ("activation must be one of", lambda: fused(x, w1, w2, weights, ids, activation="tanh")),
            ("w1_scale must be an array", lambda: modular.fused_experts(x, w1, w2, weights, ids, quant_config=fp8)),
            ("must be \\[E, max_num_tokens, K\\]", lambda: modular.batched_experts(x, w1, w2, ids[:, 0])),
        ]
        for message, call in wrong:
            with pytest.raises((InvalidInput, Unsupported), match=message):
                call()


@pytest.mark.parametrize("mapped", [False, True])
def test_a_token_may_name_an_expert_twice(mapped: bool) -> None:
    """No row of a block is dropped, and both slots count, with torch's bits."""
    problem = draw_problem(tokens=7, topk=3)
    ids = np.random.default_rng(1).integers(-1, 2, problem.topk_ids.shape).astype(np.int32)
    expert_map = np.array([1, 1, 0, -1, 3], np.int32) if mapped else None
    local = ids if expert_map is None else np.where(ids >= 0, expert_map[ids], -1).astype(np.int32)
    expected = expected_stages(problem._replace(topk_ids=local))["output"]
    with running_on("reference"):
        x, w1, w2, weights, given = to_jax(tuple(problem._replace(topk_ids=ids)))
        prepared = modular.prepare_batched(x, weights, given, E, 7, expert_map=to_jax(expert_map))
        rows = modular.batched_experts(prepared.a1q, w1, w2, prepared.expert_num_tokens)
        found = np.asarray(modular.finalize_batched(rows, weights, prepared))
        with pytest.raises(InvalidInput, match="expert_map must be int32"):
            modular.prepare_batched(x, weights, given, E, 7, expert_map=weights)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    torch = pytest.importorskip("torch")
    from moe_torch import modular as other
    from tests.support import torch as torch_support

    kernel = other.FusedMoEModularKernel(other.BatchedPrepareAndFinalize(7, E), other.BatchedTritonExperts(7))
    with torch_support.running_on("reference"), torch.no_grad():
        arguments = torch_support.to_torch(tuple(problem._replace(topk_ids=ids)))
        result = kernel(*arguments, expert_map=torch_support.to_torch(expert_map))
    np.testing.assert_array_equal(found, torch_support.to_numpy(result))


def test_torch_and_jax_agree_bitwise() -> None:
    """Every experts class of torch and the composition that is it."""
    torch = pytest.importorskip("torch")
    from moe_torch import modular as other
    from tests.support import torch as torch_support

    parts = {
        fused: (other.MoEPrepareAndFinalizeNoEP(), other.TritonExperts()),
        unfused: (other.MoEPrepareAndFinalizeNoEP(), other.UnfusedOAITritonExperts(weight_layout="out_in")),
        batched: (other.BatchedPrepareAndFinalize(40, E), other.BatchedTritonExperts(40)),
    }
    problem = draw_problem("bfloat16", seed=4)
    for composition, (prepare_finalize, experts) in parts.items():
        with torch_support.running_on(REAL_KERNELS) as device, torch.no_grad():
            kernel = other.FusedMoEModularKernel(prepare_finalize, experts)
            expected = torch_support.to_numpy(kernel(*torch_support.to_torch(tuple(problem), device)))
        with running_on(REAL_KERNELS):
            found = np.asarray(composition(*to_jax(tuple(problem))))
        np.testing.assert_array_equal(found.view(np.uint8), expected.view(np.uint8), err_msg=composition.__name__)
