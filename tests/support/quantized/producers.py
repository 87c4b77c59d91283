"""Quantisers' packages, installed without what they require, and matrices that their code makes.

What a package imports and a matrix does not need is stood in for: an absent package is empty, and a package in `bare`
does not run its `__init__.py`. Every file that is imported below them is the producer's, unchanged.
"""

from __future__ import annotations

import contextlib
import copy
import importlib.machinery
import os
import re
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="quantisers compute in torch")

GROUP = 32
#: Imported by name, used by none of the cases.
_NAMES: dict[str, Any] = {"DEBUG_ON": False, "DEVICE_THREAD_POOL": None, "__version__": "0"}


class _Nothing(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return cls

    def __call__(cls, *_: Any, **__: Any) -> Any:
        return cls


class _Absent(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Nothing(name, (), {})


@contextlib.contextmanager
def standing_in(*absent: str, bare: tuple[str, ...] = (), **others: Any) -> Iterator[None]:
    """absent: modules. bare: packages, outer ones first. others: modules by name."""
    made: dict[str, Any] = dict(others)
    for name in absent:
        made[name] = _Absent(name)
        made[name].__path__, made[name].__spec__ = [], importlib.machinery.ModuleSpec(name, None)
    for name in bare:
        head, _, last = name.rpartition(".")
        roots = made[head].__path__ if head else sys.path
        made[name] = ModuleType(name)
        made[name].__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        made[name].__path__ = [path for root in roots if os.path.isdir(path := os.path.join(root, last))]
        vars(made[name]).update(_NAMES)
        if head:
            setattr(made[head], last, made[name])
    before = {name: sys.modules.get(name) for name in made}
    sys.modules.update(made)
    try:
        yield
    finally:
        for name, module in before.items():
            # Files that were imported keep their bare packages.
            if module is not None:
                sys.modules[name] = module
            elif name not in bare:
                del sys.modules[name]


def linear(rng: Any, rows: int, columns: int, dtype: Any = torch.float16) -> Any:
    layer = torch.nn.Linear(columns, rows, bias=False).to(dtype)
    layer.weight.data = torch.from_numpy(rng.normal(size=(rows, columns))).to(dtype)
    return layer


def arrays(tensors: dict[str, Any], numbers: Any) -> dict[str, Any]:
    """Tensors by suffix, and under `` what the producer makes of them."""
    return {name: tensor.detach().contiguous() for name, tensor in tensors.items()} | {"": numbers.detach()}


def scales_of(weight: Any) -> Any:
    return weight.unflatten(-1, (-1, GROUP)).abs().amax(-1) / 7


def autoawq(rng: Any, rows: int, columns: int) -> dict[str, Any]:
    with standing_in(bare=("awq", "awq.modules", "awq.modules.linear", "awq.utils")):
        from awq.modules.linear.gemm import WQLinear_GEMM  # type: ignore[import-not-found]
        from awq.utils.packing_utils import dequantize_gemm  # type: ignore[import-not-found]
    layer = linear(rng, rows, columns)
    scales = scales_of(layer.weight.data)
    points = torch.from_numpy(rng.integers(6, 10, scales.shape)).to(scales.dtype)
    made = WQLinear_GEMM.from_linear(layer, 4, GROUP, scales=scales.T.contiguous(), zeros=points.T.contiguous())
    numbers = dequantize_gemm(made.qweight, made.qzeros, made.scales, 4, GROUP).T
    return arrays({f".{name}": tensor for name, tensor in made.state_dict().items()}, numbers)


def gptqmodel(rng: Any, rows: int, columns: int, act_order: bool = False, version: int = 1) -> dict[str, Any]:
    bare = ("gptqmodel", "gptqmodel.nn_modules", "gptqmodel.models")
    pcre: Any = _Absent("pcre")
    vars(pcre).update({name: getattr(re, name) for name in re.__all__} | {"Flag": re.RegexFlag})
    with standing_in("logbar", "device_smi", "tokenicer", "defuser", bare=bare, pcre=pcre):
        from gptqmodel.nn_modules.qlinear.torch import TorchLinear  # type: ignore[import-not-found]
        from gptqmodel.utils import model  # type: ignore[import-not-found]
    layer = linear(rng, rows, columns, torch.float32)
    group = torch.arange(columns) // GROUP
    group = torch.from_numpy(rng.permutation(group.numpy())) if act_order else group
    scales = scales_of(layer.weight.data)
    points = torch.from_numpy(rng.integers(6, 10, scales.shape)).float()
    options = {"bits": 4, "group_size": GROUP, "desc_act": act_order, "sym": False, "bias": False}
    made = TorchLinear(**options, in_features=columns, out_features=rows, register_buffers=True)
    made.pack_original(layer, scales, points, group)
    stored = copy.deepcopy(made)
    if version == 1:
        model.convert_gptq_v2_to_v1_format_module(stored, made)
    tensors = {f".{name}": tensor.clone() for name, tensor in stored.state_dict().items()}
    tensors[".g_idx"] = tensors[".g_idx"].int()
    made.post_init()
    return arrays(tensors, made.dequantize_weight().T)


def hqq(rng: Any, rows: int, columns: int) -> dict[str, Any]:
    with standing_in(bare=("hqq", "hqq.core")):
        from hqq.core.quantize import BaseQuantizeConfig, HQQLinear  # type: ignore[import-not-found]
    config = BaseQuantizeConfig(nbits=4, group_size=64, axis=1)
    made = HQQLinear(linear(rng, rows, columns), config, compute_dtype=torch.float16, device="cpu")
    return arrays({f".{name}": tensor for name, tensor in made.state_dict().items()}, made.dequantize())


def bitsandbytes(rng: Any, rows: int, columns: int, kind: str = "nf4", nested: bool = False) -> dict[str, Any]:
    from bitsandbytes import functional  # type: ignore[import-not-found]

    weight = linear(rng, rows, columns, torch.bfloat16).weight.data
    codes, state = functional.quantize_4bit(weight, quant_type=kind, blocksize=64, compress_statistics=nested)
    tensors = {f".weight.{name}": tensor for name, tensor in state.as_dict(packed=True).items()}
    return arrays(tensors | {".weight": codes}, functional.dequantize_4bit(codes, state))


def bitsandbytes_int8(rng: Any, rows: int, columns: int) -> dict[str, Any]:
    from bitsandbytes import functional  # type: ignore[import-not-found]

    codes, scales, _ = functional.int8_vectorwise_quant(linear(rng, rows, columns).weight.data)
    return arrays({".weight": codes, ".SCB": scales}, functional.int8_vectorwise_dequant(codes, scales))


def torchao(rng: Any, rows: int, columns: int, kind: str = "Int8") -> dict[str, Any]:
    import torchao.quantization as quantization  # type: ignore[import-not-found]
    from torchao.prototype.safetensors.safetensors_support import (  # type: ignore[import-not-found]
        flatten_tensor_state_dict,
    )

    layer = torch.nn.ModuleDict({"at": linear(rng, rows, columns, torch.bfloat16)})
    quantization.quantize_(layer, getattr(quantization, f"{kind}WeightOnlyConfig")(version=2))
    tensors, described = flatten_tensor_state_dict(layer.state_dict())
    assert f'"_type": "{kind}Tensor"' in described["at.weight"]
    weight: Any = layer["at"].weight
    return arrays({name.removeprefix("at"): tensor for name, tensor in tensors.items()}, weight.dequantize())


def modelopt(rng: Any, rows: int, columns: int) -> dict[str, Any]:
    root = "modelopt.torch.quantization"
    with standing_in(
        "omegaconf",
        bare=("modelopt", "modelopt.torch", "modelopt.torch.opt", root, f"{root}.qtensor", f"{root}.backends"),
    ):
        from modelopt.torch.quantization.qtensor.nvfp4_tensor import NVFP4QTensor  # type: ignore[import-not-found]
    made, scales, whole = NVFP4QTensor.quantize(linear(rng, rows, columns, torch.bfloat16).weight.data, 16)
    numbers = made.dequantize(dtype=torch.float32, scale=scales, double_scale=whole, block_sizes={-1: 16})
    tensors = {".weight": made._quantized_data, ".weight_scale": scales, ".weight_scale_2": whole.float()}
    return arrays(tensors | {".input_scale": torch.tensor(0.01)}, numbers)


@contextlib.contextmanager
def llmcompressor() -> Iterator[Any]:
    """The package, whose data sets are absent: calls without data need none."""
    with standing_in("datasets", "datasets.formatting", "datasets.formatting.formatting"):
        import llmcompressor as package  # type: ignore[import-not-found]

        yield package


def to_numpy(tensor: Any) -> np.ndarray:
    import ml_dtypes

    others = {torch.bfloat16: ml_dtypes.bfloat16, torch.float8_e4m3fn: ml_dtypes.float8_e4m3fn}
    if tensor.dtype not in others:
        return tensor.numpy()
    return (
        tensor.view(torch.int16 if tensor.dtype == torch.bfloat16 else torch.uint8).numpy().view(others[tensor.dtype])
    )
