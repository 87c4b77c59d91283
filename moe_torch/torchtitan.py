"""The exchange of MoE layers of torchtitan 0.3.0: a dispatcher for its experts. See docs/user/migration.md."""
# pyright: reportMissingImports=false

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from moe_core.errors import Unsupported
from moe_torch.parallel import Arrived, ExchangeSpec, ExpertParallel, Placement, combine, dispatch

try:
    from torchtitan.config import derive, override
    from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher, LocalTokenDispatcher
except ModuleNotFoundError as error:
    raise Unsupported(
        f"moe_torch.torchtitan needs torchtitan, and {error.name} is not installed; pip install torchtitan"
    ) from error

__all__ = ["TokenDispatcher", "exchange"]


@dataclass(frozen=True)
class _Sent:
    """order int64 `[N]`: arrived rows by expert."""

    arrived: Arrived
    order: torch.Tensor


class TokenDispatcher(AllToAllTokenDispatcher):
    """Moves a token once to each rank and adds up results in fp32, in the order of their choice, with one cast.

    Experts see the rows of all ranks in the order of tokens, so bits do not depend on the number of ranks. Scores
    multiply results before these travel.

    Config: as of its parent, and rows, `tokens` or `slots` of `ExchangeSpec`.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(AllToAllTokenDispatcher.Config):
        rows: str = "tokens"

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.spec = ExchangeSpec(rows=config.rows)

    def dispatch(
        self,
        x_TD: torch.Tensor,
        topk_scores_TK: torch.Tensor,
        topk_expert_ids_TK: torch.Tensor,
        num_local_tokens_per_expert_E: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, Any]:
        mesh, routing = self.ep_mesh, (topk_scores_TK, topk_expert_ids_TK)
        if mesh is None:
            return LocalTokenDispatcher.dispatch(self, x_TD, *routing, num_local_tokens_per_expert_E)
        placement = Placement.linear(self.num_experts, mesh.size())
        parallel = ExpertParallel(mesh, self.spec)
        arrived = dispatch(x_TD, *reversed(routing), parallel=parallel, placement=placement).wait()
        places = arrived.ids.view(-1)
        order = torch.where(places < 0, placement.per_rank, places).argsort(stable=True)[: arrived.rows_of_slots]
        counts = torch.bincount(places[order], minlength=placement.per_rank)
        return arrived.rows.index_select(0, order), counts, _Sent(arrived, order)

    def combine(self, routed_output_RD: torch.Tensor, metadata: Any, x_TD: torch.Tensor) -> torch.Tensor:
        if not isinstance(metadata, _Sent):
            return LocalTokenDispatcher.combine(self, routed_output_RD, metadata, x_TD)
        arrived, order = metadata.arrived, metadata.order
        scored = (routed_output_RD.float() * arrived.weights.index_select(0, order)).to(arrived.rows.dtype)
        rows = scored.new_zeros(arrived.rows.shape).index_copy(0, order, scored)
        return combine(rows, arrived).wait()


@override(target=AllToAllTokenDispatcher.Config, exact=True, description="Moebius' exchange, in the order of tokens")
def exchange(config: Any, *, rows: str = "tokens") -> Any:
    """Replace torchtitan's all-to-all. rows: see `TokenDispatcher`."""
    return derive(config, TokenDispatcher.Config, rows=rows)
