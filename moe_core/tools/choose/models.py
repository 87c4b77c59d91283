"""Models that people run, and GPUs."""

from __future__ import annotations

import dataclasses
import functools
import math
from dataclasses import dataclass

from moe_core.base import dtypes
from moe_core.base.checks import require_choice
from moe_core.errors import Unsupported
from moe_core.formats import Scheme, format_named
from moe_core.layers import HUGGING_FACE, ExpertsSpec, MoELayerSpec, SharedExpertsSpec
from moe_core.parallel.machine import H200, Machine

#: As `moebius-convert --format` names them, from wide to narrow.
FORMATS = ("bf16", "fp8_tensor", "fp8_block", "int4_g128", "mxfp4")
GIB, GB = 1 << 30, 10**9


@dataclass(frozen=True)
class Model:
    """shape: its name in benchmarks/shapes.py and in records. layers: with experts. billions: parameters of the whole
    model, by its card. native: the format that it is published in."""

    name: str
    shape: str
    layers: int
    layer: MoELayerSpec
    billions: float
    native: str = "bf16"

    def expert_bytes(self, format: str) -> int:
        """Of all layers' experts. Raises Unsupported or InvalidInput if the format does not fit the layer."""
        return self.layers * _bytes(self._stored(format), "experts.")

    @property
    def dense_bytes(self) -> int:
        """Of everything else in bf16: attention, embeddings, routers, shared experts."""
        routed = self.layers * _bytes(self._stored("bf16"), "experts.")
        return max(0, round(2 * GB * self.billions) - routed)

    def _stored(self, format: str) -> MoELayerSpec:
        scheme = None if format == "bf16" else Scheme(format, format_named(format))
        experts = dataclasses.replace(self.layer.experts, scheme=scheme)
        return dataclasses.replace(self.layer, experts=experts)


@functools.lru_cache(maxsize=256)
def _bytes(layer: MoELayerSpec, prefix: str) -> int:
    parameters = [one for one in layer.parameters(layer.storage(HUGGING_FACE)) if one.name.startswith(prefix)]
    return sum(math.prod(one.shape) * dtypes.itemsize(one.dtype or "bfloat16") for one in parameters)


def _model(
    name: str, shape: str, layers: int, sizes: tuple[int, int, int, int], billions: float, *, shared: int = 0,
    bias: bool = False, native: str = "bf16",
) -> Model:  # fmt: skip
    D, F, E, K = sizes
    dense = SharedExpertsSpec(shared) if shared else None
    layer = MoELayerSpec(D, F, E, K, experts=ExpertsSpec(bias=bias), shared_experts=dense)
    return Model(name, shape, layers, layer, billions, native)


MODELS = {
    model.name: model
    for model in (
        _model("olmoe-7b", "olmoe", 16, (2048, 1024, 64, 8), 6.92),
        _model("gpt-oss-20b", "gptoss20b", 24, (2880, 2880, 32, 4), 20.91, bias=True, native="mxfp4"),
        _model("qwen3-30b-a3b", "qwen3", 48, (2048, 768, 128, 8), 30.53),
        _model("phi-3.5-moe", "phimoe", 32, (4096, 6400, 16, 2), 41.87),
        _model("mixtral-8x7b", "mixtral", 32, (4096, 14336, 8, 2), 46.70),
        _model("qwen3-next-80b-a3b", "qwen3next", 48, (2048, 512, 512, 10), 80.0, shared=512),
        _model("glm-4.5-air", "glm45air", 45, (4096, 1408, 128, 8), 106.85, shared=1408),
        _model("gpt-oss-120b", "gptoss120b", 36, (2880, 2880, 128, 4), 116.83, bias=True, native="mxfp4"),
        _model("qwen3-235b-a22b", "qwen3-235b", 94, (4096, 1536, 128, 8), 235.09),
        _model("deepseek-v3", "dsv3", 58, (7168, 2048, 256, 8), 671.03, shared=2048, native="fp8_block"),
    )
}


@dataclass(frozen=True)
class Gpu:
    """gigabytes: of memory. machine: sustained speeds. predicted: True if none of its times is measured."""

    name: str
    gigabytes: int
    machine: Machine
    predicted: bool


def _like_h200(tflops: float, memory: float, nvlink: float) -> Machine:
    """A machine that keeps the share of its data sheet that the H200 keeps (989 TFLOP/s, 4800 and 900 GB/s)."""
    links = {kind: dataclasses.replace(one, bandwidth=one.bandwidth * nvlink / 900) for kind, one in H200.measured}
    return dataclasses.replace(
        H200, tflops=H200.tflops * tflops / 989, memory=H200.memory * memory / 4800,
        nvlink=dataclasses.replace(H200.nvlink, bandwidth=H200.nvlink.bandwidth * nvlink / 900),
        measured=tuple(links.items()),
    )  # fmt: skip


#: Data sheets: SXM boards. H100 differs from H200 by its memory.
GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("h200", 141, H200, False),
        Gpu("h100", 80, _like_h200(989, 3350, 900), False),
        Gpu("a100", 80, _like_h200(312, 2039, 600), True),
    )
}
_PEERS = {
    **dict.fromkeys(("b200", "b300", "gb200", "gb300"), "SonicMoE trains and FlashInfer serves on Blackwell"),
    **dict.fromkeys(("mi300x", "mi325x", "mi350x", "mi355x"), "AITER and triton_kernels run on AMD GPUs"),
    "tpu": "tokamax runs on TPUs",
}


def model_named(name: str) -> Model:
    require_choice("model", name.lower(), tuple(MODELS))
    return MODELS[name.lower()]


def gpu_named(name: str) -> Gpu:
    """Raises Unsupported for GPUs that the kernels are not tuned for, with peers that are."""
    name = name.lower()
    if name in _PEERS:
        raise Unsupported(
            f"gpu must be one of {', '.join(GPUS)}, which kernels are tuned for, got {name!r}; {_PEERS[name]}"
        )
    require_choice("gpu", name, tuple(GPUS))
    return GPUS[name]
