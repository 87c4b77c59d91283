"""Ranks of gloo and one process, compared by `moe-parity --ranks`."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from moe_core.parity.devices import describe
from moe_core.parity.gradients import arguments_of
from moe_core.parity.ranks import Part, RanksRun, leaves_of
from moe_torch import ops
from moe_torch.layers.weights import to_numpy
from moe_torch.parallel import ExpertParallel, moe
from moe_torch.parity.torch import to_torch

_CPU = torch.device("cpu")


def _put(array: np.ndarray) -> torch.Tensor:
    return to_torch(array, _CPU)


def _compute(part: Part) -> tuple[str, dict[str, np.ndarray]]:
    leaves = {name: tensor.requires_grad_() for name, tensor in leaves_of(part.case, _put).items()}
    arguments, options = arguments_of(part.case, leaves, _put)
    device = ""
    if part.placement is None:
        device, _ = describe(("cpu", 0), ops.explain_moe(*arguments, **options, training=True))
        results: Any = ops.moe(*arguments, **options)
    else:
        results = moe(*arguments, **options, parallel=ExpertParallel(dist.group.WORLD), placement=part.placement)
    gradients = torch.autograd.grad(results.output, list(leaves.values()), _put(part.d_output))
    names = ("ids", "weights", "tokens_per_expert", "output", "received_per_expert")
    results = {name: to_numpy(getattr(results, name)) for name in names if hasattr(results, name)}
    results |= {f"d_{name}": to_numpy(one) for name, one in zip(leaves, gradients, strict=True)}
    return device, results


def _rank(rank: int, parts: Sequence[Part], folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=len(parts))
    torch.save(_compute(parts[rank])[1], f"{folder}/{rank}")
    dist.destroy_process_group()


def run_ranks(whole: Part, parts: Sequence[Part]) -> RanksRun:
    """All ranks, then one device."""
    multiprocessing: Any = torch.multiprocessing
    with tempfile.TemporaryDirectory() as folder:
        # Forks of a process that has run nothing.
        multiprocessing.start_processes(_rank, (parts, folder), len(parts), start_method="fork")
        ranks = [torch.load(os.path.join(folder, str(rank)), weights_only=False) for rank in range(len(parts))]
    return RanksRun(*_compute(whole), ranks)
