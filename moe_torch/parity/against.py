"""A rank of `moe-parity --ranks W --against MODULE`, started by torchrun."""

from __future__ import annotations

import os
import pickle
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from moe_core.parity.against import Problem, load_module
from moe_torch.layers.weights import to_numpy
from moe_torch.parity.torch import to_torch


def _compute(module: Any, problem: Problem, rank: int, device: torch.device) -> dict[str, np.ndarray | None]:
    experts = {name: to_torch(problem.arrays[name], device).requires_grad_() for name in ("gate_up", "down")}
    x, ids, weights, d_output = (
        to_torch(problem.of_rank(rank, name), device) for name in ("x", "ids", "weights", "d_output")
    )
    forward = module.build(experts, len(experts["down"]))
    if not problem.differentiated:
        with torch.no_grad():
            return {"output": to_numpy(forward(x, ids, weights))}
    x.requires_grad_()
    weights.requires_grad_()
    output = forward(x, ids, weights)
    if output.requires_grad and output.shape == d_output.shape:
        output.backward(d_output.to(output.dtype))
    leaves = {"d_x": x, "d_routing.weights": weights}
    leaves |= {f"d_experts.{name}": leaf for name, leaf in experts.items()}
    gradients = {name: None if leaf.grad is None else to_numpy(leaf.grad) for name, leaf in leaves.items()}
    return {"output": to_numpy(output.detach())} | gradients


def main(arguments: Sequence[str] | None = None) -> None:
    folder = Path((sys.argv[1:] if arguments is None else arguments)[0])
    name, problems = pickle.loads((folder / "work").read_bytes())
    rank, ranks, device = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), torch.device("cpu")
    if torch.cuda.device_count() >= ranks:
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    backend = "gloo" if device.type == "cpu" else "nccl"
    dist.init_process_group(backend)
    about = f"{backend} ({device.type})"
    case = "loading"
    try:
        module = load_module(name)
        for number, problem in enumerate(problems):
            case = problem.load
            results = about, _compute(module, problem, rank, device)
            partial = folder / f"partial-{rank}"
            partial.write_bytes(pickle.dumps(results))
            partial.rename(folder / f"{number}-{rank}")
    except Exception as error:
        # The first rank that failed counts. Others may fail because it did.
        text = f"rank {rank} in {case}: {type(error).__name__}: {str(error)[:300]}"
        (folder / f"error-{rank}").write_bytes(pickle.dumps((time.time(), text)))
        # Without the group's destructor, which would wait for other ranks.
        os._exit(1)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
