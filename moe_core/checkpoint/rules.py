"""Rules of a quantization_config: the packings of each matrix."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from moe_core.checkpoint.packing import Packing
from moe_core.errors import InvalidInput, Unsupported

#: Patterns with more repetitions, or repeated groups with one inside, could take minutes.
_MOST_REPETITIONS = 8
CLASS = "Linear"

Settings = Mapping[str, Any]
Packings = tuple[Packing, ...]


@dataclass(frozen=True)
class Rule:
    """targets: names, `re:` patterns or classes. Empty: every matrix. packings: raises Unsupported for settings that
    cannot be read, which matter only to matrices that the rule is for."""

    targets: tuple[str, ...]
    packings: Callable[[], Packings]


@dataclass(frozen=True)
class Quantization:
    """The rules of a quantization_config. ignore: as targets."""

    settings: Settings
    rules: tuple[Rule, ...]
    ignore: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def method(self) -> str:
        return self.settings["quant_method"]

    def packings(self, names: Iterable[str]) -> Packings:
        """The packings of a matrix of these spellings, empty if none is declared for it."""
        names = tuple(names)
        if any(_rank(target, names) is not None for target in self.ignore):
            return ()
        ranked = [(rank, rule) for rule in self.rules if (rank := _best(rule.targets, names)) is not None]
        return min(ranked, key=lambda pair: pair[0])[1].packings() if ranked else ()


def _best(targets: tuple[str, ...], names: tuple[str, ...]) -> int | None:
    ranks = [rank for target in targets if (rank := _rank(target, names)) is not None]
    return min(ranks, default=None if targets else 3)


def _rank(target: str, names: tuple[str, ...]) -> int | None:
    """As in compressed-tensors: exact names come before patterns, and these before classes. None: no match."""
    if target in names:
        return 0
    if target.startswith("re:"):
        return 1 if any(_pattern(target).match(name) for name in names) else None
    return 2 if target == CLASS else None


@functools.lru_cache(256)
def _pattern(target: str) -> re.Pattern[str]:
    text = target.removeprefix("re:")
    nested = re.search(r"[*+}][^()]*\)\s*[*+{]", text)
    if nested or sum(map(text.count, "*+{")) > _MOST_REPETITIONS:
        raise unsupported(f"the pattern {target!r:.200}", f"it must have at most {_MOST_REPETITIONS} repetitions")
    try:
        return re.compile(text)
    except (re.error, RecursionError, OverflowError) as error:
        raise InvalidInput(
            f"quantization_config in config.json must have patterns that compile, got {target!r:.200}: {error}; "
            "restore the original config.json"
        ) from error


def require_known(settings: Settings, keys: str, what: str) -> None:
    known = keys.split()
    for key in settings:
        if key not in known and settings[key] is not None:
            near = difflib.get_close_matches(key, known, 3)
            meant = f"keys like it are {', '.join(near)}" if near else f"the known ones are {', '.join(sorted(known))}"
            raise unsupported(f"the unknown key {key!r} in {what}", f"it may change the numbers, and {meant}")


def unsupported(what: str, why: str) -> Unsupported:
    return Unsupported(f"quantization_config in config.json has {what}; {why}: dequantise to bfloat16 first")


def require(settings: Settings, **wanted: tuple[Any, ...]) -> None:
    """Refuse other values of keys than these. The first is the default."""
    for key, values in wanted.items():
        value = settings.get(key)
        if (values[0] if value is None else value) not in values:
            listed = " or ".join(map(repr, values))
            raise unsupported(f"{key} {value!r:.200}", f"it must be {listed}")


def one_rule(settings: Settings, *packings: Packing) -> Quantization:
    return Quantization(settings, (Rule((), lambda: packings),))


def list_of_names(value: Any, key: str) -> tuple[str, ...]:
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise InvalidInput(
            f"{key} in config.json must be a list of names, got {value!r:.200}; restore the original config.json"
        )
    return tuple(value)


def static(packing: Packing) -> Packing:
    return dataclasses.replace(packing, static=True, companions=(*packing.companions, ".input_scale"))


def dropped(activations: object, weights: object) -> str:
    return f"activations ({activations}) stay plain: no kernel takes them with weights in {weights}"
