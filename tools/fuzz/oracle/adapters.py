"""Low-rank factors in float64: the equations of docs/user/lora.md."""

from __future__ import annotations

import dataclasses
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
    """The factors of each row's adapter and expert, zeros without one. gate, up: of b1. None: not a target.

    used: columns [R, ranks] that count, whatever meets zeros behind a rank. group: of factors in an array, the last
    one of rows without an adapter.
    """

    a1: Tensor | None
    gate: Tensor | None
    up: Tensor | None
    a2: Tensor | None
    b2: Tensor | None
    scale: Real
    used: Tensor
    group: Tensor
    dtype: str
    kind: str

    def low(self, rows: Real, factor: Tensor) -> Real:
        return self.scaled(rows_matmul(rows, Real.exact(factor, rows.unit), self.kind))

    def t1(self, d_gate: Real, d_up: Real | None) -> Real:
        assert self.gate is not None
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
    if {"gate_up", "down"}.isdisjoint(case.targeted):
        return None
    ids, real = adapters_of(given, case.num_tokens)
    slot, expert, real = ids[slots.token], slots.expert, real[slots.token]
    used = torch.arange(RANKS, device=ids.device) < (given["lora.ranks"][slot, expert] * real)[:, None]

    def of(name: str) -> Tensor | None:
        if f"lora.{name}" not in given:
            return None
        factor = given[f"lora.{name}"][slot, 0 if case.shared_factors else expert]
        return torch.where(used[:, None] if name[0] == "a" else used[..., None], factor, 0.0)

    b1, up = of("b1"), None
    if b1 is not None and case.gated and case.gate_layout == "interleaved":
        b1, up = b1[..., 0::2], b1[..., 1::2]
    elif b1 is not None and case.gated:
        b1, up = b1.tensor_split(2, -1)
    scale = machine.exact(given["lora.scale"][slot, expert].unsqueeze(1))
    count = 1 if case.shared_factors else case.E
    group = torch.where(real, slot * count + expert % count, case.adapters * count)
    return Factors(of("a1"), b1, up, of("a2"), of("b2"), scale, used, group, case.dtype, machine.kind())


@dataclass(frozen=True)
class Pair:
    """The factors of each token's adapter of a router or a shared expert, zeros without one. Low rows are not cast.

    used: columns `[slots, ranks]`. slot: of each token, the last one of those without an adapter.
    """

    name: str
    a: Tensor
    b: Tensor
    scale: Real
    used: Tensor
    slot: Tensor
    dtype: str
    kind: str

    def columns(self, half: slice) -> Pair:
        return dataclasses.replace(self, b=self.b[..., half])

    def _scaled(self, rows: Real, factor: Tensor) -> Real:
        made = rows_matmul(rows, Real.exact(factor, rows.unit), self.kind)
        return self.adapted(made * self.scale.map(lambda part: part.expand_as(made.value)))

    def adapted(self, rows: Real) -> Real:
        return rows.where((self.slot < len(self.used))[:, None])

    def low(self, rows: Real) -> Real:
        return self._scaled(rows, self.a)

    def t(self, d: Real) -> Real:
        return self._scaled(d, self.b.transpose(1, 2)).cast(self.dtype)

    def change(self, rows: Real) -> Real:
        return self.adapted(rows_matmul(self.low(rows), Real.exact(self.b, rows.unit), self.kind))


def pair_of(case: Any, given: Any, target: str, machine: Any) -> Pair | None:
    """target: `router`, `shared_gate_up` or `shared_down`."""
    if target not in case.targeted:
        return None
    name = {"router": "_router", "shared_gate_up": "1_shared", "shared_down": "2_shared"}[target]
    slot, real = adapters_of(given, case.num_tokens)
    ranks = given["lora.ranks"].amax(1)
    used = torch.arange(RANKS, device=slot.device) < ranks[:, None]
    chosen = (used[slot] & real[:, None])[:, None]
    a, b = given[f"lora.a{name}"][slot, 0], given[f"lora.b{name}"][slot, 0]
    a, b = torch.where(chosen, a, 0.0), torch.where(chosen.transpose(1, 2), b, 0.0)
    scale = machine.exact(given["lora.scale"][slot, :1])
    return Pair(name, a, b, scale, used, slot.where(real, len(ranks)), case.dtype, machine.kind())
