"""Our modules for Hugging Face transformers, which otherwise downloads `triton_kernels` from its hub."""

from __future__ import annotations

import importlib
from types import ModuleType, TracebackType
from typing import Any

import torch

from moe_core.base.arrays import ALIGNMENT
from moe_core.errors import Unsupported
from moe_torch.compat.installed import paths
from moe_torch.modular.routing_data import GatherIndx, RoutingData, ScatterIndx, sorted_by_expert

_KERNEL = "kernels-community/gpt-oss-triton-kernels"
_BEFORE_LOADING = "_process_model_before_weight_loading"
_MODULES = ("integrations.hub_kernels", "integrations.mxfp4", "quantizers.quantizer_mxfp4")


class Served:
    """The result of `serve_transformers`, to leave as a context or `undo`. package: of Triton 3.5's interface."""

    def __init__(self, package: ModuleType) -> None:
        self.package = package
        self._before: list[tuple[Any, str, Any]] = []

    def __enter__(self) -> ModuleType:
        return self.package

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.undo()

    def undo(self) -> None:
        """Models that were loaded run on."""
        while self._before:
            setattr(*self._before.pop())

    def replace(self, owner: Any, name: str, value: Any) -> None:
        """Set an attribute until `undo`."""
        self._before.append((owner, name, getattr(owner, name)))
        setattr(owner, name, value)


def serve_transformers() -> Served:
    """Run transformers' mxfp4 integration on our ops, without its hub, a GPU or the package `kernels`.

    Covers gpt-oss models that are quantised while they load, or were saved quantised. `Mxfp4Config(dequantize=True)`
    stays transformers'. On a CPU, models stay quantised without `use_kernels`. Raises Unsupported if transformers lacks
    the integration.
    """
    for path in paths("3.5").values():
        importlib.import_module(path)
    served = Served(importlib.import_module("moe_torch.compat.triton_kernels"))
    try:
        hub, mxfp4, quantizer = (importlib.import_module(f"transformers.{name}") for name in _MODULES)
        kind = quantizer.Mxfp4HfQuantizer
        download, route, quantize = hub.get_kernel, mxfp4.routing_from_top_k, mxfp4.quantize_to_mxfp4
        load, swizzle = getattr(kind, _BEFORE_LOADING), mxfp4.swizzle_mxfp4
    except (ImportError, AttributeError) as error:
        raise Unsupported(f"transformers has no mxfp4 integration that can be served ({error}); update it") from error

    def get_kernel(kernel_name: str, *arguments: Any, **named: Any) -> ModuleType:
        return served.package if kernel_name == _KERNEL else download(kernel_name, *arguments, **named)

    def routing_from_top_k(ids: torch.Tensor, weights: torch.Tensor, num_experts: int) -> Any:
        return (_routed if ids.device.type == "cpu" else route)(ids, weights, num_experts)

    def quantize_to_mxfp4(w: torch.Tensor, triton_kernels_hub: Any) -> Any:
        # transformers passes a checkpoint's `[E, K, N]` transposed, so that groups would run along N.
        return quantize(w if w.stride(-1) == 1 else w.mT, triton_kernels_hub)

    def swizzle_mxfp4(w: torch.Tensor, w_scale: torch.Tensor, triton_kernels_hub: Any) -> Any:
        # On a CPU these may be a mapped file's memory, which starts anywhere.
        w, w_scale = (one.clone() if one.data_ptr() % ALIGNMENT else one for one in (w, w_scale))
        return swizzle(w, w_scale, triton_kernels_hub)

    def before_loading(self: Any, model: Any, use_kernels: bool = False, **named: Any) -> Any:
        # transformers would dequantise on a CPU, where its hub's kernels replace whole layers.
        return load(self, model, use_kernels=use_kernels or not torch.accelerator.is_available(), **named)

    served.replace(hub, "get_kernel", get_kernel)
    for function in (routing_from_top_k, quantize_to_mxfp4, swizzle_mxfp4):
        served.replace(mxfp4, function.__name__, function)
    served.replace(kind, _BEFORE_LOADING, before_loading)
    for name in ("is_kernels_available", "is_triton_available"):
        served.replace(quantizer, name, lambda *_: True)
    return served


def _routed(ids: torch.Tensor, weights: torch.Tensor, num_experts: int) -> tuple[RoutingData, GatherIndx, ScatterIndx]:
    """transformers counts with torch.histc, which takes no integers on a CPU."""
    ids, order = ids.to(torch.int32).sort(dim=1)
    return sorted_by_expert(ids, weights.gather(1, order).float(), num_experts, absent=0.0)
