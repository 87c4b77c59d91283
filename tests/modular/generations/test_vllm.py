"""Our classes inside vLLM's own kernel: the cases of `make upstream`, and what is refused when a class is adapted.

vLLM's files come from its wheel, which `make upstream` downloads to build/upstream.
"""

from __future__ import annotations

import importlib
import inspect
import itertools
import tomllib
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from moe_core.errors import InvalidInput, Unsupported
from moe_torch import Tuning, modular
from moe_torch.modular import vllm
from tests.support.paths import ROOT
from tools.upstream import adapt_cases, imports, oracle_cases, published, recipe_cases, running, stand_ins
from tools.upstream.problems import E, M, draw, tensors
from tools.upstream.vllm_parts import their_moe_config, their_no_dp_ep, vllm_file

FILES = published.local_vllm_files()
with_files = pytest.mark.skipif(FILES is None, reason="vLLM's files are absent; make upstream downloads them")


@pytest.fixture
def world() -> Iterator[None]:
    assert FILES is not None
    stand_ins.define_operators()
    with imports.world(FILES, stand_ins.STAND_INS, {}):
        yield


@with_files
@pytest.mark.parametrize("engine", ["reference", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_cases_agree(engine: str) -> None:
    """Every third, and those of the plugin. `make upstream` runs all."""
    assert FILES is not None
    cases = [*recipe_cases.cases()[::3], *adapt_cases.cases()[::3], *oracle_cases.cases()]
    results = running.run_cases(cases, engine, FILES, {})
    assert len(results) > 50 and not any(result.failed for result in results), running.table(results)


def test_without_vllm_and_with_other_classes_adapt_says_so() -> None:
    refusals = {
        "vllm must be installed": lambda: vllm.adapt(modular.TritonExperts),
        "cls must be a class, got TritonExperts": lambda: vllm.adapt(modular.TritonExperts()),  # type: ignore[arg-type]
        "got int, which is no class of this library": lambda: vllm.adapt(int),
        "BaseOAITritonExperts, which is abstract": lambda: vllm.adapt(modular.BaseOAITritonExperts),
        "got MoEPrepareAndFinalizeNaiveEP, which exchanges": lambda: vllm.adapt(modular.MoEPrepareAndFinalizeNaiveEP),
        "configs and options must be left out for BatchedPrepare": lambda: vllm.adapt(
            modular.BatchedPrepareAndFinalize, tuning=None
        ),
    }
    for message, refused in refusals.items():
        with pytest.raises((InvalidInput, Unsupported), match=message):
            refused()


def test_the_entry_point_is_there() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    module, _, name = project["entry-points"]["vllm.general_plugins"]["moebius"].partition(":")
    assert getattr(importlib.import_module(module), name) is vllm.register


def layer(activation: str = "silu", **fields: Any) -> Any:
    config = their_moe_config(draw(), activation)
    for name, value in fields.items():
        owner = config if hasattr(config, name) else config.moe_parallel_config
        setattr(owner, name, value)
    return config


def quantised(name: str, **options: Any) -> Any:
    """vLLM's configuration of that name, of experts with scales per tensor."""
    scales = dict.fromkeys(("w1_scale", "w2_scale"), torch.ones(E))
    if name == "int8_w8a8":
        scales |= {"a1_scale": None, "a2_scale": None}
    return getattr(vllm_file("config"), f"{name}_moe_quant_config")(**scales | options)


def refusals() -> dict[str, Any]:
    rows, ones, token = torch.ones(E, 8, 1), torch.ones(1), {"per_act_token_quant": True}
    triton, bias = modular.TritonExperts, torch.ones(E, 4, dtype=torch.bfloat16)
    alphas = dict.fromkeys(("g1_alphas", "g2_alphas", "a1_gscale", "a2_gscale"), ones)
    constants: dict[str, Any] = {"swiglu_limit": 7.0, "swiglu_alpha": 1.5}
    return {
        "got nvfp4 and nvfp4": lambda: vllm.adapt(triton, quantised("nvfp4", **alphas)),
        r"block_shape must be \[1, 32\] for mxfp8, got \[1, 64\]": lambda: vllm.adapt(
            triton, vllm_file("config").FusedMoEQuantConfig.make("mxfp8", block_shape=[1, 64])
        ),
        "mx_alignment must not be set": lambda: vllm.adapt(triton, quantised("mxfp4_mxfp8", mx_alignment=4)),
        r"quant_config\.g1_alphas must not be set": lambda: vllm.adapt(triton, quantised("fp8_w8a8", g1_alphas=ones)),
        "is_scale_transposed must not": lambda: vllm.adapt(triton, quantised("fp8_w8a8", is_scale_transposed=True)),
        "w1_scale must be .* one per tensor with activations per token": lambda: vllm.adapt(
            triton, quantised("fp8_w8a8", **token)
        ),
        "w2_scale must be .* one per output channel with activations per tensor": lambda: vllm.adapt(
            triton, quantised("int8_w8a8", w2_scale=rows)
        ),
        "a1_scale must be None, or one number": lambda: vllm.adapt(triton, quantised("fp8_w8a8", a1_scale=rows)),
        "a2_scale must be None, or one": lambda: vllm.adapt(
            triton, quantised("fp8_w8a8", block_shape=[128, 128], a2_scale=ones)
        ),
        "be vLLM's FusedMoEQuantConfig, got Fused": lambda: vllm.adapt(triton, modular.FusedMoEQuantConfig()),
        "block_shape": lambda: vllm.adapt(modular.DeepGemmExperts, quantised("fp8_w8a8")),
        "must not be mxfp4_w4a16 for TritonOr": lambda: vllm.adapt(
            modular.TritonOrDeepGemmExperts, quantised("mxfp4_w4a16")
        ),
        "gemm1_alpha must be given for situ": lambda: vllm.adapt(triton, layer("situ")),
        "gemm1_clamp_limit must be given": lambda: vllm.adapt(triton, layer("swigluoai_uninterleave")),
        "gemm1_clamp_limit must be None .* for gelu": lambda: vllm.adapt(triton, layer("gelu", swiglu_limit=7.0)),
        "gemm1_alpha must be 1.0 .* for silu": lambda: vllm.adapt(triton, layer(**constants)),
        "gemm1_beta must be 1.0 .* for swigluoai": lambda: vllm.adapt(triton, layer("swigluoai", swiglu_beta=0.5)),
        "gemm1_clamp_limit must be None .* for relu2": lambda: vllm.adapt(
            triton, layer("relu2"), quantised("int4_w4a16", gemm1_clamp_limit=2.0)
        ),
        "is_lora_enabled must be False for BatchedTritonExperts": lambda: vllm.adapt(
            modular.BatchedTritonExperts, layer(is_lora_enabled=True)
        ),
        "is_lora_enabled must be False for TritonExperts that quantises": lambda: vllm.adapt(
            triton, layer(is_lora_enabled=True), quantised("fp8_w8a8", **token, w1_scale=rows, w2_scale=rows)
        ),
        "use_passthrough_all2all must be False": lambda: vllm.adapt(triton, layer(all2all_backend="passthrough")),
        "enable_eplb with biases": lambda: vllm.adapt(
            triton, layer(enable_eplb=True), vllm_file("config").biased_moe_quant_config(bias, bias)
        ),
        "tuning": lambda: vllm.adapt(triton, quantised("int4_w4a16"), tuning="fast"),
    }  # fmt: skip


@with_files
def test_every_refusal_is_by_name_and_when_a_class_is_adapted(world: None) -> None:
    for message, refused in refusals().items():
        with pytest.raises((InvalidInput, Unsupported), match=message):
            refused()


@with_files
def test_objects_refuse_what_their_kernel_cannot_hold(world: None) -> None:
    config, plain = layer(), vllm_file("config").FUSED_MOE_UNQUANTIZED_CONFIG
    batched, standard = vllm.adapt(modular.BatchedTritonExperts), vllm.adapt(modular.TritonExperts)
    assert standard is vllm.adapt(modular.TritonExperts, config, plain) and standard.__name__ == "TritonExperts"
    kernels, experts = vllm_file("modular_kernel"), standard(config, plain)

    class Reducing(modular.TritonExperts):
        def finalize_weight_and_reduce_impl(self) -> Any:
            return modular.TopKWeightAndReduceNaiveBatched()

    def offset() -> None:
        given = tensors(draw(), "cpu")
        meta = kernels.ExpertTokensMetadata(None, None, rank_expert_offset=4)
        tokens = (torch.empty_like(given.x), given.x, given.w1, given.w2, given.weights, given.ids)
        experts.apply(*tokens, "silu", E, None, None, None, given.x, given.x, meta, False)

    theirs = vllm_file("experts.fused_batched_moe").NaiveBatchedExperts
    refusals = {
        "must be numbers for BatchedTritonExperts, got 4 and None": lambda: batched(config, plain, 4),
        "must be None for TritonExperts, got None and 1": lambda: standard(config, plain, num_dispatchers=1),
        "post_gemm2_hook must be None for TritonExperts": lambda: setattr(experts, "post_gemm2_hook", print),
        "a reduction that vLLM has, got TopKWeightAndReduceNaiveBatched": lambda: vllm.adapt(Reducing)(config, plain),
        "rank_expert_offset must be None": offset,
        "fused_experts must quantise tokens for BatchedPrepareAndFinalize": lambda: kernels.FusedMoEKernel(
            vllm.adapt(modular.BatchedPrepareAndFinalize)(M, E), theirs(config, quantised("fp8_w8a8"), M, 1)
        ),
    }
    for message, refused in refusals.items():
        with pytest.raises((InvalidInput, Unsupported), match=message):
            refused()
    experts.post_gemm2_hook = None
    assert kernels.FusedMoEKernel(their_no_dp_ep(), experts).fused_experts is experts


#: vLLM's keys of weights and activations -> the classes that say that they run them.
SCHEMES = {
    ("kFp8StaticTensorSym", "kFp8StaticTensorSym"): {"TritonExperts"},
    ("kFp8StaticTensorSym", "kFp8DynamicTensorSym"): {"TritonExperts"},
    ("kFp8StaticChannelSym", "kFp8DynamicTokenSym"): {"TritonExperts"},
    ("kFp8Static128BlockSym", "kFp8Dynamic128Sym"): {"TritonExperts", "DeepGemmExperts", "BatchedDeepGemmExperts"},
    ("kInt8StaticChannelSym", "kInt8DynamicTokenSym"): {"TritonExperts"},
    ("kInt8StaticChannelSym", None): {"TritonExperts", "BatchedTritonExperts"},
    ("kInt4Static32Asym", None): {"TritonExperts", "BatchedTritonExperts"},
    ("kInt8Static", None): {"TritonExperts", "BatchedTritonExperts"},
    ("kMxfp4Static", None): {"TritonExperts", "BatchedTritonExperts"},
    ("kMxfp4Static", "kMxfp4Dynamic"): {"TritonExperts"},
    (None, None): {"TritonExperts", "BatchedTritonExperts"},
    ("kFp8StaticTensorSym", "kFp8DynamicTokenSym"): set(),
    ("kFp8StaticChannelSym", "kFp8StaticTokenSym"): set(),
    ("kFp8StaticChannelSym", "kFp8StaticTensorSym"): set(),
    ("kFp8Static128BlockE8M0Sym", "kFp8Dynamic128Sym"): set(),
    ("kFp8Static128BlockSym", "kFp8Dynamic64Sym"): set(),
    ("kMxfp8Static", "kMxfp8Dynamic"): {"TritonExperts"},
    ("kNvfp4Static", "kNvfp4Dynamic"): set(),
    ("kNvfp4Static", None): {"TritonExperts", "BatchedTritonExperts"},
    ("kFp8StaticChannelSym", None): {"TritonExperts", "BatchedTritonExperts"},
    ("kMxfp4Static", "kMxfp8Dynamic"): {"TritonExperts"},
    ("kInt4W4A8StaticGroup128Sym", "kInt8DynamicTokenSym"): set(),
    ("kInt8StaticChannelSym", "kInt8DynamicTokenAsym"): set(),
    ("kMxfp6E3M2Static", None): set(),
    (None, "kFp8DynamicTokenSym"): set(),
}  # fmt: skip


@with_files
def test_vllm_hears_what_runs(world: None) -> None:
    known = importlib.import_module(f"{imports.QUANTIZATION}.quant_utils")
    names = ("TritonExperts", "DeepGemmExperts", "BatchedTritonExperts", "BatchedDeepGemmExperts")
    classes = {name: vllm.adapt(getattr(modular, name)) for name in names}
    for keys, runs in SCHEMES.items():
        pair = [None if key is None else getattr(known, key) for key in keys]
        found = {name for name, cls in classes.items() if cls._supports_quant_scheme(*pair)}
        assert found == runs, (keys, found)
    activations, parallel = vllm_file("activation").MoEActivation, layer().moe_parallel_config
    cls = classes["TritonExperts"]
    unknown = [one.value for one in activations if not cls._supports_activation(one)]
    assert not unknown and cls._supports_parallel_config(parallel)
    parallel.all2all_backend = "passthrough"
    invariant = vllm.adapt(modular.TritonExperts, tuning=Tuning(batch_invariant=True))
    assert not cls._supports_parallel_config(parallel)
    assert invariant._supports_batch_invariance() and not cls._supports_batch_invariance()


MAKERS = [name for name in modular.__all__ if name.endswith("_moe_quant_config")]
NO_SCHEME = {"int4_w4afp8_moe_quant_config", "nvfp4_moe_quant_config", "ocp_mx_moe_quant_config"}


@with_files
def test_names_of_the_newest_generation_mean_what_vllm_says(world: None) -> None:
    config, activation = vllm_file("config"), vllm_file("activation")
    for name in set(MAKERS) - NO_SCHEME:
        ours, theirs = (inspect.signature(getattr(module, name)).parameters.values() for module in (modular, config))
        assert [(p.name, p.default) for p in ours] == [(p.name, p.default) for p in theirs], name
    for name, module in {"MoEActivation": activation, "RoutingMethodType": config}.items():
        ours, theirs = getattr(modular, name), getattr(module, name)
        assert {one.name: one.value for one in ours} == {one.name: one.value for one in theirs}
    for one in activation.MoEActivation:
        assert modular.activation_without_mul(one.value) == activation.activation_without_mul(one.value)
        assert modular.MoEActivation(one.value).is_gated == one.is_gated
    functions = ("softmax", "sigmoid", "sqrtsoftplus", "other")
    for options in itertools.product(functions, (2,), (True, False), (None, 0, 4), (True, False)):
        found = modular.get_routing_method_type(*options), config.get_routing_method_type(*options)
        assert found[0] == found[1], options
    described = (layer(swiglu_limit=3.0, swiglu_beta=1.0), quantised("int4_w4a16", gemm1_alpha=0.5))
    kinds = (modular.ApplyMoEActivationConfig, activation.ApplyMoEActivationConfig)
    assert vars(kinds[0].from_configs(*described)) == vars(kinds[1].from_configs(*described))
    # Those of vLLM's operators that stand-ins compute.
    x = torch.randn(5, 16, generator=torch.Generator().manual_seed(0))
    for name in ("silu", "gelu", "gelu_tanh", "swigluoai", "silu_no_mul", "gelu_no_mul", "relu2_no_mul"):
        outputs = [torch.empty(5, 16 if name.endswith("no_mul") else 8) for _ in range(2)]
        with torch.no_grad():
            modular.apply_moe_activation(modular.MoEActivation.from_str(name), outputs[0], x.clone())
        activation.apply_moe_activation(activation.MoEActivation(name), outputs[1], x.clone())
        torch.testing.assert_close(*outputs)


def test_what_no_scheme_and_no_kernel_has_is_refused() -> None:
    kind, ones, x = modular.MoEActivation, torch.ones(2, 1), torch.ones(3, 4)
    for name in NO_SCHEME:
        with pytest.raises(Unsupported, match="no experts here run"):
            getattr(modular, name)(ones, ones)
    made = modular.fp8_w8a8_moe_quant_config(ones, ones, None, None, per_act_token_quant=True, per_out_ch_quant=True)
    assert (made.scheme, made.per_act_token_quant, made.w1_scale is ones) == ("fp8_w8a8", True, True)
    assert modular.int8_w8a8_moe_quant_config(ones, ones, None, None).scheme == "int8_w8a8"
    assert modular.int8_w8a16_moe_quant_config(ones, ones, ones, ones).w2_zp is ones
    assert modular.int4_w4a16_moe_quant_config(ones, ones, block_shape=[0, 32]).block_shape == (0, 32)
    assert modular.mxfp4_w4a16_moe_quant_config(ones, ones).scheme == "mxfp4_w4a16"
    assert modular.mxfp4_moe_quant_config(ones, ones).scheme == "mxfp4_w4a4"
    assert modular.biased_moe_quant_config(ones, None, gemm1_clamp_limit=2.0).gemm1_clamp_limit == 2
    assert modular.fp8_w8a16_moe_quant_config(ones, ones).scheme == "fp8_w8a16"
    assert modular.mxfp4_w4a8_moe_quant_config(ones, ones, ones).a1_scale is ones
    required = {
        name: [one.default for one in inspect.signature(getattr(modular, name)).parameters.values()].count(
            inspect._empty
        )
        for name in MAKERS
        if name not in NO_SCHEME
    }
    assert required == dict.fromkeys(required, 2) | dict.fromkeys(
        ("int8_w8a8_moe_quant_config", "nvfp4_w4a16_moe_quant_config"), 4
    ), "scales that must be given"
    scales, alphas = torch.ones(2, 1, 1).to(torch.float8_e4m3fn), torch.ones(2)
    assert modular.nvfp4_w4a16_moe_quant_config(alphas, alphas, scales, scales).scheme == "nvfp4_w4a16"
    supported = modular.apply_moe_activation_supported
    assert (
        supported(kind.GELU)
        and not supported(kind.RELU2)
        and not modular.apply_moe_activation_masked_supported(kind.GELU)
    )
    refusals = {
        "per_out_ch_quant must be": lambda: modular.fp8_w8a8_moe_quant_config(ones, ones, per_out_ch_quant=True),
        r"g1_alphas must not.*got an array": lambda: modular.fp8_w8a8_moe_quant_config(ones, ones, g1_alphas=ones),
        "mx_alignment must not": lambda: modular.mxfp4_mxfp8_moe_quant_config(ones, ones, mx_alignment=4),
        "topk_ids must be None": lambda: modular.apply_moe_activation(kind.SILU, x[:, :2], x, topk_ids=ones),
        "gemm1_alpha must be given for situ": lambda: modular.apply_moe_activation(kind.SITU, x[:, :2], x),
        "activation must be one of": lambda: kind.from_str("tanh"),
    }
    for message, refused in refusals.items():
        with pytest.raises((InvalidInput, Unsupported), match=message):
            refused()
    output, limit = torch.empty(3, 2), modular.ApplyMoEActivationConfig(clamp_limit=0.5)
    with torch.no_grad():
        result = modular.apply_moe_activation(kind.SILU, output, x, activation_config=limit)
    assert result is output
    torch.testing.assert_close(output, torch.full((3, 2), 0.5 * 0.5 / (1 + 2.718281828**-0.5)))
