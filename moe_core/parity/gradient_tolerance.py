"""How far the gradients of two right backwards may lie apart; derived as `moe_core.parity.tolerance` says."""

from __future__ import annotations

import math
from collections.abc import Callable

from moe_core.base import dtypes
from moe_core.base.checks import require_choice
from moe_core.parity.tolerance import (
    DEVIATIONS,
    EXACT,
    FP32,
    UNIT_ROUNDOFF,
    Tolerance,
    activated,
    product_tolerance,
    rounded,
    stage_tolerances,
)
from moe_core.specs.moe import MoESpec


def gradient_tolerances(
    spec: MoESpec, dtype: str, *, num_tokens: int, d_model: int, d_ff: int, top_k: int
) -> Callable[[str], Tolerance]:
    """The tolerance of every gradient by its name, `d_x` or `d_experts.down`, behind equal ids, weights and logits.

    docs/user/training.md has the rounding points. z is stored in dtype on one side and in fp32 on the other: one
    rounding of one side. An expert may have one row, where an error is not averaged, or all tokens. Whether a number is
    clamped may change with its last bit, which no tolerance covers.
    """
    require_choice("dtype", dtype, dtypes.MATMUL_DTYPES)
    one_side = 0.0 if dtype == "float32" else UNIT_ROUNDOFF[dtype]
    stages = stage_tolerances(spec, dtype, d_model=d_model, d_ff=d_ff, top_k=top_k, num_experts=1, routed_from="ids")
    pre = stages["matmul1"]

    def product(source: Tolerance, *lengths: int) -> Tolerance:
        every = [product_tolerance(source, dtype, length, spec.allow_tf32) for length in lengths]
        return Tolerance(max(one.relative_frobenius for one in every), max(one.worst for one in every))

    def both(one: Tolerance, other: Tolerance) -> Tolerance:
        return Tolerance(one.relative_frobenius + other.relative_frobenius, one.worst + other.worst)

    z, hidden = both(product(EXACT, d_model), Tolerance(one_side, one_side)), activated(pre)
    # The derivative of the activation is as steep as the activation, and z one factor beside it.
    d_pre = rounded(both(hidden, z), dtype)
    slots = rounded(product(d_pre, spec.activation.input_width(d_ff)), dtype)
    sums = math.sqrt(top_k + 1) * FP32
    d_x = Tolerance(slots.relative_frobenius + sums, math.sqrt(top_k + 1) * slots.worst + DEVIATIONS * sums)
    # d_w is a sum over F of products of either sign, and what reaches a logit a difference of two such sums.
    d_weight = both(product(z, d_ff), product(hidden, d_ff))
    d_logits = both(d_weight, d_weight)
    table = {
        "x": rounded(both(d_x, d_logits), dtype),
        "down": product(rounded(hidden, dtype), 1, num_tokens),
        "down_bias": product(EXACT, 1, num_tokens),
        "weight": product(d_logits, 1, num_tokens),
        "bias": product(d_logits, 1, num_tokens),
        "gate": product(d_logits, 1, num_tokens),
    }
    of_pre = product(d_pre, 1, num_tokens)

    def of(name: str) -> Tolerance:
        """name: of a gradient."""
        field = name.removeprefix("d_").rpartition(".")[2]
        return rounded(table.get(field, of_pre), dtype)

    return of
