"""config.json of a checkpoint, with typed look-ups that name what is missing or wrong."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moe_core.errors import InvalidInput, Unsupported


@dataclass(frozen=True)
class ModelConfig:
    """The settings of a text model. model_type: the family name they declare; quantization: `quantization_config`,
    which multimodal models may give outside of the text model's settings, or None."""

    model_type: str
    settings: Mapping[str, Any]
    quantization: Any = None

    def find(self, *keys: str) -> Any:
        """The value of the first of `keys` that is present (a setting has several names across releases)."""
        for key in keys:
            if key in self.settings:
                return self.settings[key]
        raise InvalidInput(
            f"config.json must give {' or '.join(keys)}, got {len(self.settings)} settings "
            "without it; restore the original config.json"
        )

    def integer(self, *keys: str, least: int = 1, null: int | None = None) -> int:
        """A required integer of at least `least`; `null` is what a JSON null stands for, where null is legal."""
        value = self.find(*keys)
        if value is None and null is not None:
            return null
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise _wrong(keys[0], f"an integer of at least {least}", value)
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number, required unless a default is given."""
        value = self.find(key) if default is None else self.settings.get(key, default)
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not math.isfinite(value):
            raise _wrong(key, "a finite number", value)
        return float(value)

    def boolean(self, key: str) -> bool:
        """A required true or false."""
        value = self.find(key)
        if not isinstance(value, bool):
            raise _wrong(key, "true or false", value)
        return value

    def integers(self, key: str) -> tuple[int, ...]:
        """A list of integers; absent or null is the empty list."""
        value = self.settings.get(key)
        if value is None:
            return ()
        if not isinstance(value, list) or any(not isinstance(item, int) or isinstance(item, bool) for item in value):
            raise _wrong(key, "a list of integers", value)
        return tuple(value)

    def require(self, key: str, supported: object) -> None:
        """Refuse a setting that says something else than the one thing supported; an absent or null one is fine."""
        value = self.settings.get(key)
        if value is not None and value != supported:
            raise Unsupported(
                f"{key} in config.json must be {supported!r} for {self.model_type}, got {value!r}; "
                "this variant cannot be read"
            )


def _wrong(key: str, expected: str, value: object) -> InvalidInput:
    return InvalidInput(f"{key} in config.json must be {expected}, got {value!r}; restore the original config.json")


def read_json(path: Path) -> dict[str, Any]:
    """A JSON file that holds an object; InvalidInput names the file otherwise."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise InvalidInput(f"{path} must be a readable JSON file, got: {error}; download it again") from error
    if not isinstance(content, dict):
        raise InvalidInput(f"{path} must hold a JSON object, got a {type(content).__name__}; download it again")
    return content


def settings_of(config: Any) -> Mapping[str, Any]:
    """The settings of a dict, a config object with `to_dict`, or a path to config.json or its directory."""
    if isinstance(config, (str, os.PathLike)):
        path = Path(config, "config.json") if Path(config).is_dir() else Path(config)
        if not path.is_file():
            raise InvalidInput(f"config must be a config.json or a directory with one, got {path}; correct the path")
        return read_json(path)
    if hasattr(config, "to_dict"):
        config = config.to_dict()
    if not isinstance(config, Mapping):
        raise InvalidInput(
            f"config must be a dict, a config object with to_dict or a path, got {type(config).__name__}; pass one"
        )
    return config


def read_config(directory: Path, known: Collection[str]) -> ModelConfig:
    """Read `directory`/config.json and pick the text model's settings.

    known: the readable model types. Multimodal checkpoints nest the text model under `text_config`.
    Raises InvalidInput for a missing or malformed directory or file, Unsupported for an unknown model_type.
    """
    if not directory.is_dir():
        state = "is a file" if directory.exists() else "does not exist"
        raise InvalidInput(f"path must be a checkpoint directory, got {directory}, which {state}; download it first")
    path = directory / "config.json"
    if not path.is_file():
        raise InvalidInput(
            f"path must be a checkpoint directory with a config.json, got {directory}, which has none; "
            "pass the directory that holds config.json"
        )
    settings = read_json(path)
    quantisation, nested = settings.get("quantization_config"), settings.get("text_config")
    model_types = [settings.get("model_type")]
    if model_types[0] not in known and isinstance(nested, dict):
        settings = nested
        quantisation = quantisation or nested.get("quantization_config")
        model_types.append(nested.get("model_type"))
    if model_types[-1] not in known:
        raise Unsupported(
            f"model_type in {path} must be one of {', '.join(sorted(known))}, got "
            f"{' with text_config '.join(map(repr, model_types))}; no other family can be read"
        )
    return ModelConfig(str(model_types[-1]), settings, quantisation)
