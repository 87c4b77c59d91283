"""The one path from an op's arrays to a planned, jitted custom call. `OpCall` names arrays, plans and calls. Everything
static is one hashable `Request`, so that an eager op is a cached `jax.jit` call.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from moe_core.base.arrays import ArraySpec
from moe_core.base.checks import is_derived
from moe_core.base.dtypes import ID_DTYPES, canonical
from moe_core.base.sizes import INT32_LIMIT
from moe_core.base.target import Target
from moe_core.errors import InvalidInput, Unsupported
from moe_core.formats import QuantizedTensor
from moe_core.ops.moe.backward import plan_training
from moe_core.plan.float64 import any_precision, require_one_precision
from moe_core.plan.steps import LaunchPlan
from moe_core.specs import MoESpec
from moe_core.specs import operands as bundles
from moe_jax.bridge import ffi, placement, platforms

T = TypeVar("T")
Array = jax.Array | np.ndarray

DIFFERENTIABLE_OPS = ("moe", "router", "rms_norm", "route", "route_rounded", "matmul_ogs")
DIFFERENTIABLE_OPS += ("gather_rows", "activation", "reduce", "grouped_mm", "grouped_contraction")


@dataclass(frozen=True)
class Request:
    """The static part of a call: `planner(*arguments, target, **keywords)` for each JAX platform's target. names: the
    plan's inputs, in array order. everywhere: every device of a program may run all of it."""

    op: str
    planner: Callable[..., LaunchPlan]
    arguments: tuple[Any, ...]
    keywords: tuple[tuple[str, Any], ...]
    names: tuple[str, ...]
    targets: tuple[tuple[str, Target], ...]
    everywhere: bool = dataclasses.field(default_factory=lambda: placement.everywhere.value)

    def plan(self, target: Target) -> LaunchPlan:
        return any_precision(self.planner)(*self.arguments, target, **dict(self.keywords))


class OpCall:
    def __init__(self, op: str) -> None:
        self._op = op
        self._arrays: dict[str, Any] = {}

    def array(self, name: str, value: Any, argument: str | None = None) -> ArraySpec:
        """Check and record an array and return its spec. argument: its name in messages, by default the plan's."""
        argument = argument or name
        require_array(argument, value)
        require_kept(argument, value)
        self._arrays[name] = value
        return _spec(argument, value.shape, value.dtype)

    def optional(self, name: str, value: Any) -> ArraySpec | None:
        return None if value is None else self.array(name, value)

    def bundle(self, argument: str, value: T, prefix: str = "") -> T:
        """Record a bundle's arrays as `prefix + field`, and return the bundle of specs."""
        specs: dict[str, Any] = {}
        for field, array in bundles.named_fields(value):
            if isinstance(array, QuantizedTensor):
                specs[field] = self._quantized(prefix + field, array)
            else:
                specs[field] = self.array(prefix + field, array)
        for field, is_required in bundles.array_fields(type(value)):
            if is_required and field not in specs:
                raise InvalidInput(f"{argument}.{field} must be an array, got None; pass it")
        return dataclasses.replace(value, **specs)  # type: ignore[type-var]

    def _quantized(self, name: str, tensor: QuantizedTensor) -> QuantizedTensor:
        """Record a quantised tensor's arrays and return the tensor of their specs, checked."""
        specs = {field: self.array(f"{name}.{field}", array) for field, array in bundles.named_fields(tensor)}
        for field in ("values", "scales"):
            if field not in specs:
                raise InvalidInput(f"{name}.{field} must be an array, got None; pass every array of the tensor")
        try:
            return QuantizedTensor(tensor.spec, **specs)
        except InvalidInput as error:
            raise InvalidInput(f"{name}: {error}") from error

    def run(self, planner: Callable[..., LaunchPlan], *arguments: Any, **keywords: Any) -> tuple[jax.Array, ...]:
        return execute(self.request(planner, *arguments, **keywords), *self.placed().values())

    def placed(self) -> dict[str, Any]:
        """Checks that the arrays are on one device."""
        placement.check(self._op, self._arrays)
        return dict(self._arrays)

    def plan(self, planner: Callable[..., LaunchPlan], *arguments: Any, **keywords: Any) -> LaunchPlan:
        return self.request(planner, *arguments, **keywords).plan(self.target())

    def target(self) -> Target:
        """The target of the arrays' device, for shapes of the default device."""
        return dict(platforms.targets())[platforms.platform_of(self._arrays.values())]

    def request(self, planner: Callable[..., LaunchPlan], *arguments: Any, **keywords: Any) -> Request:
        names, everywhere = tuple(self._arrays), placement.may_run_everywhere(self._arrays.values())
        return Request(self._op, planner, arguments, tuple(keywords.items()), names, platforms.targets(), everywhere)


def require_array(name: str, value: object) -> None:
    """Raise InvalidInput unless `value` is an array or a shape that JAX takes unchanged."""
    if not isinstance(value, (jax.Array, np.ndarray, jax.ShapeDtypeStruct)):
        raise InvalidInput(
            f"{name} must be a jax.Array, got {type(value).__module__}.{type(value).__qualname__}; "
            "convert it with jax.numpy.asarray or moe_jax.from_dlpack"
        )
    if isinstance(value, np.ndarray):
        if not value.dtype.isnative:
            native = value.dtype.newbyteorder("=")
            raise InvalidInput(
                f"{name} must have native byte order, got {value.dtype.str}; call .astype({native.name!r}) on it"
            )
        if isinstance(value, np.ma.MaskedArray):
            raise InvalidInput(f"{name} must have no mask of its own, got a MaskedArray; call .filled() on it")
    elif isinstance(value, jax.Array) and not isinstance(value, Tracer) and value.is_deleted():
        raise InvalidInput(
            f"{name} must have memory, got {value.aval} that was deleted or donated; pass a copy made before, or leave "
            "it out of the donated arguments"
        )


def require_kept(name: str, value: Any) -> None:
    """Raise InvalidInput for a NumPy array whose dtype JAX would change, such as float64."""
    if isinstance(value, np.ndarray) and jax.dtypes.canonicalize_dtype(value.dtype) != value.dtype:
        raise InvalidInput(
            f"{name} must have a dtype that JAX keeps, got {value.dtype}, which it would change to "
            f"{jax.dtypes.canonicalize_dtype(value.dtype)}; convert the array first"
        )


def require_type(name: str, value: object, *kinds: type) -> None:
    """Raise InvalidInput unless value has one of these types; see `is_derived`."""
    if type(value) not in kinds and not is_derived(value, kinds):
        wanted = " or ".join(kind.__name__ for kind in kinds)
        got = repr(value) if value is None or isinstance(value, (str, int, float)) else type(value).__name__
        raise InvalidInput(f"{name} must be {wanted}, got {got}; build it with moe_jax.{kinds[0].__name__}(...)")


def dtype_name(name: str, dtype: Any) -> str | None:
    if dtype is None:
        return None
    try:
        return canonical(dtype)
    except InvalidInput as error:
        raise InvalidInput(f"{name}: {error}") from error


def on_host(op: str, counter: jax.Array) -> int:
    """Wait for a counter `[1]`. Raises Unsupported while tracing."""
    if isinstance(counter, Tracer):
        raise Unsupported(
            f"checked=True of {op} looks at the result on the host, got a call inside jit or another transformation; "
            "return invalid_ids and check it outside, or pass `invalid_ids[0] == 0` to jax.experimental.checkify.check"
        )
    return int(np.asarray(counter)[0])


@functools.lru_cache(maxsize=4096)
def _spec(name: str, shape: tuple[int, ...], dtype: Any) -> ArraySpec:
    if not all(isinstance(size, int) for size in shape):
        raise Unsupported(
            f"{name} has the symbolic shape {shape}, and plans need numbers: grids and scratch memory are sized while "
            "tracing; export a program for each of a few numbers of tokens with moe_jax.export_buckets, which pads"
        )
    try:
        return ArraySpec(shape, dtype)
    except (InvalidInput, TypeError) as error:
        raise InvalidInput(f"{name} has dtype {dtype}, which no op takes: {error}") from error


def stage(request: Request, arrays: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    """Plan for every platform of the process, and stage out the lowered platform's call. Raises Unsupported if the
    default platform has no kernel, and when a program is lowered for another without one."""
    by_name = dict(zip(request.names, arrays, strict=True))
    require_one_precision((name, canonical(array.dtype)) for name, array in by_name.items())
    if not request.everywhere:
        by_name = placement.on_one_device(request.op, by_name)
    branches: dict[str, Callable[..., tuple[jax.Array, ...]]] = {}
    reasons: dict[str, str] = {}
    for platform, target in request.targets:
        try:
            plan = request.plan(target)
        except Unsupported as error:
            if platform == platforms.default_platform():
                raise
            reasons[platform] = str(error)
            continue
        ffi.publish(plan, platform, platforms.devices_to_prepare(platform, target))
        branches[platform] = functools.partial(ffi.call, plan)
    if not branches:
        raise Unsupported("; ".join(f"{platform}: {reason}" for platform, reason in reasons.items()))
    any_branch = next(iter(branches.values()))

    def refused(reason: str | None, operands: dict[str, jax.Array]) -> tuple[jax.Array, ...]:
        first, *others = operands.items()
        return any_branch(dict([(first[0], platforms.refuse_when_lowered(first[1], reason)), *others]))

    refusals = {platform: functools.partial(refused, reason) for platform, reason in reasons.items()}
    with jax.named_scope(f"moebius.{request.op}"):  # shown by profiles
        return jax.lax.platform_dependent(by_name, default=functools.partial(refused, None), **branches, **refusals)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def undifferentiable(request: Request, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    return stage(request, arrays)


@functools.partial(undifferentiable.defjvp, symbolic_zeros=True)
def _refuse_to_differentiate(request: Request, primals: Any, tangents: Any) -> Any:
    if not any(jax.numpy.issubdtype(primal.dtype, jax.numpy.inexact) for primal in primals):
        results = undifferentiable(request, *primals)
        # Symbolic zeros, because under shard_map a tangent's type also has its varying mesh axes.
        return results, jax.custom_derivatives.zero_from_primal(results, symbolic_zeros=True)
    raise Unsupported(
        f"{request.op} has no derivative: of the ops, {', '.join(DIFFERENTIABLE_OPS)} have one; call these, or apply "
        "jax.lax.stop_gradient to the array arguments where no gradient is wanted"
    )


execute = jax.jit(undifferentiable, static_argnums=0, inline=True)


def int32_ids(ids: Any) -> Any:
    """ids of any integer type as int32, with ids beyond int32 as others out of range. Others: unchanged."""
    dtype = getattr(ids, "dtype", None)
    if dtype is None or dtype.name not in ID_DTYPES or dtype.name == "int32":
        return ids
    if isinstance(ids, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(ids.shape, jnp.int32)
    if dtype.itemsize >= 4:
        least, most = max(-2, jnp.iinfo(dtype).min), INT32_LIMIT - 1
        ids = ids.clip(np.array(least, dtype), np.array(most, dtype))
    return ids.astype(np.int32)


def refuse_main_grad(spec: Any) -> None:
    if spec.main_grad:
        raise Unsupported(
            "spec.main_grad must be False in JAX, whose arrays nothing is added to in place, got True; leave it out, "
            "and add up the gradients of micro-batches in float32, as docs/user/training.md shows"
        )


_OPTIONAL = ("token_mask", "expert_map", "adapter_ids", "shared", "lora")


def moe_request(
    x: Any, experts: Any, routing: Any, spec: Any, **optional: Any
) -> tuple[OpCall, tuple[Any, ...], dict[str, Any]]:
    """The call of `moe` for arrays or ShapeDtypeStructs, and its planner's arguments. Refuses spec.main_grad."""
    if unknown := [name for name in optional if name not in _OPTIONAL]:
        raise TypeError(f"moe takes {', '.join(_OPTIONAL)}, got {unknown[0]}; correct the name")
    require_type("experts", experts, bundles.ExpertWeights)
    require_type("routing", routing, bundles.RouterWeights, bundles.RouterLogits, bundles.TopK)
    require_type("spec", spec, MoESpec)
    refuse_main_grad(spec)
    if isinstance(routing, bundles.TopK):
        routing = dataclasses.replace(routing, ids=int32_ids(routing.ids))
    call = OpCall("moe")
    of_x, of_experts = call.array("x", x), call.bundle("experts", experts, "experts.")
    arguments = of_x, of_experts, call.bundle("routing", routing, "routing."), spec
    keywords: dict[str, Any] = {name: call.optional(name, optional.get(name)) for name in _OPTIONAL[:3]}
    for name, kind in (("shared", bundles.SharedExpert), ("lora", bundles.LoRAFactors)):
        keywords[name] = bundle = optional.get(name)
        if bundle is not None:
            require_type(name, bundle, kind)
            keywords[name] = call.bundle(name, bundle, f"{name}.")
    return call, arguments, keywords


def training_plans(call: OpCall, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> tuple[LaunchPlan, ...]:
    x, experts, routing, spec = arguments
    return plan_training(bundles.MoEOperands(x, experts, routing, **keywords), spec, call.target(), one_layer=True)
