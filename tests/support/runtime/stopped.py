"""Calls that are broken off anywhere, in a process of their own: the next call's result is a fresh process's.

    python -m tests.support.runtime.stopped SEED WHAT HOW TRIALS [WHAT HOW TRIALS ...]

WHAT is a function of `WORK`, HOW one of `HOW`. Each trial forgets all plans, breaks one call off at a drawn place, and
compares the process's settings with those before and the next call's bytes with the first call's, at times in another
thread, which would wait for any lock that is left taken. Prints how many trials broke off.
"""

from __future__ import annotations

import ctypes
import os
import random
import re
import resource
import shutil
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from moe_core.base import threads
from moe_core.base.recent import forget_plans
from tests.support.runtime.injection import count_allocations, count_calls, fail_allocation, interrupt

#: Seconds after which a call that has not ended waits for a lock that nobody releases.
_HANGS = 60
T, D, F, E = 96, 64, 64, 8


_killed = False


def plan() -> Callable[[], bytes]:
    """A layer's plan for a GPU that this machine does not have."""
    from tests.support.moe import layer_plan

    return lambda: layer_plan(None, 64, save=True).canonical.encode()


def torch_layer() -> Callable[[], bytes]:
    """An eager layer and its gradients, or one launch in the interpreter, which would take seconds for them."""
    import torch

    import moe_torch

    torch.set_flush_denormal(True)  # a call changes it for its own time
    draw = torch.Generator().manual_seed(0)
    if os.environ.get("TRITON_INTERPRET") == "1":
        y, weights = torch.randn(5, 2, 16, generator=draw), torch.randn(5, 2, generator=draw)
        return lambda: moe_torch.ops.scale_rows(y.flatten(0, 1), weights.reshape(-1, 1)).numpy().tobytes()

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=draw).requires_grad_()

    x, gate_up, down, router = drawn(T, D), drawn(E, D, 2 * F), drawn(E, F, D), drawn(D, E)
    spec = moe_torch.MoESpec(moe_torch.Activation("silu"), moe_torch.RouterSpec(top_k=3))

    def call() -> bytes:
        y = moe_torch.moe(x, moe_torch.ExpertWeights(gate_up, down), moe_torch.RouterWeights(router), spec).output
        found = (y, *torch.autograd.grad(y.square().sum(), (x, gate_up, down, router)))
        return b"".join(value.detach().numpy().tobytes() for value in found)

    return call


def torch_arena() -> Callable[[], bytes]:
    """A layer whose scratch memory is so large that the allocator asks the system for it."""
    import torch

    import moe_torch

    x, *weights = (torch.from_numpy(array) for array in _arena_arrays())
    experts, router = moe_torch.ExpertWeights(*weights[:2]), moe_torch.RouterWeights(weights[2])
    spec = moe_torch.MoESpec(moe_torch.Activation("silu"), moe_torch.RouterSpec(top_k=4))
    return lambda: moe_torch.moe(x, experts, router, spec).output.numpy().tobytes()


def jax_arena() -> Callable[[], bytes]:
    """The same in JAX."""
    import jax

    import moe_jax

    x, *weights = (jax.numpy.asarray(array) for array in _arena_arrays())
    experts, router = moe_jax.ExpertWeights(*weights[:2]), moe_jax.RouterWeights(weights[2])
    spec = moe_jax.MoESpec(moe_jax.Activation("silu"), moe_jax.RouterSpec(top_k=4))
    return lambda: np.asarray(moe_jax.moe(x, experts, router, spec).output).tobytes()


def _arena_arrays() -> list[np.ndarray]:
    draw = np.random.default_rng(0)
    return [draw.standard_normal(shape, np.float32) for shape in ((12000, 8), (E, 8, 1024), (E, 512, 8), (8, E))]


def jax_layer() -> Callable[[], bytes]:
    """A layer and its gradients, compiled anew in every call."""
    import jax

    import moe_jax

    keys = jax.random.split(jax.random.key(0), 4)
    shapes = (T, D), (E, D, 2 * F), (E, F, D), (D, E)
    arrays = tuple(jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True))
    spec = moe_jax.MoESpec(moe_jax.Activation("silu"), moe_jax.RouterSpec(top_k=3))

    def call() -> bytes:
        def loss(x: Any, gate_up: Any, down: Any, router: Any) -> Any:
            experts = moe_jax.ExpertWeights(gate_up, down)
            return (moe_jax.moe(x, experts, moe_jax.RouterWeights(router), spec).output ** 2).sum()

        value, gradients = jax.jit(jax.value_and_grad(loss, (0, 1, 2, 3)))(*arrays)
        return b"".join(np.asarray(found).tobytes() for found in (value, *gradients))

    return call


def compiled() -> Callable[[], bytes]:
    """A kernel's machine code, by Triton with an empty cache: what a killed process left there is the next call's."""
    from moe_core.base.arrays import ArraySpec
    from moe_core.base.target import Target
    from moe_core.ops.reduction.reduce import plan_scale_rows
    from moe_core.plan.steps import KernelLaunch
    from moe_core.runtime.compiler import compile_launch

    folder, calls = tempfile.mkdtemp(), 0

    def call() -> bytes:
        nonlocal calls
        os.environ["TRITON_CACHE_DIR"] = f"{folder}/{calls}"
        target = Target("cuda", 90, 132)
        found = plan_scale_rows(ArraySpec((10, 8), "float32"), ArraySpec((10, 1), "float32"), target)
        (launch,) = found.steps
        assert isinstance(launch, KernelLaunch)
        cubin = compile_launch(found, launch, target).asm["cubin"]
        calls += 1
        return cubin

    return call


def checkpoint() -> Callable[[], bytes]:
    """A checkpoint of several files, a file of plans and a table of tiles over older ones: whole or not at all."""
    from moe_core.checkpoint import open_checkpoint, save_checkpoint
    from moe_core.layers import LayerWeights
    from moe_core.plan import registry
    from tests.support.checkpoint_files import config_of, write_family
    from tests.support.plans import small_plan

    folder = Path(tempfile.mkdtemp())
    source = open_checkpoint(write_family(folder / "read", "qwen3_moe", "per_expert", "bfloat16")[0])
    config, target, plans = config_of("qwen3_moe"), folder / "written", folder / "plans.json"
    layers = [(n, LayerWeights.from_checkpoint(source.layer(n))) for n in source.moe_layers]
    keys = [registry.register(small_plan(tokens=tokens)) for tokens in (1, 2)]
    written: dict[Path, set[bytes]] = {}

    def contents() -> dict[Path, bytes]:
        files = [*target.iterdir(), plans] if target.exists() else [plans]
        # A process that is killed leaves files under names that nobody reads.
        files = [file for file in files if not file.name.endswith(".partial")]
        return {file.relative_to(folder): file.read_bytes() for file in files}

    def call() -> bytes:
        # What an earlier call has left: whole files, and config.json only where all others are there.
        found = contents() if plans.exists() else {}
        if written and any(content not in written[name] for name, content in found.items() if name in written):
            raise AssertionError(f"half a file is left of {sorted(found)}")
        if written and not _killed and not {*found} <= {*written}:
            raise AssertionError(f"{sorted({*found} - {*written})} are left")
        if Path("written/config.json") in found and not {*found} >= {*written}:
            raise AssertionError(f"{sorted({*written} - {*found})} are missing of a checkpoint")
        shutil.rmtree(target, ignore_errors=True)
        registry.export_plans(plans, keys)
        found = contents()
        registry.export_plans(plans, keys[:1])
        save_checkpoint(target, config, layers, shard_bytes=5000)
        final = contents()
        for some in (found, final):
            for name, content in some.items():
                written.setdefault(name, set()).add(content)
        return b"".join(content for _, content in sorted(final.items()))

    return call


_FUNCTIONS = (plan, torch_layer, torch_arena, jax_layer, jax_arena, compiled, checkpoint)
WORK = {function.__name__: function for function in _FUNCTIONS}


def settings() -> tuple[object, ...]:
    """What belongs to the process or thread, and a call changes for its own time."""
    environment = (ctypes.c_uint32 * 16)()
    ctypes.CDLL("libm.so.6").fegetenv(environment)
    # On x86 the control bits of MXCSR; elsewhere the words may hold flags of earlier operations.
    control = environment[7] & 0xFFC0 if os.uname().machine == "x86_64" else 0
    read, _ = threads._blas()
    return read(), threads._runs, threads._limit.get(), control, tuple(np.geterr().items()), os.getcwd()


def in_another_thread(call: Callable[[], bytes]) -> bytes:
    results: list[bytes] = []
    thread = threading.Thread(target=lambda: results.append(call()), daemon=True)
    thread.start()
    thread.join(_HANGS)
    assert results, "a call in another thread hangs or fails"
    return results[0]


def _interrupt(call: Callable[[], bytes], place: int, draw: random.Random) -> None:
    interrupt(call, place, draw)


def _allocation(call: Callable[[], bytes], place: int, draw: random.Random) -> None:
    fail_allocation(call, place)


def _kill(call: Callable[[], bytes], place: int, draw: random.Random) -> None:
    """As a worker process is killed, which begins from what this one has in memory and on the disk."""
    global _killed
    _killed, child = True, os.fork()
    if child == 0:
        interrupt(call, place, draw, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        os._exit(0)
    if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL:
        raise ChildProcessError("killed")


def _full_disk(call: Callable[[], bytes], place: int, draw: random.Random) -> None:
    """No file may grow beyond some thousand bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (draw.randrange(8000), hard))
    try:
        call()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def _arena(call: Callable[[], bytes], place: int, draw: random.Random) -> None:
    """The process gets next to no more memory: the error says how much was asked for and, in torch, by which op."""
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + 2**22, hard))
    try:
        call()
    except Exception as error:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        notes = " ".join(getattr(error, "__notes__", ()))
        named = re.search(r"allocat\w+ (\d+) bytes", str(error)) and (
            "RESOURCE_EXHAUSTED" in str(error) or re.match(r"moe asked for \d+ bytes .* of scratch memory", notes)
        )
        if not named:
            print(f"what was asked for is not named: {error!r} {notes}", file=sys.stderr, flush=True)
            os._exit(1)  # no exception, all of which count as broken off
        raise
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


HOW = {
    "interrupt": _interrupt, "allocation": _allocation, "kill": _kill, "full_disk": _full_disk, "arena": _arena
}  # fmt: skip


def main(what: str, how: str, trials: int, seed: int) -> int:
    call, draw, broken_off = WORK[what](), random.Random(seed), 0
    expected = call()
    forget_plans()
    assert call() == expected, "two calls differ"
    forget_plans()
    places = count_allocations(call) if how == "allocation" else count_calls(call)
    before = settings()
    for trial in range(trials):
        forget_plans()
        place, text = draw.randint(1, places), "nothing happened"
        try:
            HOW[how](call, place, draw)
        except BaseException:  # XLA makes an error of its own of KeyboardInterrupt
            broken_off += 1
            text = traceback.format_exc()
        try:
            assert settings() == before, f"settings were {before}, are {settings()}"
            assert call() == expected, "the next call differs"
            if trial % 8 == 0:
                assert in_another_thread(call) == expected, "a call in another thread differs"
        except BaseException:
            print(f"{what}, trial {trial}, place {place} of {places}, which ended so:\n{text}", file=sys.stderr)
            raise
    return broken_off


if __name__ == "__main__":
    runs = [sys.argv[place : place + 3] for place in range(2, len(sys.argv), 3)]
    print(*(main(what, how, int(trials), int(sys.argv[1])) for what, how, trials in runs))
