"""Layers whose experts lie on a mesh of two axes, experts and tensor: against one process, checkpoints, FSDP."""

from __future__ import annotations

import dataclasses
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
from moe_core.formats import scheme_named
from moe_core.layers import ExpertsSpec, LayerWeights, MoELayerSpec, SharedExpertsSpec, convert_weights
from moe_core.parallel import ExchangeSpec
from moe_core.specs import Activation, RouterSpec
from moe_torch import MoE
from moe_torch.parallel import ExpertParallel, PlacedTensor, group_losses, parallelize, total_over_ranks
from tests.support.parallel.placements import placement_of
from tests.support.parallel.pool import Pool, ranks
from tests.support.quantized.layers import quantized_weights
from tests.support.torch import running_on

__all__ = ["ranks"]

dcp: Any = checkpoint

D, F, E, K = 16, 24, 6, 2


def experts(gate_layout: str | None = None, weight_layout: str | None = None, **options: Any) -> ExpertsSpec:
    return ExpertsSpec(bias=True, gate_layout=gate_layout, weight_layout=weight_layout, **options)


PLAIN = MoELayerSpec(D, F, E, K, RouterSpec(K, renormalize=True), experts())
SPECS = {
    "halves": PLAIN,
    "interleaved": dataclasses.replace(PLAIN, experts=experts("interleaved", "in_out")),
    "separate": dataclasses.replace(PLAIN, experts=experts("separate")),
    "ungated": dataclasses.replace(PLAIN, experts=ExpertsSpec(Activation("relu2", gated=False), bias=True)),
    "shared": dataclasses.replace(
        PLAIN, experts=experts("interleaved"), shared_experts=SharedExpertsSpec(20, gate=True)
    ),
    "capacity": dataclasses.replace(PLAIN, capacity_factor=0.75),
}


def make(name: str) -> MoE:
    torch.manual_seed(0)
    layer = MoE.from_spec(SPECS[name])
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(std=0.4)
    return layer


def mesh_of(rows: int, size: int) -> Any:
    return init_device_mesh("cpu", (rows, size), mesh_dim_names=("ep", "tp"))


def over(mesh: Any, **options: Any) -> ExpertParallel:
    return ExpertParallel(mesh["ep"], tensor=mesh["tp"], **options)


def rows(tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x, d_y = (torch.randn(tokens, D, generator=generator) for _ in range(2))
    return x, d_y


def whole(tensor: Any) -> np.ndarray:
    found = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return found.detach().float().numpy()


def wholes(layer: torch.nn.Module) -> dict[str, np.ndarray]:
    return {name: whole(tensor) for name, tensor in layer.state_dict().items()}


def results(layer: MoE, x: torch.Tensor, d_y: torch.Tensor, losses: Any) -> dict[str, Any]:
    x = x.clone().requires_grad_()
    with running_on("reference"):
        y, aux = layer(x, return_aux=True)
        balance, z = losses(aux)
        (torch.sum(y * d_y) + 0 * (balance + z)).backward()
    found = {"y": y, "d_x": x.grad, "counts": aux.tokens_per_expert, "balance": balance, "z": z}
    found |= {f"d_{name}": parameter.grad for name, parameter in layer.named_parameters()}
    return {name: whole(tensor) for name, tensor in found.items()}


def run(group: Any, name: str, shape: tuple[int, int], tokens: str, kind: str, each: int) -> dict[str, np.ndarray]:
    mesh, layer = mesh_of(*shape), make(name)
    exchange = ExchangeSpec("peer" if name in ("shared", "ungated") else "all_to_all", "slots")
    parallel = over(mesh, tensor_tokens=tokens, max_tokens=each, exchange=exchange)
    parallelize(layer, parallel, placement=placement_of(kind, E, shape[0], 1))
    down: Any = layer.experts.down
    assert down.shape in ((E, D, F), (E, F, D)) and F // shape[1] in down.to_local().shape[1:]
    number = mesh.get_rank() if tokens == "split" else mesh["ep"].get_local_rank()
    x, d_y = (array[number * each :][:each] for array in rows(4 * each))
    found = results(layer, x, d_y, lambda aux: group_losses(aux, layer.spec.router, parallel))
    found["total"] = total_over_ranks(torch.tensor(found["counts"]).int(), parallel).numpy()
    return found


CASES = (
    ("halves", (2, 2), "split", "linear"),
    ("interleaved", (2, 2), "split", "round_robin"),
    ("separate", (1, 4), "split", "linear"),
    ("ungated", (2, 2), "replicated", "balanced"),
    ("shared", (2, 2), "split", "linear"),
    ("shared", (2, 2), "replicated", "linear"),
    ("capacity", (2, 2), "split", "linear"),
    ("halves", (4, 1), "split", "linear"),
)


@pytest.mark.parametrize("name, shape, tokens, kind", CASES)
def test_a_layer_is_nearly_that_of_one_process(
    ranks: Pool, name: str, shape: tuple[int, int], tokens: str, kind: str
) -> None:
    each = 8
    found = ranks.call(run, [(name, shape, tokens, kind, each)] * 4)
    count = 4 if tokens == "split" else shape[0]
    x, d_y = (array[: count * each] for array in rows(4 * each))
    alone = results(make(name), x, d_y, lambda aux: (aux.load_balance_loss, aux.z_loss))
    heads = found if tokens == "split" else found[:: shape[1]]
    for key, expected in alone.items():
        parts = [rank[key] for rank in heads]
        slack = 1e-5 * (1 + np.abs(expected).max())
        if key in ("y", "d_x"):
            np.testing.assert_allclose(np.concatenate(parts), expected, 0, slack, err_msg=key)
        elif key == "counts":
            np.testing.assert_array_equal(sum(parts), expected)
            assert all((rank["total"] == expected).all() for rank in found)
        elif key in ("balance", "z"):
            np.testing.assert_allclose(np.mean(parts), expected, 1e-6)
        elif key.startswith("d_experts."):
            for part in found:
                np.testing.assert_allclose(part[key], expected, 0, slack, err_msg=key)
                # All ranks put the same slices together.
                np.testing.assert_array_equal(part[key], found[0][key])
        else:
            np.testing.assert_allclose(sum(parts), expected, 0, slack, err_msg=key)
    if tokens == "replicated":
        for number, other in enumerate(found):
            for key in ("y", "d_x", "d_router.weight"):
                np.testing.assert_array_equal(other[key], found[number // shape[1] * shape[1]][key], key)


def state_of(layer: MoE) -> dict[str, Any]:
    """With an optimizer whose moments are a tenth of the parameters."""
    optimizer = torch.optim.Adam(layer.parameters(), 0.0, foreach=False)
    for parameter in layer.parameters():
        parameter.grad = parameter.detach().clone()
    optimizer.step()
    return {"layer": layer.state_dict(), "optimizer": get_optimizer_state_dict(layer, optimizer)}


def layer_on(group: Any, name: str, shape: tuple[int, int], kind: str) -> MoE:
    mesh = mesh_of(*shape)
    return parallelize(make(name), over(mesh), placement=placement_of(kind, E, shape[0], 1))


def save(group: Any, path: str, name: str, shape: tuple[int, int], kind: str) -> None:
    dcp.save(state_of(layer_on(group, name, shape, kind)), checkpoint_id=path)


def load(group: Any, path: str, name: str, shape: tuple[int, int], kind: str) -> dict[str, np.ndarray]:
    layer = layer_on(group, name, shape, kind)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.zero_()
    state = state_of(layer)
    dcp.load(state, checkpoint_id=path)
    layer.load_state_dict(state["layer"])
    moments = state["optimizer"]["state"]
    return wholes(layer) | {
        f"moment of {key}": whole(moments[key]["exp_avg"]) for key in ("experts.gate_up", "experts.down_bias")
    }


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize("name, kind", [("halves", "linear"), ("interleaved", "linear"), ("separate", "round_robin")])
def test_checkpoints_move_between_meshes(ranks: Pool, tmp_path: Any, name: str, kind: str) -> None:
    """Saved at 2 x 2, loaded at 4 x 1, 1 x 4, 2 x 2 and by one process; and back from 4 x 1 and from one process."""
    expected = wholes(make(name))
    expected |= {f"moment of experts.{key}": 0.1 * expected[f"experts.{key}"] for key in ("gate_up", "down_bias")}

    def compare(found: dict[str, np.ndarray]) -> None:
        for key, array in found.items():
            (np.testing.assert_allclose if "moment" in key else np.testing.assert_array_equal)(array, expected[key])

    first, second = str(tmp_path / "first"), str(tmp_path / "second")
    ranks.call(save, [(first, name, (2, 2), kind)] * 4)
    for shape in ((4, 1), (1, 4), (2, 2)):
        for found in ranks.call(load, [(first, name, shape, "linear")] * 4):
            assert found.keys() == expected.keys()
            compare(found)
    layer = MoE.from_spec(SPECS[name])
    state = {"layer": layer.state_dict()}
    dcp.load(state, checkpoint_id=first, no_dist=True)
    compare({key: tensor.numpy() for key, tensor in state["layer"].items()})
    ranks.call(save, [(second, name, (4, 1), "linear")] * 4)
    for found in ranks.call(load, [(second, name, (2, 2), kind)] * 4):
        compare(found)
    third = str(tmp_path / "third")
    dcp.save({"layer": make(name).state_dict()}, checkpoint_id=third, no_dist=True)
    for found in ranks.call(load_layer, [(third, name, (2, 2), kind)] * 4):
        compare(found)


def load_layer(group: Any, path: str, name: str, shape: tuple[int, int], kind: str) -> dict[str, np.ndarray]:
    """Of a checkpoint without an optimizer; then a whole state that every rank has."""
    layer = layer_on(group, name, shape, kind)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.zero_()
    state = {"layer": layer.state_dict()}
    dcp.load(state, checkpoint_id=path)
    layer.load_state_dict(state["layer"])
    return wholes(layer)


def load_own(group: Any, weights: LayerWeights, name: str, kind: str) -> list[dict[str, np.ndarray]]:
    """A layer loaded slice by slice, from its own storage and from another; one made from the weights; drawn ones."""
    mesh, found = mesh_of(2, 2), []
    for source in (weights, other_storage(weights)):
        layer = MoE.from_spec(SPECS[name], device="meta")
        parallelize(layer, over(mesh), placement=placement_of(kind, E, 2, 1))
        layer.to_empty(device="cpu").load_weights(source)
        found.append(wholes(layer))
    layer = MoE.from_weights(weights, expert_parallel=over(mesh))
    found.append(wholes(MoE.from_weights(layer.export_weights())))
    torch.manual_seed(3)
    found.append(wholes(MoE.from_spec(SPECS[name], expert_parallel=over(mesh))))
    return found


def other_storage(weights: LayerWeights) -> LayerWeights:
    other = {"halves": "interleaved", "interleaved": "separate", "separate": "halves"}
    storage = dataclasses.replace(weights.storage, gate_layout=other[weights.storage.gate_layout])
    return convert_weights(weights, storage)


@pytest.mark.parametrize("name, kind", [("halves", "linear"), ("interleaved", "round_robin"), ("separate", "linear")])
def test_weights_are_loaded_slice_by_slice(ranks: Pool, name: str, kind: str) -> None:
    layer = make(name)
    torch.manual_seed(3)
    drawn = wholes(MoE.from_spec(SPECS[name]))
    for loaded, converted, made, initial in ranks.call(load_own, [(layer.export_weights(), name, kind)] * 4):
        for key, array in wholes(layer).items():
            for found in (loaded, converted, made):
                np.testing.assert_array_equal(found[key], array, key)
            np.testing.assert_array_equal(initial[key], drawn[key], key)


def beside_fsdp(group: Any, name: str, shape: tuple[int, int, int]) -> dict[str, np.ndarray]:
    """Gradients on a mesh of three axes: experts over two and FSDP over one, all else over all. Means over ranks."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("efsdp", "ep", "tp"))
    parallel = over(mesh)
    layer = parallelize(make(name), parallel)
    fully_shard(layer.experts, mesh=mesh["efsdp"])
    fully_shard(layer, mesh=mesh._flatten("dp"))
    each = 4
    x, d_y = (array[mesh.get_rank() * each :][:each] for array in rows(mesh.size() * each))
    with running_on("reference"):
        torch.sum(layer(x) * d_y).backward()
    found = {}
    for key, parameter in layer.named_parameters():
        divisor = parallel.gradient_divisor if key.startswith("experts.") else 1
        found[key] = whole(parameter.grad) / divisor
    return found


@pytest.fixture(scope="module")
def eight() -> Any:
    pool = Pool(8)
    yield pool
    pool.close()


@pytest.mark.parametrize("shape", [(2, 1, 2), (2, 2, 2)])
def test_gradients_beside_fsdp_are_means(request: Any, shape: tuple[int, int, int]) -> None:
    count = int(np.prod(shape))
    pool = request.getfixturevalue("ranks" if count == 4 else "eight")
    found = pool.call(beside_fsdp, [("interleaved", shape)] * count)
    layer = make("interleaved")
    x, d_y = rows(count * 4)
    with running_on("reference"):
        (torch.sum(layer(x) * d_y) / count).backward()
    for key, parameter in layer.named_parameters():
        expected = whole(parameter.grad)
        for one in found:
            np.testing.assert_allclose(one[key], expected, 0, 1e-5 * np.abs(expected).max(), err_msg=key)


#: Schemes by meshes of ranks. One is of unlike axes, so that none is taken for the other.
QUANTISED = dict.fromkeys(("mxfp4_w4a16", "fp8_block", "int4_w4a16_zp", "int8_w8a16"), (2, 2)) | {"fp8_channel": (1, 4)}


def quantised(group: Any, weights: LayerWeights, kind: str, shape: tuple[int, int]) -> tuple[np.ndarray, Any]:
    mesh = mesh_of(*shape)
    layer = MoE.from_spec(weights.layer_spec(), device="meta", dtype=torch.bfloat16)
    parallelize(layer, over(mesh), placement=placement_of(kind, layer.spec.num_experts, shape[0], 1))
    layer.to_empty(device="cpu").load_weights(weights)
    own = weights_rows(weights)[mesh.get_rank() * 4 :][:4]
    with running_on("reference"), torch.no_grad():
        y = layer(own)
    with pytest.raises((InvalidInput, Unsupported)):
        layer.prepack_weights()
    return y.float().numpy(), layer.export_weights().named()


def weights_rows(weights: LayerWeights) -> torch.Tensor:
    width = weights.layer_spec().d_model
    return torch.randn(16, width, generator=torch.Generator().manual_seed(1)).bfloat16()


@pytest.mark.parametrize("scheme, kind", [*((one, "linear") for one in QUANTISED), ("mxfp4_w4a16", "round_robin")])
def test_quantised_experts_are_split_by_groups(ranks: Pool, scheme: str, kind: str) -> None:
    weights, _ = quantized_weights(scheme, d_ff=256)
    found = ranks.call(quantised, [(weights, kind, QUANTISED[scheme])] * 4)
    with running_on("reference"), torch.no_grad():
        expected = MoE.from_weights(weights)(weights_rows(weights)).float().numpy()
    y = np.concatenate([own for own, _ in found])
    # A part and a slot are rounded once each to bfloat16, and their sum once more. Scales of hidden rows are of slices.
    share = 2**-4 if scheme == "fp8_channel" else 2**-6
    np.testing.assert_allclose(y, expected, 0, share * np.abs(expected).max())
    for _, arrays in found:
        for key, array in weights.named().items():
            np.testing.assert_array_equal(arrays[key].view(np.uint8), array.view(np.uint8), key)


def wrong_on_one_rank(group: Any) -> tuple[str, str]:
    layer = parallelize(make("halves"), over(mesh_of(2, 2)))
    with running_on("reference"):
        layer(torch.ones(3, D))
        try:
            layer(torch.ones(3, D + (torch.distributed.get_rank(group) == 1)))
        except Exception as error:
            return type(error).__name__, str(error)
    return "", ""


def test_a_wrong_call_on_one_rank_is_known_on_both_axes(ranks: Pool) -> None:
    found = ranks.call(wrong_on_one_rank, [()] * 4)
    assert [kind for kind, _ in found] == ["PeerFailed", "InvalidInput", "PeerFailed", "PeerFailed"]
    assert found[0][1].startswith("rank 1 failed before the tensor axis of mode all_to_all")


def refusals(group: Any) -> list[tuple[str, str]]:
    mesh, found = mesh_of(2, 2), []
    four, other = mesh_of(1, 4), init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "ep"))
    narrow = dataclasses.replace(PLAIN, d_ff=9)
    mxfp4 = MoELayerSpec(2880, 2880, 4, 1, RouterSpec(1), ExpertsSpec(scheme=scheme_named("mxfp4_w4a16")))
    for spec, parallel in (
        (narrow, over(mesh)),
        (mxfp4, over(four)),
        (PLAIN, ExpertParallel(mesh["ep"], tensor=mesh["tp"].get_group())),
        (PLAIN, over(other)),
    ):
        try:
            parallelize(MoE.from_spec(spec, device="meta"), parallel)
        except (InvalidInput, Unsupported) as error:
            found.append((type(error).__name__, str(error)))
    layer: Any = parallelize(make("halves"), over(mesh))
    assert isinstance(layer.experts.gate_up, PlacedTensor)
    try:
        fully_shard(layer.experts, mesh=mesh["ep"])
    except Unsupported as error:
        found.append((type(error).__name__, str(error)))
    return found


def test_what_cannot_be_split_is_refused_on_every_rank(ranks: Pool) -> None:
    for found in ranks.call(refusals, [()] * 4):
        texts = (
            "tensor must have a number of ranks that divides d_ff = 9, got 2; use 3, 9 ranks",
            "tensor must leave whole groups of 32 of mxfp4 in experts.down on every rank, got d_ff / ranks = 2880 / 4",
            "parallel.mesh and parallel.tensor must be axes of one DeviceMesh, experts first",
            "parallel.mesh and parallel.tensor must be axes of one DeviceMesh, experts first",
            "",
        )
        assert [kind for kind, _ in found] == [
            "InvalidInput",
            "Unsupported",
            "InvalidInput",
            "InvalidInput",
            "Unsupported",
        ]
        for (_, message), text in zip(found, texts, strict=True):
            assert message.startswith(text), message
