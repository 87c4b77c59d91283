"""Exchange plans: what they list, against the twin; the choice of a mode."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_core.base import codec
from moe_core.errors import InvalidInput, Unsupported
from moe_core.formats import format_named
from moe_core.parallel import (
    ExchangePlan,
    ExchangeSpec,
    Link,
    Machine,
    Placement,
    choose_mode,
    plan_exchange,
)
from moe_core.parallel.exchange import physical_ids
from moe_core.parallel.machine import H200
from moe_core.parallel.messages import DeepEPMessages
from moe_core.parallel.tensor import TensorSplit
from tests.support.parallel.placements import placements
from tests.support.parallel.twin.routes import make_routes
from tests.support.parallel.twins import draw_ids_of
from tests.support.strategies import seeds

LINEAR = Placement.linear(8, 4)
#: Fewer ranks than a token has slots.
TWO = Placement.linear(8, 2)


def plan_of(spec: ExchangeSpec, placement: Placement = LINEAR, **options: Any) -> ExchangePlan:
    return plan_exchange(16, 4, 64, "bfloat16", placement, spec, **options)


def kinds(plan: ExchangePlan) -> list[str]:
    return [f"{message.kind} {message.what}" for message in (*plan.forward, *plan.backward)]


def test_rows_of_messages_and_buffers_by_hand() -> None:
    """16 tokens of 4 slots on each of two ranks: a token goes to both at most, and comes back once for every slot; an
    owner hands in what both ranks get."""

    def rows(spec: ExchangeSpec) -> list[int]:
        plan = plan_of(spec, TWO)
        sizes = {buffer.name: buffer.bytes // (64 * 2) for buffer in plan.buffers}
        sent = [message.rows for message in plan.forward if message.what.startswith(("rows", "results"))]
        return [*sent, sizes["sent rows"], sizes["received rows"], sizes["results"], sizes["returned results"]]

    assert rows(ExchangeSpec()) == [32, 128, 32, 32, 128, 64]
    assert rows(ExchangeSpec(rows="slots")) == [64, 128, 64, 128, 128, 64]
    assert rows(ExchangeSpec("padded")) == [32, 128, 32, 32, 128, 128]


def test_modes_are_chosen_for_placements_and_machines_alone() -> None:
    for arguments, name in (((LINEAR, 3), "machine"), (("linear", H200), "placement")):
        with pytest.raises(InvalidInput, match=f"{name} must be a "):
            choose_mode(8, *arguments)  # type: ignore[arg-type]


def test_too_many_rows_of_all_ranks_are_refused() -> None:
    plan = plan_exchange(16, 4, 64, "bfloat16", TWO, ExchangeSpec())
    for make in (lambda: plan.of_group(2**29), lambda: plan_exchange(2**28, 4, 64, "bfloat16", TWO, ExchangeSpec())):
        with pytest.raises(Unsupported, match="rows of all ranks must stay below 2\\*\\*31"):
            make()
    assert plan.of_group(2**29 - 1).expected_rows == 2**31 - 4
    with pytest.raises(InvalidInput, match="tokens must be at least this rank's 16, got 15"):
        plan.of_group(15)


def test_rows_of_deep_ep_beyond_a_node() -> None:
    for ranks, unit in ((8, 32), (9, 512)):
        _, routing, *_ = DeepEPMessages(10, 20, 2, ranks, "bfloat16", 1024).forward(6)
        assert routing.bytes == 10 * (unit + 12 * 2)


def test_messages_of_each_mode_in_order() -> None:
    assert kinds(plan_of(ExchangeSpec(), training=True)) == [
        *("all_to_all header and counts", "all_to_all rows, ids and weights", "all_to_all results"),
        *("all_to_all d_output", "all_to_all d_x", "all_to_all d_weights"),
    ]
    assert kinds(plan_of(ExchangeSpec(rows="slots"))) == [
        *("all_to_all header and counts", "all_to_all rows, weights", "all_to_all results")
    ]
    assert kinds(plan_of(ExchangeSpec("padded"))) == [
        *("all_to_all header, ids and weights", "all_to_all rows", "all_to_all results", "all_reduce overflow")
    ]
    assert kinds(plan_of(ExchangeSpec("all_gather"))) == [
        *("all_gather header, ids and weights", "all_gather rows", "all_to_all results", "all_reduce overflow")
    ]
    assert kinds(plan_of(ExchangeSpec("peer"))) == [
        *("push header, ids and weights", "push rows", "barrier arrival", "push results", "barrier arrival")
    ]
    barrier = "barrier arrival"
    assert kinds(plan_of(ExchangeSpec("peer"), training=True)) == [
        *(barrier, "push header, ids and weights", "push rows", barrier, "push results", barrier),
        *(barrier, "push d_output", barrier, "push d_x", "push d_weights", barrier),
    ]
    assert kinds(plan_of(ExchangeSpec("peer", receive=20)))[2:4] == ["push counts of what fits", "barrier arrival"]
    assert "push counts of what fits" not in kinds(plan_of(ExchangeSpec("peer", "slots", receive=20)))
    quantized = plan_of(ExchangeSpec(format=format_named("fp8_group")))
    assert [(message.what, message.dtype, message.bytes) for message in quantized.forward[1:3]] == [
        ("values", "float8_e4m3fn", 64 * 64),
        ("scales", "float32", 64 * 4),
    ]
    assert plan_of(ExchangeSpec()).host_reads == 1
    assert all(plan_of(ExchangeSpec(mode)).host_reads == 0 for mode in ("all_gather", "padded", "peer"))


#: (rows, bytes) of every message of 16 tokens, top 4, 64 columns of bf16, on 4 ranks of 2 places.
SIZES: list[tuple[ExchangeSpec, list[tuple[int, int]]]] = [
    (ExchangeSpec(), [(4, 160), (64, 10240), (128, 16384), (64, 8192), (128, 16384), (128, 512)]),
    (ExchangeSpec(rows="slots"), [(4, 160), (64, 9216), (128, 16384), (64, 8192), (128, 16384), (128, 512)]),
    (ExchangeSpec(receive=20), [(4, 160), (4, 32), (64, 10240), (40, 5120), (1, 4)]),
    (ExchangeSpec("padded"), [(64, 2176), (64, 8192), (128, 16384), (1, 4), (64, 8192), (128, 16384), (128, 512)]),
    (ExchangeSpec("padded", "slots", receive=67), [(64, 640), (64, 8192), (64, 8192), (1, 4)]),
    (ExchangeSpec("padded", receive=8), [(8, 384), (8, 1024), (16, 2048), (1, 4)]),
    (ExchangeSpec("all_gather"), [(16, 544), (16, 2048), (128, 16384), (1, 4)]),
    (ExchangeSpec("peer", "slots"), [(1, 80), (0, 0), (64, 768), (64, 8192), (0, 0), (128, 16384), (0, 0)]),
    (ExchangeSpec("peer", receive=64), [(1, 96), (0, 0), (1, 32), (0, 0), (64, 1024), (64, 8192), (0, 0)]),
    (ExchangeSpec("peer"), [(0, 0), (16, 560), (64, 8192), (0, 0), (256, 32768), (0, 0), (0, 0), (64, 8192)]),
]


@pytest.mark.parametrize(
    ("spec", "sizes"), SIZES, ids=lambda value: f"{value.mode}" if not isinstance(value, list) else ""
)
def test_sizes_of_messages(spec: ExchangeSpec, sizes: list[tuple[int, int]]) -> None:
    plan = plan_of(spec, training=True)
    found = [(message.rows, message.bytes) for message in (*plan.forward, *plan.backward)]
    assert found[: len(sizes)] == sizes


def test_sizes_of_buffers() -> None:
    assert [(buffer.name, buffer.bytes, buffer.symmetric) for buffer in plan_of(ExchangeSpec()).buffers] == [
        ("sent rows", 8192, False),
        ("received rows", 8192, False),
        ("received ids", 1024, False),
        ("received weights", 1024, False),
        ("results", 16384, False),
        ("returned results", 8192, False),
    ]
    peer = [plan_of(ExchangeSpec("peer", "slots"), training=training) for training in (False, True)]
    assert [(buffer.name, buffer.bytes, buffer.symmetric) for buffer in peer[0].buffers] == [
        ("received rows", 16384, True),
        ("received weights and origins", 1536, True),
        ("returned results", 8192, True),
    ]
    shared = 16384 + 1536 + 8192
    # The owner's op stores results at their homes: the output alone is left, or what the op needs before.
    assert peer[0].peak() == shared + 2048 and peer[0].peak(scratch=5000) == shared + 5000
    # Beside rows that training keeps, and gradients of weights.
    assert peer[1].peak() == shared + 512 + 16384 + 2048
    direct = plan_of(ExchangeSpec("peer"))
    assert [(buffer.name, buffer.bytes, buffer.symmetric) for buffer in direct.buffers] == [
        ("received rows", 8192, True),
        ("received ids and weights", 2048, True),
        ("returned results", 8192, True),
    ]
    assert direct.peak() == 8192 + 2048 + 8192 + 2048
    assert plan_of(ExchangeSpec("peer"), training=True).peak() == 8192 + 3072 + 8192 + 8192 + 2048
    plan = plan_of(ExchangeSpec())
    # Received rows, results and room for those that come home, and then the output.
    assert plan.peak() == 2048 + 8192 + 16384 + 8192 and plan.peak(scratch=100) == plan.peak() + 100
    assert plan_of(ExchangeSpec(), training=True).peak() == 2048 + 8192 + 16384 + 8192 + 2048
    assert plan.peak(10, 20) == 10 * 2 * 4 * 4 + 20 * 128 + 8192 + 2048, "the fewer come, the more home weighs"
    assert plan.peak(static=True) == 2048 + 2 * 16384, "rows of slots and results"
    assert plan.peak(10, 20) - plan.peak(10, 20, own=5) == 5 * 128, "a rank's own results are at home"
    assert f"peak       {plan.peak()} bytes at once" in plan.explain()
    bounded = plan_of(ExchangeSpec(receive=20))
    assert bounded.buffers[1].bytes == 20 * 128 and "bound      20 rows received; more" in bounded.explain()
    quantized = plan_of(ExchangeSpec("all_gather", format=format_named("fp8_group"))).buffers
    assert quantized[0].name == "received rows" and quantized[0].bytes == 64 * (64 + 4)


def test_chunks_travel_one_after_another() -> None:
    for mode in ("all_gather", "all_to_all", "padded", "peer"):
        once, thrice = (plan_of(ExchangeSpec(mode, chunks=chunks)) for chunks in (1, 3))
        sixth = plan_exchange(6, 4, 64, "bfloat16", LINEAR, ExchangeSpec(mode))
        assert thrice.host_reads == once.host_reads
        sets = [3 if buffer.symmetric else 2 for buffer in sixth.buffers]
        assert [number * buffer.bytes for number, buffer in zip(sets, sixth.buffers, strict=True)] == [
            buffer.bytes for buffer in thrice.buffers
        ]
        assert thrice.bounds == sixth.bounds and thrice.expected_tokens == once.expected_tokens
        if mode in ("all_gather", "padded"):
            assert thrice.forward == 3 * sixth.forward[:-1] + sixth.forward[-1:]
        elif mode == "peer":
            assert thrice.forward == 3 * sixth.forward
        else:
            assert thrice.forward[1:] == 3 * sixth.forward[1:] and thrice.forward[0].bytes > sixth.forward[0].bytes
        with pytest.raises(Unsupported, match=r"training moves all tokens at once, got chunks=3.*micro-batches"):
            plan_of(ExchangeSpec(mode, chunks=3), training=True)


def test_gradients_cross_between_hosts_as_rows_do() -> None:
    plan = plan_of(ExchangeSpec(hosts=2), training=True)
    out, back = ["between hosts", "inside a host"], ["inside a host", "between hosts"]
    assert [message.axis for message in plan.backward] == [*out, *back, *back]
    assert [message.axis for message in plan.forward][-4:] == [*out, *back]


def test_ranks_of_a_tensor_axis_compare_their_places_on_the_axis_of_experts() -> None:
    plan = dataclasses.replace(plan_of(ExchangeSpec()), tensor=TensorSplit(3, 1))
    assert [plan.tensor_header(rank).tensor >> 14 & 0x1FFF for rank in (0, 1, 6)] == [0, 1, 6]


def test_a_plan_is_frozen_cached_written_and_explained() -> None:
    plan = plan_of(ExchangeSpec("padded", "slots", receive=64), training=True)
    assert plan is plan_of(ExchangeSpec("padded", "slots", receive=64), training=True)
    assert codec.loads(codec.dumps(plan)) == plan and hash(plan) == hash(codec.loads(codec.dumps(plan)))
    text = plan.explain()
    for line in (
        "exchange padded: 16 tokens, top 4, bfloat16 [64], rows of slots",
        "8 experts on 4 ranks of 2, version 0",
        "1  all_to_all of rows: 64 rows, 8192 bytes of bfloat16",
        "bound      16 rows from each rank, 16 back; more are counted",
        "host       reads nothing",
        "tiles      as for 256 tokens and 8 experts",
        "bits       one device's",
    ):
        assert line in text, text
    assert "  tensor  " not in text, "every rank holds whole experts"
    assert "reads the counts once" in plan_of(ExchangeSpec()).explain()


@pytest.mark.parametrize(
    ("spec", "training", "reason"),
    [
        (ExchangeSpec(), True, None),
        (ExchangeSpec("padded", receive=8), True, None),
        (ExchangeSpec(chunks=2), False, None),
        (ExchangeSpec(format=format_named("fp8_group")), False, "format=fp8_group: rows are rounded"),
        (ExchangeSpec(receive=8, on_overflow="drop"), False, "receive=8: rows beyond it are dropped"),
    ],
)
def test_plans_say_whether_the_bits_are_one_devices(spec: ExchangeSpec, training: bool, reason: str | None) -> None:
    plan = plan_of(spec, training=training)
    assert plan.exact == (reason is None)
    if reason is not None:
        assert plan.why_not_exact[0].startswith(reason) and reason in plan.explain()


def test_tiles_are_chosen_for_the_whole_batch() -> None:
    tokens, slots = plan_of(ExchangeSpec()), plan_of(ExchangeSpec(rows="slots"))
    assert (tokens.expected_tokens, slots.expected_tokens) == (64, 256)
    assert tokens.expected_experts == slots.expected_experts == 8 and tokens.expected_rows == slots.expected_rows == 256
    assert plan_of(ExchangeSpec()).of_group(20).expected_tokens == 20
    assert plan_exchange(0, 4, 64, "bfloat16", LINEAR, ExchangeSpec()).expected_tokens == 1


@given(
    placement=placements(),
    seed=seeds(),
    tokens=st.integers(0, 7),
    mode=st.sampled_from(("all_gather", "all_to_all", "padded", "peer")),
    by_slot=st.booleans(),
    receive=st.sampled_from((None, 0, 1, 9, 100)),
)
def test_rows_of_a_plan_are_those_of_the_twin(
    placement: Placement, seed: int, tokens: int, mode: str, by_slot: bool, receive: int | None
) -> None:
    random = np.random.default_rng(seed)
    top_k = min(3, placement.num_experts)
    rows = "slots" if by_slot and mode != "all_gather" else "tokens"
    bound = None if mode == "all_gather" else receive
    spec = ExchangeSpec(mode, rows, bound)
    plan = plan_exchange(tokens, top_k, 8, "float32", placement, spec)
    ids = [draw_ids_of("hot_rank", random, tokens, top_k, placement) for _ in range(placement.num_ranks)]
    places = [physical_ids(own, placement, first_token=rank * tokens).places for rank, own in enumerate(ids)]
    routes = make_routes(places, placement, spec)
    received = {buffer.name: buffer.bytes // 32 for buffer in plan.buffers}
    if mode != "peer":
        given = next(message for message in plan.forward if message.what == "results").rows
        assert received["results"] == given
    for rank, source in enumerate(routes.sources):
        most = received["received rows"]
        assert len(source) == most if plan.bounds.block is not None else len(source) <= most
        assert routes.homes[rank].back_rows <= received["returned results"]
        back = int((routes.ids[rank] >= 0).sum())
        exact = {buffer.name: buffer.bytes // 32 for buffer in plan.buffers_of(len(source), back)}
        assert exact["received rows"] == len(source) and exact.get("results", back) == back
        assert back <= received.get("results", back)
    if mode == "padded" and bound is None:
        assert routes.overflow.tolist() == [0]


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        ({"tokens": -1}, InvalidInput, "tokens must be an integer of at least 0, got -1"),
        ({"top_k": 0}, InvalidInput, "top_k must be an integer of at least 1, got 0"),
        ({"d_model": 0}, InvalidInput, "d_model must be an integer of at least 1, got 0"),
        ({"dtype": "int8"}, InvalidInput, "dtype must be one of bfloat16, float16, float32, got 'int8'"),
        ({"placement": 4}, InvalidInput, "placement must be a Placement, got int"),
        ({"spec": "padded"}, InvalidInput, "spec must be an ExchangeSpec, got str"),
        ({"training": 1}, InvalidInput, "training must be True or False, got 1"),
        ({"tokens": 2**29}, Unsupported, r"rows of all ranks must stay below 2\*\*31"),
        ({"placement": Placement.balanced([1] * 8, 4, 3), "training": True}, Unsupported,
            "training needs every expert at one place, got 8 experts on 4 ranks of 3, 4 replicas"),
        ({"spec": ExchangeSpec(format=format_named("fp8_group")), "training": True}, Unsupported,
            "training moves rows as they are, got format=fp8_group"),
    ],
)  # fmt: skip
def test_wrong_exchanges_are_refused(change: dict[str, Any], kind: type[Exception], message: str) -> None:
    plain = dict(tokens=5, top_k=2, d_model=16, dtype="float32", placement=LINEAR, spec=ExchangeSpec())
    with pytest.raises(kind, match=message):
        plan_exchange(**{**plain, **change})


@pytest.mark.parametrize(
    ("tokens", "ranks", "options", "mode", "reason"),
    [
        (10**6, 1, {}, "all_gather", "one rank has all experts"),
        (64, 4, {}, "all_gather", "256 tokens of all ranks are at most 256: latency counts"),
        (65, 4, {}, "all_to_all", "exact counts"),
        (65, 4, {"capturable": True}, "padded", "the host may read nothing"),
        (65, 8, {"capturable": True, "symmetric": True}, "peer", "8 ranks of one domain of 8"),
        (1, 8, {"symmetric": True}, "peer", "8 ranks of one domain of 8"),
        (65, 16, {"symmetric": True}, "all_to_all", "exact counts"),
        (1, 16, {"symmetric": True}, "all_gather", "16 tokens of all ranks are at most 256"),
    ],
)
def test_modes_are_chosen_with_a_reason(
    tokens: int, ranks: int, options: dict[str, bool], mode: str, reason: str
) -> None:
    found, why = choose_mode(tokens, Placement.linear(32, ranks), dataclasses.replace(H200, measured=()), **options)
    assert found == mode and why.startswith(reason)


def test_wrong_machines_are_refused() -> None:
    with pytest.raises(InvalidInput, match=r"bandwidth must be above 0, got 0\.0"):
        Link(1.0, 0)
    with pytest.raises(InvalidInput, match=r"latency_us must be at least 0, got -1\.0"):
        Link(-1, 5)
    with pytest.raises(InvalidInput, match=r"tflops must be above 0, got -5\.0"):
        Machine(Link(1, 1), None, 8, -5, 1)
    with pytest.raises(InvalidInput, match=r"memory must be above 0, got 0\.0"):
        Machine(Link(1, 1), None, 8, 5, 0)
    with pytest.raises(InvalidInput, match=re.escape("nvlink must be a Link, got float")):
        Machine(1.0, None, 8, 5, 1)  # type: ignore[arg-type]
