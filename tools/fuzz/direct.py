"""Exchanges of ranks where every token has its place at every owner: what they have, and torch's ops on it."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from moe_core.parallel import Placement
from moe_core.parallel.header import Header
from moe_torch.parallel import peer_ops
from tools.fuzz.case import Case
from tools.fuzz.data import TORCH, Draw, draw_rows
from tools.fuzz.memory import Memory, poisoned

Tensor = torch.Tensor
_HEADER = len(Header._fields)


def draw_direct(draw: Draw, case: Case, tokens: list[int]) -> dict[str, Any]:
    """Beside ids, masks, weights and where experts lie, see `tools.fuzz.exchange.draw`."""
    W, K, most, seed = case.ranks, case.K, max(1, case.T), case.seed
    headers = [torch.arange(1, _HEADER + 1, dtype=torch.int32) for _ in range(W)]
    if seed % 5 == 0:
        headers[-1][seed % _HEADER] += 1
    dtype = TORCH[case.dtype]
    kinds = {"rows": (W * most, case.D, dtype), "ids": (W * most, K, torch.int32)}
    kinds |= {"weights": (W * most, K, torch.float32), "told": (2 * W + 1, _HEADER + 4, torch.int32)}
    empty = {name: poisoned(*kind) for name, kind in kinds.items()}
    empty["told"][-1, 0] = seed % 4
    given: dict[str, Any] = {"headers": headers, "most": most, "turn": seed % 4, "empty": empty}
    given |= {"tells": seed % 3 > 0, "wants": seed % 2 > 0}
    given["x"] = [draw_rows(draw, dataclasses.replace(case, T=own)) for own in tokens]
    given["results"] = [draw_rows(draw, dataclasses.replace(case, T=most * K)) for _ in tokens]
    given["kept"] = [draw.uniform(own, K) < (0.9 if case.bound else 2) for own in tokens]
    if case.shared:
        given["shared"] = [draw.normal(own, case.D, dtype=case.dtype) for own in tokens]
        given["gate"] = [draw.normal(own, 1, dtype="float32") for own in tokens]
    return given


def run_direct(case: Case, given: dict[str, Any], device: torch.device) -> dict[str, Tensor]:
    """`push_tokens_once` of every rank, then `sum_results`."""
    W, on = case.ranks, {}
    for name, own in given.items():
        if isinstance(own, list) and own and isinstance(own[0], Tensor):
            on[name] = [one.to(device) for one in own]
    memory = {name: Memory(empty, W, device) for name, empty in given["empty"].items()}
    owners = [[-1] * given["per_rank"] for _ in range(W)]
    for expert, places in enumerate(given["places_of"]):
        for place in places:
            owners[place // given["per_rank"]][place % given["per_rank"]] = expert
    placement = Placement(case.E, tuple(map(tuple, owners)))
    rows, ids, weights, told = (memory[name].at for name in ("rows", "ids", "weights", "told"))
    at = peer_ops.TokensAt(rows, ids, weights, told, given["most"])
    places = [own[0] for own in given["places_of"]]
    in_order = places == list(range(case.E))
    table = None if in_order else torch.tensor(places, dtype=torch.int32, device=device)
    found: dict[str, Tensor] = {}
    pushed, first = [], 0
    for rank, ids in enumerate(on["ids"]):
        mask = None if given["masks"][rank] is None else given["masks"][rank].to(device)
        own = peer_ops.HomeTokens(on["x"][rank], ids, on["weights"][rank], mask, table)
        if case.replicas:
            own = own._replace(places_of_experts=None, given=_places(case, given, rank, first).to(device))
        first += len(ids)
        options: dict[str, Any] = {"placement": placement, "programs": case.programs or None, "visits": case.by_token}
        one = peer_ops.push_tokens_once(own, on["headers"][rank], at, rank=rank, **options)
        pushed.append(one)
        for name, array in one._asdict().items():
            if array is not None:
                found[f"{'to' if name == 'rows' else name} {rank}"] = array
    found |= {f"{name} {rank}": memory[name].own[rank] for name in memory for rank in range(W)}
    for rank, one in enumerate(pushed):
        kept = torch.where(on["kept"][rank], one.places, -1)
        checks = peer_ops.Checks(
            memory["told"].own[rank] if given["tells"] else None, wanted=one.places if given["wants"] else None
        )
        options = {"checks": checks}
        options |= {"shared": on["shared"][rank]} if case.shared else {}
        options |= {"shared_gate": on["gate"][rank]} if case.shared_gate else {}
        options |= {"out_dtype": TORCH[case.out_dtype]} if case.out_dtype else {}
        found[f"sum {rank}"] = peer_ops.sum_results(on["results"][rank], kept, **options)
    return found


def _places(case: Case, given: dict[str, Any], rank: int, first: int) -> Tensor:
    """The places of slots, of experts that have several."""
    mask, found = given["masks"][rank], []
    for t, token in enumerate(given["ids"][rank].tolist()):
        for k, expert in enumerate(token):
            own = given["places_of"][expert] if 0 <= expert < case.E and (mask is None or mask[t]) else [-1]
            found.append(own[(first + t + k) % len(own)])
    return torch.tensor(found, dtype=torch.int32).reshape(given["ids"][rank].shape)
