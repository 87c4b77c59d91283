"""Interrupts and forks inside the interpreter engine, in a process of their own.

    TRITON_INTERPRET=1 python -m tests.support.runtime.interrupted launches|forks TRIALS

prints how many trials were interrupted or forked inside of a launch. Anything that differs from an undisturbed launch
ends the process with an error.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time

import numpy as np
import triton.language as tl

from moe_core.runtime import interpreter
from tests.support.runtime.interpreter_kernels import add_one_kernel

PROGRAMS = 8
#: Seconds after which a launch that has not ended waits for a lock that nobody releases.
_HANGS = 20


def launch(programs: int = PROGRAMS) -> None:
    """Raises AssertionError where the result is wrong."""
    array = np.arange(4 * programs, dtype=np.float32)
    interpreter.launch(add_one_kernel, (programs,), [("output", interpreter.HostPointer(array.ctypes.data, "float32"))])
    np.testing.assert_array_equal(array, np.arange(4 * programs) + 1)


def launch_elsewhere() -> None:
    """A launch in another thread, which waits for every lock that this one has left taken."""
    done: list[bool] = []
    thread = threading.Thread(target=lambda: (launch(2), done.append(True)), daemon=True)
    thread.start()
    thread.join(_HANGS)
    assert done, "a launch in another thread hangs or fails"


def interrupt_launches(trials: int) -> int:
    """Ctrl-C at times drawn from those of a launch: the lock is free afterwards, and the language as it was."""
    launch()
    begin = time.perf_counter()
    launch()
    seconds, before, interrupted = time.perf_counter() - begin, dict(vars(tl)), 0
    draw = random.Random(0)
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    for _ in range(trials):
        try:
            signal.setitimer(signal.ITIMER_REAL, draw.uniform(1e-6, 1.1 * seconds))
            launch()
            time.sleep(1.1 * seconds)  # for an alarm that comes late
        except KeyboardInterrupt:
            interrupted += 1
        launch_elsewhere()
    launch()
    assert dict(vars(tl)) == before, "the language is not restored"
    return interrupted


def fork_while_launching(trials: int) -> int:
    """Forks while another thread launches: the child's launch ends, and is right."""
    launch()
    before = dict(vars(tl))
    leave = threading.Event()

    def work() -> None:
        while not leave.is_set():
            launch(64)

    thread = threading.Thread(target=work)
    thread.start()
    inside = 0
    for _ in range(trials):
        time.sleep(0.003)
        inside += interpreter._language._depth
        child = os.fork()
        if child == 0:
            status = 1
            try:
                signal.signal(signal.SIGALRM, signal.SIG_DFL)
                signal.alarm(_HANGS)
                launch()
                launch_elsewhere()
                status = 0 if dict(vars(tl)) == before else 2
            finally:
                os._exit(status)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert status == 0, f"the child ended with {status}"
    leave.set()
    thread.join()
    return inside


if __name__ == "__main__":
    run = {"launches": interrupt_launches, "forks": fork_while_launching}[sys.argv[1]]
    print(run(int(sys.argv[2])))
