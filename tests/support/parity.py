"""What tests of the parity suite share: runs of its command line, and an engine that answers wrongly."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from moe_core.ops.activation.reference import activation
from moe_core.ops.routing.reference import layout as make_layout
from moe_core.ops.routing.reference import pack_bitmatrix, unpack_bitmatrix
from moe_core.parity import cli, engines
from moe_core.parity.case import Case
from moe_core.parity.engines import EngineRun
from moe_core.parity.quantized_rows import QUANTIZED_HIDDEN, QUANTIZED_X, OwnRows
from moe_core.parity.reference_engine import reference_stages
from moe_core.parity.run import ORDER
from moe_core.specs.operands import TopK
from moe_core.specs.routing import LayoutSpec


def run_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    """(exit status, JSON document) of a run in this process."""
    status = cli.main([*arguments, "--json", "-"])
    return status, json.loads(capsys.readouterr().out)


Change = Callable[[dict[str, Any], dict[str, Any]], None]


def flat(*parts: np.ndarray) -> np.ndarray:
    return np.concatenate([part.astype(np.int64).reshape(-1) for part in parts])


class AlteredEngine:
    """The reference's stages, recomputed behind its ids after `change(stages, composed)` of the routing stages."""

    def __init__(self, change: Change | None = None, routing: Change | None = None, **options: Any) -> None:
        self.name = options.pop("name", "altered")
        self._change, self._routing, self._options = change, routing, options

    def why_unsupported(self, case: Case) -> str | None:
        return self._options.get("reason")

    def run(self, case: Case, progress: Callable[[str], object]) -> EngineRun:
        stages = {name: np.array(array) for name, array in reference_stages(case).items()}
        if self._routing is not None:
            self._routing(stages, {})
            behind = reference_stages(case, TopK(stages["ids"], stages["weights"]))
            stages |= {name: np.array(array) for name, array in behind.items() if name not in ("ids", "weights")}
        ids, experts = stages["ids"], case.num_experts
        packed = pack_bitmatrix(ids, num_experts=experts)[0]
        unpacked = unpack_bitmatrix(packed, num_experts=experts, top_k=ids.shape[1])
        stages["bitmatrix"] = flat(packed, unpacked)
        spec = LayoutSpec(len(ids), ids.shape[1], experts)
        stages["layout"] = flat(*make_layout(ids, None, case.token_mask, layout=spec)[:4])
        before = stages["matmul1"]
        separate = case.spec.activation.gate_layout == "separate"
        parts = np.split(before, 2, axis=1) if separate else [before]
        stages["activation_op"] = activation(*parts, activation=case.spec.activation)
        composed = {name: stages[name].copy() for name in ("output", "ids", "weights", "tokens_per_expert")}
        if case.spec.activations is not None:
            rows = OwnRows(case, stages)
            stages |= {stage: rows.expected(stage) for stage in (QUANTIZED_X, QUANTIZED_HIDDEN)}
        if self._change is not None:
            self._change(stages, composed)
        options = {name: value for name, value in self._options.items() if name != "reason"}
        stages = {name: stages[name] for name in ORDER if name in stages}
        return EngineRun(self.name, "a test", stages, composed, **options)


class FaultyEngine:
    """The reference with NaN in one activation."""

    name = "faulty"

    def why_unsupported(self, case: Any) -> str | None:
        return "float16 is left out" if case.dtype == "float16" else None

    def run(self, case: Any, progress: Any) -> engines.EngineRun:
        stages = {name: np.array(array) for name, array in reference_stages(case).items()}
        stages["activation"][0, 0] = np.nan
        return engines.EngineRun(self.name, "a test", stages)
