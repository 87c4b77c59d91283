"""Drawn cases of the grouped matmul: operands, the run on an engine, and the reference's answer."""

from __future__ import annotations

import dataclasses

import numpy as np

from moe_core.base import dtypes
from moe_core.ops.matmul.forward import plan_matmul_ogs
from moe_core.ops.matmul.reference import forward as reference
from moe_core.specs import LayoutSpec, MatmulSpec
from moe_core.specs.operands import MatmulOperands, named_arrays
from tests.support.harness import engine_target, run_plan, spec_of
from tests.support.strategies import draw_ids, layout_arrays


@dataclasses.dataclass(frozen=True)
class Case:
    """One drawn problem; sizes are no multiple of a tile unless they happen to be."""

    num_tokens: int
    top_k: int
    num_experts: int
    d: int
    n: int
    dtype: str
    spec: MatmulSpec
    ids: str
    alignment: int = 1
    bias: str | None = None
    row_weight: bool = False
    stacked: bool = False
    seed: int = 0


def random_array(random: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    return random.standard_normal(shape, np.float32).astype(dtypes.numpy_dtype(dtype))


def build(case: Case) -> tuple[MatmulOperands, LayoutSpec, dict[str, np.ndarray]]:
    """Operands, layout spec and layout arrays of a case."""
    random = np.random.default_rng(case.seed)
    layout = LayoutSpec(case.num_tokens, case.top_k, case.num_experts, alignment=case.alignment)
    arrays = layout_arrays(draw_ids(case.ids, case.num_tokens, case.top_k, case.num_experts, case.seed), layout)
    activation = case.spec.activation
    separate = activation is not None and activation.gate_layout == "separate"
    one_buffer = activation is not None and activation.gated and not separate
    width = 2 * case.n if one_buffer else case.n
    lead = (2, case.num_experts) if case.stacked else (case.num_experts,)
    matrix = (case.d, width) if case.spec.weight_layout == "in_out" else (width, case.d)
    rows = {"row": layout.capacity, "token": layout.num_tokens, "slot": layout.num_slots}[case.spec.gather]
    bias_dtype = case.dtype if case.bias == "same" else case.bias
    bias = None if bias_dtype is None else random_array(random, (*lead, width), bias_dtype)
    operands = MatmulOperands(
        random_array(random, (rows, case.d), case.dtype),
        random_array(random, (*lead, *matrix), case.dtype),
        up=random_array(random, (*lead, *matrix), case.dtype) if separate else None,
        bias=bias,
        up_bias=bias[..., ::-1].copy() if separate and bias is not None else None,
        row_weight=random.random(layout.num_slots, np.float32) if case.row_weight else None,
        layer_index=np.array([1], np.int32) if case.stacked else None,
    )
    return operands, layout, arrays


def run_matmul(operands, layout, arrays, spec, target=None, config=None):
    """The plan's result on the engine target."""
    plan = plan_matmul_ogs(spec_of(operands), layout, spec, target or engine_target(), config=config)
    given_arrays = dict(named_arrays(operands)) | (arrays if layout is not None else {})
    return run_plan(plan, {buffer.name: given_arrays[buffer.name] for buffer in plan.inputs})["y"]


def expected_matmul(operands, layout, arrays, spec):
    return reference.matmul_ogs(operands, spec, reference.planned_rows(layout, arrays, len(operands.x)))
