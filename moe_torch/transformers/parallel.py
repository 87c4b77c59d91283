"""Experts on several ranks, through transformers' own expert parallelism."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch.distributed.tensor import DTensor, Replicate, Shard

from moe_core.errors import InvalidInput, Unsupported
from moe_core.parallel import ExchangeSpec, Placement
from moe_torch.parallel import ExpertParallel, moe
from moe_torch.transformers.activations import NAME, unsupported
from moe_torch.transformers.experts import has_interface, operands_of, options_of, returned, why_unsupported

try:
    from transformers.distributed.configuration_utils import DistributedConfig
    from transformers.distributed.expert_parallel import EPImplementation, EPImplementationInterface
except ImportError as error:
    raise Unsupported(
        "moe_torch.transformers.parallel needs transformers 5.23 or later, got "
        f"{transformers.__version__}: {error}; pip install 'transformers>=5.23'"
    ) from error


class MoebiusEP(EPImplementation):
    """`DistributedConfig(ep_implementation="moebius")`: the experts run on Moebius, with the bits of one process.

    Ranks of one tensor-parallel group have the same batch. Each sends its part of the tokens to the experts, and all
    get all results. `experts_implementation` has no effect. exchange: how rows travel; register a subclass for another
    one.

    Raises Unsupported, when the model is loaded, for experts that Moebius cannot run, or not across ranks.
    """

    exchange = ExchangeSpec()

    def __init__(self, experts: Any, ep_mesh: Any, tp_mesh: Any) -> None:
        if not has_interface(experts):
            raise unsupported(experts, "does not go through transformers' experts interface")
        reason = why_unsupported(experts)
        if reason is not None:
            raise Unsupported(reason)
        if getattr(experts, "has_post_expert_norm", False):
            raise Unsupported(
                f"ep_implementation {NAME!r} cannot run {type(experts).__name__}, which normalises what each expert "
                "returns; pass ep_implementation='all_to_all'"
            )
        if not experts._is_expert_parallel:
            raise InvalidInput(
                f"ep_plan must share out every parameter of {type(experts).__name__} by 'grouped_gemm', got a plan "
                "that leaves them whole; leave ep_plan out for the model's own"
            )
        super().__init__(experts, ep_mesh, tp_mesh)
        self.experts = experts
        self.parallel = ExpertParallel(ep_mesh, self.exchange)
        self.placement = Placement.linear(self.num_local_experts * ep_mesh.size(), ep_mesh.size())

    def __call__(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Output `[T, D]` of this rank's tokens."""
        if options_of(self.experts).main_grad:
            raise Unsupported("main_grad cannot be had across ranks; leave it out of use(model)")
        local = [self._own(one) for one in (hidden_states, top_k_index, top_k_weights)]
        x, weights, routing, spec = operands_of(self.experts, *local)
        output = moe(x, weights, routing, spec, parallel=self.parallel, placement=self.placement).output
        output = returned(output, hidden_states.dtype)
        if self.tp_mesh.size() == 1:
            return output
        output = output.contiguous()
        options: Any = {"shape": hidden_states.shape, "stride": output.stride()}
        parts = DTensor.from_local(output, self.tp_mesh, [Shard(0)], **options)
        return parts.full_tensor()

    def _own(self, rows: torch.Tensor) -> torch.Tensor:
        if self.tp_mesh.size() == 1:
            return rows
        same = DTensor.from_local(rows, self.tp_mesh, [Replicate()], run_check=False)
        return same.redistribute(self.tp_mesh, [Shard(0)]).to_local()


EPImplementationInterface.register(NAME, MoebiusEP)


def expert_parallel(config: Any, ranks: int) -> DistributedConfig:
    """Make the `distributed_config` of `from_pretrained` that shares experts out among ranks, and nothing else.

    config: of a causal language model. The rest is whole on every rank, and every rank gets the same batch, so logits
    have the bits of one process. transformers' own plans split attention too: `DistributedConfig(tp_size=ranks,
    ep_size=ranks, ep_implementation="moebius")`, with other bits.

    Raises InvalidInput for a model without a plan for its experts.
    """
    with torch.device("meta"):
        model: Any = transformers.AutoModelForCausalLM.from_config(config)
    if not model.ep_plan or not model.tp_plan:
        raise InvalidInput(
            f"config must be of a model with an ep_plan and a tp_plan, got {type(config).__name__}; pass "
            "DistributedConfig(ep_plan=...) yourself"
        )
    whole = dict.fromkeys(model.tp_plan, "replicate")
    return DistributedConfig(tp_size=ranks, tp_plan=whole, ep_size=ranks, ep_implementation=NAME)
