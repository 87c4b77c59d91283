"""Runs plans on borrowed buffers: compiled kernels on a GPU's stream, interpreted kernels or NumPy twins on a CPU.

Nothing here allocates device memory, copies, synchronises or keeps an array alive. A run costs one address write per
buffer and one driver call per kernel.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from moe_core.base import Recent, dtypes, process_lock
from moe_core.base.arrays import TensorView
from moe_core.errors import InvalidInput
from moe_core.plan import LaunchPlan
from moe_core.runtime.devices import prepared_class
from moe_core.runtime.prepared import Prepared

_prepared: Recent[Prepared] = Recent()
_prepared_lock = process_lock()


def prepare(plan: LaunchPlan, device_index: int = 0) -> Prepared:
    """Compile and load a plan on a device. Cached."""
    prepared = _prepared.get((plan, device_index))
    if prepared is None:
        with _prepared_lock:
            prepared = _prepared.find((plan, device_index))
            if prepared is None:
                prepared = prepared_class(plan.target)(plan, device_index)
                _prepared.put((plan, device_index), prepared)
    return prepared


def run(plan: LaunchPlan, views: Mapping[str, TensorView], stream: int = 0) -> None:
    """Run a plan on views, with checks.

    views: one per input and output by name, and `scratch` (uint8 `[plan.scratch_bytes]`) if the plan needs any. Raises
    InvalidInput for missing, unknown, misaligned or overlapping views and for other specs or devices than the plan's.
    """
    names = [buffer.name for buffer in (*plan.inputs, *plan.outputs)] + (["scratch"] if plan.scratch_bytes else [])
    unknown, missing = sorted(set(views) - set(names)), [name for name in names if name not in views]
    if unknown or missing:
        raise InvalidInput(
            f"views must be exactly {', '.join(names)}, got {', '.join(sorted(views))}; add or remove the others"
        )
    device, kind = views[names[0]].device if names else ("cpu", 0), plan.target.device_kind
    overwritten = {other for _, other in plan.over}
    inputs = [buffer.name for buffer in plan.inputs if buffer.name not in overwritten]
    for name in names:
        view = views[name]
        if view.device != device or view.device[0] != kind:
            raise InvalidInput(f"{name} must be on the same {kind} device as the others, got {view.device}; move it")
        if name == "scratch":
            if view.spec.nbytes < plan.scratch_bytes or not view.spec.is_contiguous:
                raise InvalidInput(
                    f"scratch must be at least {plan.scratch_bytes} contiguous bytes, got {view.spec}; allocate more"
                )
        elif view.spec != plan.spec(name):
            raise InvalidInput(f"{name} must be {plan.spec(name)} as planned, got {view.spec}; make a plan for it")
        if view.read_only and name not in inputs:
            raise InvalidInput(f"{name} is written to, got a read-only array; pass a writable one")
    _refuse_overlap(views, inputs, names)
    prepare(plan, device[1])([views[name].pointer for name in names], stream)


def _refuse_overlap(views: Mapping[str, TensorView], inputs: Sequence[str], names: Sequence[str]) -> None:
    end, owner, owner_written = 0, "", False
    for name in sorted(names, key=lambda name: views[name].pointer):
        view, written = views[name], name not in inputs
        if view.spec.size == 0:
            continue
        if view.pointer < end and (written or owner_written):
            raise InvalidInput(
                f"{name} must not share memory with {owner}, got {view.pointer:#x} before its end {end:#x}; "
                "give every output memory of its own"
            )
        steps = zip(view.spec.shape, view.spec.stride, strict=True)
        span = sum((size - 1) * max(step, 0) for size, step in steps) + 1
        last = view.pointer + span * dtypes.itemsize(view.spec.dtype)
        if last > end:
            end, owner, owner_written = last, name, written
