"""Values of kernels in the model: numbers, what has no consequence, global arrays and parts of shared memory."""

from __future__ import annotations

import math
import operator
from fractions import Fraction
from typing import Any

from tests.support.hopper.machine import Machine, Race


class Opaque:
    """A value of no consequence for the order of memory: whatever is done to it is one again, and it is true."""

    def _same(self, *_arguments: Any, **_options: Any) -> Opaque:
        return self

    __call__ = __getitem__ = __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _same
    __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __and__ = __rand__ = __or__ = __ror__ = _same
    __xor__ = __lshift__ = __rshift__ = __truediv__ = __rtruediv__ = __neg__ = __invert__ = _same
    __lt__ = __le__ = __gt__ = __ge__ = __eq__ = __ne__ = _same  # type: ignore[assignment]
    __hash__ = object.__hash__

    def __getattr__(self, name: str) -> Opaque:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __iter__(self) -> Any:
        return iter((self, self))

    def __bool__(self) -> bool:
        return True


OPAQUE = Opaque()


class Number(int):
    """An integer as kernels have them: with `to`."""

    def to(self, *_arguments: Any, **_options: Any) -> Number:
        """Itself."""
        return self


for _name in ("add", "sub", "mul", "floordiv", "mod", "xor", "and", "or"):
    _word = f"{_name}_" if _name in ("and", "or") else _name
    for _method in (f"__{_name}__", f"__r{_name}__"):
        _function = getattr(operator, _word)

        def _compute(self: Number, other: Any, function: Any = _function, swap: bool = _method[2] == "r") -> Any:
            if not isinstance(other, int):
                return NotImplemented
            return Number(function(int(other), int(self)) if swap else function(int(self), int(other)))

        setattr(Number, _method, _compute)


def known(*values: Any) -> bool:
    """Whether all are numbers."""
    return all(isinstance(value, int) for value in values)


class Array:
    """Global memory with known integers."""

    def __init__(self, values: list[int], place: int = 0) -> None:
        self.values, self.place = values, place

    def __add__(self, offset: Any) -> Any:
        return Array(self.values, self.place + int(offset)) if known(offset) else OPAQUE


class Shared:
    """A part of shared memory. dims: which axis of the whole each of its axes is."""

    #: Of its elements, whose values nobody looks at.
    dtype = OPAQUE
    #: Of reinterpreted memory, along its first axis.
    parts: int | None = None

    def __init__(self, machine: Machine, name: str, shape: list[int], itemsize: int) -> None:
        self.machine, self.name, self.itemsize = machine, name, itemsize
        self.ranges, self.dims = tuple((0, size) for size in shape), tuple(range(len(shape)))

    def _part(self, dim: int, low: int, end: int, drop: bool) -> Shared:
        part = object.__new__(Shared)
        part.__dict__.update(self.__dict__)
        axis = self.dims[dim]
        start, stop = self.ranges[axis]
        if not 0 <= low < end <= stop - start:
            raise Race(f"{self.name} has {stop - start} parts along axis {axis}, got [{low}, {end})")
        part.ranges = tuple((start + low, start + end) if i == axis else pair for i, pair in enumerate(self.ranges))
        part.dims = tuple(dim for dim in self.dims if dim != axis) if drop else self.dims
        return part

    def index(self, place: int) -> Shared:
        """One along the first axis."""
        if self.parts is not None:
            part, axis = self.reinterpret(None, [1]), self.dims[0]
            start, stop = self.ranges[axis]
            size = Fraction(stop - start, self.parts)
            if not 0 <= place < self.parts:
                raise Race(f"{self.name} has {self.parts} parts, got {place}")
            ends = (start + place * size, start + (place + 1) * size)
            part.ranges = tuple(ends if i == axis else pair for i, pair in enumerate(self.ranges))
            return part
        return self._part(0, int(place), int(place) + 1, True)

    def slice(self, start: Any, length: Any, dim: int = 0) -> Shared:
        """Some along an axis. Of reinterpreted memory all."""
        if self.parts is not None:
            return self
        return self._part(dim, int(start), int(start) + int(length), False) if known(start, length) else self

    def permute(self, order: list[int]) -> Shared:
        """The same memory."""
        part = object.__new__(Shared)
        part.__dict__.update(self.__dict__)
        part.dims = tuple(self.dims[axis] for axis in order)
        return part

    def reinterpret(self, _dtype: Any, shape: list[int], *_layout: Any) -> Shared:
        """The same memory, in equal parts along its first axis."""
        part = object.__new__(Shared)
        part.__dict__.update(self.__dict__)
        part.parts = int(shape[0]) if known(shape[0]) else 1
        return part

    _reinterpret = reinterpret

    @property
    def shape(self) -> tuple[Number, ...]:
        """Sizes of its axes."""
        sizes = [self.ranges[axis] for axis in self.dims]
        return tuple(Number(end - low) for low, end in sizes)

    @property
    def nbytes(self) -> int:
        """Bytes of this part."""
        return math.prod(end - low for low, end in self.ranges) * self.itemsize

    def load(self, *_layout: Any) -> Any:
        """A generic read: the number that was stored, where it was one."""
        warp = self.machine.warp
        self.machine.access(self, False, "generic", warp.number, warp.clock)
        return self.machine.memory.get((self.name, self.ranges), OPAQUE)

    def store(self, value: Any) -> None:
        """A generic write."""
        warp = self.machine.warp
        self.machine.access(self, True, "generic", warp.number, warp.clock)
        self.machine.memory[self.name, self.ranges] = value
