"""TensorRT-LLM's experts on `triton_kernels`, with its routing of ranks, on our modules of Triton 3.5."""

from __future__ import annotations

import importlib
import types
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import torch

from moe_core.formats import FP8_TENSOR
from tools.upstream import imports
from tools.upstream.problems import BOUND, SAME_ROUNDINGS, TOPK, E, M, Problem, draw, draw_mxfp4, tensors
from tools.upstream.running import Answer, Case, of_device

_MODULE = "tensorrt_llm._torch.modules.fused_moe.fused_moe_triton"
#: Modules that are TensorRT-LLM's own files, unmodified.
SERVED = (_MODULE,)
#: Of rows in e4m3, before each product.
_SCALES = (0.01, 0.02)
_OAI = {"alpha": 1.702, "beta": 1.0, "limit": 7.0}
STAND_INS: dict[str, imports.Names] = {
    "tensorrt_llm._torch.model_config": {"ModelConfig": type("ModelConfig", (), {})},
    f"{_MODULE.rpartition('.')[0]}.quantization": {"FusedMoEMethodBase": type("FusedMoEMethodBase", (), {})},
}


def _interleaved(layer: Problem) -> Problem:
    """Columns of gate and up by turns, as TensorRT-LLM's loader writes them."""

    def mixed(array: np.ndarray) -> np.ndarray:
        return np.stack(np.split(array, 2, axis=1), 2).reshape(array.shape)

    return layer._replace(w1=mixed(layer.w1), b1=mixed(layer.b1))


def _weights(layer: Problem, device: str) -> dict[str, Any]:
    given = tensors(layer, device)
    if given.scales[0] is None:
        return {"w3_w1_weight": given.w1.mT, "w2_weight": given.w2.mT}
    if given.w1.dtype == torch.float8_e4m3fn:
        scales = dict(
            zip(
                ("fc31_dequant", "fc2_dequant"),
                (one.reshape(-1) for one in given.scales if one is not None),
                strict=True,
            )
        )
        return {"w3_w1_weight": given.w1.mT, "w2_weight": given.w2.mT, **scales}
    found = {}
    # It asks for the GPU's name, and frees the memory that it is given.
    with mock.patch.object(torch.cuda, "get_device_name", lambda *_: "a GPU"):
        for names, codes, scales in zip(
            (("w3_w1_weight", "fc31_dequant"), ("w2_weight", "fc2_dequant")),
            (given.w1, given.w2),
            given.scales,
            strict=True,
        ):
            assert scales is not None
            swizzled = importlib.import_module(_MODULE).swizzle_weight_and_scale(codes.mT.contiguous(), scales.mT)
            found |= dict(zip(names, swizzled, strict=True))
    return found


def _quantize(x: torch.Tensor, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return (x.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn), scale


def _operators() -> None:
    """TensorRT-LLM's operator that quantises with a given scale, once in a process."""
    if not hasattr(torch.ops.tensorrt_llm, "static_quantize_e4m3_per_tensor"):
        name = "tensorrt_llm::static_quantize_e4m3_per_tensor"
        made = torch.library.custom_op(
            name,
            lambda x, scale: (_quantize(x, scale)[0], scale.clone()),
            mutates_args=(),
            schema="(Tensor x, Tensor scale) -> (Tensor, Tensor)",
        )
        assert made is not None


@of_device
def _ranks(
    device: str, problem: Callable[[], Problem], method: str, ranks: int, oai: bool = True, fp8: bool = False
) -> Answer:
    """`apply` on every rank against the reference of its experts. oai: gpt-oss's activation, else silu. fp8: rows in
    e4m3 with static scales."""
    layer = problem()
    logits = torch.randn(M, E, generator=torch.Generator().manual_seed(1))
    scores, ids = logits.topk(TOPK, dim=-1)
    layer = layer._replace(ids=ids.int().numpy(), weights=scores.softmax(-1).numpy())
    file, outputs, expected = importlib.import_module(_MODULE), [], []
    for rank in range(ranks):
        part = layer.on_rank(ranks, rank, adjacent=True)
        held = part if oai else _interleaved(part)
        given = tensors(held, device)
        module = types.SimpleNamespace(
            **_weights(held, device),
            **{"w3_w1_bias": given.b1, "w2_bias": given.b2, "bias": True, "dtype": torch.bfloat16},
            **{"ep_size": ranks, "ep_rank": rank, "hidden_size": layer.x.shape[1]},
            **{f"swiglu_{name}": value if oai else None for name, value in _OAI.items()},
            routing_method=types.SimpleNamespace(experts_per_token=TOPK),
        )
        options = (torch.float8_e4m3fn if fp8 else torch.bfloat16,) if "MXFP4" in method else ()
        if fp8:
            _operators()
            for name, scale in zip(("fc31_input_dequant", "fc2_input_dequant"), _SCALES, strict=True):
                setattr(module, name, torch.tensor(scale, device=device))
        outputs.append(getattr(file, method)(*options).apply(module, given.x, logits.to(device)))
        # Without gpt-oss's constants it computes each step of the activation in bf16.
        scales = _SCALES if fp8 else None
        expected.append(part.rounded("swigluoai", scales=scales) if oai else part.expected("silu"))
    actual = torch.cat(outputs)
    return Answer(actual, np.concatenate(expected), SAME_ROUNDINGS[actual.device.type] if oai else BOUND)


def cases() -> list[Case]:
    bf16, mxfp4 = "TritonUnquantizedFusedMoEMethod", "TritonMXFP4FusedMoEMethod"
    found = {}
    for ranks in (1, 2, 3):
        found[f"{bf16}, {ranks} ranks"] = _ranks(draw, bf16, ranks)
        found[f"{mxfp4}, {ranks} ranks"] = _ranks(lambda: draw_mxfp4(hidden=128, width=128), mxfp4, ranks)
    fp8 = "TritonFP8QDQFusedMoEMethod"
    found[f"{mxfp4}, e4m3 rows, 2 ranks"] = _ranks(lambda: draw_mxfp4(hidden=128, width=128), mxfp4, 2, fp8=True)
    found[f"{fp8}, 2 ranks"] = _ranks(lambda: draw(FP8_TENSOR), fp8, 2, fp8=True)
    found[f"{bf16}, silu, 2 ranks"] = _ranks(draw, bf16, 2, oai=False)
    return [Case(name, dict, run, generation="3.5") for name, run in found.items()]
