"""Operators that do more than run their plan: forwards of training steps, and backwards."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, ParamSpec, TypeVar

import torch

from moe_core.base.dtypes import ID_DTYPES
from moe_core.base.sizes import INT32_LIMIT
from moe_torch.bridge.operator import Operator
from moe_torch.bridge.options import DTYPE_NAMES, decode

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")

MATRICES = ("experts.gate_up", "experts.down", "experts.up", "shared.gate_up", "shared.down", "shared.up")


def accumulated(wanted: tuple[str, ...], into: Mapping[str, Any] | None) -> tuple[str, ...]:
    return tuple(name for name in wanted if into and into.get(name.removeprefix("d_")) is not None)


def as_int32(ids: torch.Tensor) -> torch.Tensor:
    """Return ids of any integer type as int32, with ids beyond int32 as others out of range. Others: unchanged."""
    if not isinstance(ids, torch.Tensor) or ids.dtype == torch.int32 or DTYPE_NAMES.get(ids.dtype) not in ID_DTYPES:
        return ids
    wide = ids.to(torch.int64)
    if ids.dtype == torch.uint64:
        wide = torch.where(wide < 0, INT32_LIMIT, wide)
    return wide.clamp(-2, INT32_LIMIT - 1).to(torch.int32)


def as_float32(weights: torch.Tensor) -> torch.Tensor:
    return weights.float() if weights.dtype in (torch.bfloat16, torch.float16) else weights


class TrainingOperator(Operator[_Parameters, _Result]):
    """A forward that saves tensors. It copies the caller's ids and weights, because no operator returns an alias."""

    _runs_plan_alone = False

    @functools.cached_property
    def _copied(self) -> tuple[int, ...]:
        return tuple(self.names.index(name) for name in ("routing.ids", "routing.weights") if name in self.names)

    def _run(self, key: tuple[Any, ...], arguments: tuple[Any, ...]) -> list[torch.Tensor]:
        outputs = super()._run(key, arguments)
        originals = [arguments[index] for index in self._copied]
        used = [as_float32(one) if one.is_floating_point() else as_int32(one) for one in originals]
        outputs[3:3] = [one.clone() if one is original else one for one, original in zip(used, originals, strict=True)]
        return outputs


class BackwardOperator(Operator[_Parameters, _Result]):
    """A backward of the options' gradients. With `into` it adds to these and overwrites the pre-activation."""

    _runs_plan_alone = False

    @functools.cached_property
    def _first_into(self) -> int:
        return next((index for index, name in enumerate(self.names) if name.startswith("into.")), len(self.names))

    def _run(self, key: tuple[Any, ...], arguments: tuple[Any, ...]) -> list[torch.Tensor]:
        if self._first_into == len(self.names):
            return super()._run(key, arguments)
        ready = self.plans.get(key) or self._remember(key, arguments)
        buffers: dict[str, Any] = dict(zip(MATRICES, arguments[self._first_into : -1], strict=True))
        _, wanted, *_ = decode(arguments[-1])
        into = {name: buffers[name.removeprefix("d_")] for name in accumulated(wanted, buffers)}
        pre = arguments[self.names.index("saved.pre_activation")]
        # A later use of the saved tensor then raises torch's own error.
        torch.autograd.graph.increment_version([*into.values(), *([] if pre is None else [pre])])
        destinations = [into.get(name) for name in wanted]
        outputs = self.run_ready(ready, arguments, destinations)
        return [output for name, output in zip(wanted, outputs, strict=True) if name not in into]


class IntoOperator(Operator[_Parameters, _Result]):
    _runs_plan_alone = False

    def _run(self, key: tuple[Any, ...], arguments: tuple[Any, ...]) -> list[torch.Tensor]:
        ready, out = self.plans.get(key) or self._remember(key, arguments), arguments[self.names.index("out")]
        self.require_alignment(arguments, ("out",))
        self.run_ready(ready, arguments, (out,))
        torch.autograd.graph.increment_version([out])
        return []
