"""Layers that are expert-parallel from the start: no rank ever holds all experts, and their weights are those of one
process."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import TorchDispatchMode

from moe_core.errors import InvalidInput, Unsupported
from moe_core.formats import scheme_named
from moe_core.layers import ExpertsSpec, MoELayerSpec, SharedExpertsSpec
from moe_core.specs import RouterSpec
from moe_torch import MoE
from moe_torch.parallel import ExchangeSpec, ExpertParallel, parallelize
from tests.support.parallel.pool import Pool, ranks
from tests.support.torch import running_on

__all__ = ["ranks"]

D, F, E, K = 16, 24, 7, 3
SPECS = {
    "plain": MoELayerSpec(D, F, E, K, RouterSpec(K), ExpertsSpec(bias=True), correction_bias=True),
    "shared": MoELayerSpec(D, F, E, K, RouterSpec(K), shared_experts=SharedExpertsSpec(8)),
    "odd": MoELayerSpec(5, 3, E, K, RouterSpec(K)),
    "quantised": MoELayerSpec(32, 32, E, K, RouterSpec(K), ExpertsSpec(scheme=scheme_named("mxfp4_w4a16"))),
}


class Largest(TorchDispatchMode):
    """The most numbers of any tensor outside of `meta` that an operator returned."""

    numbers = 0

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        found = function(*arguments, **(options or {}))
        if isinstance(found, torch.Tensor) and not found.is_meta and not hasattr(found, "placements"):
            self.numbers = max(self.numbers, found.numel())
        return found


def whole(layer: MoE) -> dict[str, np.ndarray]:
    state: dict[str, Any] = layer.state_dict()
    return {name: (one.full_tensor() if hasattr(one, "full_tensor") else one).numpy() for name, one in state.items()}


def make(group: Any, name: str) -> dict[str, Any]:
    """What a layer that is made over ranks has and gives, and one that is shared out afterwards."""
    mesh, spec = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("ep",)), SPECS[name]
    torch.manual_seed(3)
    with Largest() as largest:
        made = MoE.from_spec(spec, expert_parallel=mesh)
    torch.manual_seed(3)
    shared_out = parallelize(MoE.from_spec(spec), ExpertParallel(mesh))
    x = torch.randn(5, spec.d_model, generator=torch.Generator().manual_seed(torch.distributed.get_rank(group)))
    found: dict[str, Any] = {"state": whole(made), "numbers": largest.numbers}
    found["places"] = [str(getattr(one, "placements", None)) for one in made.parameters()]
    found["places of the other"] = [str(getattr(one, "placements", None)) for one in shared_out.parameters()]
    with running_on("reference"), torch.no_grad():
        found["y"] = [layer(x).numpy() for layer in (made, shared_out)]
    return found


@pytest.mark.parametrize("name", SPECS)
def test_a_layer_made_over_ranks_is_that_of_one_process(ranks: Pool, name: str) -> None:
    spec = SPECS[name]
    torch.manual_seed(3)
    alone = whole(MoE.from_spec(spec))
    for found in ranks.call(make, [(name,)] * 3):
        assert found["state"].keys() == alone.keys()
        for key, array in alone.items():
            np.testing.assert_array_equal(found["state"][key], array, key)
        np.testing.assert_array_equal(*found["y"])
        assert found["places"] == found["places of the other"]
        assert any("Shard" in one for one in found["places"]) or name == "quantised"
        assert 0 < found["numbers"] <= 3 * 2 * spec.d_ff * spec.d_model, "a rank had a matrix of all experts"


def make_otherwise(group: Any) -> dict[str, Any]:
    """The constructor, an ExpertParallel, `meta`, and what is refused."""
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("ep",))
    layer = MoE(D, F, E, K, expert_parallel=ExpertParallel(mesh, ExchangeSpec("all_gather")), dtype=torch.bfloat16)
    exchange: Any = layer.experts.exchange
    found: dict[str, Any] = {"mode": exchange.parallel.exchange.mode, "dtype": str(layer.experts.down.dtype)}
    on_meta = MoE(D, F, E, K, expert_parallel=mesh, device="meta")
    found["meta"] = all(parameter.is_meta for parameter in on_meta.parameters())
    # All ranks of the pool make its groups: names of groups are counted, and must be the same on all.
    two = DeviceMesh("cpu", torch.arange(4).view(1, 4), mesh_dim_names=("dp", "ep"))
    main_grad = dataclasses.replace(SPECS["plain"], main_grad=True)
    errors = []
    for spec, options in (
        (SPECS["plain"], {"expert_parallel": 2}),
        (SPECS["plain"], {"expert_parallel": group}),
        (SPECS["plain"], {"expert_parallel": two}),
        (SPECS["plain"], {"expert_parallel": mesh, "device": "cuda"}),
        (main_grad, {"expert_parallel": mesh}),
    ):
        try:
            MoE.from_spec(spec, **options)
        except (InvalidInput, Unsupported) as error:
            errors.append((type(error).__name__, str(error)))
    return found | {"errors": errors}


def sum_over_pairs(group: Any) -> float:
    mesh, found = DeviceMesh("cpu", torch.arange(group.size()).view(-1, 2)), torch.ones(1)
    torch.distributed.all_reduce(found, group=mesh.get_group(1))
    return found.item()


def test_ranks_of_the_pool_make_groups_without_the_others(ranks: Pool) -> None:
    for size in (2, 4):
        assert ranks.call(sum_over_pairs, [()] * size) == [2] * size


def test_what_it_takes_and_refuses(ranks: Pool) -> None:
    found = ranks.call(make_otherwise, [()] * 4)[0]
    assert (found["mode"], found["dtype"], found["meta"]) == ("all_gather", "torch.bfloat16", True)
    wanted = (
        ("InvalidInput", "expert_parallel must be a DeviceMesh of one axis or an ExpertParallel, got int"),
        ("InvalidInput", "expert_parallel must be a DeviceMesh of one axis or an ExpertParallel, got ProcessGroup"),
        ("InvalidInput", "mesh must have one axis, got 2 axes ('dp', 'ep')"),
        ("InvalidInput", "device must be of the mesh of expert_parallel, cpu, got cuda"),
        ("Unsupported", "main_grad cannot be had across ranks"),
    )
    assert len(found["errors"]) == len(wanted)
    for (kind, text), (expected, start) in zip(found["errors"], wanted, strict=True):
        assert kind == expected and text.startswith(start), text


def test_a_rank_copies_its_part() -> None:
    weights = MoE(16, 16, 4, 2).export_weights()
    with pytest.raises(InvalidInput, match="copy must be True with expert_parallel, got False"):
        MoE.from_weights(weights, copy=False, expert_parallel="never looked at")
