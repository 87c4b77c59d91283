"""The interface of a kernel family."""

from __future__ import annotations

import abc
from collections.abc import Iterable

from moe_core.ops.matmul.problem import MatmulProblem
from moe_core.plan import PlanBuilder
from moe_core.specs import TileConfig


class Family(abc.ABC):
    """Kernels for products of one kind of operands. Subclasses are stateless singletons.

    Attributes:
        name: as in `TileConfig.family`. Families of different kinds of weights may share it.
        weights: PLAIN, QUANTISED or PREPACKED of `moe_core.ops.matmul.problem`.
        counts_tiles: blocks take tiles from the counters `tile_counters`, int32 `[2]`, initially zero.
        stores_rows: stores whole tiles to neighbouring rows, so a forward's last product scatters by row.
        finds_maxima: see `plan_product`.
        adds_tail: runs products with a `MatmulProblem.tail`.
        shares_launches: see `moe_core.ops.moe.fuse`.
    """

    name: str
    weights: str
    counts_tiles = False
    stores_rows = False
    finds_maxima = False
    adds_tail = False
    shares_launches = False

    @abc.abstractmethod
    def why_not(self, problem: MatmulProblem) -> str | None:
        """The reason why no tile of the family can run a product, or None."""

    def why_not_chosen(self, problem: MatmulProblem) -> str | None:
        """The reason (measured, or batch_invariant) to prefer a later family of `FAMILIES`, or None."""
        return None

    @abc.abstractmethod
    def tile(self, problem: MatmulProblem) -> TileConfig:
        """The heuristic tile. problem.batch_invariant ignores rows."""

    @abc.abstractmethod
    def why_illegal(self, config: TileConfig, problem: MatmulProblem) -> str | None:
        """The reason why a tile is illegal for a product that the family can run, or None."""

    @abc.abstractmethod
    def launch(self, builder: PlanBuilder, problem: MatmulProblem, config: TileConfig, stage: int | None) -> None:
        """Add the launch that computes problem.outputs, and its line of sums. stage: see `plan_matmul_ogs`."""

    def storing(self, config: TileConfig, problem: MatmulProblem) -> TileConfig:
        """The configuration with the same bits that stores all of problem.outputs."""
        return config

    def orders_rows(self, problem: MatmulProblem, config: TileConfig) -> bool:
        """True if a forward first writes the rows of product 1 in layout order, so that it need not gather."""
        return False

    def why_not_out_format(self, problem: MatmulProblem) -> str | None:
        """The reason why it cannot quantise y, or None."""
        return "only the sm90 family's fp8 kernel quantises what it stores"

    def candidates(self, problem: MatmulProblem) -> Iterable[TileConfig]:
        """Tiles for `moebius-tune` to time, most promising first. Some may be illegal."""
        return (self.tile(problem),)
