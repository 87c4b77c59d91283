"""Parity engines: their protocol and entry points (`moebius.engines`)."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from moe_core.errors import InvalidInput, Unsupported
from moe_core.parity.case import Case

GROUP = "moebius.engines"
REFERENCE = "reference"
DEFAULT_ENGINES = (REFERENCE, "torch", "jax")


@dataclass(frozen=True)
class EngineRun:
    """Results of an engine for one case.

    Args:
        stages: NumPy arrays by stage name, computed one public op at a time.
        composed: results of the composed op (`output`, `ids`, `weights`, `tokens_per_expert`), or None.
        device: such as `"triton interpreter (cpu)"` or `"cuda sm_90 NVIDIA H200"`.
        is_reference: the NumPy reference ran, so a comparison would test nothing.
        family: engines of one family must agree bitwise on one device.
        given: stages that the engine received and did not compute.
        slot_order: of a token's slots (`RouterSpec.slot_order`), also for the reference.
        notes: remarks by stage, printed with its row.
    """

    engine: str
    device: str
    stages: Mapping[str, Any]
    composed: Mapping[str, Any] | None = None
    is_reference: bool = False
    family: str | None = None
    given: tuple[str, ...] = ()
    slot_order: str = "score"
    notes: Mapping[str, str] = field(default_factory=dict)

    @property
    def arrays(self) -> dict[str, Any]:
        return {**self.stages} | {f"composed {name}": array for name, array in (self.composed or {}).items()}


class Engine(Protocol):
    """Made without arguments. Raises Unsupported or ImportError if something is not installed."""

    name: str

    def why_unsupported(self, case: Case) -> str | None:
        """The reason this case cannot run here or would mean something else, or None."""

    def run(self, case: Case, progress: Callable[[str], object]) -> EngineRun:
        """Run every stage. progress is called with each stage's name at its start."""
        ...


def registered_engines() -> dict[str, importlib.metadata.EntryPoint]:
    """Every registered engine by name, not imported."""
    return {point.name: point for point in importlib.metadata.entry_points(group=GROUP)}


def load_engines(names: Sequence[str]) -> list[Engine]:
    """Make engines. Raises InvalidInput for an unknown name, Unsupported for one that cannot start."""
    points = registered_engines()
    engines = []
    for name in names:
        if name not in points:
            known = ", ".join(sorted(points)) or "none: the moebius distribution is not installed"
            raise InvalidInput(f"engines must be registered under {GROUP!r} ({known}), got {name!r}; install it")
        try:
            engines.append(points[name].load()())
        except (ImportError, Unsupported) as error:
            others = [other for other in DEFAULT_ENGINES if other != name]
            raise Unsupported(
                f"engine {name!r} cannot start: {error}; install it, or leave it out with --engines {','.join(others)}"
            ) from error
    return engines
