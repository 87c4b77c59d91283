"""What streams of all ranks do to memory, and what each step waits for: steps that nothing orders are found without a
GPU."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterable, Iterator


class Recorder:
    """Steps of all streams.

    waits: the steps that each waits for. accesses: by memory, (step, whether it writes). barriers: by a name that all
    ranks share, the steps with which a rank arrives and leaves. freed: memory, the stream that it was made on, and how
    many steps this one had when the memory was given back.
    """

    def __init__(self) -> None:
        self.waits: list[set[int]] = []
        self.names: list[str] = []
        self.accesses: dict[Hashable, list[tuple[int, bool]]] = {}
        self.barriers: dict[Hashable, list[tuple[int, int]]] = {}
        self.freed: list[tuple[Hashable, Stream, int]] = []

    def unordered(self) -> list[str]:
        """Pairs of steps that touch the same memory, one of them writing, neither of which waits for the other; and
        steps on memory that the next step of the stream it was made on may have been given."""
        before = self._before()
        pairs = {
            (str(memory), one, other)
            for memory, found in self.accesses.items()
            for (one, writes), (other, also) in itertools.combinations(found, 2)
            if (writes or also) and one not in before[other] and other not in before[one]
        }
        for memory, stream, count in self.freed:
            for following in stream.steps[count : count + 1]:
                used = (step for step, _ in self.accesses.get(memory, ()))
                pairs |= {(f"{memory}, given back", one, following) for one in used if one not in before[following]}
        return [f"{memory}: {self.names[one]}, {self.names[other]}" for memory, one, other in sorted(pairs)]

    def _before(self) -> list[set[int]]:
        """Of each step all that have ended when it begins, and itself. Raises ValueError where steps wait in a ring."""
        waits = [set(own) for own in self.waits]
        for own in self.barriers.values():
            for _, leaves in own:
                waits[leaves] |= {arrives for arrives, _ in own}
        found: list[set[int] | None] = [None] * len(waits)
        for step in _in_order(waits):
            ended = [found[other] or set() for other in waits[step]]
            found[step] = {step}.union(*ended)
        return [own or set() for own in found]


def _in_order(waits: list[set[int]]) -> Iterator[int]:
    """Steps behind all that they wait for."""
    left, behind = [len(own) for own in waits], [[] for _ in waits]
    for step, own in enumerate(waits):
        for other in own:
            behind[other].append(step)
    ready = [step for step, count in enumerate(left) if not count]
    for step in ready:
        yield step
        for other in behind[step]:
            left[other] -= 1
            if not left[other]:
                ready.append(other)
    if len(ready) < len(waits):
        raise ValueError("steps wait for each other")


class Stream:
    """A stream of a rank."""

    def __init__(self, recorder: Recorder, rank: int, name: str) -> None:
        self.recorder, self.rank, self.name = recorder, rank, name
        self.steps: list[int] = []
        self._waits: set[int] = set()

    def step(self, name: str, reads: Iterable[Hashable] = (), writes: Iterable[Hashable] = ()) -> int:
        """Add a step behind all others of this stream; its number."""
        recorder, number = self.recorder, len(self.recorder.waits)
        recorder.waits.append(self._waits | set(self.steps[-1:]))
        recorder.names.append(f"{name} of rank {self.rank} on {self.name}")
        self.steps.append(number)
        self._waits = set()
        for memories, writing in ((reads, False), (writes, True)):
            for memory in memories:
                recorder.accesses.setdefault(memory, []).append((number, writing))
        return number

    def wait(self, step: int) -> None:
        """Let the next step wait for this one."""
        self._waits.add(step)


class Scratch:
    """Memory that a stream's allocator gives, until nobody holds this."""

    _number = itertools.count()

    def __init__(self, name: str, stream: Stream) -> None:
        self.key: Hashable = (name, stream.rank, next(self._number))
        self._stream = stream

    def __del__(self) -> None:
        self._stream.recorder.freed.append((self.key, self._stream, len(self._stream.steps)))
