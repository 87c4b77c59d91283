"""Operators of the tables of expert parallelism, without gradients."""

from __future__ import annotations

from typing import Any

from moe_core.base.arrays import ArraySpec, require_spec
from moe_core.base.target import Target
from moe_core.ops.exchange.operands import ReceiveOperands, SendOperands, in_records
from moe_core.ops.exchange.tables import plan_receive_tables, plan_send_tables, receive_shapes, send_shapes
from moe_core.ops.reduction.rowwise import plan_gather_rows
from moe_core.plan.steps import LaunchPlan
from moe_core.specs.exchange import TableSpec, packed_row
from moe_core.specs.routing import LayoutSpec
from moe_torch.bridge.operator import Operator, Outputs
from moe_torch.bridge.options import DTYPE_NAMES, TORCH_DTYPES
from moe_torch.bridge.signature import MaybeTensor, Tensor


def _typed(shapes: list[tuple[str, tuple[int, ...], Any]]) -> Outputs:
    return [(shape, TORCH_DTYPES[dtype] if isinstance(dtype, str) else dtype) for _, shape, dtype in shapes]


def _take_plan(x: ArraySpec, slot_of_row: ArraySpec, table: ArraySpec | None, each: int, target: Target) -> LaunchPlan:
    """Plan y `[S, D]`: rows `slot_of_row // each` of x `[R, D]`, zeros for negative slots. table: their numbers."""
    require_spec("slot_of_row", slot_of_row, ("rows",), "int32")
    capacity, count = slot_of_row.shape[0], x.shape[0]
    # The batched form may have more rows than there are slots.
    fits = capacity <= count * each
    layout = LayoutSpec(count, each, 1, rows=capacity if fits else None, max_rows=None if fits else capacity)
    return plan_gather_rows(x, slot_of_row, ArraySpec((count * each,), "int32"), layout, target, table=table)


def _taken(call: Any) -> Outputs:
    width = call.x.shape[1]
    if call.table is not None:
        width, _ = packed_row(width, DTYPE_NAMES[call.x.dtype], call.table.shape[1])
    return [((call.slot_of_row.shape[0], width), call.x.dtype)]


def _send_tables(
    *, ids: Tensor, weights: Tensor, places_of_experts: Tensor, start: Tensor, header: Tensor, token_mask: MaybeTensor,
    tokens: MaybeTensor, limits: MaybeTensor, spec: TableSpec, rank: int,
) -> list[Tensor]: ...  # fmt: skip
def _receive_tables(
    *, came: Tensor, header: MaybeTensor, lost: MaybeTensor, counts: MaybeTensor, results: MaybeTensor,
    spec: TableSpec, rank: int, top_k: int, num_rows: int, num_tokens: int,
) -> list[Tensor]: ...  # fmt: skip
# First what differs between a home's call and an owner's: calls are known by it.
def _take_rows(*, slot_of_row: Tensor, x: Tensor, table: MaybeTensor, each: int) -> Tensor: ...


#: Returns the outputs of `send_shapes`.
SEND_TABLES = Operator(
    _send_tables,
    in_records(plan_send_tables, operands=SendOperands),
    lambda call: _typed(send_shapes(call.ids.shape[0], call.ids.shape[1], call.spec)),
)
#: Returns the outputs of `receive_shapes`.
RECEIVE_TABLES = Operator(
    _receive_tables,
    in_records(plan_receive_tables, operands=ReceiveOperands),
    lambda call: _typed(
        receive_shapes(
            call.num_rows, call.num_tokens, call.spec, len(call.came), None if call.results is None else call.top_k
        )
    ),
)
TAKE_ROWS = Operator(_take_rows, _take_plan, _taken)
