"""vLLM's gpt-oss experts, prepare and finalize classes and kernel, beside ours, on one device."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping
from typing import Any

import torch

from moe_core.formats import FP8_BLOCK, FP8_GROUP
from moe_torch import modular
from moe_torch.compat.triton_kernels import matmul_ogs, tensor
from tools.upstream.imports import MOE, QUANTIZATION, WHOLE, Names
from tools.upstream.problems import E, M, Problem, Tensors, draw, draw_mxfp4, tensors
from tools.upstream.running import Answer, Case, Run


def _file(name: str) -> Any:
    return importlib.import_module(f"{MOE}.{name}")


# --- What imports are changed to -------------------------------------------------------------------------------------


def theirs() -> Mapping[str, Names]:
    """vLLM's kernel, configurations and classes; only `triton_kernels` is ours."""
    return {}


def ours() -> Mapping[str, Names]:
    """`modular_kernel` is our `moe_torch.modular`, under vLLM's names, and configurations are ours."""

    def named(name: str, older: str) -> Any:
        return getattr(modular, name, None) or getattr(modular, older)

    kernel = {name: getattr(modular, name) for name in modular.__all__} | {
        "FusedMoEExpertsModular": named("FusedMoEExpertsModular", "FusedMoEPermuteExpertsUnpermute"),
        "FusedMoEPrepareAndFinalizeModular": named("FusedMoEPrepareAndFinalizeModular", "FusedMoEPrepareAndFinalize"),
        # Experts that route by themselves are no part of ours, nor of the cases.
        "FusedMoEExpertsMonolithic": object,
        "FusedMoEPrepareAndFinalizeMonolithic": object,
        "PrepareResultType": tuple,
        "PrepareMonolithicResultType": tuple,
        WHOLE: True,
    }
    names = ("FusedMoEQuantConfig", "FUSED_MOE_UNQUANTIZED_CONFIG")
    return {f"{MOE}.modular_kernel": kernel, f"{MOE}.config": {name: getattr(modular, name) for name in names}}


def ours_reducing() -> Mapping[str, Names]:
    """The same, and the classes that weight and reduce are ours too."""
    return {**ours(), **theirs_reducing_as_ours()}


def theirs_reducing_as_ours() -> Mapping[str, Names]:
    """vLLM's kernel, with our classes that weight and reduce."""
    reducing = {name: getattr(modular, name) for name in modular.__all__ if name.startswith("TopKWeight")}
    return {f"{MOE}.topk_weight_and_reduce": reducing | {WHOLE: True}}


# --- Objects of vLLM -------------------------------------------------------------------------------------------------


def _activation(name: str) -> Any:
    return _file("activation").MoEActivation.from_str(name)


def _moe_config(problem: Problem, activation: str) -> Any:
    """vLLM's description of a layer on one device."""
    config = _file("config")
    sizes = dict.fromkeys(("tp_size", "pcp_size", "dp_size", "ep_size", "sp_size"), 1)
    ranks = dict.fromkeys(("tp_rank", "pcp_rank", "dp_rank", "ep_rank"), 0)
    parallel = config.FusedMoEParallelConfig(
        **sizes, **ranks, use_ep=False, all2all_backend="allgather_reducescatter", enable_eplb=False
    )
    return config.FusedMoEConfig(
        num_experts=E,
        experts_per_token=problem.ids.shape[1],
        hidden_dim=problem.x.shape[1],
        intermediate_size=problem.b1.shape[1] // 2,
        num_local_experts=len(problem.b1),
        num_logical_experts=E,
        activation=_activation(activation),
        device="cpu",
        routing_method=config.RoutingMethodType.Renormalize,
        moe_parallel_config=parallel,
        in_dtype=torch.bfloat16,
    )


def _gpt_oss(given: Tensors) -> tuple[Any, Any, dict[str, Any]]:
    """w1 and w2 as vLLM passes them to gpt-oss experts, `[E, K, N]`, and the arrays of their configuration."""
    arrays: dict[str, Any] = {"w1_bias": given.b1, "w2_bias": given.b2}
    if given.scales[0] is None:
        return given.w1.mT.contiguous(), given.w2.mT.contiguous(), arrays
    weights = []
    for number, (codes, scales) in enumerate(zip((given.w1, given.w2), given.scales, strict=True), 1):
        assert scales is not None
        weights.append(tensor.wrap_torch_tensor(codes.mT, dtype=tensor.FP4))
        scale = tensor.wrap_torch_tensor(scales.mT)
        arrays[f"w{number}_scale"] = matmul_ogs.PrecisionConfig(weight_scale=scale)
    return weights[0], weights[1], arrays


def _their_config(given: Tensors, arrays: dict[str, Any]) -> Any:
    config = _file("config")
    if given.scales[0] is None:
        return config.biased_moe_quant_config(arrays["w1_bias"], arrays["w2_bias"])
    return config.mxfp4_w4a16_moe_quant_config(**arrays)


def _our_config(given: Tensors, arrays: dict[str, Any]) -> Any:
    scheme = None if given.scales[0] is None else "mxfp4_w4a16"
    return modular.FusedMoEQuantConfig(scheme, **arrays)


def _global_experts(given: Tensors) -> int:
    return -1 if given.expert_map is None else given.expert_map.shape[0]


def _in_their_kernel(prepare_finalize: Any, experts: Any, given: Tensors, weights: Any, activation: str) -> Any:
    """vLLM's kernel; its class with both kinds where the experts are of vLLM's kind."""
    kernels = _file("modular_kernel")
    kind = kernels.FusedMoEKernel if isinstance(experts, kernels.FusedMoEExperts) else kernels.FusedMoEKernelModularImpl
    return kind(prepare_finalize, experts).apply(
        hidden_states=given.x,
        w1=weights[0],
        w2=weights[1],
        topk_weights=given.weights,
        topk_ids=given.ids,
        activation=_activation(activation),
        global_num_experts=_global_experts(given),
        expert_map=given.expert_map,
        apply_router_weight_on_input=False,
    )


def _in_our_kernel(prepare_finalize: Any, experts: Any, given: Tensors, weights: Any, activation: str) -> Any:
    return modular.FusedMoEModularKernel(prepare_finalize, experts)(
        given.x,
        weights[0],
        weights[1],
        given.weights,
        given.ids,
        activation=_activation(activation),
        global_num_experts=_global_experts(given),
        expert_map=given.expert_map,
    )


def _no_dp_ep() -> Any:
    return _file("prepare_finalize.no_dp_ep").MoEPrepareAndFinalizeNoDPEPModular()


def _batched(problem: Problem) -> Any:
    kind = _file("prepare_finalize.batched").BatchedPrepareAndFinalize
    return kind(max_num_tokens=M, num_local_experts=len(problem.b1), num_dispatchers=1, rank=0)


# --- The cases -------------------------------------------------------------------------------------------------------

_DRAWS: dict[str, Callable[[], Problem]] = {
    "bf16": lambda: draw(),
    "bf16, expert_map": lambda: draw().on_rank(),
    "mxfp4": lambda: draw_mxfp4(),
    "mxfp4, expert_map": lambda: draw_mxfp4().on_rank(),
}
_SWIGLU = "swigluoai"


def _experts_in_their_kernel(name: str, problem: Callable[[], Problem], activation: str) -> Run:
    def run(device: str) -> Answer:
        layer = problem()
        given = tensors(layer, device)
        w1, w2, arrays = _gpt_oss(given)
        kind = getattr(_file("experts.gpt_oss_triton_kernels_moe"), name)
        experts = kind(_moe_config(layer, activation), _their_config(given, arrays))
        actual = _in_their_kernel(_no_dp_ep(), experts, given, (w1, w2), activation)
        return Answer(actual, layer.expected(activation))

    return run


def _experts_in_our_kernel(name: str, problem: Callable[[], Problem], activation: str) -> Run:
    def run(device: str) -> Answer:
        layer = problem()
        given = tensors(layer, device)
        w1, w2, arrays = _gpt_oss(given)
        kind = getattr(_file("experts.gpt_oss_triton_kernels_moe"), name)
        experts = kind(_our_config(given, arrays))
        actual = _in_our_kernel(modular.MoEPrepareAndFinalizeNoEP(), experts, given, (w1, w2), activation)
        return Answer(actual, layer.expected(activation))

    return run


def _made_as_theirs(device: str) -> Answer:
    """vLLM's experts in our kernel, made with the arguments that serving code passes."""
    layer = draw()
    given = tensors(layer, device)
    w1, w2, arrays = _gpt_oss(given)
    kind = _file("experts.gpt_oss_triton_kernels_moe").OAITritonExperts
    experts = kind(_moe_config(layer, _SWIGLU), _our_config(given, arrays))
    actual = _in_our_kernel(modular.MoEPrepareAndFinalizeNoEP(), experts, given, (w1, w2), _SWIGLU)
    return Answer(actual, layer.expected(_SWIGLU))


def _naive_batched(call: Any, prepare_is_theirs: bool) -> Run:
    """vLLM's reference experts of the batched format, a class with a constructor of its own; call: in which kernel."""

    def run(device: str) -> Answer:
        layer = draw()
        given = tensors(layer, device)
        theirs = call is _in_their_kernel
        config = _file("config").FUSED_MOE_UNQUANTIZED_CONFIG if theirs else modular.FUSED_MOE_UNQUANTIZED_CONFIG
        kind = _file("experts.fused_batched_moe").NaiveBatchedExperts
        experts = kind(_moe_config(layer, "silu"), config, max_num_tokens=M, num_dispatchers=1)
        prepare_finalize = _batched(layer) if prepare_is_theirs else modular.BatchedPrepareAndFinalize(M, E)
        actual = call(prepare_finalize, experts, given, (given.w1, given.w2), "silu")
        return Answer(actual, layer.expected("silu", biases=False))

    return run


def _moe_forward(problem: Callable[[], Problem], renormalize: bool) -> Run:
    """`triton_kernel_moe_forward` routes: with logits that choose the ids of the problem."""

    def run(device: str) -> Answer:
        layer = problem()
        given = tensors(layer, device)
        logits = torch.randn(M, E, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16).to(device)
        scores = logits.float() if renormalize else logits.float().softmax(-1)
        weights, ids = scores.topk(layer.ids.shape[1], dim=-1)
        weights = weights.softmax(-1) if renormalize else weights
        layer = layer._replace(ids=ids.to(torch.int32).cpu().numpy(), weights=weights.cpu().numpy())
        w1, w2, arrays = _gpt_oss(given)
        forward = _file("experts.gpt_oss_triton_kernels_moe").triton_kernel_moe_forward
        actual = forward(
            given.x,
            w1,
            w2,
            logits,
            layer.ids.shape[1],
            renormalize,
            quant_config=_their_config(given, arrays),
            global_num_experts=_global_experts(given),
            expert_map=given.expert_map,
        )
        return Answer(actual, layer.expected(_SWIGLU))

    return run


def _routing_data(device: str) -> Answer:
    """`make_routing_data`: the sum of the rows of each token's experts, brought there and back by its indices."""
    layer = draw()
    given = tensors(layer, device)
    make = _file("experts.gpt_oss_triton_kernels_moe").make_routing_data
    data, gather, scatter = make(given.ids.long(), given.weights, E)
    places = torch.arange(E, device=device).repeat_interleave(data.expt_hist.long())
    rows = torch.zeros(given.ids.numel(), device=device)
    rows[: len(places)] = (places + 1) * data.gate_scal[: len(places)].float()
    slots = scatter.src_indx.view(M, -1).long()
    found = torch.where(slots >= 0, rows[slots.clamp(min=0)], 0.0)
    assert torch.equal(gather.dst_indx, scatter.src_indx)
    return Answer(found, ((layer.ids + 1) * layer.weights).astype("float32"))


def _swizzled(device: str) -> Answer:
    """mxfp4 weights that vLLM's own loader has laid out, in its experts on compat."""
    layer = draw_mxfp4()
    given = tensors(layer, device)
    swizzle = importlib.import_module(f"{QUANTIZATION}.mxfp4_utils")._swizzle_mxfp4
    weights: list[Any] = []
    arrays: dict[str, Any] = {"w1_bias": given.b1, "w2_bias": given.b2}
    for number, (codes, scales) in enumerate(zip((given.w1, given.w2), given.scales, strict=True), 1):
        weight, flex, scale = swizzle(codes, scales)
        weights.append(weight)
        arrays[f"w{number}_scale"] = matmul_ogs.PrecisionConfig(
            weight_scale=scale, flex_ctx=matmul_ogs.FlexCtx(rhs_data=flex)
        )
    kind = _file("experts.gpt_oss_triton_kernels_moe").OAITritonExperts
    experts = kind(_moe_config(layer, _SWIGLU), _their_config(given, arrays))
    return Answer(_in_their_kernel(_no_dp_ep(), experts, given, weights, _SWIGLU), layer.expected(_SWIGLU))


def _their_prepare(problem: Callable[[], Problem], kind: Any, batched: bool = False) -> Run:
    """Our experts and kernel with vLLM's prepare and finalize; kind: our experts for a problem."""

    def run(device: str) -> Answer:
        layer = problem()
        given = tensors(layer, device)
        prepare_finalize = _batched(layer) if batched else _no_dp_ep()
        actual = _in_our_kernel(prepare_finalize, kind(given), given, (given.w1, given.w2), "silu")
        return Answer(actual, layer.expected("silu"))

    return run


def _on_input(device: str) -> Answer:
    """The router's weight on the input, by vLLM's prepare."""
    layer = draw(missing=False)
    layer = layer._replace(ids=layer.ids[:, :1].copy(), weights=layer.weights[:, :1].copy())
    given = tensors(layer, device)
    before = given.x.clone()
    kernel = modular.FusedMoEModularKernel(_no_dp_ep(), modular.TritonExperts())
    actual = kernel(given.x, given.w1, given.w2, given.weights, given.ids, apply_router_weight_on_input=True)
    assert torch.equal(before, given.x)
    weighted = (given.x * given.weights.to(given.x.dtype)).float().cpu().numpy()
    plain = layer._replace(x=weighted, weights=layer.weights * 0 + 1)
    return Answer(actual, plain.expected("silu", biases=False))


def _reduced(name: str) -> Run:
    """A class of vLLM that weights and reduces, as what our experts answer to our kernel."""

    def run(device: str) -> Answer:
        layer = draw(missing=name == "TopKWeightAndReduceNoOP")
        given = tensors(layer, device)
        reducing = getattr(_file("topk_weight_and_reduce"), name)

        class Batched(modular.BatchedTritonExperts):
            def finalize_weight_and_reduce_impl(self) -> Any:
                return reducing(0)

        class Reduced(modular.TritonExperts):
            def finalize_weight_and_reduce_impl(self) -> Any:
                return reducing()

        class Slots(modular.TritonExperts):
            """Rows by slot, neither weighted nor added up, written with calls of our experts on single choices."""

            def finalize_weight_and_reduce_impl(self) -> Any:
                return reducing()

            def workspace_shapes(self, M: int, N: int, K: int, topk: int, *rest: Any) -> Any:
                shape13, shape2, _ = super().workspace_shapes(M, N, K, topk, *rest)
                return shape13, shape2, (M, topk, K)

            def apply(
                self, output: Any, hidden_states: Any, w1: Any, w2: Any, weights: Any, ids: Any, *rest: Any
            ) -> None:
                for choice in range(ids.shape[1]):
                    rows, one = torch.empty_like(hidden_states), ids[:, choice : choice + 1].contiguous()
                    super().apply(rows, hidden_states, w1, w2, torch.ones_like(one, dtype=torch.float32), one, *rest)
                    output[:, choice] = rows

        config = modular.FusedMoEQuantConfig(w1_bias=given.b1, w2_bias=given.b2)
        if name == "TopKWeightAndReduceNaiveBatched":
            experts, prepare_finalize = Batched(M, 1, config), modular.BatchedPrepareAndFinalize(M, E)
        else:
            kind = Slots if name == "TopKWeightAndReduceContiguous" else Reduced
            experts, prepare_finalize = kind(config), modular.MoEPrepareAndFinalizeNoEP()
        actual = _in_our_kernel(prepare_finalize, experts, given, (given.w1, given.w2), "silu")
        return Answer(actual, layer.expected("silu"))

    return run


def _our_experts(name: str, problem: Callable[[], Problem], activation: str = "silu") -> Run:
    """Our experts in vLLM's kernel, with vLLM's prepare and finalize."""

    def run(device: str) -> Answer:
        layer = problem()
        given = tensors(layer, device)
        biases: dict[str, Any] = {"w1_bias": given.b1, "w2_bias": given.b2}
        if "OAI" in name:
            w1, w2, arrays = _gpt_oss(given)
            experts = getattr(modular, name)(_our_config(given, arrays))
        else:
            w1, w2 = given.w1, given.w2
            options = (M, 1) if name.startswith("Batched") else ()
            experts = getattr(modular, name)(*options, modular.FusedMoEQuantConfig(**biases))
        prepare_finalize = _batched(layer) if name.startswith("Batched") else _no_dp_ep()
        actual = _in_their_kernel(prepare_finalize, experts, given, (w1, w2), activation)
        return Answer(actual, layer.expected(activation))

    return run


def _deep_gemm(call: Any, prepare_quantizes: bool, batched: bool = False) -> Run:
    """Our DeepGEMM experts with vLLM's prepare, which quantises or leaves it to them; call: in which kernel."""

    def run(device: str) -> Answer:
        layer = draw(FP8_BLOCK, hidden=256, width=128)
        given = tensors(layer, device)
        config = modular.FusedMoEQuantConfig.make(
            use_fp8_w8a8=True, block_shape=[128, 128], w1_scale=given.scales[0], w2_scale=given.scales[1]
        )
        base: Any = modular.BatchedDeepGemmExperts if batched else modular.DeepGemmExperts
        options = (M, 1) if batched else ()

        class Experts(base):
            expects_unquantized_inputs = not prepare_quantizes

        prepare_finalize = _batched(layer) if batched else _no_dp_ep()
        prepare, prepared = prepare_finalize.prepare, []

        @functools.wraps(prepare)
        def watched(*arguments: Any, **named: Any) -> Any:
            prepared.append(prepare(*arguments, **named))
            return prepared[-1]

        prepare_finalize.prepare = watched
        actual = call(prepare_finalize, Experts(*options, config), given, (given.w1, given.w2), "silu")
        dtypes = [found[0].dtype for found in prepared]
        assert dtypes == [torch.float8_e4m3fn if prepare_quantizes else torch.bfloat16], f"prepare gave {dtypes}"
        expected = layer.expected("silu", biases=False, activations=FP8_GROUP)
        # A rounding to e4m3 that falls the other way moves an element by 2 ** -4.
        return Answer(actual, expected, bound=0.04)

    return run


def _as_their_kind(device: str) -> Answer:
    """Our experts in the kernel class that serving code makes, which asks for vLLM's kinds and enumeration."""
    layer = draw()
    given = tensors(layer, device)
    kernels = _file("modular_kernel")

    class Experts(modular.TritonExperts, kernels.FusedMoEExpertsModular):
        def __init__(self, moe_config: Any, quant_config: Any) -> None:
            modular.TritonExperts.__init__(self, quant_config)
            self.moe_config = moe_config

        @staticmethod
        def activation_format() -> Any:
            return kernels.FusedMoEActivationFormat.Standard

    config = modular.FusedMoEQuantConfig(w1_bias=given.b1, w2_bias=given.b2)
    experts = Experts(_moe_config(layer, "silu"), config)
    actual = _in_their_kernel(_no_dp_ep(), experts, given, (given.w1, given.w2), "silu")
    return Answer(actual, layer.expected("silu"))


def _is_supported(device: str) -> Answer:
    """vLLM's question whether a class can run a layer, put to our experts; its enumeration of formats is not asked."""
    layer = draw()
    kernels = _file("modular_kernel")
    answers = []
    kinds: tuple[Any, ...] = (modular.TritonExperts, modular.OAITritonExperts, modular.UnfusedOAITritonExperts)
    for kind in kinds:
        format = kind.activation_format()
        question = kernels.FusedMoEExperts.is_supported_config
        supported, reason = question(kind, _moe_config(layer, _SWIGLU), None, None, format)
        assert supported, reason
        answers.append(float(supported))
    return Answer(torch.tensor(answers), torch.ones(3).numpy())


def _choices(kind: str, top_k: int, dtype: torch.dtype) -> Run:
    """vLLM's experts on compat with another number of choices and another type of ids."""

    def run(device: str) -> Answer:
        layer = draw(top_k=top_k)
        given = tensors(layer, device)
        given = given._replace(ids=given.ids.to(dtype))
        w1, w2, arrays = _gpt_oss(given)
        experts = getattr(_file("experts.gpt_oss_triton_kernels_moe"), kind)
        experts = experts(_moe_config(layer, _SWIGLU), _their_config(given, arrays))
        actual = _in_their_kernel(_no_dp_ep(), experts, given, (w1, w2), _SWIGLU)
        return Answer(actual, layer.expected(_SWIGLU))

    return run


def _standard(given: Tensors) -> Any:
    return modular.TritonExperts(modular.FusedMoEQuantConfig(w1_bias=given.b1, w2_bias=given.b2))


def _batched_experts(given: Tensors) -> Any:
    return modular.BatchedTritonExperts(M, 1, modular.FusedMoEQuantConfig(w1_bias=given.b1, w2_bias=given.b2))


def cases() -> list[Case]:
    """a: vLLM's experts; b: its prepare and finalize classes in our kernel; c: our experts in its kernel."""
    found = [
        Case("a make_routing_data", theirs, _routing_data),
        Case("a mxfp4 weights laid out by vLLM", theirs, _swizzled),
    ]
    for name, problem in _DRAWS.items():
        for renormalize in (True, False):
            run = _moe_forward(problem, renormalize)
            found.append(Case(f"a triton_kernel_moe_forward, {name}, renormalize={renormalize}", theirs, run))
    activations = {"OAITritonExperts": (_SWIGLU,), "UnfusedOAITritonExperts": (_SWIGLU, "silu")}
    for kind, names in activations.items():
        for name, problem in _DRAWS.items():
            for activation in names:
                label = f"{kind}, {name}, {activation}"
                found += [
                    Case(f"a {label}, vLLM's kernel", theirs, _experts_in_their_kernel(kind, problem, activation)),
                    Case(f"a {label}, our kernel", ours, _experts_in_our_kernel(kind, problem, activation)),
                    Case(
                        f"c our {label}, vLLM's kernel",
                        theirs_reducing_as_ours,
                        _our_experts(kind, problem, activation),
                    ),
                ]
    for name in ("bf16", "bf16, expert_map"):
        problem = _DRAWS[name]
        found += [
            Case(f"b NoDPEP, {name}, our kernel and experts", ours_reducing, _their_prepare(problem, _standard)),
            Case(
                f"c our TritonExperts, {name}, vLLM's kernel",
                theirs_reducing_as_ours,
                _our_experts("TritonExperts", problem),
            ),
        ]
    found += [
        Case("b NoDPEP, weight on the input, our kernel and experts", ours_reducing, _on_input),
        Case("b Batched, bf16, our kernel and experts", ours_reducing, _their_prepare(draw, _batched_experts, True)),
        *(
            Case(f"b {name}, our kernel and experts", ours, _reduced(name))
            for name in (
                "TopKWeightAndReduceNoOP",
                "TopKWeightAndReduceContiguous",
                "TopKWeightAndReduceNaiveBatched",
            )
        ),
        Case(
            "c our BatchedTritonExperts, bf16, vLLM's kernel",
            theirs_reducing_as_ours,
            _our_experts("BatchedTritonExperts", draw),
        ),
        Case("c our TritonExperts as vLLM's kind, FusedMoEKernel", theirs_reducing_as_ours, _as_their_kind),
        Case("c our experts, vLLM's is_supported_config", theirs, _is_supported),
    ]
    found += [
        Case("a OAITritonExperts, bf16, made as vLLM makes them, our kernel", ours_reducing, _made_as_theirs),
        Case("a NaiveBatchedExperts, bf16, vLLM's kernel", theirs, _naive_batched(_in_their_kernel, True)),
        Case("a NaiveBatchedExperts, bf16, our kernel", ours_reducing, _naive_batched(_in_our_kernel, False)),
        Case("b Batched, bf16, our kernel, NaiveBatchedExperts", ours_reducing, _naive_batched(_in_our_kernel, True)),
    ]
    for batched in (False, True):
        for quantizes in (False, True) if not batched else (True,):
            label = (
                f"{'Batched' * batched}DeepGemmExperts, fp8 blocks quantised by {'prepare' if quantizes else 'experts'}"
            )
            found += [
                Case(f"b {label}, our kernel", ours_reducing, _deep_gemm(_in_our_kernel, quantizes, batched)),
                Case(
                    f"c our {label}, vLLM's kernel",
                    theirs_reducing_as_ours,
                    _deep_gemm(_in_their_kernel, quantizes, batched),
                ),
            ]
    for kind in activations:
        for top_k, dtype in ((1, torch.int32), (3, torch.int64), (6, torch.int32)):
            name = f"a {kind}, bf16, {top_k} choices, {str(dtype).removeprefix('torch.')} ids, vLLM's kernel"
            found.append(Case(name, theirs, _choices(kind, top_k, dtype)))
    return sorted(found, key=lambda case: case.name[0])
