"""Writing Hugging Face checkpoints: read back bit by bit, memory, refusals; transformers judges the files."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from moe_core import InvalidInput, Unsupported
from moe_core.checkpoint import (
    Checkpoint,
    WriteProgress,
    layer_tensors,
    open_checkpoint,
    other_tensors,
    save_checkpoint,
)
from moe_core.checkpoint.write import Shards
from moe_core.layers import HUGGING_FACE, MAXTEXT, LayerWeights, Storage, convert_weights
from tests.support.checkpoint_files import FAMILIES, MOE_LAYERS, config_of, write_family
from tests.support.paths import ROOT

STORAGES = [(family, "fused") for family in FAMILIES]
STORAGES += [(family, "per_expert") for family in FAMILIES if family != "gpt_oss"]
SOURCES = {
    "as read": None,
    "maxtext": MAXTEXT,
    "hugging face": HUGGING_FACE,
    "interleaved": Storage("in_out", "interleaved", "in_out"),
}


def weights_of(checkpoint: Checkpoint, storage: Storage | None = None) -> Iterator[tuple[int, LayerWeights]]:
    for number in checkpoint.moe_layers:
        weights = LayerWeights.from_checkpoint(checkpoint.layer(number))
        yield number, weights if storage is None else convert_weights(weights, storage)


def stored_tensors(checkpoint: Checkpoint) -> dict[str, np.ndarray]:
    return {
        name: array
        for file in sorted(set(checkpoint.index.files.values()))
        for name, array in load_file(checkpoint.path / file).items()
    }


def assert_same_tensors(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert set(found) == set(expected)
    for name, array in expected.items():
        assert found[name].dtype == array.dtype and found[name].shape == array.shape, name
        assert found[name].tobytes() == array.tobytes(), name


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(("family", "storage"), STORAGES)
def test_what_was_read_is_written_bit_by_bit(tmp_path, family, storage, dtype, source):
    path, layers = write_family(tmp_path / "read", family, storage, dtype)
    read = open_checkpoint(path)
    written = save_checkpoint(
        tmp_path / "written", config_of(family), weights_of(read, SOURCES[source]), storage=storage, shard_bytes=5000
    )
    assert len(set(written.index.files.values())) > 1
    expected = {name: array for one in layers.values() for name, array in one.stored.items()}
    # The correction bias is kept in float32, as the models compute with it.
    expected |= {name: value.astype(np.float32) for name, value in expected.items() if name.endswith("correction_bias")}
    assert_same_tensors(stored_tensors(written), expected)
    text = (written.path / "config.json").read_text()
    assert json.loads(text) == config_of(family) and text == json.dumps(json.loads(text), indent=2) + "\n"


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "gpt_oss"])
def test_storages_hold_the_same_layer(tmp_path, family):
    path, _ = write_family(tmp_path / "read", family)
    layers = [
        dict(weights_of(save_checkpoint(tmp_path / storage, path, weights_of(open_checkpoint(path)), storage=storage)))
        for storage in ("per_expert", "fused")
    ]
    for number in MOE_LAYERS[family]:
        one, other = (found[number].named() for found in layers)
        assert_same_tensors(one, other)


def test_a_shard_ends_before_the_tensor_that_does_not_fit(tmp_path):
    directory = tmp_path / "new" / "model"
    with Shards("path", directory, 100) as shards:
        shards.extend((name, np.zeros(size, np.uint8)) for name, size in (("a", 60), ("b", 60), ("c", 40), ("d", 1)))
        shards.finish({})
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    files = [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 2, 3)]
    assert index["weight_map"] == dict(zip("abcd", files, strict=True)) and index["metadata"]["total_size"] == 161


def test_tensors_that_do_not_change_are_not_copied(tmp_path):
    path, _ = write_family(tmp_path, "qwen3_moe")
    weights = LayerWeights.from_checkpoint(open_checkpoint(path).layer(1))
    for storage in ("fused", "per_expert"):
        for name, array in layer_tensors(weights, config_of("qwen3_moe"), 1, storage):
            owners = [weights.router.weight, weights.experts.gate_up, weights.experts.down]
            assert any(np.shares_memory(array, owner) for owner in owners), name


def test_layers_are_asked_for_one_at_a_time_and_progress_tells_every_shard(tmp_path):
    path, _ = write_family(tmp_path / "read", "mixtral")
    checkpoint, events = open_checkpoint(path), []

    def layers() -> Iterator[tuple[int, LayerWeights]]:
        for number, weights in weights_of(checkpoint):
            events.append(number)
            yield number, weights

    one_layer = sum(array.nbytes for array in next(weights_of(checkpoint))[1].named().values())
    save_checkpoint(tmp_path / "written", path, layers(), shard_bytes=one_layer, progress=events.append)
    assert [event if isinstance(event, int) else "shard" for event in events] == [0, "shard", 1, "shard", 2, "shard"]
    shards = [event for event in events if isinstance(event, WriteProgress)]
    assert [shard.bytes_written for shard in shards] == [one_layer, 2 * one_layer, 3 * one_layer]
    assert shards[-1].tensors == len(checkpoint.index.files)


def test_the_rest_of_a_model_is_carried_over(tmp_path):
    path, layers = write_family(tmp_path / "read", "deepseek_v3", shards=True)
    from safetensors.numpy import save_file

    rest = {"lm_head.weight": np.ones((4, 24), np.float32), "model.layers.0.mlp.gate_proj.weight": np.zeros((40, 24))}
    save_file(rest, path / "rest.safetensors")
    index = path / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"] |= dict.fromkeys(rest, "rest.safetensors")
    index.write_text(json.dumps(content))
    read = open_checkpoint(path)
    assert_same_tensors(dict(other_tensors(read)), rest)
    written = save_checkpoint(tmp_path / "written", path, weights_of(read), other_tensors=other_tensors(read))
    assert set(written.index.files) == set(rest) | {name for one in layers.values() for name in one.stored}
    assert set(written.index.files.values()) == {"model.safetensors"}


def _raising(*_: Any) -> None:
    raise RuntimeError("stop")


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        ({"layers": []}, InvalidInput, r"layers must give every MoE layer \(every layer\), got none for \[0, 1, 2\]"),
        ({"layers": "twice"}, InvalidInput, "got layer 0 again"),
        ({"layers": [(7, None)]}, InvalidInput, r"layer must be one with experts .* got 7"),
        ({"layers": [(0, {})]}, InvalidInput, "weights of layer 0 must be LayerWeights, got dict"),
        ({"storage": "shared"}, InvalidInput, "storage must be"),
        ({"shard_bytes": 0}, InvalidInput, "shard_bytes must be"),
        ({"progress": _raising, "shard_bytes": 1000}, RuntimeError, "stop"),
        ({"config": 3}, InvalidInput, "config must be a dict"),
        ({"config": config_of("mixtral", model_type="llama")}, Unsupported, "got 'llama'"),
        ({"config": config_of("mixtral", quantization_config={"quant_method": "fp8"})}, InvalidInput, "remove it"),
        ({"config": config_of("mixtral", num_experts_per_tok=3)}, InvalidInput, "must have top_k = 3 by config, got 2"),
        ({"config": config_of("mixtral", hidden_act="gelu")}, InvalidInput, "must have experts = "),
        ({"config": config_of("mixtral", dtype="float32")}, InvalidInput, "dtype of config must be bfloat16"),
        ({"config": config_of("mixtral", torch_dtype="torch.float16")}, InvalidInput, "got 'torch.float16'"),
        (
            {"other_tensors": [("model.layers.1.mlp.gate.weight", np.ones(3))] * 2},
            InvalidInput,
            "given once, got model",
        ),
    ],
)
def test_refusals_leave_nothing_behind(tmp_path, change, kind, message):
    path, _ = write_family(tmp_path / "read", "mixtral", "fused")
    checkpoint = open_checkpoint(path)
    arguments = {"config": config_of("mixtral"), "layers": weights_of(checkpoint), "storage": "fused"} | change
    if arguments["layers"] == "twice":
        arguments["layers"] = [next(weights_of(checkpoint))] * 2
    with pytest.raises(kind, match=message):
        save_checkpoint(tmp_path / "written", **arguments)
    assert not (tmp_path / "written").exists() or not list((tmp_path / "written").iterdir())


def test_more_refusals(tmp_path):
    path, _ = write_family(tmp_path, "gpt_oss", "fused")
    checkpoint = open_checkpoint(path)
    with pytest.raises(InvalidInput, match="path must be a new or empty directory"):
        save_checkpoint(path, config_of("gpt_oss"), weights_of(checkpoint), storage="fused")
    _, weights = next(weights_of(checkpoint))
    with pytest.raises(Unsupported, match=r"storage must be None or 'fused' for this family, .*; leave it out"):
        layer_tensors(weights, config_of("gpt_oss"), 0, "per_expert")
    # What the message says.
    written = {name for name, _ in layer_tensors(weights, config_of("gpt_oss"), 0)}
    assert written == {name for name in checkpoint.index.files if ".layers.0.mlp." in name}
    with pytest.raises(InvalidInput, match="must have router = "):
        layer_tensors(weights, config_of("mixtral"), 0)


MEMORY_SCRIPT = """
import resource, sys
import numpy as np
from moe_core.checkpoint import open_checkpoint, save_checkpoint
from moe_core.checkpoint.presets import layer_spec_from_config
from moe_core.checkpoint.write import Shards
from moe_core.layers import HUGGING_FACE, MAXTEXT, LayerWeights

path, source, storage = sys.argv[1:]
config = dict(model_type="mixtral", hidden_size=512, intermediate_size=2048, num_hidden_layers=1, hidden_act="silu",
              num_experts_per_tok=2, num_local_experts=16)
spec, layout = layer_spec_from_config(config), {"maxtext": MAXTEXT, "hugging_face": HUGGING_FACE}[source]
arrays = {one.name: np.ones(one.shape, np.float32) for one in spec.parameters(layout)}
weights = LayerWeights.from_named(arrays, spec.stored_as(layout), layout)
import safetensors.numpy

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

def anonymous():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("RssAnon")) * 1024

before, size = peak(), sum(array.nbytes for array in arrays.values())
assert size > 190 * 2**20
save_checkpoint(path + "/written", config, [(0, weights)], storage=storage, shard_bytes=32 * 2**20)
grown = [(peak() - before) / size]
del weights, arrays
# Pages mapped from the file are the kernel's cache; what the reader itself holds is anonymous memory.
before, most = anonymous(), 0
def watch(_):
    global most
    most = max(most, anonymous())
layer = open_checkpoint(path + "/written").layer(0, watch)
print(*grown, (most - before) / size)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="peak memory is read as Linux tells it")
@pytest.mark.parametrize(
    ("source", "storage", "most"),
    # A layer of 192 MiB; fused from MaxText, the largest tensor (two thirds of it) has to be made.
    [("hugging_face", "fused", 0.05), ("maxtext", "per_expert", 0.35), ("maxtext", "fused", 0.75)],
)
def test_memory_is_not_doubled(tmp_path, source, storage, most):
    done = subprocess.run(
        [sys.executable, "-c", MEMORY_SCRIPT, str(tmp_path), source, storage],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    written, read = map(float, done.stdout.split())
    assert written < most, f"writing needed {written:.2f} of the layer beside it"
    assert read < 1.05, f"reading needed {read:.2f} of the layer"


def test_both_import_orders_work():
    for first in ("moe_core.layers", "moe_core.checkpoint", "moe_core.checkpoint.presets", "moe_core.checkpoint.write"):
        imports = "from moe_core.checkpoint import save_checkpoint; from moe_core.checkpoint.families import FAMILIES"
        script = f"import {first}; {imports}"
        subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True, timeout=60)


#: Asked for by name: an import that fails because a dependency is missing must not look like an absent judge.
needs_judge = pytest.mark.skipif(
    any(find_spec(name) is None for name in ("torch", "transformers")), reason="the judge needs torch and transformers"
)


@needs_judge
@pytest.mark.parametrize(("family", "storage"), STORAGES)
def test_transformers_loads_what_we_write_and_gives_the_same_logits(tmp_path, family, storage):
    import torch

    from tests.support.families.judge import assert_same_state
    from tools.sweep import models

    model, ids = models.build(family), torch.arange(24).view(2, 12) % 16
    with torch.no_grad():
        expected = model(ids).logits
    model.save_pretrained(tmp_path / "read")
    read = open_checkpoint(tmp_path / "read")
    # Through MaxText's layouts and back, so that every permutation has been made.
    written = save_checkpoint(
        tmp_path / "written", model.config, weights_of(read, MAXTEXT), storage=storage,
        other_tensors=other_tensors(read), shard_bytes=20_000,
    )  # fmt: skip
    # The logits differ in the last bits with the alignment of the memory that weights were loaded to.
    back = assert_same_state(model, written.path)
    with torch.no_grad():
        torch.testing.assert_close(back(ids).logits, expected, rtol=1e-5, atol=1e-6)
