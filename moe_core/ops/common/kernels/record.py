"""Records: named values that device functions take as one argument."""

import triton
from triton.language.core import _aggregate, base_value, constexpr


def record(cls):
    """A class whose annotations name its fields: in a kernel `Tile(block, expert)` makes one, `tile.block` reads it.

    A field annotated with `constexpr` must be a constant. Another one may be anything, None included.
    """
    interpreted = triton.knobs.runtime.interpret
    # A constant, so that Triton's cache tells records with other fields apart.
    fields = constexpr(tuple(cls.__annotations__))

    def fill(self, *values):
        for name, value in zip(fields.value, values, strict=True):
            setattr(self, name, value if interpreted or isinstance(value, base_value) else constexpr(value))

    if interpreted:
        cls.__init__ = fill
        return cls
    cls.__init__ = triton.constexpr_function(fill)
    cls.__annotations__ = {name: kind if kind is constexpr else object for name, kind in cls.__annotations__.items()}
    return _aggregate(cls)
