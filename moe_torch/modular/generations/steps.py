"""The step between `prepare` and `finalize`: memory, chunks, and every result that experts of any generation return."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from moe_core.errors import InvalidInput, Unsupported
from moe_core.modular.types import ProblemSize
from moe_torch.bridge.arrays import target_of_device
from moe_torch.modular.calls import ExpertsCall, PreparedTokens, require_written
from moe_torch.modular.experts import FusedMoEPermuteExpertsUnpermute
from moe_torch.modular.generations.dispatch import Plan
from moe_torch.modular.generations.tokens import ExpertTokensMetadata
from moe_torch.modular.generations.unfinalized import parts_of, write_finalized
from moe_torch.modular.stages import local_ids
from moe_torch.modular.standard_experts import StandardExperts
from moe_torch.modular.weight_and_reduce import TopKWeightAndReduce, TopKWeightAndReduceNoOP
from moe_torch.modular.workspaces import Scratch


class Step(NamedTuple):
    """The same for all chunks. options: activation, global_num_experts and expert_map for the experts. scales:
    a2_scale, then w1_scale, w2_scale, w1_zp and w2_zp where `apply` takes them."""

    plan: Plan
    experts: FusedMoEPermuteExpertsUnpermute
    scratch: Scratch
    size: ProblemSize
    hidden_states: torch.Tensor
    weights: tuple[torch.Tensor, torch.Tensor]
    options: tuple[Any, int, torch.Tensor | None]
    scales: tuple[torch.Tensor | None, ...]
    on_input: bool
    impl: TopKWeightAndReduce


class Tokens(NamedTuple):
    """Prepared tokens, or a chunk of them."""

    a1q: torch.Tensor
    weights: torch.Tensor
    ids: torch.Tensor
    scale: torch.Tensor | None
    meta: Any
    #: Of a1q, if `prepare` moved rows.
    adapter_ids: torch.Tensor | None = None


#: (workspace13, workspace2, output, dtype). No output: `workspace_shapes` of the first generation does not say it.
_Shapes = tuple[Any, Any, Any, torch.dtype]


def as_prepared(name: str, result: Any) -> PreparedTokens:
    """The published tuples of `prepare` as a record."""
    if not isinstance(result, tuple | list) or len(result) not in (3, 5):
        raise InvalidInput(
            f"prepare of {name} must return PreparedTokens or a tuple of 3 or 5, got {type(result).__name__}"
            f"{f' of {len(result)}' if isinstance(result, tuple | list) else ''}; return one of these"
        )
    prepared = PreparedTokens(*result)
    counts = prepared.expert_num_tokens
    if not (counts is None or isinstance(counts, torch.Tensor) or hasattr(counts, "expert_num_tokens")):
        raise InvalidInput(
            f"prepare of {name} must return counts as a tensor or ExpertTokensMetadata, got {type(counts).__name__}; "
            "see ExpertTokensMetadata.make_from_list"
        )
    return prepared


def run_step(step: Step, tokens: Tokens, destination: torch.Tensor | None, chunk_size: int | None) -> Any:
    """Return what the experts' `apply` gave, a list for chunks. destination: memory to use if shape and dtype agree."""
    plan, a1q, experts = step.plan, tokens.a1q, step.experts
    if not plan.empty and not a1q.numel():
        columns = experts.output_hidden_dim(a1q.shape[-1])
        return a1q.new_empty((*a1q.shape[:-1], columns), dtype=step.hidden_states.dtype)
    shapes = _shapes_of(step, tokens)
    output = None if plan.returns else _memory_of_output(step, a1q, shapes, destination)
    if chunk_size is None or chunk_size >= step.size.M or not _may_split(a1q.device):
        return _apply(step, tokens, output, shapes)
    experts = experts.chunked_as_whole(a1q, *step.weights, step.size, step.options[0])
    experts = experts.with_common_scales(a1q, step.weights, tokens.ids, step.options, chunk_size)
    step = step._replace(experts=experts)
    parts = [slice(begin, min(begin + chunk_size, step.size.M)) for begin in range(0, step.size.M, chunk_size)]
    results, written = [], []
    for part in parts:
        # Autograd wants each view made after the last one was written.
        place = None if output is None else _rows(output, part, step.size.M)
        chunk = _chunk(step, tokens, part)
        scales = (_scale_rows("a2_scale", step.scales[0], part, step.size.M), *step.scales[1:])
        results.append(_apply(step._replace(scales=scales), chunk, place, _shapes_of(step, chunk)))
        written.append(results[-1] is place)
    if all(written):
        return output
    if all(isinstance(result, torch.Tensor) for result in results) and not any(written):
        return torch.cat(results)
    if any(isinstance(result, torch.Tensor) for result in results):
        raise InvalidInput(
            f"apply of {type(experts).__name__} must do with all chunks alike, got results of two kinds"
            "; return the same kind for each"
        )
    return results


def _may_split(device: torch.device) -> bool:
    # One program serves every number of tokens, and the compiler plans memory.
    return not torch.compiler.is_compiling() and target_of_device(device).compiled


def _shapes_of(step: Step, tokens: Tokens) -> _Shapes:
    experts, size, (activation, num_experts, _), a1q = step.experts, step.size, step.options, tokens.a1q
    dtype, (_, _, N, K, topk) = step.hidden_states.dtype, size
    # In the order of ShapesCall.
    call = (a1q.shape[-2], N, K, topk, num_experts, size[0], tokens.meta, activation)
    if step.plan.shapes.first != len(call):
        call = (*call, step.hidden_states, a1q, num_experts)
    shapes = step.plan.shapes.to(experts.workspace_shapes, call)
    if len(shapes) == 3 and not isinstance(shapes[2], torch.dtype):
        return (*shapes, experts.workspace_dtype(dtype))
    *shapes, last = shapes
    told = isinstance(last, torch.dtype) and len(shapes) in (2, 3)
    if not told or (len(shapes) == 2 and not step.plan.returns):
        raise InvalidInput(
            f"workspace_shapes of {type(experts).__name__} must return the shapes of two workspaces and of the output, "
            f"and may add a dtype, got {(*shapes, last)}; return these"
        )
    own = experts.workspace_dtype(dtype)
    if own not in (dtype, last):
        raise InvalidInput(
            f"workspace_dtype of {type(experts).__name__} must be the dtype of workspace_shapes, got {own} and {last}; "
            "leave one out"
        )
    workspaces = [(shape,) if isinstance(shape, int) else shape for shape in shapes]
    return workspaces[0], workspaces[1], workspaces[2] if len(workspaces) == 3 else None, last


def _memory_of_output(step: Step, a1q: torch.Tensor, shapes: _Shapes, destination: torch.Tensor | None) -> torch.Tensor:
    (_, _, shape, dtype), device, part = shapes, step.hidden_states.device, step.plan.part
    assert shape is not None, "`_shapes_of` refuses it"
    if step.plan.allocates:
        memory = part.allocate_fused_expert_output(shape, dtype, device, step.impl)
        if memory is not None:
            if (tuple(memory.shape), memory.dtype, memory.device) != (tuple(shape), dtype, device):
                raise InvalidInput(
                    f"allocate_fused_expert_output of {type(part).__name__} must return {dtype} {list(shape)} on "
                    f"{device}, got {memory.dtype} {list(memory.shape)} on {memory.device}; allocate what it is asked "
                    "for, or return None"
                )
            if not memory.is_contiguous():
                raise InvalidInput(
                    f"allocate_fused_expert_output of {type(part).__name__} must return dense memory, got strides "
                    f"{memory.stride()}; allocate it so"
                )
            return memory
    if destination is not None and dtype == step.hidden_states.dtype:
        same = a1q is step.hidden_states and not step.plan.narrows  # the sizes are known
        if shape == ((step.size[1], step.size[3]) if same else destination.shape):
            return destination
    return step.scratch.take("output", shape, dtype)


def _apply(step: Step, tokens: Tokens, output: torch.Tensor | None, shapes: _Shapes) -> Any:
    plan, experts, scratch = step.plan, step.experts, step.scratch
    shape13, shape2, wanted, dtype = shapes
    if plan.older:  # whose kernels passed them flat
        shape13, shape2 = (math.prod(shape13),), (math.prod(shape2),)
    memory = scratch.take("workspace13", shape13, dtype), scratch.take("workspace2", shape2, dtype)
    call: tuple[Any, ...] = (
        output, tokens.a1q, *step.weights, tokens.weights, tokens.ids, *step.options, tokens.scale, step.scales[0],
        *memory, tokens.meta, step.on_input,
    )  # fmt: skip
    if plan.older:
        call += (*step.scales[1:], getattr(tokens.meta, "expert_num_tokens", None), None)
    if plan.returns:
        for workspace in memory:
            workspace.zero_()
    if plan.unread:
        values = {"expert_map": step.options[2], "a1q_scale": tokens.scale, "expert_tokens_meta": tokens.meta}
        for name in plan.unread:
            if values[name] is not None:
                raise InvalidInput(
                    f"{name} must be None for {type(experts).__name__}, as its apply takes none, got "
                    f"{type(values[name]).__name__}; add the parameter"
                )
    if plan.adapts and experts._lora_context is not None:  # pyright: ignore[reportAttributeAccessIssue]
        result = _with_adapters(step, call, tokens)
    elif plan.standard and tokens.meta is None and "apply" not in experts.__dict__:
        result = experts.run(ExpertsCall(*call))  # pyright: ignore[reportAttributeAccessIssue]
    else:
        result = plan.apply.to(experts.apply, call)
    if result is output or (result is None and not plan.returns):
        return output
    name = f"apply of {type(experts).__name__}"
    if plan.returns:
        if not isinstance(result, torch.Tensor) or (wanted is not None and tuple(result.shape) != tuple(wanted)):
            found = list(result.shape) if isinstance(result, torch.Tensor) else type(result).__name__
            expected = "as it takes none" if wanted is None else f"{list(wanted)} of workspace_shapes"
            raise InvalidInput(f"{name} must return its output, {expected}, got {found}; return it")
    elif isinstance(result, torch.Tensor):
        require_written(name, result, output)
    return result


def _with_adapters(step: Step, call: tuple[Any, ...], tokens: Tokens) -> Any:
    context = step.experts._lora_context  # pyright: ignore[reportAttributeAccessIssue]
    moved, mapping = tokens.adapter_ids, getattr(context, "local_token_lora_mapping", None)
    if moved is None and isinstance(step.experts, StandardExperts) and tokens.a1q.shape != step.hidden_states.shape:
        raise Unsupported(
            f"prepare of {type(step.plan.part).__name__} must return adapter_ids for the rows that it moves, got none; "
            "choose a class that does"
        )
    try:
        context.original_hidden_states = step.hidden_states
        if moved is not None:
            context.local_token_lora_mapping = moved
        return step.plan.apply.to(step.experts.apply, call)
    finally:
        context.original_hidden_states = None
        if moved is not None:
            context.local_token_lora_mapping = mapping


def _chunk(step: Step, tokens: Tokens, part: slice) -> Tokens:
    meta, ids, scale = tokens.meta, tokens.ids[part], _scale_rows("a1q_scale", tokens.scale, part, step.size.M)
    if meta is not None:
        local = local_ids(ids, step.options[2]).reshape(-1)
        here = (local >= 0) & (local < step.size.E)
        counts = torch.zeros(step.size.E + 1, dtype=torch.int32, device=ids.device)
        counts.scatter_add_(0, torch.where(here, local, step.size.E).long(), torch.ones_like(local))
        on_host = None if getattr(meta, "expert_num_tokens_cpu", None) is None else counts[:-1].cpu()
        meta = ExpertTokensMetadata(counts[:-1], on_host)
    return Tokens(tokens.a1q[part], tokens.weights[part], ids, scale, meta)


def _scale_rows(name: str, scale: torch.Tensor | None, part: slice, tokens: int) -> torch.Tensor | None:
    return scale if scale is None or scale.numel() == 1 else _rows(scale, part, tokens, name)


def _rows(tensor: torch.Tensor, part: slice, tokens: int, name: str = "the output of the experts") -> torch.Tensor:
    """The rows of some tokens, one or several each."""
    each, left = divmod(tensor.shape[0], tokens)
    if left or not each:
        raise InvalidInput(
            f"{name} must have rows for each of the {tokens} tokens that are taken in chunks, got "
            f"{list(tensor.shape)}; leave chunk_size out"
        )
    return tensor[part.start * each : part.stop * each]


def finalized(step: Step, result: Any, tokens: Tokens, destination: torch.Tensor) -> torch.Tensor:
    """Weight and sum the unfinalised outputs of chunks, or one, to rows `[M, K]` of the prepared tokens."""
    part, name = step.plan.part, f"apply of {type(step.experts).__name__}"
    results: Sequence[Any] = result if isinstance(result, list) else [result]
    reason = None
    if step.on_input:
        reason = "the router's weights are on the input"
    elif tokens.a1q.dim() != 2:
        reason = "tokens are in the batched format"
    elif "weight_and_reduce_impl" not in step.plan.finalize.taken:
        reason = f"finalize of {type(part).__name__} takes no weight_and_reduce_impl"
    if reason is not None:
        raise Unsupported(f"{name} must write its output where {reason}, got {type(results[0]).__name__}; write it")
    output, noop = destination, TopKWeightAndReduceNoOP()
    if not part.writes_output(noop):
        output = destination.new_empty(tokens.a1q.shape[-2], destination.shape[1])
    begin = 0
    for one in results:
        count = len(output) if len(results) == 1 else len(parts_of(one, f"{name} must return")[2])
        write_finalized(one, output[begin : begin + count], name)
        begin += count
    return output
