"""What ops check beside their planners: layouts, dtypes, and counters that are read on the host."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.core import Tracer

from moe_core.base.arrays import ArraySpec, require_spec
from moe_core.base.dtypes import canonical
from moe_core.errors import InvalidInput, Unsupported
from moe_core.specs.operands import LayoutArrays
from moe_core.specs.routing import LayoutSpec


def require_layout_array(name: str, array: ArraySpec, layout: LayoutSpec) -> None:
    """A layout made under vmap or by hand may not be what its spec says."""
    require_spec(f"layout.{name}", array, getattr(LayoutArrays.specs(layout), name).shape, "int32")


def dtype_name(name: str, dtype: Any) -> str | None:
    """The canonical name of an option that is a dtype or None."""
    if dtype is None:
        return None
    try:
        return canonical(dtype)
    except InvalidInput as error:
        raise InvalidInput(f"{name}: {error}") from error


def on_host(op: str, counter: jax.Array) -> int:
    """Wait for a counter `[1]`. Raises Unsupported while tracing."""
    if isinstance(counter, Tracer):
        raise Unsupported(
            f"checked=True of {op} looks at the result on the host, got a call inside jit or another transformation; "
            "return invalid_ids and check it outside, or pass `invalid_ids[0] == 0` to jax.experimental.checkify.check"
        )
    return int(np.asarray(counter)[0])
