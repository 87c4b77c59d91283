"""Copies of the kernels with a fault planted in each, and forks that run something on them."""

from __future__ import annotations

import importlib
import inspect
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from tests.support.paths import ROOT

#: The folder whose kernels are copied and changed.
KERNELS = ROOT / "moe_core" / "ops"
#: Status of a fork that ended by an exception: none of what is run there gives it.
BROKEN = 99
#: What forks that interpret or compile kernels import and is no kernel: imported before, it is imported once.
INTERPRETER = (
    *("triton.runtime.interpreter", "moe_core.runtime.interpreter.patches"),
    *("numpy.random", "numpy.testing"),
)
COMPILER = ("triton.compiler.compiler", "triton.backends.nvidia.compiler")


@dataclass(frozen=True)
class OpFault:
    """One line of a kernel changed: `old`, which must occur, becomes `new` everywhere in the file; tests of the op must
    fail."""

    old: str
    new: str


#: Of the copy that is the control, planted where the kernel file is empty.
NO_FAULT = OpFault("", "")
#: Faults by what is compiled or run on each copy, and by kernel file.
Planted = dict[str, dict[str, tuple[OpFault, ...]]]


def kernel_files() -> dict[str, Path]:
    """Files of `moe_core.ops` with kernels, by their modules' names there: `matmul.portable.kernel`."""
    found = {}
    for path in sorted(KERNELS.rglob("*.py")):
        name = ".".join(path.relative_to(KERNELS).with_suffix("").parts)
        if path.name != "__init__.py" and (path.parent.name == "kernels" or path.stem.endswith("kernel")):
            found[name] = path
    assert found, f"{KERNELS} holds no kernels"
    return found


def plant(kernel_file: str, fault: OpFault, folder: Path) -> None:
    """Copy every kernel file into `folder`, as it lies in `moe_core.ops`, one of them with the fault; none where
    kernel_file is empty."""
    files = kernel_files()
    assert not kernel_file or kernel_file in files, f"{kernel_file} is no kernel file: {', '.join(files)}"
    for name, path in files.items():
        source = path.read_text()
        if name == kernel_file:
            assert fault.old in source, f"{path.name} no longer holds {fault.old!r}: plant the fault elsewhere"
            source = source.replace(fault.old, fault.new)
        target = folder / path.relative_to(KERNELS)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(source)


def import_from(folder: Path) -> None:
    """Let kernels be imported from copies in `folder`, all else from where it lies. None may have been imported."""
    known = kernel_files()
    loaded = [name for name in known if f"moe_core.ops.{name}" in sys.modules]
    assert not loaded, f"{loaded} were imported before"
    for package in sorted({name.rpartition(".")[0] for name in known}):
        path = importlib.import_module(f"moe_core.ops.{package}").__path__
        path.insert(0, str(folder.joinpath(*package.split("."))))


def prepare_forks(modules: Iterable[str]) -> None:
    """Do once what every fork would do: import modules, and look where they lie, which `inspect` keeps."""
    for name in modules:
        importlib.import_module(name)
    inspect.getmodule(compile("", "nowhere", "exec"))


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
            import_from(folder)
            status = action()
            sys.stdout.flush()
    except BaseException:
        status = BROKEN
        traceback.print_exc()
        sys.stderr.flush()
    os._exit(status)


def run_on_faulty_copies(script: str, folder: Path, planted: Planted, *arguments: str) -> dict[Path, OpFault]:
    """Copies of the kernels in folders that are named after entries of `planted`, the first one for each unchanged,
    after a script of `tests.support.faults` has run on them, without TRITON_INTERPRET."""
    folders = {}
    for name, files in planted.items():
        (folder / name).mkdir()
        faults = [("", NO_FAULT), *((kernel_file, fault) for kernel_file in files for fault in files[kernel_file])]
        for number, (kernel_file, fault) in enumerate(faults):
            copy = folder / name / f"{kernel_file or 'unchanged'}-{number}"
            plant(kernel_file, fault, copy)
            folders[copy] = fault
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(folder / "cache")}
    command = [sys.executable, "-m", f"tests.support.faults.{script}", *arguments, *map(str, folders)]
    if folders:
        subprocess.run(command, cwd=ROOT, env=environment, check=True, timeout=600)
    return folders
