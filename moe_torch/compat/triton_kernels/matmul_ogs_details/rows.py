"""Rows of a product: the expert of each, and the row it is made of."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moe_core.errors import InvalidInput
from moe_torch.bridge.options import layout_spec
from moe_torch.modular.routing_data import ScatterIndx
from moe_torch.ops import RaggedLayout


@dataclass(frozen=True, eq=False)
class Rows:
    """layout: None: of one matrix. gather: `token` or `row`. count: number of rows."""

    layout: RaggedLayout | None
    gather: str
    count: int

    def leads_back(self, scatter: ScatterIndx) -> bool:
        """True if the scatter's rows of slots are the layout's."""
        return self.layout is not None and scatter.src_indx is self.layout.row_of_slot

    def by_slot(self, factors: torch.Tensor) -> torch.Tensor:
        """fp32 factors of rows `[count]` by slot. A slot without a row gets any factor."""
        if self.layout is None or self.layout.slot_of_row is self.layout.row_of_slot:
            return factors
        return factors[self.layout.row_of_slot]

    def expert_of_row(self) -> torch.Tensor | None:
        """int32 `[count]`, the last expert for rows without one."""
        if self.layout is None:
            return None
        ends = self.layout.group_start[1:]
        rows = torch.arange(self.count, dtype=torch.int32, device=ends.device)
        return torch.searchsorted(ends, rows, right=True, out_int32=True).clamp(max=ends.shape[0] - 1)

    def without_absent(self, y: torch.Tensor) -> torch.Tensor:
        """y `[count, N]` with exact zeros in rows without an expert."""
        if self.layout is None:
            return y
        exists = torch.arange(self.count, device=y.device) < self.layout.group_start[-1]
        exists &= self.layout.slot_of_row >= 0
        return torch.where(exists[:, None], y, 0)


def batched_rows(batch: int, rows: int, device: torch.device) -> Rows:
    integers = {"dtype": torch.int32, "device": device}
    slots = torch.arange(batch * rows, **integers)
    layout = RaggedLayout(
        layout_spec(batch * rows, 1, batch, 1, None),
        torch.full((batch,), rows, **integers),
        torch.arange(batch + 1, **integers) * rows,
        slots,
        slots,
        torch.zeros(1, **integers),
    )
    return Rows(layout, "row", batch * rows)


def scattered(scatter: ScatterIndx, top_k: int) -> RaggedLayout:
    """The part of a layout that `ops.reduce` reads: the row of each slot."""
    row_of_slot = scatter.src_indx
    if row_of_slot.shape[0] % top_k:
        raise InvalidInput(
            f"scatter_indx.src_indx must have a multiple of n_expts_act = {top_k} elements, got "
            f"{row_of_slot.shape[0]}; pass that of routing"
        )
    spec = layout_spec(row_of_slot.shape[0] // top_k, top_k, 1, 1, None)
    return RaggedLayout(spec, None, None, scatter.dst_indx, row_of_slot, None)
