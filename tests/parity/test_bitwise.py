"""torch equals JAX, bit for bit: the same plans, through both front-ends, on whatever device real kernels run here."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

jax = pytest.importorskip("jax", reason="needs both frameworks")
torch = pytest.importorskip("torch", reason="needs both frameworks")

import moe_jax
import moe_torch
from moe_core.parity.builtin_cases import BUILT_IN, Draw, built_in_case
from moe_core.parity.devices import use_gpu
from moe_core.specs.operands import TopK, map_arrays
from moe_jax.parity import JaxEngine
from moe_torch.layers.weights import to_numpy
from moe_torch.parity.torch import TorchEngine, to_torch
from tests.support.moe import Layer, layers


def run_torch(layer: Layer) -> Any:
    device = torch.device("cuda" if use_gpu() else "cpu")

    def put(value: Any) -> Any:
        return None if value is None else to_torch(value, device)

    extras = {"token_mask": put(layer.token_mask), "expert_map": put(layer.expert_map)}
    shared = None if layer.shared is None else map_arrays(layer.shared, put)
    bundles = map_arrays(layer.experts, put), map_arrays(layer.routing, put)
    with torch.no_grad():
        return moe_torch.moe(put(layer.x), *bundles, layer.spec, **extras, shared=shared)


def run_jax(layer: Layer) -> Any:
    device = jax.devices("cuda" if use_gpu() else "cpu")[0]

    def put(value: Any) -> Any:
        return None if value is None else jax.device_put(value, device)

    extras = {"token_mask": put(layer.token_mask), "expert_map": put(layer.expert_map)}
    shared = None if layer.shared is None else map_arrays(layer.shared, put)
    # JAX has ids int64 with x64 alone.
    wide = isinstance(layer.routing, TopK) and layer.routing.ids.dtype == np.int64
    with jax.default_device(device), jax.enable_x64(wide):
        bundles = map_arrays(layer.experts, put), map_arrays(layer.routing, put)
        return moe_jax.moe(put(layer.x), *bundles, layer.spec, **extras, shared=shared)


def assert_same_bits(first: np.ndarray, second: np.ndarray, label: str) -> None:
    assert first.shape == second.shape and first.dtype == second.dtype, label
    assert first.tobytes() == second.tobytes(), f"{label} differs in {np.sum(first != second)} of {first.size} elements"


@given(layers())
def test_composed_forward(layer: Layer) -> None:
    ours, theirs = run_torch(layer), run_jax(layer)
    for name in ours._fields:
        first, second = getattr(ours, name), getattr(theirs, name)
        assert (first is None) == (second is None), name
        if first is not None:
            assert_same_bits(to_numpy(first), np.asarray(second), name)


@given(layers(), st.just(2))
def test_two_runs(layer: Layer, runs: int) -> None:
    outputs = [to_numpy(run_torch(layer).output).tobytes() for _ in range(runs)]
    assert len(set(outputs)) == 1


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", [name for name, case in BUILT_IN.items() if case.scheme is None])
def test_every_stage_of_the_parity_cases(name: str, dtype: str) -> None:
    case = built_in_case(name, Draw(dtype, num_tokens=None if use_gpu() else 24, large=use_gpu()))
    ours, theirs = TorchEngine().run(case, str), JaxEngine().run(case, str)
    assert set(ours.stages) == set(theirs.stages)
    for name, value in ours.stages.items():
        assert_same_bits(np.asarray(value), np.asarray(theirs.stages[name]), f"{case.name} {name}")
    for name, value in ours.composed.items():
        assert_same_bits(np.asarray(value), np.asarray(theirs.composed[name]), f"{case.name} composed {name}")
