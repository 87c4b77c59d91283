"""Choice of a product's tile."""

from __future__ import annotations

import dataclasses
import enum
from dataclasses import dataclass

from moe_core.errors import InvalidInput, Unsupported
from moe_core.ops.matmul.families import families_for, family_of, why_illegal, why_not
from moe_core.ops.matmul.family import Family
from moe_core.ops.matmul.problem import PLAIN, MatmulProblem
from moe_core.ops.matmul.sm90.plan import why_not_operands
from moe_core.specs import MatmulTuning, TileConfig
from moe_core.specs.tile_table import TileKey, shipped_table


class TileSource(enum.Enum):
    GIVEN = "given for this call"
    BATCH_INVARIANT = "batch invariant: the same for every number of rows"
    MEASURED = "measured"
    HEURISTICS = "heuristics"


@dataclass(frozen=True)
class TileChoice:
    """detail: its table, or the inputs of the heuristics. stored: see `Family.storing`."""

    family: Family
    config: TileConfig
    source: TileSource
    detail: str = ""
    stored: bool = False

    def __str__(self) -> str:
        text = f"{self.source.value}: {self.detail}" if self.detail else self.source.value
        return f"{text}; {self.config.block_m} rows where the pre-activation is stored" if self.stored else text


def choose_tile(problem: MatmulProblem, name: str = "tuning.config") -> TileChoice | None:
    """The first of: tuning.config, under batch_invariant the tile that ignores rows, the entry of tuning.table or of
    the shipped table, the heuristic tile. None on a target without tiles. Tables cover plain weights. An sm90 entry is
    ignored if that family cannot run the problem. name: the override's, for messages. Raises InvalidInput if an
    override or entry is illegal, and Unsupported if no family can run the product."""
    tuning = problem.tuning
    if tuning.config is not None:
        override = given_tile(problem, tuning.config, name)
        # A backward recomputes only the pre-activation, which the forward's configuration may not store.
        return _storing(override, problem) if override is not None and problem.outputs == ("pre",) else override
    if not problem.target.compiled:
        return None
    measured = None if tuning.batch_invariant else _measured(problem, tuning)
    return _dividing(heuristic_tile(problem) if measured is None else measured, problem)


def _dividing(choice: TileChoice, problem: MatmulProblem) -> TileChoice:
    """The choice, or the tallest legal tile that divides the multiple of each expert's rows."""
    limit, height = None if problem.layout is None else problem.layout.limit, choice.config.block_m
    if limit is None or limit.multiple % height == 0 or problem.batch_invariant:
        return choice
    for block_m in (128, 64, 32, 16):
        if block_m < height and limit.multiple % block_m == 0:
            config = dataclasses.replace(choice.config, block_m=block_m)
            if choice.family.why_illegal(config, problem) is None:
                detail = f"{choice.detail}; {block_m} rows, which divide {limit.multiple}"
                return dataclasses.replace(choice, config=config, detail=detail)
    return choice


def heuristic_tile(problem: MatmulProblem) -> TileChoice:
    """Raises Unsupported if no family can run the product."""
    family = next(family for family in _able(problem) if family.why_not_chosen(problem) is None)
    config = _require_legal(family.tile(problem), problem, "config", "choose another")
    choice = TileChoice(family, config, TileSource.HEURISTICS, _arithmetic(problem, config))
    if problem.batch_invariant:
        choice = TileChoice(family, config, TileSource.BATCH_INVARIANT)
    return _storing(choice, problem)


def given_tile(problem: MatmulProblem, config: TileConfig, name: str = "config") -> TileChoice | None:
    """The caller's legal configuration, None without tiles. Raises InvalidInput with the reason."""
    if not problem.target.compiled and problem.weights != PLAIN:
        return None
    _able(problem)
    _require_legal(config, problem, name, "give another, or None for one that is chosen")
    if not problem.target.compiled:
        return None
    return TileChoice(family_of(config, problem), config, TileSource.GIVEN)


def tile_key(problem: MatmulProblem) -> TileKey:
    sizes, operands = (problem.rows, problem.expected_groups, problem.d, problem.n), (problem.dtype, problem.buffers)
    return TileKey(*sizes, *operands, problem.spec.weight_layout, why_not_operands(problem) or "")


def _able(problem: MatmulProblem) -> list[Family]:
    reasons = {family: why_not(family, problem) for family in families_for(problem)}
    able = [family for family, reason in reasons.items() if reason is None]
    if not able:
        reason = list(reasons.values())[-1]
        raise Unsupported(f"quantised operands need a kernel for {problem.target}, and there is none: {reason}")
    return able


def _measured(problem: MatmulProblem, tuning: MatmulTuning) -> TileChoice | None:
    target = problem.target
    if problem.weights != PLAIN or not target.on_gpu:
        return None
    key = tile_key(problem)
    for origin, table in (("tuning.table", tuning.table), ("the shipped table", shipped_table(target.arch))):
        config = None if table is None else table.find(key, target.arch)
        if config is not None and (problem.tail is None or why_illegal(config, problem) is None):
            _require_legal(config, problem, f"the entry of {origin}", "measure again with moebius-tune")
            family = family_of(config, problem)
            # An entry that does not store the outputs was measured for others.
            stores = family.storing(config, problem) == config
            return TileChoice(family, config, TileSource.MEASURED, origin) if stores else None
    return None


def _storing(choice: TileChoice, problem: MatmulProblem) -> TileChoice:
    config = choice.family.storing(choice.config, problem)
    return choice if config == choice.config else dataclasses.replace(choice, config=config, stored=True)


def _arithmetic(problem: MatmulProblem, config: TileConfig) -> str:
    rows = f"{problem.rows_per_group:.1f} rows per expert"
    if problem.weights != PLAIN:
        return f"{rows}, {problem.operands.weight.format} weights"
    if not problem.target.on_gpu:
        return rows
    return f"{rows}, {problem.waves(config):.1f} waves, {problem.weight_bytes / 1e6:.1f} MB of weights"


def _require_legal(config: TileConfig, problem: MatmulProblem, name: str, fix: str) -> TileConfig:
    if (reason := why_illegal(config, problem)) is not None:
        raise InvalidInput(f"{name} must be legal on {problem.target}, got {config}: {reason}; {fix}")
    return config
