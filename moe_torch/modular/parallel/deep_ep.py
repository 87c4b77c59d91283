"""Prepare and finalize on a caller's `deep_ep.Buffer`."""

from __future__ import annotations

import importlib.util
from typing import Any, ClassVar, NamedTuple

import torch

from moe_core.base.checks import require_at_least, require_flag
from moe_core.errors import InvalidInput, Unsupported
from moe_core.formats.fp8 import FP8_GROUP
from moe_core.modular.schemes import activation_quantization
from moe_core.modular.types import FusedMoEActivationFormat
from moe_core.parallel.messages import deep_ep_unit
from moe_torch import ops
from moe_torch.modular.calls import FinalizeCall, PrepareCall, PreparedTokens, handle_of, taking
from moe_torch.modular.parallel.exchange import Halves, InHalves, require_lone_rows
from moe_torch.modular.prepare_finalize import weighted_input
from moe_torch.modular.stages import as_ids, as_weights
from moe_torch.modular.weight_and_reduce import (
    TopKWeightAndReduceContiguous,
    TopKWeightAndReduceDelegate,
)
from moe_torch.parallel.deep_ep import ids_dtype


class _Sent(NamedTuple):
    """ids: as DeepEP has them."""

    handle: Any
    ids: torch.Tensor


class _OnBuffer(InHalves):
    """The base of DeepEP kernels. Inference only, bf16 rows. Rank r has the experts from r * num_experts /
    num_dispatchers on. buffer: a `deep_ep.Buffer` of the ranks that share the experts. use_fp8_dispatch: rows travel
    as e4m3 with an fp32 scale per 128 columns, for `DeepGemmExperts` and `BatchedDeepGemmExperts`.
    """

    methods: ClassVar[tuple[str, ...]]
    most_choices: ClassVar[int]
    maps_experts = property(lambda self: True)

    def __init__(self, buffer: Any, num_dispatchers: int, use_fp8_dispatch: bool) -> None:
        missing = [name for name in self.methods if not callable(getattr(buffer, name, None))]
        if missing:
            if importlib.util.find_spec("deep_ep") is None:
                raise Unsupported(
                    f"{type(self).__name__} needs the package deep_ep, which is not installed, and a Buffer of it, got "
                    f"{type(buffer).__name__}; install it, or use MoEPrepareAndFinalizeAllToAll"
                )
            raise InvalidInput(
                f"buffer must be a deep_ep.Buffer, got {type(buffer).__name__} without {', '.join(missing)}; make one"
            )
        require_at_least("num_dispatchers", num_dispatchers, 1)
        require_flag("use_fp8_dispatch", use_fp8_dispatch)
        if num_dispatchers != buffer.group_size:
            raise InvalidInput(
                f"num_dispatchers must be {buffer.group_size}, the ranks of buffer, got {num_dispatchers}; pass those"
            )
        self.buffer, self.ranks, self.use_fp8_dispatch = buffer, num_dispatchers, use_fp8_dispatch

    def post_init_setup(self, fused_experts: Any) -> None:
        if not self.use_fp8_dispatch or activation_quantization(fused_experts.quant_config) != FP8_GROUP:
            super().post_init_setup(fused_experts)

    def num_dispatchers(self) -> int:
        return self.ranks

    def topk_indices_dtype(self) -> torch.dtype:
        """See `ids_dtype`."""
        return ids_dtype()

    @taking(PrepareCall)
    def prepare_async(self, call: PrepareCall) -> Halves:
        """Return (hook, receiver). expert_map and defer_input_quant are not read.

        a1 is bf16 `[M, K]`, topk_weights and topk_ids `[M, topk]` with ids of all ranks' experts. Ids outside count as
        -1.
        """
        # The kernel's default num_experts is this rank's own number.
        num_experts, num_local_experts = call.num_experts, call.num_local_experts
        if num_experts in (-1, num_local_experts) and num_local_experts is not None:
            num_experts = num_local_experts * self.ranks
        if num_experts % self.ranks or num_local_experts not in (None, num_experts // self.ranks):
            raise InvalidInput(
                f"num_experts must be {self.ranks} times those of w1, {num_local_experts}, got {num_experts}; pad the "
                "experts, or use MoEPrepareAndFinalizeAllToAll"
            )
        require_lone_rows(call.quant_config)
        ids = as_ids(call.topk_ids)
        weights = as_weights(call.topk_weights, ids)
        x = weighted_input(call.a1, weights, call.apply_router_weight_on_input)
        self._check_rows(x, ids, weights)
        self.check_sizes(x, num_experts)
        ids = torch.where((ids >= 0) & (ids < num_experts), ids, -1).to(self.topk_indices_dtype())
        return self.dispatch(x.contiguous(), weights, ids, num_experts)

    def _check_rows(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> None:
        if x.dtype != torch.bfloat16:
            raise Unsupported(f"a1 must be bf16, which DeepEP moves, got {x.dtype}; cast it")
        if torch.is_grad_enabled() and (x.requires_grad or weights.requires_grad):
            raise Unsupported("a1 and topk_weights must need no gradient: DeepEP has none; call under torch.no_grad()")
        if ids.shape[0] != len(x):
            raise InvalidInput(
                f"topk_ids must have a row for each of the {len(x)} tokens of a1, got {list(ids.shape)}"
                "; route the same tokens"
            )
        if ids.shape[1] > self.most_choices:
            raise Unsupported(
                f"topk must be at most {self.most_choices}, which DeepEP has room for, got {ids.shape[1]}"
                "; make the object with more choices"
            )
        if self.use_fp8_dispatch and x.shape[1] % 128:
            raise Unsupported(
                f"a1 must have a multiple of 128 columns for use_fp8_dispatch, got {x.shape[1]}; leave it out"
            )

    def check_sizes(self, x: torch.Tensor, num_experts: int) -> None:
        raise NotImplementedError

    def dispatch(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, num_experts: int) -> Halves:
        raise NotImplementedError


def _require_columns(x: torch.Tensor, what: str, fits: bool) -> None:
    if not fits:
        raise Unsupported(
            f"a1 must have {what} columns for this buffer, got {x.shape[1]}; pad hidden_states and weights, or use "
            "MoEPrepareAndFinalizeAllToAll"
        )


class DeepEPHTPrepareAndFinalize(_OnBuffer):
    """DeepEP's high-throughput kernels, format Standard: a token travels once to each rank that has experts of it.

    That rank's experts weight and add up a token's slots in bf16. DeepEP adds the ranks' rows. rank_expert_offset: this
    rank's first expert.
    """

    methods = ("get_dispatch_layout", "dispatch", "combine")
    most_choices = 32
    activation_format = property(lambda self: FusedMoEActivationFormat.Standard)

    def __init__(
        self,
        buffer: Any,
        num_dispatchers: int,
        dp_size: int = 1,
        rank_expert_offset: int | None = None,
        *,
        use_fp8_dispatch: bool = False,
    ) -> None:
        super().__init__(buffer, num_dispatchers, use_fp8_dispatch)
        require_at_least("dp_size", dp_size, 1)
        self.dp_size, self.rank_expert_offset = dp_size, rank_expert_offset

    def check_sizes(self, x: torch.Tensor, num_experts: int) -> None:
        first = self.buffer.rank * (num_experts // self.ranks)
        if self.rank_expert_offset not in (None, first):
            raise InvalidInput(
                f"rank_expert_offset must be {first}, the first of rank {self.buffer.rank}, got "
                f"{self.rank_expert_offset}; leave it out"
            )
        unit = deep_ep_unit(self.ranks) // (1 if self.use_fp8_dispatch else 2)
        _require_columns(x, f"a multiple of {unit}", x.shape[1] % unit == 0)

    def dispatch(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, num_experts: int) -> Halves:
        rows: Any = x
        if self.use_fp8_dispatch:
            quantized = ops.quantize_rows(x, FP8_GROUP)
            rows = (quantized.values, quantized.scales)
        per_rank, per_node, per_expert, in_rank, _ = self.buffer.get_dispatch_layout(ids, num_experts)
        came, own_ids, own_weights, _, handle, event = self.buffer.dispatch(
            rows,
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_node,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert,
            topk_idx=ids,
            topk_weights=weights,
            async_finish=True,
        )

        def receiver() -> PreparedTokens:
            event.current_stream_wait()
            a1q, scale = came if isinstance(came, tuple) else (came, None)
            # Ids are local, -1 if another rank has the expert.
            return PreparedTokens(a1q, scale, None, as_ids(own_ids), own_weights, _Sent(handle, ids))

        return _nothing, receiver

    @taking(FinalizeCall)
    def finalize_async(self, call: FinalizeCall) -> Halves:
        prepared, impl = call.prepared, call.weight_and_reduce_impl
        sent = handle_of(self, prepared, _Sent)
        assert prepared is not None and prepared.topk_weights is not None and prepared.topk_ids is not None
        if isinstance(impl, TopKWeightAndReduceDelegate):
            impl = TopKWeightAndReduceContiguous()
        routing = prepared.topk_weights, prepared.topk_ids
        rows = impl.apply(None, call.fused_expert_output, *routing, call.apply_router_weight_on_input)
        sums, _, event = self.buffer.combine(rows.contiguous(), sent.handle, async_finish=True)

        def receiver() -> None:
            event.current_stream_wait()
            call.output.copy_(sums)

        return _nothing, receiver


class DeepEPLLPrepareAndFinalize(_OnBuffer):
    """DeepEP's low-latency kernels, format BatchedExperts: a1q `[num_local_experts, max_tokens_per_rank * ranks, K]`.

    The experts need max_num_tokens = max_tokens_per_rank and num_dispatchers, and leave weights and sums to DeepEP. The
    experts of a token must differ. The buffer has room for two calls.
    """

    methods = ("low_latency_dispatch", "low_latency_combine", "get_low_latency_rdma_size_hint")
    #: Sizes that DeepEP's kernels are compiled for, 3072 from version 2 on.
    SUPPORTED_HIDDEN_SIZES = (2048, 2560, 3072, 4096, 5120, 6144, 7168, 8192)
    most_choices = 11
    activation_format = property(lambda self: FusedMoEActivationFormat.BatchedExperts)

    def __init__(
        self, buffer: Any, max_tokens_per_rank: int, num_dispatchers: int, use_fp8_dispatch: bool = False
    ) -> None:
        super().__init__(buffer, num_dispatchers, use_fp8_dispatch)
        require_at_least("max_tokens_per_rank", max_tokens_per_rank, 1)
        self.max_tokens_per_rank = max_tokens_per_rank
        if not buffer.low_latency_mode:
            raise InvalidInput("buffer must be in low-latency mode, got one that is not; pass low_latency_mode=True")
        if max_tokens_per_rank * num_dispatchers % 4:
            raise Unsupported(
                f"max_tokens_per_rank times num_dispatchers must be a multiple of 4, got {max_tokens_per_rank} times "
                f"{num_dispatchers}; round max_tokens_per_rank up"
            )

    def max_num_tokens_per_rank(self) -> int:
        return self.max_tokens_per_rank

    def check_sizes(self, x: torch.Tensor, num_experts: int) -> None:
        sizes, most = self.SUPPORTED_HIDDEN_SIZES, self.max_tokens_per_rank
        _require_columns(x, f"one of {', '.join(map(str, sizes))}", x.shape[1] in sizes)
        if len(x) > most:
            raise Unsupported(
                f"a1 must have at most max_tokens_per_rank = {most} rows, got {len(x)}; raise it, or split the batch"
            )
        needed = self.buffer.get_low_latency_rdma_size_hint(most, x.shape[1], self.ranks, num_experts)
        if self.buffer.num_rdma_bytes < needed:
            raise Unsupported(
                f"buffer must have at least {needed} bytes (num_rdma_bytes) for {most} tokens of {x.shape[1]} columns "
                f"and {num_experts} experts, got {self.buffer.num_rdma_bytes}; make a larger one"
            )

    def dispatch(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, num_experts: int) -> Halves:
        came, counts, handle, _, hook = self.buffer.low_latency_dispatch(
            x, ids, self.max_tokens_per_rank, num_experts, use_fp8=self.use_fp8_dispatch, return_recv_hook=True
        )

        def receiver() -> PreparedTokens:
            a1q, scale = came if self.use_fp8_dispatch else (came, None)
            return PreparedTokens(a1q, scale, counts, handle=_Sent(handle, ids))

        return hook, receiver

    @taking(FinalizeCall)
    def finalize_async(self, call: FinalizeCall) -> Halves:
        """Return (hook, receiver) of DeepEP's combine into output `[M, K]`."""
        sent = handle_of(self, call.prepared, _Sent)
        if not isinstance(call.weight_and_reduce_impl, TopKWeightAndReduceDelegate):
            raise InvalidInput(
                f"weight_and_reduce_impl must be TopKWeightAndReduceDelegate, as DeepEP weights and adds, got "
                f"{call.weight_and_reduce_impl}; choose batched experts that leave both to finalize"
            )
        weights = as_weights(call.topk_weights, sent.ids)
        if call.apply_router_weight_on_input:
            weights = torch.ones_like(weights)
        rows = call.fused_expert_output.contiguous()
        _, _, hook = self.buffer.low_latency_combine(
            rows, sent.ids, weights, sent.handle, return_recv_hook=True, out=call.output
        )
        return hook, _nothing


def _nothing() -> None:
    return
