"""How a modular kernel calls its two parts: by the parameters of their methods, decided once."""

from __future__ import annotations

import inspect
import itertools
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from moe_core.errors import InvalidInput, Unsupported
from moe_torch.modular.calls import (
    OLDER,
    PUBLISHED,
    ExpertsCall,
    FinalizeCall,
    PrepareCall,
    ShapesCall,
    require_written,
)
from moe_torch.modular.experts import FusedMoEPermuteExpertsUnpermute
from moe_torch.modular.newest.hooks import is_ours
from moe_torch.modular.prepare_finalize import FusedMoEPrepareAndFinalize, MoEPrepareAndFinalizeNoEP
from moe_torch.modular.standard_experts import StandardExperts

Experts = FusedMoEPermuteExpertsUnpermute
#: Arguments that every call has. Experts that take no such one would ignore it.
_ALWAYS = ("hidden_states", "w1", "w2", "topk_ids", "activation")
#: Published with scales in the call: `prepare` and `apply` take them, and the configuration need not have them.
CALL_SCALES = ("w1_scale", "w2_scale", "w1_zp", "w2_zp", "a1_scale", "a2_scale")


class Passing(NamedTuple):
    """positions: fields of a record for positional parameters. first: how many, if they are its first ones, else 0.
    named: fields that go by name. taken: all of them."""

    positions: tuple[int, ...]
    first: int
    named: tuple[tuple[str, int], ...]
    taken: frozenset[str]
    #: The fields at positions.
    pick: Callable[[tuple[Any, ...]], tuple[Any, ...]]

    def to(self, method: Callable[..., Any], call: tuple[Any, ...]) -> Any:
        if self.first:
            return method(*call[: self.first])
        # Dynamo knows no itemgetter.
        arguments: Any = [call[i] for i in self.positions] if torch.compiler.is_compiling() else self.pick(call)
        if self.named:
            return method(*arguments, **{name: call[index] for name, index in self.named})
        return method(*arguments)


def passing_to(owner: Any, name: str, record: Any) -> Passing:
    """Match a method's parameters with a record's fields, by name, or by place in a published list."""
    method: Callable[..., Any] = getattr(owner, name)
    known, parameters = record._fields, inspect.signature(method).parameters.values()
    kinds = {parameter.kind for parameter in parameters}
    names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    keywords = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
    optional = {p.name for p in parameters if p.default is not p.empty}
    orders = (_overridden(owner, name), *PUBLISHED[record])
    others = inspect.Parameter.VAR_POSITIONAL in kinds
    if others or not optional.union(known).issuperset(names):
        # vLLM passes these by place, so that authors may rename them.
        fits = (order for order in orders if _agree(names, order, known) and (others or len(names) == len(order)))
        names = list(itertools.takewhile(lambda name: name not in keywords, next(fits, names)))
    elif inspect.Parameter.VAR_KEYWORD in kinds:
        order = next((order for order in orders if set(names) <= set(order)), known)
        keywords += [name for name in order if name not in (*names, *keywords)]
    for one in (*names, *keywords):
        if one not in known and one not in optional:
            raise InvalidInput(
                f"{type(owner).__name__}.{name} must take some of {', '.join(known)}, got a parameter {one!r}; rename "
                "it"
            )
    leading = list(itertools.takewhile(known.__contains__, names))
    # Those after one that keeps its default.
    keywords = [name for name in (*names[len(leading) :], *keywords) if name in known]
    positions = tuple(map(known.index, leading))
    first = len(positions) if not keywords and positions == tuple(range(len(positions))) else 0
    named = tuple((name, known.index(name)) for name in keywords)
    pick = operator.itemgetter(*positions) if len(positions) > 1 else lambda call: tuple(call[i] for i in positions)
    return Passing(positions, first, named, frozenset((*leading, *keywords)), pick)


def _agree(names: list[str], order: tuple[str, ...], known: tuple[str, ...]) -> bool:
    pairs = zip(names, order, strict=False)
    return len(names) <= len(order) and all(name == place or name not in known for name, place in pairs)


def _overridden(owner: Any, name: str) -> tuple[str, ...]:
    """The parameters of the nearest method of a class that names all of them."""
    own = getattr(getattr(owner, name), "__func__", None)
    for base in type(owner).__mro__:
        if name in vars(base) and vars(base)[name] is not own:
            parameters = inspect.signature(vars(base)[name]).parameters
            if all(parameter.kind is parameter.POSITIONAL_OR_KEYWORD for parameter in parameters.values()):
                return tuple(parameters)[1:]
    return ()


class Plan(NamedTuple):
    """How a kernel calls a prepare-and-finalize object and experts."""

    part: FusedMoEPrepareAndFinalize
    experts: Experts
    prepare: Passing
    finalize: Passing
    shapes: Passing
    apply: Passing
    asynchronous: bool
    ids_dtype: torch.dtype | None
    #: `apply` returns its output, as the first generation has it.
    returns: bool
    #: `prepare_finalize` may provide the memory of the experts' output.
    allocates: bool
    #: The caller takes an output without its last sum.
    defers: bool
    #: Older kernels passed zeros to `finalize` and to experts that return.
    zeroes: bool
    #: Nothing is left for our `finalize` if the experts have written the caller's output.
    idle: bool
    #: Our `prepare` brings unquantised tokens as they are, so that the kernel need not call it.
    passes: bool
    #: `output_hidden_dim` may differ from that of the hidden states.
    narrows: bool
    #: Experts read adapters of the call from `_lora_context`.
    adapts: bool
    #: Experts are called without tokens, which no published kernel does.
    empty: bool
    #: `apply` is that of StandardExperts, and only prepares `run` for other kernels.
    standard: bool
    most_tokens: int | None
    #: `prepare` and `finalize` take apply_router_weight_on_input.
    on_input: bool
    #: A limit of the part is to be checked.
    limits: bool
    #: The experts have an a2_scale beside that of quant_config.
    holds: bool
    #: `apply` takes scales of the call, as older generations have it.
    older: bool
    #: Arguments that `apply` may get and does not take.
    unread: tuple[str, ...]
    #: Arrays of the call that go to parameters of these names, and not to the configuration.
    scales: frozenset[str]


def plan_of(part: FusedMoEPrepareAndFinalize, experts: Experts) -> Plan:
    """Raises InvalidInput or Unsupported for a class that this library's kernel cannot serve."""
    require_written(f"post_init_setup of {type(part).__name__}", part.post_init_setup(experts), None)
    asynchronous = part.supports_async()
    suffix = "_async" if asynchronous else ""
    prepare = passing_to(part, f"prepare{suffix}", PrepareCall)
    finalize = passing_to(part, f"finalize{suffix}", FinalizeCall)
    shapes, apply = passing_to(experts, "workspace_shapes", ShapesCall), passing_to(experts, "apply", ExpertsCall)
    allocates = not is_ours(part.allocate_fused_expert_output)
    returns = "output" not in apply.taken
    _require_served(part, experts, (prepare, apply), allocates)
    own, older = is_ours(getattr(part, f"finalize{suffix}")), apply.taken & {*OLDER}
    scales = apply.taken.intersection(CALL_SCALES) if "w1_scale" in older else frozenset()
    if not is_ours(part.prepare):
        scales |= prepare.taken.intersection(("a1_scale", "a2_scale"))
    quantizes = next(cls for cls in type(experts).__mro__ if "expects_unquantized_inputs" in vars(cls))
    on_input = "apply_router_weight_on_input" in prepare.taken & finalize.taken
    most = None if is_ours(part.max_num_tokens_per_rank) else part.max_num_tokens_per_rank()
    counted = not apply.taken.isdisjoint(("expert_tokens_meta", "expert_num_tokens"))
    optional = {"expert_map": "expert_map" in apply.taken, "a1q_scale": "a1q_scale" in apply.taken}
    optional["expert_tokens_meta"] = counted
    return Plan(
        part, experts, prepare, finalize, shapes, apply,
        asynchronous=asynchronous,
        ids_dtype=part.topk_indices_dtype(),
        returns=returns,
        allocates=allocates,
        defers=part.supports_deferred_moe_finalize(),
        zeroes=not own and "defer_input_quant" not in prepare.taken,
        idle=not asynchronous and own and is_ours(part.writes_output),
        passes=type(part) is MoEPrepareAndFinalizeNoEP and is_ours(quantizes),
        narrows=not is_ours(experts.output_hidden_dim),
        adapts=hasattr(experts, "_lora_context"),
        empty=is_ours(experts.apply),
        standard=isinstance(experts, StandardExperts) and type(experts).apply is StandardExperts.apply,
        most_tokens=most,
        on_input=on_input,
        limits=most is not None or not on_input,
        holds="a2_scale" in experts.__dict__ or not is_ours(type(experts).a2_scale),
        older=bool(older),
        unread=tuple(name for name, read in optional.items() if not read),
        scales=scales,
    )  # fmt: skip


def _require_served(
    part: FusedMoEPrepareAndFinalize, experts: Experts, methods: tuple[Passing, Passing], allocates: bool
) -> None:
    prepare, apply = methods
    name, oldest = type(experts).__name__, "output" not in apply.taken
    for argument in _ALWAYS:
        if argument not in apply.taken:
            raise InvalidInput(f"apply of {name} must take {argument}, got {', '.join(sorted(apply.taken))}; add it")
    if experts.is_monolithic():
        raise Unsupported(
            f"fused_experts must take topk_ids and topk_weights, got {name}, which routes by itself"
            "; pass experts that take them"
        )
    if getattr(experts, "consumes_expert_mask", False):
        raise Unsupported(
            f"consumes_expert_mask of {name} must be False, as expert_map holds local ids, got True; read the map"
        )
    if oldest and allocates:
        raise Unsupported(
            f"allocate_fused_expert_output of {type(part).__name__} has no taker, as apply of {name} returns its "
            "output; take output and write it"
        )
    weights = "topk_weights" in apply.taken
    if weights and type(experts).finalize_weight_and_reduce_impl is Experts.finalize_weight_and_reduce_impl:
        raise InvalidInput(
            f"{name} must say what apply leaves to finalize, got no finalize_weight_and_reduce_impl; return one of "
            "TopKWeightAndReduceDelegate, TopKWeightAndReduceContiguous and TopKWeightAndReduceNoOP"
        )
    silent = type(experts).activation_format is Experts.activation_format
    silent &= type(experts).activation_formats is Experts.activation_formats
    ours, theirs = part.activation_format, None if oldest and silent else experts.activation_formats[0]
    if ours is None and "a1_scale" not in prepare.taken:
        raise InvalidInput(
            f"{type(part).__name__} must say what tokens it gives, got no activation_format; define it, "
            "FusedMoEActivationFormat.Standard for example"
        )
    if ours is not None and theirs is not None and ours != theirs:
        raise InvalidInput(
            f"prepare_finalize and fused_experts must have one activation format, got {ours.name} of "
            f"{type(part).__name__} and {theirs.name} of {name}; choose two that fit"
        )
    for number, question in (
        ("max_num_tokens", part.max_num_tokens_per_rank),
        ("num_dispatchers", part.num_dispatchers),
    ):
        ours, theirs = getattr(experts, number, None), question()
        if ours is not None and theirs is not None and ours != theirs:
            raise InvalidInput(
                f"{number} of {name} must be {theirs}, that of {type(part).__name__}, got {ours}; make both with one"
            )
