"""The kernel families in order of preference."""

from __future__ import annotations

from moe_core.ops.matmul.family import Family
from moe_core.ops.matmul.portable.plan import PORTABLE
from moe_core.ops.matmul.problem import MatmulProblem
from moe_core.ops.matmul.quantized.plan import QUANTIZED
from moe_core.ops.matmul.sm90.fp8_plan import SM90_FP8
from moe_core.ops.matmul.sm90.plan import SM90
from moe_core.ops.matmul.sm90_packed.few_rows_plan import FEW_ROWS
from moe_core.ops.matmul.sm90_packed.plan import MIXED_INPUT
from moe_core.specs import TileConfig

#: The first that can run a product and has no `Family.why_not_chosen` is used.
FAMILIES: tuple[Family, ...] = (FEW_ROWS, MIXED_INPUT, SM90_FP8, QUANTIZED, SM90, PORTABLE)


def families_for(problem: MatmulProblem) -> tuple[Family, ...]:
    return tuple(family for family in FAMILIES if family.weights == problem.weights)


def why_not(family: Family, problem: MatmulProblem) -> str | None:
    """The reason why no tile of the family can run a product, or None."""
    if problem.tail is not None and not family.adds_tail:
        return "it adds no low-rank tail of adapters"
    return family.why_not(problem)


def family_of(config: TileConfig, problem: MatmulProblem) -> Family:
    return next(family for family in families_for(problem) if family.name == config.family)


def why_illegal(config: TileConfig, problem: MatmulProblem) -> str | None:
    families = {family.name: family for family in families_for(problem)}
    if config.family not in families:
        names = " or ".join(repr(name) for name in sorted(families))
        return f"family must be {names} for {problem.weights} weights, got {config.family!r}"
    family = families[config.family]
    if (reason := why_not(family, problem)) is not None:
        return f"the {family.name} family cannot run this product: {reason}"
    return family.why_illegal(config, problem)
