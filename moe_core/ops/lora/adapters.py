"""Static options of adapters' products."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np

from moe_core.base import ArraySpec, Target, plan_type
from moe_core.plan import Argument, passed
from moe_core.specs import LayoutSpec

#: Apart for the two inputs of an adapter: `token` is that of matmul 1, `slot` of matmul 2.
SALTS = {"token": 1, "slot": 2, None: 0}


@plan_type
@dataclass(frozen=True)
class Dropout:
    """A mask of elements by seed, token or slot, and column (`kernels.dropout`).

    probability: of a zero. masked: `token` or `slot`, or None where no element is masked and only the scale counts.
    """

    probability: float = 0.0
    masked: str | None = None

    @property
    def kept(self) -> float:
        """The factor of what remains, fp32."""
        return float(np.float32(1 / (1 - self.probability)))

    @property
    def threshold(self) -> int:
        """32 bits below it drop their element."""
        return min(round(self.probability * 2**32), 2**32 - 1)

    @property
    def mask(self) -> str | None:
        """`masked`, None where nothing is dropped."""
        return self.masked if self.probability else None

    def constants(self) -> dict[str, Argument]:
        return passed(THRESHOLD=self.threshold if self.mask else 0, MASKED=self.mask, SALT=SALTS[self.mask])


@plan_type
@dataclass(frozen=True)
class Adapters:
    """Static sizes. layout: of the experts. slots: adapters. transposed: the product is with factor^T."""

    layout: LayoutSpec
    slots: int
    transposed: bool = False
    dropout: Dropout = Dropout()
    allow_tf32: bool = False
    batch_invariant: bool = False

    @property
    def virtual(self) -> LayoutSpec:
        return dataclasses.replace(self.layout, num_experts=self.layout.num_experts * (self.slots + 1))

    def strides(self, factor: ArraySpec) -> tuple[int, ...]:
        """Elements between slots, experts (0: shared), rows and columns of a factor `[S, E or 1, rows, columns]`."""
        slot, expert, rows, columns = factor.stride
        rows, columns = (columns, rows) if self.transposed else (rows, columns)
        return slot, 0 if factor.shape[1] == 1 else expert, rows, columns

    def sides(self, factor: ArraySpec) -> tuple[int, int]:
        rows, columns = factor.shape[2:]
        return (columns, rows) if self.transposed else (rows, columns)

    def precision(self, dtype: str) -> str:
        return "tf32" if self.allow_tf32 and dtype == "float32" else "ieee"

    def block_m(self, target: Target) -> int:
        rows = self.layout.num_slots / max(1, self.layout.num_experts)
        return 32 if not target.on_gpu or self.batch_invariant or rows > 16 else 16


def adapter_inputs(adapters: Adapters, *, ranks: bool = False, scale: bool = False) -> dict[str, ArraySpec | None]:
    """The arrays that tell adapters' rows."""
    layout, by_expert = adapters.layout, (adapters.slots, adapters.layout.num_experts)
    return {
        "scale": ArraySpec(by_expert, "float32") if scale else None,
        "ranks": ArraySpec(by_expert, "int32") if ranks else None,
        "seed": ArraySpec((1,), "int32") if adapters.dropout.mask else None,
        "virtual_start": ArraySpec((adapters.virtual.num_experts + 1,), "int32"),
        "slot_of_row": ArraySpec((layout.capacity,), "int32"),
    }
