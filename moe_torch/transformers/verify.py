"""Check a converted checkpoint in transformers: the half of `moe_core.checkpoint.convert.verify` with torch."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from moe_core.checkpoint import Checkpoint, layer_tensors
from moe_core.checkpoint.convert.source import LayerSource
from moe_core.checkpoint.storage import StackReader
from moe_core.errors import InvalidInput
from moe_core.formats import QuantizedTensor
from moe_core.layers import LayerWeights
from moe_core.ops.quantize.reference import dequantize

_TOKENS = 16
_LOST = ("missing_keys", "unexpected_keys")


def compare(source: Checkpoint, converted: Checkpoint) -> tuple[str, float | None, str]:
    """(`equal`, the relative error of the logits against the source's, why there is none).

    Raises InvalidInput for the first layer that differs, and if transformers loads the source but not the conversion,
    or misses keys that it does not miss there. It must load the conversion of a GGUF source whole.
    """
    wanted, reason = None, ""
    lost: dict[str, set[str]] = {kind: set() for kind in _LOST}
    try:
        model, report = _loaded(source)
        if source.index.is_gguf and report["missing_keys"]:
            raise ValueError(f"it leaves {sorted(report['missing_keys'])[0]} and others random")
        lost, wanted = {kind: set(report[kind]) for kind in _LOST}, _logits(model)
        del model
    except Exception as error:  # whatever a loader raises
        reason = f"transformers does not load the source: {type(error).__name__}: {error!s:.200}"
    try:
        model, report = _loaded(converted)
        # The first forward decompresses what is still packed.
        logits, state = _logits(model), model.state_dict()
    except Exception as error:
        if wanted is None and not source.index.is_gguf:
            return "", None, reason
        raise _parted(converted, f"{type(error).__name__}: {error!s:.400}") from error
    for kind in _LOST if wanted is not None or source.index.is_gguf else ():
        new = sorted(set(report[kind]) - lost[kind])
        if new:
            raise _parted(converted, f"{kind.replace('_', ' ')} such as {new[0]}")
    for number in converted.moe_layers:
        for name, ours in _experts(converted, number, state):
            if not np.array_equal(state[name].float().numpy(), ours, equal_nan=True):
                raise _parted(converted, f"other numbers in layer {number}: {name}")
    return "equal", None if wanted is None else float((logits - wanted).norm() / wanted.norm()), reason


def _parted(checkpoint: Checkpoint, what: str) -> InvalidInput:
    return InvalidInput(
        f"{checkpoint.path} must be loaded by transformers as it is by this library, got {what}; use loader='moebius' "
        "(--loader moebius) if only this library shall read it, and report the family"
    )


def _loaded(checkpoint: Checkpoint) -> tuple[Any, Any]:
    import transformers

    settings = checkpoint.document
    named = getattr(transformers, str(next(iter(settings.get("architectures") or ()), "")), None)
    made: Any = named if named is not None else transformers.AutoModelForCausalLM
    given: dict[str, Any] = {"dtype": "auto"}
    if checkpoint.index.is_gguf:
        plain = {key: value for key, value in settings.items() if key != "quantization_config"}
        given = {"config": transformers.AutoConfig.for_model(**plain), "dtype": plain.get("dtype") or "bfloat16"}
        given["gguf_file"] = min(checkpoint.index.files.values())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, report = made.from_pretrained(checkpoint.path, output_loading_info=True, **given)
    return model.eval(), report


def _experts(checkpoint: Checkpoint, number: int, state: Any) -> Iterator[tuple[str, np.ndarray]]:
    """(key of the state, our numbers) of a layer's experts."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        layer = checkpoint.layer(number, allow_bad_scales=True)
        layer = layer.dequantized(str(checkpoint.config.get("dtype") or "bfloat16"))
        plain = {key: value for key, value in checkpoint.document.items() if key != "quantization_config"}
        tensors = dict(layer_tensors(LayerWeights.from_checkpoint(layer), plain, number, storage="fused"))
    keys = {name: _key(state, name) for name in tensors if ".experts." in name or "_linear." in name}
    if any(keys.values()):
        yield from ((key, tensors[name]) for name, key in keys.items() if key is not None)
        return
    # Experts that transformers keeps one by one.
    with StackReader(checkpoint.index) as reader:
        experts = LayerSource(checkpoint, reader, number)
        for expert in range(layer.num_experts):
            for field, matrix in experts.matrices(expert).items():
                key = _key(state, f"{experts.block}experts.{expert}.{field}_proj.weight")
                if key is None:
                    raise _parted(checkpoint, f"no experts in layer {number}")
                yield key, dequantize(matrix, layer.dtype) if isinstance(matrix, QuantizedTensor) else matrix


def _key(state: Any, name: str) -> str | None:
    """The state's name of a tensor, which may lack or have `model.` in front."""
    return next((key for key in (name, f"model.{name}", name.removeprefix("model.")) if key in state), None)


def _logits(model: Any) -> torch.Tensor:
    vocabulary = model.get_input_embeddings().weight.shape[0]
    ids = torch.randint(3, vocabulary, (1, _TOKENS), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        result = model(input_ids=ids)
    return (result["logits"] if "logits" in result else result["last_hidden_state"]).float()
