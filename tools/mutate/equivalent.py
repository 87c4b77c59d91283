"""The list of mutations that change nothing a test could see, and the reason of each."""

from __future__ import annotations

import pathlib
import tomllib
from dataclasses import dataclass

from tools.mutate.operators import mutations
from tools.mutate.sources import ROOT, Mutation, Source

FILE = pathlib.Path(__file__).with_name("equivalent.toml")


@dataclass(frozen=True)
class Equivalent:
    """function: `path::qualified name`; before and after: the touched lines with blanks made one; why: the reason."""

    function: str
    before: str
    after: str
    why: str

    @property
    def key(self) -> tuple[str, str, str]:
        return self.function, self.before, self.after


def load() -> list[Equivalent]:
    return [Equivalent(**entry) for entry in tomllib.loads(FILE.read_text())["mutant"]]


def key_of(mutation: Mutation, source: str) -> tuple[str, str, str]:
    return f"{mutation.path}::{mutation.function}", *mutation.texts(source)


def outdated(entries: list[Equivalent]) -> list[Equivalent]:
    """The entries whose mutation no operator makes of today's sources."""
    known = set()
    for path in {entry.function.split("::")[0] for entry in entries}:
        if (ROOT / path).exists():
            text = (ROOT / path).read_text()
            known |= {key_of(mutation, text) for mutation in mutations(Source(path, text))}
    return [entry for entry in entries if entry.key not in known]
