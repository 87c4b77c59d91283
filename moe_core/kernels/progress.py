"""Blocks of one launch that wait for results of others, in Gluon; see `moe_core.chain`."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from moe_core.kernels.hopper_ring import barrier


@gluon.jit
def announce(place):
    """One more: everything that this block wrote can be seen by those that `wait` for it."""
    barrier()
    gl.atomic_add(place, 1, sem="release")


@gluon.jit
def wait(place, count):
    """Wait until so many have announced themselves here."""
    while gl.atomic_add(place, 0, sem="acquire") < count:
        pass
