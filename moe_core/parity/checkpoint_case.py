"""A case from one layer of a Hugging Face checkpoint."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from moe_core.base import dtypes
from moe_core.checkpoint import MoELayer, ReadProgress, load_hidden_states, open_checkpoint
from moe_core.checkpoint.quantized import plain_bundle
from moe_core.errors import InvalidInput, Unsupported
from moe_core.formats import QuantizedTensor
from moe_core.parity.case import Case, token_count

QUANTIZED_DTYPE = "bfloat16"
#: Enough to visit many experts, few for an interpreter.
DEFAULT_TOKENS = 16


@dataclass(frozen=True)
class CheckpointInput:
    """The parts of a checkpoint directory to compare.

    layer: None: the first MoE layer. hidden_states: a .npy or .safetensors file `[T, d_model]`. None: standard normal
    draws from `seed`. num_tokens: tokens to draw, or to keep of the file. dtype: of the input and plain weights. None:
    as stored, for quantised checkpoints bfloat16. Quantised experts meet activations in their scheme's format;
    dequantize: turn them into plain weights first. Quantised shared experts are always dequantised, because no op takes
    them.
    """

    directory: str | os.PathLike[str]
    layer: int | None = None
    hidden_states: str | os.PathLike[str] | None = None
    num_tokens: int | None = None
    seed: int = 0
    dtype: str | None = None
    dequantize: bool = False


def checkpoint_case(source: CheckpointInput, progress: Callable[[ReadProgress], object] | None = None) -> Case:
    checkpoint = open_checkpoint(source.directory)
    number = source.layer
    if number is None:
        if not checkpoint.moe_layers:
            raise InvalidInput(f"{source.directory} must have layers with experts, got none; choose another checkpoint")
        number = checkpoint.moe_layers[0]
    layer = checkpoint.layer(number, progress)
    has_table = getattr(layer.router, "table", None) is not None
    mixes = getattr(layer.router, "sparse_mixer", None) is not None
    if has_table or mixes or layer.before is not None or layer.output is not None:
        kind = "a latent width" if layer.before is not None else "a norm, scale or bias of its output"
        kind = "a table of ids" if has_table else "a router by SparseMixer" if mixes else kind
        raise Unsupported(
            f"layer {number} of {source.directory} has {kind}, which no engine compares; compare the layer with the "
            "model's own block instead, as MoE.from_block makes it"
        )
    storage, dtype = "", source.dtype or layer.dtype
    if layer.scheme is not None:
        storage, dtype = f"; weights stored in {layer.scheme.weights.name}", source.dtype or QUANTIZED_DTYPE
        if source.dequantize:
            storage, layer = f"{storage}, dequantised to {dtype} on load", layer.dequantized(dtype)
        else:
            layer = _as_stored(layer, dtype)
    elif source.dequantize:
        raise InvalidInput(f"dequantize must be False for a plain checkpoint, got True for {source.directory}; omit it")
    if source.dtype is not None:
        layer = _cast_weights(layer, source.dtype)
    x, origin = _hidden_states(source, layer.d_model)
    name, description = f"{layer.family} layer {number}", f"{source.directory}{storage}; hidden states {origin}"
    x = x.astype(dtypes.numpy_dtype(dtype), copy=False)
    return Case(name, description, x, layer.experts, layer.router, layer.spec, layer.shared)


def _as_stored(layer: MoELayer, dtype: str) -> MoELayer:
    assert layer.scheme is not None
    experts = plain_bundle(layer.experts, dtype, lambda _, array: _is_plain(_, array) and array.dtype.name != "float32")
    shared = None if layer.shared is None else plain_bundle(layer.shared, dtype)
    spec = dataclasses.replace(layer.spec, activations=layer.scheme.activations)
    return dataclasses.replace(layer, spec=spec, experts=experts, shared=shared)


def _cast_weights(layer: MoELayer, dtype: str) -> MoELayer:
    """Cast plain weights. The correction bias is always fp32."""
    bundles = {"experts": layer.experts, "router": layer.router, "shared": layer.shared}
    present = {name: bundle for name, bundle in bundles.items() if bundle is not None}
    cast = {name: plain_bundle(bundle, dtype, _is_plain) for name, bundle in present.items()}
    cast["router"] = dataclasses.replace(cast["router"], correction_bias=layer.router.correction_bias)
    return dataclasses.replace(layer, **cast)


def _is_plain(name: str, array: Any) -> bool:
    return not isinstance(array, QuantizedTensor)


def _hidden_states(source: CheckpointInput, d_model: int) -> tuple[np.ndarray, str]:
    num_tokens = token_count(source.num_tokens, DEFAULT_TOKENS)
    if source.hidden_states is not None:
        x = load_hidden_states(source.hidden_states, d_model)
        return x[: source.num_tokens], f"from {source.hidden_states}"
    random = np.random.default_rng(source.seed)
    return random.standard_normal((num_tokens, d_model), dtype=np.float32), f"drawn with seed {source.seed}"


def print_progress(progress: ReadProgress) -> None:
    share = progress.bytes_read / max(progress.bytes_total, 1)
    end = "\n" if progress.bytes_read >= progress.bytes_total else "\r"
    print(f"moe-parity: reading {progress.bytes_total / 2**20:.0f} MiB: {share:4.0%}", end=end, file=sys.stderr)
