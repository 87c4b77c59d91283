"""Copies of the checkout in which one file at a time is another. The checkout itself is never written to."""

from __future__ import annotations

import itertools
import os
import pathlib
import shutil
import time
from typing import ClassVar

from tools.mutate.sources import ROOT, Mutation

FOLDERS = ("moe_core", "moe_torch", "moe_jax", "tests", "tools", "benchmarks", "examples", "docs")
#: Files of others that tests read where they have been downloaded.
CACHES = ("build/upstream",)
#: Times of files that are mutated: unlike each other, those of other runs and those of sources, so that what Python
#: compiled of one text is never taken for another's.
_times = itertools.count(int(time.time()) - 1_000_000_000)


class Tree:
    """One copy, kept from run to run: files that are as the checkout's stay, with what Python compiled of them."""

    _known: ClassVar[dict[pathlib.Path, Tree]] = {}

    @classmethod
    def at(cls, folder: pathlib.Path) -> Tree:
        """The tree in a folder, made or brought up to date the first time."""
        return cls._known.setdefault(folder, cls._known.get(folder) or cls(folder))

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder = folder
        wanted = [path for top in FOLDERS for path in (ROOT / top).rglob("*") if path.is_file()]
        names = {path.relative_to(ROOT) for path in wanted if "__pycache__" not in path.parts}
        names |= {path.relative_to(ROOT) for path in ROOT.iterdir() if path.is_file() and path.name[0] != "."}
        for name in names:
            self.restore(name)
        for name in CACHES:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            if (ROOT / name).exists() and not (folder / name).exists():
                (folder / name).symlink_to(ROOT / name)
        for path in [path for top in FOLDERS for path in (folder / top).rglob("*.py")]:
            if path.relative_to(folder) not in names:
                path.unlink()

    def restore(self, name: pathlib.Path) -> None:
        source, target = ROOT / name, self.folder / name
        if target.exists():
            one, other = source.stat(), target.stat()
            if (one.st_mtime_ns, one.st_size) == (other.st_mtime_ns, other.st_size):
                return
        target.parent.mkdir(parents=True, exist_ok=True)
        target.unlink(missing_ok=True)
        shutil.copy2(source, target)

    def put(self, mutation: Mutation) -> None:
        """The mutated text in the place of its file; `restore` takes it back."""
        target = self.folder / mutation.path
        text = mutation.apply((ROOT / mutation.path).read_text())
        target.unlink()
        target.write_text(text)
        moment = next(_times)
        os.utime(target, (moment, moment))
