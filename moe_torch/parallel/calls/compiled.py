"""Calls across ranks in traced code: one operator runs the eager call and keeps its graph for the backward's."""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from torch.autograd.function import once_differentiable

from moe_core.errors import InvalidInput
from moe_core.formats import QuantizedTensor
from moe_core.parallel import ParallelOutput, Placement
from moe_core.parallel.header import STATIC_MODES
from moe_core.specs.moe import MoESpec
from moe_core.specs.operands import (
    ExpertWeights,
    MoEOperands,
    RouterLogits,
    RouterWeights,
    SharedExpert,
    TopK,
    named_arrays,
    named_fields,
)
from moe_torch.bridge.operator import LIBRARY
from moe_torch.bridge.options import TORCH_DTYPES, decode, encode
from moe_torch.bridge.private import PLAIN_CLASSES, BelowAutograd, keeps_graph
from moe_torch.operators.kinds import as_float32, as_int32
from moe_torch.parallel.axes import ExpertParallel

_KINDS = {kind.__name__: kind for kind in (RouterWeights, RouterLogits, TopK)}
_Function = TypeVar("_Function", bound=Callable[..., Any])
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)


#: By their names, which compiled programs have.
_calls: weakref.WeakValueDictionary[str, Calls] = weakref.WeakValueDictionary()
_numbers = itertools.count(1)


@dataclass(eq=False)
class Calls:
    """A layer's number on its mesh, from 1 on (0: no layer), and its calls, which ranks compare. shares_factors: all
    experts share the factors of adapters. None: if arrays with an axis of one expert cannot be a rank's only one. name:
    of a layer's."""

    layer: int = 0
    number: int = 0
    shares_factors: bool | None = None
    name: str = ""

    @classmethod
    def of_layer(cls, layer: int, shares_factors: bool | None = None) -> Calls:
        calls = cls(layer, 0, shares_factors, f"calls {next(_numbers)}")
        _calls[calls.name] = calls
        return calls


_eager: list[Callable[..., ParallelOutput]] = []


def run_by_operators(function: _Function) -> _Function:
    """Decorate the eager call `(operands, spec, parallel, placement, calls)`."""
    _eager.append(function)
    return function


class _Called(NamedTuple):
    """A call by the text of its options. parallel, calls: names. names: of its arrays, in order."""

    parallel: str
    calls: str
    placement: Placement
    spec: MoESpec
    routing: type
    names: tuple[str, ...]

    def operands(self, arrays: Sequence[torch.Tensor]) -> MoEOperands:
        groups: dict[str, dict[str, torch.Tensor]] = {"experts": {}, "routing": {}, "shared": {}}
        alone: dict[str, torch.Tensor] = {}
        for name, array in zip(self.names, arrays, strict=True):
            bundle, _, field = name.partition(".")
            (groups[bundle] if field else alone)[field or bundle] = array
        shared = SharedExpert(**groups["shared"]) if groups["shared"] else None
        experts, routing = ExpertWeights(**groups["experts"]), self.routing(**groups["routing"])
        return MoEOperands(alone["x"], experts, routing, alone.get("token_mask"), None, shared)


def traceable(operands: MoEOperands, parallel: Any, placement: Any) -> bool:
    """Return True for calls without a graph break: the host reads nothing, and matrices are plain."""
    if not isinstance(parallel, ExpertParallel) or not isinstance(placement, Placement):
        return False
    kinds = isinstance(operands.experts, ExpertWeights) and isinstance(operands.routing, tuple(_KINDS.values()))
    if parallel.exchange.mode not in STATIC_MODES or not kinds or operands.lora is not None:
        return False
    if parallel.tensor is not None or parallel.buffer is not None or operands.adapter_ids is not None:
        return False
    return not any([isinstance(value, QuantizedTensor) for _, value in named_fields(operands.experts)])


def across_ranks(
    operands: MoEOperands, spec: MoESpec, parallel: ExpertParallel, placement: Placement, calls: Calls
) -> ParallelOutput:
    """See `moe_torch.parallel.moe`, in traced code."""
    routing, shared = operands.routing, operands.shared
    pairs = [("x", operands.x), *named_arrays(operands.experts, "experts."), *named_arrays(routing, "routing.")]
    pairs += [] if operands.token_mask is None else [("token_mask", operands.token_mask)]
    pairs += [] if shared is None else named_arrays(shared, "shared.")
    names, arrays = tuple([name for name, _ in pairs]), [array for _, array in pairs]
    options = encode(parallel.name, calls.name, placement.text, spec, type(routing).__name__, names)
    results: list[Any] = list(ACROSS(arrays, options))
    if isinstance(routing, TopK):
        results[1:1] = [as_int32(routing.ids), as_float32(routing.weights), None]
    elif isinstance(routing, RouterLogits):
        results[3:3] = [routing.logits]
    return ParallelOutput(*results)


@functools.lru_cache(maxsize=256)
def _called(options: str) -> _Called:
    name, calls, text, spec, routing, names = decode(options)
    return _Called(name, calls, Placement.of_text(text), spec, _KINDS[routing], names)


def _results(output: ParallelOutput, routing: type) -> list[torch.Tensor]:
    """Results but arguments."""
    output = output._replace(logits=output.logits if routing is RouterWeights else None)
    if routing is TopK:
        output = output._replace(ids=None, weights=None)
    return [one for one in output if one is not None]


def _run(arrays: Sequence[torch.Tensor], options: str) -> list[torch.Tensor]:
    called = _called(options)
    parallel, calls = ExpertParallel.named(called.parallel), _calls.get(called.calls) or Calls()
    if parallel is None:
        raise InvalidInput(
            f"parallel must be alive while compiled code uses it, got none of {called.parallel}; keep it"
        )
    output = _eager[0](called.operands(arrays), called.spec, parallel, called.placement, calls)
    return _results(output, called.routing)


def _across(arrays: Sequence[torch.Tensor], options: str) -> list[torch.Tensor]:
    with torch.no_grad():
        return _fresh(_run(arrays, options), arrays)


def _fresh(results: list[torch.Tensor], arrays: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    # No operator returns an alias.
    given = {array.data_ptr() for array in arrays}
    return [one.clone() if one.data_ptr() in given else one.detach() for one in results]


def _shapes(arrays: Sequence[torch.Tensor], options: str) -> list[torch.Tensor]:
    called = _called(options)
    operands, placement, spec = called.operands(arrays), called.placement, called.spec
    x, routing = operands.x, operands.routing
    dtype = x.dtype if spec.out_dtype is None else TORCH_DTYPES[spec.out_dtype]
    top_k = routing.ids.shape[1] if isinstance(routing, TopK) else spec.router.top_k if spec.router else 0

    def counts(size: int) -> torch.Tensor:
        return x.new_empty(size, dtype=torch.int32)

    chosen = x.new_empty((x.shape[0], top_k), dtype=torch.int32), x.new_empty((x.shape[0], top_k), dtype=torch.float32)
    logits = x.new_empty((x.shape[0], placement.num_experts), dtype=torch.float32)
    numbers = counts(placement.num_experts), counts(1), counts(placement.per_rank), counts(1)
    return _results(ParallelOutput(torch.empty_like(x, dtype=dtype), *chosen, logits, *numbers), called.routing)


class _Kept(NamedTuple):
    """The graph of a call: arrays that ask for gradients, and results that have one."""

    leaves: list[torch.Tensor]
    results: list[torch.Tensor]


_kept: dict[int, _Kept] = {}


def _train(arrays: Sequence[torch.Tensor], asked: Sequence[int], options: str) -> list[torch.Tensor]:
    """Run a call and keep its graph. Returns its results, and the token of the graph."""
    with torch.enable_grad():
        inner = [array.detach().requires_grad_(number in asked) for number, array in enumerate(arrays)]
        results = _run(inner, options)
    token = torch.tensor([next(_numbers)])
    number = int(token)
    _kept[number] = _Kept([inner[index] for index in asked], results)
    weakref.finalize(token, _kept.pop, number, None)
    return [*_fresh(results, arrays), token]


def _train_shapes(arrays: Sequence[torch.Tensor], asked: Sequence[int], options: str) -> list[torch.Tensor]:
    token = torch.empty(1, dtype=torch.int64)
    return [*_shapes(arrays, options), token]


def _backward(
    token: torch.Tensor, gradients: Sequence[torch.Tensor], given: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Gradients of the asked arrays, which are given for their shapes. gradients: of all results with one."""
    kept = _kept[int(token)]
    results = [one for one in kept.results if one.requires_grad]
    found = torch.autograd.grad(
        results, kept.leaves, list(gradients), retain_graph=keeps_graph(), allow_unused=True, materialize_grads=True
    )
    return [one.clone() if one.data_ptr() in {g.data_ptr() for g in gradients} else one for one in found]


class _Across(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, options: str, *arrays: torch.Tensor) -> Any:
        asked = [number for number, array in enumerate(arrays) if ctx.needs_input_grad[number + 1]]
        *results, token = TRAIN(arrays, asked, options)
        ctx.asked, ctx.count = asked, len(arrays)
        ctx.save_for_backward(token, *[arrays[number] for number in asked])
        flat = [one for one in results if not one.is_floating_point()]
        ctx.mark_non_differentiable(*flat)
        ctx.floating = [one.is_floating_point() for one in results]
        return tuple(results)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        token, *given = ctx.saved_tensors
        wanted = [one.contiguous() for one, floats in zip(gradients, ctx.floating, strict=True) if floats]
        found: list[Any] = [None] * ctx.count
        for number, gradient in zip(ctx.asked, BACK(token, wanted, given), strict=True):
            found[number] = gradient
        return None, *found


def _autograd(arrays: Sequence[torch.Tensor], options: str) -> list[torch.Tensor]:
    if torch.is_grad_enabled() and any(array.requires_grad for array in arrays):
        return list(_Across.apply(options, *arrays))
    with BelowAutograd():
        return ACROSS(arrays, options)


def _autograd_of_training(arrays: Sequence[torch.Tensor], asked: Sequence[int], options: str) -> list[torch.Tensor]:
    # Here autograd still records, below it does not.
    if all(type(array) in PLAIN_CLASSES for array in arrays):
        return _train(arrays, asked, options)
    with BelowAutograd():
        return TRAIN(arrays, asked, options)


def _define(name: str, schema: str, run: Callable[..., Any], shapes: Callable[..., Any]) -> Any:
    LIBRARY.define(name + schema, tags=_TAGS)
    for device in ("CPU", "CUDA"):
        LIBRARY.impl(name, run, device)
    torch.library.register_fake(f"moebius::{name}", shapes, lib=LIBRARY)
    return getattr(torch.ops.moebius, name).default


ACROSS = _define("across_ranks", "(Tensor[] arrays, str options) -> Tensor[]", _across, _shapes)
TRAIN = _define(
    "across_ranks_training", "(Tensor[] arrays, int[] asked, str options) -> Tensor[]", _train, _train_shapes
)
BACK = _define(
    "across_ranks_backward",
    "(Tensor token, Tensor[] gradients, Tensor[] given) -> Tensor[]",
    _backward,
    lambda token, gradients, given: [torch.empty_like(one) for one in given],
)
LIBRARY.impl("across_ranks", _autograd, "Autograd")
LIBRARY.impl("across_ranks_training", _autograd_of_training, "Autograd")
