"""torchtitan's MoE layer on gloo ranks: its all-to-all, and our exchange activated by its overrides, beside one
device."""

from __future__ import annotations

import importlib
import pathlib
import tempfile
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tools.upstream import imports
from tools.upstream.torchtitan import COMMON, SERVED, STAND_INS, B, D, E, F, K, L

_STACKED = ("w1_EFD", "w2_EDF", "w3_EFD")
RANKS = (2, 4)


def _tokens() -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(1)
    return tuple(torch.randn(4 * B, L, D, generator=random).to(torch.bfloat16) for _ in range(2))  # type: ignore


def _layer(ours: dict[str, Any] | None) -> Any:
    """ours: options of the override. None: torchtitan's dispatcher."""
    moe, linear, dispatcher = (
        importlib.import_module(f"{COMMON}.{name}") for name in ("moe", "linear", "token_dispatcher")
    )
    dispatch = dispatcher.AllToAllTokenDispatcher.Config(num_experts=E, top_k=K)
    if ours is not None:
        dispatch = importlib.import_module("moe_torch.torchtitan").exchange(dispatch, **ours)
    inner = moe.GroupedExperts.Config(dim=D, hidden_dim=F, num_experts=E)
    routed = moe.RoutedExperts.Config(inner_experts=inner, token_dispatcher=dispatch)
    gate = linear.Linear.Config(in_features=D, out_features=E)
    router = moe.TokenChoiceTopKRouter.Config(num_experts=E, gate=gate, top_k=K, score_func="softmax", route_norm=True)
    layer = moe.MoE.Config(num_experts=E, routed_experts=routed, router=router).build()
    random = torch.Generator().manual_seed(0)
    for _, parameter in sorted(layer.named_parameters()):
        parameter.data.copy_(torch.randn(parameter.shape, generator=random) * 0.2)
    return layer.to(torch.bfloat16)


def _run(layer: Any, x: torch.Tensor, d_output: torch.Tensor) -> dict[str, torch.Tensor]:
    x = x.clone().requires_grad_()
    output = layer(x)
    output.backward(d_output)
    experts = layer.routed_experts.inner_experts
    return {"output": output.detach(), "d_x": x.grad} | {name: getattr(experts, name).grad for name in _STACKED}


def _rank(rank: int, ranks: int, files: str, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("ep",))["ep"]
    found = {}
    with imports.world(pathlib.Path(files), STAND_INS, {}, SERVED):
        for name, ours in (("theirs", None), ("tokens", {}), ("slots", {"rows": "slots"})):
            layer = _layer(ours)
            experts = layer.routed_experts.inner_experts
            for weight in _STACKED:
                share = getattr(experts, weight).detach().chunk(ranks)[rank].clone()
                setattr(experts, weight, torch.nn.Parameter(share))
            layer.routed_experts.token_dispatcher.wire_meshes(ep_mesh=mesh)
            found[name] = _run(layer, *(one.chunk(ranks)[rank] for one in _tokens()))
    torch.save(found, f"{folder}/{rank}")
    dist.barrier()
    dist.destroy_process_group()


def check_ranks(files: pathlib.Path) -> list[str]:
    """Results with other bits than torchtitan's on one device, or of d_x, that depend on the number of ranks. Prints a
    line for each."""
    problems, first = [], {}
    with imports.world(files, STAND_INS, {}, SERVED):
        alone = _run(_layer(None), *_tokens())
        exact = _run(_layer(None).double(), *(one.double() for one in _tokens()))["d_x"]
    for ranks in RANKS:
        with tempfile.TemporaryDirectory() as folder:
            torch.multiprocessing.spawn(_rank, (ranks, str(files), folder), ranks)  # type: ignore
            parts = [torch.load(f"{folder}/{rank}") for rank in range(ranks)]
        for kind in parts[0]:
            found = {name: torch.cat([part[kind][name] for part in parts]) for name in alone}
            equal = [name for name in alone if torch.equal(found[name], alone[name])]
            error = float((found["d_x"].double() - exact).norm() / exact.norm())
            print(
                f"torchtitan on {ranks} ranks, {kind:<7} one device's bits: {', '.join(equal)}; d_x off by {error:.1e}"
            )
            if kind == "theirs":
                continue
            same = torch.equal(found["d_x"], first.setdefault("d_x", found["d_x"]))
            other = [name for name in alone if name not in equal and name != "d_x"] + ["d_x"] * (not same)
            problems += [f"torchtitan on {ranks} ranks, {kind}: {name} has other bits" for name in other]
    return problems
