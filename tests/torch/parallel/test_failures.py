"""Ranks that raise, disagree, die or are late: the others find out at once, or when their time is up, and say so."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import os
import sys
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from torch.distributed.device_mesh import DeviceMesh

from moe_core.parallel import ExchangeSpec, Placement
from moe_core.specs.matmul import Activation
from moe_core.specs.operands import RouterLogits, TopK
from moe_core.specs.routing import RouterSpec
from moe_torch import MoE
from moe_torch.parallel import ExpertParallel, moe, rollcall
from moe_torch.parallel.group import Ranks
from moe_torch.parallel.peer import symmetric
from tests.support.parallel.placements import placement_of
from tests.support.parallel.pool import Failed, Pool, ranks
from tests.support.parallel.torch import mesh_of, parallel_call, run_rank
from tests.support.parallel.twins import PLAIN, Problem, draw_problem
from tests.support.torch import running_on, to_torch

__all__ = ["ranks"]

WAYS = (ExchangeSpec(), ExchangeSpec("padded", "slots"), ExchangeSpec("all_gather"), ExchangeSpec("peer"))
every_way = pytest.mark.parametrize("way", WAYS, ids=lambda way: way.mode)
#: Seconds in which a failure is known everywhere.
SOON = 5


def raised(call: Any) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.fixture(autouse=True)
def in_time() -> Iterator[None]:
    start = time.monotonic()
    yield
    assert time.monotonic() - start < 20


def problem_of(tokens: tuple[int, ...] = (4, 4), top_k: int = 2, dtype: str = "float32", **options: Any) -> Problem:
    placement = Placement.linear(6, len(tokens))
    return draw_problem(1, placement, tokens, top_k, "random", dtype, PLAIN, **options)


def arguments(problem: Problem, way: ExchangeSpec) -> list[Any]:
    return [(problem, way, "reference", True, None)] * problem.placement.num_ranks


@every_way
@pytest.mark.parametrize(
    "what, kind",
    [
        ("option", "Unsupported"),
        ("weights", "InvalidInput"),
        ("columns of x", "InvalidInput"),
        ("experts", "InvalidInput"),
        ("bias", "InvalidInput"),
        ("replicas", "Unsupported"),
    ],
)
def test_a_rank_that_raises_is_named_at_once(ranks: Pool, way: ExchangeSpec, what: str, kind: str) -> None:
    good = problem_of((4, 4, 4))
    if what == "replicas":
        # Which need the tokens of all ranks first.
        placement = placement_of("replicas", 6, 3, 1)
        good = draw_problem(1, placement, (4, 4, 4), 2, "random", "float32", PLAIN)
    given = [(good, way, "reference", what != "replicas", None)] * 3
    broken = dataclasses.replace(given[1][0], spec=dataclasses.replace(PLAIN, apply_router_weight_on_input=True))
    if what == "weights":
        routing = given[1][0].routing
        broken = dataclasses.replace(given[1][0], routing=TopK(routing.ids, np.pad(routing.weights, ((0, 0), (0, 1)))))
    elif what not in ("option", "replicas"):
        experts = given[1][0].experts
        experts = {
            "columns of x": experts,
            "experts": dataclasses.replace(experts, down=experts.down.astype(np.float16)),
            "bias": dataclasses.replace(experts, down_bias=np.zeros((6, 13), np.float32)),
        }[what]
        x = given[1][0].x
        broken = dataclasses.replace(given[1][0], x=x[:, 1:] if what == "columns of x" else x, experts=experts)
    given[1] = (broken, *given[1][1:])
    start = time.monotonic()
    with pytest.raises(Failed) as caught:
        ranks.call(run_rank, given)
    assert time.monotonic() - start < SOON
    kinds = {rank: raised for rank, (raised, _) in caught.value.errors.items()}
    assert kinds == {0: "PeerFailed", 1: kind, 2: "PeerFailed"}
    assert caught.value.errors[0][1].startswith(f"rank 1 failed before mode {way.mode}")
    # The group goes on.
    ranks.call(run_rank, arguments(problem_of((4, 4, 4)), way))


@every_way
@pytest.mark.parametrize(
    "what", ["top_k", "placement", "way", "mode", "rows", "gradients", "d_model", "d_ff", "dtype", "activation"]
)
def test_ranks_that_disagree_all_raise(ranks: Pool, way: ExchangeSpec, what: str) -> None:
    given = arguments(problem_of(), way)
    problem, *rest = given[1]
    if what == "top_k":
        problem = problem_of(top_k=3)
    elif what == "placement":
        problem = dataclasses.replace(problem, placement=Placement.round_robin(6, 2))
    elif what == "way":
        rest[0] = dataclasses.replace(way, on_overflow="drop")
    elif what == "mode":
        # Whose next messages have other sizes.
        rest[0] = WAYS[WAYS.index(way) - 1]
    elif what == "rows":
        rest[0] = ExchangeSpec(way.mode if way.mode != "all_gather" else "peer", "slots", receive=5)
    elif what == "activation":
        problem = dataclasses.replace(problem, spec=dataclasses.replace(PLAIN, activation=Activation("gelu")))
    elif what in ("d_model", "d_ff", "dtype"):
        sizes = {"d_model": (16, 8), "d_ff": (12, 4)}.get(what, (12, 8))
        problem = problem_of(dtype="bfloat16" if what == "dtype" else "float32", sizes=sizes)
    else:
        rest[2] = False
    given[1] = (problem, *rest)
    start = time.monotonic()
    with pytest.raises(Failed) as caught:
        ranks.call(run_rank, given)
    assert time.monotonic() - start < SOON
    for kind, text in caught.value.errors.values():
        assert kind == "InvalidInput" and text.startswith("all ranks must agree before mode ")
        assert ", got another " in text
    assert len(caught.value.errors) == 2


def in_another_order(group: Any, way: ExchangeSpec) -> list[str]:
    """What ranks raise if they call equal layers, backwards or a copy in another order, and an output after it."""
    rank, parallel = torch.distributed.get_rank(group), ExpertParallel(mesh_of(group), way, max_tokens=4)
    torch.manual_seed(0)
    first, second = (MoE(8, 4, 6, 2, expert_parallel=parallel) for _ in range(2))
    x, copied = torch.randn(4, 8), copy.deepcopy(first)

    def pick(*calls: Any) -> Any:
        return calls[rank]

    with running_on("reference"):
        y = [layer(x).sum() for layer in (first, second)]
        found = [raised(pick(lambda: first(x), lambda: second(x))), raised(lambda: pick(*y).backward())]
        found.append(raised(pick(lambda: first(x), y[1].backward)))
        found.append(raised(pick(lambda: first(x), lambda: copied(x))))
        return [*found, str(first(x).isfinite().all().item())]


@every_way
def test_calls_in_another_order_are_named_on_all_ranks(ranks: Pool, way: ExchangeSpec) -> None:
    results = ranks.call(in_another_order, [(way,)] * 2)
    for rank, (forward, backward, direction, copied, later) in enumerate(results):
        start = f"InvalidInput: all ranks must agree before mode {way.mode}, layer "
        number = [int(text.removeprefix(start).split(",")[0]) for text in (forward, copied)]
        assert later == "True" and number[1] == number[0] - (rank == 1)
        for text, what in (
            (forward, "layer"), (backward, "layer"), (direction, "layer and direction"), (copied, "number of calls"),
        ):  # fmt: skip
            assert f"got another {what} on rank 1: rank 1 has layer " in text and "; rank 0 has layer" in text, text


@pytest.mark.parametrize("way", (*WAYS[:2], ExchangeSpec("peer", "slots")), ids=lambda way: way.mode)
def test_rows_beyond_a_bound_are_an_error_on_all_ranks(ranks: Pool, way: ExchangeSpec) -> None:
    problem = draw_problem(1, Placement.linear(6, 2), (4, 4), 2, "hot_rank", "float32", PLAIN, sizes=(16, 8))
    with pytest.raises(Failed) as caught:
        ranks.call(run_rank, arguments(problem, dataclasses.replace(way, receive=6)))
    for kind, text in caught.value.errors.values():
        assert kind == "InvalidInput" and text.startswith("exchange.receive must be enough for every rank, got 6 and ")
    assert len(caught.value.errors) == 2
    ranks.call(run_rank, arguments(problem, way))


@pytest.mark.parametrize("way", WAYS[1:3], ids=lambda way: way.mode)
def test_tokens_differ_where_messages_have_one_size(ranks: Pool, way: ExchangeSpec) -> None:
    with pytest.raises(Failed, match="got another tokens"):
        ranks.call(run_rank, arguments(problem_of((4, 3)), way))


def test_buffers_differ(ranks: Pool) -> None:
    given = [({"exchange": ExchangeSpec("peer"), "max_tokens": most}, problem_of()) for most in (4, 5)]
    for kind, text in ranks.call(parallel_call, given):
        assert kind == "InvalidInput" and "got another tokens on rank 1" in text


def test_wrong_arguments_are_named(ranks: Pool) -> None:
    problem = problem_of()
    found = ranks.call(parallel_call, [({"placement": Placement.linear(6, 4)}, problem)] * 2)
    assert all(kind == "InvalidInput" for kind, _ in found)
    assert found[0][1].startswith("placement must be of the 2 ranks of the mesh, got 6 experts on 4 ranks of 2")
    found = ranks.call(parallel_call, [({"max_tokens": 3}, problem)] * 2)
    assert found == [("InvalidInput", "x must have at most max_tokens = 3 tokens, got 4; raise max_tokens")] * 2
    for options, text in (({"exchange": ExchangeSpec(chunks=2)}, "exchange.chunks must not be 2"),):
        kind, message = ranks.call(parallel_call, [(options, problem)])[0]
        assert kind == "Unsupported" and text in message
    kind, message = ranks.call(parallel_call, [({"exchange": ExchangeSpec("peer")}, problem)])[0]
    assert kind == "InvalidInput" and "max_tokens must be given with mode 'peer'" in message
    kind, message = ranks.call(parallel_call, [({"timeout": 0}, problem)])[0]
    assert kind == "InvalidInput" and "timeout must be above 0" in message


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "ids": ({"ids": np.zeros((4, 2), np.bool_)}, "routing.ids must be int32 or int64 or int16 or"),
    "weights": (
        {"weights": np.zeros((4, 2))},
        "routing.weights must be float32 or bfloat16 or float16, got float64; cast it to float32",
    ),
    "tokens": ({"ids": np.zeros((3, 2), np.int32)}, "routing.ids must be [4, top_k], got (3, 2); pass an array of"),
    "columns": (
        {"ids": np.zeros((2, 4), np.int32).T, "weights": np.zeros((4, 2), np.float32)},
        "routing.ids must be row-major contiguous, got strides (1, 4); make it contiguous first",
    ),
    "options": (
        {"spec": dataclasses.replace(PLAIN, router=RouterSpec(2))},
        "spec.router must be None when ids and weights are given; remove one of the two",
    ),
    "rows of x": ({"x": np.zeros((12, 4), np.float32).T}, "x must have dense rows (last stride 1), got strides (1, 4)"),
    "nothing": ({"ids": None}, "routing.ids must be a torch.Tensor, got NoneType; convert it"),
    "logits": (
        {"logits": np.zeros((4, 7), np.float32)},
        "routing must score the tokens of x for all experts of placement, [4, 6], got [4, 7]; pass what was made for",
    ),
}


@every_way
@pytest.mark.parametrize("what", WRONG)
def test_wrong_routings_are_named(ranks: Pool, way: ExchangeSpec, what: str) -> None:
    changes, text = WRONG[what]
    problem = problem_of()
    if what == "logits":
        spec = dataclasses.replace(PLAIN, router=RouterSpec(2))
        problem = dataclasses.replace(problem, routing=RouterLogits(np.zeros((8, 6), np.float32)), spec=spec)
    options = {"exchange": way, "max_tokens": 4}
    for kind, message in ranks.call(parallel_call, [(options, problem, changes)] * 2):
        assert kind == "InvalidInput" and message.startswith(text)


def outside(group: Any) -> list[str]:
    """What ranks raise for a group, and for a mesh, of the first two."""
    others = torch.distributed.new_group([0, 1])
    mesh = DeviceMesh("cpu", [0, 1], mesh_dim_names=("ep",))
    return [raised(lambda one=one: ExpertParallel(one, ExchangeSpec("peer"), max_tokens=4)) for one in (others, mesh)]


def test_a_rank_outside_of_the_mesh_is_named(ranks: Pool) -> None:
    for rank, found in enumerate(ranks.call(outside, [()] * 4)):
        if rank < 2:
            assert found == ["", ""]
            continue
        for text in found:
            assert text.startswith("InvalidInput: mesh must have this process among its ranks, got "), text
            assert f"in rank {rank} of all" in text


def without_memory(group: Any, problem: Problem) -> list[str]:
    """What a call raises where rank 1 has no memory to share, and the next one, which needs none."""
    rank = torch.distributed.get_rank(group)
    own, found = problem.ranks()[rank], []
    x, experts, routing = to_torch((own.x, own.experts, own.routing))
    full = mock.patch.object(symmetric.os, "posix_fallocate", side_effect=OSError("No space left on device"))
    with full if rank == 1 else contextlib.nullcontext():
        for way in (ExchangeSpec("peer"), ExchangeSpec("padded")):
            options: Any = {"parallel": ExpertParallel(group, way, max_tokens=99), "placement": problem.placement}
            found.append(raised(lambda options=options: moe(x, experts, routing, PLAIN, **options)))
    return found


def test_ranks_that_cannot_share_memory_all_raise(ranks: Pool) -> None:
    start = time.monotonic()
    for first, second in ranks.call(without_memory, [(problem_of((4, 4, 4)),)] * 3):
        assert first.startswith("Unsupported: mode 'peer' needs ranks that reach each other's memory, got on rank 1: ")
        assert second == ""
    assert time.monotonic() - start < SOON


def die(group: Any, *arguments: Any) -> Any:
    os._exit(3)


def crash(group: Any, *arguments: Any) -> Any:
    """As a script does that raises outside of every layer."""
    try:
        raise ValueError("no more data")
    except ValueError as error:
        sys.excepthook(type(error), error, error.__traceback__)
    os._exit(1)


def one_layer(group: Any) -> None:
    parallel = ExpertParallel(mesh_of(group))
    MoE(8, 4, 6, 2, expert_parallel=parallel)(torch.ones(4, 8))


def sleep(group: Any, seconds: float) -> Any:
    time.sleep(seconds)


def read_after_an_abort(group: Any) -> list[str]:
    """Errors of a rank for headers that NCCL did not bring: zeros, or what the memory held."""
    rollcall.register(group)
    own = Ranks(group)
    return [raised(functools.partial(own.compare, np.full((own.size, 8), number, np.int32))) for number in (0, 3)]


def test_headers_of_an_aborted_message_are_an_error_with_all_ranks(ranks: Pool) -> None:
    for rank, errors in enumerate(ranks.call(read_after_an_abort, [()] * 2)):
        for error in errors:
            assert error.startswith(f"RuntimeError: arrival of headers in the exchange failed on rank {rank} of 2: ")
            assert error.endswith(f"; rank {1 - rank} failed too, in the exchange")


@pytest.mark.parametrize(
    ("end", "verdict"),
    [
        (die, "rank 1 is gone: its process has ended"),
        (crash, "rank 1 raised an error that ended it: ValueError: no more data"),
    ],
)
def test_a_rank_that_dies_is_named_with_the_layer(end: Any, verdict: str) -> None:
    pool = Pool(3)
    try:
        pool.call(one_layer, [()] * 3)
        for rank in range(3):
            pool.pipes[rank].send((end if rank == 1 else one_layer, 3, ()))
        for rank in (0, 2):
            good, (kind, text, _) = pool.result(rank)
            assert not good and kind == "RuntimeError"
            assert text.startswith(f"all_gather of header in mode all_to_all, layer 2 failed on rank {rank} of 3: "), (
                text
            )
            assert verdict in text, text
    finally:
        pool.close()


@pytest.mark.parametrize("timeout", [None, 1.5])
def test_a_rank_that_is_late_is_an_error_elsewhere(timeout: float | None) -> None:
    """After the time of the group, or of ExpertParallel."""
    pool = Pool(2, timeout=2 if timeout is None else 30)
    try:
        given = arguments(problem_of(), WAYS[0])[0]
        pool.start(run_rank, [given] * 2)
        assert all(pool.result(rank)[0] for rank in range(2))
        pool.pipes[1].send((sleep, 2, (8,)))
        pool.pipes[0].send((parallel_call, 2, ({"timeout": timeout}, given[0])))
        start = time.monotonic()
        good, (kind, text) = pool.result(0)
        assert time.monotonic() - start < 2 * SOON, "a roll call takes 2 seconds"
        assert good and kind == "RuntimeError"
        assert text.startswith("all_gather of header in mode all_to_all failed on rank 0 of 2")
        assert text.endswith("rank 1 does not answer, so it died, is late or called something else")
    finally:
        pool.close()
