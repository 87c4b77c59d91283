"""The interface of kernel families: all implement it, own tiles are legal, and a family is one line in a tuple."""

from __future__ import annotations

import dataclasses
import inspect
import itertools

import pytest

from moe_core import InvalidInput, Unsupported
from moe_core.base import dtypes
from moe_core.base.arrays import ArraySpec
from moe_core.base.target import Target
from moe_core.formats import QuantizedSpec, Tiling, format_named, quantized_specs
from moe_core.ops.matmul import families
from moe_core.ops.matmul.families import FAMILIES, families_for, family_of, why_illegal
from moe_core.ops.matmul.family import Family
from moe_core.ops.matmul.forward import plan_matmul_ogs, plan_product
from moe_core.ops.matmul.portable.plan import PORTABLE
from moe_core.ops.matmul.problem import PLAIN, PREPACKED, QUANTISED, MatmulProblem
from moe_core.ops.matmul.sm90.plan import SM90, sm90_config
from moe_core.ops.matmul.tile_choice import TileSource, choose_tile, heuristic_tile
from moe_core.plan.builder import PlanBuilder
from moe_core.plan.steps import KernelLaunch, LaunchPlan
from moe_core.specs import Activation, LayoutSpec, MatmulSpec, MatmulTuning
from moe_core.specs.operands import MatmulOperands
from moe_core.specs.tile import TileConfig, shared_limit
from tests.support.harness import H200
from tests.support.matmul.problems import plain_problem

ARCHITECTURES = (80, 86, 87, 88, 89, 90, 100, 103, 120, 121)


def quantised_problem(weights: str, rows: str | None, tokens: int, target: Target = H200, **options) -> MatmulProblem:
    """A product of a layer of 8 experts; weights and rows: names of formats, of prepacked weights behind a `+`."""
    layout, tiled = LayoutSpec(tokens, 2, 8), weights.startswith("+")
    spec = QuantizedSpec(format_named(weights.lstrip("+")), "out_in", Tiling(512, 256, "halves") if tiled else None)
    x = ArraySpec((tokens, 256), "bfloat16")
    if rows is not None:
        x = quantized_specs(QuantizedSpec(format_named(rows)), (tokens, 256))
    matmul = MatmulSpec("out_in", "token", activation=Activation("silu"), out_dtype="bfloat16", **options)
    return MatmulProblem(MatmulOperands(x, quantized_specs(spec, (8, 512, 256))), layout, matmul, target)


def problems() -> list[MatmulProblem]:
    """Products of every kind of weights, few rows and many."""
    kinds = (("fp8_block", "fp8_group"), ("int4_g128", None), ("+mxfp4", None), ("+int4_g128", None))
    found = [plain_problem(8 * mean, 8, 256, 256, buffers=2) for mean in (1, 16, 64, 150, 600)]
    return found + [quantised_problem(*kind, tokens) for kind in kinds for tokens in (8, 64, 256, 4000)]


def test_every_family_implements_the_interface() -> None:
    abstract = Family.__abstractmethods__
    assert abstract == {"why_not", "tile", "why_illegal", "launch"}
    for family in FAMILIES:
        assert isinstance(family, Family) and not vars(family), "a family has no state"
        assert family.weights in (PLAIN, QUANTISED, PREPACKED) and family.name
        for name, method in inspect.getmembers(Family, inspect.isfunction):
            assert inspect.signature(getattr(family, name)) == inspect.signature(method.__get__(family)), name
    assert len({(family.name, family.weights) for family in FAMILIES}) == len(FAMILIES)
    # Of each kind the last takes every product that the kind has a kernel for.
    for kind in (PLAIN, QUANTISED, PREPACKED):
        last = [family for family in FAMILIES if family.weights == kind][-1]
        for problem in problems():
            if problem.weights == kind:
                assert last.why_not(problem) is None and last.why_not_chosen(problem) is None


def test_own_tiles_are_legal_and_planned_with_the_launch_of_their_family() -> None:
    launched = set()
    for problem in problems():
        for family in families_for(problem):
            if family.why_not(problem) is not None:
                continue
            for config in (family.tile(problem), *itertools.islice(family.candidates(problem), 3)):
                assert config.family == family.name and family_of(config, problem) is family
                if config == family.tile(problem):
                    assert why_illegal(config, problem) is None
        tile = choose_tile(problem)
        assert tile is not None
        plan = plan_product(problem, tile, stage=0)
        assert plan.steps and all(isinstance(step, KernelLaunch) for step in plan.steps)
        launched.add((tile.family.name, tile.family.weights))
        assert ("tile_counters" in [buffer.name for buffer in plan.inputs]) == tile.family.counts_tiles, tile
    assert launched == {(family.name, family.weights) for family in FAMILIES}, "every family is chosen somewhere"


def test_the_first_family_that_is_not_passed_over_is_chosen() -> None:
    few, many = plain_problem(47 * 8, 8, 256, 256), plain_problem(48 * 8, 8, 256, 256)
    assert "wins from 48 rows per expert, got 47.0" in str(SM90.why_not_chosen(few))
    assert SM90.why_not_chosen(many) is None
    pinned = plain_problem(48 * 8, 8, 256, 256, tuning=MatmulTuning(batch_invariant=True))
    assert "batch_invariant" in str(SM90.why_not_chosen(pinned))
    chosen = [choose_tile(problem) for problem in (few, many, pinned)]
    assert [tile and tile.family for tile in chosen] == [PORTABLE, SM90, PORTABLE]
    sources = [TileSource.HEURISTICS, TileSource.HEURISTICS, TileSource.BATCH_INVARIANT]
    assert [tile and tile.source for tile in chosen] == sources


def test_the_families_of_a_kind_of_weights_are_named() -> None:
    for problem, names in (
        (plain_problem(8, 8, 256, 256), "'portable' or 'sm90' for plain weights"),
        (quantised_problem("int4_g128", None, 8), "'quantized' or 'sm90' for quantised weights"),
        (quantised_problem("+mxfp4", None, 8), "'few_rows' or 'mixed_input' for prepacked weights"),
    ):
        reason = why_illegal(TileConfig(64, 64, 64, family="other"), problem)
        assert reason == f"family must be {names}, got 'other'"


def test_no_family_at_all_says_why() -> None:
    with pytest.raises(
        Unsupported, match=r"need a kernel for cuda sm_80 .*: prepacked weights are read by kernels for"
    ):
        choose_tile(quantised_problem("+mxfp4", None, 8, Target("cuda", 80, 108)))


class Toy(Family):
    """Refuses everything but rows of 48 columns; its kernel is the portable one with a tile of its own."""

    name, weights = "toy", PLAIN

    def why_not(self, problem: MatmulProblem) -> str | None:
        return None if problem.d == 48 else f"it multiplies rows of 48 columns, got {problem.d}"

    def tile(self, problem: MatmulProblem) -> TileConfig:
        return TileConfig(16, 16, 16, 4, 2, 1, self.name)

    def why_illegal(self, config: TileConfig, problem: MatmulProblem) -> str | None:
        return None if config.block_m == 16 else f"block_m must be 16, got {config.block_m}"

    def launch(self, builder: PlanBuilder, problem: MatmulProblem, config: TileConfig, stage: int | None) -> None:
        PORTABLE.launch(builder, problem, config, stage)
        builder.sums("toy")


def test_a_family_is_one_line_in_the_tuple(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is chosen, launched, named in plans and messages, and can be asked for, without another change."""
    monkeypatch.setattr(families, "FAMILIES", (Toy(), *FAMILIES))
    plan_matmul_ogs.cache_clear()
    layout = LayoutSpec(40, 2, 4)

    def plan(d: int, tuning: MatmulTuning | None = None) -> LaunchPlan:
        operands = MatmulOperands(ArraySpec((40, d), "bfloat16"), ArraySpec((4, d, 64), "bfloat16"))
        return plan_matmul_ogs(operands, layout, MatmulSpec("in_out", "token", tuning=tuning), H200)

    try:
        taken = plan(48)
        assert "family='toy'" in taken.explain() and taken.summation[-1] == "toy"
        launch = taken.steps[-1]
        assert isinstance(launch, KernelLaunch) and launch.num_stages == 2
        assert "toy" not in plan(64).explain()
        asked = plan(48, MatmulTuning(TileConfig(16, 16, 16, 4, 2, 1, "toy")))
        assert "given for this call" in asked.explain() and asked.summation == taken.summation
        for d, config, reason in (
            (64, TileConfig(16, 16, 16, family="toy"), "the toy family cannot run this product: it multiplies rows of"),
            (48, TileConfig(32, 16, 16, family="toy"), "block_m must be 16, got 32"),
            (48, TileConfig(32, 16, 16, family="other"), "family must be 'portable' or 'sm90' or 'toy' for plain"),
        ):
            with pytest.raises(InvalidInput, match=rf"tuning\.config must be legal on .*{reason}"):
                plan(d, MatmulTuning(config))
    finally:
        plan_matmul_ogs.cache_clear()


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_the_choice_is_legal_everywhere(arch: int) -> None:
    target = Target("cuda", arch, 128)
    sizes = itertools.product((0, 1, 8, 128, 1024, 4096, 65536, 131072), (16, 768, 7168), (1, 2), dtypes.MATMUL_DTYPES)
    for rows, n, buffers, dtype in sizes:
        able = plain_problem(rows, 128, 2048, n, dtype, buffers, target=target)
        other = "float32" if dtype != "float32" else "bfloat16"
        for problem in (able, dataclasses.replace(able, spec=dataclasses.replace(able.spec, out_dtype=other))):
            choice = heuristic_tile(problem)
            assert why_illegal(choice.config, problem) is None, (problem, choice)
            assert choice.family is (PORTABLE if choice.config.family == "portable" else SM90)
            assert choice.family is PORTABLE or (arch == 90 and problem is able)


def test_an_h200_keeps_what_was_measured() -> None:
    problem = plain_problem(131072, 128, 2048, 768, buffers=2)
    assert PORTABLE.tile(problem) == TileConfig(128, 128, 32, 8, 5, 4)
    assert heuristic_tile(problem).config == TileConfig(128, 128, 64, 4, 4, 4, "sm90")


def test_many_rows_take_the_sm90_family_on_sm_90() -> None:
    def config(rows: int, d: int = 2048, **options) -> TileConfig:
        return heuristic_tile(plain_problem(rows, 8, d, 768, buffers=2, **options)).config

    enough = plain_problem(48 * 8, 8, 2048, 768, buffers=2)
    assert config(48 * 8) == sm90_config(enough, 4, 4) == SM90.tile(enough)
    assert config(48 * 8 - 1).family == "portable"
    assert config(48 * 8, target=Target("cuda", 100, 148)).family == "portable"
    assert config(48 * 8, out_dtype="float32").family == "portable"
    assert config(256 * 8, d=7680) == sm90_config(enough, 3, 4), "blocks stay together over a long reduction"
    assert config(257 * 8, d=4096).num_stages == 4


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (TileConfig(24, 64, 64), "block_m must be a power of two of at least 16"),
        (TileConfig(16, 64, 8), "block_k must be a power of two of at least 16"),
        (TileConfig(16, 64, 64, 3), "num_warps must be 4, 8 or 16"),
        (TileConfig(16, 64, 64, 4, 0), "num_stages must be at least 1"),
        (TileConfig(16, 64, 64, 4, 2, 0), "group_m must be at least 1"),
        (TileConfig(128, 256, 128, 8, 4), "bytes of shared memory"),
        (TileConfig(128, 256, 32, 4, 2), "accumulator registers"),
    ],
)
def test_reasons(config: TileConfig, reason: str) -> None:
    problem = plain_problem(1024, 8, 2048, 768)
    assert reason in str(why_illegal(config, problem))
    with pytest.raises(InvalidInput, match="config must be legal on cuda sm_90"):
        plan_matmul_ogs(problem.operands, problem.layout, problem.spec, H200, config=config)


def test_shared_memory_of_architectures() -> None:
    """Kilobytes, of the makers' guides."""
    for arch, held in (
        (80, 163),
        (86, 99),
        (87, 163),
        (89, 99),
        (90, 227),
        (100, 227),
        (120, 99),
        (942, 64),
        (950, 160),
    ):
        assert shared_limit(arch) == held * 1024


@pytest.mark.parametrize("arch", [80, 86, 89, 90, 100, 120])
def test_pinned_tiles_are_legal_everywhere(arch: int) -> None:
    target, tuning = Target("cuda", arch, 128), MatmulTuning(batch_invariant=True)
    for d, n, buffers in ((16, 16, 1), (2048, 768, 2), (7168, 2048, 2), (14336, 4096, 1)):
        for dtype in ("bfloat16", "float16", "float32"):
            none, many = (
                plain_problem(rows, 64, d, n, dtype, buffers, target=target, tuning=tuning) for rows in (0, 10**6)
            )
            choice = choose_tile(none)
            assert choice is not None and choice.family is PORTABLE and choice == choose_tile(many)
