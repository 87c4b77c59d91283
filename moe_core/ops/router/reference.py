"""NumPy twins of the router product."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from moe_core.base.threads import products, row_blocks, spread
from moe_core.ops.common.product import product
from moe_core.ops.common.rounding import result_dtype, round_to, to_float32, working_dtype
from moe_core.specs import LogitsSpec


def router(x: np.ndarray, weight: np.ndarray, bias: np.ndarray | None = None, *, spec: LogitsSpec) -> np.ndarray:
    """`plan_router`, accumulated in fp32, rounded to spec.logits_dtype, with equal bits for both storages."""
    matrix = to_float32(np.ascontiguousarray(weight if spec.weight_layout == "in_out" else weight.T))
    logits = np.empty((len(x), matrix.shape[1]), matrix.dtype)

    def multiply(block: slice) -> None:
        with np.errstate(all="ignore"):
            # Few rows are not split: the number of rows must not change BLAS's order of additions.
            rows = product(x[block], matrix, "in_out", True) if spec.batch_invariant else to_float32(x[block]) @ matrix
            logits[block] = round_to(rows if bias is None else rows + to_float32(bias), spec.logits_dtype)

    spread(multiply, row_blocks(len(x)), products(len(x), *matrix.shape))
    return logits


class RouterGradients(NamedTuple):
    """x fp32 `[T, D]`, unrounded, so that other gradients can be added; weight and bias in their dtypes."""

    x: np.ndarray
    weight: np.ndarray
    bias: np.ndarray | None


def router_backward(
    d_logits: np.ndarray,
    x: np.ndarray,
    weight: np.ndarray,
    bias: np.ndarray | None = None,
    token_mask: np.ndarray | None = None,
    into: np.ndarray | None = None,
    *,
    spec: LogitsSpec,
) -> RouterGradients:
    """Gradients of the router product from d_logits fp32 `[T, E]`.

    d_x = d_logits . weight^T, d_weight = x^T . d_logits, d_bias = column sums, in IEEE fp32 with one cast. The gradient
    passes the rounding to spec.logits_dtype unchanged. token_mask bool `[T]`: masked tokens are not read, and their d_x
    is exactly 0. into: an fp32 array that d_weight is added to, which is then fp32.
    """
    tokens = slice(None) if token_mask is None else np.flatnonzero(token_mask)
    d_logits, matrix, source = d_logits[tokens], to_float32(weight), to_float32(x[tokens])
    d_x = np.empty(x.shape, working_dtype(x)) if token_mask is None else np.zeros(x.shape, working_dtype(x))
    with np.errstate(all="ignore"):
        # One BLAS call for both storages: the order of additions depends on transposition.
        rows = np.ascontiguousarray(matrix.T if spec.weight_layout == "in_out" else matrix)
        d_x[tokens], d_weight = d_logits @ rows, source.T @ d_logits
        d_weight = d_weight if spec.weight_layout == "in_out" else np.ascontiguousarray(d_weight.T)
        d_bias = None if bias is None else round_to(d_logits.sum(axis=0), bias.dtype)
        d_weight = round_to(d_weight, weight.dtype) if into is None else into + d_weight
    return RouterGradients(d_x, d_weight, d_bias)


def router_backward_plan(
    d_logits: np.ndarray,
    x: np.ndarray,
    weight: np.ndarray,
    *,
    spec: LogitsSpec,
    wanted: tuple[str, ...],
    bias_dtype: str | None,
) -> tuple[np.ndarray, ...]:
    bias = None if bias_dtype is None else np.zeros(0, result_dtype(bias_dtype, d_logits))
    gradients = router_backward(d_logits, x, weight, bias, spec=spec)
    made = {
        "d_x": round_to(gradients.x, x.dtype),
        "d_wide": gradients.x,
        "d_weight": gradients.weight,
        "d_bias": gradients.bias,
    }
    return tuple(made[name] for name in wanted)
