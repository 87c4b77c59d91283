"""Processes that are ranks of the benchmark of expert parallelism."""

from __future__ import annotations

import contextlib
import datetime
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

import moe_torch
from benchmarks.parallel_cell import Setting
from benchmarks.parallel_rank import Bench
from benchmarks.record import reason_of


@contextlib.contextmanager
def joined(setting: Setting, local_rank: int, **where: Any) -> Iterator[Bench]:
    """A rank of a new group. where: of `init_process_group`."""
    limit = datetime.timedelta(seconds=max(setting.limit, 10.0))
    if setting.device == "cuda":
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", timeout=limit, device_id=device, **where)
    elif setting.device == "shared":
        os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
        device = torch.device("cuda", 0)
        torch.cuda.set_device(device)
        dist.init_process_group("gloo", timeout=limit, **where)
    else:
        device = torch.device("cpu")
        torch.set_num_threads(1)
        dist.init_process_group("gloo", timeout=limit, **where)
    with moe_torch.cpu_engine("reference") if setting.device == "cpu" else contextlib.nullcontext():
        yield Bench(device, setting.seed, setting.seconds)


def attempt(measure: Callable[[Any], dict[str, Any]], cell: Any) -> dict[str, Any]:
    """What a rank found of a cell, or why it found nothing."""
    try:
        return measure(cell)
    except Exception as error:
        return {"error": reason_of(error)}


def serve(setting: Setting, rank: int, store: str, pipe: Any) -> None:
    """A process that is a rank: it measures the cells that come."""
    with joined(setting, rank, init_method=f"file://{store}", rank=rank, world_size=setting.ranks) as bench:
        pipe.send({})
        while True:
            pipe.send(attempt(bench.measure, pipe.recv()))
