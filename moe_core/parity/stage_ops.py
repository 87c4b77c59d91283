"""Run a case through a front-end's public ops, stage by stage, and through its composed op."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from moe_core.formats import QuantizedTensor
from moe_core.ops.quantize.rows import chooses_one_scale
from moe_core.parity.case import Case
from moe_core.parity.quantized_rows import QUANTIZED_HIDDEN, QUANTIZED_X, row_bytes
from moe_core.specs import LogitsSpec, MatmulSpec
from moe_core.specs.operands import MatmulOperands, RaggedLayout, Routing, map_arrays

Array = Any
COMPOSED = ("output", "ids", "weights", "tokens_per_expert")


@dataclass(frozen=True)
class FrontEnd:
    """ops: a module with the public ops of either front-end. put, get: move NumPy arrays to the device and back."""

    ops: Any
    put: Callable[[np.ndarray], Array]
    get: Callable[[Array], np.ndarray]


class StageResults(NamedTuple):
    """As in `EngineRun`. explanation: of the composed plan."""

    stages: dict[str, np.ndarray]
    composed: dict[str, np.ndarray]
    explanation: str


def run_stages(front_end: FrontEnd, case: Case, progress: Callable[[str], object]) -> StageResults:
    """Run every stage, then the composed op. progress is called at each start."""
    runner = _Runner(front_end, case, progress)
    stages = runner.routing_stages() | runner.expert_stages()
    collected = {name: _collect(value, front_end.get) for name, value in stages.items()}
    composed, explanation = runner.composed()
    return StageResults(collected, composed, explanation)


def _collect(value: Any, get: Callable[[Array], np.ndarray]) -> np.ndarray:
    if isinstance(value, QuantizedTensor):
        return row_bytes(get(value.values), get(value.scales))
    if not isinstance(value, tuple):
        return get(value)
    parts = [get(part) for part in value]
    if parts[0].dtype.kind in "iu":
        return np.concatenate([part.astype(np.int64).reshape(-1) for part in parts])
    return np.concatenate(parts, axis=1)


class _Runner:
    def __init__(self, front_end: FrontEnd, case: Case, progress: Callable[[str], object]) -> None:
        put = front_end.put
        self._ops, self._get, self._case, self._progress = front_end.ops, front_end.get, case, progress
        self._x = put(case.x)
        self._experts = map_arrays(case.experts, put)
        self._router = map_arrays(case.routing, put)
        self._shared = None if case.shared is None else map_arrays(case.shared, put)
        self._token_mask = None if case.token_mask is None else put(case.token_mask)
        self._chosen: Routing
        self._layout: RaggedLayout

    def routing_stages(self) -> dict[str, Any]:
        """logits, ids, weights, bitmatrix (packed, unpacked) and layout (its four index arrays)."""
        ops, case, router = self._ops, self._case, self._router
        self._progress("logits")
        logits = ops.router(self._x, router.weight, bias=router.bias, spec=case.logits_spec)
        self._progress("ids")
        masks = {"correction_bias": router.correction_bias, "token_mask": self._token_mask}
        self._chosen = ops.route(logits, case.router, **masks)
        ids = self._chosen.ids
        self._progress("bitmatrix")
        bitmatrix = ops.pack_bitmatrix(ids, case.num_experts)
        unpacked = ops.unpack_bitmatrix(bitmatrix, case.num_experts, case.top_k)
        self._progress("layout")
        layout = self._layout = ops.make_layout(ids, case.num_experts, token_mask=self._token_mask)
        return {
            "logits": logits,
            "ids": ids,
            "weights": self._chosen.weights,
            "bitmatrix": (bitmatrix, unpacked),
            "layout": (layout.group_sizes, layout.group_start, layout.slot_of_row, layout.row_of_slot),
        }

    def expert_stages(self) -> dict[str, Any]:
        """matmul1 (before the activation), activation (fused), activation_op, matmul2 (weighted slots) and output.
        Quantised activations add quantized_x and quantized_hidden."""
        ops, case, experts, weights = self._ops, self._case, self._experts, self._chosen.weights
        source, row_weight = self._x, weights.reshape(-1)
        if case.spec.apply_router_weight_on_input:
            source, row_weight = ops.scale_rows(self._x, weights), None
        source = self._quantized(QUANTIZED_X, source, experts.gate_up_input_scale)
        self._progress("matmul1")
        plain = self._matmul_spec("token")
        gate = ops.matmul_ogs(MatmulOperands(source, experts.gate_up, bias=experts.gate_up_bias), self._layout, plain)
        up = None
        if experts.up is not None:
            up = ops.matmul_ogs(MatmulOperands(source, experts.up, bias=experts.up_bias), self._layout, plain)
        self._progress("activation")
        operands = MatmulOperands(source, experts.gate_up, experts.up, experts.gate_up_bias, experts.up_bias)
        hidden = ops.matmul_ogs(operands, self._layout, self._matmul_spec("token", activated=True))
        activated = ops.activation(gate, case.spec.activation, up=up)
        rows = self._quantized(QUANTIZED_HIDDEN, hidden, experts.down_input_scale)
        self._progress("matmul2")
        operands = MatmulOperands(rows, experts.down, bias=experts.down_bias, row_weight=row_weight)
        slots = ops.matmul_ogs(operands, self._layout, self._matmul_spec("slot"))
        self._progress("output")
        shared, gate_logits = self._shared_output()
        output = ops.reduce(slots, self._layout, shared=shared, shared_gate=gate_logits, out_dtype=case.spec.out_dtype)
        stages = {"matmul1": gate if up is None else (gate, up), "activation": hidden, "activation_op": activated}
        stages |= {"matmul2": slots, "output": output}
        if case.spec.activations is not None:
            stages |= {QUANTIZED_X: source, QUANTIZED_HIDDEN: rows}
        return stages

    def _quantized(self, stage: str, rows: Array, scale: Array | None) -> Any:
        """Rows in the case's format. scale: a static one."""
        format = self._case.spec.activations
        if format is None:
            return rows
        self._progress(stage)
        users = self._layout.row_of_slot if chooses_one_scale(format, scale is not None) else None
        return self._ops.quantize_rows(rows, format, scales=scale, used_by=users)

    def composed(self) -> tuple[dict[str, np.ndarray], str]:
        self._progress("moe")
        arguments = (self._x, self._experts, self._router, self._case.spec)
        options = {"token_mask": self._token_mask, "shared": self._shared}
        result = self._ops.moe(*arguments, **options)
        explanation = self._ops.explain_moe(*arguments, **options)
        return {name: self._get(getattr(result, name)) for name in COMPOSED}, explanation

    def _matmul_spec(self, gather: str, activated: bool = False) -> MatmulSpec:
        spec = self._case.spec
        activation = spec.activation if activated else None
        out_dtype = None if spec.activations is None else self._case.dtype
        product = MatmulSpec(spec.weight_layout, gather, "slot", activation, out_dtype, spec.allow_tf32)
        return dataclasses.replace(product, fast_accumulate=spec.fast_accumulate)

    def _shared_output(self) -> tuple[Array | None, Array | None]:
        """fp32 output `[T, D]` and gate logits fp32 `[T, 1]`, or None."""
        shared, spec, ops = self._shared, self._case.spec, self._ops
        if shared is None:
            return None, None
        first = MatmulSpec(spec.weight_layout, activation=spec.of_shared().activation, allow_tf32=spec.allow_tf32)
        second = MatmulSpec(spec.weight_layout, out_dtype="float32", allow_tf32=spec.allow_tf32)
        hidden = ops.matmul_ogs(MatmulOperands(self._x, shared.gate_up, up=shared.up), None, first)
        output = ops.matmul_ogs(MatmulOperands(hidden, shared.down), None, second)
        if shared.gate is None:
            return output, None
        gate_spec = LogitsSpec(spec.weight_layout, allow_tf32=spec.allow_tf32)
        return output, ops.router(self._x, shared.gate, spec=gate_spec)
