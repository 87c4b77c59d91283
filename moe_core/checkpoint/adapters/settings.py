"""adapter_config.json: ranks and scales, and a refusal of everything else that changes results."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from moe_core.errors import InvalidInput, Unsupported

#: Read for ranks, scales and names.
_USED = ("peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "target_parameters")
_USED += ("peft_version", "init_lora_weights", "bias")
#: Say how an adapter was made or trained, or which modules have one. A file's tensors already show that.
_HISTORY = ("base_model_name_or_path", "revision", "task_type", "inference_mode", "auto_mapping", "target_modules")
_HISTORY += ("exclude_modules", "layers_to_transform", "layers_pattern", "lora_dropout", "megatron_core")
_HISTORY += ("modules_to_save", "eva_config", "runtime_config", "ensure_weight_tying", "loftq_config")
#: A group size that counts only with use_qalora.
_HISTORY += ("qalora_group_size",)
#: Initial values that change the base weights, which this file does not hold.
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
#: Literal text, with the regular expressions that patterns of ranks use.
_PATTERN = re.compile(r"\^?(?:[\w.|-]|\\\.|\\d\+?|\.\*)*")


class Settings:
    """Ranks and scales of an adapter_config.json. Raises by name for every entry that would change results."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self.entries = settings
        kind = settings.get("peft_type", "LORA")
        if kind != "LORA":
            raise Unsupported(f"peft_type of the adapter must be LORA, got {kind!r}; train a LoRA adapter")
        initial = settings.get("init_lora_weights", True)
        if isinstance(initial, str) and initial.lower().startswith(_CHANGES_BASE):
            raise Unsupported(
                f"init_lora_weights must leave the base weights as they are, got {initial!r}; save the adapter "
                "converted to LoRA (PEFT: path_initial_model_for_weight_conversion)"
            )
        if settings.get("bias", "none") != "none":
            raise Unsupported(f"bias of the adapter must be 'none', got {settings['bias']!r}; train without biases")
        for name in settings.keys() - {*_USED, *_HISTORY}:
            if settings[name]:
                raise Unsupported(
                    f"{name} of the adapter must be unset, got {settings[name]!r}; no reader here uses it: train "
                    "without, or remove it from the settings if it changes no result"
                )

    @property
    def peft_version(self) -> tuple[int, ...] | None:
        """None: not written, as before PEFT 0.18."""
        version = self.entries.get("peft_version")
        if version is None:
            return None
        numbers = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", str(version))
        if numbers is None:
            raise InvalidInput(f"peft_version must be a version such as '0.21.2', got {version!r}; correct it")
        return tuple(int(number or 0) for number in numbers.groups())

    @property
    def target_parameters(self) -> list[str]:
        targets = self.entries.get("target_parameters") or []
        if not isinstance(targets, (list, tuple, set)) or not all(isinstance(name, str) for name in targets):
            raise InvalidInput(f"target_parameters must be a list of names, got {targets!r}; correct it")
        return list(targets)

    def rank(self, name: str) -> int:
        """The rank of a module or parameter."""
        rank = self._of("rank_pattern", "r", name)
        if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
            raise InvalidInput(f"r of {name} must be a positive integer, got {rank!r}; correct adapter_config.json")
        return rank

    def scale(self, name: str, rank: int) -> float:
        """alpha / rank, or alpha / sqrt(rank) with use_rslora."""
        alpha = self._of("alpha_pattern", "lora_alpha", name)
        if not isinstance(alpha, (int, float)) or isinstance(alpha, bool) or not math.isfinite(alpha):
            raise InvalidInput(f"lora_alpha of {name} must be a number, got {alpha!r}; correct adapter_config.json")
        return alpha / (math.sqrt(rank) if self.entries.get("use_rslora") else rank)

    def _of(self, patterns: str, default: str, name: str) -> Any:
        """As PEFT matches: the first pattern that is the end of the name, after a dot or all of it."""
        table = self.entries.get(patterns) or {}
        if not isinstance(table, Mapping):
            raise InvalidInput(f"{patterns} must map names to numbers, got {table!r}; correct adapter_config.json")
        for pattern, value in table.items():
            # Patterns of strangers may take for ever to match.
            if not _PATTERN.fullmatch(pattern):
                raise Unsupported(f"{patterns} must have names, \\d+ and .* as patterns, got {pattern!r}; rewrite it")
            if re.match(rf"(.*\.)?({pattern})$", name):
                return value
        if default not in self.entries:
            raise InvalidInput(f"settings must have {default}, got {sorted(self.entries)}; pass settings={{...}}")
        return self.entries[default]
