"""Host time of eager torch calls of the whole MoE op; prints one JSON record.

    python -m benchmarks.torch_host_time [--turns 100] [--driver none] [--output record.json]

A layer with its router, small enough for the host, not the device, to be what takes time. `best_us` and `median_us`:
one call, of turns of 30 calls one after another; a turn is too short to fill the device's queue, and the device is
waited for between turns. Calls: `moe` and `launcher` (of `prepare_moe`) from x, logits or ids; `layer`
(`moe_torch.MoE`) with x `[T, D]` and `[B, S, D]`; `dispatcher/x`: `moe/x` through torch's dispatcher, which a plain
eager call leaves out; `launches`: the part of `moe/x` that launches the plan. Nothing is timed unless the layer's and
the launcher's results from x are those of `moe/x` bit by bit. Nothing else should run on the machine.

`--driver none` needs no GPU: a driver that does nothing launches the same plan on CPU tensors, and no results are
compared. What is left is the time of Python and torch. In its figures scratch memory moves now and then, as the CPU's
allocator is another.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

import moe_torch
from benchmarks.no_driver import no_driver
from benchmarks.provenance import provenance
from benchmarks.record import command, write_record
from moe_core.layers import HUGGING_FACE
from moe_torch.bridge import eager
from moe_torch.operators.requests import moe_request

WARM_UP = 50
CALLS = 30
TOKENS, D_MODEL, D_FF, NUM_EXPERTS, TOP_K = 16, 256, 128, 8, 2

Call = Callable[[], Any]


class Launches:
    """The plan of one call, on buffers that exist already."""

    def __init__(self, ready: Any, arguments: tuple[Any, ...], device: torch.device) -> None:
        wanted = (*ready.outputs, ready.scratch)
        self.buffers = [torch.empty(shape, dtype=dtype, device=device) for shape, _, dtype in wanted]
        given = [arguments[index] for index in ready.selection]
        self._pointers = [tensor.data_ptr() for tensor in (*given, *self.buffers)]
        self._stream = torch.cuda.current_stream().cuda_stream if device.type == "cuda" else 0
        self._prepared = ready.prepared

    def __call__(self) -> None:
        self._prepared(self._pointers, self._stream)


def calls(device: str, *, computes: bool = True) -> dict[str, Call]:
    """name -> one call. Exits where two ways to compute the same disagree, or where `moe` is no plain eager call.

    computes: whether launches compute anything that can be compared.
    """
    layer = moe_torch.MoE(D_MODEL, D_FF, NUM_EXPERTS, TOP_K, device=device, dtype=torch.bfloat16).requires_grad_(False)
    x = torch.randn(TOKENS, D_MODEL, device=device, dtype=torch.bfloat16)
    batched = x.view(2, TOKENS // 2, D_MODEL)
    experts = moe_torch.ExpertWeights(layer.experts.gate_up, layer.experts.down)
    router = moe_torch.RouterWeights(layer.router.weight)
    spec = layer.spec.moe_spec(HUGGING_FACE)
    unrouted = dataclasses.replace(spec, router=None)
    whole = moe_torch.moe(x, experts, router, spec)
    logits, chosen = moe_torch.RouterLogits(whole.logits), moe_torch.TopK(whole.ids, whole.weights)
    from_x = moe_torch.prepare_moe(experts, router, spec)
    from_logits = moe_torch.prepare_moe(experts, moe_torch.RouterLogits, spec)
    from_ids = moe_torch.prepare_moe(experts, moe_torch.TopK, unrouted)
    operator, arguments = moe_request(x, experts, router, spec)
    if eager.plain_key(arguments) is None:
        raise SystemExit("moe is no plain eager call here; nothing was timed")
    for name, found in {"layer": layer(x), "layer of a batch": layer(batched), "launcher": from_x(x)}.items():
        if computes and not torch.equal(found.view_as(whole.output), whole.output):
            raise SystemExit(f"parity is red for {name}; nothing was timed")
    return {
        "moe/x": lambda: moe_torch.moe(x, experts, router, spec),
        "moe/logits": lambda: moe_torch.moe(x, experts, logits, spec),
        "moe/ids": lambda: moe_torch.moe(x, experts, chosen, unrouted),
        "layer/[T, D]": lambda: layer(x),
        "layer/[B, S, D]": lambda: layer(batched),
        "launcher/x": lambda: from_x(x),
        "launcher/logits": lambda: from_logits(x, logits),
        "launcher/ids": lambda: from_ids(x, chosen),
        "dispatcher/x": lambda: operator.overload(*arguments),
        "launches": Launches(operator.ready(arguments), arguments, x.device),
    }


def measure(call: Call, turns: int, wait: Callable[[], None]) -> dict[str, float]:
    """Microseconds per call. wait: returns when the device has nothing left to do."""
    for _ in range(WARM_UP):
        call()
    times = []
    for _ in range(turns):
        wait()
        start = time.perf_counter_ns()
        for _ in range(CALLS):
            call()
        times.append((time.perf_counter_ns() - start) / CALLS / 1e3)
    wait()
    return {"best_us": round(min(times), 2), "median_us": round(statistics.median(times), 2)}


def run(turns: int, device: str, wait: Callable[[], None], *, idle: bool = False) -> dict[str, Any]:
    """The record. idle: with a driver that does nothing, on CPU tensors."""
    with no_driver() if idle else contextlib.nullcontext():
        figures = {name: measure(call, turns, wait) for name, call in calls(device, computes=not idle).items()}
    return {"provenance": provenance("benchmarks.torch_host_time"), "per_call": figures}


def main() -> None:
    parser = command(__doc__, turns=100)
    parser.add_argument("--driver", choices=("cuda", "none"), default="cuda")
    options = parser.parse_args()
    idle = options.driver == "none"
    device, wait = ("cpu", lambda: None) if idle else ("cuda", torch.cuda.synchronize)
    record = run(options.turns, device, wait, idle=idle)
    print(json.dumps(record, indent=1))
    write_record(options.output, record)


if __name__ == "__main__":
    main()
