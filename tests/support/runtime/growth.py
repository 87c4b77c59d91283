"""Memory of a process that calls a layer with one number of tokens after the other.

    python -m tests.support.runtime.growth CALLS MODE [MODE ...]

prints, as JSON, by how many MB the process grew from the first hundredth of the calls to the last one. A short run
starts at a quarter, fills smaller caches, leaves XLA's compiler out, and prints how many bytes our own Python code
holds at its end for each call.
"""

from __future__ import annotations

import ctypes
import gc
import json
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np

from moe_core.base import recent

_LIBRARY = ctypes.CDLL(None)
D, F, E = 8, 8, 4
#: Numbers of tokens of a full run; more than caches keep.
_SIZES = 2000
#: JAX keeps a program of 1.5 MB and more for every number of tokens, be it of one sine. After so many this process
#: tells it to forget.
_PROGRAMS = 25


def resident_mb() -> float:
    """MB that the process holds. Free pages that glibc keeps are given back first: beside XLA's compiler, whose threads
    allocate and free a megabyte for every program, they come and go by tens of MB."""
    if hasattr(_LIBRARY, "malloc_trim"):
        _LIBRARY.malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 1e6


def torch_call(mode: str) -> Callable[[int], object]:
    import torch

    import moe_torch

    gradient = mode == "train"
    experts = moe_torch.ExpertWeights(
        torch.ones(E, D, 2 * F, requires_grad=gradient), torch.ones(E, F, D, requires_grad=gradient)
    )
    router = moe_torch.RouterWeights(torch.ones(D, E, requires_grad=gradient))
    spec = moe_torch.MoESpec(moe_torch.Activation("silu"), moe_torch.RouterSpec(top_k=2))

    def forward(x: torch.Tensor) -> torch.Tensor:
        return moe_torch.moe(x, experts, router, spec).output

    run = torch.compile(forward, dynamic=True) if mode == "compile" else forward

    def call(tokens: int) -> None:
        y = run(torch.ones(tokens, D))
        if gradient:
            y.sum().backward()

    return call


def jax_call(lower_only: bool, plain: bool) -> Callable[[int], object]:
    """plain: a jitted function that calls nothing of ours."""
    import jax
    import jax.numpy as jnp

    import moe_jax

    experts = moe_jax.ExpertWeights(jnp.ones((E, D, 2 * F)), jnp.ones((E, F, D)))
    router = moe_jax.RouterWeights(jnp.ones((D, E)))
    spec = moe_jax.MoESpec(moe_jax.Activation("silu"), moe_jax.RouterSpec(top_k=2))
    run = jax.jit(jnp.sin if plain else lambda x: moe_jax.moe(x, experts, router, spec).output)
    seen: set[int] = set()

    def call(tokens: int) -> None:
        if tokens not in seen and len(seen) % _PROGRAMS == 0:
            jax.clear_caches()
        seen.add(tokens)
        x = np.ones((tokens, D), np.float32)
        if lower_only:
            run.lower(x)
        else:
            run(x).block_until_ready()

    return call


def grow(mode: str, calls: int) -> dict[str, float]:
    sizes, short, is_jax = min(_SIZES, calls), calls < _SIZES, mode.startswith("jax")
    call = jax_call(short, mode == "jax plain") if is_jax else torch_call(mode)
    begin = calls // 4 if short else calls // 100
    for number in range(calls):
        if number == begin:
            gc.collect()
            if short:
                tracemalloc.start(1)
            before = resident_mb()
        call(1 + number * sizes // calls if is_jax else 1 + number % sizes)
    gc.collect()
    found = {"grown_mb": resident_mb() - before}
    if short:
        ours = [
            tracemalloc.Filter(True, str(Path(__file__).parents[3] / f"moe_{name}/*"))
            for name in ("core", "torch", "jax")
        ]
        held = sum(one.size for one in tracemalloc.take_snapshot().filter_traces(ours).statistics("filename"))
        found["held_per_call"] = held / (calls - begin)
        tracemalloc.stop()
    return found


def main(calls: int, *modes: str) -> dict[str, dict[str, float]]:
    if calls < 20 * recent.PLANS_KEPT:
        # A short run must fill the caches too.
        recent.PLANS_KEPT = calls // 20
        recent.Recent.__init__.__defaults__ = (recent.PLANS_KEPT,)
    return {mode: grow(mode, calls) for mode in modes}


if __name__ == "__main__":
    print(json.dumps(main(int(sys.argv[1]), *sys.argv[2:])))
