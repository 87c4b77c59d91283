"""Two pretended hosts of two gloo ranks against one device, bit by bit, and what crosses between them."""

from __future__ import annotations

import dataclasses
from typing import Any
from unittest import mock

import pytest

pytest.importorskip("torch")

import torch

from moe_core.parallel import ExchangeSpec, plan_exchange
from moe_core.specs import Tuning
from moe_torch.parallel import ExpertParallel
from moe_torch.parallel.group import Ranks
from tests.support.parallel.placements import placement_of
from tests.support.parallel.pool import Failed, Pool, ranks
from tests.support.parallel.torch import compare_with_one_device, mesh_of_hosts, run_rank
from tests.support.parallel.twin.ranks import moe as twin
from tests.support.parallel.twins import LOADS, PLAIN, draw_problem

__all__ = ["ranks"]

HOSTS = ExchangeSpec(hosts=2)
KINDS = ("linear", "round_robin", "balanced", "replicas")
TOKENS = ((5, 5, 5, 5), (9, 0, 3, 1), (0, 0, 0, 1))


@pytest.mark.parametrize("kind", KINDS)
def test_every_bit_of_one_device(ranks: Pool, kind: str) -> None:
    trained = kind != "replicas"
    spec = PLAIN if trained else dataclasses.replace(PLAIN, tuning=Tuning(batch_invariant=True))
    for seed, load in enumerate(LOADS):
        tokens, top_k = TOKENS[(seed + KINDS.index(kind)) % 3], 2 if load == "repeated" else 3
        placement, dtype = placement_of(kind, 7 + seed % 2, 4, seed), ("float32", "bfloat16")[seed % 2]
        problem = draw_problem(seed, placement, tokens, top_k, load, dtype, spec)
        for way in (HOSTS, *([ExchangeSpec(hosts=4)] if seed == 1 else [])):
            compare_with_one_device(ranks, problem, way, f"{placement}, {load}, {tokens}", differentiated=trained)


def messages_of(group: Any, *arguments: Any) -> list[tuple[str, str, int]]:
    """(kind, level, rows to other ranks) of a rank's messages, in order."""
    sent = []

    def watched(kind: str) -> Any:
        real = getattr(Ranks, f"start_{kind}")

        def start(own: Ranks, rows: torch.Tensor, what: str, *way: Any) -> Any:
            level = own.where.rpartition(", ")[2] if "hosts" in own.where else "experts"
            sent.append(
                (f"{kind} {what}", level, sum(way[0].sent) - way[0].sent[own.rank] if way and way[0].sent else 0)
            )
            return real(own, rows, what, *way)

        return mock.patch.object(Ranks, f"start_{kind}", start)

    with watched("all_gather"), watched("all_to_all"):
        run_rank(group, *arguments)
    return sent


def test_a_token_crosses_once_to_a_host(ranks: Pool) -> None:
    """And messages are those of the plan."""
    problem = draw_problem(2, placement_of("round_robin", 8, 4), (6, 6, 6, 6), 4, "random", "float32", PLAIN)
    homes = twin(problem.ranks(), PLAIN, problem.placement, HOSTS).routes.homes
    plan = plan_exchange(6, 4, 12, "float32", problem.placement, HOSTS, training=True)
    planned = [
        (f"{one.kind} {one.what}", one.axis.replace("a host", "hosts")) for one in (*plan.forward, *plan.backward)
    ]
    sent = ranks.call(messages_of, [(problem, HOSTS, "reference", True, None)] * 4)
    for rank, (home, messages) in enumerate(zip(homes, sent, strict=True)):
        away = home.places // problem.placement.per_rank // 2 != rank // 2
        once = int(away.any(axis=1).sum())
        between = [
            rows for what, level, rows in messages if level == "between hosts" and what[11:] in ("rows", "d_output")
        ]
        assert once < away.sum() and between == [once] * 2
        # On a CPU a header precedes the backward.
        assert sorted(planned + planned[:1]) == sorted(one[:2] for one in messages)
    assert plan.host_reads == 3 and "all_to_all between hosts of rows: 12 rows, 576 bytes" in plan.explain()


def refused(group: Any) -> list[str]:
    texts, mesh = [], mesh_of_hosts(2)
    calls: tuple[Any, ...] = (
        (mesh, ExchangeSpec("padded")),
        (mesh, ExchangeSpec(hosts=4)),
        (group, ExchangeSpec(hosts=2)),
        (mesh, ExchangeSpec(), None, mesh["local"]),
    )
    for arguments in calls:
        try:
            ExpertParallel(*arguments)
        except Exception as error:
            texts.append(f"{type(error).__name__}: {error}")
    return texts


def test_errors(ranks: Pool) -> None:
    expected = ("hosts must be 1 unless mode='all_to_all' moves tokens", "exchange.hosts must be those of mesh, got 4",
                "exchange.hosts must be those of mesh, got 2", "tensor must be None with a mesh of hosts")  # fmt: skip
    for texts in ranks.call(refused, [()] * 4):
        for text, start in zip(texts, expected, strict=True):
            assert text.partition(": ")[2].startswith(start)
    problem = draw_problem(1, placement_of("linear", 6, 4), (2, 2, 2, 2), 2, "random", "float32", PLAIN)
    given: list[Any] = [(problem, HOSTS, "reference", True, None)] * 4
    given[3] = (
        dataclasses.replace(problem, spec=dataclasses.replace(PLAIN, apply_router_weight_on_input=True)),
        *given[0][1:],
    )
    with pytest.raises(Failed) as caught:
        ranks.call(run_rank, given)
    assert [caught.value.errors[rank][0] for rank in range(3)] == ["PeerFailed"] * 3
    ranks.call(run_rank, [given[0]] * 4)


@pytest.mark.parametrize("fault", ["wrong_place", "wrong_rows", "counts_off_by_one", "gradient_not_returned"])
def test_planted_faults_are_seen(ranks: Pool, fault: str) -> None:
    problem = draw_problem(3, placement_of("linear", 6, 4), (4, 4, 4, 4), 2, "random", "float32", PLAIN)
    with pytest.raises(AssertionError):
        compare_with_one_device(ranks, problem, HOSTS, fault, fault=fault)
