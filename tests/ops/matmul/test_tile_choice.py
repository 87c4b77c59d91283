"""Which tile a call gets: its own, one for every batch, a measured one, the heuristics'; and that plans know of it."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable
from typing import Any

import pytest

from moe_core import InvalidInput, Unsupported
from moe_core.base import codec
from moe_core.base.arrays import ArraySpec
from moe_core.base.target import Target
from moe_core.formats import QuantizedSpec, Tiling, format_named, quantized_specs
from moe_core.ops.matmul import tile_choice
from moe_core.ops.matmul.forward import plan_matmul_ogs
from moe_core.ops.matmul.portable.plan import MATMUL_OGS
from moe_core.ops.matmul.problem import MatmulProblem
from moe_core.ops.matmul.sm90.plan import sm90_config
from moe_core.ops.matmul.tile_choice import TileChoice, TileSource, choose_tile, given_tile, heuristic_tile, tile_key
from moe_core.ops.moe import backward_stages, forward
from moe_core.ops.moe.backward import plan_moe_backward
from moe_core.ops.moe.options import BackwardOptions
from moe_core.ops.reduction.reduce import REDUCE
from moe_core.ops.router.forward import ROUTER
from moe_core.plan.registry import export_plans, load_plans, register
from moe_core.plan.steps import Constant, Kernel, KernelLaunch, LaunchPlan
from moe_core.specs import (
    Activation,
    LayoutSpec,
    LogitsSpec,
    MatmulSpec,
    MatmulTuning,
    MoESpec,
    RouterSpec,
    TileConfig,
    Tuning,
)
from moe_core.specs.operands import ExpertWeights, MatmulOperands, MoEOperands, OutputGradients, RouterLogits
from moe_core.specs.tile_table import TileEntry, TileTable, entry_key
from tests.support.harness import H200
from tests.support.matmul.problems import plain_problem
from tests.support.moe import D, E, F, K, T, layer_plan, tiles

GIVEN = TileConfig(32, 32, 64, 4, 2, 2)
MEASURED = TileConfig(64, 32, 128, 8, 2, 16)
ILLEGAL = TileConfig(128, 256, 128, 8, 4)
SHAPES = ((E, D, 2 * F), (E, F, D))
TOKENS = (1, 2, 3, 5, 16, 17, 64, 100, 256, 1000, 4096, 16384)


def problem(rows: int = T * K, tuning: MatmulTuning | None = None, **options: Any) -> MatmulProblem:
    """The first product of `layer_plan`."""
    return plain_problem(rows, E, D, F, buffers=2, tuning=tuning, **options)


def chosen(tuning: MatmulTuning | None = None, **options: Any) -> TileChoice:
    """The tile of `problem`."""
    choice = choose_tile(problem(tuning=tuning, **options))
    assert choice is not None
    return choice


def dense_problem() -> MatmulProblem:
    """The first product of `layer_plan`'s shared expert."""
    operands = MatmulOperands(ArraySpec((T, D), "bfloat16"), ArraySpec((D, 2 * F), "bfloat16"))
    return MatmulProblem(operands, None, MatmulSpec("in_out", activation=Activation("silu")), H200)


def table_of(*problems: MatmulProblem, config: TileConfig = MEASURED, arch: int = 90) -> TileTable:
    return TileTable.of(TileEntry(arch, entry_key(tile_key(one)), config) for one in problems)


def test_the_order_of_precedence(monkeypatch: pytest.MonkeyPatch) -> None:
    shipped = dataclasses.replace(MEASURED, num_stages=3)
    assert chosen() == heuristic_tile(problem()) and chosen().source is TileSource.HEURISTICS
    assert str(chosen()) == "heuristics: 128.0 rows per expert, 0.1 waves, 2.1 MB of weights"
    monkeypatch.setattr(tile_choice, "shipped_table", lambda arch: table_of(problem(), config=shipped))
    for tuning, config, source, text in (
        (None, shipped, TileSource.MEASURED, "measured: the shipped table"),
        (MatmulTuning(table=table_of(problem())), MEASURED, TileSource.MEASURED, "measured: tuning.table"),
        # A table without the entry leaves the others in place.
        (MatmulTuning(table=table_of(problem(16))), shipped, TileSource.MEASURED, "measured: the shipped table"),
        (MatmulTuning(GIVEN, table_of(problem())), GIVEN, TileSource.GIVEN, "given for this call"),
    ):
        choice = chosen(tuning)
        assert (choice.config, choice.source, str(choice)) == (config, source, text)
    choice = chosen(MatmulTuning(batch_invariant=True))
    assert choice == chosen(MatmulTuning(batch_invariant=True), rows=8)
    assert str(choice) == "batch invariant: the same for every number of rows"
    assert choice.config == TileConfig(64, 64, 64, 4, 4)
    assert given_tile(problem(), GIVEN) == chosen(MatmulTuning(GIVEN))


def test_tables_of_another_architecture_do_not_count() -> None:
    tuning = MatmulTuning(table=table_of(problem(), arch=80))
    assert chosen(tuning) == heuristic_tile(problem())
    assert str(chosen(tuning, target=Target("interpreter"))) == "heuristics: 128.0 rows per expert"


def test_a_tile_is_chosen_once_for_every_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """Composed plans hand it on: nothing has to agree with a second choice."""
    asked: list[MatmulProblem] = []

    def note(problem: MatmulProblem, *name: str) -> TileChoice | None:
        asked.append(problem)
        return choose_tile(problem, *name)

    for module in (forward, backward_stages):
        monkeypatch.setattr(module, "choose_tile", note)
    x, operands = ArraySpec((T, D), "bfloat16"), ExpertWeights(*(ArraySpec(s, "bfloat16") for s in SHAPES))
    routing, spec = RouterLogits(ArraySpec((T, E), "float32")), MoESpec(Activation("silu"), RouterSpec(K))
    forward.plan_moe.__wrapped__(x, operands, routing, spec, H200)
    assert len(asked) == len(set(asked)) == 2
    asked.clear()
    again = dataclasses.replace(spec, recompute=True)
    layer = MoEOperands(x, operands, routing)
    plan_moe_backward.__wrapped__(OutputGradients(x), layer, again, H200, options=BackwardOptions(wanted=("d_x",)))
    # Those of the forward that it checks itself against, unless that is known, and its own.
    assert len(asked) == len(set(asked)) in (3, 5)


@pytest.mark.parametrize(
    ("tuning", "message"),
    [
        (Tuning(matmul_1=ILLEGAL), "tuning.matmul_1 must be legal on cuda sm_90 .* shared memory"),
        (Tuning(matmul_2=TileConfig(24, 64, 64)), "tuning.matmul_2 must be legal .* power of two .*; give another, or"),
        (Tuning(table=table_of(problem(), config=ILLEGAL)), "the entry of tuning.table must be legal .* measure again"),
    ],
)
def test_illegal_choices_are_refused_with_the_reason(tuning: Tuning, message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        layer_plan(tuning)


@pytest.mark.parametrize(
    ("dtype", "activation", "reason"),
    [("float32", "silu", "it multiplies bfloat16 and float16, got float32"), ("bfloat16", "gelu", "gelu's erf")],
)
def test_an_override_that_a_product_cannot_run_is_not_left_aside(dtype: str, activation: str, reason: str) -> None:
    tuning = Tuning(matmul_1=sm90_config(problem()))
    assert tiles(layer_plan(tuning))[0].family == "sm90"
    refused = r"tuning\.matmul_1 must be legal .* the sm90 family cannot run this product: "
    with pytest.raises(InvalidInput, match=f"{refused}{reason}.*; give another, or None for one that is chosen"):
        layer_plan(tuning, dtype=dtype, activation=activation)
    with pytest.raises(InvalidInput, match=refused):
        layer_plan(tuning, dtype=dtype, activation=activation, save=True)


def test_an_illegal_override_is_refused_on_every_target() -> None:
    for kind in ("interpreter", "reference"):
        with pytest.raises(InvalidInput, match=r"tuning\.matmul_1 must be legal .* power of two"):
            layer_plan(Tuning(matmul_1=TileConfig(24, 64, 64)), target=Target(kind))


def test_an_override_of_a_product_that_no_kernel_runs_is_refused() -> None:
    weight = quantized_specs(QuantizedSpec(format_named("mxfp4"), "out_in", Tiling(128, 256, "rows")), (E, 128, 256))
    operands = MatmulOperands(ArraySpec((T, 256), "bfloat16"), weight)
    spec = MatmulSpec("out_in", "token", tuning=MatmulTuning(GIVEN))
    with pytest.raises(Unsupported, match=r"quantised operands need a kernel for cuda sm_80 .*, and there is none"):
        plan_matmul_ogs(operands, LayoutSpec(T, K, E), spec, Target("cuda", 80, 108))


def test_one_products_op_takes_an_override() -> None:
    layout, x = LayoutSpec(T, K, E), ArraySpec((T, D), "bfloat16")
    operands = MatmulOperands(x, ArraySpec((E, D, F), "bfloat16"))
    plan = plan_matmul_ogs(operands, layout, MatmulSpec("in_out", "token", tuning=MatmulTuning(GIVEN)), H200)
    assert tiles(plan) == [GIVEN]
    assert "given for this call" in plan.explain()
    with pytest.raises(InvalidInput, match=r"tuning\.config must be legal"):
        plan_matmul_ogs(operands, layout, MatmulSpec("in_out", "token", tuning=MatmulTuning(ILLEGAL)), H200)


def test_a_forward_takes_overrides_and_tables_for_each_of_its_products() -> None:
    default = tiles(layer_plan(None))
    assert len(default) == 4
    plan = layer_plan(Tuning(matmul_1=GIVEN, matmul_2=MEASURED))
    assert tiles(plan) == [GIVEN, MEASURED, *default[2:]], "the shared expert's products are chosen by themselves"
    second = plain_problem(T * K, E, F, D)
    plan = layer_plan(Tuning(table=table_of(second, dense_problem())))
    assert tiles(plan) == [default[0], MEASURED, MEASURED, default[3]]
    assert plan.explain().count("measured: tuning.table") == 2


def test_choices_are_part_of_the_key_and_of_exported_plans(tmp_path: pathlib.Path) -> None:
    plans = [layer_plan(tuning) for tuning in (None, Tuning(matmul_1=GIVEN), Tuning(batch_invariant=True))]
    table = TileTable.of([TileEntry(90, tile_key(problem()), GIVEN)])
    assert len({plan.key for plan in plans}) == 3
    assert tiles(layer_plan(Tuning(table=table))) == tiles(plans[1])
    register(plans[1])
    path = tmp_path / "plans.json"
    export_plans(path, [plans[1].key])
    assert load_plans(path) == (plans[1].key,)


def test_the_weight_layout_has_entries_of_its_own() -> None:
    assert chosen(MatmulTuning(table=table_of(problem())), weight_layout="out_in").config != MEASURED


def test_a_table_gives_the_sm90_family_to_products_that_can_run_it() -> None:
    """Of an entry of the family the heuristics are left for a product of the same sizes that cannot; a portable entry
    serves both."""
    measured = sm90_config(problem(), num_stages=2, group_m=2)
    table = table_of(problem(), config=measured)
    assert chosen(MatmulTuning(table=table)).config == measured
    assert tiles(layer_plan(Tuning(table=table)))[0] == measured
    unable = problem(activation="gelu")
    key = tile_key(unable)
    assert key == dataclasses.replace(tile_key(problem()), not_sm90=key.not_sm90) and "erf" in key.not_sm90
    choice = chosen(MatmulTuning(table=table), activation="gelu")
    assert choice == heuristic_tile(unable) and choice.config.family == "portable"
    for one in (problem(), unable):
        assert chosen(MatmulTuning(table=table_of(one)), activation="gelu").config == MEASURED


@pytest.mark.parametrize("save", [False, True])
def test_training_finds_what_was_measured_for_a_forward(save: bool) -> None:
    """A forward that keeps its pre-activation multiplies the same sizes."""
    tuning = Tuning(table=table_of(problem(), plain_problem(T * K, E, F, D)))
    plan = layer_plan(tuning, save=save)
    assert tiles(plan)[:2] == [MEASURED, MEASURED]
    assert plan.explain().count("measured: tuning.table") == 2


#: Constants that say when a kernel waits, and change no number: `moe_core.ops.moe.pdl`.
_NO_NUMBERS = ("PDL",)


def constants(plan: LaunchPlan) -> list[tuple[Kernel, object]]:
    """Everything compiled into the kernels that add floats, but for routing.

    Kernels of layouts add integers. Those of routing, which differ with the number of tokens, add one token's scores by
    `topk.row_sum`, in one order whatever the kernel: tests/ops/routing/test_topk.py and
    tests/ops/moe/test_batch_invariance.py hold it.
    """

    def compiled_in(step: KernelLaunch) -> list[object]:
        pairs = [(name, value) for name, value in step.arguments if isinstance(value, Constant)]
        return [*(pair for pair in pairs if pair[0] not in _NO_NUMBERS), step.num_warps, step.num_stages]

    return [
        (step.kernel, compiled_in(step))
        for step in plan.steps
        if isinstance(step, KernelLaunch) and not step.kernel.writes_layout
    ]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize(
    "target", [H200, Target("cuda", 80, 108), Target("cuda", 120, 188), Target("interpreter")], ids=str
)
def test_batch_invariance_fixes_every_sum_for_every_number_of_tokens(target: Target, dtype: str) -> None:
    def plans(tuning: Tuning | None) -> list[LaunchPlan]:
        return [layer_plan(tuning, num_tokens, target, dtype) for num_tokens in TOKENS]

    pinned = plans(Tuning(batch_invariant=True))
    assert len({plan.summation for plan in pinned}) == 1
    kernels = [constants(plan) for plan in pinned]
    assert {name for name, _ in kernels[0]} == {ROUTER, MATMUL_OGS, REDUCE}
    assert all(found == kernels[0] for found in kernels)
    if target.kind == "cuda":
        free = [constants(plan) for plan in plans(None)]
        assert any(found != free[0] for found in free), "what the option is for"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Tuning(matmul_1="wide"), "matmul_1 must be a TileConfig or None"),  # type: ignore[arg-type]
        (lambda: Tuning(table={}), "table must be a TileTable or None"),  # type: ignore[arg-type]
        (lambda: Tuning(batch_invariant=1), "batch_invariant must be True or False"),  # type: ignore[arg-type]
        (lambda: Tuning(table=TileTable.of([]), batch_invariant=True), "table must be None with batch_invariant"),
        (lambda: MatmulTuning(config=3), "config must be a TileConfig or None"),  # type: ignore[arg-type]
        (lambda: MatmulTuning(table=TileTable.of([]), batch_invariant=True), "table must be None with batch_invariant"),
        (lambda: MoESpec(Activation("silu"), tuning=MatmulTuning()), "tuning must be a Tuning or None"),  # type: ignore[arg-type]
        (lambda: MatmulSpec("in_out", tuning=Tuning()), "tuning must be a MatmulTuning or None"),  # type: ignore[arg-type]
        (lambda: LogitsSpec(batch_invariant=None), "batch_invariant must be True or False"),  # type: ignore[arg-type]
    ],
)
def test_wrong_tunings(make: Callable[[], object], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        make()


def test_tunings_travel_as_text() -> None:
    spec = MoESpec(Activation("silu"), tuning=Tuning(GIVEN, MEASURED, table_of(problem())))
    assert codec.loads(codec.dumps(spec)) == spec


@pytest.mark.parametrize("rows_per_expert", [150, 600])
def test_products_that_store_their_pre_activation_leave_tall_blocks_of_a_table(rows_per_expert: int) -> None:
    """They were measured as tall ones: the heuristics choose, and what is tall of theirs gets lower."""
    rows = rows_per_expert * E
    tall, low = (sm90_config(problem(rows), 3, 2, height) for height in (192, 128))

    def storing(tuning: MatmulTuning, *outputs: str) -> TileChoice | None:
        return choose_tile(dataclasses.replace(problem(rows, tuning), outputs=outputs))

    for outputs in (("pre",), ("y", "pre")):
        found = storing(MatmulTuning(table=table_of(problem(rows), config=tall)), *outputs)
        assert found is not None and found.source is TileSource.HEURISTICS
        assert found.config == dataclasses.replace(heuristic_tile(problem(rows)).config, block_m=128) != tall
        assert f"{rows_per_expert}.0 rows per expert" in str(found)
        assert str(found).endswith("; 128 rows where the pre-activation is stored") == (rows_per_expert == 150)
        kept = storing(MatmulTuning(table=table_of(problem(rows), config=low)), *outputs)
        assert kept is not None and (kept.config, kept.source) == (low, TileSource.MEASURED)
    given = storing(MatmulTuning(tall), "y", "pre")
    assert given is not None and given.config == tall, "refused later"
    again = storing(MatmulTuning(tall), "pre")
    assert again is not None and again.config == low
    assert str(again) == "given for this call; 128 rows where the pre-activation is stored"


@pytest.mark.parametrize(
    ("dtype", "limits"),
    [("float32", {16: 16, 17: 32}), ("bfloat16", {10: 16, 11: 32, 24: 32, 25: 64, 100: 64, 101: 128})],
)
def test_tiles_are_higher_for_more_rows_of_an_expert(dtype: str, limits: dict[int, int]) -> None:
    a100 = Target("cuda", 80, 108)
    problems = {rows: plain_problem(rows * E, E, 512, 512, dtype, target=a100) for rows in limits}
    assert {rows: heuristic_tile(problem).config.block_m for rows, problem in problems.items()} == limits
