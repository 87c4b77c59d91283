"""What every test process needs before the first import of a framework or a kernel."""

from __future__ import annotations

import contextlib
import gc
import os
import platform
import sys
import threading
from collections.abc import Callable, Iterator
from importlib import metadata
from typing import Any

# BLAS and OpenMP pools otherwise take every core in every test process.
for _variable in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS"):
    os.environ.setdefault(_variable, "1")
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
# Programs do not record which lines their operations come from: a twelfth of the time of tests of gradients.
os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")
# Nor does every expected error look for the files of its frames on the disk.
os.environ.setdefault("JAX_TRACEBACK_FILTERING", "off")
# The interpreter's dots are NumPy's. OpenBLAS kernels for newer processors add up a row in an order that depends on its
# place in the tile, unlike any GPU; this one's order is the same for every row, whatever the machine sets.
if platform.machine() in ("x86_64", "AMD64"):
    os.environ["OPENBLAS_CORETYPE"] = "Sandybridge"

from moe_core.runtime.cuda import cuda_available

_xla_flags = {"xla_force_host_platform_device_count": "4"}
if not cuda_available():
    os.environ["TRITON_INTERPRET"] = "1"
    # On a CPU XLA compiles programs for much longer than tests run them. Documented programs, in
    # tests/docs/test_docs.py, are compiled as users compile them, but in .ci/run.
    _xla_flags |= {"xla_backend_optimization_level": "0", "xla_llvm_disable_expensive_passes": "true"}
    with contextlib.suppress(metadata.PackageNotFoundError):
        # From 0.11 on jaxlib has no option like the first, and ends the process for it.
        if tuple(map(int, metadata.version("jaxlib").split(".")[:2])) < (0, 11):
            _xla_flags["xla_cpu_use_fusion_emitters"] = "false"
            # Threads do not pay for small programs.
            _xla_flags["xla_cpu_parallel_codegen_split_count"] = "1"
for _name, _value in _xla_flags.items():
    if _name not in os.environ.get("XLA_FLAGS", ""):
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --{_name}={_value}".strip()

import pytest
from hypothesis import HealthCheck, settings

# Examples run whole kernels: few and slow, MOEBIUS_EXAMPLES asks for more. Fixed draws keep a run repeatable.
settings.register_profile(
    "moebius",
    deadline=None,
    derandomize="MOEBIUS_EXAMPLES" not in os.environ,
    max_examples=int(os.environ.get("MOEBIUS_EXAMPLES", "10")),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    print_blob=True,
)
settings.load_profile("moebius")

# The interpreter and tracing make many short-lived objects beside frameworks' millions of lasting ones: collecting them
# as often as by default took a tenth of the time of the three files it was measured on (plans, layers, JAX bridge).
gc.set_threshold(50_000, 20, 50)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip tests marked `gpu` where no CUDA device is present, and say so. MOEBIUS_FIRST=N leaves the first N test
    functions of each file, with their first parameters on each front-end."""
    if first := int(os.environ.get("MOEBIUS_FIRST", "0")):
        kept: dict[Any, dict[Any, pytest.Item]] = {}
        for item in items:
            functions, options = kept.setdefault(item.path, {}), getattr(item, "callspec", None)
            key = item.nodeid.partition("[")[0], options and options.params.get("frontend")
            if len(functions) < first:
                functions.setdefault(key, item)
        chosen = [item for functions in kept.values() for item in functions.values()]
        config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
        items[:] = chosen
    if cuda_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU, and this machine has none"))


def pytest_collection_finish() -> None:
    """No later collection of garbage looks at what imports made: half a second for every whole one."""
    gc.collect()
    gc.freeze()


@pytest.fixture(params=["torch", "jax"])
def frontend(request: pytest.FixtureRequest) -> Any:
    """Each front-end (tests.support.frontends.Frontend) whose framework is there."""
    pytest.importorskip(request.param)
    if request.param == "jax":
        pytest.importorskip("jax_tvm_ffi")
    from tests.support.frontends import FRONTENDS

    return FRONTENDS[request.param](request.param)


@pytest.fixture(scope="session", autouse=True)
def compiled_programs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """XLA compiles a program once for all test processes, however many tests trace it anew.

    Not through the environment: processes that tests start compile as users' do.
    """
    if "jax" not in sys.modules or cuda_available():
        yield
        return
    import jax
    from jax._src import lru_cache
    from jax._src.interpreters import mlir
    from jax.experimental.compilation_cache import compilation_cache

    shared = tmp_path_factory.getbasetemp()
    folder = (shared.parent if "PYTEST_XDIST_WORKER" in os.environ else shared) / "programs"

    def put(cache: Any, key: str, value: bytes) -> None:
        """At once, because other processes read the folder."""
        whole = folder / f"{key}-{os.getpid()}-{threading.get_ident()}"
        whole.write_bytes(value)
        whole.replace(folder / f"{key}-cache")

    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    compilation_cache.reset_cache()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lru_cache.LRUCache, "put", put)
        patch.setattr(mlir, "make_ir_context", _Contexts(mlir.make_ir_context))
        yield
    jax.config.update("jax_compilation_cache_dir", None)
    compilation_cache.reset_cache()


class _Contexts(threading.local):
    """One MLIR context for many programs of a thread: JAX makes one for each, which takes it longer than a small
    program itself. A context keeps what its programs name, so that it is not kept for ever.
    """

    def __init__(self, make: Callable[[], Any]) -> None:
        self.make, self.left = make, 0

    def __call__(self) -> Any:
        if not self.left:
            self.context, self.left = self.make(), 100
        self.left -= 1
        return self.context


@pytest.fixture(scope="module")
def visible_poison() -> Iterator[None]:
    """For kernels whose results hold -1: bytes of 0xFF would hide what nobody wrote."""
    from tests.support import harness

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(harness, "POISON", 0x5A)
        yield


@pytest.fixture
def reference_engine_of_torch() -> Iterator[None]:
    """Tensors on a CPU run on the NumPy engine, unless a test asks for another."""
    import moe_torch

    with moe_torch.cpu_engine("reference"):
        yield


@pytest.fixture
def fresh_reference_engine_of_torch(reference_engine_of_torch: None) -> None:
    """The same, with nothing compiled before."""
    import torch

    torch._dynamo.reset()
