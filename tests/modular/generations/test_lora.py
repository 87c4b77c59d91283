"""Adapters of a modular kernel: the op's results, a float64 reference, vLLM's stacked factors, and refusals."""

from __future__ import annotations

import dataclasses
import types
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from moe_core.errors import InvalidInput, Unsupported
from moe_torch import ExpertWeights, MoESpec, TopK, modular, moe
from moe_torch.modular.newest.lora import factors_of
from tests.support.modular.lora import Case, E, F, M, kernel_of, of_float64
from tests.support.torch import running_on

Kernel = modular.FusedMoEModularKernel


@pytest.mark.parametrize("slices", [1, 2])
@pytest.mark.parametrize("activation", ["silu", "swiglu_oai"])
def test_classes_give_the_ops_results(slices: int, activation: str) -> None:
    """Tokens without an adapter, of an empty slot and of no slot; an expert without rows; ids of no expert."""
    case = Case.drawn(slices, activation)
    wanted, spec = of_float64(case), MoESpec(modular.activation_of(activation), weight_layout="out_in")
    lora = factors_of(case.context, spec.activation.gate_layout)
    call: Any = (case.x, ExpertWeights(case.w1, case.w2), TopK(case.ids, case.weights), spec)
    mapping = case.context.local_token_lora_mapping
    op, plain = moe(*call, lora=lora, adapter_ids=mapping).output, moe(*call).output
    without = mapping.new_tensor([slot not in (0, 2) for slot in mapping.tolist()]).bool()
    assert torch.equal(op[without], plain[without]) and not torch.equal(op, plain)
    for name in ("TritonExperts", "OAITritonExperts", "UnfusedOAITritonExperts", "BatchedTritonExperts"):
        kernel = kernel_of(name)
        before = kernel(*case.arguments(), activation=activation)
        kernel.fused_experts.set_lora_context(case.context)
        with torch.no_grad():
            y = kernel(*case.arguments(), activation=activation)
        np.testing.assert_allclose(y.numpy(), wanted, rtol=2e-5, atol=2e-5, err_msg=name)
        if name in ("TritonExperts", "OAITritonExperts"):
            assert torch.equal(y, op), name
        kernel.fused_experts.set_lora_context(None)
        assert torch.equal(kernel(*case.arguments(), activation=activation), before), name


def test_ranks_of_experts_and_an_expert_map() -> None:
    """The experts of each of two ranks: their sum is the whole, and each knows its factors alone."""
    case, total = Case.drawn(1, "silu"), 0.0
    for rank in range(2):
        own = slice(2 * rank, 2 * rank + 2)
        local = dataclasses.replace(case, w1=case.w1[own], w2=case.w2[own], context=case.of_experts(own))
        expert_map = torch.tensor([e - 2 * rank if e // 2 == rank else -1 for e in range(E)], dtype=torch.int32)
        for name in ("TritonExperts", "UnfusedOAITritonExperts"):
            kernel = kernel_of(name)
            kernel.fused_experts.set_lora_context(local.context)
            y = kernel(*local.arguments(), global_num_experts=E, expert_map=expert_map)
        total = total + y
    np.testing.assert_allclose(total.numpy(), of_float64(case), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("engine", ["reference", "interpreter"])
def test_strided_factors_are_read_in_place(engine: str) -> None:
    """vLLM's stacked factors as they are: transposed, every second rank, and one for all experts by a stride of 0."""
    case = Case.drawn(1, "silu")
    ctx = case.context
    factors = factors_of(ctx, "halves")
    pairs = [("a1", ctx.w13_lora_a_stacked), ("b1", ctx.w13_lora_b_stacked), ("a2", ctx.w2_lora_a_stacked)]
    assert all(getattr(factors, name).data_ptr() == arrays[0].data_ptr() for name, arrays in pairs)
    wide = torch.repeat_interleave(ctx.w13_lora_a_stacked[0], 2, dim=2)
    shared = ctx.w2_lora_b_stacked[0][:, :1]
    strided = dataclasses.replace(
        factors, a1=wide[:, :, ::2].transpose(2, 3), b2=shared.expand(-1, E, -1, -1).transpose(2, 3)
    )
    dense = dataclasses.replace(
        strided, **{name: getattr(strided, name).contiguous() for name in ("a1", "b1", "a2", "b2")}
    )
    spec = MoESpec(modular.activation_of("silu"), weight_layout="out_in")
    results = []
    for lora in (strided, dense):
        leaves = [getattr(lora, name).detach().requires_grad_() for name in ("a1", "b1", "a2", "b2")]
        lora = dataclasses.replace(lora, **dict(zip(("a1", "b1", "a2", "b2"), leaves, strict=True)))
        call: Any = (case.x, ExpertWeights(case.w1, case.w2), TopK(case.ids, case.weights), spec)
        with running_on(engine):
            y = moe(*call, lora=lora, adapter_ids=ctx.local_token_lora_mapping).output
            results.append((y.detach(), *torch.autograd.grad(y.square().sum(), leaves)))
    for first, second in zip(*results, strict=True):
        # BLAS takes other ways for other strides.
        tolerance = 1e-4 if engine == "reference" else 0
        torch.testing.assert_close(first, second, rtol=tolerance, atol=tolerance)


def test_gradients_reach_stacked_factors() -> None:
    case, found = Case.drawn(2, "silu"), []
    for name in ("TritonExperts", "UnfusedOAITritonExperts"):
        ctx = case.context
        leaves = [one.detach().requires_grad_() for one in (*ctx.w13_lora_a_stacked, *ctx.w2_lora_b_stacked)]
        trained = dataclasses.replace(ctx, w13_lora_a_stacked=tuple(leaves[:2]), w2_lora_b_stacked=(leaves[2],))
        kernel = kernel_of(name)
        kernel.fused_experts.set_lora_context(trained)
        kernel(*case.arguments()).square().sum().backward()
        found.append([one.grad for one in leaves])
    for first, second in zip(*found, strict=True):
        assert first.abs().sum() > 0
        torch.testing.assert_close(first, second, rtol=1e-4, atol=1e-5)


def test_slots_change_in_place_and_ids_come_from_vllms_wrapper() -> None:
    case = Case.drawn(1, "silu")
    mapping = case.context.local_token_lora_mapping
    meta = types.SimpleNamespace(
        token_lora_mapping=torch.cat((mapping, mapping.new_full((3,), 77))), no_lora_flag_cpu=torch.tensor([False])
    )
    wrapper = types.SimpleNamespace(token_mapping_meta=meta)
    kernel = kernel_of("TritonExperts")
    base = kernel(*case.arguments())
    kernel.fused_experts.set_lora_context(case.context)
    wanted = kernel(*case.arguments())
    ctx = dataclasses.replace(case.context, local_token_lora_mapping=None, punica_wrapper=wrapper)
    kernel.fused_experts.set_lora_context(ctx)
    assert torch.equal(kernel(*case.arguments()), wanted)
    ctx.adapter_enabled.zero_()
    assert torch.equal(kernel(*case.arguments()), base), "evicted"
    ctx.adapter_enabled[0] = 1
    ctx.w2_lora_b_stacked[0][0] *= 2
    assert not torch.equal(kernel(*case.arguments())[mapping == 0], wanted[mapping == 0])
    meta.no_lora_flag_cpu[0] = True  # the mapping of the last batch stays
    assert torch.equal(kernel(*case.arguments()), base)


def test_one_slot_and_tokens_without_it() -> None:
    case = Case.drawn(1, "silu")
    stacked = [name for name in vars(case.context) if name.endswith("_stacked")]
    first = {name: tuple(one[:1] for one in getattr(case.context, name)) for name in stacked}
    ctx = dataclasses.replace(case.context, **first, adapter_enabled=torch.ones(2, dtype=torch.int32), max_loras=1)
    wanted = of_float64(
        dataclasses.replace(case, context=dataclasses.replace(case.context, adapter_enabled=torch.tensor([1, 0, 0])))
    )
    for name in ("TritonExperts", "UnfusedOAITritonExperts"):
        kernel = kernel_of(name)
        kernel.fused_experts.set_lora_context(ctx)
        with running_on("reference"), torch.no_grad():
            np.testing.assert_allclose(kernel(*case.arguments()).numpy(), wanted, rtol=2e-5, atol=2e-5, err_msg=name)


def test_refusals() -> None:
    case = Case.drawn(1, "silu")
    ctx, experts = case.context, modular.TritonExperts()

    class Routing(modular.OAITritonExperts):
        def _make_routing_data(self, *arguments: Any) -> Any:
            return super()._make_routing_data(*arguments)

    class Moving(modular.MoEPrepareAndFinalizeNoEP):
        def prepare(self, a1: Any, *arguments: Any, **named: Any) -> Any:
            return modular.PreparedTokens(a1.repeat(2, 1), topk_ids=case.ids.repeat(2, 1))

    def run(experts: Any, part: Any = None, context: Any = ctx, **options: Any) -> Any:
        experts.set_lora_context(context)
        part = modular.MoEPrepareAndFinalizeNoEP() if part is None else part
        with torch.no_grad(), running_on(options.pop("engine", "reference")):
            return Kernel(part, experts, **options)(*case.arguments(experts.weight_layout))

    def changed(**fields: Any) -> Any:
        return dataclasses.replace(ctx, **fields)

    short, slots = ctx.local_token_lora_mapping[:3], (ctx.w2_lora_a_stacked[0][:1],)
    refusals = {
        "fully_sharded must be False": lambda: experts.set_lora_context(changed(fully_sharded=True)),
        "use_tuned_config must be False": lambda: experts.set_lora_context(changed(use_tuned_config=True)),
        "events must be None": lambda: experts.set_lora_context(changed(events=())),
        "w13_lora_a_stacked must be 2": lambda: experts.set_lora_context(changed(w13_num_slices=2)),
        "w2_lora_a_stacked must be 1": lambda: experts.set_lora_context(changed(w2_lora_a_stacked=slots)),
        "quantise activations": lambda: modular.TritonExperts(use_fp8_w8a8=True).set_lora_context(ctx),
        "got None; pass int32 ids": lambda: run(experts, context=changed(local_token_lora_mapping=None)),
        r"must be int32 \[9\]": lambda: run(experts, context=changed(local_token_lora_mapping=short)),
        "must be the 4 experts of w1, got 2": lambda: run(experts, context=case.of_experts(slice(2))),
        "_make_routing_data of Routing": lambda: run(Routing()),
        "prepare of Moving must return adapter_ids": lambda: run(experts, Moving()),
        "chunk_size must be None with adapters": lambda: run(experts, chunk_size=16, engine="interpreter"),
        "gate_layout must be given": lambda: experts.apply_w13_lora(
            Case.drawn(2, "silu").context, y=torch.zeros(M, 2, 2 * F), x=case.x, topk_ids=case.ids, num_tokens=M,
            topk_weights=case.weights, expert_map=None, w1=case.w1, w2=case.w2, top_k_num=2,
        ),
    }  # fmt: skip
    for message, refused in refusals.items():
        with pytest.raises((InvalidInput, Unsupported), match=message):
            refused()
    for refusing in (modular.DeepGemmExperts, modular.TritonOrDeepGemmExperts):
        assert not refusing.supports_lora()
    assert modular.TritonExperts.supports_lora() and issubclass(modular.TritonExperts, modular.LoRAExpertsMixin)
