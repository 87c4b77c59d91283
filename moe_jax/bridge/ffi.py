"""The bridge: one XLA FFI target through which a plan runs on XLA's own buffers. The only user of tvm_ffi, which
`moe_jax.bridge.tvm` imports.

A compiled program calls the target `moebius` with one attribute, the plan's key. XLA hands over the addresses of the
operands and results and, on a GPU, its stream; the callback runs the prepared plan on them. It allocates nothing,
copies nothing, waits for nothing and calls neither JAX nor a compiler, so that XLA may capture its launches into a CUDA
graph and replay them without Python.

What shapes this file (jax-tvm-ffi 0.1.3): a string attribute longer than 7 bytes is used after it is freed, other kinds
of attribute leak on every call, a missing attribute crashes, and a process holds at most 1024 targets. Hence one target
and one short string. The tensors handed in are borrowed: reading their address is all that is done with them.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np
from jax.sharding import ManualAxisType, NamedSharding, PartitionSpec

from moe_core.base import dtypes
from moe_core.errors import InvalidInput, Unsupported
from moe_core.plan import registry as plans
from moe_core.plan.steps import KEY_LENGTH, LaunchPlan
from moe_core.runtime.devices import target_of
from moe_core.runtime.prepare import prepare
from moe_core.runtime.prepared import Prepared
from moe_jax.bridge.tvm import import_tvm_ffi

try:
    tvm_ffi = import_tvm_ffi()
    import jax_tvm_ffi
except ModuleNotFoundError as error:
    raise Unsupported(
        f"moe_jax needs jax-tvm-ffi and apache-tvm-ffi, and {error.name} is not installed; "
        "install moebius with its extra `jax`: pip install 'moebius[jax]'"
    ) from error

#: The custom call's name in every program, and what `jax.export.DisabledSafetyCheck.custom_call` takes.
TARGET_NAME = "moebius"

# (plan key, "cpu" or "cuda", device index) -> ready to run. Filled while tracing; read by the callback.
_prepared: dict[tuple[str, str, int], Prepared] = {}
_count_lock = threading.Lock()
_count = 0


def callback_count() -> int:
    """How often XLA has called into Python in this process; it stands still while XLA replays captured launches."""
    return _count


def publish(plan: LaunchPlan, platform: str, device_indices: Iterable[int]) -> None:
    """Register a plan and make it ready on devices, so that the callback finds it compiled and loaded."""
    key = plans.register(plan)
    assert len(key.encode()) <= KEY_LENGTH, "longer string attributes are used after they are freed"
    for index in device_indices:
        if (key, platform, index) not in _prepared:
            _prepared[key, platform, index] = prepare(plan, index)


def call(plan: LaunchPlan, arrays: dict[str, jax.Array]) -> tuple[jax.Array, ...]:
    """Stage out the custom call of a plan; `arrays` by input name. Returns the plan's outputs, in order."""
    operands = [arrays[buffer.name] for buffer in plan.inputs]
    results = [(buffer.spec.shape, dtypes.numpy_dtype(buffer.spec.dtype)) for buffer in plan.outputs]
    if plan.scratch_bytes:
        # XLA plans the arena with its other temporaries: a result that nobody reads.
        results.append(((plan.scratch_bytes,), np.dtype(np.uint8)))
    varying = frozenset().union(*(jax.typeof(operand).manual_axis_type.varying for operand in operands))
    options: dict[str, Any] = {}
    if varying:
        # Under shard_map a result varies over the mesh axes that any operand varies over.
        sharding = NamedSharding(jax.sharding.get_abstract_mesh(), PartitionSpec())
        options = {"sharding": sharding, "manual_axis_type": ManualAxisType(varying=varying)}
    structs = tuple(jax.ShapeDtypeStruct(shape, dtype, **options) for shape, dtype in results)
    values = jax.ffi.ffi_call(TARGET_NAME, structs, vmap_method="sequential")(*operands, plan=plan.key)
    return tuple(values[: len(plan.outputs)])


def _callback(key: str, stream: int, *tensors: Any) -> None:
    global _count
    with _count_lock:
        _count += 1
    device = tensors[0].device
    prepared = _prepared.get((key, device.type, device.index))
    if prepared is None:
        prepared = _prepare_late(key, device.type, device.index)
    pointers = [tensor.data_ptr() for tensor in tensors]
    prepared(pointers, stream)


def _prepare_late(key: str, platform: str, index: int) -> Prepared:
    """For programs exported elsewhere, whose plans this process did not make itself."""
    try:
        plan = plans.lookup(key)
    except InvalidInput as error:
        raise InvalidInput(
            f"plan key must be known in this process, got {key!r}; before running an exported program call "
            "moe_jax.load_plans(path) on a file written by moe_jax.export_plans(path) where the program was made"
        ) from error
    wanted = plan.target.device_kind
    if wanted != platform:
        raise InvalidInput(
            f"plan {key!r} ({plan.name}) was made for {plan.target}, got arrays on {platform}; "
            "export the program for this platform"
        )
    if platform == "cuda":
        device = target_of(("cuda", index))
        if device.architecture != plan.target.architecture:
            raise InvalidInput(
                f"plan {key!r} ({plan.name}) was made for {plan.target}, got a call on {device}; "
                "export the program for this GPU"
            )
        # Compiling here could fall into the middle of a graph capture, which it would break.
        raise InvalidInput(
            f"plan {key!r} ({plan.name}) must be compiled for cuda device {index} before it runs, got a call first; "
            "call moe_jax.load_plans(path), which compiles for every local device"
        )
    publish(plan, platform, (index,))
    return _prepared[key, platform, index]


_function = tvm_ffi.convert(_callback)
for _platform in ("cpu", "gpu"):
    _options = {"platform": _platform, "allow_cuda_graph": _platform == "gpu", "pass_owned_tensor": False}
    jax_tvm_ffi.register_ffi_target(TARGET_NAME, _function, ["attrs.plan", "ctx.stream", "args", "rets"], **_options)
