"""Calls across ranks like an earlier one, which are not checked again: checks read metadata alone."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import torch

from moe_core.base.recent import Recent
from moe_core.base.target import cpu_target
from moe_core.errors import InvalidInput
from moe_core.formats import QuantizedTensor
from moe_core.parallel import ExchangePlan
from moe_core.specs.operands import ExpertWeights, MoEOperands, array_fields
from moe_torch.bridge import eager
from moe_torch.bridge.operator import Operator
from moe_torch.bridge.private import PLAIN_CLASSES, TensorGuards
from moe_torch.bridge.ready import Ready

#: `Ready` or `Step` of a call's operators, by step and numbers of rows.
Steps = Recent[Any]


class Known(NamedTuple):
    """A checked call. plan: of the exchange. asked: it needs gradients. kept: objects with addresses in its key."""

    is_like: Any
    plan: ExchangePlan
    asked: bool
    kept: tuple[Any, ...]
    steps: Steps

    @property
    def plain_steps(self) -> Steps | None:
        """For calls that nothing watches and no gradient follows."""
        return None if self.asked or not eager.plain_thread() else self.steps


def repeated(steps: Steps | None, key: tuple[Any, ...], operator: Operator[..., Any], **given: Any) -> Any:
    """Call an operator without bundles. key: of the step, with all metadata that a like call may change."""
    if steps is None:
        return operator.call(**given)
    ready, names = steps.get(key) or steps.find(key), operator.names
    if ready is not None:
        with contextlib.suppress(InvalidInput):  # The operator copies what is misaligned.
            return operator.pack(ready.run([given[names[index]].data_ptr() for index in ready.selection]))
    results = operator.call(**given)
    if (planned := plan_known(operator, operator.arguments(**given))) is not None:
        steps.put(key, planned)
    return results


def plan_known(operator: Operator[..., Any], arguments: tuple[Any, ...]) -> Ready | None:
    """The plan of a call that has run."""
    plain = eager.plain_key(arguments)
    return None if plain is None else operator.plans.get(plain)


class Step(NamedTuple):
    """A plan and its inputs' addresses. changing: positions of what calls pass. held: (position, number) of tensors."""

    ready: Ready
    addresses: list[int]
    changing: tuple[int, ...]
    held: tuple[tuple[int, int], ...]

    @classmethod
    def plain(cls, ready: Ready) -> Step:
        """Without addresses."""
        return cls(ready, [0] * len(ready.prepared.plan.inputs), (), ())

    @classmethod
    def of(
        cls, operator: Operator[..., Any], arguments: tuple[Any, ...], changing: Sequence[str], tensors: Sequence[Any]
    ) -> Step | None:
        """Of a call that has run. Without tensors, arrays that do not change are constants, which the caller keeps."""
        ready, numbers = plan_known(operator, arguments), {id(one): number for number, one in enumerate(tensors)}
        if ready is None:
            return None
        names, arrays = zip(*[(operator.names[index], arguments[index]) for index in ready.selection], strict=True)
        held = [(position, numbers[id(one)]) for position, one in enumerate(arrays) if id(one) in numbers]
        if tensors and len({names[position] for position, _ in held}.union(changing)) != len(names):
            return None
        return cls(ready, [one.data_ptr() for one in arrays], tuple(map(names.index, changing)), tuple(held))

    def pointers(self, tensors: Sequence[torch.Tensor]) -> list[int]:
        """Addresses of a run, before those that change are known."""
        addresses = self.addresses.copy()
        for position, number in self.held:
            addresses[position] = tensors[number].data_ptr()
        return addresses

    def change(self, addresses: list[int], *changed: int) -> list[int]:
        for position, address in zip(self.changing, changed, strict=True):
            addresses[position] = address
        return addresses

    def run(self, tensors: Sequence[torch.Tensor], *changed: int) -> list[torch.Tensor]:
        return self.ready.run(self.change(self.pointers(tensors), *changed))


_is_nested = attrgetter("is_nested")


@functools.cache
def _values(kind: type) -> Callable[[Any], tuple[Any, ...]]:
    """All arrays of a bundle, None where absent."""
    return attrgetter(*[name for name, _ in array_fields(kind)])


class Call:
    """The key and tensors of a call. key: None, if it may not be remembered."""

    __slots__ = ("kept", "key", "tensors")

    def __init__(self, operands: MoEOperands, parallel: str, *options: Any) -> None:
        """parallel: the name of an ExpertParallel, not kept alive. options: other objects that the checks read."""
        self.kept, self.tensors, self.key = options, [], None
        if TensorGuards is None or type(operands.experts) is not ExpertWeights:
            return
        arrays, names = [operands.x, operands.token_mask, operands.adapter_ids], []
        for bundle in (operands.experts, operands.routing, operands.shared, operands.lora):
            if bundle is not None:
                names.append(type(bundle))
                arrays += _values(type(bundle))(bundle)
        for one in arrays:
            if type(one) is QuantizedTensor:
                names.append(one.spec)
                arrays += _values(QuantizedTensor)(one)
        tensors = [one for one in arrays if one is not None and type(one) is not QuantizedTensor]
        # The comparison would end the process at a tensor without strides.
        if not PLAIN_CLASSES.issuperset(map(type, tensors)) or True in map(_is_nested, tensors):
            return
        engine, kinds = None if operands.x.is_cuda else cpu_target(), map(type, arrays)
        self.tensors = tensors
        self.key = (parallel, *map(id, options), torch.is_grad_enabled(), engine, operands.x.shape, *kinds, *names)

    def find(self) -> Known | None:
        known = None if self.key is None else _known.get(self.key) or _known.find(self.key)
        return known if known is not None and known.is_like(*self.tensors) else None

    def remember(self, plan: ExchangePlan, asked: bool) -> None:
        if self.key is not None:
            guards = TensorGuards(*self.tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)
            _known.put(self.key, Known(guards.check, plan, asked, self.kept, Recent()))


_known: Recent[Known] = Recent(256)
