"""Kernels for typical layers."""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass
from typing import Any

from moe_core.base import ArraySpec, Target
from moe_core.errors import InvalidInput, Unsupported
from moe_core.ops.matmul.families import why_illegal
from moe_core.ops.matmul.portable.plan import PORTABLE
from moe_core.ops.matmul.problem import MatmulProblem
from moe_core.ops.moe.forward import plan_moe
from moe_core.plan import KernelLaunch
from moe_core.specs import Activation, LayoutSpec, MatmulSpec, MoESpec, RouterSpec
from moe_core.specs.operands import ExpertWeights, MatmulOperands, RouterWeights

#: Qwen3-30B-A3B: experts, K, d_model, d_ff.
_E, _K, _D, _F = 128, 8, 2048, 768
#: A decoding step, a batch of them, a prompt.
_TOKENS = (1, 64, 4096)
_DTYPES = ("bfloat16", "float32")
_REFERENCE_TARGETS = (Target("cuda", 80, 108), Target("cuda", 90, 132))


@dataclass(frozen=True)
class Workload:
    """launches: (kernel, tile sides and warps) in order. notes: decisions. refused: why there is no plan, or ""."""

    name: str
    launches: tuple[tuple[str, str], ...] = ()
    notes: tuple[str, ...] = ()
    refused: str = ""

    def as_dict(self) -> dict[str, Any]:
        launches = [{"kernel": kernel, "configuration": text} for kernel, text in self.launches]
        return {"workload": self.name, "launches": launches, "notes": list(self.notes), "refused": self.refused}


@dataclass(frozen=True)
class Kernels:
    target: str
    workloads: tuple[Workload, ...] = ()
    refused: tuple[tuple[str, str], ...] = ()

    def as_dict(self) -> dict[str, Any]:
        refused = [{"configuration": text, "reason": reason} for text, reason in self.refused]
        workloads = [workload.as_dict() for workload in self.workloads]
        return {"target": self.target, "workloads": workloads, "refused": refused}


def kernels_of(target: Target) -> Kernels:
    """Plan typical layers. Off the GPU one is enough: tiles hardly vary."""
    layers = itertools.product(_DTYPES, _TOKENS) if target.on_gpu else [("bfloat16", 64)]
    return Kernels(str(target), tuple(_workload(target, *layer) for layer in layers), _refused(target))


def _workload(target: Target, dtype: str, tokens: int) -> Workload:
    name = f"{tokens} tokens, {dtype}, E={_E} K={_K} D={_D} F={_F}"
    experts = ExpertWeights(ArraySpec((_E, 2 * _F, _D), dtype), ArraySpec((_E, _D, _F), dtype))
    router = RouterWeights(ArraySpec((_E, _D), dtype))
    spec = MoESpec(Activation("silu"), RouterSpec(_K, renormalize=True), "out_in", router_weight_layout="out_in")
    try:
        plan = plan_moe(ArraySpec((tokens, _D), dtype), experts, router, spec, target)
    except (InvalidInput, Unsupported) as error:
        return Workload(name, refused=str(error))
    launches = tuple(
        (step.kernel.name, step.tile) if isinstance(step, KernelLaunch) else (f"numpy:{step.function}", "")
        for step in plan.steps
    )
    return Workload(name, launches, plan.notes)


def _refused(target: Target) -> tuple[tuple[str, str], ...]:
    if not target.compiled:
        return (("every Triton kernel", "the NumPy reference computes, because Triton is missing or was switched off"),)
    if target.interpreted:
        return (("every compiled kernel", "arrays on a CPU are computed by the same kernels in Triton's interpreter"),)
    refused: dict[str, str] = {}
    for dtype in _DTYPES:
        problems = [problem for tokens in _TOKENS for problem in _products(tokens, dtype, target)]
        others = [dataclasses.replace(problem, target=other) for problem in problems for other in _REFERENCE_TARGETS]
        for problem, config in itertools.product(problems, set(map(PORTABLE.tile, others))):
            reason = why_illegal(config, problem)
            if reason is not None:
                tile = f"tile {config.block_m} x {config.block_n} x {config.block_k}, {config.num_warps} warps"
                kind = f"{tile}, {config.num_stages} stages for {dtype}, {problem.buffers} weight tiles"
                refused.setdefault(kind, reason)
    return tuple(sorted(refused.items()))


def _products(tokens: int, dtype: str, target: Target) -> tuple[MatmulProblem, MatmulProblem]:
    layout = LayoutSpec(tokens, _K, _E)
    x, hidden = ArraySpec((tokens, _D), dtype), ArraySpec((layout.capacity, _F), dtype)
    first = MatmulOperands(x, ArraySpec((_E, 2 * _F, _D), dtype))
    second = MatmulOperands(hidden, ArraySpec((_E, _D, _F), dtype))
    return (
        MatmulProblem(first, layout, MatmulSpec("out_in", "token", activation=Activation("silu")), target),
        MatmulProblem(second, layout, MatmulSpec("out_in", scatter="slot"), target),
    )
