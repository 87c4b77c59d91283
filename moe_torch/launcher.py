"""The composed operator bound to its weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NoReturn

import torch

from moe_core.base.arrays import ALIGNMENT
from moe_core.base.recent import Recent
from moe_core.errors import InvalidInput, Unsupported
from moe_core.specs.moe import MoESpec
from moe_core.specs.operands import ExpertWeights, RouterLogits, RouterWeights, SharedExpert, TopK
from moe_torch.bridge import eager
from moe_torch.bridge.arrays import target_of_device
from moe_torch.bridge.operator import Operator, call_first
from moe_torch.bridge.options import require_instance
from moe_torch.bridge.ready import Ready
from moe_torch.bridge.seen import SeenCalls
from moe_torch.operators.requests import moe_request

_address_of = torch.Tensor.data_ptr


def prepare_moe(
    experts: ExpertWeights,
    routing: RouterWeights | type[RouterLogits] | type[TopK],
    spec: MoESpec,
    *,
    expert_map: torch.Tensor | None = None,
    shared: SharedExpert | None = None,
) -> MoELauncher:
    """Bind the composed operator to its weights: `prepare_moe(experts, routing, spec)(x)` is `moe(x, ...).output`.

    For decoding loops: the weights are checked once, here, and a call checks x only.

    Args:
        experts, spec, expert_map, shared: as for `moe`.
        routing: RouterWeights, or the class RouterLogits or TopK if each call brings an object of it.

    Raises:
        InvalidInput: arguments of the wrong type, dtype or alignment, or on several devices.
        Unsupported: tensors other than ordinary CPU and CUDA tensors.
    """
    if isinstance(routing, RouterWeights):
        kind, known = RouterWeights, routing
    elif routing is RouterLogits or routing is TopK:
        kind, known = routing, routing(None, None)
    else:
        raise InvalidInput(
            f"routing must be a RouterWeights, or the class RouterLogits or TopK, got {_name(routing)}; bind the "
            "router, or bring logits or ids with each call"
        )
    request = moe_request(None, experts, known, spec, expert_map=expert_map, shared=shared)
    return MoELauncher(kind, *request, rows=_rows_of(experts, spec))


def _rows_of(experts: ExpertWeights, spec: MoESpec) -> tuple[int | None, torch.dtype | None]:
    """(width, dtype) of the rows that bound weights multiply. None: any, or weights that disagree."""
    axes = (-2, -1) if spec.weight_layout == "in_out" else (-1, -2)
    widths = {tuple(one.shape)[axis:][:1] for one, axis in zip((experts.gate_up, experts.down), axes, strict=True)}
    dtypes = {one.dtype if isinstance(one, torch.Tensor) else None for one in (experts.gate_up, experts.down)}
    width = widths.pop() if len(widths) == 1 else ()
    return width[0] if width else None, dtypes.pop() if len(dtypes) == 1 else None


def _name(value: object) -> str:
    return value.__name__ if isinstance(value, type) else f"a {type(value).__name__}"


class MoELauncher:
    """A whole MoE forward with bound weights, made by `prepare_moe`: `launcher(x)` is the output `[T, D]`.

    Any number of tokens fits. A call launches the kernels of `moe` and gives its bits. It calls `moe` itself under
    `torch.compile`, functional transforms, modes and profilers, and for gradients.

    The values of the bound tensors may change in place. Their shapes, strides and memory must stay: after
    `parameter.data = ...`, `module.to(...)` or sharding the next call raises InvalidInput. A call of `moe` itself takes
    the tensors as they are then.
    """

    def __init__(
        self,
        kind: type,
        operator: Operator[..., Any],
        arguments: tuple[Any, ...],
        rows: tuple[int | None, torch.dtype | None],
    ) -> None:
        arrays, names, named = arguments[:-1], operator.names, operator.present(arguments[:-1])
        # Refuses other types than tensors, and devices without kernels.
        operator.specs(arrays)
        target_of_device(operator.device_of(arrays))
        for name, tensor in named:
            if not eager.plain_tensor(tensor):
                raise Unsupported(
                    f"{name} must be an ordinary CPU or CUDA tensor to be bound, got {type(tensor).__name__}; "
                    "call moe_torch.moe with it"
                )
        operator.require_alignment(arguments, names)
        self._operator, self._kind, self._arrays, self._options = operator, kind, arrays, arguments[-1]
        self._rows = rows
        self._names, self._bound = [name for name, _ in named], [tensor for _, tensor in named]
        # Aliases keep memory, shapes and strides.
        self._kept = tuple(None if array is None else array.detach() for array in arrays)
        self._addresses = [tensor.data_ptr() for tensor in self._bound]
        self._forms = [_form(tensor) for tensor in self._bound]
        inputs = [name for name in names if name.startswith("routing.") and kind is not RouterWeights]
        self._input_indices = tuple(names.index(name) for name in ("x", *inputs, "token_mask"))
        self._ready: Recent[Ready] = Recent()
        #: By the arguments of each call, then the bound tensors, at addresses that must not change.
        self._seen = SeenCalls()

    def __call__(
        self, x: torch.Tensor, routing: RouterLogits | TopK | None = None, *, token_mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The output `[T, D]` in the dtype of x, or in spec.out_dtype. Arguments and errors: see `moe`.

        routing: None: RouterWeights are bound. Raises InvalidInput if a bound tensor's memory was replaced.
        """
        if self._kind is not RouterWeights:
            require_instance("routing", routing, self._kind)
            given: Any = routing
            pair = (given.ids, given.weights) if type(given) is TopK else (given.logits, given.correction_bias)
            inputs = (x, *pair, token_mask)
        elif routing is None:
            inputs = (x, token_mask)
        else:
            raise InvalidInput(
                f"routing must be None where RouterWeights are bound, got {_name(routing)}; leave it out"
            )
        if torch.compiler.is_compiling():
            self._require_rows(x)
            return call_first(self._operator, self._arguments(self._arrays, inputs))
        arguments: tuple[Any, ...] = (*inputs, *self._bound)
        outputs = self._seen.run(self._options, arguments)
        if outputs is not None:
            return outputs[0]
        self._require_rows(x)
        key = eager.plain_key((*inputs, self._options))
        if key is None or (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in self._bound)):
            return call_first(self._operator, self._arguments(self._arrays, inputs))
        addresses = list(map(_address_of, self._bound))
        if addresses != self._addresses or [_form(tensor) for tensor in self._bound] != self._forms:
            self._refuse_replaced()
        ready = self._ready.get(key) or self._remember(key, inputs)
        try:
            output = ready.run([arguments[index].data_ptr() for index in ready.selection])[0]
            self._seen.remember(self._options, arguments, ready, self._addresses)
            return output
        except InvalidInput:
            # The operator copies misaligned arguments of a call.
            if not any(tensor is not None and tensor.data_ptr() % ALIGNMENT for tensor in inputs):
                raise
        return self._operator.first(self._arguments(self._kept, inputs))

    def _require_rows(self, x: object) -> None:
        """The weights were checked: a wrong x is to blame."""
        width, dtype = self._rows
        if isinstance(x, torch.Tensor) and x.ndim == 2:
            if width is not None and x.shape[1] != width:
                raise InvalidInput(
                    f"x must be [num_tokens, {width}] for the weights that are bound, got {tuple(x.shape)}; pass rows "
                    "of that width"
                )
            if dtype is not None and x.dtype != dtype:
                kinds = [str(kind).removeprefix("torch.") for kind in (dtype, x.dtype)]
                raise InvalidInput(f"x must be {kinds[0]} like the weights that are bound, got {kinds[1]}; cast it")

    def _arguments(self, bound: Sequence[Any], inputs: Sequence[Any]) -> tuple[Any, ...]:
        arrays = list(bound)
        for index, array in zip(self._input_indices, inputs, strict=True):
            arrays[index] = array
        return (*arrays, self._options)

    def _refuse_replaced(self) -> NoReturn:
        for name, tensor, address, form in zip(self._names, self._bound, self._addresses, self._forms, strict=True):
            if tensor.data_ptr() != address:
                kept, got = f"memory it was bound with, at {address:#x}", f"{tensor.data_ptr():#x}"
            elif _form(tensor) != form:
                kept, got = f"shape, strides and dtype it was bound with, {form}", str(_form(tensor))
            else:
                continue
            raise InvalidInput(f"{name} must keep the {kept}, got {got}; call prepare_moe again")
        raise AssertionError("no bound tensor differs")

    def _remember(self, key: Any, inputs: Sequence[Any]) -> Ready:
        """Find or make the plan. It selects from the arguments, then the bound tensors."""
        known = self._ready.find(key)
        if known is not None:
            return known
        ready = self._operator.ready(self._arguments(self._kept, inputs), first=True)
        indices = [*self._input_indices, *[self._operator.names.index(name) for name in self._names]]
        ready = dataclasses.replace(ready, selection=tuple(indices.index(index) for index in ready.selection))
        self._ready.put(key, ready)
        return ready


def _form(tensor: torch.Tensor) -> tuple[torch.Size, tuple[int, ...], torch.dtype]:
    return tensor.shape, tensor.stride(), tensor.dtype
