"""Which tile configuration a product gets: the caller's, one for every batch, a measured one, or the heuristics'."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from moe_core.specs import MatmulTuning
from moe_core.target import Target
from moe_core.tile_table import shipped_table
from moe_core.tuning import (
    HOPPER_BLOCK_M,
    HOPPER_TALL_BLOCK_M,
    MatmulProblem,
    TileConfig,
    batch_invariant_config,
    choose_config,
    require_legal,
)

_DEFAULTS = MatmulTuning()
_GIVEN, _MEASURED = "given for this call", "measured: "


@dataclass(frozen=True)
class TileChoice:
    """A configuration, and where it comes from, for `explain`."""

    config: TileConfig
    source: str


def choose_tile(
    problem: MatmulProblem, target: Target, tuning: MatmulTuning | None = None, name: str = "tuning.config"
) -> TileChoice:
    """The first of: tuning.config; under batch_invariant the one that ignores rows; the entry of tuning.table; the
    entry of the shipped table; the heuristics'. Nothing is timed.

    A table has no entry for a problem where what it holds is of the hopper family, which cannot run the problem.
    name: the override's, for messages. Raises InvalidInput with the reason where an override or an entry is illegal on
    the target.
    """
    tuning = tuning or _DEFAULTS
    if tuning.config is not None:
        # Not left aside where it cannot run: whoever names a configuration wants it, or to know why not.
        fix = "give another, or None for one that is chosen"
        return TileChoice(require_legal(tuning.config, problem, target, name, fix), _GIVEN)
    if tuning.batch_invariant:
        config = require_legal(batch_invariant_config(problem, target), problem, target)
        return TileChoice(config, "batch invariant: the same for every number of rows")
    if target.kind == "cuda":
        tables = (("tuning.table", tuning.table), ("the shipped table", shipped_table(target.arch)))
        for origin, table in tables:
            config = None if table is None else table.find(problem, target.arch)
            if config is not None:
                require_legal(config, problem, target, f"the entry of {origin}", "measure again with moebius-tune")
                return TileChoice(config, f"{_MEASURED}{origin}")
    config = require_legal(choose_config(problem, target), problem, target)
    return TileChoice(config, f"heuristics: {_arithmetic(problem, config, target)}")


def without_tall_blocks(
    choice: TileChoice, problem: MatmulProblem, target: Target, *, given: bool = False
) -> TileChoice:
    """The choice for a product that stores its pre-activation, which the kernel of tall blocks does not; results are
    the same, to the bit. What a table holds was measured with tall blocks: the heuristics choose instead. A
    configuration given for the call stays, and is refused later, unless `given`."""
    config = choice.config
    if config.family != "hopper" or config.block_m != HOPPER_TALL_BLOCK_M or (choice.source == _GIVEN and not given):
        return choice
    if choice.source.startswith(_MEASURED):
        config = choose_config(problem, target)
        choice = TileChoice(config, f"heuristics: {_arithmetic(problem, config, target)}")
        return without_tall_blocks(choice, problem, target)
    note = f"{choice.source}; {HOPPER_BLOCK_M} rows where the pre-activation is stored"
    return TileChoice(dataclasses.replace(config, block_m=HOPPER_BLOCK_M), note)


def _arithmetic(problem: MatmulProblem, config: TileConfig, target: Target) -> str:
    """What the heuristics go by."""
    rows = f"{problem.rows_per_group:.1f} rows per expert"
    if target.kind != "cuda":
        return rows
    return f"{rows}, {problem.waves(config, target.num_sms):.1f} waves, {problem.weight_bytes / 1e6:.1f} MB of weights"
