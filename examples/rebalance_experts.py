"""Layers that serve on four ranks while popular experts change, and move between ranks (EPLB).

    torchrun --nproc-per-node 4 examples/rebalance_experts.py    # NCCL on GPUs, gloo on a CPU
    python examples/rebalance_experts.py                         # starts four ranks on this CPU

Every few steps each layer's experts get new ranks, with replicas of the popular ones in spare places. Halfway, other
experts become popular. Outputs have the bits of one process with all experts, whatever moved.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import tempfile
import time
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from moe_torch import MoE, MoELayerSpec, RouterSpec, Tuning
from moe_torch.parallel import ExpertParallel, Rebalancer, parallelize

# torch does not export all of what it documents.
distributed: Any = dist
multiprocessing: Any = torch.multiprocessing

RANKS, EXPERTS, TOP_K, LAYERS = 4, 16, 2, 2
#: Of a rank.
TOKENS = 32
#: So that a token's bits do not depend on how many rows its experts have elsewhere, also on a CPU.
SPEC = MoELayerSpec(
    64, 32, EXPERTS, TOP_K, RouterSpec(TOP_K, renormalize=True), router_bias=True, tuning=Tuning(batch_invariant=True)
)


def make_layers(device: torch.device) -> list[MoE]:
    torch.manual_seed(0)
    return [MoE.from_spec(SPEC).requires_grad_(False).to(device) for _ in range(LAYERS)]


def make_popular(layers: list[MoE], first: int) -> None:
    """Have routers prefer three experts, which on few ranks lie together."""
    with torch.no_grad():
        for layer in layers:
            layer.router.bias.zero_()
            layer.router.bias[first : first + 3] = 2.0


def batch(step: int, device: torch.device) -> torch.Tensor:
    """The tokens of all ranks."""
    generator = torch.Generator().manual_seed(step)
    return torch.randn(dist.get_world_size() * TOKENS, SPEC.d_model, generator=generator).to(device)


def forward(layers: list[MoE], x: torch.Tensor) -> torch.Tensor:
    for layer in layers:
        x = x + layer(x)
    return x


def run(steps: int, every: int) -> None:
    """Serve on all ranks; the first one compares with one process."""
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    rank, size = dist.get_rank(), dist.get_world_size()
    parallel = ExpertParallel(init_device_mesh(device.type, (size,), mesh_dim_names=("ep",)))
    layers, alone = make_layers(device), make_layers(device)
    for layer in layers:
        parallelize(layer, parallel)
    # One spare place on each rank.
    rebalancer = Rebalancer(layers, parallel, every=every, window=every, places_per_rank=-(-EXPERTS // size) + 1)
    began, moved = time.perf_counter(), 0
    for step in range(steps):
        if step in (0, steps // 2):
            for own in (layers, alone):
                make_popular(own, 0 if step == 0 else EXPERTS // 2)
        x = batch(step, device)
        with torch.no_grad():
            y = forward(layers, x[rank * TOKENS :][:TOKENS])
            expected = forward(alone, x)[rank * TOKENS :][:TOKENS]
        assert torch.equal(y, expected), f"step {step} has other bits than one process"
        for moves in rebalancer.step():
            moved += len(moves.moves)
            if rank == 0:
                print(f"step {step}, {moves}")
    if rank == 0:
        print(f"{size} ranks, {steps} steps, {time.perf_counter() - began:.1f} s: every bit is that of one process")
    assert moved > 0
    dist.destroy_process_group()


def run_rank(rank: int, steps: int, every: int, store: str) -> None:
    """One of the processes that `main` starts."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    run(steps, every)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--every", type=int, default=4, help="steps between two placements")
    options = parser.parse_args()
    if dist.is_torchelastic_launched():
        if torch.cuda.is_available():
            torch.cuda.set_device(distributed.get_node_local_rank())
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
        run(options.steps, options.every)
        return
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # these ranks are the CPU's, whatever else the machine has
    with tempfile.TemporaryDirectory() as folder:
        store = str(pathlib.Path(folder) / "store")
        # Forks, which import nothing again.
        arguments = (options.steps, options.every, store)
        multiprocessing.start_processes(run_rank, arguments, RANKS, start_method="fork")


if __name__ == "__main__":
    main()
