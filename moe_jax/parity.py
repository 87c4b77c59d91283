"""Run `moe_jax.ops`, stage by stage and composed, as a parity engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from moe_core.parity.case import Case
from moe_core.parity.devices import describe, use_gpu
from moe_core.parity.engines import EngineRun
from moe_core.parity.gradients import GradientRun, arguments_of, differentiated, upstream
from moe_core.parity.stage_ops import FrontEnd, run_stages
from moe_jax import ops

#: Engines of this family agree bitwise on one device.
FAMILY = "moebius"


def _choose_device() -> Any:
    if use_gpu():
        try:
            return jax.devices("cuda")[0]
        except RuntimeError:
            pass
    return jax.devices("cpu")[0]


class JaxEngine:
    """`moe_jax.ops` on the first GPU, else on the CPU."""

    name = "jax"

    def __init__(self) -> None:
        self._device = _choose_device()

    def why_unsupported(self, case: Case) -> str | None:
        return None

    def run(self, case: Case, progress: Callable[[str], object]) -> EngineRun:
        front_end = FrontEnd(ops, lambda array: jax.device_put(array, self._device), np.asarray)
        with jax.default_device(self._device):
            results = run_stages(front_end, case, progress)
        device, is_reference = self._describe(results.explanation)
        return EngineRun(self.name, device, results.stages, results.composed, is_reference, FAMILY)

    def _describe(self, explanation: str) -> tuple[str, bool]:
        on_gpu = self._device.platform == "gpu"
        return describe(("cuda", self._device.local_hardware_id) if on_gpu else ("cpu", 0), explanation)

    def gradients(self, case: Case, progress: Callable[[str], object]) -> GradientRun:
        def put(array: np.ndarray) -> jax.Array:
            return jax.device_put(array, self._device)

        progress("moe")
        leaves = {name: put(array) for name, array in differentiated(case).items()}
        flowing = {name: put(array) for name, array in upstream(case).items()}

        @jax.jit
        def step(leaves: dict[str, jax.Array]) -> Any:
            def outputs(leaves: dict[str, jax.Array]) -> Any:
                positional, options = arguments_of(case, leaves, put)
                result = ops.moe(*positional, **options)
                return {name: getattr(result, name) for name in flowing}, result

            _, pull, result = jax.vjp(outputs, leaves, has_aux=True)
            return pull(flowing)[0], {name: getattr(result, name) for name in ("ids", "weights", "logits")}

        with jax.default_device(self._device):
            pulled, forward = step(leaves)
            progress("gradients")
            positional, options = arguments_of(case, leaves, put)
            device, is_reference = self._describe(ops.explain_moe(*positional, **options, training=True))
        gradients = {f"d_{name}": np.asarray(pulled[name]) for name in leaves}
        forward = {name: np.asarray(array) for name, array in forward.items()}
        return GradientRun(self.name, device, forward, gradients, is_reference, FAMILY)
