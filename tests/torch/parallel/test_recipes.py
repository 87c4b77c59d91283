"""Everyday tools on a model with experts on several ranks, against one process: the tools themselves, each in use."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from moe_torch import MoE
from moe_torch.bridge.private import SUBCLASSES_OF_DTENSOR
from moe_torch.layers.listed import norms_of
from moe_torch.parallel import ExchangeSpec, ExpertParallel, Placement, clip_grad_norm_, ignore_experts, parallelize
from tests.support.parallel.pool import Pool, ranks, ranks_with_gpus
from tests.support.parallel.torch import mesh_of
from tests.support.torch import running_on

__all__ = ["ranks"]

D, F, E, K, T = 16, 16, 5, 2, 6
GPUS = min(ranks_with_gpus(), 4)
Arrays = dict[str, np.ndarray]


class Block(torch.nn.Module):
    def __init__(self, parallel: ExpertParallel | None, kind: str, device: str) -> None:
        super().__init__()
        # Drawn on the CPU, for the same numbers everywhere.
        self.dense, self.moe = torch.nn.Linear(D, D).to(device), MoE(D, F, E, K).to(device)
        if parallel is not None:
            parallelize(self.moe, parallel, placement=getattr(Placement, kind)(E, parallel.ranks().size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.dense(x)
        return x + self.moe(x)


def model(parallel: ExpertParallel | None = None, kind: str = "linear", device: str = "cpu") -> Any:
    torch.manual_seed(0)
    return torch.nn.Sequential(Block(parallel, kind, device), Block(parallel, kind, device))


def tokens(rank: int, step: int = 0, device: str = "cpu") -> torch.Tensor:
    return torch.randn(T, D, generator=torch.Generator().manual_seed(100 * step + rank)).to(device)


def loss(net: torch.nn.Module, rank: int, step: int = 0) -> torch.Tensor:
    return net(tokens(rank, step, next(net.parameters()).device.type)).float().square().mean()


def whole(tensor: Any) -> np.ndarray:
    tensor = tensor.detach()
    tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return tensor.float().cpu().numpy().copy()


def require_equal(net: Any, alone: Any, label: str, gradients: bool = True, tolerance: float = 2e-6) -> None:
    wanted = dict(alone.named_parameters())
    names = [name for name, _ in net.named_parameters()]
    assert [name.removeprefix("module.") for name in names] == list(wanted), label
    for name, parameter in net.named_parameters():
        other = wanted[name.removeprefix("module.")]
        found, expected = (one.grad if gradients else one for one in (parameter, other))
        most = max(float(expected.detach().abs().max()), 1e-3)
        np.testing.assert_allclose(whole(found) / most, whole(expected) / most, 0, tolerance, err_msg=f"{label} {name}")


def trained_alone(ranks: int, steps: int = 1, device: str = "cpu") -> Any:
    net = model(device=device)
    for step in range(steps):
        for rank in range(ranks):
            (loss(net, rank, step) / ranks).backward()
    return net


def everyday(group: Any, kind: str) -> None:
    """Tools on experts of two ranks beside whole parameters."""
    rank, size = torch.distributed.get_rank(group), torch.distributed.get_world_size(group)
    parallel = ExpertParallel(mesh_of(group), gradients="mean")

    def averaged(net: Any) -> Any:
        for name, parameter in net.named_parameters():
            if ".experts." not in name:
                torch.distributed.all_reduce(parameter.grad, group=group)
                parameter.grad /= size
        return net

    def fresh() -> Any:
        net = model(parallel, kind)
        loss(net, rank).backward()
        return averaged(net)

    require_equal(fresh(), trained_alone(size), "gradients are means")
    clips: list[tuple[str, Callable[..., torch.Tensor]]] = [("ours", clip_grad_norm_)]
    for foreach in (None, False, True):
        clips.append((f"torch's, foreach={foreach}", lambda *given, each=foreach: torch_clip(*given, foreach=each)))
    torch_clip = torch.nn.utils.clip_grad_norm_
    for label, clip in clips:
        for order in (2.0, 1.0, math.inf):
            net, alone = fresh(), trained_alone(size)
            found, wanted = (
                float(one(two.parameters(), 0.05, order)) for one, two in ((clip, net), (torch_clip, alone))
            )
            assert found == pytest.approx(wanted, 1e-6) and found > 0.05, (label, order, found, wanted)
            require_equal(net, alone, f"{label} {order}")
    for name, options in (
        ("AdamW", {}),
        ("AdamW", {"foreach": True}),
        ("AdamW", {"fused": True}),
        ("SGD", {"momentum": 0.9}),
    ):
        net, alone = fresh(), trained_alone(size)
        for one in (net, alone):
            optimizer = getattr(torch.optim, name)(one.parameters(), 1e-2, **options)
            optimizer.step()
            optimizer.step()
        require_equal(net, alone, f"{name} {options}", gradients=False, tolerance=1e-5)
    net, alone = fresh(), trained_alone(size)
    for one in (net, alone):
        average: Any = AveragedModel(one, multi_avg_fn=get_ema_multi_avg_fn(0.5))
        average.update_parameters(one)
        with torch.no_grad():
            for parameter in one.parameters():
                parameter.mul_(3)
        average.update_parameters(one)
        one.average = average.module
    require_equal(net.average, alone.average, "EMA", gradients=False)
    for infinite in (False, True):
        net = model(parallel, kind)
        scaler, optimizer = torch.amp.GradScaler("cpu", init_scale=16.0), torch.optim.SGD(net.parameters(), 0.1)
        scaler.scale(loss(net, rank)).backward()
        averaged(net)
        if infinite and rank == 1:
            net[0].moe.experts.down.grad.to_local()[0] = math.inf
        before = whole(net[0].moe.experts.down)
        scaler.unscale_(optimizer)
        if not infinite:
            require_equal(net, trained_alone(size), "unscaled")
        scaler.step(optimizer)
        scaler.update()
        # All ranks skip the step, or none.
        assert np.array_equal(before, whole(net[0].moe.experts.down)) == infinite
        assert scaler.get_scale() == (8 if infinite else 16)
    ddp = DistributedDataParallel(ignore_experts(model(parallel, kind)), process_group=group)
    with ddp.no_sync():
        loss(ddp, rank, 0).backward()
    loss(ddp, rank, 1).backward()
    require_equal(ddp, trained_alone(size, 2), "DDP with accumulation")
    refused: list[tuple[Any, str]] = [(lambda: ignore_experts(model()), "got none")]
    refused.append((lambda: ignore_experts(model(ExpertParallel(parallel.mesh))), "got gradients='sum'"))
    refused.append((lambda: DistributedDataParallel(model(parallel, "linear"), process_group=group), "ignore_experts"))
    refused.append((lambda: torch.max(model(parallel, "round_robin")[0].moe.experts.down), "cannot be had"))
    for call, text in refused:
        with pytest.raises(Exception, match=text) as caught:
            call()
        assert type(caught.value).__name__ in ("InvalidInput", "Unsupported"), caught.value
    copied: Any = copy.deepcopy(net)
    assert type(copied[0].moe.experts.down) is type(net[0].moe.experts.down)


@pytest.mark.skipif(not SUBCLASSES_OF_DTENSOR, reason="torch before 2.12 takes no lists of several meshes")
@pytest.mark.parametrize("kind", ["linear", "round_robin"])
def test_everyday_tools(ranks: Pool, kind: str) -> None:
    with running_on("reference"):
        ranks.call(on_reference, [(everyday, kind)] * 2)


def on_reference(group: Any, function: Callable[..., Any], *arguments: Any) -> Any:
    with running_on("reference"):
        return function(group, *arguments)


def sharded(net: Any, dense: Any, experts: Any, policy: MixedPrecisionPolicy) -> Any:
    for block in net:
        fully_shard(block.moe.experts, mesh=experts, mp_policy=policy)
        fully_shard(block, mesh=dense, mp_policy=policy)
    return net


def beside_fsdp(group: Any, mode: str, device: str) -> None:
    """bf16 products of fp32 parameters, gradients added in fp32, and all else of a step."""
    rank, size = torch.distributed.get_rank(group), torch.distributed.get_world_size(group)
    dense = init_device_mesh(device, (size,), mesh_dim_names=("dp",))["dp"]
    both = init_device_mesh(device, (size // min(size, 2), min(size, 2)), mesh_dim_names=("efsdp", "ep"))
    parallel = ExpertParallel(both["ep"], ExchangeSpec(mode), T if mode == "peer" else None, gradients="mean")
    bf16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    rounded, x = model(device=device).bfloat16(), tokens(rank, 0, device)
    # A GPU's tiles follow the tokens of all ranks, and its fp32 products may be of tf32.
    on_gpu, slack = device == "cuda", 1e-2 if device == "cuda" else 2e-6
    for label, net in (
        ("EP", sharded(model(parallel, device=device), dense, both["efsdp"], bf16)),
        ("no EP", sharded(model(device=device), dense, dense, bf16)),
    ):
        y, wanted = net(x), rounded(x.bfloat16())
        assert y.dtype == torch.bfloat16 and (torch.allclose(y, wanted, 0.02, 0.02) if on_gpu else y.equal(wanted)), (
            label
        )
        y.float().square().mean().backward()
        assert all(one.grad.dtype == one.dtype == torch.float32 for one in net.parameters())
        require_equal(net, trained_alone(size, 1, device), label, tolerance=0.05)
    step = sharded(model(parallel, device=device), dense, both["efsdp"], MixedPrecisionPolicy())
    step[0].set_requires_gradient_sync(False)
    loss(step, rank, 0).backward()
    step[0].set_requires_gradient_sync(True)
    loss(step, rank, 1).backward()
    alone = trained_alone(size, 2, device)
    require_equal(step, alone, "accumulated", tolerance=slack)
    for order in (2.0, math.inf):
        found = clip_grad_norm_(step.parameters(), 0.05, order)
        wanted = torch.nn.utils.clip_grad_norm_(alone.parameters(), 0.05, order)
        assert {norm.dtype for norm in norms_of([one.grad for one in step.parameters()], order)} == {torch.float32}
        np.testing.assert_allclose(float(found), float(wanted), slack)
    for one in (step, alone):
        torch.optim.AdamW(one.parameters(), 1e-2, fused=True).step()
    require_equal(step, alone, "a step", gradients=False, tolerance=0.05 if on_gpu else 1e-5)


@pytest.mark.parametrize("mode", ["all_to_all", "peer"])
def test_fsdp_in_bf16(ranks: Pool, mode: str) -> None:
    ranks.call(on_reference, [(beside_fsdp, mode, "cpu")] * 4)


@pytest.mark.gpu
@pytest.mark.skipif(not GPUS, reason="needs a GPU")
def test_fsdp_in_bf16_on_gpus() -> None:
    pool = Pool(GPUS, backend="nccl")
    try:
        for mode in ("all_to_all", "peer"):
            pool.call(beside_fsdp, [(mode, "cuda")] * GPUS)
    finally:
        pool.close()
