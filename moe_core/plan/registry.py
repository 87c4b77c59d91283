"""Plans by their keys: registered in this process, exported to files, loaded from them."""

from __future__ import annotations

import json
import pathlib
import threading
from collections.abc import Iterable

from moe_core.base import codec
from moe_core.errors import InvalidInput
from moe_core.plan.steps import FORMAT_VERSION, LaunchPlan, sources_version

_registry: dict[str, LaunchPlan] = {}
_registry_lock = threading.Lock()


def register(plan: LaunchPlan) -> str:
    """Make a plan known by its key and return the key. Another plan under the same key raises."""
    with _registry_lock:
        known = _registry.setdefault(plan.key, plan)
    if known is not plan and known.canonical != plan.canonical:
        raise RuntimeError(
            f"plan key {plan.key} is taken by {known.name!r}; {plan.name!r} cannot be registered under it"
        )
    return plan.key


def lookup(key: str) -> LaunchPlan:
    """The plan registered under `key`; an unknown key raises InvalidInput that names the fix."""
    plan = _registry.get(key)
    if plan is None:
        raise InvalidInput(
            f"plan key must be registered in this process, got {key!r}; call "
            "moe_core.plan.load_plans(path) on a file written by export_plans in the process that made the program"
        )
    return plan


def export_plans(path: str | pathlib.Path, keys: Iterable[str] | None = None) -> tuple[str, ...]:
    """Write registered plans (all, or those named) to a JSON file for another process; returns their keys."""
    chosen = tuple(_registry) if keys is None else tuple(keys)
    text = codec.dumps((FORMAT_VERSION, sources_version(), tuple(lookup(key) for key in chosen)))
    pathlib.Path(path).write_text(text)
    return chosen


def load_plans(path: str | pathlib.Path) -> tuple[str, ...]:
    """Register the plans of a file written by `export_plans` and return their keys.

    Raises InvalidInput for any other file, and where the file was written by another version of the kernels: its keys
    would not match.
    """
    try:
        version, sources, plans = json.loads(pathlib.Path(path).read_text())
    except (ValueError, TypeError) as error:
        raise InvalidInput(
            f"path must be a file written by export_plans, got {str(path)!r} ({error}); export the plans again"
        ) from error
    # Another version's plans may hold types and fields that are unknown here: nothing of them is decoded before.
    if (version, sources) != (FORMAT_VERSION, sources_version()):
        raise InvalidInput(
            f"path must hold plans of this version of the kernels ({sources_version()[:12]}), got {str(sources)[:12]}; "
            "export the program and its plans again"
        )
    return tuple(register(plan) for plan in codec.decode(plans))
