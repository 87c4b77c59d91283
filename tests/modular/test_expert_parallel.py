"""Modular kernels across gloo ranks: the bits of one device, halves that overlap, and failures that are told."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

from moe_core.parallel import ExchangeSpec, Placement
from moe_core.specs.tuning import Tuning
from moe_torch.modular import FusedMoEQuantConfig
from tests.support.modular.ranks import (
    answers_of,
    compare_adapted_with_one_device,
    compare_with_one_device,
    failing_call,
    run_beside_a_shared_expert,
    run_by_hand,
    run_rank,
    tuning_of_rank,
)
from tests.support.parallel.placements import placement_of
from tests.support.parallel.pool import Pool, ranks, ranks_with_gpus
from tests.support.parallel.twins import PLAIN, Problem, draw_problem
from tests.support.torch import REAL_KERNELS

__all__ = ["ranks"]

GPUS = ranks_with_gpus()
WAYS = (
    ExchangeSpec("all_to_all"),
    ExchangeSpec("all_to_all", "slots"),
    ExchangeSpec("all_gather"),
    ExchangeSpec("peer"),
    ExchangeSpec("peer", "slots"),
)
every_way = pytest.mark.parametrize("way", WAYS, ids=lambda way: f"{way.mode}-{way.rows}")
#: load, placement, E, W, tokens of ranks, K
CASES = (
    ("random", "linear", 6, 4, (5, 5, 5, 5), 3),
    ("hot_expert", "round_robin", 7, 4, (9, 0, 3, 1), 3),
    ("hot_rank", "linear", 7, 2, (6, 6), 2),
    ("empty_rank", "balanced", 5, 4, (4, 0, 0, 2), 2),
    ("absent", "round_robin", 5, 2, (0, 7), 3),
    ("invalid", "linear", 8, 4, (3, 3, 3, 3), 4),
    ("random", "linear", 3, 4, (1, 1, 1, 1), 2),
    ("nothing", "linear", 4, 2, (2, 2), 2),
    ("random", "linear", 4, 2, (1, 0), 1),
)


def problem_of(
    case: tuple[Any, ...] = CASES[0],
    dtype: str = "float32",
    *,
    equal: bool = False,
    seed: int = 0,
    sizes: tuple[int, int] = (16, 8),
) -> Problem:
    load, kind, experts, size, tokens, top_k = case
    if equal:
        tokens = (max(tokens),) * size
    return draw_problem(seed, placement_of(kind, experts, size, seed), tokens, top_k, load, dtype, PLAIN, sizes=sizes)


@pytest.mark.parametrize("way", WAYS[3:], ids=lambda way: way.rows)
def test_batches_of_experts_have_every_bit_of_one_device(ranks: Pool, way: ExchangeSpec) -> None:
    for seed, case in enumerate(CASES):
        problem = problem_of(case, ("float32", "bfloat16")[seed % 2], seed=seed)
        compare_with_one_device(ranks, problem, way, f"{case}", experts="batched")


@every_way
def test_ids_of_adapters_travel_with_rows(ranks: Pool, way: ExchangeSpec) -> None:
    """Also where a rank has no tokens, or experts no rows."""
    for seed, case in enumerate((CASES[0], CASES[1] if way.mode != "all_gather" else CASES[4])):
        problem = problem_of(case, equal=way.mode == "all_gather", seed=seed)
        for experts in ("triton", "unfused", *(("batched",) if way.mode == "peer" else ())):
            compare_adapted_with_one_device(ranks, problem, way, experts)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@every_way
def test_every_bit_of_one_device(ranks: Pool, way: ExchangeSpec, dtype: str) -> None:
    for seed, case in enumerate(CASES):
        problem = problem_of(case, dtype, equal=way.mode == "all_gather", seed=seed)
        # On one device, ported experts look up whatever id they get.
        experts = ("triton", "slots", "unfused", "tokens", "oai")[seed % 5 if case[0] != "invalid" else 0]
        trained = seed % 2 == 0 or experts == "tokens"
        label = f"{case}, {experts}, {'trained' if trained else 'inference'}"
        compare_with_one_device(ranks, problem, way, label, experts=experts, trained=trained)


@pytest.mark.skipif(REAL_KERNELS != "interpreter", reason="gloo ranks run kernels in the interpreter alone")
@pytest.mark.parametrize("way, dtype, experts", [(0, "bfloat16", "triton"), (2, "float32", "unfused")])
def test_interpreted_kernels_give_every_bit_of_one_device(ranks: Pool, way: int, dtype: str, experts: str) -> None:
    """Experts that are loaded unevenly: an owner's tiles are those of all tokens."""
    problem = problem_of(("hot_rank", "round_robin", 3, 2, (4, 4), 2), dtype)
    compare_with_one_device(ranks, problem, WAYS[way], experts, engine="interpreter", experts=experts)


@pytest.mark.gpu
@pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")
def test_ranks_with_gpus_give_every_bit_of_one() -> None:
    pool = Pool(2, backend="nccl")
    try:
        for way in WAYS:
            for experts, trained in (("triton", True), ("unfused", False)):
                problem = problem_of(("hot_rank", "round_robin", 8, 2, (65, 65), 3), "bfloat16", sizes=(256, 192))
                label = f"{way}, {experts}"
                compare_with_one_device(pool, problem, way, label, engine="cuda", experts=experts, trained=trained)
    finally:
        pool.close()


@every_way
def test_experts_add_up_as_for_the_slots_and_experts_of_all_ranks(ranks: Pool, way: ExchangeSpec) -> None:
    problem = problem_of(("random", "linear", 7, 2, (5, 5), 3))
    found = ranks.call(tuning_of_rank, [(problem, way)] * 2)
    assert found == [Tuning(expected_tokens=30, expected_experts=7)] * 2


FAULTS = ("other_owner", "permuted_weights", "counts_off_by_one", "gradient_not_returned", "output_gradient_of_another")


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_noticed(ranks: Pool, fault: str) -> None:
    problem = problem_of(("random", "round_robin", 7, 3, (5, 2, 4), 2))
    compare_with_one_device(ranks, problem, WAYS[0], "no fault", trained=True)
    with pytest.raises((AssertionError, RuntimeError)):
        compare_with_one_device(ranks, problem, WAYS[0], fault, trained=True, fault=fault)


@pytest.mark.parametrize("way", WAYS[::2], ids=lambda way: way.mode)
def test_a_shared_expert_runs_while_tokens_travel(ranks: Pool, way: ExchangeSpec) -> None:
    problem = problem_of(("random", "linear", 6, 2, (5, 5), 2))
    for events, right in ranks.call(run_beside_a_shared_expert, [(problem, way)] * 2):
        assert right
        first = "header and counts" if way.mode == "all_to_all" else "rows"
        place = events.index("shared expert")
        if way.mode == "peer":
            # Rows are stored before, and waited for behind it.
            assert events.index("wait header and counts") < place < events.index("start rows")
            continue
        assert events.index(f"start {first}") < place < events.index(f"wait {first}")
        assert events.index("start results") < events.index("wait results") == len(events) - 1


def test_halves_and_wholes_are_called_by_hand(ranks: Pool) -> None:
    problem = problem_of(("random", "round_robin", 7, 2, (5, 3), 2))
    assert ranks.call(run_by_hand, [(problem,)] * 2) == [True, True]


def test_a_rank_that_raises_is_named_at_once(ranks: Pool) -> None:
    """Before prepare, where the kernel finds the mistake, and within."""
    problem = problem_of(("random", "linear", 6, 3, (4, 4, 4), 2))
    for change in ({"broken": 1}, {"broken": 1, "mode": "all_gather"}):
        start = time.monotonic()
        found = ranks.call(failing_call, [(problem, change)] * 3)
        assert time.monotonic() - start < 5
        assert [kind for kind, _ in found] == ["PeerFailed", "InvalidInput", "PeerFailed"]
        assert "topk_ids must have a row for each of the 3 tokens" in found[1][1]
        assert found[0][1].startswith("rank 1 failed before mode")
    changes: list[Any] = [{}, {"call": {"expert_map": np.zeros(6, np.int32)}}, {}]
    found = ranks.call(failing_call, [(problem, change) for change in changes])
    assert [kind for kind, _ in found] == ["PeerFailed", "InvalidInput", "PeerFailed"]
    assert "expert_map must be [-1, -1, 0, 1, -1, -1], as 6 experts on 3 ranks" in found[1][1]


MAP = np.array([0, 1, 2, -1, -1, -1], np.int32)
#: What a rank of one is told, with two places too few where the placement is of another size.
WRONG: tuple[tuple[dict[str, Any], str, str], ...] = (
    ({"part": {"placement": Placement.linear(6, 2)}}, "InvalidInput", "placement must be of the 1 ranks of the mesh"),
    ({"part": {"placement": Placement.linear(5, 1)}}, "InvalidInput", "w1 must have the 5 places of this rank, got 6"),
    ({"part": {"placement": 3}}, "InvalidInput", "placement must be a Placement"),
    ({"part": {"exchange": ExchangeSpec("padded")}}, "InvalidInput", "exchange.mode must be 'all_to_all'"),
    ({"part": {"exchange": ExchangeSpec(on_overflow="drop")}}, "Unsupported", "on_overflow must be 'error'"),
    ({"part": {"max_tokens": 3}}, "InvalidInput", "a1 must have at most max_tokens = 3 rows, got 4"),
    ({"call": {"global_num_experts": 7}}, "InvalidInput", "num_experts must be 6, those of 6 experts on 1 rank"),
    ({"call": {"expert_map": MAP}}, "InvalidInput", "expert_map must be [0, 1, 2, 3, 4, 5], as"),
    ({"call": {"apply_router_weight_on_input": True}}, "InvalidInput", "topk must be 1"),
    (
        {"experts": {"quant_config": FusedMoEQuantConfig.make(use_fp8_w8a8=True)}},
        "Unsupported",
        "must have a scale for",
    ),
    ({"call": {"expert_map": np.arange(6, dtype=np.int32), "global_num_experts": 6}}, "", ""),
    ({"experts": {"tuning": Tuning(batch_invariant=True)}}, "", ""),
)


@pytest.mark.parametrize("change, kind, text", WRONG, ids=[text or "right" for *_, text in WRONG])
def test_wrong_arguments_are_named(ranks: Pool, change: dict[str, Any], kind: str, text: str) -> None:
    found = ranks.call(failing_call, [(problem_of(("random", "linear", 6, 1, (4,), 2)), change)])
    assert found[0][0] == kind and text in found[0][1], found


def test_rows_beyond_a_bound_make_their_tokens_nan(ranks: Pool) -> None:
    problem = problem_of(("hot_rank", "linear", 4, 2, (5, 5), 1))
    way = ExchangeSpec(receive=4, on_overflow="nan")
    found = ranks.call(run_rank, [(problem, way, "reference", "triton", False, None)] * 2)
    whole = ranks.call(run_rank, [(problem, WAYS[0], "reference", "triton", False, None)] * 2)
    lost = 0
    for part, expected in zip(found, whole, strict=True):
        spoilt = np.isnan(part["output"]).all(axis=1)
        lost += spoilt.sum()
        # NumPy adds up few rows in another order than many.
        # NumPy adds up few rows in another order than many.
        np.testing.assert_allclose(part["output"][~spoilt], expected["output"][~spoilt], 1e-5)
    assert lost == 10 - 4


def test_what_the_parts_say_of_themselves(ranks: Pool) -> None:
    problem = problem_of(("random", "linear", 6, 2, (4, 4), 2))
    for mode in ("all_to_all", "all_gather"):
        assert ranks.call(answers_of, [(problem, mode)] * 2) == [(True, 9, 2, True, None, "Standard")] * 2
