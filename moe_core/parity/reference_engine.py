"""The NumPy twins as an engine."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from moe_core.ops.moe.reference.forward import moe_stages
from moe_core.parity.case import Case
from moe_core.parity.devices import NUMPY
from moe_core.parity.engines import REFERENCE, EngineRun
from moe_core.specs import TopK


class ReferenceEngine:
    """Comparing the reference with itself is not tested."""

    name = REFERENCE

    def why_unsupported(self, case: Case) -> str | None:
        return None

    def run(self, case: Case, progress: Callable[[str], object]) -> EngineRun:
        progress("all stages")
        return EngineRun(REFERENCE, NUMPY, reference_stages(case), is_reference=True)


def reference_stages(case: Case, routing: TopK | None = None) -> dict[str, np.ndarray]:
    """The stages of a case. routing: ids and weights that replace its own."""
    arguments = (case.x, case.experts, case.routing if routing is None else routing, case.spec)
    return moe_stages(*arguments, token_mask=case.token_mask, shared=case.shared)
