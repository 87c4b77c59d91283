"""The rows of a product: how the objects of `routing` describe them, and what that is for our ops."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moe_core.errors import InvalidInput
from moe_torch.bridge.options import layout_spec, require_instance
from moe_torch.modular.routing_data import GatherIndx, RoutingData, ScatterIndx, group_starts, layout_of
from moe_torch.ops import RaggedLayout


@dataclass(frozen=True, eq=False)
class Rows:
    """layout: the rows by expert, None = those of one matrix. gather: `token` or `row`. count: how many rows."""

    layout: RaggedLayout | None
    gather: str
    count: int

    def leads_back(self, scatter: ScatterIndx) -> bool:
        """Whether the scatter's rows of slots are those of the layout."""
        return self.layout is not None and scatter.src_indx is self.layout.row_of_slot

    def by_slot(self, factors: torch.Tensor) -> torch.Tensor:
        """fp32 factors of rows `[count]` in the order of slots.

        A slot without a row gets any other's: nothing is multiplied by it.
        """
        if self.layout is None or self.layout.slot_of_row is self.layout.row_of_slot:
            return factors
        return factors[self.layout.row_of_slot]

    def expert_of_row(self) -> torch.Tensor | None:
        """int32 `[count]`, rows without one get the last; None where there is one matrix."""
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
        return torch.where(exists[:, None], y, 0)


def dense_rows(count: int) -> Rows:
    return Rows(None, "row", count)


def batched_rows(batch: int, rows: int, device: torch.device) -> Rows:
    """The rows of `batch` matrices, one after the other."""
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


def ragged_rows(
    routing_data: RoutingData, gather: GatherIndx | None, scatter: ScatterIndx | None, num_rows: int
) -> Rows:
    """The rows of a routing; num_rows: those of x, which count where nothing else says it."""
    top_k = 1
    if gather is not None:
        slot_of_row, row_of_slot, top_k = gather.src_indx, gather.dst_indx, routing_data.n_expts_act
    elif scatter is not None:
        slot_of_row, row_of_slot = scatter.dst_indx, scatter.src_indx
    else:
        group_start = group_starts(routing_data)
        rows = torch.arange(num_rows, dtype=torch.int32, device=group_start.device)
        slot_of_row = row_of_slot = torch.where(rows < group_start[-1], rows, -1)
    layout = layout_of(routing_data, slot_of_row, row_of_slot, top_k)
    return Rows(layout, "row" if gather is None else "token", slot_of_row.shape[0])


def scattered(scatter: ScatterIndx, top_k: int) -> RaggedLayout:
    """What `ops.reduce` reads of a layout: the row of each slot."""
    row_of_slot = scatter.src_indx
    if row_of_slot.shape[0] % top_k:
        raise InvalidInput(
            f"scatter_indx.src_indx must have a multiple of n_expts_act = {top_k} elements, got "
            f"{row_of_slot.shape[0]}; pass that of routing"
        )
    spec = layout_spec(row_of_slot.shape[0] // top_k, top_k, 1, 1, None)
    return RaggedLayout(spec, None, None, scatter.dst_indx, row_of_slot, None)


def require_indices(
    routing_data: RoutingData | None, gather: GatherIndx | None, scatter: ScatterIndx | None
) -> RoutingData:
    """Check the kinds of the three; the routing, or that of one matrix."""
    for name, value, kind in (
        ("routing_data", routing_data, RoutingData),
        ("gather_indx", gather, GatherIndx),
        ("scatter_indx", scatter, ScatterIndx),
    ):
        if value is not None and not isinstance(value, kind):
            require_instance(f"{name} (else convert it with from_upstream)", value, kind)
    return RoutingData(None, None, 1, 1) if routing_data is None else routing_data
