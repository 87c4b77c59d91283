"""The steps before and after the experts."""

from __future__ import annotations

import abc
from typing import Any

import torch

from moe_core.base.checks import require_at_least
from moe_core.errors import InvalidInput, Unsupported
from moe_core.modular.schemes import activation_quantization
from moe_core.modular.types import FusedMoEActivationFormat
from moe_torch import ops
from moe_torch.modular import weight_and_reduce as reductions
from moe_torch.modular.calls import FinalizeCall, PrepareCall, PreparedTokens, taking
from moe_torch.modular.newest.lora import ids_to_move
from moe_torch.modular.quant_config import FUSED_MOE_UNQUANTIZED_CONFIG, FusedMoEQuantConfig
from moe_torch.modular.stages import as_ids, as_weights, batches_of, weighted_rows
from moe_torch.modular.weight_and_reduce import TopKWeightAndReduce, TopKWeightAndReduceDelegate

_DELEGATE = TopKWeightAndReduceDelegate()


class FusedMoEPrepareAndFinalize(abc.ABC):
    """Bring tokens to the experts and their outputs back. Objects keep nothing between calls.

    For expert parallelism `prepare` sends tokens to the ranks of their experts and returns the arrived tokens with ids,
    weights and a handle for `finalize`. The modular kernel passes the arguments that both methods name, so all
    published lists work: a subclass may take quant_config, defer_input_quant and num_local_experts (of w1), and leave
    out unused arguments. `prepare` may return PreparedTokens, or the published tuple of 3 or 5.
    """

    @property
    def activation_format(self) -> FusedMoEActivationFormat | None:
        """The format of a1q. The first generation does not say it (None)."""
        return None

    def post_init_setup(self, fused_experts: Any) -> None:
        """Called once by a kernel with its experts, before it checks them."""
        return

    def allocate_fused_expert_output(
        self,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        weight_and_reduce_impl: TopKWeightAndReduce,
    ) -> torch.Tensor | None:
        """Memory for the experts' output, dense, which `finalize` gets. None: the kernel's."""
        return None

    _lora_context: Any = None

    def set_lora_context(self, ctx: Any) -> None:
        """The experts' adapters: classes that move rows return their `PreparedTokens.adapter_ids`."""
        self._lora_context = ctx

    @abc.abstractmethod
    def prepare(
        self,
        a1: torch.Tensor,
        a1_scale: torch.Tensor | None,
        a2_scale: torch.Tensor | None,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        num_experts: int,
        expert_map: torch.Tensor | None,
        apply_router_weight_on_input: bool,
    ) -> PreparedTokens:
        """Weight a1 `[M, K]` if requested (topk 1), and dispatch. Never writes to a1. Arguments: see `PrepareCall`."""

    @abc.abstractmethod
    def finalize(
        self,
        output: torch.Tensor,
        fused_expert_output: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        apply_router_weight_on_input: bool,
        weight_and_reduce_impl: TopKWeightAndReduce = _DELEGATE,
        prepared: PreparedTokens | None = None,
    ) -> None:
        """Combine into output `[M, K]`, weighted unless the input was. weight_and_reduce_impl: what is left to do."""

    def writes_output(self, weight_and_reduce_impl: TopKWeightAndReduce) -> bool:
        """True if experts may write the caller's output, with nothing left to combine."""
        return False

    @property
    def maps_experts(self) -> bool:
        """True if `prepare` applies expert_map, so that the experts must not."""
        return False

    def supports_async(self) -> bool:
        """True if the kernel shall call `prepare_async` and `finalize_async`. These return a receiver, or a hook and a
        receiver, called in this order. The receiver waits and returns the result of the method without async."""
        return False

    def prepare_async(self, *arguments: Any, **named: Any) -> Any:
        """`prepare` without waiting for other ranks."""
        raise Unsupported(f"{type(self).__name__} has no prepare_async; let supports_async return False")

    def finalize_async(self, *arguments: Any, **named: Any) -> Any:
        """`finalize` without waiting for other ranks."""
        raise Unsupported(f"{type(self).__name__} has no finalize_async; let supports_async return False")

    def supports_dbo(self) -> bool:
        """For callers that run two batches at a time."""
        return self.supports_async()

    def supports_deferred_moe_finalize(self) -> bool:
        """True if the kernel may return an UnfinalizedMoEOutput and leave out `finalize`."""
        return False

    def tell_failure(self, device: torch.device) -> None:
        """Called if the kernel raises before `prepare`, so that no other rank waits for this one."""
        return

    def topk_indices_dtype(self) -> torch.dtype | None:
        """The dtype of ids that `prepare` needs. None: int32."""
        return None

    def max_num_tokens_per_rank(self) -> int | None:
        """The most tokens of a call. None: any number."""
        return None

    def num_dispatchers(self) -> int:
        return 1

    def output_is_reduced(self) -> bool:
        return False


def weighted_input(a1: torch.Tensor, topk_weights: torch.Tensor, apply_router_weight_on_input: bool) -> torch.Tensor:
    """a1, or with the flag a1 times its weight in fp32, rounded once (topk 1), in a new tensor."""
    if not apply_router_weight_on_input:
        return a1
    if topk_weights.shape[1] != 1:
        raise InvalidInput(
            f"topk must be 1 with apply_router_weight_on_input, got {topk_weights.shape[1]}; weight the output instead"
        )
    return weighted_rows(a1, as_weights(topk_weights, topk_weights))


def require_deferred(part: Any, experts: Any) -> None:
    """Raise Unsupported for experts that need quantised tokens."""
    if experts.quant_config.quantizes_activations and not experts.expects_unquantized_inputs:
        raise Unsupported(
            f"fused_experts must quantise tokens for {type(part).__name__}, which brings them as they are, got "
            f"{type(experts).__name__} with expects_unquantized_inputs False; use MoEPrepareAndFinalizeNoEP"
        )


def quantized_input(a1: torch.Tensor, config: FusedMoEQuantConfig) -> PreparedTokens:
    """a1 `[M, K]` in the format of the experts' activations, with scales fp32 `[1]`, `[M, 1]` or `[M, groups]`."""
    format = activation_quantization(config)
    if format is None or format.scale_dtypes[0] != "float32":
        raise Unsupported(
            f"the scheme of quant_config must have fp32 scales where prepare quantises, got {config.scheme}; let the "
            "experts quantise (expects_unquantized_inputs)"
        )
    scale = config.a1_scale
    rows = ops.quantize_rows(a1, format, scales=None if scale is None else scale.reshape(1))
    return PreparedTokens(rows.values, rows.scales.reshape(1) if format.group_rows is None else rows.scales)


class _OneDevice(FusedMoEPrepareAndFinalize):
    def prepare(
        self,
        a1,
        a1_scale,
        a2_scale,
        topk_weights,
        topk_ids,
        num_experts,
        expert_map,
        apply_router_weight_on_input,
        quant_config=FUSED_MOE_UNQUANTIZED_CONFIG,
        defer_input_quant=True,
    ) -> PreparedTokens:
        tokens = a1, topk_weights, topk_ids, num_experts, expert_map, apply_router_weight_on_input
        return self.prepared(PrepareCall(*tokens, quant_config, defer_input_quant))

    @taking(FinalizeCall)
    def finalize(self, call: FinalizeCall) -> None:
        reduction = call.weight_and_reduce_impl
        if isinstance(reduction, TopKWeightAndReduceDelegate):
            reduction = self.reduction(call.prepared)
        reduction.apply(*call[:5])

    @abc.abstractmethod
    def prepared(self, call: PrepareCall) -> PreparedTokens:
        """Scales are in the experts' configuration."""

    @abc.abstractmethod
    def reduction(self, prepared: PreparedTokens | None) -> TopKWeightAndReduce:
        pass


class MoEPrepareAndFinalizeNoEP(_OneDevice):
    """One device, format Standard: tokens stay where they are."""

    activation_format = property(lambda self: FusedMoEActivationFormat.Standard)

    def prepared(self, call: PrepareCall) -> PreparedTokens:
        a1, on_input = call.a1, call.apply_router_weight_on_input
        if on_input:
            a1 = weighted_input(a1, call.topk_weights, on_input)
        if call.defer_input_quant or not call.quant_config.quantizes_activations:
            return PreparedTokens(a1)
        return quantized_input(a1, call.quant_config)

    def reduction(self, prepared: PreparedTokens | None) -> TopKWeightAndReduce:
        return reductions.TopKWeightAndReduceContiguous()

    def writes_output(self, weight_and_reduce_impl: TopKWeightAndReduce) -> bool:
        return isinstance(weight_and_reduce_impl, reductions.TopKWeightAndReduceNoOP)


class BatchedPrepareAndFinalize(_OneDevice):
    """One device, format BatchedExperts: a1q `[num_local_experts, max_num_tokens, K]`, unused rows zero.

    An expert's block holds its tokens in order, each once. A call has at most max_num_tokens tokens. rank: the local
    experts are num_local_experts ids from rank * num_local_experts on, unless a call brings an expert_map.
    """

    activation_format = property(lambda self: FusedMoEActivationFormat.BatchedExperts)

    def max_num_tokens_per_rank(self) -> int:
        return self.max_num_tokens

    maps_experts = property(lambda self: True)

    def post_init_setup(self, fused_experts: Any) -> None:
        require_deferred(self, fused_experts)

    def __init__(self, max_num_tokens: int, num_local_experts: int, num_dispatchers: int = 1, rank: int = 0) -> None:
        require_at_least("max_num_tokens", max_num_tokens, 1)
        require_at_least("num_local_experts", num_local_experts, 1)
        require_at_least("rank", rank, 0)
        if num_dispatchers != 1:
            raise InvalidInput(
                f"num_dispatchers must be 1, as this class exchanges nothing between ranks, got {num_dispatchers}; "
                "write a subclass of FusedMoEPrepareAndFinalize that does"
            )
        self.max_num_tokens, self.num_local_experts, self.rank = max_num_tokens, num_local_experts, rank

    def prepared(self, call: PrepareCall) -> PreparedTokens:
        a1, num_experts, expert_map = call.a1, call.num_experts, call.expert_map
        if a1.shape[0] > self.max_num_tokens:
            raise InvalidInput(
                f"a1 must have at most max_num_tokens = {self.max_num_tokens} rows, got {a1.shape[0]}; raise "
                "max_num_tokens or split the batch"
            )
        last = (self.rank + 1) * self.num_local_experts
        if expert_map is None and num_experts < last:
            raise InvalidInput(
                f"num_experts must be at least {last}, the end of the experts of rank {self.rank}, got {num_experts}; "
                "pass global_num_experts"
            )
        ids = as_ids(call.topk_ids)
        if ids.shape[0] != a1.shape[0]:
            raise InvalidInput(
                f"topk_ids must have a row for each of the {a1.shape[0]} tokens of a1, got {list(ids.shape)}; route "
                "the same tokens"
            )
        a1 = weighted_input(a1, call.topk_weights, call.apply_router_weight_on_input)
        if expert_map is None:
            ids = reductions.ids_of_rank(ids, self.rank, self.num_local_experts)
        layout = batches_of(ids, self.num_local_experts, self.max_num_tokens, expert_map)
        slots = layout.slot_of_row
        source = a1 if a1.shape[0] else a1.new_zeros(1, a1.shape[1])
        rows = source[(slots.clamp(min=0) // ids.shape[1]).long()]
        rows = torch.where((slots >= 0)[:, None], rows, 0)
        blocks = rows.view(self.num_local_experts, self.max_num_tokens, a1.shape[1])
        adapters = ids_to_move(self._lora_context, a1)
        if adapters is not None:
            adapters = torch.nn.functional.pad(adapters, (0, 1), value=-1)
            adapters = adapters[torch.where(slots >= 0, slots // ids.shape[1], len(a1)).long()]
        return PreparedTokens(blocks, None, layout.group_sizes, handle=layout, adapter_ids=adapters)

    def reduction(self, prepared: PreparedTokens | None) -> TopKWeightAndReduce:
        """Without prepared tokens, rows are located by rank."""
        if prepared is None or prepared.handle is None:
            return reductions.TopKWeightAndReduceNaiveBatched(self.rank)
        return reductions.PlacedRows(prepared.handle)
