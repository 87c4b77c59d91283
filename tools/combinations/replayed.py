"""What replayed rows are held to: the layer with the trace's ids from its caller."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from moe_core.trace import LayerRouting
from tools.combinations.cover import Row
from tools.fuzz import data, run_torch
from tools.fuzz.case import Case
from tools.fuzz.engines import Results


class Replayed:
    """A row's cases. case: of the layer that replays. base: of the plain one, the same unless a trace is replayed.
    own: results that stay the layer's choice."""

    def __init__(self, row: Row, case: Case) -> None:
        self.kind, self.own = row["trace"], ()
        self.case = self.base = case
        if not self.kind.startswith("replay"):
            return
        self.base = dataclasses.replace(self.case, given_ids=True, table=0)
        # These take no ids from a caller, and a trace with weights has no ids of dropped slots.
        if (
            case.tile
            or case.mixer
            or (case.adapters and case.kind == "layer" and not case.table)
            or (self.kind == "replay" and (case.capacity or case.kind == "moe"))
        ):
            self.base = self.case
        if case.table:
            self.own += ("invalid_ids",)

    def draw(self, device: str = "cpu") -> data.Arrays:
        return data.draw(dataclasses.replace(self.case, given_ids=self.base.given_ids), device)

    def plain(self, arrays: data.Arrays, given: dict[str, Any], engine: str) -> tuple[Results | None, Any]:
        """(what the plain layer returns, None for an op, which takes no ids and logits; the routing to replay)."""
        if not self.kind.startswith("replay"):
            return run_torch.run(self.base, given, engine), None
        if self.base.given_ids:
            given = {name: array for name, array in given.items() if name not in ("routing.table", "input_ids")}
            for name in ("routing.table", "input_ids"):
                arrays.plain.pop(name, None)
        if self.kind == "replay ids":
            found = None if self.base.kind == "moe" else run_torch.run(self.base, given, engine)
            chosen = {} if found is None or self.base.given_ids else found
            ids = chosen.get("routed_ids", chosen.get("ids", given.get("ids")))
            return found, LayerRouting(ids, None, self.base.num_ids)
        found = run_torch.run(self.base, given, engine)
        ids, weights = found["ids"].clone(), found["weights"].clone()
        if "token_mask" in given:  # the layer's mask holds, whatever the trace has
            masked = ~given["token_mask"]
            ids[masked], weights[masked] = torch.arange(ids.shape[1], dtype=torch.int32), 0.5
        return found, LayerRouting(ids, weights, self.base.num_ids)
