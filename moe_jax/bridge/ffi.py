"""One XLA FFI target that runs plans on XLA's own buffers. The only user of tvm_ffi, imported by `moe_jax.bridge.tvm`.

A compiled program calls the target `moebius_plan` with a plan's key, the addresses of operands and results and, on a
GPU, XLA's stream. The callback runs the prepared plan without allocation, copy or wait, and calls neither JAX nor a
compiler, so that XLA may capture its launches into a CUDA graph and replay them without Python.

Limits of jax-tvm-ffi 0.1.3: string attributes longer than 7 bytes are used after they are freed, other attributes leak
on every call, a missing one crashes, and a process holds at most 1024 targets. Hence one target and a key in short
strings. Tensors passed in are borrowed: only address and size are read.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import ManualAxisType, NamedSharding, PartitionSpec

from moe_core.base import dtypes
from moe_core.base.arrays import ArraySpec
from moe_core.base.recent import Recent, process_lock
from moe_core.errors import InvalidInput, Unsupported
from moe_core.plan import registry as plans
from moe_core.plan.steps import KEY_LENGTH, LaunchPlan
from moe_core.runtime.devices import target_of
from moe_core.runtime.prepare import prepare
from moe_core.runtime.prepared import Prepared
from moe_jax.bridge.ending import wait_at_exit
from moe_jax.bridge.tvm import import_tvm_ffi

try:
    tvm_ffi = import_tvm_ffi()
    import jax_tvm_ffi
except ModuleNotFoundError as error:
    raise Unsupported(
        f"moe_jax needs jax-tvm-ffi and apache-tvm-ffi, and {error.name} is not installed; "
        "install moebius with its extra `jax`: pip install 'moebius[jax]'"
    ) from error

#: The custom call's name in every program, and for `jax.export.DisabledSafetyCheck.custom_call`.
TARGET_NAME = "moebius_plan"
#: Programs from earlier versions, with keys of one attribute.
_FORMER_TARGET_NAME = "moebius"
_ATTRIBUTE_LENGTH = 7
_ATTRIBUTES = tuple(f"plan_{part}" for part in range(KEY_LENGTH // _ATTRIBUTE_LENGTH))


@dataclass
class _Runnable:
    """A plan to run. called: a call's dtypes were compared."""

    prepared: Prepared
    sizes: list[int]
    dtypes: list[str]
    called: bool = False

    def refuse(self, tensors: Sequence[Any]) -> None:
        got = [f"{tensor.numel()} of {tensor.dtype}" for tensor in tensors]
        wanted = [f"{size} of {dtype}" for size, dtype in zip(self.sizes, self.dtypes, strict=True)]
        plan = self.prepared.plan
        if got != wanted:
            raise InvalidInput(
                f"arrays of plan {plan.key!r} ({plan.name}) must have the elements {', '.join(wanted)}, got "
                f"{', '.join(got)}; load the plans that were exported with the program"
            )


# (plan key, "cpu" or "cuda", device index) -> ready to run.
_runnable: Recent[_Runnable] = Recent()
# Keys that were prepared once.
_published: Recent[bool] = Recent(plans.TEXTS_KEPT)
_count_lock = process_lock()
_count = 0


def callback_count() -> int:
    """Number of calls from XLA into Python, constant while XLA replays captured launches."""
    return _count


def attributes_of(key: str) -> dict[str, str]:
    starts = range(0, KEY_LENGTH, _ATTRIBUTE_LENGTH)
    return {name: key[start : start + _ATTRIBUTE_LENGTH] for name, start in zip(_ATTRIBUTES, starts, strict=True)}


def publish(plan: LaunchPlan, platform: str, device_indices: Iterable[int]) -> None:
    key = plans.register(plan)
    for index in device_indices:
        if _runnable.find((key, platform, index)) is None:
            _make_runnable(plan, platform, index)


def _make_runnable(plan: LaunchPlan, platform: str, index: int) -> _Runnable:
    if platform == "cpu":
        wait_at_exit()
    specs = [buffer.spec for buffer in (*plan.inputs, *plan.outputs)]
    strided = [buffer.name for buffer in plan.inputs if not buffer.spec.is_contiguous]
    if strided:
        raise InvalidInput(
            f"plan {plan.name!r} must read row-major arrays in JAX, got strides of {', '.join(strided)}; make the plan "
            "with moe_jax"
        )
    if plan.scratch_bytes:
        specs.append(ArraySpec((plan.scratch_bytes,), "uint8"))
    runnable = _Runnable(prepare(plan, index), [spec.size for spec in specs], [spec.dtype for spec in specs])
    _runnable.put((plan.key, platform, index), runnable)
    _published.put((plan.key, platform, index), True)
    return runnable


def call(plan: LaunchPlan, arrays: dict[str, jax.Array]) -> tuple[jax.Array, ...]:
    """Returns the plan's outputs in order."""
    operands = [arrays[buffer.name] for buffer in plan.inputs]
    results = [(buffer.spec.shape, dtypes.numpy_dtype(buffer.spec.dtype)) for buffer in plan.outputs]
    if plan.scratch_bytes:
        # XLA plans this arena with its other temporaries.
        results.append(((plan.scratch_bytes,), np.dtype(np.uint8)))
    varying = frozenset().union(*(jax.typeof(operand).manual_axis_type.varying for operand in operands))
    options: dict[str, Any] = {}
    if varying:
        # Under shard_map a result varies over every mesh axis that an operand varies over.
        sharding = NamedSharding(jax.sharding.get_abstract_mesh(), PartitionSpec())
        options = {"sharding": sharding, "manual_axis_type": ManualAxisType(varying=varying)}
    structs = tuple(jax.ShapeDtypeStruct(shape, dtype, **options) for shape, dtype in results)
    values = jax.ffi.ffi_call(TARGET_NAME, structs, vmap_method="sequential")(*operands, **attributes_of(plan.key))
    return tuple(values[: len(plan.outputs)])


def _callback(first: str, second: str, third: str, stream: int, *tensors: Any) -> None:
    global _count
    with _count_lock:
        _count += 1
    device, key = tensors[0].device, first + second + third
    identity = (key, device.type, device.index)
    runnable = _runnable.get(identity) or _runnable.find(identity)
    if runnable is None:
        runnable = _prepare_late(*identity)
    # Reading a dtype takes half a microsecond. Sizes are almost free.
    is_new = device.type == "cpu" or not runnable.called
    if is_new or [tensor.numel() for tensor in tensors] != runnable.sizes:
        runnable.refuse(tensors)
        runnable.called = True
    pointers = [tensor.data_ptr() for tensor in tensors]
    runnable.prepared(pointers, stream)


def _prepare_late(key: str, platform: str, index: int) -> _Runnable:
    """Prepare forgotten plans, and plans of programs exported by another process."""
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
    if platform == "cuda" and _published.find((key, platform, index)) is None:
        device = target_of(("cuda", index))
        if device.architecture != plan.target.architecture:
            raise InvalidInput(
                f"plan {key!r} ({plan.name}) was made for {plan.target}, got a call on {device}; "
                "export the program for this GPU"
            )
        # Compiling here could break a graph capture in progress.
        raise InvalidInput(
            f"plan {key!r} ({plan.name}) must be compiled for cuda device {index} before it runs, got a call first; "
            "call moe_jax.load_plans(path), which compiles for every local device"
        )
    return _make_runnable(plan, platform, index)


def _refuse_former(key: str, *tensors: Any) -> None:
    raise InvalidInput(
        f"the program must be exported by this version of moe_jax, got one of an earlier version, with the plan key "
        f"{key!r}; export the program and its plans again"
    )


_function, _refuse_function = tvm_ffi.convert(_callback), tvm_ffi.convert(_refuse_former)
for _platform in ("cpu", "gpu"):
    _options = {"platform": _platform, "allow_cuda_graph": _platform == "gpu", "pass_owned_tensor": False}
    _key = [f"attrs.{name}" for name in _ATTRIBUTES]
    jax_tvm_ffi.register_ffi_target(TARGET_NAME, _function, [*_key, "ctx.stream", "args", "rets"], **_options)
    _former = ["attrs.plan", "args", "rets"]
    jax_tvm_ffi.register_ffi_target(_FORMER_TARGET_NAME, _refuse_function, _former, **_options)
