"""Typed look-ups in config.json."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from moe_core.base.files import MOST_JSON_BYTES, load_json
from moe_core.errors import InvalidInput, Unsupported

_MOST_LAYERS, _MOST_EXPERTS, _MOST_CONFIG_BYTES = 10_000, 100_000, 4 * 2**20


@dataclass(frozen=True)
class ModelConfig:
    """The settings of a text model.

    model_type: the declared family name. quantization: `quantization_config` or None. nested: the path to the settings
    in a multimodal model's, such as `("text_config",)`.
    """

    model_type: str
    settings: Mapping[str, Any]
    quantization: Any = None
    nested: tuple[str, ...] = ()

    def find(self, *keys: str) -> Any:
        """The value of the first present key of `keys` (names across releases).

        Raises InvalidInput if none is, or if values differ.
        """
        matches = [(key, self.settings[key]) for key in keys if key in self.settings]
        for key, value in matches[1:]:
            first, wanted = matches[0]
            if None not in (wanted, value) and _of_all_layers(wanted) != _of_all_layers(value):
                raise InvalidInput(
                    f"{first} and {key} in config.json must be equal, since they are one setting, got {wanted!r} and "
                    f"{value!r}; restore the original config.json"
                )
        if matches:
            return matches[0][1]
        raise InvalidInput(
            f"config.json must give {' or '.join(keys)}, got {len(self.settings)} settings "
            "without it; restore the original config.json"
        )

    def num_layers(self, *keys: str) -> int:
        return self.integer(*(keys or ("num_hidden_layers",)), most=_MOST_LAYERS)

    def num_experts(self, *keys: str) -> int:
        return self.integer(*keys, most=_MOST_EXPERTS)

    def integer(
        self, *keys: str, least: int = 1, most: int = 2**63, null: int | None = None, default: int | None = None
    ) -> int:
        """An integer, required unless a default is given.

        null: the meaning of a JSON null, where it is legal. Entries of a list, one per layer, must be equal.
        """
        value, key = self._given(keys, default), self._present(keys)
        if value is None and null is not None:
            return null
        if isinstance(value, list) and value:
            first, *rest = value
            if any(item != first for item in rest):
                raise Unsupported(
                    f"{key} in config.json must be the same number for every layer, got {value!r:.200}; layers "
                    "that differ cannot be described by one spec"
                )
            value = first
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise _wrong(key, f"an integer of at least {least}", value)
        if value > most:
            raise _wrong(key, f"an integer of at most {most}", value)
        return value

    def number(self, *keys: str, default: float | None = None) -> float:
        value = self._given(keys, default)
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not -math.inf < value < math.inf:
            raise _wrong(self._present(keys), "a finite number", value)
        return float(value)

    def boolean(self, *keys: str, default: bool | None = None) -> bool:
        value = self._given(keys, default)
        if not isinstance(value, bool):
            raise _wrong(self._present(keys), "true or false", value)
        return value

    def _present(self, keys: tuple[str, ...]) -> str:
        return next((key for key in keys if key in self.settings), keys[0])

    def _given(self, keys: tuple[str, ...], default: Any) -> Any:
        present = default is None or any(key in self.settings for key in keys)
        return self.find(*keys) if present else default

    def integers(self, key: str) -> tuple[int, ...]:
        """A list of integers, empty if absent or null."""
        return self._listed(key, lambda item: isinstance(item, int) and not isinstance(item, bool), "integers")

    def strings(self, key: str) -> tuple[str, ...]:
        """A list of strings, empty if absent or null."""
        return self._listed(key, lambda item: isinstance(item, str), "strings")

    def limits(self, key: str) -> tuple[float | None, ...]:
        """A list of nulls and numbers of at least 0, empty if absent or null."""
        return self._listed(key, _is_limit, "numbers of at least 0")

    def _listed(self, key: str, fits: Callable[[Any], bool], what: str) -> tuple[Any, ...]:
        value = self.settings.get(key)
        if value is None:
            return ()
        if not isinstance(value, list) or len(value) > _MOST_LAYERS or not all(map(fits, value)):
            raise _wrong(key, f"a list of {what}", value)
        return tuple(value)

    def with_part(self, key: str) -> ModelConfig:
        """These settings, overridden by the object under `key`."""
        part = self.find(key)
        if not isinstance(part, Mapping):
            raise _wrong(key, "an object", part)
        return replace(self, settings={**self.settings, **part})

    def require(self, key: str, supported: object, operation: str, *, given: bool = False) -> None:
        """Refuse a setting that we lack. Absent and null ones pass, unless `given`."""
        value = self.settings.get(key)
        if (value is not None or given) and value != supported:
            raise Unsupported(
                f"{key} in config.json must be {supported!r} for {self.model_type}, got {value!r:.200}; {operation} "
                "cannot be computed"
            )


def _of_all_layers(value: Any) -> Any:
    alike = isinstance(value, list) and len(value) > 0 and all(item == value[0] for item in value)
    return value[0] if alike else value


def _is_limit(item: Any) -> bool:
    number = isinstance(item, (int, float)) and not isinstance(item, bool)
    return item is None or (number and 0 <= item < math.inf)


class _Noted(Mapping[str, Any]):
    """Settings that note the numbers that are read."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self.settings, self.numbers = settings, dict[str, int | float]()

    def __iter__(self) -> Iterator[str]:
        return iter(self.settings)

    def __len__(self) -> int:
        return len(self.settings)

    def __getitem__(self, key: str) -> Any:
        value = self.settings[key]
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            self.numbers[key] = value
        return value


@contextlib.contextmanager
def named_settings(config: ModelConfig) -> Iterator[ModelConfig]:
    """The same settings. An error of a spec, which names its own fields, names the numbers that were read too."""
    noted = _Noted(config.settings)
    try:
        yield replace(config, settings=noted)
    except (InvalidInput, Unsupported) as error:
        if "config.json" in str(error) or not noted.numbers:
            raise
        told = ", ".join(f"{key} = {value}" for key, value in noted.numbers.items())
        raise type(error)(f"config.json with {told}: {error}") from None


def _wrong(key: str, expected: str, value: object) -> InvalidInput:
    return InvalidInput(
        f"{key} in config.json must be {expected}, got {value!r:.200}; restore the original config.json"
    )


def read_json(path: Path, most_bytes: int = MOST_JSON_BYTES) -> dict[str, Any]:
    """The object in a JSON file. Raises InvalidInput. See `load_json` for limits."""
    content = load_json(path, most_bytes)
    if not isinstance(content, dict):
        raise InvalidInput(f"{path} must hold a JSON object, got a {type(content).__name__}; download it again")
    return content


def settings_of(config: Any) -> Mapping[str, Any]:
    """The settings of a dict, a config object with `to_dict`, or a path to config.json or its directory."""
    if isinstance(config, (str, os.PathLike)):
        path = inside(Path(config), "config.json") if Path(config).is_dir() else Path(config)
        if not path.exists():
            raise InvalidInput(f"config must be a config.json or a directory with one, got {path}; correct the path")
        return read_json(path, _MOST_CONFIG_BYTES)
    if hasattr(config, "to_dict") and not isinstance(config, type):
        config = config.to_dict()
    if not isinstance(config, Mapping):
        raise InvalidInput(
            f"config must be a dict, a config object with to_dict or a path, got {type(config).__name__}; pass one"
        )
    return config


def read_config(directory: Path) -> Mapping[str, Any]:
    """Raises InvalidInput."""
    if not directory.is_dir():
        state = "is a file" if directory.exists() else "does not exist"
        raise InvalidInput(f"path must be a checkpoint directory, got {directory}, which {state}; download it first")
    path = inside(directory, "config.json")
    if not path.exists():
        raise InvalidInput(
            f"path must be a checkpoint directory with a config.json, got {directory}, which has none; "
            "pass the directory that holds config.json"
        )
    return read_json(path, _MOST_CONFIG_BYTES)


def require_relative(name: str, index: Path) -> None:
    """Raise InvalidInput unless a file name stays below the index's directory, links aside."""
    path = Path(name)
    if path.is_absolute() or ".." in path.parts or not path.parts or "\0" in name or len(name) > 255:
        raise InvalidInput(
            f"weight_map in {index} must name files in the directory of the index, got {name!r:.200}; "
            "put the files there, or download the checkpoint again"
        )


def inside(directory: Path, name: str) -> Path:
    """`directory`/`name`. Raises InvalidInput for a link that leads out of the checkpoint."""
    path = directory / name
    try:
        root, target = directory.resolve(), path.resolve()
        snapshots = [folder.parent for folder in (root, *root.parents) if folder.parent.name == "snapshots"]
        if any(target.is_relative_to(allowed) for allowed in (root, *(each.parent / "blobs" for each in snapshots))):
            return path
    except (OSError, RuntimeError) as error:
        # Names that are too long, and circular links.
        raise InvalidInput(f"{path!s:.400} must be a readable file, got: {error!s:.400}; correct the name") from error
    raise InvalidInput(
        f"{path} must lie in the checkpoint's directory, or in the blobs of Hugging Face's cache, got a link to "
        f"{target}; pass the directory that holds the files, or copy them"
    )
