"""Which configurations are worth timing: the heuristics' own, for any number of rows, and the legal ones around it."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping

from moe_core.target import Target
from moe_core.tuning import MatmulProblem, TileConfig, choose_config, hopper_config, why_illegal

#: Values to try, in order, of every field of a portable configuration; a step is to a value's neighbour.
CHOICES: Mapping[str, tuple[int, ...]] = {
    "block_m": (16, 32, 64, 128),
    "block_n": (32, 64, 128, 256),
    "block_k": (32, 64, 128, 256),
    "num_warps": (4, 8),
    "num_stages": (2, 3, 4, 5, 6, 7),
    "group_m": (1, 4, 8, 16),
}
#: All of the hopper family's tiles but the height is fixed: what is left to choose, in order.
HOPPER_CHOICES: Mapping[str, tuple[int, ...]] = {"num_stages": (3, 4, 2), "group_m": (4, 8, 2), "block_m": (128, 192)}
#: Numbers of rows at which the heuristics are asked for further starting points.
_ROWS = tuple(4**exponent for exponent in range(11))


def candidates(problem: MatmulProblem, target: Target, limit: int) -> tuple[TileConfig, ...]:
    """At most `limit` legal configurations: the heuristics' own, then the hopper family's and the portable ones by
    turns. The portable ones are the heuristics' for this and for other numbers of rows, then those around the first,
    nearest first."""
    portable = dataclasses.replace(problem, not_hopper="portable configurations are asked for")
    start = choose_config(portable, target)
    seeds = [choose_config(dataclasses.replace(portable, rows=rows), target) for rows in _ROWS]
    families = (
        [hopper_config(problem, *chosen) for chosen in itertools.product(*HOPPER_CHOICES.values())],
        [start, *seeds, *_around(start)],
    )
    sensible = [dict.fromkeys(c for c in configs if _is_sensible(c, problem, target)) for configs in families]
    turns = itertools.chain.from_iterable(itertools.zip_longest(*sensible))
    found = dict.fromkeys((choose_config(problem, target), *turns))
    return tuple(config for config in found if config is not None)[:limit]


def _around(start: TileConfig) -> Iterable[TileConfig]:
    """Every combination of values, ordered by the number of steps from `start`, changes of tile sides first."""
    values = {name: sorted({*choices, getattr(start, name)}) for name, choices in CHOICES.items()}

    def steps(config: TileConfig) -> list[int]:
        return [
            abs(ordered.index(getattr(config, name)) - ordered.index(getattr(start, name)))
            for name, ordered in values.items()
        ]

    every = [
        dataclasses.replace(start, **dict(zip(values, chosen, strict=True)))
        for chosen in itertools.product(*values.values())
    ]
    return sorted(every, key=lambda config: (sum(steps(config)), [-step for step in steps(config)]))


def _is_sensible(config: TileConfig, problem: MatmulProblem, target: Target) -> bool:
    """Legal, and no side of a portable tile more than twice what the problem fills."""
    if why_illegal(config, problem, target) is not None:
        return False
    return config.family == "hopper" or (
        config.block_n < 2 * max(16, problem.n) and config.block_k < 2 * max(16, problem.d)
    )
