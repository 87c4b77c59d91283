"""Stores and loads at peers' addresses on tensors: ranks of one process, against one device, on every engine."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch._subclasses.fake_tensor import FakeTensorMode

import moe_torch
from moe_core.errors import InvalidInput, Unsupported
from moe_torch.parallel import peer_ops
from tests.support.torch import on_engines, running_on

W, L, K, D, R = 3, 2, 3, 40, 30
TOKENS = (6, 0, 5)


class Ranks:
    """Tensors of one name at every rank, all in this process, and their table."""

    def __init__(self, device: Any) -> None:
        self.device = device
        random = torch.Generator().manual_seed(0)
        self.ids = [torch.randint(-1, W * L, (tokens, K), generator=random, dtype=torch.int32) for tokens in TOKENS]
        self.x = [torch.randn(tokens, D, generator=random).bfloat16() for tokens in TOKENS]
        self.weights = [torch.rand(tokens, K, generator=random) for tokens in TOKENS]
        self.ids, self.x, self.weights = [[one.to(device) for one in own] for own in (self.ids, self.x, self.weights)]

    def make(self, *shape: int, dtype: Any) -> tuple[list[Any], Any]:
        size = int(np.prod(shape)) * torch.empty((), dtype=dtype).element_size()
        found = [torch.full((size,), 0xFF, dtype=torch.uint8, device=self.device) for _ in range(W)]
        return [one.view(dtype).view(shape) for one in found], torch.tensor(
            [one.data_ptr() for one in found], device=self.device
        )

    def places(self, receive: int = R) -> list[peer_ops.PeerPlaces]:
        counts, counts_at = self.make(W, W * L, dtype=torch.int32)
        layouts = [moe_torch.make_layout(own, W * L) for own in self.ids]
        for rank, layout in enumerate(layouts):
            peer_ops.push_counts(layout.group_sizes, counts_at, rank=rank, memory=counts[rank])
        found = zip(self.ids, layouts, counts, strict=True)
        return [peer_ops.peer_places(*one, rank=rank, receive=receive) for rank, one in enumerate(found)]


@on_engines
def test_there_and_back(engine: str) -> None:
    """Every row comes to the expert of its slot, in order; results times weights come home and are added in order."""
    with running_on(engine) as device:
        ranks = Ranks(device)
        places = ranks.places()
        rows, rows_at = ranks.make(R, D, dtype=torch.bfloat16)
        weights, weights_at = ranks.make(R, dtype=torch.float32)
        sources, sources_at = ranks.make(R, 2, dtype=torch.int32)
        slots, slots_at = ranks.make(max(TOKENS) * K, D, dtype=torch.bfloat16)
        for rank, own in enumerate(places):
            peer_ops.dispatch_push(ranks.x[rank], own, rows_at, num_rows=R, programs=2, memory=rows[rank])
            peer_ops.push_routing(ranks.weights[rank], own, weights_at, sources_at, rank=rank, num_rows=R)
        whole, flat = torch.cat(ranks.ids).view(-1), torch.cat(ranks.weights).view(-1)
        for rank, own in enumerate(places):
            ids, layout = moe_torch.layout_of_runs(own.received, R)
            wanted = torch.cat([torch.nonzero(whole == rank * L + local).view(-1) for local in range(L)])
            arrived = int(layout.group_start[-1])
            assert arrived == len(wanted) == int((ids >= 0).sum()) and own.overflow.tolist() == [0]
            torch.testing.assert_close(rows[rank][:arrived], torch.cat(ranks.x)[wanted // K], rtol=0, atol=0)
            torch.testing.assert_close(weights[rank][:arrived], flat[wanted], rtol=0, atol=0)
            home, slot = sources[rank][:arrived].long().unbind(1)
            first = torch.tensor([0, TOKENS[0], TOKENS[0]], device=device) * K
            torch.testing.assert_close(first[home] + slot, wanted)
            # What an owner gives back, in the place of what it got.
            rows[rank][:arrived] = moe_torch.scale_rows(rows[rank][:arrived], weights[rank][:arrived, None])
        for rank, own in enumerate(places):
            start = moe_torch.layout_of_runs(own.received, R)[1].group_start
            peer_ops.combine_push(rows[rank], sources[rank], start, slots_at, num_slots=max(TOKENS) * K)
        for rank, own in enumerate(places):
            x, ids = ranks.x[rank], ranks.ids[rank]
            products = moe_torch.scale_rows(x.repeat_interleave(K, 0), ranks.weights[rank].view(-1, 1))
            layout = moe_torch.make_layout(ids, W * L)
            expected = moe_torch.reduce(products, layout, order="slot")
            assert torch.equal(moe_torch.reduce(slots[rank][: ids.numel()], layout, order="slot"), expected)
            found = peer_ops.combine_pull_weights(own, weights_at, num_rows=R)
            assert torch.equal(found, torch.where(ids < 0, 0, ranks.weights[rank]))


@on_engines
def test_rows_are_quantised_as_they_go(engine: str) -> None:
    format = moe_torch.ops.format_named("fp8_group")
    with running_on(engine) as device:
        ranks = Ranks(device)
        ranks.x = [torch.randn(tokens, 400, device=device) for tokens in TOKENS]
        codes, codes_at = ranks.make(R, 400, dtype=torch.float8_e4m3fn)
        scales, scales_at = ranks.make(R, 4, dtype=torch.float32)
        for rank, own in enumerate(ranks.places()):
            peer_ops.dispatch_push(ranks.x[rank], own, codes_at, num_rows=R, format=format, scales_at=scales_at)
            expected = moe_torch.quantize_rows(ranks.x[rank], format)
            token, k = torch.nonzero(own.rows >= 0, as_tuple=True)
            for owner, row, one in zip(own.owners[token, k].tolist(), own.rows[token, k].tolist(), token, strict=True):
                assert torch.equal(codes[owner][row].view(torch.uint8), expected.values[one].view(torch.uint8))
                assert torch.equal(scales[owner][row], expected.scales[one])


@on_engines
def test_tokens_that_travel_once_are_copied_to_their_slots(engine: str) -> None:
    """Tokens and their routing to the places of owners, then rows of slots by the layout of the ids that arrived."""
    format = moe_torch.ops.format_named("fp8_group")
    with running_on(engine) as device:
        ranks = Ranks(device)
        slots = ranks.places()
        owners = [own // L for own in ranks.ids]
        for own in owners:
            for k in range(1, K):
                own[:, k] = torch.where((own[:, :k] == own[:, k : k + 1]).any(dim=1), -1, own[:, k])
        ids = [own.clamp(min=-1) for own in owners]
        counts, counts_at = ranks.make(W, W, dtype=torch.int32)
        layouts = [moe_torch.make_layout(own, W) for own in ids]
        for rank, layout in enumerate(layouts):
            peer_ops.push_counts(layout.group_sizes, counts_at, rank=rank)
        rows, rows_at = ranks.make(R, D, dtype=torch.bfloat16)
        # What goes beside a token: the places of its slots, as rows of 16 bytes.
        beside, beside_at = ranks.make(R, 4, dtype=torch.float32)
        for rank, own in enumerate(ids):
            places = peer_ops.peer_places(own, layouts[rank], counts[rank], rank=rank, receive=R)
            peer_ops.dispatch_push(ranks.x[rank], places, rows_at, num_rows=R)
            table = torch.nn.functional.pad(ranks.ids[rank], (0, 4 - K), value=-1).view(torch.float32)
            peer_ops.dispatch_push(table, places, beside_at, num_rows=R)
        there = [own.view(torch.int32)[:, :K] - rank * L for rank, own in enumerate(beside)]
        local = [torch.where((own >= 0) & (own < L), own, -1) for own in there]
        by_slot, by_slot_at = ranks.make(R, D, dtype=torch.bfloat16)
        for rank, own in enumerate(slots):
            peer_ops.dispatch_push(ranks.x[rank], own, by_slot_at, num_rows=R)
        for rank in range(W):
            arrived = int((local[rank] >= 0).any(dim=1).sum())
            assert int(counts[rank][:, rank].sum()) == arrived
            layout = moe_torch.make_layout(local[rank][:arrived], L)
            filled = int(layout.group_start[-1])
            assert filled == int(slots[rank].received.sum())
            token = (layout.slot_of_row // K).int()[:filled, None]
            taken = peer_ops.take_rows(rows[rank], token, layout.group_start, programs=3)
            assert torch.equal(taken, by_slot[rank][:filled])
            wide = torch.zeros(R, 48, device=device)
            wide[:, :D] = rows[rank].nan_to_num()
            codes = moe_torch.quantize_rows(wide, format)
            found = peer_ops.take_rows(
                codes.values, token, layout.group_start, scales=codes.scales, dtype=torch.bfloat16
            )
            assert torch.equal(found, moe_torch.dequantize(codes, torch.bfloat16)[token[:, 0].long()])


@on_engines
@pytest.mark.parametrize("out_dtype", ["bfloat16", "float32"])
def test_sums_are_written_to_rows_that_are_there(engine: str, out_dtype: str) -> None:
    dtype = getattr(torch, out_dtype)
    with running_on(engine) as device:
        y = torch.randn(6 * K, D, device=device).bfloat16()
        places = torch.arange(6 * K, dtype=torch.int32, device=device).view(6, K)
        places[1, 0], options = -1, {"shared": torch.randn(6, D, device=device)}
        memory = torch.full((9, D), torch.nan, dtype=dtype, device=device)
        found = peer_ops.sum_results(y, places, out=memory[1:7], **options)
        assert found.data_ptr() == memory[1].data_ptr()
        assert torch.equal(found, peer_ops.sum_results(y, places, out_dtype=dtype, **options))
        assert memory[[0, 7, 8]].isnan().all()
        with pytest.raises(InvalidInput, match=rf"out must be {out_dtype}\[6, 40\] like y and its tokens, got"):
            peer_ops.sum_results(y, places, out=memory)
        with pytest.raises(InvalidInput, match=f"out_dtype must be that of out, torch.{out_dtype}, got torch.float16"):
            peer_ops.sum_results(y, places, out=memory[1:7], out_dtype=torch.float16)
        with pytest.raises(InvalidInput, match="out must start at a multiple of 16 bytes"):
            peer_ops.sum_results(y, places, out=memory.view(-1)[1:][: 6 * D].view(6, D))


@on_engines
def test_rows_beyond_a_bound_stay_away(engine: str) -> None:
    with running_on(engine) as device:
        ranks = Ranks(device)
        whole = [int(own.received.sum()) for own in ranks.places()]
        bounded = ranks.places(min(whole) - 1)
        missing = sum(rows - min(whole) + 1 for rows in whole)
        assert [own.overflow.tolist() for own in bounded] == [[missing]] * W
        assert sum(int((own.rows >= 0).sum()) for own in bounded) == sum(whole) - missing


def test_what_compilers_are_told() -> None:
    """Nothing is returned by what stores, and memory is written to: so calls keep their order in traced programs."""
    with running_on("reference"):
        places = Ranks(torch.device("cpu")).places()[0]
        with FakeTensorMode(allow_non_fake_inputs=True):
            table, x = torch.ones(W, dtype=torch.int64), torch.ones(TOKENS[0], D)
            assert peer_ops.dispatch_push(x, places, table, num_rows=R) is None
            out = peer_ops.combine_pull_weights(places, table, num_rows=R)
            assert (out.shape, out.dtype) == ((TOKENS[0], K), torch.float32)
    for name in ("dispatch_push", "push_slots", "push_counts", "combine_push", "combine_pull_weights"):
        schema = getattr(torch.ops.moebius, name).default._schema
        assert schema.is_mutable and str(schema).count("!") == 1


def test_wrong_arguments() -> None:
    ranks = Ranks(torch.device("cpu"))
    places, table = ranks.places()[0], torch.tensor([16, 32, 48])
    x = ranks.x[0]
    for call, error, message in (
        (lambda: peer_ops.dispatch_push(x[:, :36].contiguous(), places, table, num_rows=R), InvalidInput,
         r"rows of x must be a multiple of 16 bytes, got 72 bytes of 36 bfloat16; pad d_model to a multiple of 8"),
        (lambda: peer_ops.dispatch_push(x[:2], places, table, num_rows=R), InvalidInput, r"places.rows must be \[2,"),
        (lambda: peer_ops.dispatch_push(x, places, table.int(), num_rows=R), InvalidInput, "rows_at must be int64"),
        (lambda: peer_ops.dispatch_push(x, places, table, num_rows=R, programs=0), InvalidInput, "programs must be"),
        (lambda: peer_ops.dispatch_push(x, places, table, num_rows=-1), InvalidInput, "num_rows must be"),
        (lambda: peer_ops.dispatch_push(x, places, table, num_rows=R, scales_at=table), InvalidInput,
         "scales_at must be None without a format"),
        (lambda: peer_ops.dispatch_push(x, places, table, num_rows=R, format=moe_torch.ops.format_named("fp8_token"),
                                        scales_at=table), Unsupported, "got fp8_token; take fp8_group"),
        (lambda: peer_ops.dispatch_push(x, places, table, num_rows=R, format=moe_torch.ops.format_named("fp8_group")),
         InvalidInput, "rows of codes must be a multiple of 16 bytes, got 40"),
        (lambda: peer_ops.push_routing(ranks.weights[0], places, table, None, rank=0, num_rows=-1), InvalidInput,
         "num_rows must be"),
        (lambda: peer_ops.combine_pull_weights(places, table, num_rows=-1), InvalidInput, "num_rows must be"),
        (lambda: peer_ops.push_routing(ranks.weights[0], places, None, None, rank=0, num_rows=R), InvalidInput,
         "weights_at or sources_at must be given"),
        (lambda: peer_ops.push_routing(ranks.weights[0], places, table, table[:2], rank=0, num_rows=R), InvalidInput,
         "as many ranks"),
        (lambda: peer_ops.dispatch_push(x.requires_grad_(), places, table, num_rows=R), Unsupported, "defines none"),
    ):  # fmt: skip
        with pytest.raises(error, match=message):
            call()
