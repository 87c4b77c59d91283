"""Covering arrays: few rows in which every pair of values of two factors occurs, except in refused combinations.

A greedy generator after AETG (Cohen et al., IEEE TSE 23(7), 1997): each row begins with a missing pair and takes, one
factor after the other, the value that covers most. allpairspy filters half-made rows, knows no refused triples, and
would be one more dependency for the same 40 lines.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Mapping, Sequence

Row = dict[str, str]
#: Orders of the factors that are tried for each row.
_TRIES = 24


class Cover:
    """factors: name -> values, the plain one first. refused: combinations of (factor, value) that no row may hold."""

    def __init__(self, factors: Mapping[str, Sequence[str]], refused: Iterable[Iterable[tuple[str, str]]]) -> None:
        self.names = list(factors)
        self.values = [(name, value) for name, values in factors.items() for value in values]
        number = {value: place for place, value in enumerate(self.values)}
        self.of = {name: [number[name, value] for value in values] for name, values in factors.items()}
        self.refused: dict[int, list[int]] = {place: [] for place in number.values()}
        for combination in refused:
            mask = sum(1 << number[value] for value in combination)
            for value in combination:
                self.refused[number[value]].append(mask)

    def allows(self, row: int, value: int) -> bool:
        """Whether a row, a mask of values, may take one more."""
        after = row | 1 << value
        return not any(mask & after == mask for mask in self.refused[value])

    def pairs(self) -> list[tuple[int, int]]:
        """Pairs of values that some row holds, in order."""
        of = [name for name, _ in self.values]
        every = itertools.combinations(range(len(self.values)), 2)
        return [(a, b) for a, b in every if of[a] != of[b] and self.allows(0, a) and self.allows(1 << a, b)]

    def completed(self, start: int, names: Sequence[str], missing: Sequence[int]) -> int | None:
        """A whole row that holds `start` and most of what is missing, or None. Plain values come first among equals."""
        row = start
        for name in names:
            if any(row >> value & 1 for value in self.of[name]):
                continue
            fine = [value for value in self.of[name] if self.allows(row, value)]
            if not fine:
                return None
            row |= 1 << max(fine, key=lambda value: (missing[value] & row).bit_count())
        return row

    def plainest(self, start: Iterable[tuple[str, str]]) -> Row:
        """The row that holds these values, refused or not, and plain ones wherever that is allowed."""
        chosen = dict(start)
        row = sum(1 << self.values.index(value) for value in chosen.items())
        for name in self.names:
            if name not in chosen:
                fine = [value for value in self.of[name] if self.allows(row, value)] or self.of[name]
                row |= 1 << fine[0]
        return self.named(row)

    def named(self, row: int) -> Row:
        return dict(value for place, value in enumerate(self.values) if row >> place & 1)

    def rows(self, seed: int = 0) -> list[Row]:
        """Rows that hold every pair of `pairs`. Raises LookupError for a pair that no whole row can hold."""
        rng, missing, names = random.Random(seed), [0] * len(self.values), list(self.names)
        for a, b in self.pairs():
            missing[a] |= 1 << b
            missing[b] |= 1 << a
        found = []
        while left := [value for value, mask in enumerate(missing) if mask]:
            first = max(left, key=lambda value: missing[value].bit_count())
            second = (missing[first] & -missing[first]).bit_length() - 1
            start, tries = 1 << first | 1 << second, []
            for _ in range(_TRIES):
                rng.shuffle(names)
                row = self.completed(start, names, missing)
                tries += [] if row is None else [row]
            if not tries:
                raise LookupError(f"no row holds {self.values[first]} and {self.values[second]}: what refuses them?")
            row = max(tries, key=lambda row: sum((missing[v] & row).bit_count() for v in left if row >> v & 1))
            for value in left:
                if row >> value & 1:
                    missing[value] &= ~row
            found.append(self.named(row))
        return [{name: row[name] for name in self.of} for row in found]
