"""Bounded caches that cost the most frequent case, a hit, nothing more than a dictionary does."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

V = TypeVar("V")
#: Plans, and what is made of them, that one cache keeps: the last used of them, and at most twice as many.
PLANS_KEPT = 512


def process_lock() -> Any:
    """A lock, for the life of the process, that a child process finds free; its thread may take it again.

    A fork copies a lock as it is, and not the thread that would release it.
    """
    lock = threading.RLock()
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=lock._at_fork_reinit)  # type: ignore[attr-defined]
    return lock


class Recent(Generic[V]):
    """Values by key, of which the `kept` last used are never forgotten; it holds at most twice as many.

    They lie in two dictionaries. When the first has `kept` values it becomes the second, whose values are forgotten; a
    value of the second that is used moves to the first. So a hit in the first, `get`, changes nothing and takes no
    lock. Values count as true.
    """

    __slots__ = ("_earlier", "_kept", "_latest", "get")

    def __init__(self, kept: int = PLANS_KEPT) -> None:
        self._kept = kept
        self.clear()

    def clear(self) -> None:
        """Forget everything."""
        self._latest: dict[Any, V] = {}
        self._earlier: dict[Any, V] = {}
        #: The value of a key if it was among the last used, else None: ask `find` then.
        self.get: Callable[[Any], V | None] = self._latest.get

    def find(self, key: Any) -> V | None:
        """The value of a key, which counts as used; None for one that is not known."""
        value = self._latest.get(key) or self._earlier.get(key)
        if value is not None:
            self.put(key, value)
        return value

    def put(self, key: Any, value: V) -> None:
        """Remember a value, which counts as used."""
        latest = self._latest
        if len(latest) >= self._kept and key not in latest:
            # Threads that do this at a time forget too much, and an interrupt in between nothing that matters.
            self._earlier, self._latest = latest, {}
        self._latest[key] = value
        self.get = self._latest.get

    def __len__(self) -> int:
        return len(self._latest) + len(self._earlier.keys() - self._latest.keys())

    def keys(self) -> tuple[Any, ...]:
        """The keys of all values, the earliest used first."""
        latest, earlier = tuple(self._latest), tuple(self._earlier)
        return (*(key for key in earlier if key not in self._latest), *latest)
