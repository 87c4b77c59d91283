"""A MoE layer of Megatron-Core 0.16.1 on our experts and exchange, see docs/user/migration.md."""
# pyright: reportMissingImports=false

from __future__ import annotations

import dataclasses
from typing import Any, cast

import torch
from torch.nn import functional

from moe_core.errors import Unsupported
from moe_core.specs import Activation, MoESpec
from moe_core.specs.operands import ExpertWeights, TopK
from moe_torch import ops
from moe_torch.parallel import ExchangeSpec, ExpertParallel, Placement, moe

try:
    from megatron.core import tensor_parallel
    from megatron.core.activations import quick_gelu, squared_relu
    from megatron.core.dist_checkpointing import ShardedTensor
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker, get_expert_parallel_rng_tracker_name
    from megatron.core.transformer.module import MegatronModule
    from megatron.core.transformer.moe.moe_layer import MoELayer
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.utils import make_sharded_object_for_checkpoint
except ModuleNotFoundError as error:
    raise Unsupported(
        f"moe_torch.megatron needs megatron-core, and {error.name} is not installed; pip install megatron-core"
    ) from error

__all__ = ["Experts", "Layer", "moe_layer_spec"]

#: Option -> the values that change nothing here.
_PLAIN: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("fp8", "fp4", "moe_latent_size"), (None,)),
    "moe_apply_probs_on_input": (False,),
    "moe_shared_expert_overlap": (False,),
    "delay_wgrad_compute": (False,),
    "moe_pad_expert_input_to_capacity": (False,),
}
_EXTRA = "._extra_state"


def _activation(config: Any) -> Activation:
    offset, limit = getattr(config, "glu_linear_offset", 0.0), getattr(config, "activation_func_clamp_value", None)
    gated, of = config.gated_linear_unit, config.activation_func
    names = {functional.silu: "silu", functional.gelu: "gelu", squared_relu: "relu2"}
    if of is quick_gelu and gated and offset == 1.0:
        return Activation("swiglu_oai", limit=limit)
    if of not in names or offset or (limit is not None and not gated):
        raise Unsupported(
            f"activation_func must be silu, gelu, squared_relu, or quick_gelu with glu_linear_offset=1, got {of} with "
            f"{offset} and clamp {limit}; use Megatron's layer"
        )
    return Activation(names[of], gated=gated, **({} if limit is None else {"limit": limit}))


class _Added(torch.autograd.Function):
    """`param -> param`, whose gradient the op adds to main_grad. The backward tells Megatron so."""

    @staticmethod
    def forward(ctx: Any, param: torch.Tensor) -> torch.Tensor:
        ctx.param = param
        ctx.set_materialize_grads(False)
        return param.view_as(param)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.param.grad_added_to_main_grad = True
        # Its hooks of overlapped reductions want a gradient, and drop it.
        return torch.empty_like(ctx.param)


class Experts(MegatronModule):
    """The experts of a rank: linear_fc1 `[L, 2F, D]` (`[L, F, D]` ungated) and linear_fc2 `[L, D, F]`, with biases if
    the config has them. Distributed checkpoints have the keys and shapes of Megatron's own experts.

    With `gradient_accumulation_fusion`, gradients are added to `main_grad` in fp32 ahead of any rounding.
    """

    def __init__(self, num_local_experts: int, config: Any, *, pg_collection: Any) -> None:
        super().__init__(config=config)
        self.ep_group, self.expt_dp = pg_collection.ep, pg_collection.expt_dp
        if pg_collection.expt_tp.size() > 1:
            raise Unsupported(
                f"expert_tensor_parallel_size must be 1, got {pg_collection.expt_tp.size()}; raise expert parallelism"
            )
        width = config.moe_ffn_hidden_size * (2 if config.gated_linear_unit else 1)
        device: Any = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        L, D, F = num_local_experts, config.hidden_size, config.moe_ffn_hidden_size
        self.linear_fc1 = self._stack((L, width, D), device, config.init_method)
        self.linear_fc2 = self._stack((L, D, F), device, config.output_layer_init_method)
        with_bias = config.add_bias_linear
        self.linear_fc1_bias = self._stack((L, width), device, torch.nn.init.zeros_) if with_bias else None
        self.linear_fc2_bias = self._stack((L, D), device, torch.nn.init.zeros_) if with_bias else None
        self.register_load_state_dict_post_hook(_without_extra)
        self.spec = MoESpec(
            _activation(config), weight_layout="out_in", main_grad=bool(config.gradient_accumulation_fusion)
        )

    def _stack(self, shape: tuple[int, ...], device: Any, initialize: Any) -> torch.nn.Parameter:
        parameter = torch.nn.Parameter(torch.empty(shape, device=device, dtype=self.config.params_dtype))
        # Megatron then reduces its gradient over the ranks of expert data parallelism.
        cast(Any, parameter).allreduce = self.ep_group.size() == 1
        if self.config.perform_initialization:
            if self.config.use_cpu_initialization:
                # All ranks draw all experts, as Megatron does with a tensor axis.
                every = torch.empty(shape[0] * self.ep_group.size(), *shape[1:])
                for expert in every:
                    initialize(expert)
                parameter.data.copy_(every.chunk(self.ep_group.size())[self.ep_group.rank()])
            else:
                with get_cuda_rng_tracker().fork(get_expert_parallel_rng_tracker_name()):
                    for expert in parameter.data:
                        initialize(expert)
        return parameter

    def weights(self) -> ExpertWeights:
        matrices = self.linear_fc1, self.linear_fc2
        if self.spec.main_grad and torch.is_grad_enabled():
            matrices = tuple(self._added(one) for one in matrices)
        return ExpertWeights(*matrices, gate_up_bias=self.linear_fc1_bias, down_bias=self.linear_fc2_bias)

    def _added(self, param: Any) -> torch.Tensor:
        weight = cast(Any, _Added.apply(param))
        weight.main_grad = param.main_grad
        return weight

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: Any = None) -> dict[str, Any]:
        """As of Megatron's experts: `experts.linear_fc1.weight` `[E, 2F, D]` and so on, sharded by expert."""
        if (metadata or {}).get("singleton_local_shards"):
            raise Unsupported("singleton_local_shards must be False, got True; save experts as one tensor")
        ranks, rank, before = self.ep_group.size(), self.ep_group.rank(), len(sharded_offsets)
        replica, count = (0, 0, self.expt_dp.rank()), len(self.linear_fc1)
        found: dict[str, Any] = {}
        for name, parameter in self.named_parameters():
            key = f"{prefix}experts.{name.replace('_bias', '.bias')}{'' if name.endswith('_bias') else '.weight'}"
            found[prefix + name] = ShardedTensor.from_rank_offsets(
                key, parameter, *sharded_offsets, (before, rank, ranks), replica_id=replica, prepend_axis_num=before
            )
        # Megatron's modules ask for a state of each expert.
        for expert in range(rank * count, (rank + 1) * count):
            for name in ("linear_fc1", "linear_fc2"):
                found[f"{prefix}expert{expert}.{name}{_EXTRA}"] = make_sharded_object_for_checkpoint(
                    None,
                    f"{prefix}experts.{name}{_EXTRA}",
                    (*sharded_offsets, (before, expert, ranks * count)),
                    replica,
                )
        return found


def _without_extra(module: torch.nn.Module, incompatible: Any) -> None:
    kept = [key for key in incompatible.unexpected_keys if not key.endswith(_EXTRA)]
    incompatible.unexpected_keys[:] = kept


class Layer(MoELayer):
    """Megatron's MoE layer with its router, losses, shared experts and padding mask. `Experts` and our exchange
    take the place of its dispatcher and experts. Outputs and gradients of experts have the same bits for any number of
    ranks.

    Padding tokens reach no expert, so their output is the shared experts' alone. Raises Unsupported for options that
    would change numbers.
    """

    #: Options of the exchange, for a subclass. None: tokens by all-to-all.
    exchange: ExchangeSpec | None = None

    def __init__(
        self, config: Any, submodules: Any = None, layer_number: Any = None, pg_collection: Any = None
    ) -> None:
        for name, plain in _PLAIN.items():
            value = getattr(config, name, plain[0])
            if value not in plain:
                raise Unsupported(f"{name} must be {plain[0]}, got {value}; leave it out, or use Megatron's layer")
        super().__init__(config, submodules, layer_number, pg_collection)
        self.placement = Placement.linear(config.num_moe_experts, self.ep_group.size())
        self.parallel = None
        if self.ep_group.size() > 1:
            self.parallel = ExpertParallel(self.ep_group, self.exchange or ExchangeSpec())

    def forward(
        self, hidden_states: torch.Tensor, intermediate_tensors: Any = None, padding_mask: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, None]:
        """hidden_states `[S, B, D]`. padding_mask bool `[B, S]`: True for padding, as Megatron's router reads it."""
        if intermediate_tensors is not None:
            raise Unsupported("cuda_graph_scope must hold no part of a MoE layer, got one; leave it out")
        if self.training and self.attn_tp_group.size() > 1 and not self.config.sequence_parallel:
            raise Unsupported("sequence_parallel must be True for tensor parallel training, got False; switch it on")
        mask = None if padding_mask is None else padding_mask.transpose(0, 1).bool()
        if self.moe_layer_recompute:
            return cast(Any, tensor_parallel.checkpoint(self._forward, False, hidden_states, mask)), None
        return self._forward(hidden_states, mask), None

    def _forward(self, hidden_states: torch.Tensor, padding: torch.Tensor | None) -> torch.Tensor:
        shared = self.shared_experts_compute(hidden_states)
        probabilities, chosen = self.route(hidden_states, padding)
        # Experts of a token in ascending order, -1 behind them.
        ids = (~chosen).to(torch.uint8).argsort(dim=1, stable=True)[:, : self.config.moe_router_topk]
        weights = probabilities.gather(1, ids).float()
        ids = ids.masked_fill(~chosen.gather(1, ids), -1).int()
        x, experts = hidden_states.reshape(-1, hidden_states.shape[-1]), cast(Any, self.experts)
        token_mask = None if padding is None else ~padding.reshape(-1)
        arguments = x, experts.weights(), TopK(ids, weights), experts.spec
        if self.parallel is None:
            output = ops.moe(*arguments, token_mask=token_mask).output
        else:
            output = moe(*arguments, parallel=self.parallel, placement=self.placement, token_mask=token_mask).output
        output = output.view(hidden_states.shape)
        return output if shared is None else output + shared


def moe_layer_spec(**options: Any) -> Any:
    """Return the ModuleSpec of `Layer`. options: of Megatron's `get_moe_module_spec`, for its shared experts."""
    spec = get_moe_module_spec(**{"use_te": False, "num_experts": 1} | options)
    submodules = dataclasses.replace(spec.submodules, experts=ModuleSpec(module=Experts))
    return dataclasses.replace(spec, module=Layer, submodules=submodules)
