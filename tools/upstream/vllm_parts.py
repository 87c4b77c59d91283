"""Both systems' kernels and experts, made of one problem: what the cases of vLLM's files share."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch

from moe_torch import modular
from tools.upstream.imports import MOE, WHOLE, Names
from tools.upstream.problems import SAME_ROUNDINGS, E, M, Problem, Tensors, draw, draw_mxfp4, tensors
from tools.upstream.running import Answer, of_device

#: Modules of vLLM that ported classes import from `moe_torch.modular` instead.
REPLACED = ("modular_kernel", "topk_weight_and_reduce", "config", "activation")


def vllm_file(name: str) -> Any:
    return importlib.import_module(f"{MOE}.{name}")


# --- What imports are changed to -------------------------------------------------------------------------------------


def theirs() -> Mapping[str, Names]:
    """vLLM's kernel, configurations and classes; only `triton_kernels` is ours."""
    return {}


def ours() -> Mapping[str, Names]:
    """`modular_kernel` is our `moe_torch.modular`, under vLLM's names, and configurations are ours."""

    kernel = {name: getattr(modular, name) for name in modular.__all__} | {WHOLE: True}
    names = ("FusedMoEQuantConfig", "FUSED_MOE_UNQUANTIZED_CONFIG")
    return {f"{MOE}.modular_kernel": kernel, f"{MOE}.config": {name: getattr(modular, name) for name in names}}


def ours_reducing() -> Mapping[str, Names]:
    """The same, and the classes that weight and reduce are ours too."""
    reducing = {name: getattr(modular, name) for name in modular.__all__ if name.startswith("TopKWeight")}
    return {**ours(), f"{MOE}.topk_weight_and_reduce": reducing | {WHOLE: True}}


def all_ours() -> Mapping[str, Names]:
    """Every module that the recipe replaces is `moe_torch.modular`."""
    names = {name: getattr(modular, name) for name in modular.__all__} | {WHOLE: True}
    return {f"{MOE}.{module}": names for module in REPLACED}


# --- Objects of vLLM -------------------------------------------------------------------------------------------------


def their_activation(name: str) -> Any:
    return vllm_file("activation").MoEActivation.from_str(name)


def their_moe_config(problem: Problem, activation: str) -> Any:
    """vLLM's description of a layer on one device."""
    config = vllm_file("config")
    sizes = dict.fromkeys(("tp_size", "pcp_size", "dp_size", "ep_size", "sp_size"), 1)
    ranks = dict.fromkeys(("tp_rank", "pcp_rank", "dp_rank", "ep_rank"), 0)
    parallel = config.FusedMoEParallelConfig(
        **sizes, **ranks, use_ep=False, all2all_backend="allgather_reducescatter", enable_eplb=False
    )
    return config.FusedMoEConfig(
        num_experts=E,
        experts_per_token=problem.ids.shape[1],
        hidden_dim=problem.x.shape[1],
        intermediate_size=problem.b1.shape[1] // 2,
        num_local_experts=len(problem.b1),
        num_logical_experts=E,
        activation=their_activation(activation),
        device="cpu",
        routing_method=config.RoutingMethodType.Renormalize,
        moe_parallel_config=parallel,
        in_dtype=torch.bfloat16,
    )


def gpt_oss_weights(given: Tensors) -> tuple[Any, Any, dict[str, Any]]:
    """w1 and w2 as vLLM passes them to gpt-oss experts, `[E, K, N]`, and the arrays of their configuration. mxfp4 in
    objects of the installed `triton_kernels`."""
    arrays: dict[str, Any] = {"w1_bias": given.b1, "w2_bias": given.b2}
    if given.scales[0] is None:
        return given.w1.mT.contiguous(), given.w2.mT.contiguous(), arrays
    is_38 = "triton_kernels.matmul" in sys.modules
    path, scale_name = ("matmul", "b_mx_scale") if is_38 else ("matmul_ogs", "weight_scale")
    matmul, tensor = (importlib.import_module(f"triton_kernels.{name}") for name in (path, "tensor"))
    weights = []
    for number, (codes, scales) in enumerate(zip((given.w1, given.w2), given.scales, strict=True), 1):
        assert scales is not None
        weights.append(tensor.wrap_torch_tensor(codes.mT, dtype=tensor.FP4))
        scale = tensor.wrap_torch_tensor(scales.mT)
        arrays[f"w{number}_scale"] = matmul.PrecisionConfig(**{scale_name: scale})
    return weights[0], weights[1], arrays


def their_config(given: Tensors, arrays: dict[str, Any]) -> Any:
    config = vllm_file("config")
    if given.scales[0] is None:
        return config.biased_moe_quant_config(arrays["w1_bias"], arrays["w2_bias"])
    return config.mxfp4_w4a16_moe_quant_config(**arrays)


def our_config(given: Tensors, arrays: dict[str, Any]) -> Any:
    scheme = None if given.scales[0] is None else "mxfp4_w4a16"
    return modular.FusedMoEQuantConfig(scheme, **arrays)


def global_experts_of(given: Tensors) -> int:
    return -1 if given.expert_map is None else given.expert_map.shape[0]


def in_their_kernel(prepare_finalize: Any, experts: Any, given: Tensors, weights: Any, activation: str) -> Any:
    """vLLM's kernel; its class with both kinds where the experts are of vLLM's kind."""
    kernels = vllm_file("modular_kernel")
    kind = kernels.FusedMoEKernel if isinstance(experts, kernels.FusedMoEExperts) else kernels.FusedMoEKernelModularImpl
    return kind(prepare_finalize, experts).apply(
        hidden_states=given.x,
        w1=weights[0],
        w2=weights[1],
        topk_weights=given.weights,
        topk_ids=given.ids,
        activation=their_activation(activation),
        global_num_experts=global_experts_of(given),
        expert_map=given.expert_map,
        apply_router_weight_on_input=False,
    )


def in_our_kernel(prepare_finalize: Any, experts: Any, given: Tensors, weights: Any, activation: str) -> Any:
    return modular.FusedMoEModularKernel(prepare_finalize, experts)(
        given.x,
        weights[0],
        weights[1],
        given.weights,
        given.ids,
        activation=their_activation(activation),
        global_num_experts=global_experts_of(given),
        expert_map=given.expert_map,
    )


def their_no_dp_ep() -> Any:
    return vllm_file("prepare_finalize.no_dp_ep").MoEPrepareAndFinalizeNoDPEPModular()


def their_batched(problem: Problem) -> Any:
    kind = vllm_file("prepare_finalize.batched").BatchedPrepareAndFinalize
    return kind(max_num_tokens=M, num_local_experts=len(problem.b1), num_dispatchers=1, rank=0)


# --- The cases -------------------------------------------------------------------------------------------------------

DRAWS: dict[str, Callable[[], Problem]] = {
    "bf16": lambda: draw(),
    "bf16, expert_map": lambda: draw().on_rank(),
    "mxfp4": lambda: draw_mxfp4(),
    "mxfp4, expert_map": lambda: draw_mxfp4().on_rank(),
}
SWIGLU = "swigluoai"


def same_roundings(name: str, layer: Problem, actual: torch.Tensor, activation: str = SWIGLU) -> Answer:
    """The answer of vLLM's experts of that name, which round to bf16 in these places: the unfused ones before the
    activation, and all of them the weighted rows of a token's experts."""
    expected = layer.rounded(activation, before=name == "UnfusedOAITritonExperts")
    return Answer(actual, expected, SAME_ROUNDINGS[actual.device.type])


@of_device
def experts_in_their_kernel(device: str, name: str, problem: Callable[[], Problem], activation: str) -> Answer:
    layer = problem()
    given = tensors(layer, device)
    w1, w2, arrays = gpt_oss_weights(given)
    kind = getattr(vllm_file("experts.gpt_oss_triton_kernels_moe"), name)
    experts = kind(their_moe_config(layer, activation), their_config(given, arrays))
    actual = in_their_kernel(their_no_dp_ep(), experts, given, (w1, w2), activation)
    return same_roundings(name, layer, actual, activation)


@of_device
def experts_in_our_kernel(device: str, name: str, problem: Callable[[], Problem], activation: str) -> Answer:
    layer = problem()
    given = tensors(layer, device)
    w1, w2, arrays = gpt_oss_weights(given)
    kind = getattr(vllm_file("experts.gpt_oss_triton_kernels_moe"), name)
    experts = kind(our_config(given, arrays))
    actual = in_our_kernel(modular.MoEPrepareAndFinalizeNoEP(), experts, given, (w1, w2), activation)
    return same_roundings(name, layer, actual, activation)
