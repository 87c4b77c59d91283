"""What DeepGEMM's contract refuses, and what its experts say they support."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from moe_core.errors import InvalidInput, Unsupported
from moe_core.formats import FP8_BLOCK
from moe_core.modular.deep_gemm import has_scales
from moe_core.ops.quantize.reference import quantize
from moe_torch import modular
from moe_torch.modular import FusedMoEModularKernel, MoEPrepareAndFinalizeNoEP
from tests.support.modular.deep_gemm import N, config_of, draw_experts, draw_products, pair, tensor, tensors
from tests.support.torch import running_on, to_torch

CONTIGUOUS, MASKED = modular.m_grouped_fp8_gemm_nt_contiguous, modular.m_grouped_fp8_gemm_nt_masked


@functools.cache
def refusals() -> dict[str, tuple[Any, str]]:
    a, b, m_indices = draw_products(rows=128)
    left, right, indices = pair(a), pair(b), to_torch(m_indices)
    d = torch.empty(128, N)
    block = tuple(part[None] for part in left)
    one = tuple(part[:1] for part in right)
    (x, w1, w2, weights, ids), scales = tensors(draw_experts(tokens=9))
    kernel = FusedMoEModularKernel(MoEPrepareAndFinalizeNoEP(), modular.DeepGemmExperts())
    odd = quantize(np.ones((3, 192, 256), np.float32), FP8_BLOCK)
    e4m3 = left[0][:9, :256]
    return {
        "bf16": (lambda: CONTIGUOUS((left[1], left[1]), right, d, indices), r"a\[0\] must be float8_e4m3fn"),
        "no pair": (lambda: CONTIGUOUS(left[0], right, d, indices), r"a must be \(values, scales\)"),
        "packed": (lambda: CONTIGUOUS((left[0], indices), right, d, indices), "unpack the bytes of packed ones"),
        "double": (lambda: CONTIGUOUS((left[0], left[1].double()), right, d, indices), r"a\[1\] must be float32"),
        "layout": (lambda: CONTIGUOUS(block, right, d, indices), "of the contiguous layout"),
        "groups": (lambda: MASKED(block, right, d[None], indices[:1], 4), "must have the 3 groups"),
        "columns": (lambda: CONTIGUOUS((left[0][:, :256].contiguous(), left[1]), right, d, indices), "the 384 columns"),
        "strided": (lambda: CONTIGUOUS((left[0].t(), left[1]), right, d, indices), r"a\[0\] must be dense"),
        "N": (lambda: CONTIGUOUS(left, (right[0][:, :130].contiguous(), right[1]), d, indices), "N must be a multiple"),
        "scales": (lambda: CONTIGUOUS((left[0], left[1][:, :2]), right, d, indices), "for each 1 x 128 values"),
        "blocks": (lambda: CONTIGUOUS(left, (right[0], right[1][:, :1]), d, indices), "for each 128 x 128 values"),
        "d": (lambda: CONTIGUOUS(left, right, d[:, :128], indices), "d must be bf16"),
        "m_indices": (lambda: CONTIGUOUS(left, right, d, indices.long()), r"m_indices must be torch.int32 \[128\]"),
        "masked_m": (lambda: MASKED(block, one, d[None], indices, 4), r"masked_m must be torch.int32 \[1\]"),
        "expected_m": (lambda: MASKED(block, one, d[None], indices[:1], 0), "expected_m must be an integer"),
        "recipe": (lambda: CONTIGUOUS(left, right, d, indices, (1, 1, 128)), "recipe must be None or"),
        "dims": (lambda: CONTIGUOUS(left, right, d, indices, None, "xy"), "compiled_dims must be letters"),
        "cast": (lambda: CONTIGUOUS(left, right, d, indices, None, "nk", 1), "disable_ue8m0_cast must be True or"),
        "scheme": (
            lambda: modular.DeepGemmExperts(modular.FusedMoEQuantConfig.make(use_fp8_w8a8=True)),
            "got fp8_tensor rows and fp8_tensor weights",
        ),
        "weight_layout": (lambda: modular.DeepGemmExperts(weight_layout="in_out"), "must be 'out_in'"),
        "scheme later": (
            lambda: modular.DeepGemmExperts().with_quant_config(modular.FUSED_MOE_UNQUANTIZED_CONFIG),
            "got plain rows and plain weights",
        ),
        "no scales": (lambda: kernel(x, w1, w2, weights, ids), "w1_scale must be an array"),
        "dtype": (lambda: kernel(x.double(), w1, w2, weights, ids, **scales), "bf16, fp16 or fp32 without a1q_scale"),
        "a1q_scale": (lambda: has_scales(e4m3.contiguous(), left[1][:8, :2]), r"a1q_scale must be float32 \[9, 2\]"),
        "no a1q_scale": (lambda: kernel(e4m3, w1, w2, weights, ids, **scales), "a1q_scale must be given"),
        "a2_scale": (lambda: kernel(x, w1, w2, weights, ids, a2_scale=x, **scales), "a2_scale must be None"),
        "odd width": (
            lambda: kernel(
                x, tensor(odd.values), w2, weights, ids, w1_scale=tensor(odd.scales), w2_scale=scales["w2_scale"]
            ),
            "N must be a multiple of 128.*got 192",
        ),
    }


#: Right for DeepGEMM or other experts. The rest is wrong.
UNSUPPORTED = ("packed", "recipe", "scheme", "weight_layout", "scheme later")


@pytest.mark.parametrize("name", refusals())
def test_wrong_calls_are_refused(name: str) -> None:
    call, message = refusals()[name]
    with running_on("reference"), torch.no_grad(), pytest.raises((InvalidInput, Unsupported), match=message) as raised:
        call()
    assert raised.type is (Unsupported if name in UNSUPPORTED else InvalidInput)


def test_capabilities() -> None:
    cpu, fits = torch.device("cpu"), config_of({})
    for experts in (modular.DeepGemmExperts, modular.BatchedDeepGemmExperts):
        assert experts.supports(fits, cpu) is None
        reason = experts.supports(modular.FusedMoEQuantConfig.make(use_fp8_w8a8=True), cpu)
        assert reason is not None and f"{experts.__name__} does not run weights and activations" in reason
    assert modular.deep_gemm_block_shape() == [128, 128]
    assert modular.DeepGemmExperts().supports_chunking() and not modular.BatchedDeepGemmExperts(4).supports_chunking()
