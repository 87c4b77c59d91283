"""Exchanges through a stand-in for DeepEP's buffers, of both generations, against one device."""

from __future__ import annotations

import dataclasses
from typing import Any
from unittest import mock

import numpy as np
import pytest

pytest.importorskip("torch")

import torch.distributed as dist

from moe_core.errors import InvalidInput, Unsupported
from moe_core.parallel import ExchangeSpec
from moe_core.specs import RouterSpec, Tuning
from moe_torch.parallel import ExpertParallel, deep_ep, moe
from tests.support.modular.deep_ep import Buffer, ElasticBuffer
from tests.support.parallel.placements import placement_of
from tests.support.parallel.pool import Pool, ranks
from tests.support.parallel.torch import compare_with_one_device, run_group, run_rank
from tests.support.parallel.twins import LOADS, PLAIN, draw_problem
from tests.support.torch import to_torch

__all__ = ["ranks"]

SLOTS, TOKENS = (ExchangeSpec(rows=rows, transport="deep_ep") for rows in ("slots", "tokens"))
SIZES = ((5, 5, 5, 5), (9, 0, 3, 1), (0, 0, 0, 1))
#: An even number of tokens takes the older generation's buffer.
COLUMNS = (32, 8)


@pytest.mark.parametrize("kind", ["round_robin", "replicas"])
def test_every_bit_of_one_device(ranks: Pool, kind: str) -> None:
    trained = kind != "replicas"
    spec = PLAIN if trained else dataclasses.replace(PLAIN, tuning=Tuning(batch_invariant=True))
    for seed, load in enumerate(LOADS):
        placement, tokens = placement_of(kind, 7 + seed % 2, 4, seed), SIZES[seed % 3]
        problem = draw_problem(
            seed, placement, tokens, 2 if load == "repeated" else 3, load, "bfloat16", spec, sizes=COLUMNS
        )
        compare_with_one_device(ranks, problem, SLOTS, f"{placement}, {load}, {tokens}", differentiated=trained)
    spec = dataclasses.replace(spec, router=RouterSpec(2))
    problem = draw_problem(
        3, placement_of("linear", 6, 4), (5, 2, 0, 4), 2, "random", "bfloat16", spec, extras=True, sizes=COLUMNS
    )
    compare_with_one_device(ranks, problem, SLOTS, "a router and a shared expert", differentiated=trained)


def test_tokens_are_added_up_by_rank(ranks: Pool) -> None:
    """Within the roundings of rows to bf16; the parts of one rank have the bits of one device."""
    for tokens in SIZES[:2]:
        problem = draw_problem(1, placement_of("linear", 8, 4), tokens, 3, "random", "bfloat16", PLAIN, sizes=COLUMNS)
        results, alone = run_group(ranks, problem, TOKENS), problem.alone()
        alone |= problem.alone_backward(alone)
        for name in ("output", "d_x", "d_routing.weights", "d_experts.down", "d_experts.gate_up"):
            expected = alone[name].astype(np.float32)
            np.testing.assert_allclose(
                results[name].astype(np.float32), expected, 0, 2e-2 * np.abs(expected).max(), err_msg=name
            )
        assert results["tokens_per_expert"].sum() == problem.routing.ids.size


@pytest.mark.parametrize("fault", ["order", "back", "weights"])
def test_a_planted_fault_shows(ranks: Pool, fault: str) -> None:
    problem = draw_problem(4, placement_of("linear", 6, 2), (4, 3), 2, "random", "bfloat16", PLAIN, sizes=COLUMNS)
    results = ranks.call(faulty_rank, [(problem, SLOTS, fault)] * 2)
    expected = problem.alone()
    output = np.concatenate([one["output"] for one in results]).astype(np.float32)
    wrong = not np.array_equal(output, expected["output"].astype(np.float32))
    gradient = problem.alone_backward(expected)["d_routing.weights"]
    wrong |= not np.array_equal(np.concatenate([one["d_routing.weights"] for one in results]), gradient)
    assert wrong


def faulty_rank(group: Any, problem: Any, way: ExchangeSpec, fault: str) -> dict[str, Any]:
    real = deep_ep.BufferRoutes.__init__

    def broken(own: Any, *arguments: Any) -> None:
        real(own, *arguments)
        object.__setattr__(own, fault, getattr(own, fault).flip(0))

    with mock.patch.object(deep_ep.BufferRoutes, "__init__", broken):
        return run_rank(group, problem, way, "reference", True, None)


def refused(group: Any, problem: Any, exchange: ExchangeSpec, kind: Any, most: int, size: int | None = None) -> str:
    made: Any = {"older": Buffer, "newer": lambda own: ElasticBuffer(own, most)}.get(kind, lambda _: kind)(group)
    if size is not None:
        made.num_ranks = size
    x, experts, routing = to_torch(tuple(getattr(problem.ranks()[dist.get_rank(group)], name) for name in PARTS))
    try:
        parallel = ExpertParallel(group, exchange, buffer=made)
        moe(x, experts, routing, problem.spec, parallel=parallel, placement=problem.placement)
    except (InvalidInput, Unsupported) as error:
        return str(error)
    return ""


PARTS = ("x", "experts", "routing")


@pytest.mark.parametrize(
    "changes, buffer, text",
    [
        ({"way": ExchangeSpec()}, ("newer", 99), "buffer must be passed with exchange.transport='deep_ep' alone"),
        ({}, (None, 0), "buffer must be passed with exchange.transport='deep_ep' alone, got NoneType"),
        ({}, ("x", 0), "buffer must be a deep_ep.ElasticBuffer or deep_ep.Buffer"),
        ({}, ("newer", 99, 3), "buffer must be of the 2 ranks of mesh, got 3"),
        ({}, ("newer", 3), "buffer must be made for 8 rows of rows='slots'"),
        ({"columns": 24}, ("older", 0), "x must be bf16 with a multiple of 16 columns"),
        ({"dtype": "float32"}, ("older", 0), "x must be bf16"),
    ],
)
def test_what_it_refuses(ranks: Pool, changes: dict[str, Any], buffer: tuple[Any, ...], text: str) -> None:
    sizes, dtype = (changes.get("columns", 32), 8), changes.get("dtype", "bfloat16")
    problem = draw_problem(4, placement_of("linear", 6, 2), (4, 4), 2, "random", dtype, PLAIN, sizes=sizes)
    results = ranks.call(refused, [(problem, changes.get("way", SLOTS), *buffer)] * 2)
    assert all(text in said for said in results), results
