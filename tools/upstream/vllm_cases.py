"""vLLM's gpt-oss experts, prepare and finalize classes and kernel, beside ours, on one device."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from moe_core.formats import FP8_BLOCK, FP8_GROUP
from moe_torch import modular
from moe_torch.compat.triton_kernels import matmul_ogs
from tools.upstream.imports import QUANTIZATION
from tools.upstream.problems import SAME_ROUNDINGS, E, M, Problem, Tensors, draw, draw_mxfp4, tensors
from tools.upstream.running import Answer, Case, of_device
from tools.upstream.vllm_parts import (
    DRAWS,
    SWIGLU,
    experts_in_our_kernel,
    experts_in_their_kernel,
    global_experts_of,
    gpt_oss_weights,
    in_our_kernel,
    in_their_kernel,
    our_config,
    ours,
    ours_reducing,
    same_roundings,
    their_batched,
    their_config,
    their_moe_config,
    their_no_dp_ep,
    theirs,
    vllm_file,
)


def _made_as_theirs(device: str) -> Answer:
    """vLLM's experts in our kernel, made with the arguments that serving code passes."""
    layer = draw()
    given = tensors(layer, device)
    w1, w2, arrays = gpt_oss_weights(given)
    kind = vllm_file("experts.gpt_oss_triton_kernels_moe").OAITritonExperts
    experts = kind(their_moe_config(layer, SWIGLU), our_config(given, arrays))
    actual = in_our_kernel(modular.MoEPrepareAndFinalizeNoEP(), experts, given, (w1, w2), SWIGLU)
    return same_roundings("OAITritonExperts", layer, actual)


@of_device
def _naive_batched(device: str, call: Any, prepare_is_theirs: bool) -> Answer:
    """vLLM's reference experts of the batched format, a class with a constructor of its own; call: in which kernel."""
    layer = draw()
    given = tensors(layer, device)
    theirs = call is in_their_kernel
    config = vllm_file("config").FUSED_MOE_UNQUANTIZED_CONFIG if theirs else modular.FUSED_MOE_UNQUANTIZED_CONFIG
    kind = vllm_file("experts.fused_batched_moe").NaiveBatchedExperts
    experts = kind(their_moe_config(layer, "silu"), config, max_num_tokens=M, num_dispatchers=1)
    prepare_finalize = their_batched(layer) if prepare_is_theirs else modular.BatchedPrepareAndFinalize(M, E)
    actual = call(prepare_finalize, experts, given, (given.w1, given.w2), "silu")
    return Answer(actual, layer.expected("silu", biases=False))


@of_device
def _moe_forward(device: str, problem: Callable[[], Problem], renormalize: bool) -> Answer:
    """`triton_kernel_moe_forward` routes: with logits that choose the ids of the problem."""
    layer = problem()
    given = tensors(layer, device)
    logits = torch.randn(M, E, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16).to(device)
    # Triton 3.5's `routing`, for one device, normalises in fp32, and vLLM before all other routes in bf16.
    is_35 = vllm_file("experts.gpt_oss_triton_kernels_moe").triton_kernels_version == "3.5.1"
    in_one, scores = is_35 and given.expert_map is None, logits.float()
    if not renormalize:
        scores = scores.softmax(-1) if in_one else logits.softmax(-1).float()
    weights, ids = scores.topk(layer.ids.shape[1], dim=-1)
    weights = weights.softmax(-1) if renormalize else weights
    layer = layer._replace(ids=ids.to(torch.int32).cpu().numpy(), weights=weights.cpu().numpy())
    w1, w2, arrays = gpt_oss_weights(given)
    forward = vllm_file("experts.gpt_oss_triton_kernels_moe").triton_kernel_moe_forward
    actual = forward(
        given.x,
        w1,
        w2,
        logits,
        layer.ids.shape[1],
        renormalize,
        quant_config=their_config(given, arrays),
        global_num_experts=global_experts_of(given),
        expert_map=given.expert_map,
    )
    # vLLM packs the routing of a rank itself in Triton 3.5, with weights in bf16.
    expected = layer.rounded(SWIGLU, weights=is_35 and not in_one)
    return Answer(actual, expected, SAME_ROUNDINGS[actual.device.type])


def _routing_data(device: str) -> Answer:
    """`make_routing_data`: the sum of the rows of each token's experts, brought there and back by its indices."""
    layer = draw()
    given = tensors(layer, device)
    make = vllm_file("experts.gpt_oss_triton_kernels_moe").make_routing_data
    data, gather, scatter = make(given.ids.long(), given.weights, E)
    places = torch.arange(E, device=device).repeat_interleave(data.expt_hist.long())
    rows = torch.zeros(given.ids.numel(), device=device)
    rows[: len(places)] = (places + 1) * data.gate_scal[: len(places)].float()
    slots = scatter.src_indx.view(M, -1).long()
    found = torch.where(slots >= 0, rows[slots.clamp(min=0)], 0.0)
    assert torch.equal(gather.dst_indx, scatter.src_indx)
    return Answer(found, ((layer.ids + 1) * layer.weights).astype("float32"))


def _swizzled(device: str) -> Answer:
    """mxfp4 weights that vLLM's own loader has laid out, in its experts on compat."""
    layer = draw_mxfp4()
    given = tensors(layer, device)
    swizzle = importlib.import_module(f"{QUANTIZATION}.mxfp4_utils")._swizzle_mxfp4
    weights: list[Any] = []
    arrays: dict[str, Any] = {"w1_bias": given.b1, "w2_bias": given.b2}
    for number, (codes, scales) in enumerate(zip((given.w1, given.w2), given.scales, strict=True), 1):
        weight, flex, scale = swizzle(codes, scales)
        weights.append(weight)
        arrays[f"w{number}_scale"] = matmul_ogs.PrecisionConfig(
            weight_scale=scale, flex_ctx=matmul_ogs.FlexCtx(rhs_data=flex)
        )
    kind = vllm_file("experts.gpt_oss_triton_kernels_moe").OAITritonExperts
    experts = kind(their_moe_config(layer, SWIGLU), their_config(given, arrays))
    return same_roundings(kind.__name__, layer, in_their_kernel(their_no_dp_ep(), experts, given, weights, SWIGLU))


@of_device
def _their_prepare(device: str, problem: Callable[[], Problem], kind: Any, batched: bool = False) -> Answer:
    """Our experts and kernel with vLLM's prepare and finalize; kind: our experts for a problem."""
    layer = problem()
    given = tensors(layer, device)
    prepare_finalize = their_batched(layer) if batched else their_no_dp_ep()
    actual = in_our_kernel(prepare_finalize, kind(given), given, (given.w1, given.w2), "silu")
    return Answer(actual, layer.expected("silu"))


def _on_input(device: str) -> Answer:
    """The router's weight on the input, by vLLM's prepare."""
    layer = draw(missing=False)
    layer = layer._replace(ids=layer.ids[:, :1].copy(), weights=layer.weights[:, :1].copy())
    given = tensors(layer, device)
    before = given.x.clone()
    kernel = modular.FusedMoEModularKernel(their_no_dp_ep(), modular.TritonExperts())
    actual = kernel(given.x, given.w1, given.w2, given.weights, given.ids, apply_router_weight_on_input=True)
    assert torch.equal(before, given.x)
    weighted = (given.x * given.weights.to(given.x.dtype)).float().cpu().numpy()
    plain = layer._replace(x=weighted, weights=layer.weights * 0 + 1)
    return Answer(actual, plain.expected("silu", biases=False))


@of_device
def _reduced(device: str, name: str) -> Answer:
    """A class of vLLM that weights and reduces, as what our experts answer to our kernel."""
    layer = draw(missing=name == "TopKWeightAndReduceNoOP")
    given = tensors(layer, device)
    reducing = getattr(vllm_file("topk_weight_and_reduce"), name)

    class Batched(modular.BatchedTritonExperts):
        def finalize_weight_and_reduce_impl(self) -> Any:
            return reducing(0)

    class Reduced(modular.TritonExperts):
        def finalize_weight_and_reduce_impl(self) -> Any:
            return reducing()

    class Slots(modular.TritonExperts):
        """Rows by slot, neither weighted nor added up, written with calls of our experts on single choices."""

        def finalize_weight_and_reduce_impl(self) -> Any:
            return reducing()

        def workspace_shapes(self, M: int, N: int, K: int, topk: int, *rest: Any) -> Any:
            shape13, shape2, _ = super().workspace_shapes(M, N, K, topk, *rest)
            return shape13, shape2, (M, topk, K)

        def apply(self, output: Any, hidden_states: Any, w1: Any, w2: Any, weights: Any, ids: Any, *rest: Any) -> None:
            for choice in range(ids.shape[1]):
                rows, one = torch.empty_like(hidden_states), ids[:, choice : choice + 1].contiguous()
                super().apply(rows, hidden_states, w1, w2, torch.ones_like(one, dtype=torch.float32), one, *rest)
                output[:, choice] = rows

    config = modular.FusedMoEQuantConfig(w1_bias=given.b1, w2_bias=given.b2)
    if name == "TopKWeightAndReduceNaiveBatched":
        experts, prepare_finalize = Batched(M, 1, config), modular.BatchedPrepareAndFinalize(M, E)
    else:
        kind = Slots if name == "TopKWeightAndReduceContiguous" else Reduced
        experts, prepare_finalize = kind(config), modular.MoEPrepareAndFinalizeNoEP()
    actual = in_our_kernel(prepare_finalize, experts, given, (given.w1, given.w2), "silu")
    return Answer(actual, layer.expected("silu"))


@of_device
def _deep_gemm(device: str, prepare_quantizes: bool, batched: bool = False) -> Answer:
    """Our DeepGEMM experts and kernel with vLLM's prepare, which quantises or leaves it to them."""
    layer = draw(FP8_BLOCK, hidden=256, width=128)
    given = tensors(layer, device)
    config = modular.FusedMoEQuantConfig.make(
        use_fp8_w8a8=True, block_shape=[128, 128], w1_scale=given.scales[0], w2_scale=given.scales[1]
    )
    base: Any = modular.BatchedDeepGemmExperts if batched else modular.DeepGemmExperts
    options = (M, 1) if batched else ()

    class Experts(base):
        expects_unquantized_inputs = not prepare_quantizes

    prepare_finalize = their_batched(layer) if batched else their_no_dp_ep()
    prepare, prepared = prepare_finalize.prepare, []

    @functools.wraps(prepare)
    def watched(*arguments: Any, **named: Any) -> Any:
        prepared.append(prepare(*arguments, **named))
        return prepared[-1]

    prepare_finalize.prepare = watched
    actual = in_our_kernel(prepare_finalize, Experts(*options, config), given, (given.w1, given.w2), "silu")
    dtypes = [found[0].dtype for found in prepared]
    assert dtypes == [torch.float8_e4m3fn if prepare_quantizes else torch.bfloat16], f"prepare gave {dtypes}"
    expected = layer.expected("silu", biases=False, activations=FP8_GROUP)
    # A rounding to e4m3 that falls the other way moves an element by 2 ** -4.
    return Answer(actual, expected, bound=0.04)


@of_device
def _choices(device: str, kind: str, top_k: int, dtype: torch.dtype) -> Answer:
    """vLLM's experts on compat with another number of choices and another type of ids."""
    layer = draw(top_k=top_k)
    given = tensors(layer, device)
    given = given._replace(ids=given.ids.to(dtype))
    w1, w2, arrays = gpt_oss_weights(given)
    experts = getattr(vllm_file("experts.gpt_oss_triton_kernels_moe"), kind)
    experts = experts(their_moe_config(layer, SWIGLU), their_config(given, arrays))
    actual = in_their_kernel(their_no_dp_ep(), experts, given, (w1, w2), SWIGLU)
    return same_roundings(kind, layer, actual)


def _standard(given: Tensors) -> Any:
    return modular.TritonExperts(modular.FusedMoEQuantConfig(w1_bias=given.b1, w2_bias=given.b2))


def _batched_experts(given: Tensors) -> Any:
    return modular.BatchedTritonExperts(M, 1, modular.FusedMoEQuantConfig(w1_bias=given.b1, w2_bias=given.b2))


def cases() -> list[Case]:
    """a: vLLM's experts; b: its prepare and finalize classes in our kernel."""
    found = [
        Case("a make_routing_data", theirs, _routing_data),
        Case("a mxfp4 weights laid out by vLLM", theirs, _swizzled),
    ]
    for name, problem in DRAWS.items():
        for renormalize in (True, False):
            run = _moe_forward(problem, renormalize)
            found.append(Case(f"a triton_kernel_moe_forward, {name}, renormalize={renormalize}", theirs, run))
    activations = {"OAITritonExperts": (SWIGLU,), "UnfusedOAITritonExperts": (SWIGLU, "silu")}
    for kind, names in activations.items():
        for name, problem in DRAWS.items():
            for activation in names:
                label = f"{kind}, {name}, {activation}"
                found += [
                    Case(f"a {label}, vLLM's kernel", theirs, experts_in_their_kernel(kind, problem, activation)),
                    Case(f"a {label}, our kernel", ours, experts_in_our_kernel(kind, problem, activation)),
                ]
    for name in ("bf16", "bf16, expert_map"):
        problem = DRAWS[name]
        run = _their_prepare(problem, _standard)
        found.append(Case(f"b NoDPEP, {name}, our kernel and experts", ours_reducing, run))
    found += [
        Case("b NoDPEP, weight on the input, our kernel and experts", ours_reducing, _on_input),
        Case("b Batched, bf16, our kernel and experts", ours_reducing, _their_prepare(draw, _batched_experts, True)),
        *(
            Case(f"b {name}, our kernel and experts", ours, _reduced(name))
            for name in ("TopKWeightAndReduceNoOP", "TopKWeightAndReduceContiguous", "TopKWeightAndReduceNaiveBatched")
        ),
    ]
    found += [
        Case("a OAITritonExperts, bf16, made as vLLM makes them, our kernel", ours_reducing, _made_as_theirs),
        Case("a NaiveBatchedExperts, bf16, vLLM's kernel", theirs, _naive_batched(in_their_kernel, True)),
        Case("a NaiveBatchedExperts, bf16, our kernel", ours_reducing, _naive_batched(in_our_kernel, False)),
        Case("b Batched, bf16, our kernel, NaiveBatchedExperts", ours_reducing, _naive_batched(in_our_kernel, True)),
    ]
    for batched in (False, True):
        for quantizes in (False, True) if not batched else (True,):
            label = (
                f"{'Batched' * batched}DeepGemmExperts, fp8 blocks quantised by {'prepare' if quantizes else 'experts'}"
            )
            found.append(Case(f"b {label}, our kernel", ours_reducing, _deep_gemm(quantizes, batched)))
    for kind in activations:
        for top_k, dtype in ((1, torch.int32), (3, torch.int64), (6, torch.int32)):
            name = f"a {kind}, bf16, {top_k} choices, {str(dtype).removeprefix('torch.')} ids, vLLM's kernel"
            found.append(Case(name, theirs, _choices(kind, top_k, dtype)))
    routed = [case for case in found if case.name.startswith(("a OAI", "a Unfused", "a triton_kernel"))]
    found += [replace(case, name=f"{case.name}, Triton 3.8", generation="3.8") for case in routed]
    return sorted(found, key=lambda case: case.name[0])
