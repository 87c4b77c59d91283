"""Faults planted in the tails of prepacked weights, and what runs on each copy."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from moe_core.base.target import Target
from moe_core.ops.matmul.sm90_packed.few_rows_plan import MATMUL_FEW_ROWS
from moe_core.ops.matmul.sm90_packed.plan import MATMUL_MIXED_INPUT
from moe_core.ops.moe.forward import plan_moe
from moe_core.ops.moe.options import ForwardOptions
from moe_core.parity.tolerance import Tolerance
from moe_core.plan.steps import Kernel, LaunchPlan
from tests.support.faults.kernel_copies import OpFault, Planted
from tests.support.harness import engine_target
from tests.support.training.lora import OAI, REFERENCE, drawn_in_tiles, prepacked

_ROWS, _ALSO = "matmul.sm90_packed.kernels.low_rank", "matmul.sm90_packed.kernels.tail"
#: Of tiles of 64 rows with several adapters and several steps of ranks, and of few rows with many slots.
LOW_RANK_FAULTS: Planted = {
    "tails": {
        _ROWS: (
            OpFault("(tail.SLOTS + 1) + 1 + adapter_read", "(tail.SLOTS + 1) + adapter_read"),
            OpFault("cache_modifier=CACHE) < start + rows", "cache_modifier=CACHE) < start"),
            OpFault("begin += gl.sum(", "begin += 1 + gl.sum("),
            OpFault("matrix = tail.factor + present.adapter.to(gl.int64) *", "matrix = tail.factor + 0 *"),
            OpFault("expert.to(gl.int64) * tail.EXPERT_STRIDE", "0 * tail.EXPERT_STRIDE"),
            OpFault("ranks = step + gl.arange(0, tail.BLOCK_R", "ranks = gl.arange(0, tail.BLOCK_R"),
            OpFault("start.to(gl.int64) * tail.RANK + step,", "start.to(gl.int64) * tail.RANK,"),
            OpFault("present.end - start\n", "present.end - start - 1\n"),
            OpFault("mask=((token >= first) & (token < end))[None, :]", "mask=(token < end)[None, :]"),
            OpFault("if (start < present.end) &", "if (start < present.first) &"),
            OpFault("present.rank, 0)", "0, 0)"),
        ),
        _ALSO: (
            OpFault("start + HALF, present, step)", "start, present, step)"),
            OpFault("gl.join(left, right)", "gl.join(right, left)"),
            OpFault("range(present.adapter, last)", "range(present.adapter + 1, last)"),
            OpFault("adapter + 1, last", "adapter, last"),
            OpFault("range(0, steps_of(", "range(16, steps_of("),
        ),
    },
    "tails, many slots": {
        _ROWS: (
            OpFault("which = chunk + gl.arange(", "which = gl.arange("),
            OpFault("tail.low + start.to(gl.int64) * tail.RANK", "tail.low + 0 * tail.RANK"),
            OpFault("present.end - start\n", "present.end - start - 1\n"),
            OpFault("mask=((token >= first) & (token < end))[None, :]", "mask=(token < end)[None, :]"),
        ),
        _ALSO: (OpFault("range(0, steps_of(", "range(tail.BLOCK_R, steps_of("),),
    },
}


class Tailed:
    """The forward of a layer of prepacked experts with adapters, which launches one kernel twice."""

    outputs, tolerance = ("output",), Tolerance(2e-2, 2e-2)

    def __init__(self, kernel: Kernel, **options: Any) -> None:
        self.kernel, self._draw = kernel, functools.cache(functools.partial(drawn_in_tiles, OAI, **options))

    def plan(self, target: Target) -> LaunchPlan:
        problem = prepacked(self._draw())
        specs = problem.specs
        options = ForwardOptions(lora=specs.lora, adapter_ids=specs.adapter_ids)
        return plan_moe(specs.x, specs.experts, specs.routing, problem.spec, target, options=options)

    def results(self) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        problem = self._draw()
        return prepacked(problem).forward(engine_target()), problem.forward(REFERENCE)


TAILED = {
    "tails": Tailed(MATMUL_MIXED_INPUT, tokens=150, ranks=(40, 16, 0, 33), padded=48),
    "tails, many slots": Tailed(MATMUL_FEW_ROWS, tokens=15, ranks=(5,) * 40),
}
