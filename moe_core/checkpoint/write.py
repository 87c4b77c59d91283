"""Write Hugging Face checkpoints from layers in any storage, by the readers' tables of names.

At most one shard and the next tensor are in memory beyond the caller's (safetensors before 0.8 copies a shard once
more). Only tensors whose layout changes are copied.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from moe_core.base import require_at_least, require_choice
from moe_core.base.files import file_writer, path_of, require_new, whole_file
from moe_core.checkpoint.config import settings_of
from moe_core.checkpoint.families import Architecture, architecture_of, text_model
from moe_core.checkpoint.layer import Checkpoint, open_checkpoint
from moe_core.checkpoint.stacks import layer_stacks, written_names
from moe_core.checkpoint.storage import Stack, read_tensor
from moe_core.errors import InvalidInput, Unsupported
from moe_core.layers.convert import WHOLE, Place, placements
from moe_core.layers.spec import FREE_FIELDS, MoELayerSpec, Storage, storage_of
from moe_core.layers.weights import LayerWeights

STORAGES = ("fused", "per_expert")
#: Largest bytes of a shard.
DEFAULT_SHARD_BYTES = 2**30
_METADATA = {"format": "pt"}
#: Options of training that change no result.
_SAME_RESULTS = ("recompute", "main_grad")


class WriteProgress(NamedTuple):
    """A shard has been written. file: its temporary name. tensors, bytes_written: so far."""

    file: str
    tensors: int
    bytes_written: int


def layer_tensors(
    weights: LayerWeights, config: Any, layer: int, storage: str | None = None
) -> Iterator[tuple[str, np.ndarray]]:
    """(name, row-major array) of every tensor of one MoE layer, made on demand.

    weights: in any storage. config: see `save_checkpoint`. storage: `fused` (`experts.gate_up_proj`, the names of
    transformers' `state_dict`) or `per_expert` (`experts.0.gate_proj.weight`), which gpt_oss and others do not have.
    None: the family's published one. dtypes are kept. Raises InvalidInput if weights, config and layer disagree,
    Unsupported for other families and storages. Warns of options, such as a capacity_factor, that no config has.
    """
    model = _model(config)
    model.require_storage(storage)
    model.require_layer(layer, weights)
    return _tensors(weights, model, layer, storage)


def other_tensors(checkpoint: Checkpoint) -> Iterator[tuple[str, np.ndarray]]:
    """(name, array) of every tensor outside a checkpoint's layers (quantised: outside the blocks), one at a time."""
    parts = (stack.parts for layer in checkpoint.moe_layers for stack in checkpoint.stacks(layer).values())
    held = {part.tensor for some in parts for part in some}
    blocks = () if checkpoint.quantization is None else tuple(map(checkpoint.block, checkpoint.moe_layers))
    names = [name for name in checkpoint.index.files if name not in held and not name.startswith(blocks)]
    for name, tensors in checkpoint.index.opened(names):
        yield name, read_tensor(tensors, name)


def save_checkpoint(
    path: str | os.PathLike[str],
    config: Any,
    layers: Iterable[tuple[int, LayerWeights]],
    *,
    storage: str | None = None,
    other_tensors: Iterable[tuple[str, np.ndarray]] = (),
    shard_bytes: int = DEFAULT_SHARD_BYTES,
    progress: Callable[[WriteProgress], object] | None = None,
) -> Checkpoint:
    """Write a checkpoint directory that `open_checkpoint` and transformers read, and return it opened.

    After an error no file is left.

    Args:
        path: a new or empty directory.
        config: a dict, a transformers config (anything with `to_dict`) or a path to a config.json or its directory,
            written as it is.
        layers: (number, weights) of every MoE layer, in any order and storage.
        storage: see `layer_tensors`.
        other_tensors: (name, array) of the rest of the model, such as `other_tensors(source)`. Without them only the
            MoE layers can be read back.
        progress: called after every shard.

    Raises InvalidInput for a directory with content, layers that are missing, repeated or of another model, duplicate
    names, and a config with another dtype than the weights; Unsupported for other families and without safetensors.
    Warns as `layer_tensors` does.
    """
    model = _model(config)
    model.require_storage(storage)
    require_at_least("shard_bytes", shard_bytes, 1)
    with Shards("path", path, shard_bytes, progress) as shards:
        seen: set[int] = set()
        for layer, weights in layers:
            model.require_layer(layer, weights)
            model.require_dtype(layer, weights)
            if layer in seen:
                raise InvalidInput(f"layers must give every layer once, got layer {layer} again; leave it out")
            seen.add(layer)
            shards.extend(_tensors(weights, model, layer, storage))
        missing = sorted(set(model.architecture.moe_layers) - seen)
        if missing:
            raise InvalidInput(
                f"layers must give every MoE layer ({model.architecture.moe_layers_rule}), got none for {missing}; "
                "add them or correct config"
            )
        shards.extend(other_tensors)
        shards.finish(model.settings)
    return open_checkpoint(path)


def _model(config: Any) -> _Model:
    settings = settings_of(config)
    model = text_model(settings)
    if model.quantization:
        raise InvalidInput(
            "config must have no quantization_config, got one; weights are written dequantised, so remove it"
        )
    architecture = architecture_of(model)
    return _Model(settings, architecture, model.nested)


@dataclass(frozen=True)
class _Model:
    settings: Mapping[str, Any]
    architecture: Architecture
    nested: tuple[str, ...]

    @property
    def storage(self) -> Storage:
        return storage_of(self.architecture.spec)

    def require_storage(self, storage: str | None) -> None:
        if storage is not None:
            require_choice("storage", storage, STORAGES)
        if storage == "per_expert" and self.architecture.naming.per_expert is None:
            raise Unsupported(
                "storage must be None or 'fused' for this family, which has no per-expert storage, got 'per_expert'; "
                "leave it out"
            )

    def require_layer(self, layer: int, weights: LayerWeights) -> None:
        architecture = self.architecture
        architecture.require_layer(layer)
        if not isinstance(weights, LayerWeights):
            raise InvalidInput(
                f"weights of layer {layer} must be LayerWeights, got {type(weights).__name__}; use "
                "LayerWeights.from_checkpoint or a layer's export_weights"
            )
        specs = (architecture.layer_spec(layer), weights.layer_spec())
        wanted, provided = (spec.stored_as(self.storage) for spec in specs)
        for name in [field.name for field in dataclasses.fields(MoELayerSpec) if field.name not in FREE_FIELDS]:
            mine, theirs = getattr(wanted, name), getattr(provided, name)
            if mine != theirs:
                raise InvalidInput(
                    f"weights of layer {layer} must have {name} = {mine} by config, got {theirs}; pass the "
                    "config that belongs to the weights"
                )
        names = [name for name in FREE_FIELDS if name not in _SAME_RESULTS]
        lost = [name for name in names if getattr(wanted, name) != getattr(provided, name)]
        if lost:
            listed = ", ".join(f"{name}={getattr(provided, name)}" for name in lost)
            warnings.warn(
                f"config.json has no entry for {listed}, which the layers have: layers read from the files compute "
                "without",
                stacklevel=3,
            )

    def require_dtype(self, layer: int, weights: LayerWeights) -> None:
        """transformers would round silently to the dtype in config."""
        named = self.settings.get("dtype") or self.settings.get("torch_dtype") or weights.dtype
        if str(named).removeprefix("torch.") != weights.dtype:
            raise InvalidInput(
                f"dtype of config must be {weights.dtype}, that of layer {layer}'s weights, got {named!r}; correct it "
                "or cast the weights"
            )


def _tensors(weights: LayerWeights, model: _Model, layer: int, storage: str | None) -> Iterator[tuple[str, np.ndarray]]:
    names = written_names(model.architecture, layer, storage, model.nested)
    source = _Source(weights, model.storage)
    for field, stack in layer_stacks(model.architecture, names).items():
        yield from source.tensors(field.replace("shared.", "shared_experts."), stack)


class _Source:
    def __init__(self, weights: LayerWeights, storage: Storage) -> None:
        self._views: dict[str, list[tuple[Place, np.ndarray]]] = {}
        for name, place, view in placements(weights, storage):
            self._views.setdefault(name, []).append((place, view))

    def tensors(self, name: str, stack: Stack) -> Iterator[tuple[str, np.ndarray]]:
        """Per-expert storage makes one expert's matrix at a time."""
        expert, array = None, np.empty(0)
        for part in stack.parts:
            lead = part.place[:1] if part.place and isinstance(part.place[0], int) else ()
            if lead != expert:
                expert, array = lead, self._array(name, stack.shape[len(lead) :], lead)
            values = array[part.place[len(lead) :]]
            values = np.asarray(values if part.encode is None else part.encode(values), order="C")
            yield part.tensor, values.reshape(part.shape)

    def _array(self, name: str, shape: tuple[int, ...], lead: tuple[Any, ...]) -> np.ndarray:
        """A view if nothing moves."""
        views = [(place, view[lead]) for place, view in self._views[name]]
        if views[0][0] == WHOLE:
            return views[0][1]
        array = np.empty(shape, views[0][1].dtype)
        for place, view in views:
            array[place] = view
        return array


class Shards:
    """Write a file whenever a shard is full. A context manager that leaves no file after an error."""

    def __init__(self, name: str, path: str | os.PathLike[str], shard_bytes: int, progress: Any = None) -> None:
        directory = path_of(path, name)
        require_new(name, directory)
        directory.mkdir(parents=True, exist_ok=True)
        self._save_file = file_writer(".safetensors files")
        self._directory, self._limit, self._progress = directory, shard_bytes, progress
        self._pending: dict[str, np.ndarray] = {}
        self._pending_bytes = self._bytes = 0
        self._weight_map: dict[str, str] = {}
        self.files: list[str] = []

    def extend(self, tensors: Iterable[tuple[str, np.ndarray]]) -> None:
        for name, array in tensors:
            if name in self._weight_map:
                raise InvalidInput(f"every tensor must be given once, got {name} again; leave it out of other_tensors")
            if self._pending and self._pending_bytes + array.nbytes > self._limit:
                self._write()
            self._weight_map[name] = ""
            self._pending[name] = np.asarray(array, order="C")
            self._pending_bytes += array.nbytes
            del array
            if self._pending_bytes >= self._limit:
                self._write()

    def _write(self) -> None:
        file = f"model-{len(self.files) + 1:05}.safetensors"
        self.files.append(file)
        self._save_file(self._pending, self._directory / file, _METADATA)
        self._weight_map |= dict.fromkeys(self._pending, file)
        self._bytes, self._pending_bytes = self._bytes + self._pending_bytes, 0
        self._pending.clear()
        if self._progress is not None:
            written = sum(file != "" for file in self._weight_map.values())
            self._progress(WriteProgress(file, written, self._bytes))

    def finish(self, settings: Mapping[str, Any], side_files: Iterable[Path] = ()) -> None:
        """config.json is written last: a killed process leaves no directory that looks like a checkpoint."""
        if self._pending:
            self._write()
        count = len(self.files)
        names = {file: f"{Path(file).stem}-of-{count:05}.safetensors" for file in self.files}
        if count == 1:
            names[self.files[0]] = "model.safetensors"
        self.files += names.values()
        for file, name in names.items():
            (self._directory / file).rename(self._directory / name)
        if count > 1:
            weight_map = {name: names[file] for name, file in self._weight_map.items()}
            index = {"metadata": {"total_size": self._bytes}, "weight_map": weight_map}
            self._write_json("model.safetensors.index.json", index)
        for file in side_files:
            with self._whole(file.name) as partial:
                shutil.copyfile(file, partial)
        self._write_json("config.json", dict(settings))

    def _write_json(self, name: str, content: Mapping[str, Any]) -> None:
        with self._whole(name) as partial:
            partial.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")

    def _whole(self, name: str) -> contextlib.AbstractContextManager[Path]:
        self.files.append(name)
        return whole_file(self._directory / name)

    def __enter__(self) -> Shards:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        for file in self.files if kind is not None else ():
            with contextlib.suppress(FileNotFoundError):
                (self._directory / file).unlink()
