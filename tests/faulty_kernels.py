"""Copies of the kernels with a fault planted in each, and forks that run something on them."""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

#: The folder whose kernels are copied and changed.
KERNELS = Path(__file__).parents[1] / "moe_core" / "kernels"
#: Status of a fork that ended by an exception: none of what is run there gives it.
BROKEN = 99
#: What forks that interpret or compile kernels import and is no kernel: imported before, it is imported once.
INTERPRETER = ("triton.runtime.interpreter", "moe_core.interpreter.patches")
COMPILER = ("triton.compiler.compiler", "triton.backends.nvidia.compiler")


@dataclass(frozen=True)
class OpFault:
    """One line of a kernel changed: `old`, which must occur, becomes `new` everywhere in the file; tests of the op must
    fail."""

    old: str
    new: str


#: Of the copy that is the control, planted where the kernel file is empty.
NO_FAULT = OpFault("", "")


def plant(kernel_file: str, fault: OpFault, folder: Path) -> None:
    """Copy every kernel file into `folder`, one of them with the fault; none where kernel_file is empty."""
    folder.mkdir()
    for path in KERNELS.glob("*.py"):
        source = path.read_text()
        if path.stem == kernel_file:
            assert fault.old in source, f"{path.name} no longer holds {fault.old!r}: plant the fault elsewhere"
            source = source.replace(fault.old, fault.new)
        (folder / path.name).write_text(source)


def run_on_copy(folder: Path, action: Callable[[], int]) -> None:
    """Run the action in a fork whose kernels come from `folder`; its status is left in `status` in the folder, and what
    it prints in `log`. No kernel may have been imported before."""
    child = os.fork()
    if child:
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        (folder / "status").write_text(str(status))
        return
    status = BROKEN
    try:
        with (folder / "log").open("w") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
            importlib.import_module("moe_core.kernels").__path__[:] = [str(folder)]
            status = action()
            sys.stdout.flush()
    except BaseException:
        status = BROKEN
        traceback.print_exc()
        sys.stderr.flush()
    os._exit(status)
