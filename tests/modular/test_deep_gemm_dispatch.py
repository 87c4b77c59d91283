"""The choice between Triton's experts and DeepGEMM's."""

from __future__ import annotations

import functools
from typing import Any

import ml_dtypes
import numpy as np
import pytest

torch = pytest.importorskip("torch")

from moe_core.base.target import Target
from moe_core.errors import InvalidInput, Unsupported
from moe_core.formats import FP8_BLOCK
from moe_core.modular.deep_gemm import DEEP_GEMM, TRITON, DispatchCase, choose_experts, has_scales, why_not_allowed
from moe_core.modular.quant_config import FLAGGED_SCHEMES
from moe_core.ops.quantize.reference import quantize
from moe_torch import format_named, modular, quantize_rows
from moe_torch.modular import FusedMoEModularKernel, MoEPrepareAndFinalizeNoEP, TritonOrDeepGemmExperts
from moe_torch.modular import deep_gemm as products
from tests.support.modular.deep_gemm import BLOCK, N, config_of, draw_experts, draw_products, pair, tensor, tensors
from tests.support.modular.problems import E
from tests.support.modular.quantized import CONFIGURATIONS, converted, draw, with_arrays
from tests.support.torch import REAL_KERNELS, require_equal, running_on, to_numpy, to_torch

E4M3 = ("float8_e4m3fn", "float8_e4m3fn")
VALID = DispatchCase(128, (3, 256, 640), E4M3)
#: Sizes that are valid for DeepGEMM, as few as there are.
VALID_SIZES = {"tokens": 128, "experts": 2, "hidden": 128, "width": 640}


def allowed(**options: Any) -> TritonOrDeepGemmExperts:
    return TritonOrDeepGemmExperts(True, block_shape=BLOCK, allow_deep_gemm=True, **options)


def kernel_of(experts: Any, **options: Any) -> FusedMoEModularKernel:
    return FusedMoEModularKernel(MoEPrepareAndFinalizeNoEP(), experts, **options)


@pytest.mark.parametrize(
    ("change", "member", "reason"),
    [
        ({}, DEEP_GEMM, "valid for it"),
        ({"M": 127}, TRITON, "fewer than 128 tokens"),
        ({"w2": (3, 256, 512)}, TRITON, "N is at most 512"),
        ({"w2": (3, 256, 700)}, TRITON, "no multiple of 128"),
        ({"w2": (3, 200, 640)}, TRITON, "no multiple of 128"),
        ({"dtypes": ("float8_e4m3fn", "bfloat16")}, TRITON, "not both float8_e4m3fn"),
        ({"strided": ("w1",)}, TRITON, "w1 is not contiguous"),
        ({"M": 1, "e8m0_used": True}, DEEP_GEMM, "power-of-two scales is in use"),
        ({"M": 1, "quantized": True}, DEEP_GEMM, "quantised already"),
    ],
)
def test_the_rule(change: dict[str, Any], member: str, reason: str) -> None:
    case = DispatchCase(**({name: getattr(VALID, name) for name in VALID.__match_args__} | change))
    choice = choose_experts(None, case)
    assert choice.member == member and reason in choice.reason
    assert choose_experts("allow_deep_gemm is False", case).member == TRITON


def test_where_it_is_allowed() -> None:
    assert why_not_allowed(True, True, (128, 128)) is None
    for arguments in ((False, True, BLOCK), (True, False, BLOCK), (True, True, None), (True, True, [64, 128])):
        assert why_not_allowed(*arguments) is not None
    experts = TritonOrDeepGemmExperts(True, block_shape=BLOCK)
    assert not experts.allow_deep_gemm and experts.deep_gemm_expert is None
    assert allowed().allow_deep_gemm and isinstance(allowed().deep_gemm_expert, modular.DeepGemmExperts)
    # Asked for but not possible, as the original has it: Triton, and no error.
    assert TritonOrDeepGemmExperts(True, allow_deep_gemm=True).deep_gemm_expert is None


def test_the_member_that_runs_is_the_one_explained() -> None:
    """Either member's bits, on memory that serves both."""
    case = draw_experts(**VALID_SIZES)
    with running_on("reference") as device, torch.no_grad():
        (x, w1, w2, weights, ids), scales = tensors(case, device)
        experts = allowed(**scales)
        assert experts.explain(x, w1, w2).startswith("deep_gemm_expert: it is allowed")
        assert "(M = 128, N = 640, K = 128; w1 and w2 float8_e4m3fn" in experts.explain(x, w1, w2)
        assert experts.explain(x[:127], w1, w2).startswith("triton_expert: there are fewer than 128 tokens")
        strided = w2.mT.contiguous().mT
        assert experts.explain(x, w1, strided).startswith("triton_expert: w2 is not contiguous")
        other = TritonOrDeepGemmExperts(True, block_shape=BLOCK, **scales)
        assert other.explain(x, w1, w2).startswith("triton_expert: allow_deep_gemm is False")

        x, wanted = x.bfloat16(), {}
        for name, member in (("deep", modular.DeepGemmExperts), ("triton", modular.TritonExperts)):
            wanted[name] = kernel_of(member(config_of(scales)))(x, w1, w2, weights, ids)
        assert not torch.equal(wanted["deep"], wanted["triton"])
        require_equal(kernel_of(experts)(x, w1, w2, weights, ids), wanted["deep"], "DeepGEMM")
        require_equal(kernel_of(allowed())(x, w1, w2, weights, ids, **scales), wanted["deep"], "scales of the call")
        require_equal(kernel_of(other)(x, w1, w2, weights, ids), wanted["triton"], "not allowed")
        few = kernel_of(modular.TritonExperts(config_of(scales)))(x[:9], w1, w2, weights[:9], ids[:9])
        require_equal(kernel_of(experts)(x[:9], w1, w2, weights[:9], ids[:9]), few, "few tokens")
        assert not torch.equal(few, wanted["deep"][:9]), "a chunk that chooses for itself would differ"


def test_chunks_run_on_the_member_of_the_whole() -> None:
    """Each chunk alone has too few tokens for DeepGEMM, and other bits on Triton's experts."""
    case = draw_experts("bfloat16", **VALID_SIZES)
    with running_on(REAL_KERNELS) as device, torch.no_grad():
        arguments, scales = tensors(case, device)
        expected = kernel_of(modular.DeepGemmExperts())(*arguments, **scales)
        require_equal(kernel_of(allowed(), chunk_size=64)(*arguments, **scales), expected, "chunks")


class Quantising(MoEPrepareAndFinalizeNoEP):
    """Quantises while it dispatches, as classes that send tokens to other ranks do."""

    def prepare(self, a1: Any, *arguments: Any) -> Any:
        rows = quantize_rows(a1, format_named("fp8_group"))
        return modular.PreparedTokens(rows.values, rows.scales)


@pytest.mark.parametrize("tokens", [1, 64, 128])
def test_a_prepare_that_quantises_runs_at_every_number_of_tokens(tokens: int) -> None:
    """Prefill and decode alike: quantised hidden states stay with DeepGEMM's member, which quantises the same way."""
    case = draw_experts("bfloat16", **(VALID_SIZES | {"tokens": tokens}))
    with running_on("reference") as device, torch.no_grad():
        arguments, scales = tensors(case, device)
        expected = kernel_of(modular.DeepGemmExperts())(*arguments, **scales)
        found = FusedMoEModularKernel(Quantising(), allowed(**scales))(*arguments)
        require_equal(found, expected, f"{tokens} tokens")
        rows = quantize_rows(arguments[0], format_named("fp8_group"))
        assert "quantised already" in allowed(**scales).explain(rows.values, *arguments[1:3])
        other = TritonOrDeepGemmExperts(True, block_shape=BLOCK, **scales)
        with pytest.raises(InvalidInput, match="a1q_scale must be None"):
            FusedMoEModularKernel(Quantising(), other)(*arguments)
    pytest.importorskip("jax")
    from moe_jax import modular as flax
    from tests.support import jax as jax_support

    with jax_support.running_on("reference"):
        _, w1, w2, *routing = jax_support.to_jax(tuple(case.problem))
        options = {"quant_config": config_of(jax_support.to_jax(case.scales))}
        values = to_numpy(rows.values.view(torch.uint8)).view(ml_dtypes.float8_e4m3fn)
        values, scale = jax_support.to_jax((values, to_numpy(rows.scales)))
        run = flax.triton_or_deep_gemm_experts
        again = run(values, w1, w2, *routing, allow_deep_gemm=True, a1q_scale=scale, **options)
        np.testing.assert_array_equal(np.asarray(again), to_numpy(expected))
        with pytest.raises(InvalidInput, match="a1q_scale must be None where triton_expert runs"):
            run(values, w1, w2, *routing, a1q_scale=scale, **options)


def test_workspaces_are_the_larger_ones() -> None:
    triton, deep, both = modular.TritonExperts(config_of({})), modular.DeepGemmExperts(), allowed()
    for sizes, member in (
        ((128, 1280, 256, 2), deep),
        # w1 is wide enough and w2 is not: DeepGEMM's memory, on which `apply` takes Triton.
        ((128, 640, 256, 2), deep),
        ((127, 1280, 256, 2), triton),
        ((128, 512, 256, 2), triton),
    ):
        arguments = (*sizes, 8, 4, None, "silu")
        assert both.workspace_shapes(*arguments) == member.workspace_shapes(*arguments), sizes
        for ours, small in zip(
            deep.workspace_shapes(*arguments)[:2], triton.workspace_shapes(*arguments), strict=False
        ):
            assert ours[0] > small[0] and ours[1] >= small[1]
    assert deep.workspace_shapes(5, 1280, 256, 2, 8, 4, None, "silu") == ((640, 1280), (640, 640), (5, 256))
    assert modular.OAITritonExperts(config_of({})).workspace_shapes(5, 1280, 256, 2, 8, 4, None, "silu")[0] == (0, 0)
    in_mode = allowed(e8m0=True)
    assert in_mode.workspace_shapes(1, 256, 128, 2, 8, 4, None, "silu")[0] == (512, 256)


def test_members_must_agree() -> None:
    experts: Any = allowed()
    standard = modular.FusedMoEActivationFormat.Standard
    assert experts.supports_chunking() and experts.supports_expert_map()
    assert experts.activation_formats == (standard, standard)
    assert experts.finalize_weight_and_reduce_impl() == modular.TopKWeightAndReduceNoOP()
    experts.deep_gemm_expert = modular.BatchedDeepGemmExperts(4)
    assert not experts.supports_chunking() and not experts.supports_expert_map()
    wrong = "must agree, got .* of TritonExperts and .* of BatchedDeepGemmExperts"
    with pytest.raises(InvalidInput, match=f"activation_formats of triton_expert and deep_gemm_expert {wrong}"):
        kernel_of(experts)
    with pytest.raises(InvalidInput, match=f"finalize_weight_and_reduce_impl .* {wrong}"):
        experts.finalize_weight_and_reduce_impl()


def test_the_mode_of_scales_belongs_to_the_chip(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not modular.is_blackwell_deep_gemm_e8m0_used("cpu")
    case = draw_experts(tokens=9)
    (x, w1, w2, *_), scales = tensors(case)
    for arch, used in ((90, False), (100, True), (103, True), (120, False)):
        monkeypatch.setattr(products, "target_of_device", lambda device, arch=arch: Target("cuda", arch, 132))
        assert modular.is_blackwell_deep_gemm_e8m0_used("cuda:0") == used
        monkeypatch.setattr(
            "moe_torch.modular.deep_gemm_dispatch.is_blackwell_deep_gemm_e8m0_used", lambda device, used=used: used
        )
        assert allowed(e8m0=True, **scales).explain(x, w1, w2).startswith(DEEP_GEMM if used else TRITON)
        assert allowed(**scales).explain(x, w1, w2).startswith(TRITON), "nobody asked for the mode"
    with pytest.raises(InvalidInput, match=r"must be False where DeepGEMM is not allowed.*allow_deep_gemm is False"):
        TritonOrDeepGemmExperts(True, block_shape=BLOCK, e8m0=True)
    with pytest.raises(Unsupported, match="must not override activation alone"):
        type("Mine", (TritonOrDeepGemmExperts,), {"activation": lambda self, activation, output, input: None})


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_every_scheme_in_torch_and_jax(name: str) -> None:
    """What is not DeepGEMM's has the bits of Triton's experts, of the whole configuration, in both front-ends."""
    case = draw(name, "out_in")
    with running_on("reference") as device, torch.no_grad():
        arguments, arrays = converted(case, torch.float32, device)
        config = with_arrays(case, arrays)
        flags = {f"use_{config.scheme}": True} if config.scheme in FLAGGED_SCHEMES else {}
        expected = kernel_of(modular.TritonExperts(config))(*arguments)
        if flags:
            options = {"per_act_token_quant": config.per_act_token_quant, "block_shape": config.block_shape}
            experts = TritonOrDeepGemmExperts(**flags, **options, allow_deep_gemm=True, **arrays)
            assert experts.allow_deep_gemm == (name == "fp8_block")
            require_equal(kernel_of(experts)(*arguments), expected, name)
    jax = pytest.importorskip("jax")
    from moe_jax import modular as other
    from tests.support import jax as jax_support

    with jax_support.running_on("reference"):
        given = {key: jax.numpy.asarray(array) for key, array in case.arrays.items() if array is not None}
        ours, config = jax_support.to_jax(tuple(case.problem)), with_arrays(case, given)
        found = other.triton_or_deep_gemm_experts(*ours, quant_config=config, allow_deep_gemm=True)
    np.testing.assert_array_equal(np.asarray(found), to_numpy(expected), err_msg=name)
    assert len(case.problem.w1) == E


def test_jax_chooses_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    jax = pytest.importorskip("jax")
    from moe_jax import modular as other
    from moe_jax.modular import deep_gemm as composition
    from tests.support import jax as jax_support

    case = draw_experts(**VALID_SIZES)
    with running_on("reference") as device, torch.no_grad():
        arguments, scales = tensors(case, device)
        experts = allowed(**scales)
        expected, line = to_numpy(kernel_of(experts)(*arguments)), experts.explain(*arguments[:3])
    with jax_support.running_on("reference"):
        x, w1, w2, *routing = jax_support.to_jax(tuple(case.problem))
        options = {"quant_config": config_of(jax_support.to_jax(case.scales)), "allow_deep_gemm": True}
        found = other.triton_or_deep_gemm_experts(x, w1, w2, *routing, **options)
        assert other.explain_triton_or_deep_gemm(x, w1, w2, **options) == line
        shape = jax.ShapeDtypeStruct((64, 128), "float32")
        assert other.explain_triton_or_deep_gemm(shape, w1, w2, **options).startswith("triton_expert: there are fewer")
        assert not other.is_blackwell_deep_gemm_e8m0_used()
        monkeypatch.setattr(composition, "is_blackwell_deep_gemm_e8m0_used", lambda: True)
        assert other.explain_triton_or_deep_gemm(shape, w1, w2, e8m0=True, **options).startswith("deep_gemm_expert")
        wrong = {
            "must be False where DeepGEMM": lambda: other.explain_triton_or_deep_gemm(
                x, w1, w2, quant_config=options["quant_config"], e8m0=True
            ),
            "got plain rows": lambda: other.deep_gemm_experts(
                x, w1, w2, *routing, quant_config=other.FUSED_MOE_UNQUANTIZED_CONFIG
            ),
            "a1q_scale must be given": lambda: other.deep_gemm_experts(
                w1[0, :128], w1, w2, *routing, quant_config=options["quant_config"]
            ),
            "a1q_scale must be float32": lambda: other.deep_gemm_experts(
                w1[0, :128], w1, w2, *routing, quant_config=options["quant_config"], a1q_scale=routing[0]
            ),
            "call prepare_batched": lambda: other.batched_deep_gemm_experts(
                x, w1, w2, routing[1], quant_config=options["quant_config"]
            ),
            "must be int32": lambda: other.m_grouped_fp8_gemm_nt_contiguous(
                (w1[0], options["quant_config"].w1_scale[0].repeat(128, 0)),
                (w1, options["quant_config"].w1_scale),
                routing[0],
            ),
            r"\(values, scales\)": lambda: other.m_grouped_fp8_gemm_nt_contiguous(w1, (w1, w2), routing[0]),
        }
        for message, call in wrong.items():
            with pytest.raises((InvalidInput, Unsupported), match=message):
                call()
    np.testing.assert_array_equal(np.asarray(found), expected)


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
