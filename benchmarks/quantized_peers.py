"""Upstream triton_kernels with quantised experts, the peer of benchmarks.quantized: it has two of the schemes, too.

mxfp4 with bf16 rows: our codes and scales in the layouts that upstream makes for Hopper, scales for kernels of 4 warps
up to 512 tokens and of 8 above (so does upstream's own benchmark of an MLP).

fp8 with a scale per matrix and one for all rows: upstream's scales of rows are given, not found. Both are 1 here, which
rows with an rms of about 1 and the clamped swiglu (at most 56) fit; x is cast to e4m3 within what is timed, and product
1 writes e4m3 itself. Upstream sums as `fast_accumulate` does. Ours finds its scales from the rows in `torch_us`, and
takes the same given ones in `static_scales_us`.

Both fuse gather and activation and route from logits, as upstream's bf16 forward does (`peers.upstream_forward`), and
are checked against fp32 arithmetic with the dequantised weights before they are timed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from benchmarks.peers import UPSTREAM_ACTIVATION, Peer, UpstreamOperands, upstream_forward
from benchmarks.problem import Problem
from moe_core.formats import QuantizedTensor, Scheme
from moe_core.specs.operands import ExpertWeights

NAME = "triton_kernels"
#: Up to so many tokens upstream's scales are laid out for kernels of 4 warps, above for 8.
_FEW_TOKENS = 512


def mxfp4_values(matrix: QuantizedTensor) -> Any:
    """Codes `[E, N, K / 2]` as upstream takes them for this GPU: a tensor `[E, K, N]` of its own."""
    from triton_kernels.tensor import FP4, convert_layout, wrap_torch_tensor  # pyright: ignore[reportMissingImports]
    from triton_kernels.tensor_details.layout import make_default_matmul_mxfp4_w_layout  # pyright: ignore[reportMissingImports]

    layout, options = make_default_matmul_mxfp4_w_layout(mx_axis=1)
    return convert_layout(wrap_torch_tensor(matrix.values.mT, dtype=FP4), layout, **options)


def mxfp4_scales(matrix: QuantizedTensor, warps: int) -> Any:
    """e8m0 scales `[E, N, K / 32]` as upstream takes them for this GPU and kernels of so many warps.

    There is one expert more, of zeros: where K is no multiple of 128 upstream's last step reads past a row of scales,
    which past the last row is memory of others. Its bytes meet codes of zero, but 0xff would make these not a number.
    """
    from triton_kernels.tensor import convert_layout, wrap_torch_tensor  # pyright: ignore[reportMissingImports]
    from triton_kernels.tensor_details.layout import make_default_matmul_mxfp4_w_scale_layout  # pyright: ignore[reportMissingImports]

    layout, options = make_default_matmul_mxfp4_w_scale_layout(mx_axis=1, num_warps=warps)
    scales = torch.nn.functional.pad(matrix.scales, (0, 0, 0, 0, 0, 1))
    return convert_layout(wrap_torch_tensor(scales.mT), layout, **options)


class Mxfp4Forward:
    """`Peer.build` with mxfp4 weights in the published layout; their codes are laid out once for all its problems."""

    def __init__(self, experts: ExpertWeights) -> None:
        self._experts = experts
        self._values: tuple[Any, Any] | None = None

    def __call__(self, problem: Problem) -> Callable[[], torch.Tensor]:
        from triton_kernels.matmul_ogs import PrecisionConfig  # pyright: ignore[reportMissingImports]

        matrices = self._experts.gate_up, self._experts.down
        if self._values is None:
            self._values = mxfp4_values(matrices[0]), mxfp4_values(matrices[1])
        warps = 4 if problem.tokens <= _FEW_TOKENS else 8
        precisions = [PrecisionConfig(weight_scale=mxfp4_scales(matrix, warps)) for matrix in matrices]
        return upstream_forward(problem, UpstreamOperands(*self._values, *precisions))


def fp8_operands(experts: ExpertWeights, dtype: torch.dtype) -> UpstreamOperands:
    """What upstream takes of e4m3 weights with a scale per expert's matrix; nothing is copied. dtype: of the output."""
    from triton_kernels.matmul_ogs import FlexCtx, PrecisionConfig  # pyright: ignore[reportMissingImports]
    from triton_kernels.numerics import InFlexData, OutFlexData  # pyright: ignore[reportMissingImports]

    gate_up, down, fp8 = experts.gate_up, experts.down, torch.float8_e4m3fn
    one = torch.ones(1, device=down.scales.device)
    rows, hidden = InFlexData(fp8, one), OutFlexData(fp8, expected_scale=one)
    first, second = (InFlexData(fp8, matrix.scales.reshape(-1)) for matrix in (gate_up, down))
    return UpstreamOperands(
        gate_up.values.mT,
        down.values.mT,
        PrecisionConfig(flex_ctx=FlexCtx(rows, first, hidden), out_dtype=fp8),
        PrecisionConfig(flex_ctx=FlexCtx(rows, second), out_dtype=dtype),
        rows=lambda x: x.to(fp8),
    )


def fp8_forward(experts: ExpertWeights) -> Callable[[Problem], Callable[[], torch.Tensor]]:
    """`Peer.build` with e4m3 weights and a scale per expert's matrix."""
    return lambda problem: upstream_forward(problem, fp8_operands(experts, problem.x.dtype))


_FORWARDS: dict[str, Callable[[ExpertWeights], Callable[[Problem], Callable[[], torch.Tensor]]]] = {
    "mxfp4_w4a16": Mxfp4Forward,
    "fp8_tensor": fp8_forward,
}


def why_not_upstream(scheme: Scheme) -> str | None:
    """Why upstream has no products of a scheme, or None where it has."""
    if scheme.name in _FORWARDS:
        return None
    return f"upstream (tag v3.5.1) has no products of {scheme.weights.name} weights, only of mxfp4 and fp8_tensor"


def upstream_peer(
    scheme: Scheme, experts: ExpertWeights, tolerance: float, tokens: tuple[int, ...] | None = None
) -> Peer:
    """Upstream with these experts, in their published layout, of a scheme that it has.

    tolerance: the largest relative error; tokens: those it is timed at, None = all.
    """
    build = _FORWARDS[scheme.name](experts)
    return Peer(NAME, build, tokens=tokens, activation=UPSTREAM_ACTIVATION, tolerance=tolerance, by_turns=True)
