"""Prepacked weights: the tiled layout, its inverse, and what takes it and what refuses it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch._subclasses import FakeTensorMode

import moe_jax
import moe_torch
from moe_core.base.arrays import ArraySpec
from moe_core.base.target import Target
from moe_core.errors import InvalidInput, Unsupported
from moe_core.formats import (
    FP8_BLOCK,
    INT8_CHANNEL,
    MXFP4,
    MXFP4_CEIL,
    MXFP8,
    Format,
    QuantizedSpec,
    QuantizedTensor,
    Tiling,
    int4_grouped,
    int8_grouped,
    quantized_specs,
)
from moe_core.ops.matmul.forward import plan_matmul_ogs
from moe_core.ops.matmul.quantized.transposed import plan_matmul_quantized_transposed
from moe_core.ops.prepack import prepack as reference
from moe_core.ops.quantize.codes import unpack_nibbles
from moe_core.ops.quantize.reference import codes_and_scales, dequantize, quantize
from moe_core.specs import Activation, MatmulSpec, MoESpec, RouterSpec
from moe_core.specs.operands import ExpertWeights, MatmulOperands, RouterWeights, map_arrays, named_arrays
from moe_jax.bridge import platforms
from tests.support.jax import to_jax
from tests.support.torch import to_torch

#: (order, leading axes, N, D): padded in rows, columns, both and neither.
SHAPES = (
    ("rows", (), 1, 32), ("rows", (3,), 70, 160), ("interleaved", (2, 2), 130, 96), ("halves", (2,), 128, 288),
    ("rows", (2,), 64, 128), ("rows", (0,), 64, 32),
)  # fmt: skip
E, D, F, K = 3, 96, 64, 2
REFERENCE = Target("reference")


@pytest.fixture(autouse=True)
def jax_on_a_cpu() -> Iterator[None]:
    """Float32 rows of prepacked weights have no kernel: what JAX computes here, the reference does."""
    with jax.default_device(jax.devices("cpu")[0]):
        yield


def drawn(lead: tuple[int, ...], rows: int, columns: int, layout: str = "out_in") -> QuantizedTensor:
    """Any bytes, so that every code and every scale is among them."""
    random = np.random.default_rng(rows)
    axes = (rows, columns) if layout == "out_in" else (columns, rows)
    packed = quantized_specs(QuantizedSpec(MXFP4, layout), (*lead, *axes))
    return map_arrays(packed, lambda spec: random.integers(0, 256, spec.shape).astype(np.uint8))


def bits(tree: Any) -> list[bytes]:
    return [np.asarray(array).tobytes() for _, array in named_arrays(tree)]


def experts_of(gate_layout: str, lead: tuple[int, ...] = (E,)) -> tuple[ExpertWeights, MoESpec]:
    """mxfp4 experts with biases, and what they are used with."""
    random = np.random.default_rng(5)

    def weight(*shape: int) -> QuantizedTensor:
        return quantize(random.standard_normal((*lead, *shape), np.float32) / 8, MXFP4)

    bias = random.standard_normal((*lead, 2 * F), np.float32)
    layer = None if len(lead) == 1 else np.array([1], np.int32)
    experts = ExpertWeights(weight(2 * F, D), weight(D, F), gate_up_bias=bias, layer_index=layer)
    spec = MoESpec(Activation("silu", gate_layout=gate_layout), RouterSpec(K), weight_layout="out_in")
    return experts, spec


def inputs() -> tuple[np.ndarray, RouterWeights]:
    random = np.random.default_rng(6)
    return random.standard_normal((5, D), np.float32), RouterWeights(random.standard_normal((D, E), np.float32))


@pytest.mark.parametrize(("order", "lead", "rows", "columns"), SHAPES)
def test_tiling_has_an_inverse_in_every_library(order: str, lead: tuple[int, ...], rows: int, columns: int) -> None:
    tensor = drawn(lead, rows, columns)
    gate_layout = None if order == "rows" else order
    tiled = reference.prepack_weights(tensor, gate_layout=gate_layout)
    assert tiled.shape == tensor.shape and tiled.spec.tiling == Tiling(rows, columns, order)
    assert str(tiled) == f"{tensor} tiled in order {order}" and reference.tile(tiled, order) is tiled
    assert bits(reference.restore_weights(tiled)) == bits(tensor)
    assert reference.restore_weights(tiled).spec == tensor.spec
    for package, convert in ((moe_torch, to_torch), (moe_jax, to_jax)):
        found = package.prepack_weights(convert(tensor), gate_layout=gate_layout)
        assert found.spec == tiled.spec and bits(found) == bits(tiled), package
        restored = package.restore_weights(found)
        assert restored.spec == tensor.spec and bits(restored) == bits(tensor), package
    if lead:
        jitted = jax.jit(lambda tensor: moe_jax.prepack_weights(tensor, gate_layout=gate_layout))(to_jax(tensor))
        assert jitted.spec == tiled.spec and bits(jitted) == bits(tiled)


@pytest.mark.parametrize(("order", "lead", "rows", "columns"), SHAPES[1:4])
def test_bytes_lie_where_the_format_says(order: str, lead: tuple[int, ...], rows: int, columns: int) -> None:
    """The formulas of `moe_core.formats.tiling`, one code and one scale at a time."""
    tensor = drawn(lead, rows, columns)
    tensor = map_arrays(tensor, lambda array: array[(0,) * len(lead)])
    tiled, codes = reference.tile(tensor, order), unpack_nibbles(tensor.values)
    blocks = (rows + 63) // 64
    assert tiled.values.shape[:2] == (blocks, (columns + 127) // 128)
    random = np.random.default_rng(0)
    for _ in range(300):
        block, side, row, step = (int(random.integers(size)) for size in (blocks, 2, 32, tiled.values.shape[1]))
        t, q, b, i = (int(random.integers(size)) for size in (4, 4, 2, 4))
        source = {
            "rows": 64 * block + 32 * side + row,
            "interleaved": 64 * block + 2 * row + side,
            "halves": side * (rows // 2) + 32 * block + row,
        }[order]
        column = 128 * step + 32 * q + 8 * i + 2 * t + b
        inside = source < rows and column < columns
        first = 2048 * side + 64 * row + 16 * t + 4 * q + 2 * b
        low, high = (int(byte) for byte in tiled.values[block, step, first : first + 2])
        places = ((15, 8, 7, 6), (12, 5, 4, 3), (9, 2, 1, 0), (11, 10, 14, 13))[i]
        code = sum(((low | high << 8) >> place & 1) << bit for bit, place in zip((3, 2, 1, 0), places, strict=True))
        assert code == (int(codes[source, column]) if inside else 0)
        scale = int(tiled.scales[block, step, 128 * side + 4 * row + q])
        assert scale == (int(tensor.scales[source, column // 32]) if inside else 0)


def test_numbers_are_those_of_the_published_layout() -> None:
    tensor, stored = drawn((2,), 70, 160), drawn((2,), 70, 160, "in_out")
    tiled = reference.tile(tensor, "rows")
    np.testing.assert_array_equal(dequantize(tiled), dequantize(tensor))
    np.testing.assert_array_equal(moe_torch.dequantize(to_torch(tiled)).numpy(), dequantize(tensor))
    np.testing.assert_array_equal(np.asarray(moe_jax.dequantize(to_jax(tiled))), dequantize(tensor))
    one, other = (map_arrays(each, lambda array: array[1]) for each in (tiled, tensor))
    for found, expected in zip(codes_and_scales(one), codes_and_scales(other), strict=True):
        np.testing.assert_array_equal(found, expected)
    transposed = reference.prepack_weights(stored)
    np.testing.assert_array_equal(dequantize(transposed), dequantize(stored).swapaxes(1, 2))
    for package, convert in ((moe_torch, to_torch), (moe_jax, to_jax)):
        assert bits(package.prepack_weights(convert(stored))) == bits(transposed)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Tiling(64, 48, "rows"), "columns must be a multiple of 32"),
        (lambda: Tiling(64, -32, "rows"), "columns must be an integer of at least 0"),
        (lambda: Tiling(65, 32, "interleaved"), "rows must be a multiple of 2 for order 'interleaved'"),
        (lambda: Tiling(96, 32, "halves"), "rows must be a multiple of 64 for order 'halves'"),
        (lambda: Tiling(64, 32, "separate"), "order must be one of"),
        (lambda: QuantizedSpec(MXFP4, "in_out", Tiling(64, 32, "rows")), "layout must be out_in with a tiling"),
        (lambda: quantized_specs(QuantizedSpec(MXFP4, tiling=Tiling(64, 32, "rows")), (64, 64)), "shape must end in"),
        (lambda: prepared_values(np.zeros((1, 1, 4095), np.uint8)), r"values of .* must be \(1, 1, 4096\)"),
        (lambda: prepared_values(np.zeros((1, 4096), np.uint8)), "values of a tiled tensor must have at least 3 axes"),
        (lambda: reference.tile(reference.tile(drawn((), 64, 32), "rows"), "halves"), "must not be tiled yet"),
        (lambda: reference.prepack_weights(drawn((), 64, 32), gate_layout="separate"), "gate_layout must be None"),
        (lambda: reference.prepack_weights(drawn((), 64, 32), experts_of("halves")[1]), "spec must be None with one t"),
        (lambda: reference.prepack_weights(np.zeros(3)), "weights must be QuantizedTensor or ExpertWeights"),
        (lambda: reference.restore_weights(np.zeros(3)), "weights must be QuantizedTensor or ExpertWeights.*prepack_w"),
        (lambda: reference.prepack_weights(experts_of("halves")[0]), "spec must be the MoESpec of the experts"),
        (lambda: reference.prepack_weights(ExpertWeights(1, 2), experts_of("halves")[1]), "gate_up or down quantised"),
    ],
)
def test_what_cannot_be_tiled_is_refused(make: Any, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        make()


def prepared_values(values: np.ndarray) -> QuantizedTensor:
    spec = QuantizedSpec(MXFP4, tiling=Tiling(64, 32, "rows"))
    return QuantizedTensor(spec, values, np.zeros((1, 1, 256), np.uint8))


@pytest.mark.parametrize(
    "format",
    [FP8_BLOCK, MXFP8, int4_grouped(16), int8_grouped(96), MXFP4, MXFP4_CEIL, int4_grouped(256), INT8_CHANNEL],
    ids=str,
)
def test_formats_that_can_be_tiled(format: Format) -> None:
    if format in (MXFP4, MXFP4_CEIL, int4_grouped(256), INT8_CHANNEL):
        assert QuantizedSpec(format, tiling=Tiling(64, 32, "rows")).tiling is not None
        return
    with pytest.raises(InvalidInput, match=f"tiling must be None for {format}.*mxfp4 and mxfp4_ceil, and integers"):
        QuantizedSpec(format, tiling=Tiling(64, 32, "rows"))
    tensor = quantize(np.zeros((256, 768), np.float32), format)
    with pytest.raises(InvalidInput, match=f"must be in a format with a tiling, got {format}"):
        reference.prepack_weights(tensor)


@pytest.mark.parametrize("gate_layout", ["halves", "interleaved"])
@pytest.mark.parametrize("lead", [(E,), (2, E)], ids=["layer", "stack"])
def test_forwards_are_those_of_the_published_layout(gate_layout: str, lead: tuple[int, ...]) -> None:
    """On the reference engine, with the same bits, in torch and in JAX, in programs too."""
    experts, spec = experts_of(gate_layout, lead)
    x, router = inputs()
    with moe_torch.cpu_engine("reference"):
        arguments = [to_torch(argument) for argument in (x, experts, router)]
        expected = moe_torch.moe(arguments[0], arguments[1], arguments[2], spec).output
        prepared = moe_torch.prepack_weights(arguments[1], spec)
        assert torch.equal(moe_torch.moe(arguments[0], prepared, arguments[2], spec).output, expected)
        assert bits(moe_torch.restore_weights(prepared)) == bits(experts)
        ready = moe_torch.prepare_moe(prepared, arguments[2], spec)
        assert torch.equal(ready(arguments[0]), expected)
    with moe_jax.cpu_engine("reference"):
        prepare = jax.jit(lambda experts: moe_jax.prepack_weights(experts, spec))
        prepared, routing = prepare(to_jax(experts)), to_jax(router)
        forward = jax.jit(lambda x, experts: moe_jax.moe(x, experts, routing, spec).output)
        assert np.asarray(forward(jnp.asarray(x), prepared)).tobytes() == expected.numpy().tobytes()
        if len(lead) == 2:
            layers = dataclasses.replace(prepared, layer_index=None)
            scanned = jax.lax.scan(lambda carry, one: (carry, forward(x, one)), None, layers)[1]
            assert np.asarray(scanned[1]).tobytes() == expected.numpy().tobytes()


def test_programs_need_kernels_of_the_platform_they_are_lowered_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Float32 rows have none on CUDA: a program for the CPU of a machine with a GPU runs, one for CUDA is refused."""
    experts, spec = experts_of("halves", (E,))
    x, router = inputs()
    monkeypatch.setattr(platforms, "cuda_target", lambda: Target("cuda", 90, 132))
    prepared = moe_jax.prepack_weights(to_jax(experts), spec)
    with moe_jax.cpu_engine("reference"):
        forward = jax.jit(lambda x, routing: moe_jax.moe(x, prepared, routing, spec).output)
        with moe_torch.cpu_engine("reference"):
            expected = moe_torch.moe(*(to_torch(argument) for argument in (x, experts, router)), spec).output
        assert np.asarray(forward(jnp.asarray(x), to_jax(router))).tobytes() == expected.numpy().tobytes()
        for exported in (["cuda"], ["cpu", "cuda"]):
            with pytest.raises(Unsupported, match="prepacked weights are multiplied with bfloat16 rows"):
                jax.export.export(forward, platforms=exported)(jnp.asarray(x), to_jax(router))


def test_products_of_torch_know_their_width() -> None:
    """Fake tensors, as compiled programs have them, and the op itself."""
    tensor = drawn((E,), 128, D)
    operands = MatmulOperands(torch.zeros(4, D), to_torch(reference.tile(map_arrays(tensor, lambda a: a[0]), "halves")))
    spec = MatmulSpec("out_in", activation=Activation("silu"))
    with moe_torch.cpu_engine("reference"):
        assert moe_torch.matmul_ogs(operands, None, spec).shape == (4, 64)
        with FakeTensorMode() as mode:
            fake = map_arrays(operands, mode.from_tensor)
            assert moe_torch.matmul_ogs(fake, None, spec).shape == (4, 64)


def wrong_orders() -> list[Any]:
    """(activation, order, message)"""
    return [
        (Activation("silu", gate_layout="interleaved"), "halves", "must be tiled in order 'interleaved'"),
        (Activation("silu"), "rows", "must be tiled in order 'halves'"),
        (None, "halves", "must be tiled in order 'rows' for a product without gates"),
        (Activation("silu", gate_layout="separate"), "rows", "published layout where gate and up are two buffers"),
    ]


@pytest.mark.parametrize(("activation", "order", "message"), wrong_orders())
def test_wrong_orders_are_refused(activation: Activation | None, order: str, message: str) -> None:
    weight = map_arrays(reference.tile(drawn((), 128, D), order), lambda array: ArraySpec(array.shape, "uint8"))
    up = weight if activation is not None and activation.gate_layout == "separate" else None
    operands = MatmulOperands(ArraySpec((4, D), "bfloat16"), weight, up)
    with pytest.raises(InvalidInput, match=f"weight .*{message}.*restore_weights"):
        plan_matmul_ogs(operands, None, MatmulSpec("out_in", activation=activation), REFERENCE)


def test_wrong_orders_of_experts_are_refused() -> None:
    experts, spec = experts_of("halves")
    x, router = inputs()
    wrong = dataclasses.replace(spec, activation=Activation("silu", gate_layout="interleaved"))
    prepared = moe_torch.prepack_weights(to_torch(experts), spec)
    with pytest.raises(InvalidInput, match=r"experts\.gate_up must be tiled in order 'interleaved'"):
        moe_torch.moe(to_torch(x), prepared, to_torch(router), wrong)
    down = moe_torch.prepack_weights(to_torch(drawn((E,), 128, F)), gate_layout="halves")
    rows = dataclasses.replace(prepared, down=down)
    with pytest.raises(InvalidInput, match=r"experts\.down must be tiled in order 'rows'"):
        moe_torch.moe(to_torch(x), rows, to_torch(router), spec)


def test_what_has_no_kernel_or_gradient_is_refused() -> None:
    """Never a product with bytes in the wrong places."""
    experts, spec = experts_of("halves")
    x, router = inputs()
    arguments = [to_torch(argument) for argument in (x, experts, router)]
    prepared = moe_torch.prepack_weights(arguments[1], spec)
    tensor = map_arrays(reference.tile(drawn((), 128, D), "rows"), lambda array: ArraySpec(array.shape, "uint8"))
    operands = MatmulOperands(ArraySpec((4, D), "bfloat16"), tensor)
    with pytest.raises(Unsupported, match="prepacked weights"):
        plan_matmul_ogs(operands, None, MatmulSpec("out_in"), Target("cuda", 80, 108))
    back = MatmulOperands(ArraySpec((4, 128), "bfloat16"), tensor)
    for target in (REFERENCE, Target("cuda", 90, 132)):
        with pytest.raises(Unsupported, match="no product with the transpose of prepacked weights"):
            plan_matmul_quantized_transposed(back, None, MatmulSpec("out_in"), target)
    with moe_torch.cpu_engine("reference"), pytest.raises(Unsupported, match="prepacked weights; train with"):
        moe_torch.moe(arguments[0].requires_grad_(), prepared, arguments[2], spec)
    product = MatmulOperands(torch.zeros(4, F, requires_grad=True), map_arrays(prepared.down, lambda array: array[0]))
    with moe_torch.cpu_engine("reference"), pytest.raises(Unsupported, match="prepacked weights; train with"):
        moe_torch.matmul_ogs(product, None, MatmulSpec("out_in"))
    ours, routing = moe_jax.prepack_weights(to_jax(experts), spec), to_jax(router)
    with moe_jax.cpu_engine("reference"), pytest.raises(Unsupported, match="prepacked weights; train with"):
        jax.grad(lambda x: moe_jax.moe(x, ours, routing, spec).output.sum())(jnp.asarray(x))


def test_plans_tell_tilings_apart() -> None:
    weight = drawn((), 128, D)
    plans = []
    for tensor in (weight, reference.tile(weight, "rows")):
        specs = map_arrays(tensor, lambda array: ArraySpec(array.shape, "uint8"))
        operands = MatmulOperands(ArraySpec((4, D), "bfloat16"), specs)
        plans.append(plan_matmul_ogs(operands, None, MatmulSpec("out_in"), REFERENCE))
    assert plans[0].key != plans[1].key and "tiled in order rows" in plans[1].explain()
