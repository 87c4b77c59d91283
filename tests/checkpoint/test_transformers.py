"""The outside judge on the ops of both front-ends: layers that transformers saved, against its own MoE blocks.

In float32 routing is compared, too. In bfloat16 transformers rounds logits and weights to the model's dtype, which
moves tokens to other experts: there its ids and weights are given.
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the judge needs torch")
pytest.importorskip("transformers", reason="the judge needs transformers")

from moe_core.checkpoint import MoELayer
from moe_core.ops.moe.reference.forward import moe_stages
from moe_core.parity.tolerance import Tolerance, assert_close, stage_tolerances
from moe_core.specs.operands import TopK
from tests.support.exact import against_exact
from tests.support.families import row_named, tiny
from tests.support.families.judge import block_of, hidden_states, judge, saved
from tests.support.frontends import Frontend
from tests.support.frontends.small import on_engines
from tests.support.torch import to_numpy
from tools.sweep.models import D, E, F, K

on_rows = pytest.mark.parametrize("row", ["mixtral", "qwen3_moe", "gpt_oss_clamped", "deepseek_v3"])


@dataclasses.dataclass(frozen=True)
class Judged:
    """A layer as it is read, its input, and transformers' logits, routing and output; slots in transformers' order."""

    layer: MoELayer
    x: np.ndarray
    logits: np.ndarray
    routing: TopK
    output: np.ndarray

    def tolerances(self, routed_from: str) -> dict[str, Tolerance]:
        sizes = {"d_model": D, "d_ff": F, "top_k": K, "num_experts": E}
        return stage_tolerances(self.layer.spec, self.layer.dtype, **sizes, routed_from=routed_from)


def judged(path: Path, row: str, dtype: str) -> Judged:
    family, changes = row_named(row)
    model = tiny(family, **changes).to(getattr(torch, dtype))
    checkpoint = saved(model, path)
    number = checkpoint.moe_layers[-1]
    x, (block, _) = hidden_states().to(getattr(torch, dtype)), block_of(model, number)
    with torch.no_grad():
        logits, weights, ids = (to_numpy(one) for one in getattr(block, "router", getattr(block, "gate", None))(x))
    routing = TopK(ids.astype(np.int32), weights.astype(np.float32))
    return Judged(checkpoint.layer(number), to_numpy(x), logits, routing, judge(model, number, x).output)


def by_expert(ids: np.ndarray, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Slots ordered by expert: transformers does not order a token's slots in every family."""
    order = np.argsort(ids, axis=1)
    return np.take_along_axis(ids, order, axis=1), np.take_along_axis(weights, order, axis=1)


def forward(frontend: Frontend, found: Judged, routing: Any, spec: Any) -> Any:
    """One composed forward through a front-end; its outputs in NumPy."""
    arrays = frontend.arrays((found.x, found.layer.experts, routing))
    return frontend.numpy(frontend.ops.moe(*arrays, spec, shared=frontend.arrays(found.layer.shared)))


@on_engines
@on_rows
def test_front_ends_agree(tmp_path: Path, row: str, frontend: Frontend, engine: str) -> None:
    found = judged(tmp_path, row, "float32")
    allowed = found.tolerances("x")
    with frontend.running_on(engine):
        ours = forward(frontend, found, found.layer.router, found.layer.spec)
    assert_close(ours.logits, found.logits, allowed["logits"], "logits")
    ids, weights = by_expert(ours.ids, ours.weights)
    expected_ids, expected_weights = by_expert(found.routing.ids, found.routing.weights)
    np.testing.assert_array_equal(ids, expected_ids)
    assert_close(weights, expected_weights, allowed["weights"], "weights")
    assert_close(ours.output, found.output, allowed["output"], "output")


def allowed_in_bfloat16(found: Judged) -> Tolerance:
    """How far outputs may lie apart behind transformers' routing.

    Only transformers rounds gate and up, the activation, its product with up, the weighted slot, each of the K sums
    and the sum with the shared experts: 5 + K roundings of one side, which add up like their square root.
    """
    return against_exact(found.tolerances("ids")["output"], "bfloat16", math.ceil(math.sqrt(5 + K)))


@on_engines
@on_rows
def test_front_ends_agree_in_bfloat16(tmp_path: Path, row: str, frontend: Frontend, engine: str) -> None:
    found = judged(tmp_path, row, "bfloat16")
    with frontend.running_on(engine):
        ours = forward(frontend, found, found.routing, dataclasses.replace(found.layer.spec, router=None))
    assert_close(ours.output, found.output, allowed_in_bfloat16(found), "output")


@pytest.mark.parametrize(
    ("row", "change"),
    [("gpt_oss_clamped", {"gate_layout": "halves"}), ("gpt_oss_clamped", {"limit": None}), ("mixtral", {})],
)
def test_the_judge_sees_faults_in_bfloat16(tmp_path: Path, row: str, change: dict[str, Any]) -> None:
    found = judged(tmp_path, row, "bfloat16")
    experts, spec = found.layer.experts, dataclasses.replace(found.layer.spec, router=None)
    spec = dataclasses.replace(spec, activation=dataclasses.replace(spec.activation, **change))
    if not change:
        experts = dataclasses.replace(experts, gate_up=np.roll(experts.gate_up, F, axis=1))
    stages = moe_stages(found.x, experts, found.routing, spec, shared=found.layer.shared)
    with pytest.raises(AssertionError, match="output: worst element"):
        assert_close(stages["output"], found.output, allowed_in_bfloat16(found), "output")
