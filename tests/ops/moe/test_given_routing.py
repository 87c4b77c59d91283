"""Whole forwards of ids and weights as routers give them: the bits of casting them first, in as many launches."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from moe_core import InvalidInput
from moe_core.base.arrays import ArraySpec
from moe_core.base.dtypes import numpy_dtype
from moe_core.base.target import Target
from moe_core.ops.moe.backward import plan_training
from moe_core.ops.moe.forward import plan_moe
from moe_core.plan.steps import KernelLaunch
from moe_core.specs.operands import MoEOperands, TopK
from tests.support.harness import H200, engine_target, spec_of
from tests.support.moe import Layer, plan_of, run_layer, simple_layer

EXPERTS = 4


def given(tokens: int, top_k: int, dtype: str) -> tuple[Layer, Layer]:
    """The same layer: with int64 ids, some far away, and weights in a dtype; with both cast first."""
    layer, random = simple_layer(tokens), np.random.default_rng(tokens)
    ids = np.stack([random.permutation(EXPERTS)[:top_k] for _ in range(tokens)]).astype(np.int64)
    ids[random.random(ids.shape) < 0.2] = -1
    if tokens > 1:
        ids[1], ids[-1, -1] = 2**32 + 3, -(2**40)
    weights = random.random(ids.shape, np.float32).astype(numpy_dtype(dtype))
    cast = TopK(np.clip(ids, -2, EXPERTS).astype(np.int32), weights.astype(np.float32))
    spec = dataclasses.replace(layer.spec, router=None)
    return tuple(dataclasses.replace(layer, routing=one, spec=spec) for one in (TopK(ids, weights), cast))  # type: ignore[return-value]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize(("tokens", "top_k"), [(1, 1), (1, 2), (12, EXPERTS), (300, 1)])
@pytest.mark.parametrize("target", [engine_target(), Target("reference")], ids=str)
def test_results_are_those_of_casting_first(tokens: int, top_k: int, dtype: str, target: Target) -> None:
    own, cast = given(tokens, top_k, dtype)
    found, expected = run_layer(own, target), run_layer(cast, target)
    for name, wanted in expected.items():
        assert found[name].tobytes() == wanted.tobytes(), name
    assert expected["invalid_ids"][0] == (0 if tokens == 1 else top_k + 1)


@pytest.mark.parametrize("target", [engine_target(), Target("reference")], ids=str)
def test_weights_on_the_input(target: Target) -> None:
    layers = given(9, 1, "bfloat16")
    found, expected = (
        run_layer(
            dataclasses.replace(one, spec=dataclasses.replace(one.spec, apply_router_weight_on_input=True)), target
        )["output"]
        for one in layers
    )
    assert found.tobytes() == expected.tobytes()


@pytest.mark.parametrize("tokens", [1, 12, 64, 4096])
def test_products_and_launches_are_the_same(tokens: int) -> None:
    """Products read fp32 weights: none is another kernel."""
    kernels: list[Any] = []
    for layer in given(tokens, 2, "bfloat16"):
        steps = [step for step in plan_of(layer, H200).steps if isinstance(step, KernelLaunch)]
        kernels.append([(step.kernel, step.grid, step.num_warps, step.dependent) for step in steps])
    assert kernels[0] == kernels[1]


def test_training_reads_them_as_int32_and_fp32() -> None:
    layer, _ = given(9, 2, "bfloat16")
    operands = MoEOperands(*map(spec_of, (layer.x, layer.experts, layer.routing)))
    forward, backward = plan_training(operands, layer.spec, H200)
    assert (forward.spec("routing.ids").dtype, forward.spec("routing.weights").dtype) == ("int64", "bfloat16")
    assert (backward.spec("routing.ids").dtype, backward.spec("routing.weights").dtype) == ("int32", "float32")
    assert backward.spec("d_routing.weights").dtype == "float32"


def test_other_dtypes_are_refused() -> None:
    layer, _ = given(9, 2, "bfloat16")
    x, experts, own = map(spec_of, (layer.x, layer.experts, layer.routing))
    for routing, message in (
        (TopK(ArraySpec(own.ids.shape, "bool"), own.weights), "ids must be int32 or .*, got bool; cast it to int32"),
        (TopK(own.ids, own.ids), "weights must be float32 or bfloat16 or float16, got int64; cast it to float32"),
    ):
        with pytest.raises(InvalidInput, match=rf"routing\.{message}"):
            plan_moe(x, experts, routing, layer.spec, H200)
