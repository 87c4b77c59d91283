"""The JAX front-end as a parity engine: its public ops stage by stage, and its composed op."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from moe_core.parity.case import Case
from moe_core.parity.devices import describe, use_gpu
from moe_core.parity.engines import EngineRun
from moe_core.parity.stage_ops import FrontEnd, run_stages
from moe_jax import ops

#: Engines of this family run the same plans, so they agree bitwise on one device.
FAMILY = "moebius"


def _choose_device() -> Any:
    """The first GPU JAX can use, else its first CPU device."""
    if use_gpu():
        try:
            return jax.devices("cuda")[0]
        except RuntimeError:
            # This JAX has no CUDA plugin; the report then names the CPU engine that ran.
            pass
    return jax.devices("cpu")[0]


class JaxEngine:
    """`moe_jax.ops` on the first GPU, or on the CPU where JAX has none or the interpreter was asked for."""

    name = "jax"

    def __init__(self) -> None:
        self._device = _choose_device()

    def why_unsupported(self, case: Case) -> str | None:
        """Every case is supported."""
        return None

    def run(self, case: Case, progress: Callable[[str], object]) -> EngineRun:
        """Every stage of a case, and the composed op."""
        front_end = FrontEnd(ops, lambda array: jax.device_put(array, self._device), np.asarray)
        with jax.default_device(self._device):
            results = run_stages(front_end, case, progress)
        on_gpu = self._device.platform == "gpu"
        place = ("cuda", self._device.local_hardware_id) if on_gpu else ("cpu", 0)
        device, is_reference = describe(place, results.explanation)
        return EngineRun(self.name, device, results.stages, results.composed, is_reference, FAMILY)
