"""Offsets of scratch buffers, in the arena or in an unwritten output."""

from __future__ import annotations

from collections.abc import Collection, Sequence

SCRATCH_ALIGNMENT = 256


def aligned(size: int) -> int:
    return -(-size // SCRATCH_ALIGNMENT) * SCRATCH_ALIGNMENT


def place_buffers(sizes: Sequence[tuple[str, int]], steps: Sequence[Collection[str]]) -> tuple[int, ...]:
    """Return the byte offset of each buffer. Buffers that no step needs at the same time share memory.

    sizes: (name, bytes). steps: the buffers that each step names, in order. A buffer is needed from the first to the
    last of its steps and takes the lowest free offset. Of two orders, largest first and earliest first, the smaller
    arena wins.

    Example: sizes (("a", 512), ("b", 256), ("c", 256)) and steps (("a", "b"), ("b", "c")) give (0, 512, 0).
    """
    lifetimes = _lifetimes(steps)
    buffers = [(aligned(size), *lifetimes.get(name, (0, 0))) for name, size in sizes]
    indices = range(len(buffers))
    largest = sorted(indices, key=lambda index: (-buffers[index][0], index))
    earliest = sorted(largest, key=lambda index: buffers[index][1])
    placements = [_placed_in_order(buffers, order) for order in (largest, earliest)]
    return min(placements, key=lambda offsets: max((offsets[i] + buffers[i][0] for i in indices), default=0))


def lend_memory(
    sizes: Sequence[tuple[str, int]], steps: Sequence[Collection[str]], lenders: Sequence[tuple[str, int]]
) -> dict[str, tuple[str, int]]:
    """Return (output, byte offset) of each buffer that fits into an output. lenders: (name, bytes), free until used."""
    lifetimes = _lifetimes(steps)
    taken: dict[str, list[tuple[int, int, int, int]]] = {name: [] for name, _ in lenders}
    lent: dict[str, tuple[str, int]] = {}
    for name, size in sorted(sizes, key=lambda buffer: -buffer[1]):
        if name not in lifetimes:
            continue
        first, last = lifetimes[name]
        for lender, room in lenders:
            offset = _lowest(aligned(size), first, last, taken[lender])
            if last < lifetimes.get(lender, (0, 0))[0] and offset + size <= room:
                taken[lender].append((offset, offset + aligned(size), first, last))
                lent[name] = lender, offset
                break
    return lent


def _lifetimes(steps: Sequence[Collection[str]]) -> dict[str, tuple[int, int]]:
    lifetimes: dict[str, tuple[int, int]] = {}
    for number, names in enumerate(steps):
        for name in names:
            lifetimes[name] = (lifetimes.get(name, (number, number))[0], number)
    return lifetimes


def _lowest(size: int, first: int, last: int, placed: Sequence[tuple[int, int, int, int]]) -> int:
    """The lowest offset free in these steps. placed: (start, end, first step, last step)."""
    offset = 0
    for start, end, begun, ended in sorted(placed):
        if begun > last or first > ended:
            continue
        if offset + size <= start:
            break
        offset = max(offset, end)
    return offset


def _placed_in_order(buffers: Sequence[tuple[int, int, int]], order: Sequence[int]) -> tuple[int, ...]:
    offsets = [0] * len(buffers)
    placed: list[tuple[int, int, int, int]] = []
    for index in order:
        size, first, last = buffers[index]
        offsets[index] = offset = _lowest(size, first, last, placed)
        placed.append((offset, offset + size, first, last))
    return tuple(offsets)
