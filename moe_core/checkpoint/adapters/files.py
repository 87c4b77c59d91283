"""Read and write adapters of experts."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from moe_core.base.checks import require_choice, require_kind
from moe_core.base.files import file_writer, open_file, path_of, whole_file
from moe_core.checkpoint.adapters.form import Adapter, AdapterBase, ExpertAdapter
from moe_core.checkpoint.adapters.merge import verify_adapter
from moe_core.checkpoint.adapters.packings import (
    PACKINGS,
    VERSIONS,
    pack,
    pack_router,
    packing_of,
    target_names,
    unpack,
)
from moe_core.checkpoint.adapters.settings import Settings
from moe_core.checkpoint.config import inside, read_json
from moe_core.checkpoint.storage import read_tensor
from moe_core.errors import InvalidInput, Unsupported
from moe_core.layers.weights import LayerWeights

_TENSORS, _SETTINGS = "adapter_model.safetensors", "adapter_config.json"
_KEY = "packing"


def read_adapter(
    source: str | os.PathLike[str] | Mapping[str, np.ndarray],
    base: Any,
    *,
    packing: str | None = None,
    settings: Mapping[str, Any] | None = None,
    others: bool = False,
    verify: Mapping[int | str, tuple[LayerWeights, LayerWeights]] | None = None,
) -> Adapter:
    """The adapter of a model's experts, in the canonical form `[E, in, R]` and `[E, R, out]`.

    Args:
        source: a directory with adapter_model.safetensors and adapter_config.json, or (name, array) pairs.
        base: the base model's config, as `layer_spec_from_config` takes it, or the `MoELayerSpec` of our layers.
        packing: one of `PACKINGS`. None: the one that the file's metadata name, or else PEFT's, by the peft_version in
            the settings. It is never guessed from shapes.
        settings: adapter_config.json, needed with arrays alone. For qwix `{"r": rank, "lora_alpha": alpha}`.
        others: keep tensors of other modules, such as attention, in `Adapter.others`. False: they raise.
        verify: layer -> (weights of the base, weights that another library merged), compared as by `verify_adapter`.

    Raises InvalidInput for an unnamed packing, unused tensors and shapes that contradict base. Raises Unsupported for
    settings that no reader here follows, such as DoRA.
    """
    tensors, metadata, stored = _opened(source)
    if settings is None:
        settings = stored
    if settings is None:
        raise InvalidInput(f"settings must be the content of {_SETTINGS}, got None; pass it beside arrays")
    require_kind("settings", settings, Mapping)
    parsed, sizes = Settings(settings), AdapterBase.of(base)
    packing = _packing(packing, metadata.get(_KEY), parsed)
    layers, names, used = unpack(tensors, packing, parsed, sizes)
    rest = {name: array for name, array in tensors.items() if name not in used}
    if not layers:
        raise InvalidInput(
            f"the adapter must have factors of experts in the packing {packing}, got {len(rest)} other tensors "
            f"({', '.join(sorted(rest)[:3])}, ...); correct packing or target_parameters"
        )
    if rest and not others:
        raise InvalidInput(
            f"every tensor of the adapter must be of the experts in the packing {packing}, got {len(rest)} others, "
            f"such as {', '.join(sorted(rest)[:3])}; pass others=True to keep them aside, or correct packing"
        )
    adapter = Adapter(sizes, layers, dict(settings), packing, names, rest)
    for layer, (before, after) in (verify or {}).items():
        verify_adapter(adapter, layer, before, after)
    return adapter


def _opened(source: Any) -> tuple[Mapping[str, np.ndarray], Mapping[str, str], Mapping[str, Any] | None]:
    if isinstance(source, Mapping):
        return source, {}, None
    path = path_of(source, "source")
    directory, name = (path, _TENSORS) if path.is_dir() else (path.parent, path.name)
    file = inside(directory, name)
    if not name.endswith(".safetensors") or not file.exists():
        present = sorted(one.name for one in directory.iterdir())[:8] if directory.is_dir() else []
        raise InvalidInput(
            f"source must be a directory with {_TENSORS}, or a .safetensors file, got {path} among "
            f"{', '.join(present)}; save the adapter as safetensors"
        )
    with open_file(file) as opened:
        tensors = {key: read_tensor(opened, key) for key in opened.entries}
        metadata = opened.metadata()
    settings = inside(directory, _SETTINGS)
    return tensors, metadata, read_json(settings) if settings.exists() else None


def _packing(packing: str | None, written: str | None, settings: Settings) -> str:
    for name, value in (("packing", packing), ("the file's packing", written)):
        if value is not None:
            require_choice(name, value, tuple(PACKINGS))
    if packing is not None and written is not None and PACKINGS[packing] != PACKINGS[written]:
        raise InvalidInput(f"packing must be {written}, which the file's metadata name, got {packing}; leave it out")
    if packing is not None or written is not None:
        return packing or written or ""
    by_version = packing_of(settings)
    if by_version is None or not settings.target_parameters:
        raise InvalidInput(
            f"packing must be named where neither the file nor peft_version with target_parameters names it, got None; "
            f"name one of {', '.join(PACKINGS)}"
        )
    return by_version


def write_adapter(path: str | os.PathLike[str], adapter: Adapter, *, packing: str = "peft") -> None:
    """Write adapter_model.safetensors and adapter_config.json into a new or empty directory.

    In the packing `peft` the file has the bytes of PEFT's own. In others its metadata name the packing. Tensors in
    `adapter.others` are written unchanged, in the packings of PEFT and vLLM alone. Settings are kept where ranks are,
    and else written anew.

    Raises Unsupported for scales or ranks that the packing cannot hold.
    """
    require_choice("packing", packing, tuple(PACKINGS))
    require_kind("adapter", adapter, Adapter)
    directory = path_of(path)
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise InvalidInput(f"path must be a new or empty directory, got {directory}; name another")
    form = PACKINGS[packing]
    if adapter.others and form.kind == "qwix":
        raise Unsupported(f"tensors of other modules have no names in qwix, got {len(adapter.others)}; leave them out")
    layers = dict(adapter.layers)
    same = form.kind == PACKINGS[adapter.packing].kind == "parameters" and bool(adapter.settings)
    if not same:
        layers, settings = _anew(adapter, packing)
    else:
        settings = dict(adapter.settings)
        written = packing_of(Settings(settings))
        if written is None or PACKINGS[written].swapped != form.swapped:
            settings["peft_version"] = _version(packing)
    tensors = dict(adapter.others)
    for name, layer in layers.items():
        tensors |= pack(name, layer, packing, adapter.base)
        tensors |= pack_router(name, layer.router, adapter.names.get("router", "gate"), packing)
    save = file_writer(".safetensors files")
    metadata = {"format": "pt"} | ({} if packing == "peft" else {_KEY: packing})
    directory.mkdir(parents=True, exist_ok=True)
    save(tensors, directory / _TENSORS, metadata)
    with whole_file(directory / _SETTINGS) as partial:
        partial.write_text(json.dumps(settings, indent=2, sort_keys=True), encoding="utf-8")


def _anew(adapter: Adapter, packing: str) -> tuple[dict[str, ExpertAdapter], dict[str, Any]]:
    """Layers with one rank, and the settings for them."""
    form, base = PACKINGS[packing], adapter.base
    every = [[*layer.pairs().values(), layer.router] for layer in adapter.layers.values()]
    pairs = [pair for layer in every for pair in layer if pair is not None]
    scales = {float(scale) for pair in pairs for scale in pair.scale}
    if len(scales) != 1:
        raise Unsupported(
            f"the packing {packing} must have one scale, got {sorted(scales)}; multiply B of some experts by the ratio"
        )
    halved = form.kind != "parameters"
    rank = max(pair.a.shape[-1] // (2 if halved and pair.separate else 1) for pair in pairs)
    layers = {
        path: replace(
            layer,
            router=layer.router and _of_rank(layer.router, rank, False),
            **{name: _of_rank(pair, rank, halved) for name, pair in layer.pairs().items()},
        )
        for path, layer in adapter.layers.items()
    }
    kept = ("base_model_name_or_path", "task_type", "target_modules")
    settings: dict[str, Any] = {name: adapter.settings.get(name) for name in kept}
    name = adapter.names.get("router", "gate")
    routers = [f"{path.rpartition('.')[0]}.{name}" for path, layer in layers.items() if layer.router is not None]
    alpha = scales.pop() * rank
    alpha = int(alpha) if alpha == int(alpha) else alpha
    settings |= {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "inference_mode": True}
    if form.kind == "parameters":
        targets = [f"{path}.{adapter.names[name]}" for path, layer in layers.items() for name in layer.pairs()]
        targets += [f"{router}.weight" for router in routers]
        settings |= {"target_parameters": targets, "peft_version": _version(packing)}
        settings["target_modules"] = settings["target_modules"] or []
        for path, layer in layers.items():
            assert target_names(path, Settings(settings), base) == [adapter.names[name] for name in layer.pairs()]
    return layers, settings


def _version(packing: str) -> str:
    """A PEFT with the roles of a packing."""
    same = [first for name, first in VERSIONS if PACKINGS[name].swapped == PACKINGS[packing].swapped]
    return ".".join(map(str, max(same[0], (0, 18, 0))))


def _of_rank(pair: Any, rank: int, halved: bool) -> Any:
    """The pair with factors of one rank, padded by zeros."""
    blocks = 2 if halved and pair.separate else 1
    experts, inputs, held = pair.a.shape
    add = rank - held // blocks
    a = np.pad(pair.a.reshape(experts, inputs, blocks, -1), ((0, 0), (0, 0), (0, 0), (0, add)))
    b = np.pad(pair.b.reshape(experts, blocks, held // blocks, -1), ((0, 0), (0, 0), (0, add), (0, 0)))
    return replace(pair, a=a.reshape(experts, inputs, -1), b=b.reshape(experts, blocks * rank, -1))
