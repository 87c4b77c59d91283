"""What the compiler refuses of what Triton made of a kernel."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from moe_core.ops.reduction.reduce import REDUCE
from moe_core.ops.routing.topk import ROUTE
from moe_core.runtime.compiler import require_counted_once

ONCE = {
    "blocked": "#ttg.blocked<{sizePerThread = [2], threadsPerWarp = [32], warpsPerCTA = [8], order = [0]}>",
    "linear": "#ttg.linear<{register = [[1], [2]], lane = [[4], [0], [0], [0], [0]], warp = [[8], [16]], block = []}>",
    "no register": "#ttg.linear<{register = [], lane = [[1], [2], [4], [0], [0]], warp = [[0], [0]], block = []}>",
}
REPEATED = {
    "blocked": "#ttg.blocked<{sizePerThread = [16], threadsPerWarp = [32], warpsPerCTA = [8], order = [0]}>",
    "linear": "#ttg.linear<{register = [[0]], lane = [[0], [0], [0], [0], [0]], warp = [[1], [2], [4]], block = []}>",
    "two": "#ttg.linear<{register = [[1], [0]], lane = [[0], [0], [0], [0], [0]], warp = [[2], [4]], block = []}>",
    "unknown": "#ttg.some_layout<{}>",
}


def module(layout: str) -> str:
    """TTGIR of two histograms over 8 elements, the second of this layout."""
    return f"""#blocked = {ONCE["blocked"]}
#other = {layout}
module {{
    %a = tt.histogram %x, %m : tensor<8xi32, #ttg.slice<{{dim = 1, parent = #blocked}}>> -> tensor<64xi32, #blocked>
    %b = tt.histogram %y : tensor<8xi32, #other> -> tensor<64xi32, #blocked> loc(#loc1)
}}
"""


@pytest.mark.parametrize("layout", ONCE.values(), ids=ONCE)
def test_histograms_that_count_once(layout: str) -> None:
    require_counted_once(ROUTE, module(layout))


@pytest.mark.parametrize("layout", REPEATED.values(), ids=REPEATED)
def test_histograms_that_would_count_twice(layout: str) -> None:
    with pytest.raises(RuntimeError, match="topk:route would count each of 8 elements several times: its histogram"):
        require_counted_once(ROUTE, module(layout))


def test_a_histogram_that_cannot_be_read() -> None:
    with pytest.raises(RuntimeError, match="3 histograms, of which 2 have a layout that is known"):
        require_counted_once(ROUTE, module(ONCE["linear"]) + "%c = tt.histogram %z : vector<8xi32>")


def test_a_histogram_that_is_not_declared() -> None:
    require_counted_once(REDUCE, "")
    with pytest.raises(RuntimeError, match="reduce has histograms, and its Kernel does not say counts_slots=True"):
        require_counted_once(REDUCE, module(ONCE["linear"]))


_KEYS = """
import sys
from moe_core.runtime import compiler

keys = {}
for name in sys.argv[1:]:
    function = compiler.load_kernel(name)
    compiler._make_keys(function.__module__)
    keys[name] = function.cache_key
    values = {}
    for (constant, _), (value, _) in function.used_global_vals.items():
        # Of two values under one name, the address would say which is first.
        assert values.setdefault(constant, str(value)) == str(value), (name, constant)
print(sorted(keys.items()))
"""


def test_kernels_have_one_key_whatever_came_before() -> None:
    """So that another process finds them on the disk. Triton 3.6 would give keys by the order of kernels."""
    names = [f"matmul.sm90.kernels.{name}" for name in ("swapped:matmul_ogs", "matmul:matmul_ogs", "fp8:matmul_fp8")]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    keys = {
        subprocess.run(
            [sys.executable, "-c", _KEYS, *order], env=environment, capture_output=True, text=True, check=True
        ).stdout
        for order in (names, names[::-1])
    }
    assert len(keys) == 1 and "swapped" in keys.pop()
