"""Whole calls across ranks as one plan of all launches, with messages between its parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from moe_core.base.arrays import ALIGNMENT
from moe_core.plan import PlanBuilder, Role
from moe_core.runtime.prepare import prepare
from moe_torch.bridge.options import TORCH_DTYPES
from moe_torch.bridge.ready import Ready, dense
from moe_torch.parallel.calls.known import Step

#: Of what runs like calls, among their steps: it has the methods `fits` and `run` of `run_again`.
KEY = ("again",)
#: On a CPU ranks compare headers in every call, and products depend on the tokens that others told.
DEVICES = {"cuda"}


def joined(
    steps: Sequence[Step], links: Mapping[str, str], results: Sequence[str], changing: Sequence[str]
) -> tuple[Step, list[int]]:
    """One step of several, and the number of launches up to the end of each.

    Array `name` of step n is `n.name`, or what links say. results: outputs that runs return, in the order of steps.
    changing: inputs that calls pass.
    """
    first = steps[0].ready
    builder, names, addresses, held = PlanBuilder("joined", first.prepared.plan.target), [], [], []
    ends = [0]
    for number, (ready, given, _, tensors) in enumerate(steps):
        plan, of_tensors = ready.prepared.plan, dict(tensors)
        arrays = {one.name: f"{number}.{one.name}" for one in (*plan.inputs, *plan.outputs)}
        arrays = {name: links.get(array, array) for name, array in arrays.items()}
        for position, (one, address) in enumerate(zip(plan.inputs, given, strict=True)):
            if not builder.has(name := arrays[one.name]):
                builder.input(name, one.spec, Role.ROWS)
                held += [(len(names), of_tensors[position])] if position in of_tensors else []
                names.append(name)
                addresses.append(address)
        for one in plan.outputs:
            declare = builder.output if arrays[one.name] in results else builder.scratch
            declare(arrays[one.name], one.spec, Role.ROWS)
        builder.call(plan, str(number), arrays, dict.fromkeys(arrays, Role.ROWS))
        ends.append(ends[-1] + len(plan.steps))
    plan = builder.build()
    outputs = tuple(dense(one.spec.shape, TORCH_DTYPES[one.spec.dtype]) for one in plan.outputs)
    scratch = dense((plan.scratch_bytes,), torch.uint8) if plan.scratch_bytes else None
    ready = Ready(prepare(plan, first.device.index or 0), (), outputs, scratch, first.device)
    return Step(ready, addresses, tuple(map(names.index, changing)), tuple(held)), ends[1:]


def remembered(call: Any) -> Any:
    """The plan that runs calls like this one, or None."""
    again = None if call.steps is None or call.moving is not None else call.steps.get(KEY)
    return again if again is not None and again.fits(call) else None


def run_again(call: Any, brought: Any, tensors: Sequence[torch.Tensor]) -> Any:
    """Run a call that is remembered. tensors: of the call. None: it is another one, and nothing has run."""
    again = remembered(call)
    if again is None or (brought.x.data_ptr() | brought.ids.data_ptr() | brought.weights.data_ptr()) % ALIGNMENT:
        return None
    return again.run(call, brought, tensors)
