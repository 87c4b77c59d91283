"""This library's experts inside vLLM's own kernel (docs/user/modular.md#inside-vllm). Needs the package `vllm`.

Experts = adapt(TritonExperts)
kernel = FusedMoEKernel(prepare_finalize, Experts(moe_config, quant_config))  # vLLM's classes and configurations
"""

from moe_torch.modular.vllm.adapted import adapt
from moe_torch.modular.vllm.plugin import offer, register
from moe_torch.modular.vllm.quant_config import quant_config_of

__all__ = ["adapt", "offer", "quant_config_of", "register"]
