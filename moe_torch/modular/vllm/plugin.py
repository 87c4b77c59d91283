"""The entry point of vLLM's plugins."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

from moe_torch.modular.triton_experts import BatchedTritonExperts, TritonExperts
from moe_torch.modular.vllm.adapted import adapt

#: In vLLM's setting VLLM_PLUGINS.
NAME = "moebius"
_BOTH = {"TRITON": TritonExperts, "BATCHED_TRITON": BatchedTritonExperts}
#: By vLLM's module that chooses experts: backends with weights as in a checkpoint.
OFFERED: dict[str, dict[str, type]] = {
    "unquantized": _BOTH,
    "fp8": _BOTH,
    "int8": {"TRITON": TritonExperts},
    "mxfp8": {"TRITON_MXFP8": TritonExperts},
}


def register() -> None:
    """`offer`, if vLLM's setting VLLM_PLUGINS names `moebius`. An installed library alone changes nothing."""
    from vllm import envs  # pyright: ignore[reportAttributeAccessIssue, reportMissingImports]

    if NAME in (envs.VLLM_PLUGINS or ()):
        offer()


def offer() -> None:
    """Put our experts first in vLLM's backends `triton` and `batched_triton`, once in a process."""
    for name, backends in OFFERED.items():
        oracle: Any = importlib.import_module(f"vllm.model_executor.layers.fused_moe.oracle.{name}")
        function = "_mxfp8_backend_to_kernel_cls" if name == "mxfp8" else "backend_to_kernel_cls"
        if not hasattr(getattr(oracle, function), "offered"):
            setattr(oracle, function, _offering(getattr(oracle, function), backends))


def _offering(original: Callable[[Any], list[Any]], backends: dict[str, type]) -> Callable[[Any], list[Any]]:
    @functools.wraps(original)
    def backend_to_kernel_cls(backend: Any) -> list[Any]:
        classes = original(backend)
        ours = backends.get(backend.name)
        return classes if ours is None else [adapt(ours), *classes]

    backend_to_kernel_cls.offered = backends  # type: ignore[attr-defined]
    return backend_to_kernel_cls
