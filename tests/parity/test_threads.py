"""The NumPy engine has the same bits in both frameworks at every number of threads."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")
jax = pytest.importorskip("jax")
nnx = pytest.importorskip("flax.nnx")

import moe_jax.nnx
import moe_torch
from moe_core.base import target, threads
from moe_core.layers import MoELayerSpec, SharedExpertsSpec
from moe_core.specs import RouterSpec

#: Several pieces of rows and columns for an expert, and at 16 threads few pieces of rows for them.
LARGE = MoELayerSpec(64, 288, 3, 2, RouterSpec(renormalize=True), shared_experts=SharedExpertsSpec(48)), 700
#: More experts than threads, which share pieces.
MANY = MoELayerSpec(64, 288, 20, 2, RouterSpec(renormalize=True)), 150


@pytest.fixture
def torch_threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def _torch_step(layer, x):
    layer.zero_grad()
    leaf = x.clone().requires_grad_()
    y = layer(leaf)
    y.backward(torch.ones_like(y))
    return [y, leaf.grad, *(parameter.grad for parameter in layer.parameters())]


@pytest.mark.parametrize("spec, tokens", [LARGE, MANY], ids=["large", "many"])
def test_torch_and_jax_are_bitwise_equal_at_any_number_of_threads(spec, tokens, torch_threads, monkeypatch):
    # Work that is worth several threads, however little it is.
    monkeypatch.setattr(threads, "_WAKE_NANOSECONDS", 1)
    monkeypatch.setattr("moe_core.ops.matmul.reference.forward._PIECE_NANOSECONDS", 1)
    torch.manual_seed(0)
    layer = moe_torch.MoE.from_spec(spec)
    x = torch.randn(tokens, spec.d_model)
    found = {}
    with target.cpu_engine("reference"), jax.default_device(jax.devices("cpu")[0]):
        graph, state = nnx.split(moe_jax.nnx.MoE.from_weights(layer.export_weights()))

        @jax.jit
        def step(state, x):
            def loss(state, x):
                y = nnx.merge(graph, state)(x)
                return y.sum(), y

            (_, y), (_, d_x) = jax.value_and_grad(loss, (0, 1), has_aux=True)(state, x)
            return y, d_x

        for count in (1, 2, 8, 16):
            torch_threads(count)
            found["torch", count] = [array.detach().numpy().copy() for array in _torch_step(layer, x)]
            # The callback runs in a thread of XLA's, where the default counts.
            monkeypatch.setattr(threads, "_default_count", lambda count=count: count)
            found["jax", count] = [np.asarray(array) for array in step(state, x.numpy())]
    for key, arrays in found.items():
        for array, wanted in zip(arrays, found["torch", 1], strict=False):
            np.testing.assert_array_equal(array, wanted, err_msg=str(key))
