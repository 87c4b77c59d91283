"""What the tests of the triton_kernels interface share: sizes, an activation, numbers, tolerances."""

from __future__ import annotations

from typing import Any

import torch

from moe_core.parity.tolerance import stage_tolerances
from moe_core.specs import Activation, MoESpec, RouterSpec
from moe_torch.compat.triton_kernels import matmul_ogs as ours
from moe_torch.compat.triton_kernels import swiglu

#: Tokens, experts of each, experts, input and output columns.
T, TOPK, E, D, N = 9, 2, 6, 24, 16
ALPHA, LIMIT = 1.5, 0.75
SWIGLU = ours.FusedActivation(ours.FnSpecs("swiglu", swiglu.swiglu_fn, ("alpha", "limit")), (ALPHA, LIMIT), 2)
ACTIVATION = Activation("swiglu_oai", gate_layout="interleaved", alpha=ALPHA, limit=LIMIT)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + 100 * len(shape)))


def tolerances(dtype: str, d: int, f: int, top_k: int, experts: int) -> dict[str, Any]:
    """Of two forwards from the same logits, stage by stage."""
    spec = MoESpec(ACTIVATION, RouterSpec(top_k))
    sizes = {"d_model": d, "d_ff": f, "top_k": top_k, "num_experts": experts}
    return stage_tolerances(spec, dtype, **sizes, routed_from="logits")


def foreign_function(*_: Any) -> None:
    """A function that our kernels do not have."""
