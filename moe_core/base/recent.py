"""Bounded caches, as cheap as a dictionary for a hit."""

from __future__ import annotations

import functools
import os
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any, Generic, TypeVar

V = TypeVar("V")
#: Plans that one cache keeps: the last used, and at most twice this number.
PLANS_KEPT = 512


def process_lock() -> Any:
    """A reentrant lock, for the life of the process, that a child process finds free.

    A fork copies a lock's state without the thread that would release it.
    """
    lock = threading.RLock()
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=lock._at_fork_reinit)  # type: ignore[attr-defined]
    return lock


class Recent(Generic[V]):
    """Values by key. The `kept` last used are never forgotten, and it holds at most twice this number.

    It has two dictionaries. When the first has `kept` values it replaces the second. A value of the second that is used
    moves to the first. So a hit in the first, `get`, changes nothing and takes no lock. Values count as true.
    """

    __slots__ = ("__weakref__", "_earlier", "_kept", "_latest", "get")

    def __init__(self, kept: int = PLANS_KEPT) -> None:
        self._kept = kept
        self.clear()
        if kept == PLANS_KEPT:
            _of_plans.add(self)

    def clear(self) -> None:
        """Forget everything."""
        self._latest: dict[Any, V] = {}
        self._earlier: dict[Any, V] = {}
        #: The value of a key among the last used, else None: then call `find`.
        self.get: Callable[[Any], V | None] = self._latest.get

    def find(self, key: Any) -> V | None:
        """The value of a key, which counts as used, or None."""
        value = self._latest.get(key) or self._earlier.get(key)
        if value is not None:
            self.put(key, value)
        return value

    def put(self, key: Any, value: V) -> None:
        """Remember a value, which counts as used."""
        latest = self._latest
        if len(latest) >= self._kept and key not in latest:
            # Concurrent threads may forget too much here, and an interrupt loses nothing that matters.
            self._earlier, self._latest = latest, {}
        self._latest[key] = value
        self.get = self._latest.get

    def __len__(self) -> int:
        return len(self._latest) + len(self._earlier.keys() - self._latest.keys())

    def keys(self) -> tuple[Any, ...]:
        """The keys of all values, the earliest used first."""
        latest, earlier = tuple(self._latest), tuple(self._earlier)
        return (*(key for key in earlier if key not in self._latest), *latest)


_of_plans: weakref.WeakSet[Recent[Any]] = weakref.WeakSet()


def forget_plans() -> None:
    """Empty every bounded cache between a call and its launch: the next call is planned as in a fresh process.

    The texts of plans stay, because compiled programs name them.
    """
    for cache in tuple(_of_plans):
        cache.clear()
    for name, module in tuple(sys.modules.items()):
        for value in tuple(vars(module).values()) if name.startswith("moe_") else ():
            if isinstance(value, functools._lru_cache_wrapper) and value.cache_parameters()["maxsize"]:
                value.cache_clear()
