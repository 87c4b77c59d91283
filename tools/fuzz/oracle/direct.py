"""What ranks hold where every token has its place at every owner, token by token, from docs/developer."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from tools.fuzz.oracle.layer import sigmoid
from tools.fuzz.oracle.real import Real, Tensor


def direct_results(case: Any, given: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, Real]]:
    """(arrays to be met bit by bit, by name and rank, and numbers).

    given, a list by rank: ids, weights, masks, x, headers, of what is stored; results, kept, of sums; empty: a poisoned
    array of each name. places_of: of every expert; per_rank, most, turn; tells, wants: whether sums look at headers and
    at slots that were not kept.
    """
    W, each, most = case.ranks, given["per_rank"], given["most"]
    held = {name: [empty.clone() for _ in range(W)] for name, empty in given["empty"].items()}
    exact: dict[str, Tensor] = {}
    sums, first = {}, 0
    for home, ids in enumerate(given["ids"]):
        mask, places = given["masks"][home], torch.full(ids.shape, -1, dtype=torch.int32)
        owners, rows = (torch.full((len(ids), W), -1, dtype=torch.int32) for _ in range(2))
        counts, invalid = [0] * case.E, 0
        for t, token in enumerate(ids.tolist()):
            for k, expert in enumerate(token):
                if mask is None or mask[t]:
                    invalid += not -1 <= expert < case.E
                    if 0 <= expert < case.E:
                        replicas = given["places_of"][expert]
                        places[t, k] = replicas[(first + t + k) % len(replicas)]
                        counts[expert] += 1
        first += len(ids)
        for owner in range(W):
            held["ids"][owner][home * most : (home + 1) * most] = -1
            told = torch.cat([given["headers"][home], torch.tensor([len(ids), 0, 0, 0], dtype=torch.int32)])
            held["told"][owner][given["turn"] % 2 * W + home] = told
            for t in range(len(ids)):
                row = home * most + t
                here = (places[t] >= 0) & (places[t] // each == owner)
                held["ids"][owner][row] = torch.where(here, places[t] % each, -1)
                held["weights"][owner][row] = given["weights"][home][t]
                if bool(here.any()):
                    held["rows"][owner][row] = given["x"][home][t]
                    owners[t, owner], rows[t, owner] = owner, row
        held["told"][home][-1, 0] = given["turn"] + 1
        exact |= {
            f"places {home}": places,
            f"tokens_per_expert {home}": torch.tensor(counts, dtype=torch.int32),
            f"invalid_ids {home}": torch.tensor([invalid], dtype=torch.int32),
            f"overflow {home}": torch.zeros(1, dtype=torch.int32),
        }
        if case.by_token:
            exact |= {f"owners {home}": owners, f"to {home}": rows}
        sums[f"sum {home}"] = _sum(case, given, home, places)
    return exact | {f"{name} {rank}": one for name, own in held.items() for rank, one in enumerate(own)}, sums


def _sum(case: Any, given: Mapping[str, Any], home: int, places: Tensor) -> Real:
    kept = torch.where(given["kept"][home], places, -1)
    total = torch.zeros(len(places), case.D)
    for t in range(len(places)):
        for k in range(case.K):
            if kept[t, k] >= 0:
                total[t] += given["results"][home][t * case.K + k].float()
    found = Real.exact(total.double())
    if case.shared:
        shared = Real.exact(given["shared"][home].double())
        if case.shared_gate:
            shared = shared * sigmoid(Real.exact(given["gate"][home].double()))
        found = found + shared
    found = found.cast(case.out_dtype or case.dtype)
    spoilt = torch.zeros(len(places), 1, dtype=torch.bool)
    if given["wants"]:
        spoilt |= ((places >= 0) & (kept < 0)).any(1, True)
    if given["tells"]:
        spoilt |= any(not torch.equal(one, given["headers"][0]) for one in given["headers"])
    return dataclasses.replace(
        found, value=torch.where(spoilt, torch.nan, found.value), error=torch.where(spoilt, 0.0, found.error)
    )
