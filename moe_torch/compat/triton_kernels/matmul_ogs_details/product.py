"""Rows of a product, and one product of known operands and rows, for the interfaces of all releases."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from moe_core.base.checks import finite_float
from moe_core.errors import InvalidInput
from moe_core.formats import QuantizedTensor
from moe_core.specs.matmul import Activation, MatmulSpec
from moe_core.specs.tuning import MatmulTuning
from moe_torch import ops
from moe_torch.bridge.options import TORCH_DTYPES, layout_spec
from moe_torch.compat.triton_kernels.matmul_ogs_details.operands import Operand, Weight, rows_of, with_scales_of_rows
from moe_torch.modular.routing_data import ScatterIndx


@dataclass(frozen=True, eq=False)
class Rows:
    """layout: None: of one matrix. gather: `token` or `row`. count: number of rows."""

    layout: ops.RaggedLayout | None
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
    layout = ops.RaggedLayout(
        layout_spec(batch * rows, 1, batch, 1, None),
        torch.full((batch,), rows, **integers),
        torch.arange(batch + 1, **integers) * rows,
        slots,
        slots,
        torch.zeros(1, **integers),
    )
    return Rows(layout, "row", batch * rows)


def scattered(scatter: ScatterIndx, top_k: int) -> ops.RaggedLayout:
    """The part of a layout that `ops.reduce` reads: the row of each slot."""
    row_of_slot = scatter.src_indx
    if row_of_slot.shape[0] % top_k:
        raise InvalidInput(
            f"scatter_indx.src_indx must have a multiple of n_expts_act = {top_k} elements, got "
            f"{row_of_slot.shape[0]}; pass that of routing"
        )
    spec = layout_spec(row_of_slot.shape[0] // top_k, top_k, 1, 1, None)
    return ops.RaggedLayout(spec, None, None, scatter.dst_indx, row_of_slot, None)


def matmul_spec(precision: Any, weight: Weight, rows: Rows, values: Any, activation: Activation | None) -> MatmulSpec:
    """The spec of a product with the options that all releases have. The result has precision.out_dtype or x's."""
    out_dtype = str(values.dtype if precision.out_dtype is None else precision.out_dtype).removeprefix("torch.")
    tuning = MatmulTuning(batch_invariant=True) if precision.enforce_bitwise_invariance else None
    return MatmulSpec(weight.weight_layout, rows.gather, "row", activation, out_dtype, precision.allow_tf32, tuning)


class Factors(NamedTuple):
    """betas and gammas fp32 `[rows]`, alpha a number."""

    betas: torch.Tensor | None
    gammas: torch.Tensor | None
    alpha: float | None


def factors_of(
    betas: torch.Tensor | None, gammas: torch.Tensor | None, alpha: float | None, count: int, batch: int | None
) -> Factors:
    """count: of all rows. batch: number of matrices `[B, M, K]`, which share factors `[M]`."""
    wanted = count if batch is None else count // max(batch, 1)

    def by_row(name: str, factor: torch.Tensor | None) -> torch.Tensor | None:
        if factor is None:
            return None
        if tuple(factor.shape) != (wanted,):
            raise InvalidInput(
                f"{name} must be [{wanted}], one for each row, got {list(factor.shape)}; pass such a tensor"
            )
        factor = factor.to(torch.float32)
        return factor if batch is None else factor.repeat(batch)

    number = None if alpha is None else finite_float("out_alpha", alpha)
    return Factors(by_row("betas", betas), by_row("gammas", gammas), number)


def batched(x: Operand, weight: Weight, weight_name: str, out_dtype: torch.dtype | None) -> tuple[Any, Rows]:
    """Rows of x `[B, M, K]` and their layout, for weights `[B, K, N]`."""
    batch, count, _ = x.array.shape
    if weight.shape[:-2] != (batch,):
        raise InvalidInput(
            f"{weight_name} must be [{batch}, K, N] like {x.name}, got {list(weight.shape)}; pass a matrix for each"
        )
    rows = with_scales_of_rows(x)
    return rows_of(rows, out_dtype), batched_rows(batch, count, rows.array.device)


def rows_at(values: Any, index: torch.Tensor | slice) -> Any:
    """Rows of a plain or quantised `[R, K]`."""
    if isinstance(values, QuantizedTensor):
        scales = values.scales if values.format.group_rows is None else values.scales[index]
        return replace(values, values=values.values[index], scales=scales)
    return values[index]


def bias_of(bias: torch.Tensor | None, weight: Weight, values: Any, rows: Rows) -> torch.Tensor | None:
    """`[E, N]` or `[N]`, in fp32 unless it has the dtype of x."""
    if bias is None:
        return None
    plain = None if isinstance(values, QuantizedTensor) else values.dtype
    bias = bias if bias.dtype == plain else bias.to(torch.float32)
    wanted = (*weight.shape[:-2], weight.shape[-1])
    if rows.layout is None and bias.ndim == 2 and bias.shape[0] == 1:
        bias = bias[0]
    elif len(wanted) == 2 and wanted[0] == 1 and bias.ndim == 1:
        bias = bias[None]
    if tuple(bias.shape) != wanted:
        raise InvalidInput(f"bias must be {list(wanted)}, got {list(bias.shape)}; pass one row per matrix")
    return bias.contiguous()


def product(
    operands: ops.MatmulOperands, rows: Rows, spec: MatmulSpec, factors: Factors, scatter: ScatterIndx | None
) -> tuple[torch.Tensor, str]:
    """(`[rows, N]`, their order), in several ops where one cannot apply betas, alpha or gammas."""
    (betas, gammas, alpha), bias = factors, operands.bias
    one_op = (betas is None or bias is None) and alpha in (None, 1.0)
    # Weights have gradients only for rows by slot of this layout.
    order = "slot" if scatter is not None and rows.leads_back(scatter) else "row"
    differentiated = gammas is not None and gammas.requires_grad and torch.is_grad_enabled()
    if one_op and not (differentiated and (order == "row" or spec.activation is not None)):
        operands = replace(operands, row_weight=None if gammas is None else rows.by_slot(gammas))
        return ops.matmul_ogs(operands, rows.layout, replace(spec, scatter=order)), order
    plain = replace(spec, activation=None, out_dtype="float32")
    result = ops.matmul_ogs(replace(operands, bias=None), rows.layout, plain)
    if bias is not None:
        expert = rows.expert_of_row()
        added = bias.float() if expert is None else bias.float()[expert]
        result = result + (added if betas is None else added * betas[:, None])
    if alpha is not None:
        result = result * alpha
    if spec.activation is not None:
        result = ops.activation(result, spec.activation)
    if gammas is not None:
        result = result * gammas[:, None]
    assert spec.out_dtype is not None
    return rows.without_absent(result).to(TORCH_DTYPES[spec.out_dtype]), "row"


def scattered_product(
    operands: ops.MatmulOperands,
    rows: Rows,
    spec: MatmulSpec,
    factors: Factors,
    scatter: ScatterIndx | None,
    top_k: int,
) -> torch.Tensor:
    """With a scatter: the sums of each token's top_k slots. Slots may lack a row."""
    result, order = product(operands, rows, spec, factors, scatter)
    if scatter is None or (order == "slot" and top_k == 1):
        return result
    return ops.reduce(result, scattered(scatter, top_k), order=order)


def delivered(name: str, memory: torch.Tensor | None, result: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """The result in the caller's memory of a shape, if there is one."""
    if memory is None:
        return result
    if tuple(memory.shape) != tuple(shape) or memory.dtype != result.dtype:
        raise InvalidInput(
            f"{name} must be {result.dtype} {list(shape)}, got {memory.dtype} {list(memory.shape)}; allocate it so"
        )
    return memory.copy_(result.reshape(tuple(shape)))
