"""Requests about tiles."""

from __future__ import annotations

from dataclasses import dataclass

from moe_core.base import INT32_LIMIT, plan_type
from moe_core.base.checks import require_flag, require_kind, set_integer
from moe_core.errors import InvalidInput
from moe_core.specs.tile import TileConfig
from moe_core.specs.tile_table import TileTable


def _require_tunable(tuning: MatmulTuning | Tuning) -> None:
    require_kind("table", tuning.table, TileTable, optional=True)
    require_flag("batch_invariant", tuning.batch_invariant)
    for name in ("expected_tokens", "expected_experts"):
        if getattr(tuning, name) is not None:
            set_integer(tuning, name, 1, INT32_LIMIT)
    if tuning.expected_experts is not None and tuning.expected_tokens is None:
        raise InvalidInput(
            f"expected_experts must be None without expected_tokens, got {tuning.expected_experts}; give both"
        )
    if tuning.batch_invariant and tuning.table is not None:
        raise InvalidInput(
            "table must be None with batch_invariant, which takes one configuration for every number of rows, got a "
            "TileTable; leave it out, or give the configurations themselves"
        )


@plan_type
@dataclass(frozen=True)
class MatmulTuning:
    """How the tile configuration of one grouped matmul is chosen.

    Args:
        config: use this one. None: choose.
        table: looked up before the shipped table and the heuristics.
        expected_tokens, expected_experts, batch_invariant: see `Tuning`.
    """

    config: TileConfig | None = None
    table: TileTable | None = None
    batch_invariant: bool = False
    expected_tokens: int | None = None
    expected_experts: int | None = None

    def __post_init__(self) -> None:
        require_kind("config", self.config, TileConfig, optional=True)
        _require_tunable(self)


@plan_type
@dataclass(frozen=True)
class Tuning:
    """How the tile configurations of a whole forward are chosen.

    Args:
        batch_invariant: one summation order for every number of tokens. A token's result is then bitwise the same in
            any batch, at a cost of speed (docs/developer/tuning.md).
        expected_tokens, expected_experts: choose every tile of forward and backward as for a batch of this size and
            with these experts. None: the call's. For parts of a batch, as of a rank of expert parallelism, which then
            sum in the order of the whole.
    """

    matmul_1: TileConfig | None = None
    matmul_2: TileConfig | None = None
    table: TileTable | None = None
    batch_invariant: bool = False
    expected_tokens: int | None = None
    expected_experts: int | None = None

    def __post_init__(self) -> None:
        require_kind("matmul_1", self.matmul_1, TileConfig, optional=True)
        require_kind("matmul_2", self.matmul_2, TileConfig, optional=True)
        _require_tunable(self)

    def of_product(self, number: int | None = None) -> MatmulTuning:
        """Of the experts' product 1 or 2. None: of the shared expert's."""
        config = {1: self.matmul_1, 2: self.matmul_2, None: None}[number]
        return MatmulTuning(config, self.table, self.batch_invariant, self.expected_tokens, self.expected_experts)


def tunings_of(tuning: Tuning | None) -> tuple[MatmulTuning | None, MatmulTuning | None]:
    return (None, None) if tuning is None else (tuning.of_product(1), tuning.of_product(2))
