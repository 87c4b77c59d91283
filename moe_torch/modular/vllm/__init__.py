"""This library's experts inside vLLM's own kernel (docs/user/modular.md#inside-vllm). Needs the package `vllm`."""

from moe_torch.modular.vllm.adapted import adapt
from moe_torch.modular.vllm.plugin import offer, register
from moe_torch.modular.vllm.quant_config import quant_config_of

__all__ = ["adapt", "offer", "quant_config_of", "register"]
