"""Calls across ranks like an earlier one, which are not checked again: checks read metadata alone."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from moe_core.base.recent import Recent
from moe_core.formats import QuantizedTensor
from moe_core.parallel import ExchangePlan
from moe_core.specs.operands import ExpertWeights, MoEOperands, named_fields
from moe_torch.bridge.private import PLAIN_CLASSES, TensorGuards


class Known(NamedTuple):
    """A checked call. plan: of the exchange. asked: it needs gradients. kept: objects with addresses in its key."""

    is_like: Any
    plan: ExchangePlan
    asked: bool
    kept: tuple[Any, ...]


class Call:
    """The key and tensors of a call. key: None, if it may not be remembered."""

    __slots__ = ("kept", "key", "tensors")

    def __init__(self, operands: MoEOperands, parallel: str, *options: Any) -> None:
        """parallel: the name of an ExpertParallel, which is not kept alive, nor its groups and their memory. options:
        other objects that the checks read."""
        names: list[Any] = []
        self.kept, self.tensors, self.key = options, [], None
        arrays = operands.x, operands.token_mask
        bundles = operands.experts, operands.routing, operands.shared
        plain = operands.lora is None and type(operands.experts) is ExpertWeights
        if TensorGuards is not None and plain:
            known = all([one is None or self._add(one, names) for one in arrays])
            if known and all([one is None or self._add_all(one, names) for one in bundles]):
                ids = [id(option) for option in options]
                self.key = (parallel, *ids, torch.is_grad_enabled(), operands.x.shape, *names)

    def _add(self, array: Any, names: list[Any]) -> bool:
        # The comparison would end the process at a tensor without strides.
        if type(array) not in PLAIN_CLASSES or array.is_nested:
            return False
        self.tensors.append(array)
        names.append(array.dim())
        return True

    def _add_all(self, bundle: Any, names: list[Any]) -> bool:
        names.append(type(bundle))
        for name, value in named_fields(bundle):
            names.append(name)
            if isinstance(value, QuantizedTensor):
                names.append(value.spec)
                if not self._add_all(value, names):
                    return False
            elif not self._add(value, names):
                return False
        return True

    def find(self) -> Known | None:
        known = None if self.key is None else _known.get(self.key) or _known.find(self.key)
        return known if known is not None and known.is_like(*self.tensors) else None

    def remember(self, plan: ExchangePlan, asked: bool) -> None:
        if self.key is not None:
            guards = TensorGuards(*self.tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)
            _known.put(self.key, Known(guards.check, plan, asked, self.kept))


_known: Recent[Known] = Recent(256)
