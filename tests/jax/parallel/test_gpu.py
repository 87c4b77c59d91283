"""Expert parallelism on GPUs of one host: compiled kernels and XLA's own collectives against one GPU, bit by bit."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from moe_core.layers import MoELayerSpec, SharedExpertsSpec
from moe_core.parallel import ExchangeSpec
from moe_core.runtime.cuda import cuda_available
from moe_jax import layers
from moe_jax.parallel import ExpertAxis
from tests.support.parallel.jax import compare_with_one_device
from tests.support.parallel.placements import placement_of
from tests.support.parallel.twins import PLAIN, draw_problem
from tests.support.parallel.ways import every_way

GPUS = len(jax.devices("cuda")) if cuda_available() else 0
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")]
RANKS = 4 if GPUS >= 4 else 2


@every_way
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_bit_of_one_gpu(way: ExchangeSpec, dtype: str) -> None:
    placement = placement_of("round_robin", 10, RANKS)
    for seed, (tokens, load) in enumerate(((1, "random"), (64, "hot_rank"), (700, "invalid"))):
        problem = draw_problem(seed, placement, (tokens,) * RANKS, 4, load, dtype, PLAIN, sizes=(256, 192))
        compare_with_one_device(problem, way, f"{way}, {tokens} tokens", engine="cuda")


@every_way
def test_a_layer_and_its_bounds(way: ExchangeSpec) -> None:
    """A layer with gated shared experts, on all devices and on one; then with a bound that is too small."""
    spec = MoELayerSpec(256, 192, 4 * RANKS, 4, shared_experts=SharedExpertsSpec(128, gate=True))
    gpus = jax.devices("cuda")[:RANKS]
    mesh = jax.make_mesh((RANKS,), ("ep",), axis_types=(AxisType.Auto,), devices=gpus)
    with jax.default_device(gpus[0]):
        parameters = layers.initialize(spec, jax.random.key(0), param_dtype=jnp.bfloat16)
        x = jax.random.normal(jax.random.key(1), (128 * RANKS, 256), jnp.bfloat16)
        expected = np.asarray(jax.jit(lambda p, x: layers.forward(p, x, spec))(parameters, x), np.float32)
    with jax.set_mesh(mesh):
        placed = jax.device_put(parameters, layers.expert_sharding(spec, mesh))
        for exchange in (way, *([] if way.mode == "all_gather" else [dataclasses.replace(way, receive=RANKS)])):
            axis = ExpertAxis(exchange=exchange)
            call = jax.jit(lambda p, x, axis=axis: layers.forward(p, x, spec, expert_axis=axis, return_aux=True))
            y, aux = call(placed, x)
            found = np.asarray(y, np.float32)
            if exchange == way:
                np.testing.assert_array_equal(found, expected)
                assert aux.overflow.tolist() == [0]
            else:
                assert aux.overflow[0] > 0 and np.isnan(found).any(axis=1).sum() > 0
