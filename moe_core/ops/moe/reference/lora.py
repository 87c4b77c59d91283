"""The adapters of one MoE backward in NumPy."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from moe_core.base import ArraySpec
from moe_core.ops.common.rounding import plain_name, round_to, to_float32
from moe_core.ops.lora import reference as twins
from moe_core.ops.lora.adapters import Adapters, Dropout
from moe_core.ops.matmul.reference.rows import Rows
from moe_core.specs import LayoutSpec, MoESpec
from moe_core.specs.operands import LoRAFactors


class LoRATwin(NamedTuple):
    """saved: virtual_start, low1 and low2 of the forward."""

    lora: LoRAFactors
    layout: LayoutSpec
    spec: MoESpec
    saved: Mapping[str, Any]
    slot_of_row: np.ndarray

    def _adapters(self, number: int, *, transposed: bool = False, masked: bool = True) -> Adapters:
        dropout = Dropout(self.spec.lora_dropout, {1: "token", 2: "slot"}[number] if masked else None)
        return Adapters(self.layout, len(self.lora.scale), transposed, dropout)

    def _inputs(self, **more: np.ndarray) -> dict[str, Any]:
        start = {"virtual_start": self.saved["virtual_start"], "slot_of_row": self.slot_of_row}
        return start | {"scale": self.lora.scale, "ranks": self.lora.ranks, "seed": self.lora.seed} | more

    def factor(self, name: str) -> Any:
        return getattr(self.lora, name)

    def add_tail(self, number: int, sums: np.ndarray) -> None:
        """Add the tail of product `number` to sums of layout rows."""
        if self.factor(f"a{number}") is not None:
            adapters = dataclasses.replace(self._adapters(number), dropout=Dropout())
            tail = self._inputs(low=self.saved[f"low{number}"], factor=self.factor(f"b{number}"))
            twins.add_tail(sums, slice(None), self.slot_of_row, tail, adapters)

    def pre_activation(self, sums: np.ndarray, biases: list[np.ndarray | None], rows: Rows, dtype: str) -> np.ndarray:
        """Product 1's sums by layout row, with tail and biases."""
        self.add_tail(1, sums)
        with np.errstate(all="ignore"):
            for part, bias in zip(np.split(sums, len(biases), axis=1), biases, strict=True):
                if bias is not None:
                    part[rows.index["row"]] += to_float32(bias[rows.experts])
        return round_to(sums, dtype)

    def d_low(self, number: int, d_y: np.ndarray) -> np.ndarray:
        adapters = self._adapters(number, transposed=True, masked=False)
        inputs = self._inputs(x=d_y, factor=self.factor(f"b{number}"))
        return twins.shrink(inputs, adapters=adapters, gather="row")

    def pull_back(self, number: int, d_y: np.ndarray, d_rows: np.ndarray) -> None:
        """Add what flows through the factors of product `number` to fp32 gradients of its rows. d_y: by layout row."""
        if self.factor(f"a{number}") is not None:
            tail = self._inputs(low=self.d_low(number, d_y), factor=self.factor(f"a{number}"))
            twins.add_tail(d_rows, slice(None), self.slot_of_row, tail, self._adapters(number, transposed=True))

    def gradients(
        self,
        x: np.ndarray,
        weighted_hidden: np.ndarray,
        d_pre: np.ndarray,
        d_out: np.ndarray,
        row_weight: np.ndarray | None,
        wants: Callable[[str], bool],
    ) -> dict[str, np.ndarray]:
        """The factors' gradients. Arrays by layout row."""
        made = {}
        for number, rows, d_y in ((1, x, d_pre), (2, weighted_hidden, d_out)):
            weight = row_weight if number == 2 else None
            sides = {f"a{number}": rows, f"b{number}": self.saved[f"low{number}"]}
            for name, left in sides.items():
                factor = self.factor(name)
                if factor is None or not wants(f"d_lora.{name}"):
                    continue
                masked = name[0] == "a"
                right = self.d_low(number, d_y) if masked else d_y
                inputs = self._inputs(left=left, right=right)
                if weight is not None and not masked:
                    inputs["row_weight"] = weight
                adapters = self._adapters(number)
                adapters = adapters if masked else dataclasses.replace(adapters, dropout=Dropout())
                spec = ArraySpec(factor.shape, plain_name(factor))
                gradient = twins.factor_gradient(inputs, adapters=adapters, gathers=("row", "row"), spec=spec)
                made[f"d_lora.{name}"] = gradient
        return made
