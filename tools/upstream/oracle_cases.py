"""The plugin: vLLM's own choice of experts takes ours, and makes its kernel of them."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

import torch

from moe_core import formats
from moe_torch import modular
from moe_torch.modular import vllm
from tools.upstream.adapt_cases import KINDS, call_of, layer_of, our_experts
from tools.upstream.imports import QUANTIZATION, Names
from tools.upstream.problems import M, draw
from tools.upstream.running import Answer, Case, of_device
from tools.upstream.stand_ins import Settings
from tools.upstream.vllm_parts import their_batched, their_moe_config, their_no_dp_ep, vllm_file

#: Kind -> vLLM's module that chooses, and its names of keys of weights and activations.
CHOICES = {
    "bf16": ("unquantized", ()),
    "fp8 per channel and token": ("fp8", ("kFp8StaticChannelSym", "kFp8DynamicTokenSym")),
    "fp8 per tensor, static": ("fp8", ("kFp8StaticTensorSym", "kFp8StaticTensorSym")),
    "fp8 blocks": ("fp8", ("kFp8Static128BlockSym", "kFp8Dynamic128Sym")),
    "int8 per channel and token": ("int8", ("kInt8StaticChannelSym", "kInt8DynamicTokenSym")),
    "mxfp8": ("mxfp8", ()),
}


def with_plugins(*names: str) -> Callable[[], Mapping[str, Names]]:
    return lambda: {"vllm": {"envs": Settings(VLLM_PLUGINS=list(names) or None)}}


def _chosen(label: str, config: Any) -> tuple[Any, Any]:
    """vLLM's choice of a backend and a class."""
    name, keys = CHOICES[label]
    known = __import__(f"{QUANTIZATION}.quant_utils", fromlist=["QuantKey"])
    return getattr(vllm_file(f"oracle.{name}"), f"select_{name}_moe_backend")(
        config, *(getattr(known, key) for key in keys)
    )


@of_device
def _offered(device: str, label: str, batched: bool = False) -> Answer:
    """vLLM chooses, makes the kernel, and the result has the bits of ours, or with its batched prepare its size."""
    vllm.register()
    vllm.register()
    kind, (oracle, _) = KINDS[label], CHOICES[label]
    sizes: Any = {"hidden": 256, "width": 128} if kind.weights is formats.FP8_BLOCK else {}
    drawn = draw(kind.weights, **sizes)
    config = their_moe_config(drawn, "silu")
    config.moe_backend = "batched_triton" if batched else "triton"
    backend, experts = _chosen(label, config)
    name = "BatchedTritonExperts" if batched else "TritonExperts"
    assert issubclass(experts, getattr(modular, name)), experts
    # The kernels of mxfp8 are made as those of fp8.
    oracle = "fp8" if oracle == "mxfp8" else oracle
    layer, module = layer_of(drawn, kind, name, device), vllm_file(f"oracle.{oracle}")
    part = their_batched(drawn) if batched else their_no_dp_ep()
    module.maybe_make_prepare_finalize = lambda **_: part
    named = {"quant_config" if oracle == "unquantized" else "moe_quant_config": layer.theirs}
    named["backend" if oracle == "unquantized" else f"{oracle}_backend"] = backend
    kernel = getattr(module, f"make_{oracle}_moe_kernel")(moe_config=config, experts_cls=experts, **named)
    call = call_of(drawn, "silu", False, layer)
    if batched:
        return Answer(kernel.apply(*call), drawn.expected("silu"))
    own = modular.FusedMoEKernel(modular.MoEPrepareAndFinalizeNoEP(), our_experts(name, layer.ours, M))
    return Answer(kernel.apply(*call), own.apply(*call).float().cpu().numpy(), bound=0.0)


def _only_when_named(device: str) -> Answer:
    """Installed but not named, the plugin changes nothing."""
    module = vllm_file("oracle.unquantized")
    vllm.register()
    before = module.backend_to_kernel_cls(module.UnquantizedMoeBackend.TRITON)
    assert not any(issubclass(cls, modular.TritonExperts) for cls in before)
    return Answer(torch.zeros(1), torch.zeros(1).numpy())


def _next_class(device: str) -> Answer:
    """What ours cannot run goes to vLLM's next class, and keeps its other backends."""
    vllm.register()
    config, module = their_moe_config(draw(), "silu"), vllm_file("oracle.fp8")
    config.is_lora_enabled = True
    ours, theirs = module.backend_to_kernel_cls(module.Fp8MoeBackend.TRITON)
    key = importlib.import_module(f"{QUANTIZATION}.quant_utils").kFp8DynamicTensorSym
    supported, reason = ours.is_supported_config(ours, config, None, key, ours.activation_format())
    assert (supported, reason) == (False, "kernel does not support LoRA with quantised activations")
    assert not issubclass(theirs, modular.TritonExperts)
    assert len(module.backend_to_kernel_cls(module.Fp8MoeBackend.MARLIN)) == 1
    return Answer(torch.zeros(1), torch.zeros(1).numpy())


def cases() -> list[Case]:
    named = with_plugins("other", "moebius")
    found = [
        Case(f"f vLLM chooses TritonExperts, {label}, bits of our kernel", named, _offered(label)) for label in CHOICES
    ]
    return [
        *found,
        Case("f vLLM chooses BatchedTritonExperts, bf16", named, _offered("bf16", batched=True)),
        Case("f the plugin beside VLLM_PLUGINS", with_plugins(), _only_when_named),
        Case("f the plugin and others in VLLM_PLUGINS", with_plugins("other"), _only_when_named),
        Case("f what ours cannot run", named, _next_class),
    ]
