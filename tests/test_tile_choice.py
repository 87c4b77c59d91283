"""Which tile a call gets: its own, one for every batch, a measured one, the heuristics'; and that plans know of it."""

from __future__ import annotations

import ast
import dataclasses
import pathlib
import re
from collections.abc import Callable

import pytest

from moe_core import InvalidInput, codec, tile_choice
from moe_core.arrays import ArraySpec
from moe_core.matmul_ogs import matmul_problem, plan_matmul_ogs
from moe_core.moe import plan_moe
from moe_core.operands import ExpertWeights, MatmulOperands, RouterWeights, SharedExpert
from moe_core.plan import Constant, KernelLaunch, LaunchPlan, export_plans, load_plans, register
from moe_core.specs import Activation, LayoutSpec, LogitsSpec, MatmulSpec, MatmulTuning, MoESpec, RouterSpec, Tuning
from moe_core.target import Target
from moe_core.tile_choice import TileChoice, choose_tile, without_tall_blocks
from moe_core.tile_table import TileEntry, TileTable, rows_bucket
from moe_core.tuning import (
    MatmulProblem,
    TileConfig,
    batch_invariant_config,
    choose_config,
    hopper_config,
    why_illegal,
)

H200 = Target("cuda", 90, 132)
T, D, F, E, K = 512, 256, 128, 16, 4
GIVEN = TileConfig(32, 32, 64, 4, 2, 2)
MEASURED = TileConfig(64, 32, 128, 8, 2, 16)
ILLEGAL = TileConfig(128, 256, 128, 8, 4)
TOKENS = (1, 2, 3, 5, 16, 17, 64, 100, 256, 1000, 4096, 16384)


def problem(rows: int = T * K) -> MatmulProblem:
    """The first product of `layer_plan`."""
    return MatmulProblem(rows, E, D, F, "bfloat16", 2, not_hopper="")


def dense_problem() -> MatmulProblem:
    """The first product of `layer_plan`'s shared expert."""
    return matmul_problem(ArraySpec((T, D), "bfloat16"), F, None, MatmulSpec("in_out", activation=Activation("silu")))


def table_of(*problems: MatmulProblem, config: TileConfig = MEASURED, arch: int = 90) -> TileTable:
    buckets = [dataclasses.replace(one, rows=rows_bucket(one.rows)) for one in problems]
    return TileTable.of(TileEntry(arch, bucket, config) for bucket in buckets)


def layer_plan(
    tuning: Tuning | None,
    num_tokens: int = T,
    target: Target = H200,
    dtype: str = "bfloat16",
    *,
    activation: str = "silu",
    keep: bool = False,
) -> LaunchPlan:
    """A whole forward with everything that sums: router, experts, gated shared expert."""
    experts = ExpertWeights(ArraySpec((E, D, 2 * F), dtype), ArraySpec((E, F, D), dtype))
    shared = SharedExpert(ArraySpec((D, 2 * F), dtype), ArraySpec((F, D), dtype), gate=ArraySpec((D, 1), dtype))
    spec = MoESpec(Activation(activation), RouterSpec(K, renormalize=True), tuning=tuning)
    router = RouterWeights(ArraySpec((D, E), dtype))
    return plan_moe(ArraySpec((num_tokens, D), dtype), experts, router, spec, target, shared=shared, keep=keep)


def tiles(plan: LaunchPlan) -> list[TileConfig]:
    """The configurations of a plan's grouped matmuls, in order, as it states them."""
    stated = [re.search(r"TileConfig\((.*?)\)", note) for note in plan.notes]
    found = []
    for match in stated:
        if match is not None:
            fields = dict(pair.split("=") for pair in match[1].split(", "))
            found.append(TileConfig(**{name: ast.literal_eval(value) for name, value in fields.items()}))
    return found


def test_the_order_of_precedence(monkeypatch: pytest.MonkeyPatch) -> None:
    shipped = dataclasses.replace(MEASURED, num_stages=3)
    heuristics = choose_tile(problem(), H200)
    assert heuristics.config == choose_config(problem(), H200)
    assert heuristics.source == "heuristics: 128.0 rows per expert, 0.1 waves, 2.1 MB of weights"
    monkeypatch.setattr(tile_choice, "shipped_table", lambda arch: table_of(problem(), config=shipped))
    choice = choose_tile(problem(), H200)
    assert (choice.config, choice.source) == (shipped, "measured: the shipped table")
    choice = choose_tile(problem(), H200, MatmulTuning(table=table_of(problem())))
    assert (choice.config, choice.source) == (MEASURED, "measured: tuning.table")
    choice = choose_tile(problem(), H200, MatmulTuning(table=table_of(problem(16))))
    assert choice.config == shipped, "a table without the entry leaves the others in place"
    choice = choose_tile(problem(), H200, MatmulTuning(batch_invariant=True))
    assert choice.config == batch_invariant_config(problem(), H200)
    assert choice.source == "batch invariant: the same for every number of rows"
    choice = choose_tile(problem(), H200, MatmulTuning(GIVEN, table_of(problem())))
    assert (choice.config, choice.source) == (GIVEN, "given for this call")


def test_tables_of_another_architecture_do_not_count() -> None:
    tuning = MatmulTuning(table=table_of(problem(), arch=80))
    assert choose_tile(problem(), H200, tuning).config == choose_config(problem(), H200)
    assert choose_tile(problem(), Target("interpreter"), tuning).source == "heuristics: 128.0 rows per expert"


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
    tuning = Tuning(matmul_1=hopper_config(problem()))
    assert tiles(layer_plan(tuning))[0].family == "hopper"
    refused = r"tuning\.matmul_1 must be legal .* the hopper family cannot run this product: "
    with pytest.raises(InvalidInput, match=f"{refused}{reason}.*; give another, or None for one that is chosen"):
        layer_plan(tuning, dtype=dtype, activation=activation)
    with pytest.raises(InvalidInput, match=refused):
        layer_plan(tuning, dtype=dtype, activation=activation, keep=True)


def test_an_illegal_override_is_refused_on_every_target() -> None:
    for kind in ("interpreter", "reference"):
        with pytest.raises(InvalidInput, match=r"tuning\.matmul_1 must be legal .* power of two"):
            layer_plan(Tuning(matmul_1=TileConfig(24, 64, 64)), target=Target(kind))


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
    second = MatmulProblem(T * K, E, F, D, "bfloat16", not_hopper="")
    plan = layer_plan(Tuning(table=table_of(second, dense_problem())))
    assert tiles(plan) == [default[0], MEASURED, MEASURED, default[3]]
    assert plan.explain().count("measured: tuning.table") == 2


def test_choices_are_part_of_the_key_and_of_exported_plans(tmp_path: pathlib.Path) -> None:
    plans = [layer_plan(tuning) for tuning in (None, Tuning(matmul_1=GIVEN), Tuning(batch_invariant=True))]
    table = TileTable.of([TileEntry(90, problem(), GIVEN)])
    assert len({plan.key for plan in plans}) == 3
    assert tiles(layer_plan(Tuning(table=table))) == tiles(plans[1])
    register(plans[1])
    path = tmp_path / "plans.json"
    export_plans(path, [plans[1].key])
    assert load_plans(path) == (plans[1].key,)


def test_the_weight_layout_has_entries_of_its_own() -> None:
    found = choose_tile(
        dataclasses.replace(problem(), weight_layout="out_in"), H200, MatmulTuning(table=table_of(problem()))
    )
    assert found.config != MEASURED


def test_a_table_gives_the_hopper_family_to_products_that_can_run_it() -> None:
    """Of an entry of the family the heuristics are left for a product of the same sizes that cannot; a portable entry
    serves both."""
    measured = hopper_config(problem(), num_stages=2, group_m=2)
    table = table_of(problem(), config=measured)
    assert choose_tile(problem(), H200, MatmulTuning(table=table)).config == measured
    assert tiles(layer_plan(Tuning(table=table)))[0] == measured
    layout, x = LayoutSpec(T, K, E), ArraySpec((T, D), "bfloat16")
    unable = matmul_problem(x, F, layout, MatmulSpec("in_out", "token", activation=Activation("gelu")))
    assert unable == dataclasses.replace(problem(), not_hopper=unable.not_hopper) and "erf" in unable.not_hopper
    choice = choose_tile(unable, H200, MatmulTuning(table=table))
    assert (choice.config, choice.source) == (choose_config(unable, H200), choose_tile(unable, H200).source)
    assert choice.config.family == "portable"
    for one in (problem(), unable):
        assert choose_tile(unable, H200, MatmulTuning(table=table_of(one))).config == MEASURED


@pytest.mark.parametrize("keep", [False, True])
def test_training_finds_what_was_measured_for_a_forward(keep: bool) -> None:
    """A forward that keeps its pre-activation multiplies the same sizes."""
    tuning = Tuning(table=table_of(problem(), MatmulProblem(T * K, E, F, D, "bfloat16", not_hopper="")))
    plan = layer_plan(tuning, keep=keep)
    assert tiles(plan)[:2] == [MEASURED, MEASURED]
    assert plan.explain().count("measured: tuning.table") == 2


#: Modules of kernels left out of `constants`.
_NO_SUMS_OVER_TOKENS = ("layout:", "schedule:", "route_and_layout:", "topk:")
#: Constants that say when a kernel waits, and change no number: `moe_core.overlap`.
_NO_NUMBERS = ("OVERLAP",)


def constants(plan: LaunchPlan) -> list[tuple[str, object]]:
    """Everything compiled into the kernels that add floats, but for routing.

    Kernels of layouts add integers. Those of routing, which differ with the number of tokens, add one token's scores by
    `topk.row_sum`, in one order whatever the kernel: tests/test_routing.py and tests/test_batch_invariance.py hold it.
    """

    def compiled_in(step: KernelLaunch) -> list[object]:
        pairs = [(name, value) for name, value in step.arguments if isinstance(value, Constant)]
        return [*(pair for pair in pairs if pair[0] not in _NO_NUMBERS), step.num_warps, step.num_stages]

    return [
        (step.kernel, compiled_in(step))
        for step in plan.steps
        if isinstance(step, KernelLaunch) and not step.kernel.startswith(_NO_SUMS_OVER_TOKENS)
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
    assert {name for name, _ in kernels[0]} == {"router:router", "matmul_ogs:matmul_ogs", "reduction:reduce"}
    assert all(found == kernels[0] for found in kernels)
    if target.kind == "cuda":
        free = [constants(plan) for plan in plans(None)]
        assert any(found != free[0] for found in free), "what the option is for"


@pytest.mark.parametrize("arch", [80, 86, 89, 90, 100, 120])
def test_pinned_tiles_are_legal_everywhere(arch: int) -> None:
    target = Target("cuda", arch, 128)
    for d, n, buffers in ((16, 16, 1), (2048, 768, 2), (7168, 2048, 2), (14336, 4096, 1)):
        for dtype in ("bfloat16", "float16", "float32"):
            one = MatmulProblem(0, 64, d, n, dtype, buffers)
            config = batch_invariant_config(one, target)
            assert why_illegal(config, one, target) is None
            assert config == batch_invariant_config(dataclasses.replace(one, rows=10**6), target)


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
    asked = problem(rows_per_expert * E)
    tall = hopper_config(asked, 3, 2, 192)
    found = without_tall_blocks(TileChoice(tall, "measured: the shipped table"), asked, H200)
    assert found.config == dataclasses.replace(choose_config(asked, H200), block_m=128) != tall
    assert found.source.startswith("heuristics: ") and f"{rows_per_expert}.0 rows per expert" in found.source
    low = TileChoice(hopper_config(asked, 3, 2), "measured: the shipped table")
    assert without_tall_blocks(low, asked, H200) == low
    given = TileChoice(tall, "given for this call")
    assert without_tall_blocks(given, asked, H200) == given, "refused later"
    lower = without_tall_blocks(given, asked, H200, given=True)
    assert lower.config == hopper_config(asked, 3, 2)
