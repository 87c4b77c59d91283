"""Quantised experts on torch tensors: quantisers, operators, programs, launchers and errors."""

from __future__ import annotations

import dataclasses
from typing import Any

import ml_dtypes
import numpy as np
import pytest

torch = pytest.importorskip("torch")

import moe_torch
from moe_core.formats import format_named, scheme_named
from moe_core.ops.moe.reference.forward import moe_stages
from moe_core.parity.tolerance import assert_close, quantized_matmul_tolerance
from moe_core.specs.operands import map_arrays
from moe_torch import MatmulOperands, MatmulSpec, RouterLogits, TopK, prepare_moe
from moe_torch.bridge.operator import Operator
from moe_torch.layers.weights import to_numpy
from moe_torch.operators.stages import MATMUL_OGS_QUANTIZED, QUANTIZE_ROWS
from moe_torch.operators.table import MOE_QUANTIZED
from tests.support.torch import NUM_EXPERTS, REAL_KERNELS, Layer, require_equal, running_on, to_torch

D_MODEL, D_FF = 128, 128
SCHEMES = ("mxfp4_w4a8", "fp8_block", "int4_w4a16_zp")


def quantized_layer(scheme: str, device: Any = "cpu", num_tokens: int = 9) -> Any:
    """A gated layer whose experts are quantised."""
    chosen = scheme_named(scheme)
    random = np.random.default_rng(1)

    def matrix(rows: int, columns: int) -> Any:
        weight = random.standard_normal((NUM_EXPERTS, rows, columns)).astype(np.float32) * columns**-0.5
        return moe_torch.quantize(torch.tensor(weight, device=device), chosen.weights)

    x = random.standard_normal((num_tokens, D_MODEL)).astype(ml_dtypes.bfloat16)
    router = random.standard_normal((NUM_EXPERTS, D_MODEL)).astype(np.float32)
    spec = moe_torch.MoESpec(
        moe_torch.Activation("silu"),
        moe_torch.RouterSpec(2),
        weight_layout="out_in",
        router_weight_layout="out_in",
        activations=chosen.activations,
    )
    experts = moe_torch.ExpertWeights(matrix(2 * D_FF, D_MODEL), matrix(D_MODEL, D_FF))
    return Layer(to_torch(x, device), experts, moe_torch.RouterWeights(to_torch(router, device)), spec)


def plain_experts(layer: Any) -> Any:
    """The experts, dequantised to the dtype of x."""
    matrices = {name: moe_torch.dequantize(getattr(layer.experts, name), layer.x.dtype) for name in ("gate_up", "down")}
    return moe_torch.ExpertWeights(**matrices)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_whole_layers(scheme: str) -> None:
    """On the reference engine the reference's bits, on real kernels close; a launcher has the operator's bits."""
    layer = quantized_layer(scheme)
    arrays = [map_arrays(bundle, to_numpy) for bundle in layer[1:3]]
    stages = moe_stages(to_numpy(layer.x), arrays[0], arrays[1], layer.spec)
    expected = stages["output"].astype(np.float32)
    for engine in ("reference", REAL_KERNELS):
        with running_on(engine) as device:
            here = quantized_layer(scheme, device)
            output = moe_torch.moe(*here).output
            launcher = prepare_moe(here.experts, here.routing, here.spec)
            for tokens in (9, 4):
                result = moe_torch.moe(here.x[:tokens], *here[1:])
                require_equal(launcher(here.x[:tokens]), result.output, f"{tokens} tokens")
            found = to_numpy(output).astype(np.float32)
            if engine == "reference":
                np.testing.assert_array_equal(found, expected)
            assert np.abs(found - expected).max() <= 0.02 * np.abs(expected).max()
            # Far from what plain experts give no activation error can lead.
            plain = moe_torch.moe(
                here.x, plain_experts(here), here.routing, dataclasses.replace(here.spec, activations=None)
            )
            assert np.abs(found - to_numpy(plain.output).astype(np.float32)).max() <= 0.15 * np.abs(expected).max()


def test_static_input_scales_and_fast_sums() -> None:
    """A static scale that is the dynamic one gives its bits; half of it gives others."""
    with running_on("reference"):
        layer = quantized_layer("fp8_tensor")
        dynamic = moe_torch.quantize_rows(layer.x, format_named("fp8_tensor")).scales.reshape(1)
        outputs = {}
        for label, scale in (("dynamic", None), ("static", dynamic), ("half", dynamic / 2)):
            experts = dataclasses.replace(layer.experts, gate_up_input_scale=scale)
            outputs[label] = moe_torch.moe(layer.x, experts, layer.routing, layer.spec).output
        require_equal(outputs["static"], outputs["dynamic"], "static scale")
        assert not torch.equal(outputs["half"], outputs["dynamic"])
        fast = dataclasses.replace(layer.spec, fast_accumulate=True)
        found = moe_torch.moe(layer.x, layer.experts, layer.routing, fast).output
        require_equal(found, outputs["dynamic"], "fast sums of the reference")
        assert "experts.gate_up_input_scale" in moe_torch.explain_moe(layer.x, experts, layer.routing, fast)


def test_products_of_quantised_rows() -> None:
    """matmul_ogs takes what quantize_rows gives, dense and by expert, beside a weight in either layout."""
    with running_on(REAL_KERNELS) as device:
        layer = quantized_layer("fp8_block", device)
        weight, chosen = layer.experts.gate_up, moe_torch.moe(*layer)
        rows = moe_torch.quantize_rows(layer.x, format_named("fp8_group"))
        layout = moe_torch.make_layout(chosen.ids, NUM_EXPERTS)
        spec = MatmulSpec("out_in", "token", "slot", out_dtype="float32")
        found = moe_torch.matmul_ogs(MatmulOperands(rows, weight), layout, spec)
        inputs = moe_torch.dequantize(rows)[:, None].expand(-1, 2, -1).reshape(-1, D_MODEL)
        experts = moe_torch.dequantize(weight)[chosen.ids.reshape(-1)]
        expected = torch.einsum("td,tnd->tn", inputs.double(), experts.double()).float()
        tolerance = quantized_matmul_tolerance("float32", D_MODEL, weight.format, spec, rows=rows.format)
        assert_close(to_numpy(found), to_numpy(expected), tolerance, label="by expert")
        one = map_arrays(weight, lambda array: array[0])
        dense = moe_torch.matmul_ogs(MatmulOperands(rows, one), None, MatmulSpec("out_in", out_dtype="bfloat16"))
        expected = moe_torch.dequantize(rows) @ moe_torch.dequantize(one).T
        torch.testing.assert_close(dense.float(), expected, rtol=1e-2, atol=1e-2)


def samples() -> dict[str, tuple[Operator, tuple[Any, ...]]]:
    """A call of every operator of quantised matrices, as the functions make it."""
    found: dict[str, tuple[Operator, tuple[Any, ...]]] = {}
    original = Operator.run

    def record(self: Operator, arguments: tuple[Any, ...]) -> Any:
        if self in (MATMUL_OGS_QUANTIZED, QUANTIZE_ROWS, *MOE_QUANTIZED.values()):
            found[self.name] = self, arguments
        return original(self, arguments)

    Operator.run = record
    try:
        layer = quantized_layer("int4_w4a16_zp")
        chosen = moe_torch.moe(*layer)
        moe_torch.moe(layer.x, layer.experts, RouterLogits(chosen.logits), layer.spec)
        unrouted = dataclasses.replace(layer.spec, router=None)
        moe_torch.moe(layer.x, layer.experts, TopK(chosen.ids, chosen.weights), unrouted)
        # Not fp8, of which torch has no comparison on a CPU.
        layer = quantized_layer("int8_w8a8")
        rows = moe_torch.quantize_rows(layer.x, layer.spec.activations)
        layout = moe_torch.make_layout(chosen.ids, NUM_EXPERTS)
        spec = MatmulSpec("out_in", "token", "slot", layer.spec.activation, out_dtype="float16")
        moe_torch.matmul_ogs(MatmulOperands(rows, layer.experts.gate_up), layout, spec)
    finally:
        Operator.run = original
    return found


def test_opcheck() -> None:
    with running_on("reference"):
        calls = samples()
        assert len(calls) == 5
        for label, (operator, arguments) in calls.items():
            utilities = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
            results = torch.library.opcheck(operator.overload, arguments, test_utils=utilities)
            assert set(results.values()) == {"SUCCESS"}, f"{label}: {results}"


def program(x: Any, layer: Any) -> tuple[Any, Any]:
    """The whole layer, and a product of rows quantised inside the program."""
    result = moe_torch.moe(x, layer.experts, layer.routing, layer.spec)
    rows = moe_torch.quantize_rows(x, layer.spec.activations)
    layout = moe_torch.make_layout(result.ids, NUM_EXPERTS)
    spec = MatmulSpec("out_in", "token", "slot", layer.spec.activation, out_dtype="bfloat16")
    return result.output + 1, moe_torch.matmul_ogs(MatmulOperands(rows, layer.experts.gate_up), layout, spec)


def test_a_changing_number_of_tokens_recompiles_nothing() -> None:
    torch._dynamo.reset()
    with running_on("reference"):
        layer = quantized_layer("fp8_block")
        compiled = torch.compile(program, fullgraph=True, backend="aot_eager")
        for number, tokens in enumerate((5, 9, 33)):
            x = quantized_layer("fp8_block", num_tokens=tokens).x
            torch._dynamo.mark_dynamic(x, 0)
            with torch._dynamo.config.patch(error_on_recompile=number > 0):
                require_equal(compiled(x, layer), program(x, layer), f"{tokens} tokens")


def test_quantised_tensors_are_arguments_of_exported_programs() -> None:
    class Product(torch.nn.Module):
        def forward(self, x: Any, weight: Any) -> Any:
            return moe_torch.matmul_ogs(MatmulOperands(x, weight), None, MatmulSpec("out_in"))

    with running_on("reference"):
        layer = quantized_layer("mxfp4_w4a8")
        arguments = layer.x, map_arrays(layer.experts.gate_up, lambda array: array[0])
        exported = torch.export.export(Product(), arguments).module()
        require_equal(exported(*arguments), Product()(*arguments), "exported")


def test_errors() -> None:
    """Every argument is named, with what it must be, what it is and what to do."""
    layer = quantized_layer("mxfp4_w4a16")
    x, experts, routing, spec = layer
    gate_up = experts.gate_up
    replace = dataclasses.replace
    strided = replace(gate_up, values=gate_up.values.flip(-1).transpose(1, 2).contiguous().transpose(1, 2))
    shared = moe_torch.SharedExpert(map_arrays(gate_up, lambda array: array[0]), x.new_zeros(D_MODEL, D_FF))
    in_numpy = map_arrays(gate_up, to_numpy)
    invalid, unsupported = moe_torch.InvalidInput, moe_torch.Unsupported
    storage = torch.zeros(gate_up.scales.numel() + 1, dtype=torch.uint8)
    misaligned = replace(gate_up, scales=storage[1:].view(gate_up.scales.shape))
    dense = map_arrays(gate_up, lambda array: array[0])
    rows = moe_torch.quantize_rows(x, format_named("mxfp8"))

    def whole(**changes: Any) -> Any:
        return lambda: moe_torch.moe(x, replace(experts, **changes), routing, spec)

    cases: list[tuple[type[Exception], str, Any]] = [
        (invalid, r"experts.gate_up must be in_out like weight_layout", lambda: moe_torch.moe(
            x, experts, routing, replace(spec, weight_layout="in_out"))),
        (invalid, r"experts.gate_up.values must be row-major", whole(gate_up=strided)),
        (invalid, r"experts.gate_up must be a torch.Tensor, got ndarray", whole(gate_up=in_numpy)),
        (invalid, r"experts.gate_up.scales must start at a multiple of 16 bytes", whole(gate_up=misaligned)),
        (invalid, r"experts.gate_up.scales must be on cpu like x, got meta", whole(
            gate_up=replace(gate_up, scales=gate_up.scales.to("meta")))),
        (invalid, r"shared.gate_up must be a torch.Tensor, got QuantizedTensor; .*dequantize", lambda: moe_torch.moe(
            *layer, shared=shared)),
        (invalid, r"gate_up_input_scale must be None", whole(gate_up_input_scale=torch.ones(1))),
        (invalid, r"out_dtype must be given where x is quantised", lambda: moe_torch.matmul_ogs(
            MatmulOperands(rows, dense), None, MatmulSpec("out_in"))),
        (invalid, r"fast_accumulate must be False unless", lambda: moe_torch.matmul_ogs(
            MatmulOperands(x, dense), None, MatmulSpec("out_in", fast_accumulate=True))),
        (invalid, r"weight must be quantised where x is", lambda: moe_torch.matmul_ogs(
            MatmulOperands(rows, x), None, MatmulSpec("out_in", out_dtype="bfloat16"))),
        (invalid, r"scales of mxfp4", lambda: replace(gate_up, scales=gate_up.scales[:, :, :1])),
        (invalid, r"format must be a Format, got str", lambda: moe_torch.quantize(x, "mxfp4")),  # pyright: ignore
        (invalid, r"layout must be one of", lambda: moe_torch.quantize(x, gate_up.format, layout="rows")),
        (invalid, r"weight must be one of .*, got int32", lambda: moe_torch.quantize(x.int(), gate_up.format)),
        (invalid, r"input axis must be a multiple of 32", lambda: moe_torch.quantize(x[:, :40], gate_up.format)),
        (invalid, r"weight must be a torch.Tensor, got ndarray", lambda: moe_torch.quantize(
            np.zeros((4, 32), np.float32), gate_up.format)),  # pyright: ignore
        (invalid, r"tensor must be a QuantizedTensor", lambda: moe_torch.dequantize(x)),
        (invalid, r"dtype must be one of .*, got int8", lambda: moe_torch.dequantize(gate_up, torch.int8)),
        (invalid, r"tensor.values must be a torch.Tensor", lambda: moe_torch.dequantize(in_numpy)),
        (unsupported, r"format must be of", lambda: moe_torch.quantize_rows(x, format_named("fp8_block"))),
        (invalid, r"scales must be None for mxfp8", lambda: moe_torch.quantize_rows(
            x, format_named("mxfp8"), scales=torch.ones(1))),
    ]  # fmt: skip
    with running_on("reference"):
        for error, message, act in cases:
            with pytest.raises(error, match=message):
                act()
        launcher = prepare_moe(experts, routing, spec)
        gate_up.scales.data = gate_up.scales.clone()
        with pytest.raises(invalid, match=r"experts.gate_up.scales must keep the memory"):
            launcher(x)


def test_gradients_are_refused() -> None:
    """Whatever asks for one is named, in grad mode alone."""
    with running_on("reference"):
        layer = quantized_layer("fp8_block")
        x, unsupported = layer.x.clone().requires_grad_(), moe_torch.Unsupported
        rounding = r"moe has no gradient with activations fp8_group: what rounds x .*detach\(\) .*\(x\), .*no_grad"
        with pytest.raises(unsupported, match=rounding):
            moe_torch.moe(x, *layer[1:])
        weight = layer.routing.weight.clone().requires_grad_()
        with pytest.raises(unsupported, match=r"moe has no gradient with activations fp8_group.*\(routing.weight\)"):
            moe_torch.moe(layer.x, layer.experts, moe_torch.RouterWeights(weight), layer.spec)
        with pytest.raises(unsupported, match=r"moe has no gradient with activations"):
            moe_torch.explain_moe(*layer, training=True)
        one = map_arrays(layer.experts.gate_up, lambda array: array[0].clone())
        one.scales.requires_grad_()
        with pytest.raises(unsupported, match=r"weight\.scales has no gradient: quantised weights are frozen"):
            moe_torch.matmul_ogs(MatmulOperands(x, one), None, MatmulSpec("out_in"))
        rows = moe_torch.quantize_rows(layer.x, layer.spec.activations)
        rows.scales.requires_grad_()
        with pytest.raises(unsupported, match=r"matmul_ogs has no gradient with a quantised x, got fp8_group"):
            spec = MatmulSpec("out_in", out_dtype="bfloat16")
            moe_torch.matmul_ogs(MatmulOperands(rows, dataclasses.replace(one, scales=one.scales.detach())), None, spec)
        with pytest.raises(unsupported, match=r"x requires a gradient, and quantize_rows defines none"):
            moe_torch.quantize_rows(x, layer.spec.activations)
        with torch.no_grad():
            require_equal(moe_torch.moe(x, *layer[1:]).output, moe_torch.moe(*layer).output, "without gradients")
        trained = quantized_layer("int4_w4a16_zp")
        trained.experts.down.scales.requires_grad_()
        with pytest.raises(unsupported, match=r"experts\.down\.scales has no gradient: quantised weights are frozen"):
            moe_torch.moe(*trained)
