"""SGLang's experts on `triton_kernels`, with its own top-k of that format, on our modules of Triton 3.8."""

from __future__ import annotations

import importlib
import types
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch

from tools.upstream import imports
from tools.upstream.problems import SAME_ROUNDINGS, TOPK, E, Problem, draw, draw_mxfp4, tensors
from tools.upstream.running import Answer, Case, of_device
from tools.upstream.stand_ins import gelu_and_mul, silu_and_mul

MOE = "sglang.srt.layers.moe"
#: Modules that are the wheel's own files, unmodified.
SERVED = tuple(f"{MOE}.{name}" for name in ("topk", "fused_moe_triton.triton_kernels_moe", "moe_runner.triton_kernels"))


class _Answers(dict[str, Any]):
    """Functions that give these values, and False for every other name that is imported."""

    def __init__(self, **values: Any) -> None:
        def answering(name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return lambda *_, **__: values.get(name, False)

        super().__init__(__getattr__=answering)


def _by_two(function: Any) -> Any:
    """SGLang passes the input first."""
    return lambda input, output: function(output, input)


class _Base:
    def __init__(self, config: Any) -> None:
        self.config = config


STAND_INS: dict[str, imports.Names] = {
    "sglang.srt.configs.shared_experts": {"SharedExpertsConfig": type("SharedExpertsConfig", (), {})},
    "sglang.srt.environ": {"envs": mock.MagicMock()},
    "sglang.srt.runtime_context": _Answers(get_platform=types.SimpleNamespace(is_sm120=False)),
    # The vectorised kernels of a CUDA build are called with the names below.
    "sglang.srt.utils": _Answers(get_compiler_backend="eager"),
    "sgl_kernel": {"silu_and_mul": _by_two(silu_and_mul), "gelu_and_mul": _by_two(gelu_and_mul)},
    f"{MOE}.moe_runner.base": {
        **dict.fromkeys(("MoeQuantInfo", "RunnerInput", "RunnerOutput"), object),
        "MoeRunnerCore": _Base,
        **{f"register_{when}_permute": lambda *_: lambda function: function for when in ("pre", "post")},
    },
}


def _file(name: str) -> Any:
    return importlib.import_module(f"{MOE}.{name}")


def routed(layer: Problem, device: str, dtype: torch.dtype) -> tuple[Problem, torch.Tensor]:
    """The layer with ids and weights of logits, and these; SGLang's top-k of this format routes itself."""
    logits = torch.randn(len(layer.x), E, generator=torch.Generator().manual_seed(1)).to(dtype)
    scores, ids = logits.float().topk(TOPK, dim=-1)
    layer = layer._replace(ids=ids.to(torch.int32).numpy(), weights=scores.softmax(-1).numpy())
    return layer, logits.to(device)


def _weights(layer: Problem, device: str) -> tuple[Any, Any, Any, Any, Any]:
    """Tokens, w1 `[E, K, N]`, w2 `[E, F, K]`, and the precision of each."""
    given = tensors(layer, device)
    if given.scales[0] is None:
        return given.x, given.w1.mT, given.w2.mT, None, None
    matmul, tensor = (importlib.import_module(f"triton_kernels.{name}") for name in ("matmul", "tensor"))
    codes = [tensor.wrap_torch_tensor(one.mT, dtype=tensor.FP4) for one in (given.w1, given.w2)]
    scales = [tensor.wrap_torch_tensor(one.mT) for one in given.scales if one is not None]
    return given.x, *codes, *(matmul.PrecisionConfig(b_mx_scale=one, b_microblock_size=32) for one in scales)


@of_device
def _forward(
    device: str, problem: Callable[[], Problem], activation: str, biased: bool, on_input: bool = False
) -> Answer:
    """`triton_kernel_moe_forward`, or with biases its twin; the caller adds up a token's rows."""
    layer, logits = routed(problem(), device, torch.bfloat16)
    topk, experts = _file("topk"), _file("fused_moe_triton.triton_kernels_moe")
    chosen = topk.TritonKernelTopKOutput(*topk.routing(logits, TOPK))
    x, w1, w2, *precisions = _weights(layer, device)
    config = types.SimpleNamespace(activation=activation, gemm1_alpha=1.702, gemm1_clamp_limit=7.0)
    if biased:
        given = tensors(layer, device)
        arguments = (x, w1, precisions[0], given.b1, w2, precisions[1], given.b2, chosen, config)
        rows = experts.triton_kernel_moe_with_bias_forward(*arguments)
    else:
        rows = experts.triton_kernel_moe_forward(x, w1, w2, chosen, config, on_input)
    layer = layer if biased else layer.without_biases()
    # It rounds the first product, and each weighted row.
    expected = layer.rounded("swigluoai" if biased else activation, before=not biased)
    actual = rows.view(len(x), TOPK, -1).float().sum(1).to(torch.bfloat16)
    return Answer(actual, expected, SAME_ROUNDINGS[actual.device.type])


@of_device
def _runner(device: str, problem: Callable[[], Problem], biased: bool) -> Answer:
    """`TritonKernelsRunnerCore`, which calls either function and adds up the rows."""
    layer, logits = routed(problem(), device, torch.bfloat16)
    runner, routing = _file("moe_runner.triton_kernels"), _file("topk").routing
    x, w1, w2, *precisions = _weights(layer, device)
    given = tensors(layer, device)
    biases = (given.b1, given.b2) if biased else (None, None)
    options = {"gemm1_alpha": 1.702, "gemm1_clamp_limit": 7.0, "apply_router_weight_on_input": False}
    config = types.SimpleNamespace(is_gated=True, no_combine=False, activation="silu", **options)
    core = runner.TritonKernelsRunnerCore(config)
    input = runner.TritonKernelsRunnerInput(x, *routing(logits, TOPK))
    info = runner.TritonKernelsQuantInfo(w1, w2, *biases, *precisions)
    actual = core.run(input, info, {}).hidden_states
    layer = layer if biased else layer.without_biases()
    expected = layer.rounded("swigluoai" if biased else "silu", before=not biased)
    return Answer(actual, expected, SAME_ROUNDINGS[actual.device.type])


def cases() -> list[Case]:
    found = {
        "triton_kernel_moe_forward, bf16, silu": _forward(draw, "silu", False),
        "triton_kernel_moe_forward, bf16, gelu": _forward(draw, "gelu", False),
        "triton_kernel_moe_with_bias_forward, bf16": _forward(draw, "silu", True),
        "triton_kernel_moe_with_bias_forward, mxfp4": _forward(draw_mxfp4, "silu", True),
        "TritonKernelsRunnerCore, bf16": _runner(draw, False),
        "TritonKernelsRunnerCore, bf16, biases": _runner(draw, True),
        "TritonKernelsRunnerCore, mxfp4, biases": _runner(draw_mxfp4, True),
    }
    return [Case(name, dict, run, generation="3.8") for name, run in found.items()]
