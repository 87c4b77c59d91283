"""A language model in bf16 with FSDP2 and experts on four ranks, two and one, a rank killed: losses of one process."""

from __future__ import annotations

import importlib
import pathlib
import sys
from typing import Any
from unittest import mock

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
import torch.distributed.checkpoint as checkpoint
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from moe_torch.parallel import ExpertParallel, clip_grad_norm_, parallelize
from tests.support.parallel.pool import Pool
from tests.support.paths import ROOT
from tests.support.torch import running_on

dcp: Any = checkpoint
SIZES = {"d_model": 16, "d_ff": 16, "experts": 8, "layers": 2, "length": 8, "batch": 8, "steps": 9}
#: Ranks of the first steps, of those after a death, and of the last.
PHASES = ((4, 0, 3), (2, 3, 6), (1, 6, 9))
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def steps_of(group: Any, folder: str, first: int, last: int) -> list[float]:
    """Means over ranks of the losses of some steps, from the checkpoint of the step before to one of the last."""
    size, rank = torch.distributed.get_world_size(group), torch.distributed.get_rank(group)
    with mock.patch.object(sys, "path", [str(ROOT / "examples"), *sys.path]), running_on("reference"):
        language_model, train_torch = map(importlib.import_module, ("language_model", "train_torch"))
        settings = language_model.Settings(**SIZES)
        model = train_torch.LanguageModel(settings)
        mesh = DeviceMesh("cpu", torch.arange(size).view(1, size), mesh_dim_names=("efsdp", "ep"))
        for block in model.blocks:
            parallelize(block.moe, ExpertParallel(mesh["ep"], gradients="mean"))
            fully_shard(block.moe.experts, mesh=mesh["efsdp"], mp_policy=BF16)
        fully_shard(model, mesh=mesh["ep"], mp_policy=BF16)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        if first:
            weights, states = get_state_dict(model, optimizer)
            kept = {"model": weights, "optimizer": states}
            dcp.load(kept, checkpoint_id=f"{folder}/{first}", process_group=group)
            set_state_dict(model, optimizer, model_state_dict=kept["model"], optim_state_dict=kept["optimizer"])
        losses = []
        for step, batch in enumerate(language_model.batches(settings)):
            if first <= step < last:
                inputs, targets = (torch.from_numpy(tokens).long().chunk(size)[rank] for tokens in batch)
                loss = model(inputs, targets)
                loss.backward()
                assert float(clip_grad_norm_(model.parameters(), 0.1)) > 0.1, "it is clipped"
                optimizer.step()
                optimizer.zero_grad()
                mean = loss.detach().float()
                torch.distributed.all_reduce(mean, group=group)
                losses.append(mean.item() / size)
        weights, states = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optimizer": states}, checkpoint_id=f"{folder}/{last}", process_group=group)
        return losses


def test_losses_are_those_of_one_process(tmp_path: pathlib.Path) -> None:
    pool, losses = Pool(4), []
    try:
        for size, first, last in PHASES:
            parts = pool.call(steps_of, [(str(tmp_path), first, last)] * size)
            losses += parts[0]
            pool.processes[3].kill()
        (alone,) = pool.call(steps_of, [(str(tmp_path / "alone"), 0, PHASES[-1][2])])
    finally:
        pool.close()
    np.testing.assert_allclose(losses, alone, 1.2e-2)
    assert losses[-1] < losses[0] - 0.2
