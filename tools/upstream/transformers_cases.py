"""transformers' mxfp4 integration of gpt-oss on our modules of Triton 3.5, by `compat.serve_transformers`.

transformers is the wheel's, whole. A checkpoint in bf16 is quantised while it loads, saved, and read back.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import pathlib
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

import moe_torch
from moe_torch import compat
from moe_torch.compat.triton_kernels.numerics_details.mxfp import downcast_to_mxfp, upcast_from_mxfp
from tools.upstream.problems import TOPK, E, F, K, Problem, complaint, draw, tensors
from tools.upstream.running import Answer, Case, of_device

_PROJECTIONS = ("gate_up_proj", "down_proj")


def _named(name: str) -> Any:
    return getattr(importlib.import_module("transformers"), name)


def _config() -> Any:
    sizes = {"hidden_size": K, "intermediate_size": F, "num_local_experts": E, "num_experts_per_tok": TOPK}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    return _named("GptOssConfig")(**sizes, **heads, num_hidden_layers=1, vocab_size=128)


class Models:
    """A model in bf16 with the experts of a problem, and where it is saved."""

    def __init__(self, folder: pathlib.Path, device: str) -> None:
        torch.manual_seed(0)
        self.problem, self.folder, self.device = draw(missing=False), folder, device
        self.given = tensors(self.problem, device)
        self.plain = _named("GptOssForCausalLM")(_config()).to(device, torch.bfloat16).eval()
        experts = self.plain.model.layers[0].mlp.experts
        arrays = dict(zip(_PROJECTIONS, ((self.given.w1, self.given.b1), (self.given.w2, self.given.b2)), strict=True))
        for name, (weight, bias) in arrays.items():
            getattr(experts, name).data.copy_(weight.mT)
            getattr(experts, f"{name}_bias").data.copy_(bias)
        self.plain.save_pretrained(folder / "plain")
        self.quantized = self.load("plain", quantized=True)

    def load(self, name: str, quantized: bool = False, **options: Any) -> Any:
        config = {"quantization_config": _named("Mxfp4Config")(**options)} if quantized or options else {}
        model = _named("AutoModelForCausalLM").from_pretrained(
            self.folder / name, dtype=torch.bfloat16, device_map=self.device, **config
        )
        return model.eval()

    def dequantized(self) -> Problem:
        """The problem with the weights that its mxfp4 stands for."""
        pairs = (downcast_to_mxfp(weight, torch.uint8, -1) for weight in (self.given.w1, self.given.w2))
        w1, w2 = (upcast_from_mxfp(*pair, torch.float32, -1).cpu().numpy() for pair in pairs)
        return self.problem._replace(w1=w1, w2=w2)

    def logits(self, model: Any) -> torch.Tensor:
        return model(torch.arange(24, device=self.device)[None]).logits


def _values(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().float().cpu().numpy()


def _experts(model: Any) -> Any:
    return model.model.layers[0].mlp.experts


def _quantised_on_load(models: Models) -> Iterator[Answer]:
    """Codes and scales are those of `moe_torch.quantize`."""
    for name, weight in zip(_PROJECTIONS, (models.given.w1, models.given.w2), strict=True):
        held, config = getattr(_experts(models.quantized), name), _experts(models.quantized)
        expected = moe_torch.quantize(weight, moe_torch.format_named("mxfp4_ceil"))
        yield Answer(held.data.mT, _values(expected.values), bound=0.0)
        scales = getattr(config, f"{name}_precision_config").weight_scale
        yield Answer(scales.data.mT, _values(expected.scales), bound=0.0)


def _mlp(models: Models) -> Iterator[Answer]:
    """The block routes with `routing`, against the reference on dequantised weights."""
    mlp = models.quantized.model.layers[0].mlp
    assert type(mlp).__name__ == "Mxfp4GptOssMLP"
    x = models.given.x
    output, logits = mlp(x[None])
    scores, ids = logits.float().topk(TOPK, dim=-1)
    problem = models.dequantized()._replace(ids=ids.int().cpu().numpy(), weights=_values(scores.softmax(-1)))
    yield Answer(output[0], problem.expected("swigluoai"))


def _forward(models: Models) -> Iterator[Answer]:
    """`forward` with ids of other ranks, which lie outside of this one's and are skipped."""
    ids = models.given.ids.long().clone()
    ids[::3, 0], ids[1::3, 1] = E, -1
    output = _experts(models.quantized)(models.given.x, ids, models.given.weights)
    local = torch.where(ids < E, ids, -1).int().cpu().numpy()
    yield Answer(output, models.dequantized()._replace(ids=local).expected("swigluoai"))


def _saved(models: Models) -> Iterator[Answer]:
    """A quantised model that is saved and loaded again has the same bits."""
    models.quantized.save_pretrained(models.folder / "saved")
    again = models.load("saved")
    assert type(_experts(again)).__name__ == "Mxfp4GptOssExperts"
    yield Answer(models.logits(again), _values(models.logits(models.quantized)), bound=0.0)


def _dequantised(models: Models) -> Iterator[Answer]:
    """`Mxfp4Config(dequantize=True)`: transformers' own numbers are ours, and its model agrees."""
    models.quantized.save_pretrained(models.folder / "kept")
    model, problem = models.load("kept", dequantize=True), models.dequantized()
    for name, weight in zip(_PROJECTIONS, (problem.w1, problem.w2), strict=True):
        yield Answer(getattr(_experts(model), name), weight.swapaxes(1, 2), bound=0.0)
    yield Answer(models.logits(models.quantized), _values(models.logits(model)))


CASES: dict[str, Callable[[Models], Iterator[Answer]]] = {
    "Mxfp4Quantize, codes and scales": _quantised_on_load,
    "Mxfp4GptOssMLP": _mlp,
    "Mxfp4GptOssExperts.forward, ids of other ranks": _forward,
    "Mxfp4ReverseDeserialize, Mxfp4Deserialize, saved and loaded": _saved,
    "Mxfp4Dequantize": _dequantised,
}


@contextlib.contextmanager
def served(device: str) -> Iterator[Models]:
    """Models with the hub forbidden."""
    assert os.environ.get("HF_HUB_OFFLINE") == "1", "no hub may be asked"
    with compat.serve_transformers(), tempfile.TemporaryDirectory() as folder:
        yield Models(pathlib.Path(folder), device)


@of_device
def _case(device: str, check: Callable[[Models], Iterator[Answer]]) -> Answer:
    with served(device) as models:
        *others, last = check(models)
        for answer in others:
            wrong = complaint(answer.actual, answer.expected, answer.bound)
            assert wrong is None, wrong
        return last


def cases() -> list[Case]:
    return [Case(name, dict, _case(check), generation=None) for name, check in CASES.items()]
