"""Views of memory at addresses that are given later."""

from __future__ import annotations

import numpy as np
import pytest

from moe_core.base.arrays import ArraySpec, host_array, host_view


@pytest.mark.parametrize(
    "spec", [ArraySpec((3, 2), "float32"), ArraySpec((2, 2), "bfloat16", (1, 2)), ArraySpec((0, 5), "int32")], ids=str
)
def test_a_view_of_later_addresses_is_the_array_at_each(spec: ArraySpec) -> None:
    view, memory = host_view(spec), np.arange(64, dtype=np.uint8).reshape(2, 32)
    for row in memory:
        found, wanted = view(row.ctypes.data), host_array(row.ctypes.data, spec)
        assert (found.dtype, found.shape, found.strides) == (wanted.dtype, wanted.shape, wanted.strides)
        assert found.size == 0 or np.shares_memory(found, row)
        np.testing.assert_array_equal(found, wanted)
        assert found.flags.writeable
