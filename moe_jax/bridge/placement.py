"""Decide the devices of a call: one at a time, or if requested all of it on every one. XLA can split no custom call."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax
from jax.core import Tracer
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir
from jax.sharding import AxisType

from moe_core.errors import InvalidInput, Unsupported

#: Part of every jit cache's key.
everywhere = jax.make_user_context(False)


@contextlib.contextmanager
def replicated() -> Iterator[None]:
    """Let ops and layers run outside `jax.shard_map` in programs for several devices, each running all of it.

    `with moe_jax.replicated(): y = jax.jit(layer)(x)`. XLA gathers every operand on every device, and the results are
    replicated. Otherwise lowering such a program raises Unsupported. jitted functions trace again in the block.
    """
    with everywhere(True):
        yield


def check(op: str, arrays: Mapping[str, Any]) -> None:
    """Refuse arrays of several devices, and visibly split ones outside shard_map."""
    placed: tuple[str, Any] | None = None
    for name, value in arrays.items():
        if isinstance(value, Tracer):
            where: Any = jax.typeof(value).sharding
            entries = [entry if isinstance(entry, tuple) else (entry,) for entry in where.spec]
            split = any(name is not None and where.mesh.shape.get(name, 1) > 1 for names in entries for name in names)
        elif isinstance(value, jax.Array):
            where = value.sharding
            split = not (everywhere.value or len(where.device_set) == 1 or where.is_fully_replicated)
            if value.committed:
                if placed is not None and placed[1] != where.device_set:
                    raise InvalidInput(
                        f"{name} must be on the device of {placed[0]}, {_list(placed[1])}, "
                        f"got {_list(where.device_set)}; move it with jax.device_put"
                    )
                placed = placed or (name, where.device_set)
        elif isinstance(value, jax.ShapeDtypeStruct):
            raise InvalidInput(f"{name} must be an array, got {value}; only explain_* functions take shapes")
        else:
            continue
        if split:
            raise Unsupported(
                f"{op} runs on one device at a time, and {name} is split over several ({where}), so that XLA would "
                "gather all of it on each; call the op inside jax.shard_map, on the local part"
            )


def _list(devices: Any) -> str:
    return ", ".join(sorted(str(device) for device in devices))


def may_run_everywhere(arrays: Iterable[Any]) -> bool:
    """True inside `replicated`, or if every checked array is whole on each of its devices."""
    return everywhere.value or all(_is_whole(array) for array in arrays)


def _is_whole(array: Any) -> bool:
    """True if `check` saw all of an array's sharding."""
    if not isinstance(array, Tracer):
        return True
    meshes = [mesh for mesh in (jax.typeof(array).sharding.mesh, jax.sharding.get_abstract_mesh()) if not mesh.empty]
    return bool(meshes) and not any(
        kind == AxisType.Auto and size > 1
        for mesh in meshes
        for kind, size in zip(mesh.axis_types, mesh.axis_sizes, strict=True)
    )


# The identity, which refuses lowering for several devices.
_on_one_device = Primitive("moebius_on_one_device")
_on_one_device.def_abstract_eval(lambda operand, *, op, name: operand)
batching.primitive_batchers[_on_one_device] = lambda operands, axes, **static: (
    _on_one_device.bind(operands[0], **static), axes[0]
)  # fmt: skip


@_on_one_device.def_impl
def _check_one(operand: jax.Array, *, op: str, name: str) -> jax.Array:
    check(op, {name: operand})
    return operand


def on_one_device(op: str, arrays: dict[str, Any]) -> dict[str, Any]:
    """Raises as `check`, or when the arrays are lowered if only XLA can tell."""
    check(op, arrays)
    if may_run_everywhere(arrays.values()):
        return arrays
    return {name: _on_one_device.bind(array, op=op, name=name) for name, array in arrays.items()}


def _lower_on_one_device(context: mlir.LoweringRuleContext, operand: Any, *, op: str, name: str) -> Any:
    where: Any = context.module_context.axis_context
    devices = getattr(where, "num_devices", None)  # none inside shard_map and pmap
    mesh = getattr(where, "mesh", None)
    sizes = {} if mesh is None else mesh.shape
    if devices is not None and devices > 1:
        program = f"a program for {devices} devices outside jax.shard_map"
    elif left := [name for name, size in sizes.items() if size > 1 and name not in where.manual_axes]:
        named = ", ".join(f"{name!r} ({sizes[name]} devices)" for name in left)
        program = f"a jax.shard_map that leaves {named} of the mesh to XLA"
    else:
        return [operand]
    raise Unsupported(
        f"{op} runs on one device at a time, got {program}: XLA would gather every operand and run the whole call on "
        "each device; call it inside jax.shard_map over every axis of the mesh, on the local tokens, or, if every "
        "device should do all of it, inside `with moe_jax.replicated():`"
    )


mlir.register_lowering(_on_one_device, _lower_on_one_device, cacheable=False)
