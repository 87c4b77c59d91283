"""Our experts, adapted, in vLLM's own kernel with its configurations: the bits of our kernel."""

from __future__ import annotations

import functools
import itertools
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from moe_core import formats
from moe_core.formats import Format, QuantizedTensor
from moe_core.modular.quant_config import FLAGGED_SCHEMES
from moe_core.modular.schemes import NVFP4
from moe_torch import modular
from moe_torch.modular import vllm
from moe_torch.modular.calls import ExpertsCall
from tools.upstream.problems import M, Problem, draw, tensors
from tools.upstream.running import Answer, Case, of_device
from tools.upstream.vllm_parts import (
    DRAWS,
    SWIGLU,
    gpt_oss_weights,
    our_config,
    their_activation,
    their_batched,
    their_config,
    their_moe_config,
    their_no_dp_ep,
    theirs,
    vllm_file,
)

STANDARD = ("TritonExperts", "OAITritonExperts", "UnfusedOAITritonExperts")
DEEP_GEMM = ("DeepGemmExperts", "BatchedDeepGemmExperts")

_NOTHING: Mapping[str, Any] = types.MappingProxyType({})


class Kind(NamedTuple):
    """A quantisation: of weights, and vLLM's function and ours that describe it. options: of both."""

    weights: Format | None
    theirs: str
    ours: str | None
    their_options: Mapping[str, Any] = _NOTHING
    our_options: Mapping[str, Any] = _NOTHING
    static: bool = False


_BLOCK, _TOKEN, _G32 = {"block_shape": [128, 128]}, {"per_act_token_quant": True}, {"block_shape": [0, 32]}
_INT8_TENSOR = Format("int8_tensor", "int8", None, None)
KINDS = {
    "bf16": Kind(None, "biased", None),
    "fp8 per tensor": Kind(formats.FP8_TENSOR, "fp8_w8a8", "fp8_w8a8"),
    "fp8 per tensor, static": Kind(formats.FP8_TENSOR, "fp8_w8a8", "fp8_w8a8", static=True),
    "fp8 per channel and token": Kind(
        formats.FP8_CHANNEL, "fp8_w8a8", "fp8_w8a8", _TOKEN | {"per_out_ch_quant": True}, _TOKEN
    ),
    "fp8 blocks": Kind(formats.FP8_BLOCK, "fp8_w8a8", "fp8_w8a8", _BLOCK, _BLOCK),
    "int8 per channel and token": Kind(formats.INT8_CHANNEL, "int8_w8a8", "int8_w8a8", _TOKEN, _TOKEN),
    "int8 per tensor, static": Kind(_INT8_TENSOR, "int8_w8a8", "int8_w8a8", static=True),
    "int8 w8a16": Kind(formats.INT8_CHANNEL, "int8_w8a16", "int8_w8a16"),
    "int8 w8a16 in groups": Kind(formats.int8_grouped(32), "int8_w8a16", "int8_w8a16", _G32, _G32),
    "int4 w4a16": Kind(formats.int4_grouped(32), "int4_w4a16", "int4_w4a16", _G32, _G32),
    "int4 w4a16, zero points": Kind(formats.int4_grouped(32, True), "int4_w4a16", "int4_w4a16", _G32, _G32),
    "mxfp4 w4a16": Kind(formats.MXFP4, "mxfp4_w4a16", "mxfp4_w4a16"),
    "fp8 w8a16": Kind(formats.FP8_CHANNEL, "fp8_w8a16", "fp8_w8a16"),
    "mxfp4 with mxfp8": Kind(formats.MXFP4, "mxfp4_mxfp8", "mxfp4_mxfp8"),
    "mxfp4 w4a8, static": Kind(formats.MXFP4, "mxfp4_w4a8", "mxfp4_w4a8", static=True),
    "mxfp4 w4a4": Kind(formats.MXFP4, "mxfp4", "mxfp4_w4a4"),
    "mxfp8": Kind(formats.MXFP8, "mxfp8", "mxfp8"),
    "nvfp4 w4a16": Kind(NVFP4, "nvfp4_w4a16", "nvfp4_w4a16"),
}


class Layer(NamedTuple):
    """A problem as both kernels take it."""

    given: Any
    weights: tuple[Any, Any]
    theirs: Any
    ours: Any


def _arrays(problem: Problem, device: str, in_out: bool) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for number, weight in ((1, problem.w1), (2, problem.w2)):
        if isinstance(weight, QuantizedTensor):
            zero_points = {} if weight.zero_points is None else {f"w{number}_zp": weight.zero_points}
            for name, array in ({f"w{number}_scale": weight.scales} | zero_points).items():
                tensor = torch.tensor(array, device=device)
                found[name] = tensor.mT if in_out else tensor
            if weight.spec.format == NVFP4:
                # As checkpoints store them: e4m3 below the largest of an expert, which g1_alphas scale.
                scales = found[f"w{number}_scale"]
                alphas = scales.amax((1, 2)) / torch.finfo(torch.float8_e4m3fn).max
                found[f"w{number}_scale"] = (scales / alphas[:, None, None]).to(torch.float8_e4m3fn)
                found[f"g{number}_alphas"] = alphas
    return found


def _their_maker(name: str) -> Callable[..., Any]:
    """vLLM's function for a configuration. That of mxfp8 makes those of a backend."""
    if name != "mxfp8":
        return getattr(vllm_file("config"), f"{name}_moe_quant_config")
    oracle = vllm_file("oracle.fp8")
    backend = oracle.Fp8MoeBackend.TRITON_MXFP8
    rest = {"a1_scale": None, "a2_scale": None, "block_shape": [1, 32]}
    return functools.partial(oracle.make_fp8_moe_quant_config, backend, **rest)


def layer_of(problem: Problem, kind: Kind, name: str, device: str) -> Layer:
    given, in_out = tensors(problem, device), "OAI" in name
    weights = (given.w1.mT, given.w2.mT) if in_out else (given.w1, given.w2)
    if in_out and kind.weights is None:
        weights = (weights[0].contiguous(), weights[1].contiguous())
    arrays = _arrays(problem, device, in_out)
    if kind.static:
        arrays |= {f"a{number}_scale": torch.tensor([0.02 * number], device=device) for number in (1, 2)}
    elif kind.theirs == "int8_w8a8":
        arrays |= {"a1_scale": None, "a2_scale": None}
    # Experts of DeepGEMM's contract have no biases, and two functions of vLLM have no parameters for them.
    if kind.theirs not in ("mxfp4", "nvfp4_w4a16") and not name.endswith("DeepGemmExperts"):
        arrays |= {"w1_bias": given.b1, "w2_bias": given.b2}
    config = _their_maker(kind.theirs)
    if kind.weights is None:
        arrays = {"w1_bias": None, "w2_bias": None} | arrays
    return Layer(
        given,
        weights,
        config(**arrays, **kind.their_options),
        modular.FusedMoEQuantConfig(kind.ours, **arrays, **kind.our_options),
    )


def our_experts(name: str, config: Any, rows: int) -> Any:
    """Our class of that name, made as our users make it."""
    cls = getattr(modular, name)
    if name == "TritonOrDeepGemmExperts":
        flags = {f"use_{config.scheme}": True} if config.scheme else {}
        arrays = {field: getattr(config, field) for field in ("w1_bias", "w2_bias", "w1_scale", "w2_scale")}
        arrays |= {field: getattr(config, field) for field in ("w1_zp", "w2_zp", "a1_scale", "a2_scale")}
        flags |= {"per_act_token_quant": config.per_act_token_quant, "block_shape": config.block_shape}
        return cls(**flags, allow_deep_gemm=True, **arrays)
    return cls(rows, 1, quant_config=config) if name.startswith("Batched") else cls(quant_config=config)


def call_of(problem: Problem, activation: str, on_input: bool, layer: Layer) -> tuple[Any, ...]:
    given = layer.given
    return (
        *(given.x, *layer.weights, given.weights, given.ids, their_activation(activation)),
        *(-1 if given.expert_map is None else len(given.expert_map), given.expert_map, on_input),
    )


class Variant(NamedTuple):
    """activation: for vLLM. ours: for our kernel; None: the same. layer: fields of vLLM's layer."""

    activation: str = "silu"
    ours: Any = None
    on_input: bool = False
    layer: Mapping[str, Any] = _NOTHING


_PLAIN = Variant()


@of_device
def bits(
    device: str, name: str, kind: Kind, problem: Callable[[], Problem], variant: Variant = _PLAIN, gathers: bool = False
) -> Answer:
    """Our experts of that name in vLLM's kernel against our kernel. gathers: prepare brings more rows than go out."""
    drawn = problem()
    layer = layer_of(drawn, kind, name, device)
    rows, batched = max(1, len(drawn.x)), name.startswith("Batched")
    moe_config = their_moe_config(drawn, variant.activation)
    for field, value in variant.layer.items():
        setattr(moe_config, field, value)
    cls = _watched(getattr(modular, name)) if gathers else getattr(modular, name)
    experts = vllm.adapt(cls, moe_config, layer.theirs)
    experts = experts(moe_config, layer.theirs, *((rows, 1) if batched else ()))
    part, own = gathering() if gathers else their_no_dp_ep(), modular.MoEPrepareAndFinalizeNoEP()
    if batched:
        own = modular.BatchedPrepareAndFinalize(rows, len(drawn.b1))
        part = vllm.adapt(modular.BatchedPrepareAndFinalize)(rows, len(drawn.b1))
    kernels = vllm_file("modular_kernel")
    assert isinstance(experts, kernels.FusedMoEExpertsModular) and isinstance(experts, getattr(modular, name))
    call = call_of(drawn, variant.activation, variant.on_input, layer)
    actual = kernels.FusedMoEKernel(part, experts).apply(*call)
    chosen = call[5] if variant.ours is None else variant.ours
    ours = modular.FusedMoEKernel(own, our_experts(name, layer.ours, rows))
    given: Any = (*call[:5], chosen, *call[6:])
    expected = ours.apply(*given)
    assert expected.isfinite().all() and (expected.numel() == 0 or expected.abs().max() > 0)
    return Answer(actual, expected.float().cpu().numpy(), bound=0.0)


def _watched(cls: Any) -> Any:
    """The class, which complains of memory that overlaps: kernels may then write what others still read."""

    class Watched(cls):
        def apply(self, *arguments: Any, **named: Any) -> None:
            call = ExpertsCall(*arguments, **named)
            memory = (call.output, call.workspace13, call.workspace2)
            spans = sorted((tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes) for tensor in memory)
            assert all(first[1] <= second[0] for first, second in itertools.pairwise(spans)), "memory overlaps"
            super().apply(*arguments, **named)

    return Watched


def gathering() -> Any:
    """vLLM's prepare and finalize as two ranks with the same tokens would run them."""

    class Gathering(vllm_file("prepare_finalize.no_dp_ep").MoEPrepareAndFinalizeNoDPEPModular):
        def prepare(self, a1: Any, topk_weights: Any, topk_ids: Any, *arguments: Any, **named: Any) -> Any:
            a1q, scale, meta, *_ = super().prepare(a1, topk_weights, topk_ids, *arguments, **named)
            return a1q.repeat(2, 1), scale, meta, topk_ids.repeat(2, 1), topk_weights.repeat(2, 1)

        def finalize(self, output: Any, fused_expert_output: Any, *arguments: Any) -> None:
            first, second = fused_expert_output.chunk(2)
            assert torch.equal(first, second)
            output.copy_(second)

    return Gathering()


@of_device
def _with_adapters(device: str, name: str, slices: int) -> Answer:
    """Adapters in vLLM's context and stacked factors, of tokens that its wrapper names."""
    drawn = draw()
    layer, config = layer_of(drawn, KINDS["bf16"], name, device), their_moe_config(drawn, "silu")
    config.is_lora_enabled = True
    experts = vllm.adapt(getattr(modular, name), config)(config, layer.theirs)
    assert isinstance(experts, vllm_file("experts.lora_experts_mixin").LoRAExpertsMixin)
    tokens, hidden = layer.given.x.shape
    count, _, width = layer.given.w2.mT.shape[:1] + layer.given.w2.shape[1:]
    shapes = [[(8, hidden)] * slices, [(2 * width // slices, 8)] * slices, [(8, width)], [(hidden, 8)]]
    options: dict[str, Any] = {"dtype": layer.given.x.dtype, "device": device}
    torch.manual_seed(0)
    stacked = [tuple(torch.randn(2, count, *shape, **options) / 8 for shape in side) for side in shapes]
    mapping = torch.arange(tokens, dtype=torch.int32, device=device) % 3 - 1
    meta = types.SimpleNamespace(token_lora_mapping=mapping, no_lora_flag_cpu=torch.tensor([False]))
    context = vllm_file("experts.lora_context").MoELoRAContext(
        *stacked, torch.ones(3, dtype=torch.int32, device=device), 2, drawn.ids.shape[1], slices, False, 0, 1,
        count, types.SimpleNamespace(token_mapping_meta=meta), False,
    )  # fmt: skip
    call = call_of(drawn, "silu", False, layer)
    kernels = [vllm_file("modular_kernel").FusedMoEKernel(their_no_dp_ep(), experts)]
    kernels += [modular.FusedMoEKernel(modular.MoEPrepareAndFinalizeNoEP(), our_experts(name, layer.ours, tokens))]
    plain = kernels[0].apply(*call)
    for kernel in kernels:
        kernel.fused_experts.set_lora_context(context)
    actual, expected = (kernel.apply(*call) for kernel in kernels)
    assert not torch.equal(actual, plain) and torch.equal(actual[mapping < 0], plain[mapping < 0])
    return Answer(actual, expected.float().cpu().numpy(), bound=0.0)


@of_device
def _their_batched(device: str, name: str, kind: Kind, problem: Callable[[], Problem], bound: float) -> Answer:
    """Batched experts with vLLM's prepare and finalize, which quantises, and weights in bf16."""
    drawn = problem()
    layer, config = layer_of(drawn, kind, name, device), their_moe_config(drawn, "silu")
    experts = vllm.adapt(getattr(modular, name))(config, layer.theirs, max_num_tokens=M, num_dispatchers=1)
    kernel = vllm_file("modular_kernel").FusedMoEKernel(their_batched(drawn), experts)
    activations = formats.FP8_GROUP if kind.weights is formats.FP8_BLOCK else None
    expected = drawn.expected("silu", biases=not name.endswith("DeepGemmExperts"), activations=activations)
    return Answer(kernel.apply(*call_of(drawn, "silu", False, layer)), expected, bound)


def _formats() -> Iterator[Case]:
    for label, kind in KINDS.items():
        names = [*STANDARD, "BatchedTritonExperts"]
        names += ["TritonOrDeepGemmExperts"] if kind.ours in (None, *FLAGGED_SCHEMES) else []
        names += DEEP_GEMM if label == "fp8 blocks" else []
        for name in names:

            def problem(kind: Kind = kind) -> Problem:
                sizes: Any = {"hidden": 256, "width": 128} if kind.weights is formats.FP8_BLOCK else {}
                return draw(kind.weights, **sizes)

            yield Case(f"e {name}, {label}, bits of our kernel", theirs, bits(name, kind, problem))


@of_device
def _as_triton_kernels(device: str, name: str, problem: Callable[[], Problem]) -> Answer:
    """mxfp4 weights as `triton_kernels` Tensors, with their scales in precision objects."""
    drawn = problem()
    given = tensors(drawn, device)
    w1, w2, arrays = gpt_oss_weights(given)
    layer = Layer(given, (w1, w2), their_config(given, arrays), our_config(given, arrays))
    config, call = their_moe_config(drawn, SWIGLU), call_of(drawn, SWIGLU, False, layer)
    experts = vllm.adapt(getattr(modular, name))(config, layer.theirs)
    actual = vllm_file("modular_kernel").FusedMoEKernel(their_no_dp_ep(), experts).apply(*call)
    own = modular.FusedMoEKernel(modular.MoEPrepareAndFinalizeNoEP(), our_experts(name, layer.ours, M))
    return Answer(actual, own.apply(*call).float().cpu().numpy(), bound=0.0)


def _few(tokens: int) -> Callable[[], Problem]:
    def problem() -> Problem:
        drawn = draw()
        return drawn._replace(x=drawn.x[:tokens], ids=drawn.ids[:tokens], weights=drawn.weights[:tokens])

    return problem


def _top_one() -> Problem:
    drawn = draw(missing=False)
    return drawn._replace(ids=drawn.ids[:, :1].copy(), weights=drawn.weights[:, :1].copy())


def _shapes_and_options() -> Iterator[Case]:
    plain, silu = KINDS["bf16"], modular.activation_of("silu")
    limited = {"swiglu_limit": 0.5}
    oai = limited | {"swiglu_alpha": 1.5, "swiglu_beta": 1.0}
    packed = type(silu)("swiglu_oai", alpha=1.5, limit=0.5)
    variants = {
        "swigluoai": Variant(SWIGLU),
        "swigluoai with constants": Variant(
            SWIGLU, type(silu)("swiglu_oai", gate_layout="interleaved", alpha=1.5, limit=0.5), layer=oai
        ),
        "swigluoai_uninterleave": Variant("swigluoai_uninterleave", packed, layer=oai),
        "swigluoai_uninterleave as silu": Variant(
            "swigluoai_uninterleave", type(silu)("silu", limit=0.5), layer=limited
        ),
        "silu with a limit": Variant("silu", type(silu)("silu", limit=0.5), layer=limited),
        "swiglustep": Variant("swiglustep"),
        "situ": Variant(
            "situ",
            type(silu)("softcapped_silu", alpha=4.0, limit=25.0),
            layer={"activation_situ_beta": 4.0, "activation_situ_linear_beta": 25.0},
        ),
        "gelu": Variant("gelu"),
        "gelu_tanh": Variant("gelu_tanh"),
    }
    for name in ("TritonExperts", "UnfusedOAITritonExperts", "BatchedTritonExperts"):
        for label, variant in variants.items():
            yield Case(f"e {name}, {label}, bits of our kernel", theirs, bits(name, plain, draw, variant))
    for name in (*STANDARD, "BatchedTritonExperts"):
        for label, problem in {
            "1 token": _few(1),
            "no tokens": _few(0),
            "expert_map": lambda: draw().on_rank(),
        }.items():
            # Placing by an expert_map is a matter of prepare: vLLM's batched classes take ranks in order.
            yield Case(f"e {name}, {label}, bits of our kernel", theirs, bits(name, plain, problem))
        on_input = Variant(on_input=True)
        yield Case(f"e {name}, weight on the input, bits of our kernel", theirs, bits(name, plain, _top_one, on_input))
    for name in (*STANDARD, "TritonOrDeepGemmExperts"):
        yield Case(f"e {name}, gathered tokens, bits of our kernel", theirs, bits(name, plain, draw, gathers=True))
    for name in ("OAITritonExperts", "UnfusedOAITritonExperts"):
        for label in ("mxfp4", "mxfp4, expert_map"):
            run = _as_triton_kernels(name, DRAWS[label])
            yield Case(f"e {name}, {label} of triton_kernels, bits of our kernel", theirs, run)
    for name, slices in itertools.product(STANDARD, (1, 2)):
        yield Case(f"e {name}, adapters of {slices} slices, bits of our kernel", theirs, _with_adapters(name, slices))
    for label in ("bf16", "int4 w4a16", "mxfp4 w4a16"):
        kind = KINDS[label]
        run = _their_batched("BatchedTritonExperts", kind, lambda kind=kind: draw(kind.weights), 0.02)
        yield Case(f"e BatchedTritonExperts, {label}, vLLM's batched prepare", theirs, run)

    def blocks() -> Problem:
        return draw(formats.FP8_BLOCK, hidden=256, width=128)

    # A rounding to e4m3 that falls the other way moves an element by 2 ** -4.
    run = _their_batched("BatchedDeepGemmExperts", KINDS["fp8 blocks"], blocks, 0.04)
    yield Case("e BatchedDeepGemmExperts, fp8 blocks, vLLM's batched prepare", theirs, run)


def cases() -> list[Case]:
    return [*_formats(), *_shapes_and_options()]
