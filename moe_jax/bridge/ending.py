"""Wait at exit for programs with callbacks: XLA's threads would run them without an interpreter, and abort."""

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
    """Register the wait. Call it before this process gets CPU devices."""
    global _process
    # A forked child has none of XLA's threads.
    if _process is None:
        _process = os.getpid()
        # After JAX's import, so that this runs before JAX gives up its devices.
        atexit.register(_wait)


def _wait() -> None:
    if os.getpid() != _process:
        return
    for array in jax.live_arrays("cpu"):
        with contextlib.suppress(Exception):  # of the program
            array.block_until_ready()
    # A program on all devices begins when this thread's earlier work on them has ended.
    devices = np.array(jax.local_devices(backend="cpu"))
    with contextlib.suppress(Exception):
        sharding = NamedSharding(Mesh(devices, ("devices",)), PartitionSpec("devices"))
        zeros: Any = jax.device_put(np.zeros(len(devices), np.float32), sharding)
        jax.jit(lambda x: -x)(zeros).block_until_ready()
