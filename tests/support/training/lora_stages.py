"""Options of layers that run in stages, with adapters."""

from __future__ import annotations

from typing import Any

from moe_core.layers.around import LatentSpec
from moe_core.specs.norm import NormSpec
from moe_core.specs.routing import TokenRounding

#: Of a layer with 2 choices. Each runs router, route and experts one by one.
STAGES: dict[str, dict[str, Any]] = {
    "capacity": {"capacity_factor": 0.75},
    "router norm": {"router_norm": NormSpec()},
    "expert scale": {"expert_scale": True},
    "latent": {"latent": LatentSpec(32, NormSpec())},
    "sparse mixer": {"sparse_mixer": 0.1},
    "token rounding": {"token_rounding": TokenRounding(16, "up")},
}
