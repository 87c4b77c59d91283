"""Choose the plan targets of a traced op: the CPU engine, this process's CUDA devices, or an explicit target."""

from __future__ import annotations

import contextlib
import functools
import pathlib
from collections.abc import Iterable, Iterator
from typing import Any

import jax
from jax.core import Tracer
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from moe_core.base import target
from moe_core.base.target import Target
from moe_core.errors import InvalidInput, Unsupported
from moe_core.plan import registry as plans
from moe_core.runtime.devices import target_of
from moe_jax.bridge import ffi

# These contexts are part of every jit cache's key: leaving or entering one traces again.
_export_target = jax.make_user_context(None)
_cpu_engine = jax.make_user_context(None)


@contextlib.contextmanager
def export_target(cuda: Target) -> Iterator[None]:
    """Trace for an explicit CUDA target, to export for a GPU on a machine without one.

    `with export_target(Target("cuda", 90, 132)): jax.export.export(jax.jit(f), platforms=["cuda"], ...)(*arguments)`.
    Compiles nothing here. Raises InvalidInput for other targets.
    """
    if not isinstance(cuda, Target) or cuda.vendor != "nvidia":
        raise InvalidInput(
            f"export_target must be a Target of kind cuda, got {cuda!r}; for an H200 it is Target('cuda', 90, 132)"
        )
    with _export_target(cuda):
        yield


@contextlib.contextmanager
def cpu_engine(kind: str) -> Iterator[None]:
    """Choose the CPU engine inside a `with` block, `interpreter` or `reference`. jitted functions trace again in it."""
    with target.cpu_engine(kind), _cpu_engine(kind):
        yield


@functools.cache
def cuda_devices() -> tuple[int, ...]:
    try:
        return tuple(device.local_hardware_id for device in jax.local_devices(backend="cuda"))
    except RuntimeError:  # no such platform
        return ()


def cuda_target() -> Target | None:
    """`export_target`'s, else the local devices'."""
    explicit = _export_target.value
    return _local_cuda_target(cuda_devices()) if explicit is None else explicit


@functools.cache
def _local_cuda_target(indices: tuple[int, ...]) -> Target | None:
    kinds = {index: target_of(("cuda", index)) for index in indices}
    if len(set(kinds.values())) > 1:
        listed = ", ".join(f"cuda:{index} is {kind}" for index, kind in kinds.items())
        raise Unsupported(
            f"one program needs devices of one kind, and this process has several ({listed}); "
            "choose equal ones through CUDA_VISIBLE_DEVICES"
        )
    return next(iter(kinds.values()), None)


def targets() -> tuple[tuple[str, Target], ...]:
    """(JAX platform, target) pairs. Raises Unsupported unless the default backend is CPU or CUDA."""
    cuda = cuda_target()
    platform = jax.default_backend()
    if platform != "cpu" and not (platform == "gpu" and cuda_devices()):
        raise Unsupported(
            f"JAX's default platform must be cpu or cuda, got {platform!r} ({jax.devices()[0].device_kind}); "
            "set JAX_PLATFORMS=cpu to run here, or use an NVIDIA GPU"
        )
    pairs = (("cpu", target.cpu_target()),)
    return pairs if cuda is None else (*pairs, ("cuda", cuda))


def default_platform() -> str:
    """`cpu` or `cuda`, for arrays on no device (`cuda` in `export_target`)."""
    if _export_target.value is not None:
        return "cuda"
    default = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]
    platform = jax.default_backend() if default is None else getattr(default, "platform", default)
    return "cpu" if platform == "cpu" else "cuda"


def platform_of(arrays: Iterable[Any]) -> str:
    if _export_target.value is not None:
        return "cuda"
    for value in arrays:
        if isinstance(value, jax.Array) and not isinstance(value, Tracer) and value.committed:
            return "cpu" if next(iter(value.devices())).platform == "cpu" else "cuda"
    return default_platform()


def devices_to_prepare(platform: str, chosen: Target) -> tuple[int, ...]:
    if platform == "cpu":
        return (0,)
    local = _local_cuda_target(cuda_devices())
    return cuda_devices() if local is not None and local.architecture == chosen.architecture else ()


def load_plans(path: str | pathlib.Path) -> tuple[str, ...]:
    """Register the plans of a file from `export_plans`, compile them for the local devices, return their keys.

    Call it before running a program that another process exported. Raises InvalidInput for another version's kernels.
    """
    keys = plans.load_plans(path)
    for key in keys:
        plan = plans.lookup(key)
        if plan.target.on_gpu:  # plans for a CPU have nothing to compile
            ffi.publish(plan, plan.target.device_kind, devices_to_prepare(plan.target.device_kind, plan.target))
    return keys


# The identity, which no platform may lower.
_refused = Primitive("moebius_unplanned_platform")
_refused.def_abstract_eval(lambda operand, *, reason: operand)
batching.primitive_batchers[_refused] = lambda operands, axes, *, reason: (
    _refused.bind(operands[0], reason=reason), axes[0]
)  # fmt: skip


def refuse_when_lowered(operand: jax.Array, reason: str | None = None) -> jax.Array:
    """Mark code whose lowering raises Unsupported with the reason. None: the process has no such platform."""
    return _refused.bind(operand, reason=reason)


def _lower_refused(context: mlir.LoweringRuleContext, operand: Any, *, reason: str | None) -> Any:
    if reason is not None:
        raise Unsupported(reason)
    platforms = ", ".join(context.module_context.platforms)
    raise Unsupported(
        f"no plan was made for platform {platforms}: this process has no device of it that we support; run on cpu "
        "or cuda, and to export for cuda without a GPU trace inside "
        "`with moe_jax.export_target(Target('cuda', 90, 132))` (this one is an H200)"
    )


mlir.register_lowering(_refused, _lower_refused)
