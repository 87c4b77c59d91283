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
PLANS_KEPT = 512


def process_lock() -> Any:
    """A reentrant lock, never freed. A child process finds it unlocked, although a fork copies its state."""
    lock = threading.RLock()
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=lock._at_fork_reinit)  # type: ignore[attr-defined]
    return lock


def keep_plans(planner: Callable[..., V]) -> functools._lru_cache_wrapper[V]:
    """Decorate a planner with frozen arguments, so that its last plans are kept."""
    return functools.lru_cache(PLANS_KEPT)(planner)


class Recent(Generic[V]):
    """Values by key, true ones. The `kept` last used are never forgotten, and it holds at most twice this number."""

    __slots__ = ("__weakref__", "_earlier", "_kept", "_latest", "get")

    def __init__(self, kept: int = PLANS_KEPT) -> None:
        self._kept = kept
        self.clear()
        if kept == PLANS_KEPT:
            _of_plans.add(self)

    def clear(self) -> None:
        self._latest: dict[Any, V] = {}
        self._earlier: dict[Any, V] = {}
        #: Look among the last used values; after None call `find`.
        self.get: Callable[[Any], V | None] = self._latest.get

    def find(self, key: Any) -> V | None:
        value = self._latest.get(key) or self._earlier.get(key)
        if value is not None:
            self.put(key, value)
        return value

    def put(self, key: Any, value: V) -> None:
        latest = self._latest
        if len(latest) >= self._kept and key not in latest:
            # Concurrent threads may forget too much here.
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
    """Empty every cache between a call and its launch. Texts of plans stay, because compiled programs name them."""
    for cache in tuple(_of_plans):
        cache.clear()
    for name, module in tuple(sys.modules.items()):
        for value in tuple(vars(module).values()) if name.startswith("moe_") else ():
            if isinstance(value, functools._lru_cache_wrapper) and value.cache_parameters()["maxsize"]:
                value.cache_clear()
