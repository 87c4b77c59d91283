"""Forks of a process that has the frameworks imported: each runs pytest in a tree and ends.

Nothing of the packages is imported before the fork, so the fork imports the tree's.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import multiprocessing.forkserver
import multiprocessing.util
import os
import pathlib
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

from tools.mutate.plugin import Plugin

#: Imported once, where forks are not `alone`. What is not installed is left out. Neither torch._inductor, which begins
#: a thread in some releases, nor jax_tvm_ffi: beside CUDA forks of a process that has imported one of them die.
SHARED = (
    *("numpy", "ml_dtypes", "triton", "triton.language", "triton.runtime.interpreter", "torch", "torch.nn"),
    *("torch._dynamo", "torch.export", "torch.testing", "jax", "jax.numpy", "jax.experimental.shard_map"),
    *("flax.nnx", "flax.linen", "optax", "safetensors.numpy", "safetensors.torch"),
    *("transformers", "transformers.modeling_utils"),
    *("transformers.models.mixtral.modeling_mixtral", "hypothesis", "hypothesis.strategies", "hypothesis.extra.numpy"),
    *("pytest",),
)
#: What forks of any kind share: nothing that starts threads or talks to a device.
ALONE = ("numpy", "hypothesis", "pytest")
#: Test files whose ranks are processes import it.
RANKS = "tests.support.parallel"
#: A fork may hold this many bytes, and map as many as ADDRESSES, of which tests with sparse arrays touch few: a mutated
#: size must not take the machine's memory.
MEMORY, ADDRESSES = 8 << 30, 64 << 30


@dataclass
class Job:
    """One pytest: files to collect, tests to keep in order (None: all), limits in seconds of processor and of clock."""

    name: str
    tree: pathlib.Path
    files: list[str]
    order: list[str] | None
    seconds: float
    record: bool = False
    keep_going: bool = False
    report: pathlib.Path = field(default_factory=pathlib.Path)
    log: pathlib.Path = field(default_factory=pathlib.Path)
    pid: int = 0
    began: float = 0.0


@dataclass(frozen=True)
class Outcome:
    """status: pytest's exit status, minus the signal that ended it, or None where time or memory was up."""

    job: Job
    status: int | None
    events: list[dict[str, Any]]
    log: str
    wall: float

    def of(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["event"] == kind]


def prepare(alone: bool) -> None:
    """Set what tests/conftest.py sets before the first import, and import what forks share.

    alone: nearly nothing, so that each fork imports the frameworks itself, which takes seconds.
    """
    for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS"):
        os.environ.setdefault(name, "1")
    os.environ["OPENBLAS_CORETYPE"] = "Sandybridge"
    os.environ.setdefault("TRITON_INTERPRET", "1")
    for name in ALONE if alone else SHARED:
        try:
            importlib.import_module(name)
        except ImportError:
            print(f"not installed: {name}", file=sys.stderr)
    packages = [name for name in sys.modules if name.startswith(("moe_core", "moe_torch", "moe_jax"))]
    assert not packages, f"imported before the fork: {packages}"
    gc.collect()
    gc.freeze()


def start(job: Job, scratch: pathlib.Path) -> None:
    """Fork; the child never returns."""
    job.report = pathlib.Path(tempfile.mkstemp(dir=scratch, suffix=".jsonl")[1])
    job.log = job.report.with_suffix(".log")
    job.began = time.monotonic()
    sys.stdout.flush()
    sys.stderr.flush()
    job.pid = os.fork()
    if job.pid == 0:
        status = 70
        try:
            status = _child(job, scratch)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)


def _child(job: Job, scratch: pathlib.Path) -> int:
    os.setsid()
    log = os.open(job.log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    resource.setrlimit(resource.RLIMIT_CPU, (int(job.seconds) + 1, int(job.seconds) + 5))
    resource.setrlimit(resource.RLIMIT_DATA, (ADDRESSES, ADDRESSES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.chdir(job.tree)
    sys.path[:] = [str(job.tree), *(path for path in sys.path if path and not _has_packages(path))]
    elsewhere = [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p and not _has_packages(p)]
    os.environ["PYTHONPATH"] = os.pathsep.join([str(job.tree), *elsewhere])
    os.environ["TMPDIR"] = tempfile.mkdtemp(dir=scratch)
    tempfile.tempdir = None
    for name in [name for name in sys.modules if name.partition(".")[0] in ("tools", "tests")]:
        del sys.modules[name]
    serve_ranks(job.files)
    plugin = Plugin(job.report, str(job.tree), job.order, job.record)
    # Plugins by name: those that a plugin looks for by itself were imported before the fork, of which pytest warns.
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    options = ["-q", "-p", "_hypothesis_pytestplugin", "-p", "pytest_timeout", "-p", "no:cacheprovider"]
    options += ["--timeout", "0", "--no-header", "--tb", "short", "-W", "ignore::pytest.PytestAssertRewriteWarning"]
    import pytest

    return int(pytest.main([*options, *([] if job.record or job.keep_going else ["-x"]), *job.files], plugins=[plugin]))


def serve_ranks(files: list[str]) -> None:
    """Let the server that test processes fork ranks from be a fork of this one, where one of these files has ranks: it
    would start anew and import the frameworks for many seconds."""
    if not any(RANKS in pathlib.Path(file).read_text() for file in files if os.path.exists(file)):
        return

    def fork(path: Any, arguments: list[Any], passed: Any) -> int:
        if (pid := os.fork()) == 0:
            try:
                exec(arguments[-1], {})
            finally:
                os._exit(1)
        return pid

    with mock.patch.object(multiprocessing.util, "spawnv_passfds", fork):
        multiprocessing.set_forkserver_preload(["tests.support.parallel.torch"])
        multiprocessing.forkserver.ensure_running()


def _has_packages(path: str) -> bool:
    return os.path.exists(os.path.join(path, "moe_core"))


def finish(job: Job, status: int | None) -> Outcome:
    lines = job.report.read_text().splitlines()
    job.report.unlink()
    log = job.log.read_text(errors="replace")[-2000:]
    job.log.unlink()
    return Outcome(job, status, [json.loads(line) for line in lines], log, time.monotonic() - job.began)


def end(job: Job) -> None:
    """Kill the fork and whatever it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(job.pid, signal.SIGKILL)


def resident(pid: int) -> int:
    """Bytes of memory that a process holds; 0 where the system does not say."""
    try:
        return int(pathlib.Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()
    except (OSError, IndexError):
        return 0


def run(
    slots: list[pathlib.Path], scratch: pathlib.Path, make: Callable[[pathlib.Path], Job | None], until: float
) -> Iterator[Outcome]:
    """Run jobs, one at a time in each tree, until `make`, given a tree that is free, has none and none runs.

    until: the time of `time.monotonic` at which what runs is ended without an outcome.
    """
    free, running = list(slots), {}
    while True:
        if time.monotonic() > until:
            for job in running.values():
                end(job)
                os.waitpid(job.pid, 0)
            return
        while free and (job := make(free[-1])):
            free.pop()
            start(job, scratch)
            running[job.pid] = job
        if not running:
            return
        time.sleep(0.02)
        for job in list(running.values()):
            done, status = os.waitpid(job.pid, os.WNOHANG)
            # On a busy machine a fork has little of a processor, whose seconds have a limit of their own. One that
            # waits for ever must end all the same.
            load = os.getloadavg()[0] / (os.cpu_count() or 1)
            late = time.monotonic() - job.began > 4 * job.seconds * min(max(1.0, load), 2.5)
            if not done and not late and resident(job.pid) <= MEMORY:
                continue
            end(job)
            if not done:
                os.waitpid(job.pid, 0)
            code = os.waitstatus_to_exitcode(status) if done else None
            del running[job.pid]
            yield finish(job, None if code == -signal.SIGXCPU else code)
            free.append(job.tree)


def die(tree: pathlib.Path, scratch: pathlib.Path, file: str) -> bool:
    """Whether a fork dies of a signal over a file of tests: some libraries do not survive a fork."""
    jobs = iter([Job("probe", tree, [file], None, 60, record=True)])
    (outcome,) = run([tree], scratch, lambda _: next(jobs, None), float("inf"))
    return outcome.status is not None and outcome.status < 0
