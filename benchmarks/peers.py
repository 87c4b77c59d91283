"""Peers timed in the same run: upstream triton_kernels, and one cuBLAS product of equal FLOPs as the bound."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from benchmarks.shapes import Shape


def upstream_forward(
    shape: Shape, x: torch.Tensor, weights: dict[str, torch.Tensor | None], logits: torch.Tensor
) -> Callable[[], torch.Tensor]:
    """Upstream triton_kernels' forward from logits, with its fused swiglu whatever the activation (equal work).

    Raises ImportError where it is not on PYTHONPATH: a recorded run needs it.
    """
    from triton_kernels.matmul_ogs import FnSpecs, FusedActivation, PrecisionConfig, matmul_ogs  # pyright: ignore[reportMissingImports]
    from triton_kernels.routing import routing  # pyright: ignore[reportMissingImports]
    from triton_kernels.swiglu import swiglu_fn  # pyright: ignore[reportMissingImports]

    fused = FusedActivation(FnSpecs("swiglu", swiglu_fn, ("alpha", "limit")), (1.702, 7.0), 2)
    gate_up, down = weights["gate_up"], weights["down"]
    gate_up_bias, down_bias = weights["gate_up_bias"], weights["down_bias"]

    def forward() -> torch.Tensor:
        data, gather, scatter = routing(logits, shape.top_k, sm_first=False)
        hidden: Any = matmul_ogs(
            x,
            gate_up,
            gate_up_bias,
            data,
            gather_indx=gather,
            precision_config=PrecisionConfig(),
            fused_activation=fused,
        )
        return matmul_ogs(
            hidden,
            down,
            down_bias,
            data,
            scatter_indx=scatter,
            precision_config=PrecisionConfig(),
            gammas=data.gate_scal,
        )

    return forward


def dense_forward(shape: Shape, tokens: int) -> Callable[[], torch.Tensor]:
    """Two cuBLAS products over T * K rows: the FLOPs of the layer without its routing."""
    rows = tokens * shape.top_k
    random = {"dtype": torch.bfloat16, "device": "cuda"}
    x = torch.randn(rows, shape.d_model, **random)
    first = torch.randn(shape.d_model, 2 * shape.d_ff, **random)
    hidden, second = torch.randn(rows, shape.d_ff, **random), torch.randn(shape.d_ff, shape.d_model, **random)

    def forward() -> torch.Tensor:
        torch.matmul(x, first)
        return torch.matmul(hidden, second)

    return forward
