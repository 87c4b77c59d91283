"""Files of models with `MoE.from_block` layers: transformers, our readers and the layers take each other's."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

transformers = pytest.importorskip("transformers", reason="the blocks are those of transformers")

from safetensors.torch import save_file
from torch.distributed.device_mesh import init_device_mesh

from moe_core.checkpoint import open_checkpoint
from moe_core.layers import LayerWeights, convert_weights
from moe_torch import MoE
from tests.support.families import ROWS, tiny
from tests.support.torch import require_equal
from tools.sweep import models


def with_layers(model: Any) -> dict[str, MoE]:
    """Layers in the places of a model's blocks, which are trained by a step: every array changes."""
    layers = {path: MoE.from_block(block, model.config) for path, block in models.moe_blocks(model).items()}
    generator = torch.Generator().manual_seed(5)
    for path, layer in layers.items():
        for name, array in [*layer.named_parameters(), *layer.named_buffers()]:
            with torch.no_grad():
                step = 0.1 * torch.randn(array.shape, generator=generator)
                array.copy_(torch.flip(array, (0,)) if "table" in name else array + step)
        model.set_submodule(path, layer)
    return layers


@pytest.mark.parametrize("row", [row for row in ROWS if row in models.families()])
def test_a_trained_model_saves_reloads_and_publishes(tmp_path: Path, row: str) -> None:
    family, changes = ROWS[row]
    model = tiny(family, **changes)
    if any(map(models.is_decoder, models.moe_blocks(model).values())):
        pytest.skip("the block is a whole decoder layer, in whose place no layer stands")
    untrained = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    layers = with_layers(model)
    state = model.state_dict()
    assert {name: (tensor.shape, tensor.dtype) for name, tensor in state.items()} == {
        name: (tensor.shape, tensor.dtype) for name, tensor in untrained.items()
    }
    trained = [name for name in state if name.startswith(tuple(f"{path}." for path in layers))]
    assert trained and not [name for name in trained if torch.equal(state[name], untrained[name])]
    # Writers of files take views of one storage for tied weights.
    assert len({state[name].untyped_storage().data_ptr() for name in trained}) == len(trained)
    save_file({name: state[name] for name in trained}, tmp_path / "state.safetensors")

    path = tmp_path / "model"
    model.save_pretrained(path)
    back, report = type(model).from_pretrained(path, output_loading_info=True, dtype="float32")
    assert not report["missing_keys"] and not report["unexpected_keys"], report
    for name, tensor in back.state_dict().items():
        require_equal(tensor, state[name], name)
    checkpoint = open_checkpoint(path)
    for number, layer in zip(checkpoint.moe_layers, layers.values(), strict=True):
        read = LayerWeights.from_checkpoint(checkpoint.layer(number))
        # Granite's shared experts stand beside the block.
        read = read if layer.shared_experts is not None else dataclasses.replace(read, shared=None)
        for name, array in convert_weights(read, layer.storage).named().items():
            np.testing.assert_array_equal(array, layer.export_weights().named()[name], err_msg=name)
    arrays = {
        path: {name: array.clone() for name, array in layer.state_dict().items()} for path, layer in layers.items()
    }
    model.load_state_dict(untrained)
    assert not any(torch.equal(one.experts.down, arrays[path]["experts.down"]) for path, one in layers.items())
    model.load_state_dict(back.state_dict())
    for path, layer in layers.items():
        for name, array in layer.state_dict().items():
            require_equal(array, arrays[path][name], f"{path} {name}")


def test_a_layer_alone_and_copies_of_it(tmp_path: Path) -> None:
    model = tiny("qwen2_moe")
    path, layer = next(iter(with_layers(model).items()))
    plain = MoE.from_spec(layer.spec)
    plain.load_state_dict(layer.state_dict())
    assert "experts.gate_up" in plain.state_dict() and f"{path}.experts.gate_up_proj" in model.state_dict()
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert other.state_dict().keys() == model.state_dict().keys()
    # Names of the layer, as in files that were saved before, are read, too.
    named = {f"{path}.{name}": tensor + 1 for name, tensor in layer.state_dict().items()}
    rest = {name: tensor for name, tensor in model.state_dict().items() if not name.startswith(f"{path}.")}
    model.load_state_dict(named | rest)
    require_equal(layer.experts.down, named[f"{path}.experts.down"], "the layer's names")


def test_arrays_that_do_not_fit_are_named() -> None:
    model = tiny("qwen2_moe")
    with_layers(model)
    state = model.state_dict()
    name = next(name for name in state if name.endswith("shared_expert.up_proj.weight"))
    with pytest.raises(RuntimeError, match=rf"{name} must be \[16, 32\], got \[15, 32\]; load the state of this model"):
        model.load_state_dict({**state, name: state[name][:-1]}, strict=False)
    del state[name]
    with pytest.raises(RuntimeError, match=r"Missing key.*shared_expert.up_proj"):
        model.load_state_dict(state)
    # One of two tensors, as a shard of a file holds it.
    gate, before = name.replace("up_proj", "gate_proj"), model.state_dict()
    report = model.load_state_dict({gate: before[gate] + 1}, strict=False)
    assert name in report.missing_keys and not report.unexpected_keys
    require_equal(model.state_dict()[gate], before[gate] + 1, gate)
    require_equal(model.state_dict()[name], before[name], name)
    with pytest.raises(RuntimeError, match=r"must be in one state for a layer on meta, got .*gate_proj.*; load them"):
        model.to("meta").load_state_dict({gate: before[gate]}, strict=False, assign=True)


@pytest.fixture
def process_group() -> Iterator[None]:
    distributed: Any = torch.distributed
    distributed.init_process_group("gloo", rank=0, world_size=1, store=distributed.HashStore())
    yield
    distributed.destroy_process_group()


@pytest.mark.parametrize("family", ["qwen2_moe", "gpt_oss"])
@pytest.mark.parametrize("names", ["block", "layer"])
@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.usefixtures("process_group")
def test_distributed_checkpoints_have_the_names(family: str, names: str, sharded: bool) -> None:
    """`torch.distributed.checkpoint` looks a name up in the modules, and shards whole tensors by the layer's names."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict

    model, wanted = tiny(family), set(tiny(family).state_dict())
    for layer in with_layers(model).values():
        layer.block_arrays = layer.block_arrays if names == "block" else ()
    if sharded:
        torch.distributed.fsdp.fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    options = StateDictOptions(full_state_dict=True)
    state: Any = {name: one.clone() for name, one in get_model_state_dict(model, options=options).items()}
    assert (set(state) == wanted) == (names == "block")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    report = set_model_state_dict(model, dict(state), options=options)
    assert not report.missing_keys and not report.unexpected_keys
    for name, tensor in get_model_state_dict(model, options=options).items():
        require_equal(tensor, state[name], name)
