"""A layer out of ops has the gradients of the composed op, bit by bit, where `wide` adds up what flows into x."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from moe_core.errors import InvalidInput
from moe_core.specs.operands import ExpertWeights, RouterWeights, TopK
from tests.support.frontends import Frontend, require_equal
from tests.support.frontends.small import NUM_EXPERTS, on_engines, small_layer

Leaves = dict[str, Any]


def leaves_of(frontend: Frontend, dtype: str) -> tuple[Leaves, Any]:
    layer = small_layer(dtype, num_tokens=19)
    leaves = {"x": layer.x, "gate_up": layer.experts.gate_up, "down": layer.experts.down}
    return frontend.arrays(leaves | {"router": layer.routing.weight}), layer.spec


def composed(frontend: Frontend, leaves: Leaves, spec: Any) -> Any:
    experts = ExpertWeights(leaves["gate_up"], leaves["down"])
    return frontend.ops.moe(leaves["x"], experts, RouterWeights(leaves["router"]), spec).output


def staged(frontend: Frontend, leaves: Leaves, spec: Any, wide: bool = True) -> Any:
    """What expert parallelism does: route, send rows to the experts, which see a slot each, and add up at home."""
    x, ops = leaves["x"], frontend.ops
    sums = {"wide": frontend.cast(x, "float32")} if wide else {}
    logits = ops.router(x, leaves["router"], spec=spec.logits_spec(), **sums)
    ids, weights = ops.route(logits, spec.router)
    layout = ops.make_layout(ids, NUM_EXPERTS)
    rows, slots = ops.gather_rows(x, layout, **sums), layout.slot_of_row
    experts = ExpertWeights(leaves["gate_up"], leaves["down"])
    routing = TopK(ids.reshape(-1)[slots][:, None], weights.reshape(-1)[slots][:, None])
    alone = dataclasses.replace(spec, router=None)
    return ops.reduce(ops.moe(rows, experts, routing, alone).output, layout, order="row")


@on_engines
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_stages_have_the_gradients_of_the_composed_op(frontend: Frontend, engine: str, dtype: str) -> None:
    with frontend.running_on(engine):
        leaves, spec = leaves_of(frontend, dtype)
        expected = frontend.pull(lambda leaves: composed(frontend, leaves, spec), leaves)
        require_equal(frontend.pull(lambda leaves: staged(frontend, leaves, spec), leaves), expected)
        twice = frontend.pull(lambda leaves: staged(frontend, leaves, spec, wide=False), leaves)
        assert dtype == "float32" or not np.array_equal(twice["d_x"], expected["d_x"]), "two casts are one"


def test_programs(frontend: Frontend) -> None:
    with frontend.running_on("reference"):
        leaves, spec = leaves_of(frontend, "bfloat16")

        def loss(leaves: Leaves) -> Any:
            return (frontend.cast(staged(frontend, leaves, spec), "float32") ** 2).sum()

        wanted = frontend.numpy(frontend.gradients(loss, leaves))
        for name, derive in frontend.programs(loss).items():
            require_equal(frontend.numpy(derive(leaves)), wanted, name)


def test_what_wide_must_be(frontend: Frontend) -> None:
    layer = small_layer()
    with frontend.running_on("reference"):
        x, weight, ids = frontend.arrays((layer.x, layer.routing.weight, np.zeros((9, 1), np.int32)))
        layout = frontend.ops.make_layout(ids, 1)
        with pytest.raises(InvalidInput, match="wide must be float32, got float16; cast it"):
            frontend.ops.gather_rows(x, layout, wide=frontend.cast(x, "float16"))
        with pytest.raises(InvalidInput, match=r"wide must be \[9, 48\], got \(8, 48\)"):
            frontend.ops.router(x, weight, wide=x[:8])
