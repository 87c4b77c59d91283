"""The torch front-end as a parity engine."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from moe_core.parity.case import Case
from moe_core.parity.devices import describe, use_gpu
from moe_core.parity.engines import EngineRun
from moe_core.parity.gradients import GradientRun, arguments_of, differentiated, upstream
from moe_core.parity.stage_ops import FrontEnd, run_stages
from moe_torch import ops
from moe_torch.layers.weights import from_numpy, to_numpy

#: This family runs the same plans, bitwise equal on one device.
FAMILY = "moebius"


def to_torch(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """Also bfloat16 and fp8, which torch cannot read from NumPy."""
    return from_numpy(np.ascontiguousarray(array)).to(device, copy=True)


class TorchEngine:
    """`moe_torch.ops` on the first GPU, else or with the interpreter on the CPU."""

    name = "torch"

    def __init__(self) -> None:
        self._device = torch.device("cuda", 0) if use_gpu() and torch.cuda.is_available() else torch.device("cpu")

    def why_unsupported(self, case: Case) -> str | None:
        return None

    def run(self, case: Case, progress: Callable[[str], object]) -> EngineRun:
        front_end = FrontEnd(ops, lambda array: to_torch(array, self._device), to_numpy)
        with torch.no_grad():
            results = run_stages(front_end, case, progress)
        device, is_reference = describe((self._device.type, self._device.index or 0), results.explanation)
        return EngineRun(self.name, device, results.stages, results.composed, is_reference, FAMILY)

    def gradients(self, case: Case, progress: Callable[[str], object]) -> GradientRun:
        def put(array: np.ndarray) -> torch.Tensor:
            return to_torch(array, self._device)

        progress("moe")
        leaves = {name: put(array).requires_grad_() for name, array in differentiated(case).items()}
        arguments, options = arguments_of(case, leaves, put)
        result = ops.moe(*arguments, **options)
        progress("gradients")
        flowing = {name: put(array) for name, array in upstream(case).items()}
        outputs = [getattr(result, name) for name in flowing]
        results = torch.autograd.grad(outputs, list(leaves.values()), list(flowing.values()))
        explanation = ops.explain_moe(*arguments, **options, training=True)
        device, is_reference = describe((self._device.type, self._device.index or 0), explanation)
        forward = {name: to_numpy(getattr(result, name)) for name in ("ids", "weights", "logits")}
        gradients = {f"d_{name}": to_numpy(gradient) for name, gradient in zip(leaves, results, strict=True)}
        return GradientRun(self.name, device, forward, gradients, is_reference, FAMILY)
