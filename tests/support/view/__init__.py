"""Small traces, plans and a report for pages."""

from __future__ import annotations

from typing import Any

import numpy as np

from moe_core.base import ArraySpec, Target
from moe_core.ops.moe.forward import plan_moe
from moe_core.plan import LaunchPlan
from moe_core.specs import MoESpec, RouterSpec
from moe_core.specs.matmul import Activation
from moe_core.specs.operands import ExpertWeights, RouterWeights
from moe_core.trace import LayerRouting, RoutingTrace

H200 = Target("cuda", 90, 132)


def a_trace(tokens: int, *, layers: int = 3, experts: int = 8, top_k: int = 2, seed: int = 0) -> RoutingTrace:
    """Uneven loads. The last expert is never chosen."""
    random = np.random.default_rng(seed)
    made = []
    for _ in range(layers):
        scores = random.gumbel(size=(tokens, experts)) + np.linspace(1, 0, experts)
        scores[:, -1] = -np.inf
        ids = np.argsort(-scores, axis=1)[:, :top_k].astype(np.int32)
        weights = -np.sort(-random.random((tokens, top_k), np.float32), axis=1)
        made.append(LayerRouting(ids, weights, experts))
    return RoutingTrace(tuple(made))


def changed(trace: RoutingTrace) -> RoutingTrace:
    """Every third token has the last expert in place of its first, in layer 0."""
    ids = trace[0].ids.copy()
    ids[::3, 0] = trace[0].num_experts - 1
    return RoutingTrace((LayerRouting(ids, trace[0].weights, trace[0].num_experts), *trace.layers[1:]))


def a_plan(tokens: int, target: Target = H200) -> LaunchPlan:
    E, D, F = 8, 128, 64
    experts = ExpertWeights(*(ArraySpec(shape, "bfloat16") for shape in ((E, D, 2 * F), (E, F, D))))
    router = RouterWeights(ArraySpec((D, E), "bfloat16"))
    return plan_moe(
        ArraySpec((tokens, D), "bfloat16"), experts, router, MoESpec(Activation("silu"), router=RouterSpec(2)), target
    )


def _row(stage: str, verdict: str, error: float) -> dict[str, Any]:
    worst = {"index": [1, 2], "reference": 1.5, "candidate": 1.5 + error, "error": error, "tolerance": 0.01}
    numbers = {"relative_error": error, "relative_tolerance": 0.01, "worst": worst}
    return {"engine": "torch", "device": "cpu", "stage": stage, "verdict": verdict, **numbers, "note": ""}


def _case(name: str, differs: bool) -> dict[str, Any]:
    rows = [_row("logits", "agree", 0.001), _row("matmul1", "differ" if differs else "agree", 0.5 if differs else 0.0)]
    rows += [_row("matmul2", "agree", 0.002), _row("output", "agree", 0.001)]
    flip = {"token": 3, "reference": [0, 1], "candidate": [0, 2], "kind": "tie", "margin": 1e-4, "allowed": 1e-3}
    flips = [flip | {"verdict": "flip (tie within tolerance)", "own_choice": [0, 2]}] if differs else []
    engine = {
        "engine": "torch", "device": "cpu", "verdict": "differ" if differs else "agree", "skipped": "",
        "first_divergent_stage": "matmul1" if differs else None, "stages": rows, "flips": flips,
    }  # fmt: skip
    return {
        "case": name, "dtype": "bfloat16", "scheme": None, "sizes": {"T": 8, "E": 4}, "description": f"{name}, small",
        "agrees": not differs, "engines": [engine], "repeat": f"moe-parity --case {name} --dtype bfloat16 --verbose",
        "bitwise": [{"engines": ["torch", "jax"], "device": "cpu", "equal": True, "note": ""}],
    }  # fmt: skip


#: As `moe-parity --json` writes it: one case differs, one agrees.
REPORT: dict[str, Any] = {
    "tool": "moe-parity", "format": 1, "moebius": "0", "python": "3.11", "versions": {"numpy": "2.0"},
    "exit_status": 1, "conclusion": "1 of 2 cases differs", "error": None,
    "cases": [_case("mixtral", True), _case("olmoe", False)],
}  # fmt: skip
