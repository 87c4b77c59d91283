"""The modular kernel."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from moe_core.base.arrays import ALIGNMENT
from moe_core.base.checks import require_at_least, require_flag
from moe_core.errors import InvalidInput, Unsupported
from moe_core.modular.quant_config import QUANTIZATION_ARRAYS
from moe_core.modular.types import ExpertTokensMetadata, ProblemSize, number_of_ids
from moe_core.specs.matmul import Activation
from moe_torch.bridge.arrays import target_of_device
from moe_torch.bridge.options import require_instance
from moe_torch.modular.calls import FinalizeCall, PrepareCall, PreparedTokens
from moe_torch.modular.experts import FusedMoEPermuteExpertsUnpermute
from moe_torch.modular.prepare_finalize import FusedMoEPrepareAndFinalize, finished
from moe_torch.modular.stages import as_ids, as_weights
from moe_torch.modular.workspaces import Scratch, Workspaces


class _Chunks(NamedTuple):
    """options: arguments of `apply` between topk_ids and workspace13."""

    experts: FusedMoEPermuteExpertsUnpermute
    scratch: Scratch
    size: ProblemSize
    weights: tuple[torch.Tensor, torch.Tensor]
    options: tuple[Any, ...]
    on_input: bool


#: Parameters of the first published `prepare`, in order.
_FIRST_PREPARE = (
    *("a1", "a1_scale", "a2_scale", "topk_weights", "topk_ids", "num_experts", "expert_map"),
    "apply_router_weight_on_input",
)
_BY_POSITION = {PrepareCall: _FIRST_PREPARE, FinalizeCall: FinalizeCall._fields}


class _Taken(NamedTuple):
    fields: tuple[tuple[str, int], ...]
    by_name: bool

    def pass_to(self, method: Callable[..., Any], call: PrepareCall | FinalizeCall) -> Any:
        if self.by_name:
            return method(**{name: call[index] for name, index in self.fields})
        return method(*[call[index] for _, index in self.fields])


def _taken(method: Callable[..., Any], record: type[PrepareCall] | type[FinalizeCall]) -> _Taken:
    """Match a method's parameters with a record's fields. Raises InvalidInput for others."""
    known, in_order = record._fields, _BY_POSITION[record]
    parameters = inspect.signature(method).parameters
    kinds = {parameter.kind for parameter in parameters.values()}
    if tuple(parameters) == in_order or inspect.Parameter.VAR_POSITIONAL in kinds:
        return _Taken(tuple((name, known.index(name)) for name in in_order), by_name=False)
    for name, parameter in parameters.items():
        named = parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        if name not in known and parameter.default is parameter.empty and named:
            raise InvalidInput(
                f"{method.__qualname__} must take some of {', '.join(known)}, got a parameter {name!r}; rename it"
            )
    every = inspect.Parameter.VAR_KEYWORD in kinds
    fields = tuple((name, index) for index, name in enumerate(known) if every or name in parameters)
    return _Taken(fields, by_name=True)


class _Parts(NamedTuple):
    of: FusedMoEPrepareAndFinalize
    asynchronous: bool
    ids_dtype: torch.dtype | None
    prepare: _Taken
    finalize: _Taken


def _parts_of(part: FusedMoEPrepareAndFinalize) -> _Parts:
    asynchronous = part.supports_async()
    prepare, finalize = part.prepare, part.finalize
    if asynchronous:
        prepare, finalize = part.prepare_async, part.finalize_async
    taken = _taken(prepare, PrepareCall), _taken(finalize, FinalizeCall)
    return _Parts(part, asynchronous, part.topk_indices_dtype(), *taken)


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
        ours, theirs = prepare_finalize.activation_format, fused_experts.activation_formats[0]
        if ours != theirs:
            raise InvalidInput(
                f"prepare_finalize and fused_experts must have one activation format, got {ours.name} of "
                f"{type(prepare_finalize).__name__} and {theirs.name} of {type(fused_experts).__name__}; choose two "
                "that fit"
            )
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
        self._parts = _parts_of(prepare_finalize)
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
        part, parts = self.prepare_finalize, self._parts
        if parts.of is not part:
            parts = self._parts = _parts_of(part)
        try:
            ids = as_ids(topk_ids)
            weights = as_weights(topk_weights, ids)
            experts = self.fused_experts
            if not (w1_scale is w2_scale is w1_zp is w2_zp is a1_scale is a2_scale is None):
                scales = (w1_scale, w2_scale, w1_zp, w2_zp, a1_scale, a2_scale)
                arrays = dict(zip(QUANTIZATION_ARRAYS, scales, strict=True))
                experts = experts.with_quant_config(experts.quant_config.with_arrays(**arrays))
            experts, w1, w2 = experts.as_stored(w1, w2)
            size = self._check(experts, hidden_states, w1, w2, ids, expert_map)
            global_num_experts = number_of_ids(global_num_experts, size.E, expert_map)
            scratch, on_input = self.workspaces.here(hidden_states.device), apply_router_weight_on_input
            output = _output_for(hidden_states, inplace, scratch)
        except (InvalidInput, Unsupported):
            part.tell_failure(hidden_states.device)
            raise
        prepare: Callable[..., Any] = part.prepare_async if parts.asynchronous else part.prepare
        finalize: Callable[..., Any] = part.finalize_async if parts.asynchronous else part.finalize
        prepared: Any
        given_ids = ids if parts.ids_dtype is None else ids.to(parts.ids_dtype)
        tokens = (hidden_states, weights, given_ids, global_num_experts, expert_map, on_input)
        options = (experts.quant_config, experts.expects_unquantized_inputs, size.E, a1_scale, a2_scale)
        prepared = parts.prepare.pass_to(prepare, PrepareCall(*tokens, *options))
        shared = None if self.shared_experts is None else self.shared_experts(hidden_states)
        if parts.asynchronous:
            prepared = finished(prepared)
        if not isinstance(prepared, PreparedTokens):
            prepared = PreparedTokens(*prepared)
        mapped = expert_map
        if part.maps_experts:
            mapped, global_num_experts = None, size.E
        given_ids = ids if prepared.topk_ids is None else as_ids(prepared.topk_ids)
        given_weights = weights if prepared.topk_weights is None else as_weights(prepared.topk_weights, given_ids)
        routing = (given_weights, given_ids)
        if prepared.batch is not None:
            experts = experts.adding_as(*prepared.batch)
        impl = experts.finalize_weight_and_reduce_impl()
        destination = output if part.writes_output(impl) else None
        if prepared.a1q is not hidden_states:
            size = ProblemSize(*experts.moe_problem_size(prepared.a1q, w1, w2, given_ids))
        options = (activation, global_num_experts, mapped, prepared.a1q_scale, a2_scale)
        call = _Chunks(experts, scratch, size, (w1, w2), options, on_input)
        result = self._run(call, prepared, routing, destination)
        finalizing = parts.finalize.pass_to(
            finalize, FinalizeCall(output, result, weights, ids, on_input, impl, prepared)
        )
        if parts.asynchronous:
            finished(finalizing)
        return output if self.shared_experts is None else (shared, output)

    def _check(
        self,
        experts: FusedMoEPermuteExpertsUnpermute,
        hidden_states: torch.Tensor,
        w1: torch.Tensor,
        w2: torch.Tensor,
        topk_ids: torch.Tensor,
        expert_map: torch.Tensor | None,
    ) -> ProblemSize:
        if hidden_states.dim() != 2:
            raise InvalidInput(
                f"hidden_states must be [num_tokens, hidden], got {list(hidden_states.shape)}; flatten the batch axes "
                "first"
            )
        size: Any = experts.moe_problem_size(hidden_states, w1, w2, topk_ids)
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

    def _run(
        self, call: _Chunks, prepared: PreparedTokens, routing: tuple[torch.Tensor, ...], output: torch.Tensor | None
    ) -> torch.Tensor:
        experts, size, a1q, counts = call.experts, call.size, prepared.a1q, prepared.expert_num_tokens
        meta = ExpertTokensMetadata(counts) if isinstance(counts, torch.Tensor) else counts
        sizes = (size.N, size.K, size.topk, call.options[1], size.E, meta, call.options[0])
        if output is None:
            shape = experts.workspace_shapes(size.M, *sizes)[2]
            output = call.scratch.take("output", shape, experts.workspace_dtype(a1q.dtype))
        chunk_size = self.chunk_size
        if chunk_size is None or chunk_size >= size.M or not _may_split(a1q.device):
            _apply(call, sizes, (output, a1q, *routing), meta)
            return output
        experts = experts.chunked_as_whole(a1q, *call.weights, size, call.options[0])
        call = call._replace(
            experts=experts.with_common_scales(a1q, call.weights, routing[1], call.options, chunk_size)
        )
        for begin in range(0, size.M, chunk_size):
            part = slice(begin, min(begin + chunk_size, size.M))
            # Standard experts count for themselves.
            _apply(call, sizes, tuple(tensor[part] for tensor in (output, a1q, *routing)), None)
        return output


def _may_split(device: torch.device) -> bool:
    # One program serves every number of tokens, and the compiler plans memory.
    return not torch.compiler.is_compiling() and target_of_device(device).compiled


def _apply(
    call: _Chunks, sizes: tuple[Any, ...], tokens: tuple[torch.Tensor, ...], meta: ExpertTokensMetadata | None
) -> None:
    experts, (output, a1q, *routing) = call.experts, tokens
    dtype = experts.workspace_dtype(a1q.dtype)
    shape13, shape2, _ = experts.workspace_shapes(a1q.shape[-2], *sizes)
    memory = call.scratch.take("workspace13", shape13, dtype), call.scratch.take("workspace2", shape2, dtype)
    arguments: tuple[Any, ...] = (output, a1q, *call.weights, *routing, *call.options, *memory, meta, call.on_input)
    experts.apply(*arguments)


def _output_for(hidden_states: torch.Tensor, inplace: bool, scratch: Scratch) -> torch.Tensor:
    require_flag("inplace", inplace)
    if not inplace:
        return scratch.new(hidden_states.shape[0], hidden_states.shape[1], hidden_states.dtype)
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
