"""Routing as gpt-oss experts take it, and the functions on top."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import moe_torch
from moe_core.errors import InvalidInput
from moe_torch import modular
from moe_torch.compat.triton_kernels import from_upstream
from moe_torch.compat.triton_kernels import routing as triton_routing
from tests.support.modular.problems import TOPK, E, F, as_in_out, draw_problem, expert_maps
from tests.support.torch import on_engines, require_equal, running_on, to_torch

OAI = moe_torch.Activation("swiglu_oai", gate_layout="interleaved")


def test_rows_are_sorted_by_expert_stably() -> None:
    ids = torch.tensor([[2, 0], [0, -1], [9, 2]])
    weights = torch.tensor([[0.1, 0.2], [0.3, 0.4], [0.5, 0.6]])
    with running_on("reference"):
        routing_data, gather, scatter = modular.make_routing_data(ids, weights, 3)
    assert (routing_data.n_expts_tot, routing_data.n_expts_act) == (3, 2)
    assert routing_data.expt_hist.tolist() == [2, 0, 2]
    assert gather.src_indx.tolist() == scatter.dst_indx.tolist() == [1, 2, 0, 5, -1, -1]
    assert gather.dst_indx.tolist() == scatter.src_indx.tolist() == [2, 0, 1, -1, -1, 3]
    torch.testing.assert_close(routing_data.gate_scal, torch.tensor([0.2, 0.3, 0.1, 0.6, -1.0, -1.0]))


@on_engines
def test_fused_experts_on_a_given_routing(engine: str) -> None:
    """The bits of the composed op, into memory of the caller's; the weights are those of gate_scal."""
    with running_on(engine) as device, torch.no_grad():
        x, w1, w2, weights, ids = to_torch(tuple(as_in_out(draw_problem("bfloat16"))), device)
        routing_data, *indices = modular.make_routing_data(ids, weights, E)
        output, cache = torch.empty_like(x), torch.empty(40 * TOPK * F, dtype=x.dtype, device=device)
        result = modular.triton_kernel_fused_experts(
            output, x, w1, w2, routing_data, *indices, TOPK, "swiglu_oai", intermediate_cache=cache
        )
        assert result is output
        spec = moe_torch.MoESpec(OAI)
        expected = moe_torch.moe(x, moe_torch.ExpertWeights(w1, w2), moe_torch.TopK(ids, weights), spec).output
        require_equal(result, expected, "output")
        halved = dataclasses.replace(routing_data, gate_scal=routing_data.gate_scal / 2)
        half = modular.triton_kernel_fused_experts(None, x, w1, w2, halved, *indices, TOPK)
        require_equal(half * 2, expected, "halved weights")


def test_routing_of_triton_kernels_is_as_good() -> None:
    """One set of classes: what `routing` returns runs here, given or from `_make_routing_data`; fields are writable."""
    with running_on("reference"), torch.no_grad():
        x, w1, w2, _, _ = to_torch(tuple(as_in_out(draw_problem())))
        logits = torch.from_numpy(np.random.default_rng(5).standard_normal((40, E)).astype(np.float32))
        found = triton_routing.routing(logits, TOPK)
        assert type(found[0]) is modular.RoutingData
        assert from_upstream(found)[1].src_indx is found[1].src_indx
        result = modular.triton_kernel_fused_experts(None, x, w1, w2, *found, TOPK)

        class Routed(modular.OAITritonExperts):
            def _make_routing_data(self, *_: object) -> tuple[object, ...]:
                return found

        kernel = modular.FusedMoEModularKernel(modular.MoEPrepareAndFinalizeNoEP(), Routed())
        ids, weights = torch.zeros(40, TOPK, dtype=torch.int32), torch.ones(40, TOPK)
        require_equal(kernel(x, w1, w2, weights, ids, activation="swiglu_oai"), result, "output")
        found[0].gate_scal = found[0].gate_scal / 2
        half = modular.triton_kernel_fused_experts(None, x, w1, w2, *found, TOPK)
        require_equal(half * 2, result, "halved weights")
        for name in ("expt_hist", "gate_scal"):
            setattr(found[0], name, None)
            with pytest.raises(InvalidInput, match=f"{name} of routing_data must be a tensor"):
                modular.triton_kernel_fused_experts(None, x, w1, w2, *found, TOPK)


@pytest.mark.parametrize("renormalize", [True, False])
def test_forward_from_logits(renormalize: bool) -> None:
    """With an expert_map, which the original ignores: four ranks add up."""
    problem = as_in_out(draw_problem(experts=8))
    logits = torch.from_numpy(np.random.default_rng(5).standard_normal((40, 8)).astype(np.float32))
    order = "topk_then_softmax" if renormalize else "softmax_then_topk"
    with running_on("reference"), torch.no_grad():
        x, w1, w2, _, _ = to_torch(tuple(problem))
        whole = modular.triton_kernel_moe_forward(x, w1, w2, logits, TOPK, renormalize)
        spec = moe_torch.MoESpec(OAI, moe_torch.RouterSpec(TOPK, order=order))
        expected = moe_torch.moe(x, moe_torch.ExpertWeights(w1, w2), moe_torch.RouterLogits(logits), spec).output
        require_equal(whole, expected, "output")
        total = torch.zeros_like(whole)
        for expert_map in expert_maps(8, 4):
            own = np.flatnonzero(expert_map >= 0)
            options = {"expert_map": to_torch(expert_map), "global_num_experts": 8}
            total += modular.triton_kernel_moe_forward(x, w1[own], w2[own], logits, TOPK, renormalize, **options)
    torch.testing.assert_close(total, whole, rtol=1e-5, atol=1e-6)


def test_what_these_functions_refuse() -> None:
    with running_on("reference"), torch.no_grad():
        x, w1, w2, weights, ids = to_torch(tuple(as_in_out(draw_problem())))
        routing = modular.make_routing_data(ids, weights, E)

        def fused(*arguments: object, **options: object) -> None:
            modular.triton_kernel_fused_experts(None, *arguments, **options)  # type: ignore[arg-type]

        usual = (x, w1, w2, *routing, TOPK)
        with pytest.raises(InvalidInput, match="map the ids before make_routing_data"):
            fused(*usual, expert_map=torch.arange(E, dtype=torch.int32))
        with pytest.raises(InvalidInput, match="a1q_scale must be None"):
            fused(*usual, a1q_scale=torch.ones(1))
        with pytest.raises(InvalidInput, match="must be of 40 tokens, topk 3"):
            fused(x, w1, w2, *routing, 3)
        with pytest.raises(InvalidInput, match="routing_data must be a RoutingData"):
            fused(x, w1, w2, None, *routing[1:], TOPK)
        with pytest.raises(InvalidInput, match="at least the 5 experts"):
            fused(*usual, global_num_experts=3)
        with pytest.raises(InvalidInput, match="the workspace must have"):
            fused(*usual, intermediate_cache=torch.empty(3))
        with pytest.raises(InvalidInput, match="quant_config must say how w1 is quantised"):
            fused(x, w1.to(torch.uint8), w2.to(torch.uint8), *routing, TOPK)
        with pytest.raises(InvalidInput, match="8 columns of gating_output"):
            modular.triton_kernel_moe_forward(x, w1, w2, torch.ones(40, 8), TOPK, True, global_num_experts=9)
        with pytest.raises(InvalidInput, match=r"bitmatrix must be \[40, 2\]"):
            modular.pack_bitmatrix(torch.empty(40, 1, dtype=torch.uint32), ids, 40, 2, TOPK)
        with pytest.raises(InvalidInput, match=r"bitmatrix must be torch.uint32"):
            modular.pack_bitmatrix(torch.empty(40, 1, dtype=torch.int32), ids, 40, 1, TOPK)
