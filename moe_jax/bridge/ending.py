"""The end of a process: it waits for programs whose callbacks XLA's threads would otherwise run without an interpreter.

On a CPU a call of a program may return before the program ends. A callback that begins when Python is gone ends the
process: before Python 3.14, a thread that asks for the interpreter is unwound through XLA's frames, which
`std::terminate` answers ("terminate called without an active exception"). JAX waits at exit for programs with its own
callbacks alone.
"""

from __future__ import annotations

import atexit
import contextlib
import os
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

_process: int | None = None


def wait_at_exit() -> None:
    """Let this process wait, when it ends, for what its CPU devices were given to do. Called before they are."""
    global _process
    # A child that was forked has none of XLA's threads, so nothing would end there.
    if _process is None:
        _process = os.getpid()
        # Behind JAX's import, so that this runs before JAX gives its devices up.
        atexit.register(_wait)


def _wait() -> None:
    if os.getpid() != _process:
        return
    # Results of programs of all threads, where anybody holds them.
    for array in jax.live_arrays("cpu"):
        with contextlib.suppress(Exception):  # of the program, whose result nobody reads
            array.block_until_ready()
    # One program on all devices begins when all that this thread gave them before has ended.
    devices = np.array(jax.local_devices(backend="cpu"))
    with contextlib.suppress(Exception):
        place = NamedSharding(Mesh(devices, ("devices",)), PartitionSpec("devices"))
        zeros: Any = jax.device_put(np.zeros(len(devices), np.float32), place)
        jax.jit(lambda x: -x)(zeros).block_until_ready()
