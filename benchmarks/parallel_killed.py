"""A rank is killed in a decode loop whose ranks hold all experts: seconds until the others go on, and their bits.

    python -m benchmarks.parallel_killed [--modes all_to_all,padded] [--device cpu] [--output RECORD]

NCCL would wait until the group's timeout, so a thread of each rank aborts messages that take too long. Then `reform`
makes layers of the ranks that are left. With --device shared both ranks have GPU 0 and talk over gloo, for bits where
there is one GPU. See benchmarks/README.md.
"""

from __future__ import annotations

import os
import signal
import statistics
import sys
import threading
import time
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from benchmarks.parallel import Group
from benchmarks.parallel_cell import Setting
from benchmarks.parallel_serve import attempt, joined
from benchmarks.provenance import provenance
from benchmarks.record import command, write_record
from moe_core.layers import MoELayerSpec
from moe_core.parallel import ExchangeSpec, Placement
from moe_core.specs import Tuning
from moe_torch import MoE
from moe_torch.parallel import ExpertParallel, parallelize, reform

#: d_model, d_ff, experts, top_k: qwen3-30b-a3b's, and of a CPU.
_SIZES = {"cuda": (2048, 768, 128, 8), "cpu": (64, 48, 8, 2)}
_TOKENS, _LAYERS, _STEPS, _DIES, _PATIENCE, _LIMIT = 32, 2, 40, 20, 0.5, 60.0


def _model(device: torch.device, parallel: ExpertParallel | None = None) -> torch.nn.Sequential:
    sizes = _SIZES[device.type]
    torch.manual_seed(0)
    spec = MoELayerSpec(*sizes, tuning=Tuning(batch_invariant=True))
    layers = [MoE.from_spec(spec, device=device, dtype=torch.bfloat16) for _ in range(_LAYERS)]
    for layer in layers:
        for parameter in layer.parameters():
            parameter.normal_(std=0.05)
        if parallel is not None:
            everywhere = Placement(sizes[2], (tuple(range(sizes[2])),) * parallel.ranks().size)
            parallelize(layer, parallel, placement=everywhere)
    return torch.nn.Sequential(*layers)


def _step(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    y = torch.nn.functional.rms_norm(x + model(x), x.shape[-1:])
    if x.is_cuda:
        torch.cuda.synchronize()
    return y


@torch.no_grad()
def _decode(bench: Any, mode: str) -> dict[str, Any]:
    """Figures of a rank that lives. The last rank ends in the middle."""
    mesh = DeviceMesh.from_group(bench.group, bench.device.type, mesh_dim_names=("ep",))
    parallel = ExpertParallel(mesh["ep"], ExchangeSpec(mode), max_tokens=_TOKENS, timeout=5)
    alone, model = _model(bench.device), _model(bench.device, parallel)
    x = torch.randn(_TOKENS, _SIZES[bench.device.type][0], generator=torch.Generator().manual_seed(bench.rank))
    x = x.bfloat16().to(bench.device)
    stopped, row, times = threading.Event(), {"mode": mode, "wrong": 0, "error": ""}, []

    def watch() -> None:
        while not stopped.wait(0.02):
            if time.monotonic() - beat > _PATIENCE and bench.is_gpu:
                stopped.set()
                row["aborted_s"] = time.monotonic() - beat
                bench.group.abort()

    for step in range(-4, _STEPS):
        beat = time.monotonic()
        if step == 0:
            # Kernels are compiled by now.
            threading.Thread(target=watch, daemon=True).start()
        if step == _DIES and bench.rank == bench.size - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            y = _step(model, x)
            if step == _DIES:
                raise RuntimeError("messages were aborted")
        except RuntimeError as error:
            if step != _DIES:
                raise
            stopped.set()
            row |= {"error": str(error)[:300], "noticed_s": time.monotonic() - beat}
            row["ranks_left"] = reform(model, seconds=_LIMIT / 2).ranks().size
            row["reformed_s"] = time.monotonic() - beat
            y = _step(model, x)
            row["next_s"] = time.monotonic() - beat
        times.append((time.monotonic() - beat) * 1e6)
        row["wrong"] += not torch.equal(y, _step(alone, x))
        x = y
    return row | {"tokens": _TOKENS, "layers": _LAYERS, "patience_s": _PATIENCE, "us": statistics.median(times)}


def serve(setting: Setting, rank: int, store: str, pipe: Any) -> None:
    """A process that is a rank: it decodes once."""
    with joined(setting, rank, init_method=f"file://{store}", rank=rank, world_size=setting.ranks) as bench:
        pipe.send({})
        pipe.send(attempt(lambda mode: _decode(bench, mode), pipe.recv()))


def measure(mode: str, device: str) -> dict[str, Any]:
    """The row of a mode, by the first of two ranks."""
    group = Group(Setting(2, device, 0, 0.0, _LIMIT), serve)
    try:
        for pipe in group._pipes:
            pipe.send(mode)
        first = group._pipes[0]
        return first.recv() if first.poll(2 * _LIMIT) else {"mode": mode, "error": "the first rank does not answer"}
    finally:
        group.close()


def main() -> int:
    """Run and print. Returns 1 if a rank does not go on, or has other bits than one device."""
    parser = command(__doc__, modes=["all_to_all", "padded"])
    parser.add_argument("--device", default="cuda", choices=("cuda", "shared", "cpu"))
    options = parser.parse_args()
    record: dict[str, Any] = {"provenance": provenance("benchmarks.parallel_killed"), "ranks": 2, "rows": []}
    record["device"] = options.device
    for mode in options.modes.split(","):
        record["rows"].append(measure(mode, options.device))
        print(record["rows"][-1], flush=True)
        write_record(options.output, record)
    return int(any(row.get("wrong", 1) for row in record["rows"]))


if __name__ == "__main__":
    sys.exit(main())
