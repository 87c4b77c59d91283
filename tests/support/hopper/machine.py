"""Warps, barriers and shared memory of one block, run in a drawn order."""

from __future__ import annotations

import random
import threading
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

#: Of every partition; more would show nothing that two do not.
WARPS = 2

Clock = dict[int, int]


class Race(AssertionError):
    """Two accesses of shared memory that nothing orders, or a wrong number of bytes or arrivals."""


class Hang(AssertionError):
    """No warp can go on."""


def join(into: Clock, other: Clock) -> None:
    """What happened before `other` happened before `into` now."""
    for actor, epoch in other.items():
        if into.get(actor, 0) < epoch:
            into[actor] = epoch


class Access(NamedTuple):
    """actor, epoch: when, in vector time. kind: `generic`, `copy` (cp.async), or `async` (TMA, wgmma).
    operation: number of the copy in its warp, the same for both warps."""

    buffer: str
    ranges: tuple[tuple[int, int], ...]
    writes: bool
    kind: str
    actor: int
    epoch: int
    partition: str
    operation: int = -1

    def overlaps(self, other: Access) -> bool:
        """Whether some element belongs to both."""
        ranges = zip(self.ranges, other.ranges, strict=True)
        return all(low < top and start < end for (low, end), (start, top) in ranges)

    def covers(self, other: Access) -> bool:
        """Whether every element of the other belongs to this one, which no copy of the same operation shares."""
        same = self.kind == "copy" and self.operation == other.operation and self.partition == other.partition
        ranges = zip(self.ranges, other.ranges, strict=True)
        return not same and all(low <= start and top <= end for (low, end), (start, top) in ranges)

    def __str__(self) -> str:
        return f"{self.partition} {'writes' if self.writes else 'reads'} {self.buffer}{list(self.ranges)} ({self.kind})"


@dataclass
class Barrier:
    """Hopper's mbarrier: a phase ends when all arrivals and all announced bytes are there."""

    name: str
    count: int
    pending: int = 0
    bytes: int = 0
    phase: int = 0
    clock: Clock = field(default_factory=dict)
    released: Clock = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.pending = self.count

    def arrive(self, count: int, clock: Clock, nbytes: int = 0) -> None:
        """nbytes: announced if positive, there if negative."""
        join(self.clock, clock)
        self.pending -= count
        self.bytes += nbytes
        if self.pending < 0:
            raise Race(f"{self.name} got more than {self.count} arrivals in a phase")
        if self.pending == 0 and self.bytes == 0:
            # All arrivals of a phase are before its end, which is before the next one.
            self.phase, self.pending, self.released = self.phase + 1, self.count, dict(self.clock)


class Warp:
    """One warp: a thread that runs when it is its turn."""

    def __init__(self, machine: Machine, number: int, partition: str, index: int, warps: int) -> None:
        self.machine, self.number, self.partition, self.index, self.warps = machine, number, partition, index, warps
        self.clock: Clock = {number: 1}
        self.thread = threading.Thread(daemon=True)
        self.ready: Callable[[], bool] = lambda: True
        self.waits_for = ""
        self.turn, self.done = threading.Semaphore(0), False
        #: wgmmas and stores under way, each with its clock; cp.asyncs not arrived yet, and groups of them.
        self.products: list[tuple[int, Clock]] = []
        self.stores: list[tuple[int, Clock]] = []
        self.copies: list[Clock] = []
        self.groups: list[list[Clock]] = []
        self.counts: defaultdict[str, int] = defaultdict(int)

    @property
    def leads(self) -> bool:
        """Whether the thread that acts for all is one of this warp."""
        return self.index == 0

    def tick(self) -> Clock:
        """Its clock now; what follows is later."""
        now = dict(self.clock)
        self.clock[self.number] += 1
        return now

    def until(self, ready: Callable[[], bool], what: str) -> None:
        """Let others run, and go on when `ready()`."""
        self.ready, self.waits_for = ready, what
        self.machine.back.release()
        self.turn.acquire()
        if self.machine.failed:
            raise SystemExit


class Machine:
    """A block. seed: of the order in which warps run and asynchronous operations end."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.warps: list[Warp] = []
        self.barriers: dict[tuple[str, int], Barrier] = {}
        self.memory: dict[tuple[str, tuple[tuple[int, int], ...]], Any] = {}
        self.accesses: defaultdict[str, list[Access]] = defaultdict(list)
        self.kinds: set[str] = set()
        #: Asynchronous operations under way: what happens when one ends.
        self.pending: list[Callable[[], None]] = []
        self.back, self.failed = threading.Semaphore(0), False
        self._actors, self._error = 0, None
        self._gathered: defaultdict[str, list[Warp]] = defaultdict(list)
        self._fences: list[tuple[int, Clock]] = []
        self.local = threading.local()

    @property
    def warp(self) -> Warp:
        """The warp whose code runs."""
        return self.local.warp

    def new_actor(self) -> int:
        """A component of vector time."""
        self._actors += 1
        return self._actors

    def launch(self, partition: str, warps: int, program: Callable[[], None]) -> None:
        """Add a partition of so many real warps."""

        def body(warp: Warp) -> None:
            self.local.warp = warp
            warp.turn.acquire()
            try:
                if not self.failed:
                    program()
            except SystemExit:
                pass
            except BaseException as error:
                self._error = self._error or error
                self.failed = True
            warp.done = True
            self.back.release()

        for index in range(WARPS):
            warp = Warp(self, self.new_actor(), partition, index, warps)
            self.warps.append(warp)
            warp.thread = threading.Thread(target=body, args=(warp,), daemon=True)
            warp.thread.start()

    def run(self) -> None:
        """Until all warps are done; raises what went wrong."""
        while not self.failed:
            living = [warp for warp in self.warps if not warp.done]
            if not living:
                break
            able: list[Any] = [warp for warp in living if warp.ready()] + self.pending
            if not able:
                waiting = "; ".join(f"{warp.partition}.{warp.index} waits for {warp.waits_for}" for warp in living)
                self._error, self.failed = Hang(waiting), True
                break
            chosen = self.random.choice(able)
            if isinstance(chosen, Warp):
                chosen.turn.release()
                self.back.acquire()
            else:
                self.pending.remove(chosen)
                try:
                    chosen()
                except AssertionError as error:
                    self._error, self.failed = error, True
        for warp in self.warps:
            if not warp.done:
                warp.turn.release()
            warp.thread.join()
        if self._error is not None:
            raise self._error
        while self.pending:
            self.pending.pop()()
        for barrier in self.barriers.values():
            if barrier.bytes or barrier.pending != barrier.count:
                raise Race(
                    f"{barrier.name} ends within a phase: {barrier.pending} arrivals, {barrier.bytes} bytes open"
                )

    def access(self, region: Any, writes: bool, kind: str, actor: int, clock: Clock, operation: int = -1) -> None:
        """Record an access at the end of `clock`; raises Race where one before it is not ordered."""
        warp = self.warp
        made = Access(region.name, region.ranges, writes, kind, actor, clock[actor], warp.partition, operation)
        for other in self.accesses[region.name]:
            if not (writes or other.writes) or not made.overlaps(other):
                continue
            if other.partition == made.partition:
                # Between generic accesses of one partition the compiler puts the barriers.
                same = other.operation == operation and kind == other.kind == "copy"
                if same or (kind == other.kind == "generic"):
                    continue
            if clock.get(other.actor, 0) < other.epoch:
                raise Race(f"nothing orders: {other}, and: {made}")
            if other.writes and other.kind != "async" and kind == "async" and not self._fenced(other, clock):
                raise Race(f"no fence of the asynchronous proxy between: {other}, and: {made}")
        self.kinds.add(kind)
        if writes:
            # What comes after this write comes after what it covers: that is not looked at again.
            before = self.accesses[region.name]
            self.accesses[region.name] = [other for other in before if not made.covers(other)]
        self.accesses[region.name].append(made)

    def _fenced(self, before: Access, clock: Clock) -> bool:
        return any(
            clock.get(actor, 0) >= seen[actor] and seen.get(before.actor, 0) >= before.epoch
            for actor, seen in self._fences
        )

    def fence(self) -> None:
        """Generic accesses before are seen by TMA and wgmma after."""
        self._fences.append((self.warp.number, self.warp.tick()))

    def gather(self) -> None:
        """The barrier of the threads of a partition."""
        warp = self.warp
        if warp not in self.warps:
            return  # before the partitions start
        present = self._gathered[warp.partition]
        present.append(warp)
        if len(present) < WARPS:
            now = warp.counts["gathered"]
            warp.until(lambda: warp.counts["gathered"] > now, "the other warps of its partition")
            return
        together: Clock = {}
        for one in present:
            join(together, one.tick())
        for one in present:
            join(one.clock, together)
            one.counts["gathered"] += 1
        present.clear()
