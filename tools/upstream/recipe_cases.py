"""The recipe "change the import, keep the class": every name is there, and bits or errors against our own classes."""

from __future__ import annotations

import ast
import pathlib
from collections.abc import Callable
from typing import Any

import torch

from moe_torch import modular
from tools.upstream.imports import MOE
from tools.upstream.problems import E, M, Problem, draw, tensors
from tools.upstream.running import Answer, Case, of_device
from tools.upstream.vllm_parts import (
    DRAWS,
    REPLACED,
    SWIGLU,
    all_ours,
    gpt_oss_weights,
    in_our_kernel,
    our_config,
    ours,
    ours_reducing,
    their_activation,
    their_config,
    their_moe_config,
    their_no_dp_ep,
    theirs,
    vllm_file,
)

#: Relative Frobenius errors of vLLM's gpt-oss experts against ours, which do not round a token's rows before their sum.
#: The second bound is for those that also round before the activation, or round the router's weights: see
#: `Problem.rounded`, with whose roundings the cases `a` agree.
FUSED, OTHERS = 0.003, 0.004
#: Names of those modules that stay vLLM's: a part of its configurations, and the names of its files.
NOT_OURS = {"FusedMoEQuantDesc", "_get_config_dtype_str"}


def imported_names(files: pathlib.Path, module: str) -> set[str]:
    """What vLLM's MoE files take from a module of `fused_moe`, by name or as an attribute."""
    names: set[str] = set()
    for file in (files / MOE.replace(".", "/")).rglob("*.py"):
        text, aliases = file.read_text(), set[str]()
        if f"{MOE}.{module}" not in text:
            continue
        tree = ast.parse(text)
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module == f"{MOE}.{module}":
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.Import):
                aliases |= {alias.asname or "" for alias in node.names if alias.name == f"{MOE}.{module}"}
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in aliases:
                names.add(node.attr)
    return names


def _names(device: str) -> Answer:
    files = pathlib.Path(vllm_file("modular_kernel").__file__).parents[4]
    for module in REPLACED:
        names = imported_names(files, module)
        missing = names - set(modular.__all__) - NOT_OURS
        assert names and not missing, f"moe_torch.modular has no {sorted(missing)} of {module}"
    return Answer(torch.zeros(1), torch.zeros(1).numpy())


def _values(tensor: torch.Tensor) -> Any:
    return tensor.float().cpu().numpy()


@of_device
def _no_dp_ep(device: str, name: str, problem: Callable[[], Problem], on_input: bool = False) -> Answer:
    """vLLM's prepare and finalize around our experts, with the bits of ours."""
    layer = problem()
    if on_input:
        layer = layer._replace(ids=layer.ids[:, :1].copy(), weights=layer.weights[:, :1].copy())
    given = tensors(layer, device)
    w1, w2, arrays = gpt_oss_weights(given)
    if "OAI" not in name:
        w1, w2 = given.w1, given.w2
    outputs = []
    for part in (their_no_dp_ep(), modular.MoEPrepareAndFinalizeNoEP()):
        kernel = modular.FusedMoEKernel(part, getattr(modular, name)(our_config(given, arrays)))
        tokens = (given.x, w1, w2, given.weights, given.ids, their_activation(SWIGLU))
        outputs.append(kernel.apply(*tokens, -1, given.expert_map, on_input))
    return Answer(outputs[0], _values(outputs[1]), bound=0.0)


@of_device
def _experts(device: str, name: str, problem: Callable[[], Problem]) -> Answer:
    """vLLM's gpt-oss experts against ours of that name, both in our kernel."""
    given = tensors(problem(), device)
    w1, w2, arrays = gpt_oss_weights(given)
    kinds = (getattr(vllm_file("experts.gpt_oss_triton_kernels_moe"), name), getattr(modular, name))
    outputs = [
        in_our_kernel(modular.MoEPrepareAndFinalizeNoEP(), kind(our_config(given, arrays)), given, (w1, w2), SWIGLU)
        for kind in kinds
    ]
    return Answer(outputs[0], _values(outputs[1]), bound=FUSED if name == "OAITritonExperts" else OTHERS)


@of_device
def _without_vllm(device: str, name: str, problem: Callable[[], Problem]) -> Answer:
    """vLLM's file of gpt-oss experts, with our names for all that it imports of the kernel and its configurations."""
    layer = problem()
    given = tensors(layer, device)
    w1, w2, arrays = gpt_oss_weights(given)
    config, kinds = vllm_file("config"), vllm_file("activation").MoEActivation
    assert config.FusedMoEConfig is modular.FusedMoEConfig and kinds is modular.MoEActivation
    make = config.biased_moe_quant_config if given.scales[0] is None else config.mxfp4_w4a16_moe_quant_config
    topk, width = layer.ids.shape[1], layer.b1.shape[1] // 2
    moe_config = config.FusedMoEConfig(
        *(E, topk, layer.x.shape[1], width, len(layer.b1), E, kinds.SWIGLUOAI, device),
        *(config.RoutingMethodType.Renormalize, config.FusedMoEParallelConfig(), torch.bfloat16),
    )
    experts = getattr(vllm_file("experts.gpt_oss_triton_kernels_moe"), name)(moe_config, make(**arrays))
    options: Any = (kinds.SWIGLUOAI, -1, given.expert_map, False)
    kernels = vllm_file("modular_kernel")
    if "Monolithic" in name:
        part = vllm_file("prepare_finalize.no_dp_ep").MoEPrepareAndFinalizeNoDPEPMonolithic()
        logits = torch.randn(M, E, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16).to(device)
        actual = kernels.FusedMoEKernel(part, experts).apply_monolithic(given.x, w1, w2, logits, *options)
        call: Any = (given.x, w1, w2, logits, topk, True)
        named: Any = {"quant_config": our_config(given, arrays), "expert_map": given.expert_map}
        own = modular.triton_kernel_moe_forward(*call, **named)
    else:
        tokens = (given.x, w1, w2, given.weights, given.ids)
        actual = kernels.FusedMoEKernel(their_no_dp_ep(), experts).apply(*tokens, *options)
        ours = getattr(modular, name)(our_config(given, arrays))
        own = modular.FusedMoEKernel(modular.MoEPrepareAndFinalizeNoEP(), ours).apply(*tokens, *options)
    return Answer(actual, _values(own), bound=FUSED if name == "OAITritonExperts" else OTHERS)


@of_device
def _monolithic(device: str, is_ours: bool, problem: Callable[[], Problem]) -> Answer:
    """vLLM's experts that route by themselves, and its prepare and finalize, in one of both kernels."""
    layer = problem()
    given = tensors(layer, device)
    logits = torch.randn(M, E, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16).to(device)
    w1, w2, arrays = gpt_oss_weights(given)
    config = our_config(given, arrays) if is_ours else their_config(given, arrays)
    kind = vllm_file("experts.gpt_oss_triton_kernels_moe").OAITritonMxfp4ExpertsMonolithic
    part = vllm_file("prepare_finalize.no_dp_ep").MoEPrepareAndFinalizeNoDPEPMonolithic()
    kernel = vllm_file("modular_kernel").FusedMoEKernel(part, kind(their_moe_config(layer, SWIGLU), config))
    assert isinstance(kernel, modular.FusedMoEKernel) == is_ours and kernel.is_monolithic
    call = (given.x, w1, w2, logits, their_activation(SWIGLU), -1, given.expert_map, False)
    actual = kernel.apply_monolithic(*call, routing_sink=None)
    own = modular.triton_kernel_moe_forward(
        given.x,
        w1,
        w2,
        logits,
        layer.ids.shape[1],
        True,
        quant_config=our_config(given, arrays),
        expert_map=given.expert_map,
    )
    return Answer(actual, _values(own), bound=OTHERS)


def cases() -> list[Case]:
    found = [Case("d names of vLLM's kernel", theirs, _names)]
    for name, problem in DRAWS.items():
        for kind in ("OAITritonExperts", "UnfusedOAITritonExperts"):
            found += [
                Case(f"d {kind} in our kernel, {name}", ours, _experts(kind, problem)),
                Case(f"d NoDPEP, our {kind}, {name}, bits of ours", ours_reducing, _no_dp_ep(kind, problem)),
            ]
        for kind in ("OAITritonExperts", "UnfusedOAITritonExperts", "OAITritonMxfp4ExpertsMonolithic"):
            found.append(Case(f"d {kind}, {name}, all names ours", all_ours, _without_vllm(kind, problem)))
        if "bf16" in name:
            run = _no_dp_ep("TritonExperts", problem)
            found.append(Case(f"d NoDPEP, our TritonExperts, {name}, bits of ours", ours_reducing, run))
        for is_ours in (True, False):
            label = f"d OAITritonMxfp4ExpertsMonolithic, {name}, {'our' if is_ours else 'vLLM'} kernel"
            found.append(Case(label, ours_reducing if is_ours else theirs, _monolithic(is_ours, problem)))
    run = _no_dp_ep("TritonExperts", draw, on_input=True)
    return [*found, Case("d NoDPEP, weight on the input, bits of ours", ours_reducing, run)]
