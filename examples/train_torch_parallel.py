"""The language model of train_torch.py with its experts on four ranks, and the losses of one process beside.

    torchrun --nproc-per-node 4 examples/train_torch_parallel.py    # NCCL on GPUs, gloo on a CPU
    python examples/train_torch_parallel.py                         # starts four ranks on this CPU

Every rank has the whole model but the experts, of which it has a part, and a part of the batch. Gradients of experts
have the bits of one process. All others are sums over ranks in another order, so losses differ by rounding. With
--ordered they are added up in the order of ranks, which costs an all-gather: training then has, bit by bit, the losses
and gradients of one process that computes everything but the experts for each part of the batch by itself.
"""

from __future__ import annotations

import argparse
import functools
import os
import pathlib
import tempfile
import time
from typing import Any

import language_model
import torch
import torch.distributed as dist
import train_torch
from language_model import Settings
from torch.distributed.device_mesh import init_device_mesh

from moe_torch.parallel import ExpertParallel, group_losses, parallelize

# torch does not export all of what it documents.
distributed: Any = dist
multiprocessing: Any = torch.multiprocessing

RANKS = 4
#: How far losses may be apart: Adam makes whole steps of differences in the last bit.
TOLERANCE = 1e-3


def experts(block: Any, parallel: ExpertParallel, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`Block.experts` whose routing losses are those of all ranks' tokens, in the mean over ranks."""
    y, aux = block.moe(x, return_aux=True)
    balance, z = group_losses(aux, block.moe.spec.router, parallel)
    return y, language_model.BALANCE * balance + language_model.Z * z


def add_up(values: torch.Tensor, ordered: bool) -> None:
    """Make values their sum over ranks; ordered: rank 0's first, then rank 1's, and so on."""
    if not ordered:
        dist.all_reduce(values)
        return
    parts = [torch.empty_like(values) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, values)
    values.copy_(functools.reduce(torch.add, parts))


def average_gradients(model: torch.nn.Module, parallel: ExpertParallel, ordered: bool) -> None:
    """Make every gradient that of the mean loss of all ranks."""
    for name, parameter in model.named_parameters():
        gradient: Any = parameter.grad
        if ".moe.experts." in name:
            # It is the sum over all ranks' tokens already.
            gradient /= parallel.gradient_divisor
        else:
            add_up(gradient, ordered)
            gradient /= dist.get_world_size()


def train(settings: Settings, ordered: bool = False) -> list[float]:
    """The loss of every step, in the mean over ranks. ordered: see `add_up`."""
    device = train_torch.device()
    parallel = ExpertParallel(init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("ep",)))
    model = train_torch.LanguageModel(settings).to(device)
    blocks: Any = model.blocks
    for block in blocks:
        parallelize(block.moe, parallel)
        block.experts = functools.partial(experts, block, parallel)
    # Experts are DTensors, and all else is not: Adam takes them one by one.
    optimizer = torch.optim.Adam(
        model.parameters(), settings.learning_rate, language_model.DECAYS, language_model.ADAM_EPSILON, foreach=False
    )
    rank, each, losses = dist.get_rank(), settings.batch // dist.get_world_size(), []
    for step, batch in enumerate(language_model.batches(settings)):
        inputs, targets = (train_torch.on_device(tokens[rank * each : (rank + 1) * each]) for tokens in batch)
        loss = model(inputs, targets)
        loss.backward()
        average_gradients(model, parallel, ordered)
        optimizer.step()
        optimizer.zero_grad()
        loss = loss.detach()
        add_up(loss, ordered)
        losses.append(loss / dist.get_world_size())
        if dist.get_rank() == 0:
            language_model.show(step, losses[-1], settings)
    return torch.stack(losses).tolist()


def run(settings: Settings, ordered: bool) -> None:
    """Train on all ranks, and on the first one alone; print both there."""
    assert settings.batch % dist.get_world_size() == 0, "every rank gets as many sequences"
    assert settings.dtype == "float32", "the experts compute in the dtype of their weights here"
    began = time.perf_counter()
    losses = train(settings, ordered)
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} ranks, {time.perf_counter() - began:.1f} s")
        print("the same in one process:")
        expected, _ = train_torch.train(settings)
        apart = max(abs(one - other) for one, other in zip(losses, expected, strict=True))
        print(f"losses of one process: at most {apart:.1e} apart")
        assert apart <= TOLERANCE * max(expected) and losses[-1] < losses[0]
    dist.destroy_process_group()


def run_rank(rank: int, settings: Settings, ordered: bool, store: str) -> None:
    """One of the processes that `main` starts."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    run(settings, ordered)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    language_model.add_options(parser)
    parser.add_argument("--ordered", action="store_true", help="add gradients up in the order of ranks")
    options = parser.parse_args()
    settings = language_model.settings_from(options)
    if dist.is_torchelastic_launched():
        if torch.cuda.is_available():
            torch.cuda.set_device(distributed.get_node_local_rank())
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
        run(settings, options.ordered)
        return
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # these ranks are the CPU's, whatever else the machine has
    with tempfile.TemporaryDirectory() as folder:
        store = str(pathlib.Path(folder) / "store")
        # Forks, which import nothing again.
        multiprocessing.start_processes(run_rank, (settings, options.ordered, store), RANKS, start_method="fork")


if __name__ == "__main__":
    main()
