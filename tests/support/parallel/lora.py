"""Adapters of problems on several ranks."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from moe_core.base.dtypes import numpy_dtype
from moe_core.parallel import Placement
from moe_core.parallel.operands import held_columns
from moe_core.specs.operands import LoRAFactors, named_fields
from tests.support.parallel.ways import require_same

FACTORS = ("a1", "b1", "a2", "b2")


def draw_lora(
    problem: Any, *, shared: bool = False, dtype: str = "float32", ranks: tuple[int, ...] = (3, 0, 16)
) -> tuple[LoRAFactors, np.ndarray]:
    """Factors of all experts, and ids of all tokens: every slot, an empty one, and ids that are none."""
    random, experts, slots = np.random.default_rng(7), problem.placement.num_experts, len(ranks)
    in_out, d = problem.spec.weight_layout == "in_out", problem.x.shape[1]
    f = problem.experts.down.shape[1 if in_out else 2]
    width = problem.experts.gate_up.shape[2 if in_out else 1] * (1 if problem.experts.up is None else 2)
    sides = {"a1": (d, 16), "b1": (16, width), "a2": (f, 16), "b2": (16, d)}
    kind, axis = numpy_dtype(dtype), 1 if shared else experts
    arrays: Any = {name: random.standard_normal((slots, axis, *side)).astype(kind) for name, side in sides.items()}
    by_expert = np.array(ranks, np.int32)[:, None].repeat(experts, 1)
    by_expert[0, 0] = 0  # a rank of one expert
    scale = random.random((slots, experts), np.float32) + 0.5
    return LoRAFactors(**arrays, scale=scale, ranks=by_expert), random.integers(
        -2, slots + 1, len(problem.x), dtype=np.int32
    )


def of_rank(lora: LoRAFactors, placement: Placement, rank: int, held: int) -> LoRAFactors:
    columns = list(held_columns(placement, rank, held))
    own = {name: one[:, columns] for name, one in named_fields(lora) if name in FACTORS and one.shape[1] > 1}
    return dataclasses.replace(lora, **own)


def require_factors(parts: list[dict[str, Any]], alone: dict[str, Any], placement: Placement, label: str) -> None:
    """Gradients of experts' factors have one device's bits, those of shared ones are sums over ranks."""
    for name in FACTORS:
        name = f"d_lora.{name}"
        whole = alone[name]
        if whole.shape[1] == 1 < placement.num_experts:
            total = sum(part[name].astype(np.float32) for part in parts)
            slack = (1e-5 if whole.dtype == np.float32 else 3e-2) * (1 + np.abs(whole.astype(np.float32)).max())
            np.testing.assert_allclose(total, whole.astype(np.float32), 0, slack, err_msg=f"{name}, {label}")
            continue
        for rank, part in enumerate(parts):
            columns = [expert for expert in placement.owners[rank] if expert >= 0]
            require_same(part[name][:, : len(columns)], whole[:, columns], f"{name}, {label}")
