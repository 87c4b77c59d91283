"""The modular kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from moe_core.base.arrays import ALIGNMENT
from moe_core.base.checks import require_at_least, require_flag
from moe_core.errors import InvalidInput, Unsupported
from moe_core.modular.types import ProblemSize, number_of_ids
from moe_core.specs.matmul import Activation
from moe_torch.bridge.options import require_instance
from moe_torch.modular.calls import PreparedTokens, finished, require_written
from moe_torch.modular.experts import FusedMoEPermuteExpertsUnpermute
from moe_torch.modular.generations.dispatch import CALL_SCALES, Plan, plan_of
from moe_torch.modular.generations.steps import Step, Tokens, as_prepared, finalized, run_step
from moe_torch.modular.generations.tokens import ExpertTokensMetadata
from moe_torch.modular.prepare_finalize import FusedMoEPrepareAndFinalize
from moe_torch.modular.stages import as_ids, as_weights
from moe_torch.modular.weight_and_reduce import TopKWeightAndReduceNoOP
from moe_torch.modular.workspaces import Scratch, Workspaces

#: Stands for the result of a `prepare` that the kernel does not call.
_PASSED: Any = PreparedTokens(None)  # type: ignore[arg-type]


class FusedMoEModularKernel(torch.nn.Module):
    """`kernel(hidden_states, w1, w2, topk_weights, topk_ids)`: prepare -> experts -> finalize.

    chunk_size: the most tokens that experts get at a time, a multiple of 16, to bound the workspaces. None: all.
    Results are bitwise the same. The reference engine and `torch.compile` run all tokens at once. workspaces: scratch
    to share with other kernels. shared_experts: a function of hidden_states that runs while tokens travel to other
    ranks. The kernel then returns (its result, output).

    Raises InvalidInput if the formats of the two parts differ, or the experts cannot run in chunks.
    """

    def __init__(
        self,
        prepare_finalize: FusedMoEPrepareAndFinalize,
        fused_experts: FusedMoEPermuteExpertsUnpermute,
        *,
        chunk_size: int | None = None,
        workspaces: Workspaces | None = None,
        shared_experts: Callable[[torch.Tensor], Any] | None = None,
    ) -> None:
        super().__init__()
        require_instance("prepare_finalize", prepare_finalize, FusedMoEPrepareAndFinalize)
        require_instance("fused_experts", fused_experts, FusedMoEPermuteExpertsUnpermute)
        self._plan = plan_of(prepare_finalize, fused_experts)
        if chunk_size is not None:
            require_at_least("chunk_size", chunk_size, 1)
            # Every slice of rows then starts at an aligned address.
            if chunk_size % ALIGNMENT:
                raise InvalidInput(f"chunk_size must be a multiple of {ALIGNMENT}, got {chunk_size}; round it up")
            if not fused_experts.supports_chunking():
                raise InvalidInput(
                    f"chunk_size must be None for {type(fused_experts).__name__}, which supports no chunking, got "
                    f"{chunk_size}; leave it out"
                )
        self.prepare_finalize, self.fused_experts, self.chunk_size = prepare_finalize, fused_experts, chunk_size
        self.workspaces = Workspaces() if workspaces is None else workspaces
        self.shared_experts = shared_experts

    def forward(
        self,
        hidden_states: torch.Tensor,
        w1: torch.Tensor,
        w2: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        inplace: bool = False,
        activation: str | Activation = "silu",
        global_num_experts: int = -1,
        expert_map: torch.Tensor | None = None,
        w1_scale: torch.Tensor | None = None,
        w2_scale: torch.Tensor | None = None,
        w1_zp: torch.Tensor | None = None,
        w2_zp: torch.Tensor | None = None,
        a1_scale: torch.Tensor | None = None,
        a2_scale: torch.Tensor | None = None,
        apply_router_weight_on_input: bool = False,
    ) -> Any:
        """Return output `[M, K]` of hidden_states `[M, K]` in bf16, fp16 or fp32, the dtype of w1 and w2.

        w1, w2: in the weight_layout of the experts. topk_weights: floats `[M, topk]`. topk_ids: integers `[M, topk]`.
        -1 and ids outside: no expert. inplace: write the output over hidden_states. global_num_experts: -1: the experts
        of w1. expert_map: int32 `[global_num_experts]`, global ids to local ones, or -1. apply_router_weight_on_input:
        weight hidden_states, once (topk 1). Scales and zero points add to those in quant_config.
        """
        plan, part, experts = self._plan, self.prepare_finalize, self.fused_experts
        if plan.part is not part or plan.experts is not experts:
            plan = self._plan = plan_of(part, experts)
        try:
            ids = as_ids(topk_ids)
            weights = as_weights(topk_weights, ids)
            scales: tuple[Any, ...] = (w1_scale, w2_scale, w1_zp, w2_zp, a1_scale, a2_scale)
            if not (w1_scale is w2_scale is w1_zp is w2_zp is a1_scale is a2_scale is None):
                # The others go to methods that take them.
                left = {name: one for name, one in zip(CALL_SCALES, scales, strict=True) if name not in plan.scales}
                experts = experts.with_quant_config(experts.quant_config.with_arrays(**left))
            experts, w1, w2 = experts.as_stored(w1, w2)
            size = self._check(experts, hidden_states, (w1, w2), ids, expert_map)
            global_num_experts = number_of_ids(global_num_experts, size.E, expert_map)
            scratch, on_input = self.workspaces.here(hidden_states.device), apply_router_weight_on_input
            columns = experts.output_hidden_dim(size.K) if plan.narrows else hidden_states.shape[1]
            output = _output_for(hidden_states, columns, inplace, scratch)
            if plan.limits:
                _require_within(plan, hidden_states, on_input)
            if plan.adapts:
                context: Any = experts._lora_context  # pyright: ignore[reportAttributeAccessIssue]
                if context is not None and self.chunk_size is not None:
                    raise Unsupported(
                        "chunk_size must be None with adapters: chunks have other tiles, got "
                        f"{self.chunk_size}; leave it out"
                    )
                if part._lora_context is not context:
                    part.set_lora_context(context)
        except (InvalidInput, Unsupported):
            part.tell_failure(hidden_states.device)
            raise
        config, prepared = experts.quant_config, None
        passes = plan.passes and not on_input and config.scheme is None and "prepare" not in part.__dict__
        if not passes:
            prepare: Callable[..., Any] = part.prepare_async if plan.asynchronous else part.prepare
            given_ids = ids if plan.ids_dtype is None else ids.to(plan.ids_dtype)
            tokens = (hidden_states, weights, given_ids, global_num_experts, expert_map, on_input)
            # In the order of PrepareCall.
            options = (config, experts.expects_unquantized_inputs, size.E, a1_scale, a2_scale, None)
            prepared = plan.prepare.to(prepare, (*tokens, *options))
        shared = None if self.shared_experts is None else self.shared_experts(hidden_states)
        if plan.asynchronous:
            prepared = finished(prepared, "prepare_async")
        if passes:
            prepared = _PASSED
        elif not isinstance(prepared, PreparedTokens):
            prepared = as_prepared(type(part).__name__, prepared)
        mapped = expert_map
        if part.maps_experts:
            mapped, global_num_experts = None, size.E
        given_ids = ids if prepared.topk_ids is None else as_ids(prepared.topk_ids)
        given_weights = weights if prepared.topk_weights is None else as_weights(prepared.topk_weights, given_ids)
        if prepared.batch is not None:
            experts = experts.adding_as(*prepared.batch)
        impl = experts.finalize_weight_and_reduce_impl()
        destination = output if part.writes_output(impl) else None
        a1q = hidden_states if passes else prepared.a1q
        if a1q is not hidden_states:
            size = ProblemSize(*experts.moe_problem_size(a1q, w1, w2, given_ids))
        counts = prepared.expert_num_tokens
        meta = ExpertTokensMetadata(counts) if isinstance(counts, torch.Tensor) else counts
        held = experts.a2_scale if plan.holds else config.a2_scale
        passed: tuple[Any, ...] = (held if a2_scale is None else a2_scale,)
        if plan.older:
            passed = _scales_of(experts, scales)
        chosen = (activation, global_num_experts, mapped)
        step = Step(plan, experts, scratch, size, hidden_states, (w1, w2), chosen, passed, on_input, impl)
        arrived = Tokens(a1q, given_weights, given_ids, prepared.a1q_scale, meta, prepared.adapter_ids)
        result = run_step(step, arrived, destination, self.chunk_size)
        if not isinstance(result, torch.Tensor):
            if plan.defers and not inplace and not isinstance(result, list):
                return result if self.shared_experts is None else (shared, result)
            result, impl = finalized(step, result, arrived, output), TopKWeightAndReduceNoOP()
        if plan.idle and result is destination and "finalize" not in part.__dict__:
            return output if self.shared_experts is None else (shared, output)
        finalize: Callable[..., Any] = part.finalize_async if plan.asynchronous else part.finalize
        if plan.zeroes and not inplace:
            output.zero_()
        # In the order of FinalizeCall.
        written = plan.finalize.to(finalize, (output, result, weights, ids, on_input, impl, prepared, None))
        if plan.asynchronous:
            written = finished(written, "finalize_async")
        if written is not None:
            require_written(f"finalize of {type(part).__name__}", written, output)
        return output if self.shared_experts is None else (shared, output)

    def _check(
        self,
        experts: FusedMoEPermuteExpertsUnpermute,
        hidden_states: torch.Tensor,
        weights: tuple[torch.Tensor, torch.Tensor],
        topk_ids: torch.Tensor,
        expert_map: torch.Tensor | None,
    ) -> ProblemSize:
        if hidden_states.dim() != 2:
            raise InvalidInput(
                f"hidden_states must be [num_tokens, hidden], got {list(hidden_states.shape)}; flatten the batch axes "
                "first"
            )
        size: Any = experts.moe_problem_size(hidden_states, *weights, topk_ids)
        if not isinstance(size, ProblemSize):  # a plain tuple, as published
            size = ProblemSize(*size)
        if hidden_states.shape[1] != size.K:
            raise InvalidInput(
                f"hidden_states must have the {size.K} columns that w2 gives with weight_layout "
                f"{experts.weight_layout!r}, got {list(hidden_states.shape)}; check the layout of the weights"
            )
        if topk_ids.shape[0] != hidden_states.shape[0]:
            raise InvalidInput(
                f"topk_ids must have a row for each of the {hidden_states.shape[0]} tokens, got "
                f"{list(topk_ids.shape)}; route the same tokens"
            )
        if expert_map is not None and not (experts.supports_expert_map() or self.prepare_finalize.maps_experts):
            raise InvalidInput(
                f"expert_map must be None for {type(experts).__name__}, which supports none, got a tensor; choose "
                "other experts"
            )
        return size


def _scales_of(experts: FusedMoEPermuteExpertsUnpermute, scales: tuple[Any, ...]) -> tuple[Any, ...]:
    """a2_scale, w1_scale, w2_scale, w1_zp and w2_zp of the call, or of the experts."""
    present = []
    for name, array in zip(CALL_SCALES, scales, strict=True):
        held = getattr(experts, name)
        if array is not None and held is not None and held is not array:
            raise InvalidInput(f"{name} must not be given twice, got it in the experts and with the call; keep one")
        present.append(held if array is None else array)
    return present[5], *present[:4]


def _require_within(plan: Plan, hidden_states: torch.Tensor, on_input: bool) -> None:
    name, most = type(plan.part).__name__, plan.most_tokens
    if most is not None and hidden_states.shape[0] > most:
        raise InvalidInput(
            f"hidden_states must have at most {most} tokens, the max_num_tokens_per_rank of {name}, got "
            f"{hidden_states.shape[0]}; split the batch"
        )
    if on_input and not plan.on_input:
        raise InvalidInput(
            f"apply_router_weight_on_input must be False for {name}, as its prepare and finalize do not take it, got "
            "True; add the parameter"
        )


def _output_for(hidden_states: torch.Tensor, columns: int, inplace: bool, scratch: Scratch) -> torch.Tensor:
    require_flag("inplace", inplace)
    if not inplace:
        return scratch.new(hidden_states.shape[0], columns, hidden_states.dtype)
    if columns != hidden_states.shape[1]:
        raise InvalidInput(
            f"inplace must be False for experts with output_hidden_dim {columns}, got True and hidden_states "
            f"{list(hidden_states.shape)}; leave it out"
        )
    if not hidden_states.is_contiguous():
        raise InvalidInput(
            f"hidden_states must be contiguous with inplace=True, got strides {hidden_states.stride()}; call "
            "contiguous() or leave inplace out"
        )
    if torch.is_grad_enabled():
        if hidden_states.requires_grad:
            raise Unsupported(
                "inplace=True writes over hidden_states, which a backward would read; leave it out, or call under "
                "torch.no_grad()"
            )
        if not torch.compiler.is_compiling() and not hidden_states.is_inference():
            # Kernels write past autograd, which must see that a saved tensor has changed.
            torch.autograd.graph.increment_version(hidden_states)
    return hidden_states
