"""Who is alive after a message failed: ranks answer through the store of their group."""

from __future__ import annotations

import contextlib
import os
import pathlib
import sys
import time
import weakref
from types import TracebackType
from typing import Any

import torch.distributed as dist

from moe_torch.bridge.private import group_store

#: How long a failed rank waits for answers, and how often it asks.
_SECONDS, _EVERY = 2.0, 0.02
_MOST_TEXT = 300
_registered: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
_BOOT, _PROCESSES = pathlib.Path("/proc/sys/kernel/random/boot_id"), pathlib.Path("/proc")


def host_id() -> str:
    return _BOOT.read_text().strip() if _BOOT.exists() else os.uname().nodename


def _key(what: str, rank: int) -> str:
    return f"moebius/{what}/{rank}"


def register(group: Any) -> None:
    """Let other ranks learn if this process ends, and the error that ends it. Once for each group."""
    if group in _registered:
        return
    store = _registered[group] = group_store(group)
    if store is not None:
        with contextlib.suppress(RuntimeError):
            store.set(_key("process", dist.get_rank(group)), f"{host_id()} {os.getpid()}")
    if getattr(sys.excepthook, "tells_ranks", False):
        return
    before = sys.excepthook

    def tell(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        for known, at in list(_registered.items()):
            with contextlib.suppress(Exception):
                at.set(_key("crash", dist.get_rank(known)), f"{kind.__name__}: {error}"[:_MOST_TEXT])
        before(kind, error, trace)

    tell.tells_ranks = True  # type: ignore[attr-defined]
    sys.excepthook = tell


def roll_call(group: Any, where: str) -> str:
    """Say on this rank that a message failed, and return what is known of the other ranks."""
    store, rank = _registered.get(group), dist.get_rank(group)
    if store is None:
        return "another rank died, is late or called something else"
    others = [other for other in range(dist.get_world_size(group)) if other != rank]
    verdicts: dict[int, str] = {}
    try:
        store.set(_key("answer", rank), where)
        end = time.monotonic() + _SECONDS
        while True:
            verdicts |= {other: text for other in others if (text := _verdict(store, other))}
            if len(verdicts) == len(others) or time.monotonic() > end:
                break
            time.sleep(_EVERY)
    except RuntimeError as error:
        return f"the store of the group does not answer, so its process, often rank 0, is gone: {error}"
    silent = [f"rank {other} does not answer, so it died, is late or called something else" for other in others
              if other not in verdicts]  # fmt: skip
    return "; ".join([*(f"rank {other} {verdicts[other]}" for other in sorted(verdicts)), *silent])


def survivors_of(group: Any, seconds: float) -> list[int]:
    """The ranks that call this within seconds, the same list on all of them. Others must have ended by then."""
    store, rank, size = _registered.get(group), dist.get_rank(group), dist.get_world_size(group)
    if store is None:
        raise RuntimeError("the group has no store to ask for survivors; name the survivors")
    store.set(_key("survives", rank), "here")
    end, silent = time.monotonic() + seconds, list(range(size))
    while silent and time.monotonic() < end:
        here = [other for other in range(size) if store.check([_key("survives", other)])]
        left = [other for other in range(size) if other not in here]
        silent = [other for other in left if not _verdict(store, other).startswith(("is gone", "raised"))]
        time.sleep(_EVERY if silent else 0)
    if silent:
        raise RuntimeError(
            f"ranks must call reform or have ended, got neither of rank {', '.join(map(str, silent))} in {seconds:g} "
            "s; wait for longer than the group's timeout, or name the survivors"
        )
    # The first rank that knows decides for all.
    if store.add("moebius/deciding", 1) == 1:
        store.set("moebius/survivors", ",".join(map(str, here)))
    decided = store.get("moebius/survivors").decode()
    alive = [int(number) for number in decided.split(",")]
    if rank not in alive:
        raise RuntimeError(f"ranks {decided} went on without rank {rank}; end this process")
    return alive


def _verdict(store: Any, rank: int) -> str:
    """The known state of a rank, "" if nothing is known."""
    crash, answer, process = (_key(what, rank) for what in ("crash", "answer", "process"))
    if store.check([crash]):
        return f"raised an error that ended it: {store.get(crash).decode()}"
    if store.check([process]):
        where, number = store.get(process).decode().rsplit(" ", 1)
        if where == host_id() and not _runs(number):
            return "is gone: its process has ended"
    return f"failed too, in {store.get(answer).decode()}" if store.check([answer]) else ""


def _runs(number: str) -> bool:
    if not _PROCESSES.is_dir():
        return True
    try:
        # Behind the name in parentheses comes the state: Z has ended.
        return (_PROCESSES / number / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
