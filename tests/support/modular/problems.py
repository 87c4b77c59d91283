"""What the tests of the modular kernels share: problems, kernels, and the reference's answer."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from moe_core.base.dtypes import numpy_dtype
from moe_core.modular.activations import activation_of
from moe_core.ops.activation.reference import activation
from moe_core.ops.matmul.reference.forward import matmul_ogs
from moe_core.ops.matmul.reference.rows import rows_of
from moe_core.ops.moe.reference.forward import moe_stages
from moe_core.ops.reduction.reference import reduce, scale_rows
from moe_core.ops.routing.reference import layout
from moe_core.parity.tolerance import DEVIATIONS, EXACT, FP32, Tolerance, activated, product_tolerance, rounded
from moe_core.specs import LayoutSpec, MatmulSpec, MoESpec
from moe_core.specs.operands import ExpertWeights, MatmulOperands, TopK

#: Local experts, hidden, columns after the activation, choices.
E, K, F, TOPK = 5, 48, 32, 2


class Problem(NamedTuple):
    """The positional arguments of a modular kernel, in NumPy; weights in the family's layout, `out_in`."""

    hidden_states: Any
    w1: Any
    w2: Any
    topk_weights: Any
    topk_ids: Any


def draw_problem(
    dtype: str = "float32", *, tokens: int = 40, topk: int = TOPK, experts: int = E, seed: int = 0
) -> Problem:
    """A gated problem with distinct ids, some of them -1."""
    random = np.random.default_rng(seed)

    def normal(*shape: int, scale: float = 1.0) -> np.ndarray:
        return (random.standard_normal(shape) * scale).astype(np.float32).astype(numpy_dtype(dtype))

    ids = np.stack([random.permutation(experts)[:topk] for _ in range(tokens)]).astype(np.int32)
    ids[random.random(ids.shape) < 0.1] = -1
    weights = random.random((tokens, topk)).astype(np.float32)
    return Problem(
        normal(tokens, K), normal(experts, 2 * F, K, scale=K**-0.5), normal(experts, K, F, scale=F**-0.5), weights, ids
    )


def as_in_out(problem: Problem) -> Problem:
    """The same problem with weights in gpt-oss's layout."""
    w1, w2 = (np.ascontiguousarray(array.swapaxes(1, 2)) for array in (problem.w1, problem.w2))
    return problem._replace(w1=w1, w2=w2)


def expected_stages(
    problem: Problem, activation: Any = "silu", *, on_input: bool = False, biases: Any = (None, None), **options: Any
) -> dict[str, np.ndarray]:
    """Every stage in the reference."""
    spec = MoESpec(activation_of(activation), weight_layout="out_in", apply_router_weight_on_input=on_input)
    experts = ExpertWeights(problem.w1, problem.w2, gate_up_bias=biases[0], down_bias=biases[1])
    routing = TopK(problem.topk_ids, problem.topk_weights)
    return moe_stages(problem.hidden_states, experts, routing, spec, **options)


def expected_output(problem: Problem, rounds: str) -> np.ndarray:
    """The reference's output `[M, K]` with the rounding points of a class; silu, no biases.

    rounds: `fused` as the composed op; `stages` also what the activation reads; `rows` also rows before their weight.
    """
    stages = expected_stages(problem)
    if rounds == "fused":
        return stages["output"]
    ids, dtype = problem.topk_ids, problem.hidden_states.dtype
    top_k, plain = ids.shape[1], np.ones_like(problem.topk_weights)
    spec = LayoutSpec(*ids.shape, len(problem.w1))
    sizes, start, slot_of_row, row_of_slot, _ = layout(ids, layout=spec)
    if rounds == "stages":
        hidden = activation(stages["matmul1"], activation=activation_of("silu"), out_dtype=dtype.name)
        second = MatmulSpec("out_in", "slot", "slot")
        weights = problem.topk_weights.reshape(-1)
        rows = rows_of(spec, sizes, start, slot_of_row)
        slots = matmul_ogs(MatmulOperands(hidden, problem.w2, row_weight=weights), second, rows)
    else:
        slots = expected_stages(problem._replace(topk_weights=plain))["matmul2"]
        slots = scale_rows(slots, problem.topk_weights.reshape(-1, 1))
    return reduce(slots, row_of_slot, top_k=top_k, order="slot", out_dtype=dtype.name)


def output_tolerance(dtype: str, rounds: str) -> Tolerance:
    """Carried from rounding to rounding of `expected_output`, for the sizes of `draw_problem`."""
    before = product_tolerance(EXACT, dtype, K, False)
    if rounds == "stages":
        before = rounded(before, dtype)
    slots = rounded(product_tolerance(rounded(activated(before), dtype), dtype, F, False), dtype)
    if rounds == "rows":
        slots = rounded(slots, dtype)
    sums = math.sqrt(TOPK) * FP32
    worst = math.sqrt(TOPK) * slots.worst + DEVIATIONS * sums
    return rounded(Tolerance(slots.relative_frobenius + sums, worst), dtype)


def expert_maps(num_experts: int, ranks: int) -> list[np.ndarray]:
    """int32 `[num_experts]` for every rank: ids dealt out in turn, so that a rank's ids are not neighbours."""
    ids = np.arange(num_experts)
    return [np.where(ids % ranks == rank, ids // ranks, -1).astype(np.int32) for rank in range(ranks)]
