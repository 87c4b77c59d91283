"""The composed forward against the reference's stages: every entrance, map, mask, shared expert and layout."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given

from moe_core import InvalidInput
from moe_core.base import dtypes
from moe_core.base.target import Target
from moe_core.ops.moe.fuse import CHAINED
from moe_core.ops.moe.reference.forward import moe_stages
from moe_core.ops.routing.topk import ROUTE_AND_LAYOUT
from moe_core.parity.tolerance import assert_close, stage_tolerances
from moe_core.plan.steps import KernelLaunch
from moe_core.specs import Activation, MoESpec, RouterSpec
from moe_core.specs.operands import RouterLogits, RouterWeights, TopK
from tests.support.moe import Layer, layers, plan_of, run_layer, simple_layer


def check(layer: Layer, target: Target | None = None) -> None:
    """Run, compare every output with the reference; ids must agree exactly (draws have no near ties)."""
    actual = run_layer(layer, target)
    expected = moe_stages(layer.x, layer.experts, layer.routing, layer.spec, **layer.extras)
    source = {RouterWeights: "x", RouterLogits: "logits", TopK: "ids"}[type(layer.routing)]
    num_experts, top_k = layer.experts.down.shape[-3], expected["ids"].shape[1]
    d_ff = layer.experts.down.shape[-2 if layer.spec.weight_layout == "in_out" else -1]
    tolerances = stage_tolerances(
        layer.spec, dtypes.canonical(layer.x.dtype), d_model=layer.x.shape[1], d_ff=d_ff, top_k=top_k,
        num_experts=num_experts, routed_from=source,
    )  # fmt: skip
    assert set(actual) <= set(expected)
    for name, value in actual.items():
        assert_close(value, expected[name], tolerances[name], label=name)


@given(layers())
def test_matches_the_reference(layer: Layer) -> None:
    check(layer)


@given(layers())
def test_reference_engine_matches_too(layer: Layer) -> None:
    check(layer, Target("reference"))


def test_invalid_ids_are_counted_and_contribute_nothing() -> None:
    layer = simple_layer()
    ids = np.array([[0, 1], [4, 1], [-2, 2], [-1, -1], [2**31 - 1, -(2**31)], [0, 0], [1, 2], [3, 3], [0, 3]], np.int32)
    weights = np.ones(ids.shape, np.float32)
    spec = dataclasses.replace(layer.spec, router=None)
    actual = run_layer(dataclasses.replace(layer, routing=TopK(ids, weights), spec=spec))
    assert actual["invalid_ids"].tolist() == [4]
    clean = np.where((ids >= 0) & (ids < 4), ids, -1).astype(np.int32)
    same = run_layer(dataclasses.replace(layer, routing=TopK(clean, weights), spec=spec))
    assert actual["output"].tobytes() == same["output"].tobytes()
    assert not actual["output"][3:5].any()


def test_a_masked_token_with_nan_leaks_nowhere() -> None:
    layer = simple_layer()
    mask = np.ones(9, bool)
    mask[4] = False
    clean = run_layer(dataclasses.replace(layer, token_mask=mask))
    x, logits = layer.x.copy(), layer.routing.logits.copy()
    x[4], logits[4] = np.nan, np.nan
    dirty = run_layer(dataclasses.replace(layer, x=x, routing=RouterLogits(logits), token_mask=mask))
    for name, value in clean.items():
        assert value.tobytes() == dirty[name].tobytes(), name
    assert clean["ids"][4].tolist() == [-1, -1] and not clean["output"][4].any()
    assert clean["tokens_per_expert"].sum() == 16


def test_composed_plan_is_made_of_few_launches() -> None:
    layer = simple_layer()
    plan = plan_of(layer, Target("cuda", 90, 132))
    kernels = [step.kernel for step in plan.steps if isinstance(step, KernelLaunch)]
    assert kernels == [ROUTE_AND_LAYOUT, CHAINED], kernels
    assert "matmul 1" in plan.explain() and "sums" in plan.explain()


def test_changing_the_tokens_changes_no_compiled_constant() -> None:
    """Two batches of the same regime must share their kernels."""

    def constants(num_tokens: int):
        plan = plan_of(simple_layer(num_tokens), Target("cuda", 90, 132))
        return [(s.kernel, [(n, a) for n, a in s.arguments if type(a).__name__ == "Constant"]) for s in plan.steps]

    assert constants(4100) == constants(4200)


def test_router_weight_on_input_needs_one_expert_per_token() -> None:
    with pytest.raises(InvalidInput, match="top_k must be 1 with apply_router_weight_on_input, got 2"):
        MoESpec(Activation("silu"), RouterSpec(2), apply_router_weight_on_input=True)
    layer = simple_layer()
    topk = TopK(np.zeros((9, 2), np.int32), np.zeros((9, 2), np.float32))
    spec = MoESpec(Activation("silu"), apply_router_weight_on_input=True)
    with pytest.raises(InvalidInput, match="top_k must be 1 with apply_router_weight_on_input, got 2"):
        plan_of(dataclasses.replace(layer, routing=topk, spec=spec), Target("interpreter"))
