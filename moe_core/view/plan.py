"""The page of plans: launches with their bytes, operations and bounds, and memory by lifetime."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from moe_core.parallel.machine import H200, Machine
from moe_core.plan.steps import Constant, KernelLaunch, LaunchPlan, Pointer, ReferenceCall, TensorMap

#: A launch takes at least about this long.
_LAUNCH_US = 2.0


def plan_content(
    plan: LaunchPlan, machine: Machine | None = None, measured: dict[str, list[float]] | None = None
) -> Any:
    """The JSON of one plan. machine: None: H200 for a plan of sm_90, else no prediction: the longer of bytes over
    bandwidth and FLOPs over speed. measured: microseconds of launches by kernel function, this plan's are taken out.
    """
    if machine is None and plan.target.kind == "cuda" and plan.target.arch == 90:
        machine = H200
    steps = [_step(plan, step) for step in plan.steps]
    tiles = [note for note in plan.notes if "TileConfig(" in note]
    for step in steps:
        room = step["kernel"].partition(".")[0]
        step["why"] = [note for note in plan.notes if note.startswith(f"{room}:")]
        if step["function"].startswith("matmul") and tiles:
            step["why"].append(tiles.pop(0))
        step["bound_us"] = None
        if machine is not None:
            times = {"bytes": step["bytes"] / machine.memory / 1e3, "FLOPs": step["flops"] / machine.tflops / 1e6}
            step["bound"] = max(times, key=lambda name: times[name])
            step["bound_us"] = max(*times.values(), _LAUNCH_US)
        queue = (measured or {}).get(step["function"])
        step["measured_us"] = queue.pop(0) if queue else None
    return {
        "name": plan.name, "target": str(plan.target), "key": plan.key, "steps": steps,
        "buffers": _buffers(plan, steps), "scratch_bytes": plan.scratch_bytes,
        "notes": list(plan.notes), "summation": list(plan.summation),
        "speeds": None if machine is None else {"memory": machine.memory, "tflops": machine.tflops},
    }  # fmt: skip


def _step(plan: LaunchPlan, step: KernelLaunch | ReferenceCall) -> dict[str, Any]:
    if isinstance(step, ReferenceCall):
        names = [*(buffer for _, buffer in step.inputs), *step.outputs]
        return _counted(plan, names, "", {}) | {
            "kernel": step.function,
            "function": step.function,
            "grid": "",
            "tile": "",
        }
    names = [value.buffer for _, value in step.arguments if isinstance(value, Pointer | TensorMap)]
    constants = {name: value.value for name, value in step.arguments if isinstance(value, Constant)}
    head = {"kernel": step.kernel.name, "function": step.kernel.function, "grid": "x".join(map(str, step.grid))}
    head |= {"tile": step.tile, "dependent": step.dependent}
    shown = {name: value for name, value in constants.items() if value not in (None, False)}
    return _counted(plan, names, step.kernel.function, constants) | head | {"constants": shown}


def _counted(plan: LaunchPlan, names: Sequence[str], function: str, constants: Mapping[str, Any]) -> dict[str, Any]:
    """Bytes of all arrays, of matrices of experts those with rows alone, and operations of matrix products."""
    known = {buffer.name: buffer.spec for buffer in (*plan.inputs, *plan.outputs, *plan.scratch)}
    specs = {name: known[name] for name in dict.fromkeys(names)}
    tokens = plan.inputs[0].spec.shape[0]
    slots = math.prod(known["ids"].shape) if "ids" in known else tokens
    size = flops = 0
    for name, spec in specs.items():
        of_experts = "experts." in name and len(spec.shape) == 3
        size += int(spec.nbytes * (min(1.0, slots / spec.shape[0]) if of_experts else 1.0))
        matrix = name.rpartition(".")[2] in ("gate_up", "up", "down", "weight") and not name.startswith("d_")
        if matrix and len(spec.shape) >= 2:
            packed = 2 if spec.dtype == "uint8" else 1
            elements = packed * math.prod(spec.shape[1:] if of_experts else spec.shape)
            flops += 2 * elements * (slots if of_experts else tokens)
    if function == "weight_gradient":
        of_experts = any(name.startswith("d_experts.") for name in specs)
        flops = 2 * (slots if of_experts else tokens) * constants["M"] * constants["N"]
    return {"buffers": list(specs), "bytes": size, "flops": flops}


def _buffers(plan: LaunchPlan, steps: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Every buffer with its first and last step. home: the buffer with its memory, "" for the arena, None: its own."""
    named = [*plan.inputs, *plan.outputs]
    homes = [*(buffer.name for buffer in named), ""]
    places = dict(zip((buffer.name for buffer in plan.scratch), plan.scratch_places, strict=True))
    content = []
    for kind, buffers in (("input", plan.inputs), ("output", plan.outputs), ("scratch", plan.scratch)):
        for buffer in buffers:
            used = [number for number, step in enumerate(steps) if buffer.name in step["buffers"]]
            home, offset = places.get(buffer.name, (None, 0))
            content.append({
                "name": buffer.name, "kind": kind, "spec": str(buffer.spec), "bytes": buffer.spec.nbytes,
                "first": used[0] if used else None, "last": used[-1] if used else None,
                "home": None if home is None else homes[home], "offset": offset,
            })  # fmt: skip
    return content
