"""The judge of families: transformers' own blocks and files, beside the layers that we read from them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.numpy import load_file

from moe_core.checkpoint import Checkpoint, MoELayer, open_checkpoint
from moe_core.layers import LayerWeights
from moe_core.parity.tolerance import assert_close
from tests.support.layer_reference import layer_stages
from tests.support.layers import tolerances
from tests.support.torch import to_numpy
from tools.sweep import models
from tools.sweep.measure import block_run


class Verdict(NamedTuple):
    """What transformers' block gives: ids, sorted by token (None where its experts are told none), and the output."""

    ids: np.ndarray | None
    output: np.ndarray


def block_of(model: Any, layer: int) -> tuple[Any, Any]:
    """(transformers' MoE block of a layer, the decoder layer around it)."""
    for path, block in models.moe_blocks(model).items():
        if f"layers.{layer}." in f"{path}." or f"blocks.{layer}." in f"{path}.":
            return block, model.get_submodule(path.rpartition(".")[0])
    raise AssertionError(f"layer {layer} has no block, only {list(models.moe_blocks(model))}")


def judge(model: Any, layer: int, x: Any) -> Verdict:
    block, around = block_of(model, layer)
    with torch.no_grad():
        output, ids = block_run(block, x[None])
        # Granite's shared experts stand beside the block.
        output = output + (around.shared_mlp(x[None]) if getattr(around, "shared_mlp", None) is not None else 0)
    return Verdict(None if ids is None else np.sort(to_numpy(ids), axis=1), to_numpy(output).reshape(x.shape))


def hidden_states(tokens: int = 24) -> Any:
    return torch.randn((tokens, models.D), generator=torch.Generator().manual_seed(2))


def saved(model: Any, path: Path, *, published: bool = True) -> Checkpoint:
    model.save_pretrained(path, save_original_format=published)
    return open_checkpoint(path)


def weights_of(checkpoint: Checkpoint) -> list[tuple[int, LayerWeights]]:
    return [(number, LayerWeights.from_checkpoint(checkpoint.layer(number))) for number in checkpoint.moe_layers]


def tensors_of(path: Path) -> dict[str, bytes]:
    """Names without the `model.` that a model without a head leaves out, and bits."""
    tensors = [item for file in path.glob("*.safetensors") for item in load_file(file).items()]
    return {name.removeprefix("model."): array.tobytes() for name, array in tensors}


def assert_same_layer(layer: MoELayer, verdict: Verdict, label: str) -> None:
    x = to_numpy(hidden_states())
    tokens = None
    if getattr(layer.router, "table", None) is not None:
        tokens = to_numpy(models.ids_of(hidden_states()[None])).ravel()
    stages = layer_stages(LayerWeights.from_checkpoint(layer), x, input_ids=tokens)
    if verdict.ids is not None:
        np.testing.assert_array_equal(np.sort(stages["ids"], axis=1), verdict.ids, err_msg=label)
    allowed = tolerances(LayerWeights.from_checkpoint(layer).layer_spec(), "float32")["output"]
    assert_close(stages["output"], verdict.output, allowed, f"{label} output")


def loaded(model: Any, path: Path, dtype: Any = "float32", **options: Any) -> Any:
    """transformers' model of the files. Raises AssertionError for keys that it misses or does not use."""
    back, report = type(model).from_pretrained(path, output_loading_info=True, dtype=dtype, **options)
    lost = {name: sorted(report[name])[:3] for name in ("missing_keys", "unexpected_keys") if report[name]}
    assert not lost, f"transformers leaves keys: {lost}"
    return back.eval()


def assert_same_state(model: Any, path: Path) -> Any:
    """transformers reads the files at `path` as the bits of `model`, and misses nothing. Returns what it reads."""
    back = loaded(model, path)
    state, found = model.state_dict(), back.state_dict()
    assert state.keys() == found.keys()
    different = [name for name, tensor in state.items() if not torch.equal(tensor, found[name])]
    assert not different, different
    return back
