"""Layers whose experts lie on several gloo ranks, against the same layer on one device."""

from __future__ import annotations

import copy
import dataclasses
import importlib
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
import torch.distributed.checkpoint as checkpoint
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from moe_core.errors import InvalidInput, Unsupported
from moe_core.layers import ExpertsSpec, MoELayerSpec, SharedExpertsSpec
from moe_core.parallel import ExchangeSpec, Placement
from moe_core.specs import RouterSpec, Tuning
from moe_torch import MoE
from moe_torch.bridge.private import SUBCLASSES_OF_DTENSOR
from moe_torch.parallel import ExpertParallel, group_losses, parallelize, total_over_ranks
from tests.support.parallel.placements import placement_of
from tests.support.parallel.pool import Pool, ranks
from tests.support.parallel.torch import mesh_of
from tests.support.torch import running_on

__all__ = ["ranks"]

D, F, E, K = 16, 24, 7, 3
PLAIN = MoELayerSpec(D, F, E, K, RouterSpec(K, renormalize=True), ExpertsSpec(bias=True))
SPECS = {
    "plain": PLAIN,
    "shared": dataclasses.replace(PLAIN, shared_experts=SharedExpertsSpec(20, gate=True)),
    "capacity": dataclasses.replace(PLAIN, capacity_factor=0.75),
    "bias": dataclasses.replace(PLAIN, router=RouterSpec(K, "sigmoid"), correction_bias=True),
    "invariant": dataclasses.replace(PLAIN, tuning=Tuning(batch_invariant=True)),
}


# torch does not say that these are public.
dcp: Any = checkpoint


def make(spec: MoELayerSpec, dtype: torch.dtype = torch.float32) -> MoE:
    torch.manual_seed(0)
    layer = MoE.from_spec(spec)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(std=0.4)
        if layer.router.correction_bias is not None:
            layer.router.correction_bias.normal_(std=0.1)
    return layer.to(dtype)


def rows(tokens: tuple[int, ...], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, a gradient of y and a token mask of all ranks."""
    generator = torch.Generator().manual_seed(1)
    x, d_y = (torch.randn(sum(tokens), D, generator=generator).to(dtype) for _ in range(2))
    return x, d_y, torch.rand(sum(tokens), generator=generator) < 0.8


def results(layer: MoE, x: torch.Tensor, d_y: torch.Tensor, mask: torch.Tensor, losses: Any) -> dict[str, Any]:
    x = x.clone().requires_grad_()
    y, aux = layer(x, mask, return_aux=True)
    balance, z = losses(aux, mask)
    (torch.sum(y.float() * d_y.float()) + 0 * (balance + z)).backward()
    found = {"y": y, "d_x": x.grad, "counts": aux.tokens_per_expert, "ids": aux.ids, "balance": balance, "z": z}
    for name, parameter in layer.named_parameters():
        gradient: Any = parameter.grad
        found[f"d_{name}"] = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
    return {name: array.detach().float().numpy() for name, array in found.items()}


def run(
    group: Any, name: str, tokens: tuple[int, ...], way: ExchangeSpec, dtype: torch.dtype, kind: str
) -> dict[str, Any]:
    rank, first = torch.distributed.get_rank(group), 0
    first = sum(tokens[:rank])
    own = [array[first : first + tokens[rank]] for array in rows(tokens, dtype)]
    layer = make(SPECS[name], dtype)
    parallel = ExpertParallel(mesh_of(group), way, max(tokens) if way.mode == "peer" else None)
    placement = placement_of(kind, E, len(tokens), 1)
    assert parallelize(layer, parallel, placement=placement) is layer
    held = placement.owners[rank]
    gate_up: Any = layer.experts.gate_up
    assert gate_up.to_local().shape[0] == sum(expert >= 0 for expert in held) and gate_up.shape[0] == E
    with running_on("reference"):
        x, d_y, mask = own
        router = layer.spec.router
        found = results(layer, x, d_y, mask, lambda aux, mask: group_losses(aux, router, parallel, token_mask=mask))
        found["total"] = total_over_ranks(torch.tensor(found["counts"]).int(), parallel).numpy()
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["plain", "shared", "capacity", "bias"])
def test_a_layer_is_that_of_one_device(ranks: Pool, name: str, dtype: torch.dtype) -> None:
    # BLAS adds up the rows of a dense product, a shared expert's, in an order that depends on their number.
    some = (8, 16, 8) if name == "shared" else (5, 9, 0)
    other = "round_robin" if dtype == torch.float32 else "balanced"
    peer = ExchangeSpec("peer", "slots" if name == "bias" else "tokens")
    for tokens, way, kind in (
        (some, ExchangeSpec(), "linear"),
        ((8,) * 4, ExchangeSpec("all_gather"), other),
        (some, peer, other),
    ):
        found = ranks.call(run, [(name, tokens, way, dtype, kind)] * len(tokens))
        layer = make(SPECS[name], dtype)
        with running_on("reference"):
            alone = results(layer, *rows(tokens, dtype), lambda aux, mask: (aux.load_balance_loss, aux.z_loss))
        for key, expected in alone.items():
            parts = [rank[key] for rank in found]
            if key in ("y", "ids", "d_x"):
                if key == "d_x" and dtype == torch.bfloat16 and name == "capacity":
                    # Stage by stage, the router's part is rounded before it is added.
                    np.testing.assert_allclose(np.concatenate(parts), expected, 2e-2, 2e-2)
                else:
                    np.testing.assert_array_equal(np.concatenate(parts), expected, key)
            elif key == "counts":
                np.testing.assert_array_equal(sum(parts), expected)
                assert all((rank["total"] == expected).all() for rank in found)
            elif key in ("balance", "z"):
                np.testing.assert_allclose(np.mean(parts), expected, 1e-6)
            elif key.startswith("d_experts."):
                for part in parts:
                    np.testing.assert_array_equal(part, expected, key)
            else:
                slack = (1e-5 if dtype == torch.float32 else 5e-2) * (1 + np.abs(expected).max())
                np.testing.assert_allclose(sum(parts), expected, 0, slack, err_msg=key)


def wholes(layer: MoE) -> dict[str, np.ndarray]:
    """Every parameter and buffer of a layer, whole."""
    state: dict[str, Any] = layer.state_dict()
    whole = {name: one.full_tensor() if hasattr(one, "full_tensor") else one for name, one in state.items()}
    return {name: tensor.float().numpy() for name, tensor in whole.items()}


def placed(group: Any, name: str, kind: str, way: Any = None, **options: Any) -> MoE:
    """A layer whose experts lie on the ranks of the group."""
    layer = make(SPECS[name]) if not options else MoE.from_spec(SPECS[name], **options)
    placement = placement_of(kind, E, torch.distributed.get_world_size(group), 1)
    return parallelize(layer, ExpertParallel(mesh_of(group), way or ExchangeSpec(), 16), placement=placement)


def optimizer_of(layer: torch.nn.Module) -> torch.optim.Optimizer:
    """One that keeps something of every parameter, filled by a step whose gradients are the parameters."""
    optimizer = torch.optim.Adam(layer.parameters(), 0.0, foreach=False)
    for parameter in layer.parameters():
        parameter.grad = parameter.detach().clone()
    optimizer.step()
    return optimizer


def saved_state(layer: MoE) -> dict[str, Any]:
    return {"layer": layer.state_dict(), "optimizer": get_optimizer_state_dict(layer, optimizer_of(layer))}


def save(group: Any, path: str, name: str, kind: str) -> None:
    dcp.save(saved_state(placed(group, name, kind)), checkpoint_id=path, process_group=group)


def load(group: Any, path: str, name: str, kind: str) -> dict[str, np.ndarray]:
    """The parameters and buffers of a checkpoint, and what the optimizer kept of one."""
    layer = placed(group, name, kind)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.zero_()
    state = saved_state(layer)
    dcp.load(state, checkpoint_id=path, process_group=group)
    layer.load_state_dict(state["layer"])
    moment: Any = state["optimizer"]["state"]["experts.down"]["exp_avg"]
    return wholes(layer) | {"moment": moment.full_tensor().numpy()}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize("kind", ["linear", "round_robin"])
def test_checkpoints_hold_whole_experts(ranks: Pool, tmp_path: Any, kind: str) -> None:
    """Saved by four ranks, loaded by four, by two, by one, and by a layer that is not shared out; experts may move."""
    path, name = str(tmp_path / "checkpoint"), "bias"
    ranks.call(save, [(path, name, kind)] * 4)
    expected = {key: tensor.numpy() for key, tensor in make(SPECS[name]).state_dict().items()}
    expected["moment"] = 0.1 * expected["experts.down"]
    layer = MoE.from_spec(SPECS[name])
    state = {"layer": layer.state_dict()}
    dcp.load(state, checkpoint_id=path, no_dist=True)
    found = [{key: tensor.numpy() for key, tensor in state["layer"].items()}]
    for size, other in ((4, "balanced"), (3, "round_robin"), (2, "linear"), (1, "linear")):
        found += ranks.call(load, [(path, name, other)] * size)
    for one in found:
        assert one.keys() == expected.keys() - ({"moment"} if one is found[0] else set())
        for key, array in one.items():
            if key == "moment":
                np.testing.assert_allclose(array, expected[key], 1e-6, err_msg=key)
            else:
                np.testing.assert_array_equal(array, expected[key], key)


def load_own(group: Any, weights: Any, name: str, kind: str) -> tuple[dict[str, np.ndarray], list[int]]:
    """A layer without memory that gets its own experts' weights, and is exported again."""
    layer = placed(group, name, kind, device="meta")
    layer.to_empty(device="cpu").load_weights(weights)
    plain = MoE.from_weights(layer.export_weights())
    down: Any = layer.experts.down
    return wholes(plain), list(down.to_local().shape)


@pytest.mark.parametrize("name, kind", [("plain", "linear"), ("shared", "round_robin"), ("plain", "replicas")])
def test_weights_are_loaded_slice_by_slice(ranks: Pool, name: str, kind: str) -> None:
    layer, placement = make(SPECS[name]), placement_of(kind, E, 3, 1)
    found = ranks.call(load_own, [(layer.export_weights(), name, kind)] * 3)
    for rank, (one, shape) in enumerate(found):
        assert shape == [sum(expert >= 0 for expert in placement.owners[rank]), D, F]
        for key, array in wholes(layer).items():
            np.testing.assert_array_equal(one[key], array, key)


def with_replicas(
    group: Any, tokens: int
) -> tuple[np.ndarray, dict[str, np.ndarray], dict[str, np.ndarray], list[str]]:
    """The output, the arrays of a whole layer's state that is loaded, drawn ones, and what raises."""
    layer, rank = placed(group, "invariant", "replicas"), torch.distributed.get_rank(group)
    x = rows((tokens,) * 3, torch.float32)[0][rank * tokens :][:tokens]
    errors = []
    with running_on("reference"):
        with torch.no_grad():
            y = layer(x).numpy()
        other = placed(group, "plain", "round_robin").experts
        for call in (lambda: layer(x), lambda: fully_shard(other, mesh=mesh_of(group))):
            try:
                call()
            except Unsupported as error:
                errors.append(str(error))
    state = make(SPECS["invariant"]).state_dict()
    layer.load_state_dict({key: tensor + 1 for key, tensor in state.items()})
    loaded = {key: array.copy() for key, array in wholes(layer).items()}
    torch.manual_seed(0)
    layer.reset_parameters()
    return y, loaded, wholes(layer), errors


def test_replicas_are_for_inference(ranks: Pool) -> None:
    found = ranks.call(with_replicas, [(9,)] * 3)
    layer = make(SPECS["invariant"])
    with running_on("reference"):
        expected = layer(rows((9,) * 3, torch.float32)[0]).detach().numpy()
    np.testing.assert_array_equal(np.concatenate([y for y, *_ in found]), expected)
    torch.manual_seed(0)
    drawn = wholes(MoE.from_spec(SPECS["invariant"]))
    for _, state, initial, errors in found:
        assert errors[0].startswith("training needs every expert at one place, got 7 experts on 3 ranks of 5")
        assert len(errors) == 2 and all("cannot be had of experts in the order of a placement" in e for e in errors[1:])
        for key, array in wholes(layer).items():
            np.testing.assert_array_equal(state[key], array + 1, key)
            np.testing.assert_array_equal(initial[key], drawn[key], key)


def without_an_expert(group: Any) -> tuple[str, bool]:
    """What training of one expert on two ranks in FSDP raises, and that inference runs."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("efsdp", "ep"))
    layer = parallelize(MoE(16, 24, 1, 1), ExpertParallel(mesh["ep"], gradients="mean"))
    fully_shard(layer.experts, mesh=mesh["efsdp"])
    with torch.no_grad():
        ran = layer(torch.ones(3, 16)).isfinite().all()
    try:
        layer(torch.ones(3, 16))
    except Unsupported as error:
        return str(error), bool(ran)
    return "", bool(ran)


def test_fsdp_needs_an_expert_on_every_rank(ranks: Pool) -> None:
    text = "fully_shard of experts needs an expert on every rank, got 1 experts on 2 ranks"
    for said, ran in ranks.call(without_an_expert, [()] * 4):
        assert ran and text in said and "none on rank 1" in said


def sharded_twice(group: Any, tokens: tuple[int, ...]) -> dict[str, np.ndarray]:
    """Gradients of a layer on a mesh of 2 x 2 ranks: experts over one axis and FSDP over the other, all else over both.

    All are means over the ranks' losses."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("efsdp", "ep"))
    rank = torch.distributed.get_rank(group)
    parallel = ExpertParallel(mesh["ep"])
    layer = parallelize(make(SPECS["shared"]), parallel)
    fully_shard(layer.experts, mesh=mesh["efsdp"])
    fully_shard(layer, mesh=mesh._flatten("dp"))
    first = sum(tokens[:rank])
    x, d_y, _ = (array[first : first + tokens[rank]] for array in rows(tokens, torch.float32))
    with running_on("reference"), pytest.warns(UserWarning, match="FSDP averages other gradients than experts'"):
        torch.sum(layer(x) * d_y).backward()
    found = {}
    for name, parameter in layer.named_parameters():
        gradient: Any = parameter.grad
        divisor = parallel.gradient_divisor if name.startswith("experts.") else 1
        found[name] = gradient.full_tensor().numpy() / divisor
    return found


def test_gradients_beside_fsdp_are_means(ranks: Pool) -> None:
    tokens = (5, 3, 6, 4)
    found = ranks.call(sharded_twice, [(tokens,)] * 4)
    layer = make(SPECS["shared"])
    x, d_y, _ = rows(tokens, torch.float32)
    with running_on("reference"):
        (torch.sum(layer(x) * d_y) / 4).backward()
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None
        for one in found:
            np.testing.assert_allclose(one[name], parameter.grad.numpy(), 1e-5, 1e-5, err_msg=name)
        if name.startswith("experts."):
            undivided = 2 * found[0][name]
            assert not np.allclose(undivided, parameter.grad.numpy(), 1e-5, 1e-5), "a missing divisor would be seen"


def compiled(group: Any, kind: str, way: ExchangeSpec) -> dict[str, Any]:
    """A compiled layer, a copy of a layer, and the same one in eager code, forward and backward; and graph breaks."""
    layer = placed(group, "plain", kind, way)
    copied, x, found = copy.deepcopy(layer), rows((6,), torch.float32)[0], {}
    first, other = (ExpertParallel(mesh_of(group)) for _ in range(2))
    assert first.name != other.name and ExpertParallel.named(first.name) is first, "programs tell them apart"
    counters: Any = importlib.import_module("torch._dynamo.utils").counters
    counters.clear()
    with running_on("reference"):
        compiled = torch.compile(layer, backend="aot_eager")
        for name, run, own in (("eager", layer, layer), ("compiled", compiled, layer), ("copied", copied, copied)):
            own.zero_grad()
            given = x.clone().requires_grad_()
            y = run(given)
            y.square().sum().backward()
            gradient: Any = own.experts.down.grad
            found[name] = [y.detach().numpy(), given.grad, gradient.to_local()]
    return found | {"breaks": list(counters["graph_break"])}


@pytest.mark.parametrize(("kind", "mode"), [("linear", "peer"), ("round_robin", "all_to_all")])
def test_a_compiled_layer_gives_the_same_bits(ranks: Pool, kind: str, mode: str) -> None:
    for one in ranks.call(compiled, [(kind, ExchangeSpec(mode))] * 2):
        # The exchange breaks the graph where the host reads counts, and nothing else. Before 2.12 a mesh does, too.
        only = all("disable" in reason for reason in one["breaks"]) or not SUBCLASSES_OF_DTENSOR
        assert only and bool(one["breaks"]) == (mode == "all_to_all" or not SUBCLASSES_OF_DTENSOR), one["breaks"]
        for eager, *others in zip(one["eager"], one["compiled"], one["copied"], strict=True):
            for other in others:
                np.testing.assert_array_equal(np.asarray(eager), np.asarray(other))


def wrong_on_one_rank(group: Any, way: ExchangeSpec, capacity: float | None) -> tuple[str, str]:
    spec = dataclasses.replace(SPECS["plain"], capacity_factor=capacity)
    layer = parallelize(make(spec), ExpertParallel(mesh_of(group), way, max_tokens=3))
    wrong = torch.distributed.get_rank(group) == 1
    with running_on("reference"):
        layer(torch.ones(3, D))
        try:
            layer(torch.ones(3, D + wrong))
        except Exception as error:
            return type(error).__name__, str(error)
    return "", ""


@pytest.mark.parametrize("capacity", [None, 1.0])
@pytest.mark.parametrize("mode", ["all_to_all", "peer"])
def test_a_wrong_call_on_one_rank_is_known_on_all(ranks: Pool, mode: str, capacity: float | None) -> None:
    found = ranks.call(wrong_on_one_rank, [(ExchangeSpec(mode), capacity)] * 3)
    assert [kind for kind, _ in found] == ["PeerFailed", "InvalidInput", "PeerFailed"]
    assert found[0][1].startswith(f"rank 1 failed before mode {mode}")
    assert "x must be [..., d_model] with d_model = 16" in found[1][1]


def refusals(group: Any) -> list[tuple[str, str]]:
    mesh, found = mesh_of(group), []
    parallel = ExpertParallel(mesh)
    shared_out = parallelize(make(PLAIN), parallel)
    for layer, given, placement in (
        (shared_out, parallel, None),
        (make(PLAIN), parallel, Placement.round_robin(E, 3)),
        (make(PLAIN), ExpertParallel(group), None),
        (MoE.from_spec(dataclasses.replace(PLAIN, main_grad=True)), parallel, None),
    ):
        try:
            parallelize(layer, given, placement=placement)
        except (InvalidInput, Unsupported) as error:
            found.append((type(error).__name__, str(error)))
    return found


def test_what_a_layer_cannot_do_is_refused(ranks: Pool) -> None:
    found = ranks.call(refusals, [()] * 2)[0]
    assert [kind for kind, _ in found] == ["InvalidInput", "InvalidInput", "InvalidInput", "Unsupported"]
    texts = ("shared out already", "must be of the layer's 7 experts on the mesh's 2 ranks", "must be a DeviceMesh")
    texts = (*texts, "main_grad cannot be had")
    assert all(text in message for text, (_, message) in zip(texts, found, strict=True))
