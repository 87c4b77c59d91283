"""Experts of quantised weights: every scheme of a configuration, through every class, in torch and in JAX."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import moe_torch
from moe_core.errors import InvalidInput
from moe_core.formats import QuantizedTensor
from moe_core.modular.schemes import activation_quantization
from moe_torch import modular
from moe_torch.modular import FusedMoEModularKernel, MoEPrepareAndFinalizeNoEP
from tests.support.modular.problems import E
from tests.support.modular.quantized import (
    CONFIGURATIONS,
    HIDDEN,
    WIDTH,
    Quantized,
    converted,
    draw,
    tensor,
    with_arrays,
)
from tests.support.torch import REAL_KERNELS, require_equal, running_on, to_numpy, to_torch

CLASSES = (modular.TritonExperts, modular.OAITritonExperts, modular.UnfusedOAITritonExperts)


def composed(case: Quantized, arguments: list[Any], layout: str, device: Any, **scales: Any) -> Any:
    x, _, _, weights, ids = arguments
    experts = moe_torch.ExpertWeights(*[to_torch_tensor(matrix, device) for matrix in case.matrices], **scales)
    activations = activation_quantization(case.config)
    spec = moe_torch.MoESpec(moe_torch.Activation("silu"), weight_layout=layout, activations=activations)
    return moe_torch.moe(x, experts, moe_torch.TopK(ids, weights), spec).output


def to_torch_tensor(matrix: QuantizedTensor, device: Any) -> QuantizedTensor:
    parts = [tensor(part, device) for part in (matrix.values, matrix.scales, matrix.zero_points)]
    return QuantizedTensor(matrix.spec, *parts)


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_every_scheme_through_every_class(name: str) -> None:
    """Fused classes are the composed op bit by bit; the others round alike in fp32, and so are too."""
    with running_on("reference") as device, torch.no_grad():
        for experts in CLASSES:
            layout = experts.default_weight_layout
            case = draw(name, layout)
            arguments, arrays = converted(case, torch.float32, device)
            expected = composed(case, arguments, layout, device)
            kernel = FusedMoEModularKernel(MoEPrepareAndFinalizeNoEP(), experts(with_arrays(case, arrays)))
            require_equal(kernel(*arguments), expected, experts.__name__)
        case = draw(name, "out_in")
        arguments, arrays = converted(case, torch.float32, device)
        batched = modular.BatchedTritonExperts(40, quant_config=with_arrays(case, arrays))
        kernel = FusedMoEModularKernel(modular.BatchedPrepareAndFinalize(40, E), batched)
        require_equal(kernel(*arguments), composed(case, arguments, "out_in", device), "batched")


def test_one_scale_of_all_rows_ignores_those_that_are_not_used() -> None:
    """What lies in unused rows of a batch changes no bit of the others, in either front-end."""
    case, counts, results = draw("fp8_tensor", "out_in"), np.arange(E, dtype=np.int32) % 3, []
    blocks = np.random.default_rng(2).standard_normal((E, 4, HIDDEN)).astype(np.float32)
    for unused in (0.0, 1e4, float("nan")):
        blocks[np.arange(4) >= counts[:, None]] = unused
        with running_on("reference") as device, torch.no_grad():
            (_, w1, w2, weights, ids), arrays = converted(case, torch.float32, device)
            experts = modular.BatchedTritonExperts(4, quant_config=with_arrays(case, arrays))
            x, output = to_torch(blocks, device), torch.empty(E, 4, HIDDEN, device=device)
            sizes = (4, 2 * WIDTH, HIDDEN, 2, E, E, None, "silu")
            scratch = [torch.empty(shape, device=device) for shape in experts.workspace_shapes(*sizes)[:2]]
            meta = modular.ExpertTokensMetadata(to_torch(counts, device))
            experts.apply(output, x, w1, w2, weights, ids, "silu", E, None, None, None, *scratch, meta, False)
        results.append(to_numpy(output))
        jax = pytest.importorskip("jax")
        from moe_jax import modular as other
        from tests.support import jax as jax_support

        with jax_support.running_on("reference"):
            given = {key: jax.numpy.asarray(array) for key, array in case.arrays.items() if array is not None}
            ours = jax_support.to_jax((blocks, case.problem.w1, case.problem.w2, counts))
            results.append(np.asarray(other.batched_experts(*ours, quant_config=with_arrays(case, given))))
    assert results[0].any()
    for result in results[1:]:
        np.testing.assert_array_equal(result, results[0])


def test_scales_may_come_with_the_call() -> None:
    case = draw("fp8_block", "out_in")
    with running_on("reference") as device, torch.no_grad():
        arguments, arrays = converted(case, torch.float32, device)
        kernel = FusedMoEModularKernel(MoEPrepareAndFinalizeNoEP(), modular.TritonExperts(case.config))
        expected = composed(case, arguments, "out_in", device)
        require_equal(kernel(*arguments, **arrays), expected, "output")
        twice = arrays | {"w2_scale": 2 * arrays["w2_scale"]}
        require_equal(kernel(*arguments, **twice), 2 * expected, "other scales")
        with pytest.raises(InvalidInput, match="w1_scale must be an array for fp8_block"):
            kernel(*arguments)
        with pytest.raises(InvalidInput, match="a1_scale must be None for fp8_w8a8, whose activations have"):
            kernel(*arguments, **arrays, a1_scale=torch.ones(1))


def test_static_scales_of_activations() -> None:
    """Of both products, in the configuration or with the call."""
    case = draw("fp8_tensor", "out_in")
    with running_on("reference") as device, torch.no_grad():
        arguments, arrays = converted(case, torch.float32, device)
        static = {"a1_scale": torch.tensor(0.01), "a2_scale": torch.tensor([0.005])}
        kernel = FusedMoEModularKernel(MoEPrepareAndFinalizeNoEP(), modular.TritonExperts(case.config))
        scaled = kernel(*arguments, **arrays, **static)
        scales = {"gate_up_input_scale": static["a1_scale"].reshape(1), "down_input_scale": static["a2_scale"]}
        require_equal(scaled, composed(case, arguments, "out_in", device, **scales), "static scales")
        assert not torch.equal(scaled, kernel(*arguments, **arrays))


@pytest.mark.parametrize("experts", CLASSES)
def test_chunks_share_the_scales_of_the_whole(experts: Any) -> None:
    """A scale that is found from all used rows, or given with the call, makes no chunk differ from the whole."""
    case = draw("fp8_tensor", experts.default_weight_layout)
    with running_on(REAL_KERNELS) as device, torch.no_grad():
        arguments, arrays = converted(case, torch.bfloat16, device)
        arguments[0][1] *= 100
        scales = {f"a{number}_scale": torch.tensor([0.02], device=device) for number in (1, 2)}
        for given in ({}, {"a2_scale": scales["a2_scale"]}, scales):
            made = experts(with_arrays(case, arrays))
            whole, *chunked = (
                FusedMoEModularKernel(MoEPrepareAndFinalizeNoEP(), made, chunk_size=size)(*arguments, **given)
                for size in (None, 16, 32)
            )
            for result in chunked:
                require_equal(result, whole, f"chunks with {list(given)}")


def test_static_scales_stage_by_stage() -> None:
    """Both scales reach both products of experts and functions that run them one by one, in either front-end."""
    case, results = draw("fp8_tensor", "in_out"), {}
    static = {"a1_scale": np.float32([0.01]), "a2_scale": np.float32([0.005])}
    with running_on("reference") as device, torch.no_grad():
        arguments, arrays = converted(case, torch.float32, device)
        config = with_arrays(case, arrays | {name: to_torch(scale, device) for name, scale in static.items()})
        for experts in (modular.OAITritonExperts, modular.UnfusedOAITritonExperts):
            kernel = FusedMoEModularKernel(MoEPrepareAndFinalizeNoEP(), experts(config))
            results[experts.__name__] = to_numpy(kernel(*arguments))
        x, w1, w2, weights, ids = arguments
        routing = modular.make_routing_data(ids, weights, E)
        given = modular.triton_kernel_fused_experts(None, x, w1, w2, *routing, 2, "silu", config)
        results["triton_kernel_fused_experts"] = to_numpy(given)
    jax = pytest.importorskip("jax")
    from moe_jax import modular as other
    from tests.support import jax as jax_support

    with jax_support.running_on("reference"):
        held = {key: jax.numpy.asarray(array) for key, array in (case.arrays | static).items() if array is not None}
        ours = jax_support.to_jax(tuple(case.problem))
        found = other.unfused_experts(*ours, quant_config=with_arrays(case, held))
        results["unfused_experts"] = np.asarray(found)
    for name, result in results.items():
        np.testing.assert_array_equal(result, results["OAITritonExperts"], err_msg=name)


@pytest.mark.parametrize("name", ["fp8_block", "mxfp4_w4a16"])
def test_real_kernels_in_chunks(name: str) -> None:
    case = draw(name, "out_in")
    with running_on(REAL_KERNELS) as device, torch.no_grad():
        arguments, arrays = converted(case, torch.bfloat16, device)
        expected = composed(case, arguments, "out_in", device)
        for chunk_size in (None, 32):
            experts = modular.TritonExperts(with_arrays(case, arrays))
            kernel = FusedMoEModularKernel(MoEPrepareAndFinalizeNoEP(), experts, chunk_size=chunk_size)
            require_equal(kernel(*arguments), expected, f"chunks of {chunk_size}")


def test_functions_of_gpt_oss_take_mxfp4() -> None:
    case = draw("mxfp4_w4a16", "in_out")
    with running_on("reference") as device, torch.no_grad():
        arguments, arrays = converted(case, torch.bfloat16, device)
        x, w1, w2, weights, ids = arguments
        config = with_arrays(case, arrays)
        routing = modular.make_routing_data(ids, weights, E)
        result = modular.triton_kernel_fused_experts(None, x, w1, w2, *routing, 2, "silu", config)
        require_equal(result, composed(case, arguments, "in_out", device), "output")
        # Weights on the input; that of a top-1 is 1 unless the softmax is over all logits. Every token is routed.
        logits, x = torch.randn(40, E), x.nan_to_num()
        scores, best = logits.softmax(-1).topk(1)
        on_input = modular.triton_kernel_moe_forward(x, w1, w2, logits, 1, False, "silu", config, True)
        kernel = FusedMoEModularKernel(MoEPrepareAndFinalizeNoEP(), modular.OAITritonExperts(config))
        expected = kernel(x, w1, w2, scores, best, activation="silu", apply_router_weight_on_input=True)
        torch.testing.assert_close(on_input, expected, rtol=0.02, atol=0.02)
        assert not torch.allclose(on_input, kernel(x, w1, w2, scores, best, activation="silu"), rtol=0.02, atol=0.02)
        forward = modular.triton_kernel_moe_forward(x, w1, w2, logits, 2, True, "silu", config)
        assert forward.isfinite().all() and forward.any()


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_jax_gives_the_same_bits(name: str) -> None:
    """Of every composition; those of torch are all of one bit pattern in fp32, see above."""
    jax = pytest.importorskip("jax")
    from moe_jax import modular as other
    from tests.support import jax as jax_support

    case = draw(name, "out_in")
    with running_on("reference") as device, torch.no_grad():
        arguments, _ = converted(case, torch.float32, device)
        expected = to_numpy(composed(case, arguments, "out_in", device))
    with jax_support.running_on("reference"):
        given = {key: jax.numpy.asarray(array) for key, array in case.arrays.items() if array is not None}
        config = with_arrays(case, given)
        ours = jax_support.to_jax(tuple(case.problem))
        for run in (other.fused_experts, other.unfused_experts):
            found = run(*ours, quant_config=config, weight_layout="out_in")
            np.testing.assert_array_equal(np.asarray(found), expected, err_msg=run.__name__)
        x, w1, w2, weights, ids = ours
        prepared = other.prepare_batched(x, weights, ids, E, 40)
        blocks = other.batched_experts(prepared.a1q, w1, w2, prepared.expert_num_tokens, quant_config=config)
        found = other.finalize_batched(blocks, weights, prepared)
        np.testing.assert_array_equal(np.asarray(found), expected, err_msg="batched")
