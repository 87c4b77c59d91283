"""Formulas and loops in float64, one number at a time, that references are compared with."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from moe_core.parity.tolerance import DEVIATIONS, FP32, UNIT_ROUNDOFF, Tolerance, rounded
from moe_core.specs import Activation, MatmulSpec, RouterSpec
from moe_core.specs.operands import ExpertWeights, named_arrays
from tests.support.strategies import draw_array


def exact(gate: float, up: float | None, spec: Activation) -> float:
    """One element in float64, from the table of formulas."""
    if spec.name == "softcapped_silu":
        assert up is not None and spec.alpha is not None
        up = up if spec.limit is None else spec.limit * math.tanh(up / spec.limit)
        capped = spec.alpha * math.tanh(gate / spec.alpha), up
        return capped[0] / (1 + math.exp(-gate)) * capped[1]
    limit = math.inf if spec.limit is None else spec.limit
    up = None if up is None else max(-limit, min(up, limit))
    if spec.name == "clamped_silu":
        assert up is not None
        return min(gate / (1 + math.exp(-gate)), limit) * up
    gate = min(gate, limit)
    if spec.name == "swiglu_oai":
        assert up is not None and spec.alpha is not None
        return gate / (1 + math.exp(-spec.alpha * gate)) * (up + 1)
    if spec.name == "silu":
        value = gate / (1 + math.exp(-gate))
    elif spec.name == "gelu":
        value = 0.5 * gate * math.erfc(-gate / math.sqrt(2))
    elif spec.name == "gelu_tanh":
        value = 0.5 * gate * (1 + math.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)))
    else:
        value = max(gate, 0.0) ** 2
    return value if up is None else value * up


def packed(gate: np.ndarray, up: np.ndarray | None, spec: Activation) -> tuple[np.ndarray, np.ndarray | None]:
    """The op's (x, up) for a gate layout."""
    if up is None or spec.gate_layout == "separate":
        return gate, up
    if spec.gate_layout == "halves":
        return np.concatenate([gate, up], axis=1), None
    return np.stack([gate, up], axis=2).reshape(len(gate), -1), None


F64 = np.float64


def exact_row(x: np.ndarray, expert: dict[str, np.ndarray], spec: MatmulSpec) -> np.ndarray:
    """One row of one expert in float64: product, bias, activation. expert: weight, bias, up, up_bias as `in_out`."""
    first = x.astype(F64) @ expert["weight"].astype(F64) + expert.get("bias", np.zeros(1)).astype(F64)
    if spec.activation is None:
        return first
    if not spec.activation.gated:
        return np.array([exact(g, None, spec.activation) for g in first.tolist()])
    if spec.activation.gate_layout == "separate":
        second = x.astype(F64) @ expert["up"].astype(F64) + expert.get("up_bias", np.zeros(1)).astype(F64)
        pairs = zip(first, second, strict=True)
    elif spec.activation.gate_layout == "halves":
        pairs = zip(first[: len(first) // 2], first[len(first) // 2 :], strict=True)
    else:
        pairs = zip(first[0::2], first[1::2], strict=True)
    return np.array([exact(float(g), float(u), spec.activation) for g, u in pairs])


def transposed(bundle: Any) -> Any:
    """A bundle's matrices with their last two axes swapped (`in_out` <-> `out_in`)."""
    matrices = ("gate_up", "up", "down", "gate", "weight")
    changed = {
        name: np.ascontiguousarray(array.swapaxes(-1, -2)) for name, array in named_arrays(bundle) if name in matrices
    }
    return dataclasses.replace(bundle, **changed)


def draw_experts(
    rng: np.random.Generator, num_experts: int, d_model: int, d_ff: int, activation: Activation, dtype: str
) -> ExpertWeights:
    separate = activation.gate_layout == "separate"
    columns = d_ff if separate else activation.input_width(d_ff)
    first, second = 1.5 / np.sqrt(d_model), 1 / np.sqrt(d_ff)
    return ExpertWeights(
        gate_up=draw_array(rng, (num_experts, d_model, columns), dtype, first),
        down=draw_array(rng, (num_experts, d_ff, d_model), dtype, second),
        up=draw_array(rng, (num_experts, d_model, d_ff), dtype, first) if separate else None,
        gate_up_bias=draw_array(rng, (num_experts, columns), "float32"),
        up_bias=draw_array(rng, (num_experts, d_ff), "float32") if separate else None,
        down_bias=draw_array(rng, (num_experts, d_model), dtype),
    )


def bounded_logits(row: list[float], spec: RouterSpec) -> list[float]:
    """The logits of one token that are scored, in float64."""
    scaled = [x * spec.logit_scale for x in row]
    return scaled if spec.softcap is None else [spec.softcap * math.tanh(x / spec.softcap) for x in scaled]


def exact_scores(row: list[float], scoring: str) -> list[float]:
    """The scores of one token in float64."""
    if scoring == "softmax":
        if any(math.isnan(x) or x == math.inf for x in row) or all(x == -math.inf for x in row):
            return [math.nan] * len(row)
        powers = [math.exp(x - max(row)) for x in row]
        return [power / sum(powers) for power in powers]
    found = []
    for x in row:
        if math.isnan(x):
            found.append(x)
        elif scoring == "sigmoid":
            found.append(1 / (1 + math.exp(-x)) if x > -700 else 0.0)
        else:
            found.append(math.sqrt(x if x > 40 else math.log1p(math.exp(x))))
    return found


def has_near_tie(logits: list[float], bias: list[float], spec: RouterSpec) -> bool:
    """Whether two biased scores of a token, or two sums of two, lie within fp32 rounding of each other. bias: zeros for
    scores alone."""
    logits = bounded_logits(logits, spec)
    as_logits = spec.order == "topk_then_softmax" or (spec.bias_on == "logits" and any(bias))
    scores = logits if as_logits else exact_scores(logits, spec.scoring)
    ranked = np.array([s + b for s, b in zip(scores, bias, strict=True)])
    ranked = ranked[np.isfinite(ranked)]
    pairs = (ranked[:, None] + ranked[None, :])[np.triu_indices(len(ranked), 1)] if spec.num_groups > 1 else ranked[:0]
    return any(
        (np.diff(np.sort(values)) < 1e-6 * (1 + np.abs(values).max())).any()
        for values in (ranked, pairs)
        if len(values)
    )


def reduce_tolerance(out_dtype: str, top_k: int) -> Tolerance:
    """The top-k reduction of equal slots, with or without a gated shared expert. The order of the sum is fixed."""
    sums = (math.sqrt(top_k) + 8) * FP32
    return rounded(Tolerance(sums, DEVIATIONS * sums), out_dtype)


def against_exact(tolerance: Tolerance, dtype: str, roundings: int = 1) -> Tolerance:
    """The tolerance against float64, if only one side casts to `dtype`, `roundings` times."""
    unit = UNIT_ROUNDOFF[dtype]
    return tolerance + Tolerance(roundings * unit, DEVIATIONS * (roundings - 1) * unit)
