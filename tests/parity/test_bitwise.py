"""torch equals JAX bit for bit, plain and quantised: the same plans, on whatever device real kernels run here."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

jax = pytest.importorskip("jax", reason="needs both frameworks")
torch = pytest.importorskip("torch", reason="needs both frameworks")

import moe_jax
import moe_torch
from moe_core.formats import FP8_BLOCK, FP8_GROUP, FP8_TENSOR, INT8_TOKEN, MXFP4, MXFP8, format_named, scheme_named
from moe_core.parity.builtin_cases import BUILT_IN, Draw, built_in_case
from moe_core.parity.devices import use_gpu
from moe_core.specs import Activation, MatmulSpec, MoESpec, RouterSpec
from moe_core.specs.operands import ExpertWeights, RouterWeights, TopK, map_arrays, named_arrays
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


NAMES = [name for name, case in BUILT_IN.items() if case.scheme is None]
#: On a CPU each in one dtype, by turns: `make parity` has all of them in both.
CASES = [(name, ("bfloat16", "float32")[number % 2]) for number, name in enumerate(NAMES)]


@pytest.mark.parametrize(("name", "dtype"), itertools.product(NAMES, ("bfloat16", "float32")) if use_gpu() else CASES)
def test_every_stage_of_the_parity_cases(name: str, dtype: str) -> None:
    case = built_in_case(name, Draw(dtype, num_tokens=None if use_gpu() else 9, large=use_gpu()))
    ours, theirs = TorchEngine().run(case, str), JaxEngine().run(case, str)
    assert set(ours.stages) == set(theirs.stages)
    for name, value in ours.stages.items():
        assert_same_bits(np.asarray(value), np.asarray(theirs.stages[name]), f"{case.name} {name}")
    for name, value in ours.composed.items():
        assert_same_bits(np.asarray(value), np.asarray(theirs.composed[name]), f"{case.name} composed {name}")


T, E, D, F = 7, 3, 128, 128
SCHEMES = ("fp8_block", "int8_w8a8", "int4_w4a16_zp", "mxfp4_w4a16", "mxfp4_w4a4")


def put(array: np.ndarray) -> Any:
    """A JAX array where real kernels run."""
    return jax.device_put(array, jax.devices("cuda" if use_gpu() else "cpu")[0])


def shared(tree: Any) -> Any:
    """The same arrays in torch, on the same memory."""
    return (
        map_arrays(tree, moe_torch.from_dlpack)
        if hasattr(tree, "__dataclass_fields__")
        else moe_torch.from_dlpack(tree)
    )


def bits(value: Any) -> list[bytes]:
    """The bytes of an array, or of all arrays of a bundle, of either framework."""
    if hasattr(value, "__dataclass_fields__"):
        return [byte for _, array in named_arrays(value) for byte in bits(array)]
    if isinstance(value, torch.Tensor):
        return [value.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()]
    return [np.asarray(value).tobytes()]


def draw(random: np.random.Generator, *shape: int) -> Any:
    return put((random.standard_normal(shape) * shape[-1] ** -0.5).astype(np.float32))


@pytest.mark.parametrize("name", SCHEMES)
def test_composed_forward_of_quantised_experts(name: str) -> None:
    scheme, random = scheme_named(name), np.random.default_rng(0)
    weights = [draw(random, E, 2 * F, D), draw(random, E, D, F)]
    experts = ExpertWeights(*(moe_jax.quantize(weight, scheme.weights) for weight in weights))
    routing = RouterWeights(draw(random, D, E))
    x = put(random.standard_normal((T, D)).astype(np.float32)).astype("bfloat16")
    spec = MoESpec(Activation("silu"), RouterSpec(2), weight_layout="out_in", activations=scheme.activations)
    ours = moe_jax.moe(x, experts, routing, spec)
    theirs = moe_torch.moe(shared(x), shared(experts), shared(routing), spec)
    for field, first, second in zip(ours._fields, ours, theirs, strict=True):
        assert bits(first) == bits(second), field


@pytest.mark.parametrize("format", [FP8_BLOCK, MXFP4, format_named("int4_g32_zp")], ids=str)
def test_quantised_weights(format: Any) -> None:
    weight = draw(np.random.default_rng(1), 2, 96, 64)
    ours, theirs = moe_jax.quantize(weight, format), moe_torch.quantize(shared(weight), format)
    assert ours.spec == theirs.spec and bits(ours) == bits(theirs)
    assert bits(moe_jax.dequantize(ours, "bfloat16")) == bits(moe_torch.dequantize(theirs, "bfloat16"))


@pytest.mark.parametrize("format", [FP8_GROUP, INT8_TOKEN, MXFP8], ids=str)
def test_quantised_rows_and_their_product(format: Any) -> None:
    random = np.random.default_rng(2)
    x, other = (
        draw(random, T, D),
        {FP8_GROUP: FP8_BLOCK, INT8_TOKEN: format_named("int8_channel"), MXFP8: MXFP4}[format],
    )
    weight = moe_jax.quantize(draw(random, 48, D), other)
    ours, theirs = moe_jax.quantize_rows(x, format), moe_torch.quantize_rows(shared(x), format)
    assert bits(ours) == bits(theirs)
    spec = MatmulSpec("out_in", out_dtype="bfloat16")
    y = moe_jax.matmul_ogs(moe_jax.MatmulOperands(ours, weight), None, spec)
    assert bits(y) == bits(moe_torch.matmul_ogs(moe_torch.MatmulOperands(theirs, shared(weight)), None, spec))


def test_rows_of_one_scale_that_some_use() -> None:
    x, used_by = draw(np.random.default_rng(4), T, D).at[2].set(np.nan), np.repeat(np.arange(T), 2).astype(np.int32)
    used_by[4:6] = -1
    users = put(used_by)
    ours = moe_jax.quantize_rows(x, FP8_TENSOR, used_by=users)
    assert bits(ours) == bits(moe_torch.quantize_rows(shared(x), FP8_TENSOR, used_by=shared(users)))
    assert np.isfinite(np.asarray(ours.scales)).all() and not np.asarray(ours.values.view("uint8"))[2].any()


def test_fp8_travels_both_ways_without_a_copy() -> None:
    ours = moe_jax.quantize(draw(np.random.default_rng(3), E, 64, D), FP8_BLOCK)
    theirs = shared(ours)
    assert theirs.values.dtype == torch.float8_e4m3fn and theirs.spec == ours.spec
    back = map_arrays(theirs, moe_jax.from_dlpack)
    for (name, first), (_, second), (_, third) in zip(*map(named_arrays, (ours, theirs, back)), strict=True):
        assert first.unsafe_buffer_pointer() == second.data_ptr() == third.unsafe_buffer_pointer(), name
    assert back.values.dtype == jax.numpy.float8_e4m3fn and bits(back) == bits(ours)
