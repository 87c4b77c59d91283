"""Low-rank factors of experts in float64: the equations of docs/user/lora.md."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from tools.fuzz.oracle.real import Real, Tensor

RANKS = 16


def rows_matmul(rows: Real, weight: Real, kind: str) -> Real:
    """[R, n] by [R, n, N], every row by a matrix of its own."""
    return rows.map(lambda part: part.unsqueeze(1)).matmul(weight, kind).map(lambda part: part.squeeze(1))


def one_sum(rows: Real, weight: Tensor, low: Real, factor: Tensor, kind: str) -> Real:
    """rows weight + low factor, each row by matrices of its own, as one sum."""
    value, error = torch.cat((rows.value, low.value), 1), torch.cat((rows.error, low.error), 1)
    return rows_matmul(Real(value, error, rows.unit), Real.exact(torch.cat((weight, factor), 1), rows.unit), kind)


@dataclass(frozen=True)
class Factors:
    """The factors of each row's adapter and expert, zeros without one. gate, up: of b1.

    used: columns [R, ranks] that count, whatever meets zeros behind a rank. group: of factors in an array, the last
    one of rows without an adapter.
    """

    a1: Tensor
    gate: Tensor
    up: Tensor | None
    a2: Tensor
    b2: Tensor
    scale: Real
    used: Tensor
    group: Tensor
    dtype: str
    kind: str

    def low(self, rows: Real, factor: Tensor) -> Real:
        return self.scaled(rows_matmul(rows, Real.exact(factor, rows.unit), self.kind))

    def t1(self, d_gate: Real, d_up: Real | None) -> Real:
        made = rows_matmul(d_gate, Real.exact(self.gate.transpose(1, 2), d_gate.unit), self.kind)
        if d_up is not None and self.up is not None:
            made = made + rows_matmul(d_up, Real.exact(self.up.transpose(1, 2), d_up.unit), self.kind)
        return self.scaled(made)

    def scaled(self, made: Real) -> Real:
        return (made * self.scale.map(lambda part: part.expand_as(made.value))).where(self.used).cast(self.dtype)

    def weighted(self, low: Real, w: Real) -> Real:
        """A zero behind a rank, times a weight that is no number, is anything."""
        made = (low * w.map(lambda part: part.expand_as(low.value))).where(self.used.any(1, keepdim=True))
        return made.unknown(~self.used & made.value.isnan()).cast(self.dtype)


def adapters_of(given: Any, num_tokens: int) -> tuple[Tensor, Tensor]:
    """(slots of tokens, whether these hold an adapter)."""
    ranks = given["lora.ranks"]
    ids = given.get("adapter_ids", ranks.new_zeros(num_tokens)).long()
    named = (ids >= 0) & (ids < len(ranks))
    ids = ids.where(named, 0)
    return ids, named & (ranks[ids].amax(1) > 0)


def invalid_adapters(given: Any, num_tokens: int) -> int:
    """Tokens that name an adapter that is none."""
    if "lora.ranks" not in given:
        return 0
    ids = given.get("adapter_ids", given["lora.ranks"].new_zeros(num_tokens))
    wrong = ~adapters_of(given, num_tokens)[1] & (ids != -1)
    return int((wrong & given.get("token_mask", torch.ones_like(wrong))).sum())


def factors_of(case: Any, given: Any, slots: Any, machine: Any) -> Factors | None:
    """The factors of the rows of slots."""
    if not case.adapters:
        return None
    ids, real = adapters_of(given, case.num_tokens)
    slot, expert, real = ids[slots.token], slots.expert, real[slots.token]
    used = torch.arange(RANKS, device=ids.device) < (given["lora.ranks"][slot, expert] * real)[:, None]

    def of(name: str) -> Tensor:
        factor = given[f"lora.{name}"][slot, 0 if case.shared_factors else expert]
        return torch.where(used[:, None] if name[0] == "a" else used[..., None], factor, 0.0)

    b1, up = of("b1"), None
    if case.gated and case.gate_layout == "interleaved":
        b1, up = b1[..., 0::2], b1[..., 1::2]
    elif case.gated:
        b1, up = b1.tensor_split(2, -1)
    scale = machine.exact(given["lora.scale"][slot, expert].unsqueeze(1))
    count = 1 if case.shared_factors else case.E
    group = torch.where(real, slot * count + expert % count, case.adapters * count)
    return Factors(of("a1"), b1, up, of("a2"), of("b2"), scale, used, group, case.dtype, machine.kind())
