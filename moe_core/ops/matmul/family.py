"""What a kernel family is: why it cannot run a product, its own tile, why another tile is illegal, and its launch."""

from __future__ import annotations

import abc
from collections.abc import Iterable

from moe_core.ops.matmul.problem import MatmulProblem
from moe_core.plan.builder import PlanBuilder
from moe_core.specs.tile import TileConfig


class Family(abc.ABC):
    """Kernels that compute products of one kind of operands. Subclasses have no state: one instance is the family.

    name: the one in `TileConfig.family`; families of different weights may share it.
    weights: PLAIN, QUANTISED or PREPACKED of `moe_core.ops.matmul.problem`.
    counts_tiles: its blocks take tiles from a counter, the int32 `[2]` buffer `tile_counters`, zeros before.
    stores_rows: it stores whole tiles to neighbouring rows, so that the last product of a forward scatters by row.
    finds_maxima: its launch can find the largest magnitudes of y too (`MatmulProblem.finds_maxima`).
    shares_launches: few tokens' forwards have kernels made of its tiles (`moe_core.ops.moe.fuse`).
    """

    name: str
    weights: str
    counts_tiles = False
    stores_rows = False
    finds_maxima = False
    shares_launches = False

    @abc.abstractmethod
    def why_not(self, problem: MatmulProblem) -> str | None:
        """The reason it cannot run a product of its kind of weights, whatever the tile; None if it can."""

    def why_not_chosen(self, problem: MatmulProblem) -> str | None:
        """The reason a later family of `FAMILIES` is chosen for a product it can run: what was measured, or
        batch_invariant; None where it is the best."""
        return None

    @abc.abstractmethod
    def tile(self, problem: MatmulProblem) -> TileConfig:
        """Its own choice for a product it can run: arithmetic on sizes, formats, dtype and architecture. Under
        problem.batch_invariant the rows are not looked at."""

    @abc.abstractmethod
    def why_illegal(self, config: TileConfig, problem: MatmulProblem) -> str | None:
        """The reason a configuration of the family is wrong for a product it can run; None if it is legal."""

    @abc.abstractmethod
    def launch(self, builder: PlanBuilder, problem: MatmulProblem, config: TileConfig, stage: int | None) -> None:
        """Add the launch that computes problem.outputs, and its line of sums. Buffers by the names of
        `plan_matmul_ogs`; stage: as there, None on its own."""

    def storing(self, config: TileConfig, problem: MatmulProblem) -> TileConfig:
        """The configuration that computes the same bits and stores all of problem.outputs; mostly `config` itself."""
        return config

    def why_not_out_format(self, problem: MatmulProblem) -> str | None:
        """The reason y cannot be quantised to problem.out_format in its launch; None if it can."""
        return "only the sm90 family's fp8 kernel quantises what it stores"

    def candidates(self, problem: MatmulProblem) -> Iterable[TileConfig]:
        """What `moebius-tune` times, most promising first; illegal ones are left out afterwards."""
        return (self.tile(problem),)
