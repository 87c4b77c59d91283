"""Which configurations are worth timing: the heuristics' own, and those that the able families name."""

from __future__ import annotations

import itertools

from moe_core.ops.matmul.families import families_for, why_illegal
from moe_core.ops.matmul.problem import MatmulProblem
from moe_core.ops.matmul.tile_choice import heuristic_tile
from moe_core.specs.tile import TileConfig


def candidates(problem: MatmulProblem, limit: int) -> tuple[TileConfig, ...]:
    """At most `limit` legal configurations: the heuristics' own, then those of the families by turns."""
    able = [family for family in families_for(problem) if family.why_not(problem) is None]
    legal = [
        dict.fromkeys(config for config in family.candidates(problem) if why_illegal(config, problem) is None)
        for family in able
    ]
    turns = itertools.chain.from_iterable(itertools.zip_longest(*legal))
    found = dict.fromkeys((heuristic_tile(problem).config, *turns))
    return tuple(config for config in found if config is not None)[:limit]
