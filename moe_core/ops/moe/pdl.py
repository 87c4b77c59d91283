"""Overlapping launches: a launch may begin before the previous one has ended.

NVIDIA GPUs from sm_90 have programmatic dependent launch. A dependent launch begins once every block of the previous
launch has allowed it or ended, and its kernel waits (`moe_core.ops.common.kernels.pdl`) for the end of that launch.
docs/developer/architecture.md, PDL, has the safety rules. Another thread's kernel between two of these is safe: both
wait for it. Under capture edges inside a plan are programmatic, others full.

It gains with few tokens and small experts, and if a product's blocks take a multiprocessor each. Elsewhere waiting
blocks hold resources of the previous launch (docs/notebook/launches.md).
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from moe_core.plan import Constant, KernelLaunch, LaunchPlan, Pointer, TensorMap

#: Plans of more tokens launch ordinarily, unless blocks take a multiprocessor each, so that later ones take no room.
MOST_TOKENS = 64
_MATRICES = tuple(f"experts.{matrix}{part}" for matrix in ("gate_up", "up", "down") for part in ("", ".values"))
#: Larger experts launch ordinarily: their many blocks would lose room. Measured: a gain at 9.4 MB, mostly losses from
#: 50 MB on (docs/notebook/launches.md), nothing between.
MOST_EXPERT_BYTES = 16 * 10**6


def why_not_pdl(plan: LaunchPlan, num_tokens: int, batch_invariant: bool) -> str | None:
    """The reason why a plan's launches do not overlap, or None."""
    target = plan.target
    if not target.has_pdl:
        return f"dependent launches need a cuda device of sm_90 or newer, got {target}"
    if batch_invariant:
        return "batch_invariant runs the same kernels for every number of tokens"
    if _takes_whole(plan):
        return None
    if num_tokens > MOST_TOKENS:
        return f"overlapping gains nothing above {MOST_TOKENS} tokens, got {num_tokens}"
    # Behind products with adapters few blocks wait, and the next product begins behind these.
    if not _adds_tails(plan) and (size := _expert_bytes(plan)) > MOST_EXPERT_BYTES:
        return f"overlapping gains nothing where an expert has more than {MOST_EXPERT_BYTES} bytes, got {size}"
    return None


def _takes_whole(plan: LaunchPlan) -> bool:
    return any(isinstance(step, KernelLaunch) and step.kernel.whole_multiprocessor for step in plan.steps)


def _expert_bytes(plan: LaunchPlan) -> int:
    tiled = set()
    for step in plan.steps:
        if isinstance(step, KernelLaunch) and step.kernel.prepacked_weight is not None:
            weight = dict(step.arguments)[step.kernel.prepacked_weight]
            assert isinstance(weight, (Pointer, TensorMap)), weight
            tiled.add(weight.buffer)
    matrices = [(buffer.spec, 3 if buffer.name in tiled else 2) for buffer in plan.inputs if buffer.name in _MATRICES]
    return sum(array.nbytes // math.prod(array.shape[:-axes]) for array, axes in matrices)


def use_pdl(plan: LaunchPlan, num_tokens: int, *, batch_invariant: bool = False, apart: int = 0) -> LaunchPlan:
    """The plan with every capable launch dependent, unless `why_not_pdl`, but the first and those `apart`."""
    if not plan.target.on_gpu or not plan.steps:
        return plan
    if apart:
        first, second = plan.steps[:-apart], plan.steps[-apart:]
        first = use_pdl(dataclasses.replace(plan, steps=first), num_tokens, batch_invariant=batch_invariant)
        return dataclasses.replace(first, steps=(*first.steps, *second))
    if (reason := why_not_pdl(plan, num_tokens, batch_invariant)) is not None:
        note = f"launches follow one another: {reason}"
        if plan.target.has_pdl and not batch_invariant and _adds_tails(plan):
            note = f"launches follow one another but for products with adapters: {reason}"
            plan = dataclasses.replace(plan, steps=_behind_tails(plan.steps))
        return dataclasses.replace(plan, notes=(*plan.notes, note))
    steps, ahead = [], None
    for step in plan.steps:
        assert isinstance(step, KernelLaunch), step
        steps.append(_with_pdl(step, ahead))
        ahead = step
    count = sum(step.dependent for step in steps)
    reason = "whose blocks take a multiprocessor each" if _takes_whole(plan) else f"as {num_tokens} tokens are few"
    note = f"{count} of {len(steps)} launches begin before the one ahead has ended, {reason}"
    if not count:
        note = "launches follow one another: none of their kernels waits for the launch ahead by itself"
    return dataclasses.replace(plan, steps=tuple(steps), notes=(*plan.notes, note))


def _with_pdl(step: KernelLaunch, ahead: KernelLaunch | None) -> KernelLaunch:
    if step.kernel.pdl is None:
        return step
    when = "start"
    if step.kernel.pdl != "start" and ahead is not None and not ahead.kernel.writes_layout:
        when = "tail" if _reads_low(step, ahead) else "layout"
    arguments = dict(step.arguments) | {"PDL": Constant(when)}
    return dataclasses.replace(step, arguments=tuple(arguments.items()), dependent=ahead is not None)


def _reads_low(step: Any, ahead: Any) -> bool:
    """The launch ahead writes the low-rank rows of a product's tail, so that its sums need not wait."""
    if not (isinstance(step, KernelLaunch) and isinstance(ahead, KernelLaunch)) or step.kernel.pdl != "tail":
        return False
    low = dict(step.arguments).get("tail_low")
    return isinstance(low, Pointer) and dict(ahead.arguments).get("low") == low


def _adds_tails(plan: LaunchPlan) -> bool:
    return any(map(_reads_low, plan.steps, (None, *plan.steps)))


def _behind_tails(steps: tuple[Any, ...]) -> tuple[Any, ...]:
    """Products that wait for the launch ahead before their tails alone, which then needs no room."""
    made = []
    for step, ahead, behind in zip(steps, (None, *steps), (*steps[1:], None), strict=False):
        if _reads_low(step, ahead):
            step = _with_pdl(step, ahead)
        elif _reads_low(behind, step):
            step = _with_pdl(step, None)
        made.append(step)
    return tuple(made)
