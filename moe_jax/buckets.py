"""Export a program for any number of tokens: one program per bucket in one file, chosen and padded at call time."""

from __future__ import annotations

import json
import pathlib
import re
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import export
from jax.sharding import PartitionSpec

from moe_core.base.checks import as_integer
from moe_core.base.files import path_of, whole_file
from moe_core.errors import InvalidInput, Unsupported
from moe_core.layers import MoEAux
from moe_core.plan.registry import export_plans
from moe_core.specs.operands import MoEOutput
from moe_jax.bridge.ffi import TARGET_NAME, attributes_of
from moe_jax.bridge.platforms import load_plans

for _type in (MoEAux, MoEOutput):
    export.register_namedtuple_serialization(_type, serialized_name=f"moebius.{_type.__name__}")

_PLANS, _MANIFEST = "plans.json", "manifest.json"
_KEY = re.compile(", ".join(f'{name} = "(.*?)"' for name in sorted(attributes_of(""))))


def export_buckets(
    function: Callable[..., Any],
    *arguments: Any,
    tokens: Sequence[int],
    path: str | pathlib.Path,
    platforms: Sequence[str] | None = None,
    vjp_order: int = 0,
) -> tuple[int, ...]:
    """Write a function of any number of tokens as one file, for `load_buckets`.

    Plans need numbers, so a program with a symbolic shape is refused. Here each bucket has a program, and calls are
    padded up to the next one. In `with moe_jax.export_target(...)`, a machine without a GPU exports for one.

    Args:
        function: `function(*arguments, token_mask)`. token_mask bool `[tokens]` is False for padding.
        arguments: pytrees of arrays or ShapeDtypeStructs, with one symbolic size, as `jax.export.symbolic_shape("t,
            64")` gives, for the number of tokens.
        tokens: the buckets.
        path: of the file.
        platforms: see `jax.export.export`.
        vjp_order: derivatives to export.

    Returns the buckets in ascending order. Raises InvalidInput for arguments without a symbolic size, or several, and
    Unsupported for results that do not follow it as `k * tokens` rows.
    """
    buckets = tuple(sorted({as_integer("tokens", number, 1) for number in tokens}))
    if not buckets:
        raise InvalidInput("tokens must name at least one bucket, got none; pass (16, 256, 4096), for example")
    shapes = jax.tree.map(lambda one: jax.ShapeDtypeStruct(one.shape, one.dtype), arguments)
    leaves = jax.tree.leaves(shapes)
    axes = [{axis: size for axis, size in enumerate(one.shape) if not isinstance(size, int)} for one in leaves]
    symbols = {str(size): None for one in axes for size in one.values()}
    if len(symbols) != 1 or not next(iter(symbols)).isidentifier():
        got = ", ".join(symbols) or "none"
        raise InvalidInput(
            f"arguments must have one symbolic size, a name for the number of tokens, got {got}; pass "
            "jax.ShapeDtypeStruct(jax.export.symbolic_shape('tokens, 64'), dtype)"
        )

    def at(number: int) -> tuple[Any, ...]:
        def sized(one: Any) -> Any:
            return jax.ShapeDtypeStruct(tuple(s if isinstance(s, int) else number for s in one.shape), one.dtype)

        return *jax.tree.map(sized, shapes), jax.ShapeDtypeStruct((number,), bool)

    results = _rows_of_results(function, at, buckets[-1])
    allowed = [export.DisabledSafetyCheck.custom_call(TARGET_NAME)]
    options: dict[str, Any] = {"disabled_checks": allowed, "platforms": platforms}
    programs = {number: export.export(jax.jit(function), **options)(*at(number)) for number in buckets}
    manifest = {"buckets": buckets, "arguments": [[*one] for one in axes], "results": results}
    with whole_file(path) as partial, zipfile.ZipFile(partial, "w", zipfile.ZIP_DEFLATED) as file:
        keys: dict[str, None] = {}
        for number, program in programs.items():
            file.writestr(_name(number), bytes(program.serialize(vjp_order=vjp_order)))
            keys |= dict.fromkeys("".join(parts) for parts in _KEY.findall(program.mlir_module()))
            step: Any = program
            for _ in range(vjp_order):
                step = step.vjp()
                keys |= dict.fromkeys("".join(parts) for parts in _KEY.findall(step.mlir_module()))
        with tempfile.TemporaryDirectory() as folder:
            export_plans(plans := pathlib.Path(folder) / _PLANS, keys)
            file.write(plans, _PLANS)
        file.writestr(_MANIFEST, json.dumps(manifest))
    return buckets


class Buckets:
    """Programs of a function, called as the function without its token_mask."""

    def __init__(self, programs: dict[int, export.Exported], arguments: list[Any], results: list[Any]) -> None:
        self._programs, self._arguments, self._results = programs, arguments, results

    @property
    def tokens(self) -> tuple[int, ...]:
        return tuple(self._programs)

    def __call__(self, *arguments: Any) -> Any:
        """The function's results, of the program for the next larger number of tokens. Raises InvalidInput."""
        flat, structure = jax.tree.flatten(arguments)
        if len(flat) != len(self._arguments):
            raise InvalidInput(
                f"arguments must hold {len(self._arguments)} arrays, as when exported, got {len(flat)}; pass the same"
            )
        counts = {one.shape[axis] for one, axes in zip(flat, self._arguments, strict=True) for axis in axes}
        count = max(counts)
        if len(counts) != 1 or count > self.tokens[-1]:
            raise InvalidInput(
                f"arguments must have one number of tokens, at most {self.tokens[-1]}, got {sorted(counts)}; split the "
                "batch, or export a larger bucket"
            )
        bucket = next(number for number in self.tokens if number >= count)
        padded = [_padded(one, axes, bucket - count) for one, axes in zip(flat, self._arguments, strict=True)]
        mask = jnp.arange(bucket) < count
        results, made = jax.tree.flatten(self._programs[bucket].call(*jax.tree.unflatten(structure, padded), mask))
        for number, axes in enumerate(self._results):
            for axis, each in axes:
                results[number] = jax.lax.slice_in_dim(_whole(results[number], axis), 0, each * count, axis=axis)
        return jax.tree.unflatten(made, results)


def load_buckets(path: str | pathlib.Path) -> Buckets:
    """Load a file of `export_buckets`, and compile its plans for the local devices.

    Load only files that you would also run as code. Raises InvalidInput for other files, and as `load_plans`.
    """
    source = path_of(path)
    try:
        with zipfile.ZipFile(source) as file, tempfile.TemporaryDirectory() as folder:
            manifest = json.loads(file.read(_MANIFEST))
            load_plans(file.extract(_PLANS, folder))
            numbers = manifest["buckets"]
            programs = {number: export.deserialize(bytearray(file.read(_name(number)))) for number in numbers}
    except (zipfile.BadZipFile, KeyError) as error:
        raise InvalidInput(
            f"path must be a file of export_buckets, got {str(path)!r} ({error}); export again"
        ) from error
    return Buckets(programs, manifest["arguments"], manifest["results"])


def _name(number: int) -> str:
    return f"program-{number}"


def _padded(array: Any, axes: Sequence[int], more: int) -> Any:
    widths = [(0, more if axis in axes else 0) for axis in range(array.ndim)]
    return jnp.pad(array, widths) if more and axes else array


def _whole(array: Any, axis: int) -> Any:
    """The array whole along an axis: JAX cuts no array along an explicit axis that does not divide the result."""
    held = jax.typeof(array).sharding
    if not any(held.spec):
        return array
    spec = PartitionSpec(*(None if number == axis else names for number, names in enumerate(held.spec)))
    return jax.sharding.reshard(array, held.update(spec=spec))


def _rows_of_results(function: Callable[..., Any], at: Callable[[int], Any], number: int) -> list[list[list[int]]]:
    """For each result, (axis, rows per token) of axes that follow the number of tokens."""
    found: list[list[list[int]]] = []
    one, more = (jax.tree.leaves(jax.eval_shape(function, *at(count))) for count in (number, number + 1))
    for first, second in zip(one, more, strict=True):
        axes: list[list[int]] = []
        for axis, (size, other) in enumerate(zip(first.shape, second.shape, strict=True)):
            if (each := other - size) and size != each * number:
                raise Unsupported(
                    f"results must have k * tokens rows, got {first.shape} for {number} tokens and {second.shape} for "
                    f"{number + 1}: padding could not be cut off; return rows of tokens, or sums"
                )
            axes += [[axis, each]] if each else []
        found.append(axes)
    return found
