"""The scratch arena of a plan: where each of its buffers lies."""

from __future__ import annotations

from collections.abc import Collection, Sequence

#: Every buffer of the arena starts at a multiple of this many bytes.
SCRATCH_ALIGNMENT = 256


def aligned(size: int) -> int:
    """The bytes that a buffer of `size` bytes takes."""
    return -(-size // SCRATCH_ALIGNMENT) * SCRATCH_ALIGNMENT


def place_buffers(sizes: Sequence[tuple[str, int]], steps: Sequence[Collection[str]]) -> tuple[int, ...]:
    """The byte offset of every buffer; those that no step needs at the same time share memory.

    sizes: (name, bytes). steps: the buffers that each names, in order. A buffer is needed from the first step that
    names it to the last, and lies at the lowest place that is free all that time. They are placed twice, the largest
    first and the earliest first; the smaller arena counts. Sharing is safe because a step writes nothing before all
    steps ahead of it have ended (`moe_core.ops.moe.pdl`).
    Example: sizes (("a", 512), ("b", 256), ("c", 256)) and steps (("a", "b"), ("b", "c")) give (0, 512, 0).
    """
    lifetimes: dict[str, tuple[int, int]] = {}
    for number, names in enumerate(steps):
        for name in names:
            lifetimes[name] = (lifetimes.get(name, (number, number))[0], number)
    buffers = [(aligned(size), *lifetimes.get(name, (0, 0))) for name, size in sizes]
    indices = range(len(buffers))
    largest = sorted(indices, key=lambda index: (-buffers[index][0], index))
    earliest = sorted(largest, key=lambda index: buffers[index][1])
    placements = [_placed_in_order(buffers, order) for order in (largest, earliest)]
    return min(placements, key=lambda offsets: max((offsets[i] + buffers[i][0] for i in indices), default=0))


def _placed_in_order(buffers: Sequence[tuple[int, int, int]], order: Sequence[int]) -> tuple[int, ...]:
    """Offsets of (bytes, first step, last step), each at the lowest free place."""
    offsets = [0] * len(buffers)
    placed: list[tuple[int, int, int, int]] = []
    for index in order:
        size, first, last = buffers[index]
        offset = 0
        for start, end, begun, ended in sorted(placed):
            if begun > last or first > ended:
                continue
            if offset + size <= start:
                break
            offset = max(offset, end)
        offsets[index] = offset
        placed.append((offset, offset + size, first, last))
    return tuple(offsets)
