"""The parameters of a layer, grouped as its state_dict names them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from moe_core.layers import Parameter


class ParameterGroup(torch.nn.Module):
    """The arrays of one part of a layer. It has no forward: the layer reads them.

    NAMES: every array the part can have; absent ones are None. Buffers stay float32 whatever dtype the module is cast
    to.
    """

    NAMES: ClassVar[tuple[str, ...]]

    def __init__(
        self, parameters: Sequence[Parameter], device: torch.device | str | None, dtype: torch.dtype | None
    ) -> None:
        super().__init__()
        present = {parameter.name.rpartition(".")[2]: parameter for parameter in parameters}
        for name in self.NAMES:
            parameter = present.get(name)
            if parameter is None:
                self.register_parameter(name, None)
            elif parameter.role == "buffer":
                self.register_buffer(name, torch.empty(parameter.shape, dtype=torch.float32, device=device))
            else:
                value = torch.empty(parameter.shape, dtype=dtype, device=device)
                self.register_parameter(name, torch.nn.Parameter(value))

    def _apply(self, fn: Any, recurse: bool = True) -> ParameterGroup:
        before = dict(self._buffers)
        super()._apply(fn, recurse)
        for name, buffer in before.items():
            after = self._buffers[name]
            if buffer is not None and after is not None and after.dtype != buffer.dtype:
                self._buffers[name] = buffer.to(after.device)
        return self


class RouterParameters(ParameterGroup):
    """weight `[E, D]`, bias `[E]`, correction_bias fp32 `[E]`, a buffer."""

    NAMES = ("weight", "bias", "correction_bias")
    weight: torch.Tensor
    bias: torch.Tensor | None
    correction_bias: torch.Tensor | None


class ExpertParameters(ParameterGroup):
    """The fields of `moe_core.operands.ExpertWeights`."""

    NAMES = ("gate_up", "down", "up", "gate_up_bias", "up_bias", "down_bias")
    gate_up: torch.Tensor
    down: torch.Tensor
    up: torch.Tensor | None
    gate_up_bias: torch.Tensor | None
    up_bias: torch.Tensor | None
    down_bias: torch.Tensor | None


class SharedParameters(ParameterGroup):
    """The fields of `moe_core.operands.SharedExpert`."""

    NAMES = ("gate_up", "down", "up", "gate")
    gate_up: torch.Tensor
    down: torch.Tensor
    up: torch.Tensor | None
    gate: torch.Tensor | None
