"""The newest generation's description of a layer, which ported classes read."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

import torch

from moe_core.modular.activations import width_after
from moe_core.modular.types import FusedMoEParallelConfig


class RoutingMethodType(enum.IntEnum):
    """How a router chooses. Numbers as published."""

    Default = 0  # softmax, then top-k
    Renormalize = 1  # top-k, then softmax
    DeepSeekV3 = 2  # sigmoid and bias, the best groups, then top-k of them
    Llama4 = 3  # top-1, then sigmoid
    RenormalizeNaive = 4  # softmax, top-k, then a sum of 1
    TopK = 5
    SigmoidRenorm = 6  # sigmoid, top-k, then a sum of 1
    MiniMax2 = 7  # sigmoid and bias, top-k, then a scaled sum
    Sigmoid = 8  # sigmoid, then top-k
    Unspecified = 9
    DeepseekV4 = 100  # square root of softplus and bias, then a sum of 1
    Custom = 101
    Simulated = 102


def get_routing_method_type(
    scoring_func: str, top_k: int, renormalize: bool, num_expert_group: int | None, has_e_score_bias: bool
) -> RoutingMethodType:
    """The method of a router with these published options. top_k decides nothing."""
    kind = RoutingMethodType
    if scoring_func == "sqrtsoftplus":
        return kind.DeepseekV4 if renormalize else kind.Unspecified
    if has_e_score_bias:
        if scoring_func != "sigmoid" or not renormalize:
            return kind.Unspecified
        return kind.DeepSeekV3 if num_expert_group else kind.MiniMax2
    methods = {"sigmoid": (kind.Sigmoid, kind.SigmoidRenorm), "softmax": (kind.Default, kind.RenormalizeNaive)}
    return methods.get(scoring_func, (kind.Unspecified, kind.Unspecified))[renormalize]


@dataclass
class FusedMoEConfig:
    """A layer, for classes that read it; ours read the activation's constants. intermediate_size: of all tp ranks."""

    num_experts: int
    experts_per_token: int
    hidden_dim: int
    intermediate_size: int
    num_local_experts: int
    num_logical_experts: int
    activation: Any
    device: torch.device | str
    routing_method: RoutingMethodType
    moe_parallel_config: FusedMoEParallelConfig
    in_dtype: torch.dtype
    router_logits_dtype: torch.dtype | None = None
    max_num_tokens: int = 256
    has_bias: bool = False
    swiglu_limit: float | None = None
    swiglu_alpha: float | None = None
    swiglu_beta: float | None = None
    activation_situ_beta: float | None = None
    activation_situ_linear_beta: float | None = None

    @property
    def intermediate_size_per_partition(self) -> int:
        return self.intermediate_size // self.moe_parallel_config.tp_size

    @property
    def is_act_and_mul(self) -> bool:
        return width_after(2, self.activation) == 1

    @property
    def tp_size(self) -> int:
        return self.moe_parallel_config.tp_size

    @property
    def dp_size(self) -> int:
        return self.moe_parallel_config.dp_size

    @property
    def ep_size(self) -> int:
        return self.moe_parallel_config.ep_size

    @property
    def use_ep(self) -> bool:
        return self.moe_parallel_config.use_ep
