"""Parts of a layer around its experts: projections, and norms and scales of results."""

from __future__ import annotations

from typing import Any

import torch

from moe_core.specs.matmul import MatmulSpec
from moe_core.specs.operands import MatmulOperands
from moe_torch import ops
from moe_torch.layers.parameters import ParameterGroup, at_least_float32, autocast


class ProjectionParameters(ParameterGroup):
    """`rows = before(x)`, `after(rows)`: weight `[L, D]` or `[D, L]` (`out_in`), then a norm `[L]`, if any."""

    NAMES = ("weight", "norm")
    weight: torch.Tensor
    norm: torch.Tensor | None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        spec = self.spec
        product = MatmulSpec(spec.weight_layout, allow_tf32=spec.allow_tf32, tuning=spec.matmul_tuning())
        rows = ops.matmul_ogs(MatmulOperands(autocast(x), autocast(self.weight, "weight")), None, product)
        latent = self.layer_spec.latent
        if self.norm is None or latent is None or latent.norm is None:
            return rows
        return ops.rms_norm(rows, self.norm, latent.norm)


class OutputParameters(ParameterGroup):
    """`y = output(rows)`: norm `[D]`, a constant scale and bias `[D]` of rows `[T, D]`."""

    NAMES = ("norm", "bias")
    norm: torch.Tensor | None
    bias: torch.Tensor | None

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        spec: Any = self.layer_spec.output
        if self.norm is not None and not spec.of_experts:
            rows = ops.rms_norm(rows, self.norm, spec.norm)
        if spec.scale != 1:
            rows = rows * spec.scale
        return rows if self.bias is None else added(rows, self.bias)


def added(rows: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Add bias `[D]` to rows `[T, D]` in fp32, with one cast. Its gradient has the router's order of sums."""
    bias = at_least_float32(bias)
    zeros = bias.new_zeros(rows.shape[0], 1), bias.new_zeros(1, bias.shape[0])
    return (at_least_float32(rows) + ops.router(*zeros, bias=bias)).to(rows.dtype)
