"""Plans by their keys: registered, exported and loaded."""

from __future__ import annotations

import json
import pathlib
import zlib
from collections.abc import Iterable, Sequence
from typing import Any

from moe_core.base import Recent, codec, process_lock
from moe_core.base.files import path_of, whole_file
from moe_core.errors import InvalidInput, Unsupported
from moe_core.plan.check import check_plan
from moe_core.plan.steps import FORMAT_VERSION, LaunchPlan, sources_version

#: A kilobyte or two each: far more than the programs that fit into memory.
TEXTS_KEPT = 32_768
_plans: Recent[LaunchPlan] = Recent()
_texts: Recent[bytes] = Recent(TEXTS_KEPT)
_registry_lock = process_lock()


def register(plan: LaunchPlan) -> str:
    """Register a plan and return its key; the last `PLANS_KEPT` are kept. Another plan of a key raises RuntimeError."""
    key = plan.key
    if _plans.get(key) is plan:
        return key
    text = zlib.compress(codec.dumps(plan).encode(), 1)
    with _registry_lock:
        known = _texts.find(key)
        if known is None:
            _texts.put(key, text)
        elif known != text:
            raise RuntimeError(
                f"plan key {key} is taken by {lookup(key).name!r}; {plan.name!r} cannot be registered under it"
            )
        if _plans.find(key) is None:
            _plans.put(key, plan)
    return key


def lookup(key: str) -> LaunchPlan:
    """The registered plan of a key, else InvalidInput."""
    plan = _plans.get(key) or _plans.find(key)
    if plan is None:
        with _registry_lock:
            text = _texts.find(key)
            if text is None:
                raise InvalidInput(
                    f"plan key must be registered in this process, got {key!r}; call "
                    "moe_core.plan.load_plans(path) on a file written by export_plans in the process that made the "
                    "program"
                )
            plan = codec.loads(zlib.decompress(text).decode())
            _plans.put(key, plan)
    return plan


def registered_keys() -> tuple[str, ...]:
    return _texts.keys()


def export_plans(path: str | pathlib.Path, keys: Iterable[str] | None = None) -> tuple[str, ...]:
    """Write registered plans (all, or of `keys`) to a JSON file for another process. Returns their keys."""
    chosen = registered_keys() if keys is None else tuple(keys)
    write_plans(path, [lookup(key) for key in chosen])
    return chosen


def write_plans(path: str | pathlib.Path, plans: Sequence[LaunchPlan]) -> None:
    text = codec.dumps((FORMAT_VERSION, sources_version(), tuple((plan.key, plan) for plan in plans)))
    with whole_file(path) as partial:
        partial.write_text(text)


class Explanation(str):
    """The text of plans: what runs, with which tiles, in which memory, and why. plans: the plans, in order."""

    plans: tuple[LaunchPlan, ...]

    @classmethod
    def of(cls, *plans: LaunchPlan, heading: Iterable[str] = ()) -> Explanation:
        text = cls("\n\n".join([*heading, *(plan.explain() for plan in plans)]))
        text.plans = plans
        return text

    def after(self, heading: str) -> Explanation:
        text = Explanation(f"{heading}\n{self}")
        text.plans = self.plans
        return text

    def save(self, path: str | pathlib.Path) -> None:
        """Write the plans to a JSON file, as `export_plans` does; `moebius-view` shows it as a picture."""
        write_plans(path, self.plans)


def load_plans(path: str | pathlib.Path) -> tuple[str, ...]:
    """Register the plans of a file written by `export_plans`. Returns their keys.

    Load only files that you would also run as code: a plan says which kernels run on which memory. Another or a changed
    file, or version of the kernels, raises InvalidInput and registers nothing.
    """
    return tuple(register(plan) for plan in read_plans(path))


def read_plans(path: str | pathlib.Path) -> tuple[LaunchPlan, ...]:
    """The plans of a file, without registering them. Raises as `load_plans`."""
    content = path_of(path).read_bytes()
    try:
        version, sources, plans = json.loads(content)
    except (ValueError, TypeError, RecursionError) as error:
        raise InvalidInput(
            f"path must be a file written by export_plans, got {str(path)!r} ({error}); export the plans again"
        ) from error
    # Decode nothing of another version: it may have unknown types and fields.
    if (version, sources) != (FORMAT_VERSION, sources_version()):
        raise InvalidInput(
            f"path must hold plans of this version of the kernels ({sources_version()[:12]}), got "
            f"{str(sources)[:12]!r}; export the program and its plans again"
        )
    if not isinstance(plans, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in plans):
        raise InvalidInput(f"path must hold plans with their keys, got {str(path)!r} without; export the plans again")
    decoded = [(key, decode_plan(value)) for key, value in plans]
    for key, plan in decoded:
        if plan.key != key:
            raise InvalidInput(
                f"plan {plan.name!r} in {str(path)!r} must have the key {plan.key}, got {key!r}: the file was changed; "
                "export the plans again"
            )
    return tuple(plan for _, plan in decoded)


def decode_plan(value: Any) -> LaunchPlan:
    """The plan of parsed JSON. Raises InvalidInput or Unsupported for anything else."""
    try:
        plan = check_plan(codec.decode(value))
        same = codec.dumps(plan) == json.dumps(value, sort_keys=True, separators=(",", ":"))
    except (InvalidInput, Unsupported):
        raise
    except Exception as error:  # constructors raise these for arguments of other types
        raise InvalidInput(f"plans must be as export_plans writes them, got {error!r}; export them again") from error
    if not same:
        raise InvalidInput(f"plan {plan.name!r} must be as export_plans writes it, got other text; export it again")
    return plan
