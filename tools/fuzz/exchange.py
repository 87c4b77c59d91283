"""Exchanges between ranks, all of them in this process: draws what ranks have, runs torch's ops, judges every array."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

import moe_torch
from moe_core.parallel.header import Header
from moe_core.specs.exchange import TableSpec
from moe_torch.operators import routes as operators
from moe_torch.parallel import peer_ops
from tools.fuzz.case import Case
from tools.fuzz.data import TORCH, Draw, draw_ids, draw_rows
from tools.fuzz.direct import draw_direct, run_direct
from tools.fuzz.engines import device_of, running_on
from tools.fuzz.judge import Verdict
from tools.fuzz.memory import Memory, poisoned
from tools.fuzz.oracle import exchange as oracle
from tools.fuzz.oracle.direct import direct_results
from tools.fuzz.oracle.formats import quantize

Tensor = torch.Tensor
#: Rows that nothing should reach, behind those that there can be.
_SPARE = 3


def examine(case: Case, engine: str) -> Verdict:
    """What is wrong with one exchange on one engine. What a call raises is wrong."""
    if case.mode in ("peer", "direct"):
        size = 1 if case.rows_format else TORCH[case.dtype].itemsize
        case = dataclasses.replace(case, D=case.D * 16 // size)
    given, verdict = draw(case), Verdict()
    exact, numbers = _expected(case, given)
    try:
        with running_on(engine), torch.no_grad():
            run = {"peer": _peer, "direct": run_direct}.get(case.mode, _tables)
            found = run(case, given, torch.device(device_of(engine)))
    except Exception as error:
        verdict.complaints.append(f"torch raised {type(error).__name__}: {error}"[:600])
        return verdict
    if found.keys() != exact.keys() | numbers.keys():
        verdict.complaints.append(f"got {sorted(found)}, expected {sorted(exact.keys() | numbers.keys())}")
    for name, wanted in exact.items():
        verdict.bits(name, found[name].cpu(), wanted, any_nan=name == "taken" or name.startswith("scales"))
    for name, wanted in numbers.items():
        verdict.compare(name, found[name].cpu(), wanted)
    return verdict


def _expected(case: Case, given: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    if case.mode == "peer":
        return oracle.peer_results(case, given) | {"taken": oracle.taken(case, given)}, {}
    if case.mode == "direct":
        return direct_results(case, given)
    ranks = range(case.ranks)
    sent = [oracle.send_tables(case, given, rank) for rank in ranks]
    exact = {f"{name} {rank}": array for rank in ranks for name, array in sent[rank].tables.items()}
    if case.by_token or case.mode != "all_to_all":
        for rank in ranks:
            received = oracle.receive_tables(case, given, sent, rank)
            exact |= {f"{name} {rank}": array for name, array in received.items()}
            if case.mode != "all_to_all":
                exact[f"spoilt {rank}"] = sent[rank].tables["lost"]
    return exact, {}


def bound_of(case: Case, most: int) -> int | None:
    """The rows that the case's bound allows where `most` come, None = all."""
    return {"": None, "0": 0, "1": 1, "less": max(0, most - 1), "all": most}[case.bound]


def draw(case: Case) -> dict[str, Any]:
    """What the ranks of a case have: lists by rank, on the host."""
    draw = Draw(case, "cpu")
    whole, tokens = draw.uniform(case.ranks) < 0.5, draw.integers(0, case.T + 1, case.ranks)
    # Blocks are of as many tokens on every rank.
    tokens = torch.where(whole | (case.mode in ("padded", "all_gather")), case.T, tokens).tolist()
    W, K, per_rank = case.ranks, case.K, case.per_rank
    given: dict[str, Any] = {"per_rank": per_rank, "num_places": W * per_rank}
    ids = [draw_ids(draw, case, own, K, case.num_ids) for own in tokens]
    if case.id_kind == "one_expert" and case.seed % 2:  # one rank instead
        ids = [torch.where(own >= 0, own % per_rank, own) for own in ids]
    given["weights"] = [draw.normal(own, K, dtype="float32") for own in tokens]
    if case.mode == "direct":
        return given | _places(draw, case, ids) | {"ids": ids} | draw_direct(draw, case, tokens)
    if case.mode != "peer":
        return given | {"ids": ids} | _draw_tables(draw, case, ids)
    if case.by_token:  # as physical ids are
        ids = [torch.where((own >= 0) & (own < W * per_rank), own, -1) for own in ids]
        given |= {"going": [oracle.first_visits(own, per_rank) for own in ids], "num_places": W}
    given |= {"ids": ids, "going": given.get("going", ids)}
    most = oracle.most_rows(given["going"], given["num_places"])
    given["receive"] = bound_of(case, most)
    rows = max(1, (most if given["receive"] is None else given["receive"]) + _SPARE * (case.seed % 2))
    given["x"] = [draw_rows(draw, dataclasses.replace(case, T=own)) for own in tokens]
    given["results"] = [draw_rows(draw, dataclasses.replace(case, T=rows)) for _ in tokens]
    given["numbers"] = [draw.normal(rows, dtype="float32") for _ in tokens]
    kinds = {"x": (rows, case.D, TORCH[case.dtype]), "home": (max(1, case.T * K), case.D, TORCH[case.dtype])}
    kinds |= {
        "weights": (rows, 1, torch.float32),
        "sources": (rows, 2, torch.int32),
        "taken": (11, case.D, TORCH[case.dtype]),
    }
    if case.rows_format:
        kinds |= {"x": (rows, case.D, torch.uint8), "scales": (rows, -(-case.D // 128), torch.float32)}
    given["empty"] = {name: poisoned(*kind) for name, kind in kinds.items()}
    # What an owner's rows are that arrived once.
    given["held"] = draw_rows(draw, dataclasses.replace(case, T=5))
    if case.rows_format:
        given["held"], given["held_scales"], _ = quantize(given["held"].float(), case.rows_format, "out_in")[0]
    given["take"] = draw.integers(-2, 7, 11, 1).to(torch.int32)
    given["filled"] = (11, 0, 8, 99, -3)[case.seed % 5]
    return given


def _places(draw: Draw, case: Case, ids: list[Tensor]) -> dict[str, Any]:
    """Where experts lie, and which tokens are masked."""
    W, per_rank = case.ranks, case.per_rank
    places = list(range(W * per_rank))
    if case.seed % 4:
        places = torch.randperm(W * per_rank, generator=draw.random).tolist()
    places_of = [[place] for place in places[: case.E]]
    for place in places[case.E :]:
        more = places_of[int(draw.integers(0, case.E, 1))]
        if case.replicas and all(other // per_rank != place // per_rank for other in more):
            more.append(place)
    places_of = [sorted(own) for own in places_of]
    given: dict[str, Any] = {"places_of": places_of, "header": torch.arange(1, len(Header._fields) + 1).int()}
    given["masks"] = [draw.uniform(len(own)) < 0.7 if case.masked else None for own in ids]
    return given


def _draw_tables(draw: Draw, case: Case, ids: list[Tensor]) -> dict[str, Any]:
    """Where experts lie, and the bounds of blocks, or what owners take of each rank."""
    W, per_rank = case.ranks, case.per_rank
    given = _places(draw, case, ids)
    none = {"kept": [[2**31 - 1] * W] * W, "block": 2**31 - 1, "back": 2**31 - 1}
    weights = [torch.zeros(own.shape) for own in ids]
    given |= {"ids": ids, "per_rank": per_rank} | none | {"weights": weights}
    unbound = [oracle.send_tables(dataclasses.replace(case, mode="all_to_all"), given, rank) for rank in range(W)]
    going = [[len(own) for own in one.rows] for one in unbound]
    if case.mode == "all_to_all":
        receive = bound_of(case, max(map(sum, zip(*going, strict=True))))
        if receive is not None:
            given["kept"] = [
                [max(0, receive - sum(own[owner] for own in going[:rank])) for owner in range(W)] for rank in range(W)
            ]
    else:
        back = max(int(count) for one in unbound for count in one.tables["counted"])
        given["block"] = _or(bound_of(case, max(map(max, going))), max(map(max, going)))
        given["back"] = _or(bound_of(case, back), back) if case.by_token else given["block"]
    given.pop("weights")
    return given | {"weights": [draw.normal(*own.shape, dtype="float32") for own in ids]}


def _or(bound: int | None, other: int) -> int:
    return other if bound is None else bound


def _peer(case: Case, given: dict[str, Any], device: torch.device) -> dict[str, Tensor]:
    """Counts, places, rows, what goes beside them, and the ways home."""
    ranks, P = range(case.ranks), given["num_places"]
    on = {name: [one.to(device) for one in own] for name, own in given.items() if isinstance(own, list)}
    memory = {name: Memory(empty, case.ranks, device) for name, empty in given["empty"].items()}
    memory["results"] = Memory(given["results"], case.ranks, device)
    memory["numbers"] = Memory(given["numbers"], case.ranks, device)
    counts = Memory(torch.full((case.ranks, P), -1, dtype=torch.int32), case.ranks, device)
    num_rows = len(given["empty"]["x"])
    options: dict[str, Any] = {"num_rows": num_rows}
    limited: dict[str, Any] = {"programs": case.programs or None}
    layouts = [moe_torch.make_layout(own, P) for own in on["going"]]
    for rank in ranks:
        peer_ops.push_counts(layouts[rank].group_sizes, counts.at, rank=rank)
    receive = num_rows if given["receive"] is None else given["receive"]
    places = [
        peer_ops.peer_places(on["going"][rank], layouts[rank], counts.own[rank], rank=rank, receive=receive)
        for rank in ranks
    ]
    format = moe_torch.format_named(case.rows_format) if case.rows_format else None
    scales = {} if format is None else {"format": format, "scales_at": memory["scales"].at}
    for rank in ranks:
        x = on["x"][rank]
        if case.seed % 3 == 0:  # rows may be strided
            x = torch.cat([x, x], 1)[:, : case.D]
        peer_ops.dispatch_push(x, places[rank], memory["x"].at, **options, **limited, **scales)
        if not case.by_token:
            weights, at = on["weights"][rank], memory["weights"].at
            peer_ops.push_routing(weights, places[rank], at, memory["sources"].at, rank=rank, **options)
    # Behind the last row sources are what an earlier call left.
    for rank, own in enumerate(places if not case.by_token else ()):
        filled = min(int(own.received.sum()), receive)
        memory["sources"].own[rank][filled:] = 0
        start = torch.tensor([0, filled], dtype=torch.int32, device=device)
        arrays = memory["results"].own[rank], memory["sources"].own[rank], start, memory["home"].at
        peer_ops.combine_push(*arrays, num_slots=len(given["empty"]["home"]), **limited)
        memory["sources"].own[rank][filled:] = given["empty"]["sources"][filled:].to(device)
    found: dict[str, Tensor] = {}
    for rank, own in enumerate(places):
        found |= {f"{name} {rank}": array for name, array in own._asdict().items()}
        found[f"numbers {rank}"] = peer_ops.combine_pull_weights(own, memory["numbers"].at, **options)
        names = ("x",) if case.by_token else ("x", "weights", "sources", "home")
        found |= {f"{name} {rank}": memory[name].own[rank] for name in names + ("scales",) * bool(scales)}
    start = torch.tensor([0, given["filled"]], dtype=torch.int32, device=device)
    arrays = given["held"].to(device), given["take"].to(device), start
    codes = {"scales": given["held_scales"].to(device), "dtype": TORCH[case.dtype]} if format else {}
    taken, filled = peer_ops.take_rows(*arrays, **codes, **limited), min(max(0, given["filled"]), 11)
    # What is behind the last row is anything.
    return found | {"taken": torch.cat([taken[:filled].cpu(), given["empty"]["taken"][filled:]])}


def _tables(case: Case, given: dict[str, Any], device: torch.device) -> dict[str, Tensor]:
    """`send_tables` of every rank, what travels, and `receive_tables`."""
    W, K, ranks = case.ranks, case.K, range(case.ranks)
    rows = "tokens" if case.by_token else "slots"
    bounds = (None, None) if case.mode == "all_to_all" else (given["block"], given["back"])
    spec = TableSpec(case.mode, rows, W, given["per_rank"], case.E, *bounds)
    flat = [place for own in given["places_of"] for place in own]
    empty = [place for place in range(spec.num_places) if place not in flat]
    start = torch.tensor([0, *map(len, given["places_of"])]).cumsum(0).int().to(device)
    fixed = torch.tensor(flat + empty, dtype=torch.int32, device=device), start, given["header"].to(device)
    tokens = torch.tensor([len(own) for own in given["ids"]], dtype=torch.int32, device=device)
    told = tokens if case.replicas else None
    sent: list[dict[str, Tensor]] = []
    for rank in ranks:
        mask = None if given["masks"][rank] is None else given["masks"][rank].to(device)
        arguments = {
            "ids": given["ids"][rank].to(device),
            "weights": given["weights"][rank].to(device),
            "places_of_experts": fixed[0],
            "start": fixed[1],
            "header": fixed[2],
            "token_mask": mask,
            "tokens": told,
            "spec": spec,
            "rank": rank,
        }
        limits = None
        if case.mode == "all_to_all" and case.bound:
            limits = torch.zeros(2, W, dtype=torch.int64)
            limits[0] = torch.tensor(given["kept"][rank])
            first = operators.SEND_TABLES.call(limits=limits.int().to(device), **arguments)
            slots = first[5].cpu()
            limits[1] = slots.cumsum(0) - slots
            limits = limits.int().to(device)
        names = ("places", "invalid_ids", "tokens_per_expert", "row_of_slot", "lost", "counted", "message")
        names += ("slot_of_row",) * (case.mode != "all_gather") + ("table",) * (case.mode == "all_to_all")
        sent.append(dict(zip(names, operators.SEND_TABLES.call(limits=limits, **arguments), strict=True)))
    went = [_went(case, given, own, rank) for rank, own in enumerate(sent)]
    found: dict[str, Tensor] = {}
    for rank, own in enumerate(sent):
        if case.mode == "all_to_all":
            own["table"] = own["table"][: sum(went[rank])]
        found |= {f"{name} {rank}": array for name, array in own.items()}
    if case.mode == "all_to_all" and not case.by_token:
        return found
    for rank in ranks:
        header: Any = (fixed[2], sent[rank]["lost"], None)
        if case.mode == "all_to_all":
            parts = [own["table"].split(went[home])[rank] for home, own in enumerate(sent)]
            came, counts = torch.cat(parts), torch.zeros(W, 10, dtype=torch.int32, device=device)
            counts[0, 8], header = len(came), (None, None, counts)
            places = came[:, :K]
            count = int(((places >= 0) & (places // given["per_rank"] == rank)).sum())
        else:
            came = torch.stack([own["message"] if case.mode == "all_gather" else own["message"][rank] for own in sent])
            count = W * (spec.block_rows if spec.by_slot else spec.back_rows)
        sizes = {"top_k": K, "num_rows": count, "num_tokens": len(given["ids"][rank])}
        names = ("own ids", "own weights") + ("own slots",) * case.by_token + ("spoilt",) * (header[0] is not None)
        tables = operators.RECEIVE_TABLES.call(
            came=came, header=header[0], lost=header[1], counts=header[2], results=None, spec=spec, rank=rank, **sizes
        )
        found |= {f"{name} {rank}": array for name, array in zip(names, tables, strict=True)}
    return found


def _went(case: Case, given: dict[str, Any], own: dict[str, Tensor], rank: int) -> list[int]:
    """The rows that go from a rank to each other one, with exact counts."""
    if case.mode != "all_to_all":
        return []
    counts = own["message"][:, len(given["header"]) :].cpu()
    sizes = counts[:, 0] if case.by_token else counts.sum(1)
    return torch.minimum(sizes, torch.tensor(given["kept"][rank])).tolist()
