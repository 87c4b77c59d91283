"""Quantised rows of a case as bitwise equal stages."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np

from moe_core.formats import QuantizedSpec, QuantizedTensor
from moe_core.ops.matmul.reference.forward import matmul_ogs
from moe_core.ops.matmul.reference.rows import rows_of
from moe_core.ops.quantize.reference import quantize_rows
from moe_core.ops.quantize.rows import chooses_one_scale
from moe_core.ops.reduction.reference import scale_rows
from moe_core.ops.routing.reference import layout as make_layout
from moe_core.parity.case import Case
from moe_core.parity.tolerance import Tolerance, quantized_matmul_tolerance
from moe_core.specs import LayoutSpec, MatmulOperands, MatmulSpec

#: uint8 `[rows, bytes]`, see `row_bytes`.
QUANTIZED_X, QUANTIZED_HIDDEN = "quantized_x", "quantized_hidden"


def row_bytes(values: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """uint8 `[R, bytes]`: the codes of every row and then its scales, values `[R, *]` and scales `[R or 1, groups]`."""
    scales = np.ascontiguousarray(np.broadcast_to(scales, (len(values), scales.shape[1])))
    return np.concatenate([np.ascontiguousarray(part).view(np.uint8) for part in (values, scales)], axis=1)


class OwnRows:
    def __init__(self, case: Case, stages: Mapping[str, np.ndarray]) -> None:
        assert case.spec.activations is not None
        self._case, self._stages, self._format = case, stages, case.spec.activations
        ids = stages["ids"]
        self._layout = LayoutSpec(len(ids), case.top_k, case.num_experts)
        *self._groups, self._row_of_slot, _ = make_layout(ids, None, case.token_mask, layout=self._layout)

    def _quantized(self, rows: np.ndarray, static_scale: np.ndarray | None) -> QuantizedTensor:
        users = self._row_of_slot if chooses_one_scale(self._format, static_scale is not None) else None
        arrays = quantize_rows(rows, static_scale, users, format=self._format)
        return QuantizedTensor(QuantizedSpec(self._format), *arrays)

    def _hidden(self) -> QuantizedTensor:
        return self._quantized(self._stages["activation"], self._case.experts.down_input_scale)

    def expected(self, stage: str) -> np.ndarray:
        case = self._case
        if stage == QUANTIZED_HIDDEN:
            rows = self._hidden()
        else:
            weighted = case.spec.apply_router_weight_on_input
            source = scale_rows(case.x, self._stages["weights"]) if weighted else case.x
            rows = self._quantized(source, case.experts.gate_up_input_scale)
        return row_bytes(rows.values, rows.scales)

    def second_product(self) -> tuple[np.ndarray, Tolerance]:
        """Weighted slots `[T * K, D]`, and the tolerance of another order of sums."""
        case, spec = self._case, self._case.spec
        weights = None if spec.apply_router_weight_on_input else self._stages["weights"].reshape(-1)
        plain = MatmulSpec(spec.weight_layout, "slot", "slot", out_dtype=case.dtype)
        product = dataclasses.replace(plain, allow_tf32=spec.allow_tf32, fast_accumulate=spec.fast_accumulate)
        operands = MatmulOperands(self._hidden(), case.experts.down, bias=case.experts.down_bias, row_weight=weights)
        slots = matmul_ogs(operands, product, rows_of(self._layout, *self._groups))
        down = case.experts.down.format
        return slots, quantized_matmul_tolerance(case.dtype, case.d_ff, down, product, rows=self._format)
