"""Choose the `jax.shard_map` that a call opens over the devices of a mesh.

- Mesh: the current one (`jax.set_mesh`), else that of the arguments' shardings, which `jit` shows too. Axes that are
  manual already are left out: arrays there are the caller's parts.
- Token axes split the batch axes of x. They are the named ones, else those in x's sharding. Types of automatic axes
  show no sharding: there every axis of the mesh splits the first batch axis that it divides. Devices along other axes
  repeat the call.
- Outputs with tokens are split as x is, counts are sums over the token axes. Gradients of x stay on their devices, and
  JAX adds up gradients of whole arrays over the token axes, since an op is differentiated inside the shard_map.
- Ops with independent rows are split in the same way, and so are products of groups of consecutive rows. Each device
  has some groups. For ops on layouts see `moe_jax.bridge.layouts`.
- Nothing else moves unless asked: x split along its features, or a weight on an axis without tokens, is refused.
  Where types of automatic axes hide splits, XLA's compiler refuses them, see `moe_jax.bridge.moves`.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from moe_core.errors import InvalidInput, Unsupported
from moe_core.specs.operands import MoEOutput
from moe_jax.bridge import moves, placement, platforms

Names = tuple[str, ...]
_Op = TypeVar("_Op", bound=Callable[..., Any])


@dataclass(frozen=True)
class Split:
    """names: of the axes the shard_map is over. dims: the axes that split each batch axis of x. consecutive: the tokens
    of each device follow one another in x. is_known: the axes are named, or x shows them."""

    mesh: AbstractMesh
    names: Names
    dims: tuple[Names, ...]
    consecutive: bool
    is_known: bool

    @property
    def over(self) -> Names:
        """The token axes, major first."""
        return sum(self.dims, ())

    @property
    def tokens(self) -> PartitionSpec:
        return PartitionSpec(*(names or None for names in self.dims))

    def whole(self, name: str, spec: Any) -> None:
        """Raise Unsupported for an array of a call that is split."""
        if held := [one for names in map(as_names, spec) for one in names if self.mesh.shape[one] > 1]:
            raise Unsupported(
                f"{name} must be whole on every device, got {PartitionSpec(*spec)}: it would be gathered over "
                f"{', '.join(held)}; reshard it, or call this inside a jax.shard_map of your own"
            )


def as_names(entry: Any) -> Names:
    """The axes in one entry of a PartitionSpec."""
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def free_axes(mesh: AbstractMesh) -> dict[str, int]:
    """Axes that are not manual."""
    kinds = zip(mesh.axis_names, mesh.axis_sizes, mesh.axis_types, strict=True)
    return {name: size for name, size, kind in kinds if kind != AxisType.Manual}


def mesh_of(arrays: Iterable[Any], eager: bool = True) -> AbstractMesh | None:
    """The mesh of a call: None on one device, in `replicated`, and where every axis is manual."""
    if placement.everywhere.value:
        return None
    arrays = [array for array in arrays if isinstance(array, (jax.Array, jax.ShapeDtypeStruct))]
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        meshes = [_held(array) for array in arrays]
        mesh = next((mesh for mesh in meshes if mesh is not None and not mesh.empty), mesh)
        constants = not any(isinstance(array, Tracer) for array in arrays)
        if not mesh.empty and mesh.size > 1 and constants and isinstance(jax.lax.full((), 0), Tracer):
            raise Unsupported(
                "arrays of several devices must be arguments of a jitted function, got constants over "
                f"{dict(mesh.shape)}; pass them, or call it under jax.set_mesh"
            )
    elif eager and not any(isinstance(array, Tracer) or len(array.devices()) > 1 for array in arrays):
        return None
    # An axis of one device in a tracer's type has to come back in the types of results and gradients.
    typed = any(isinstance(array, Tracer) and any(spec_of(array) or ()) for array in arrays)
    return mesh if typed or math.prod(free_axes(mesh).values()) > 1 else None


def _held(array: Any) -> AbstractMesh | None:
    if isinstance(array, Tracer):
        return jax.typeof(array).sharding.mesh
    sharding = array.sharding
    return sharding.mesh.abstract_mesh if isinstance(sharding, NamedSharding) else None


def spec_of(array: Any) -> PartitionSpec | None:
    """The split of an array that its sharding shows, or the explicit axes in a tracer's type. None: neither does."""
    if isinstance(array, Tracer):
        sharding = jax.typeof(array).sharding
        return sharding.spec if AxisType.Explicit in sharding.mesh.axis_types else None
    sharding = getattr(array, "sharding", None)
    return sharding.spec if isinstance(sharding, NamedSharding) else None


def split_tokens(
    x: Any,
    mesh: AbstractMesh,
    token_axes: Sequence[str] | PartitionSpec | None = None,
    needed: Names = (),
    shape: tuple[int, ...] | None = None,
) -> Split:
    """The split of x's tokens. needed: axes that have to split them. shape: of the axes, by default x's."""
    shape = x.shape if shape is None else shape
    assert shape is not None
    free, batch = free_axes(mesh), shape[:-1]
    dims: list[Names] = [() for _ in batch]
    if isinstance(token_axes, PartitionSpec):
        given = [tuple(name for name in as_names(entry) if name in free) for entry in token_axes]
        dims[: len(given)] = given
        for size, names in zip(batch, dims, strict=True):
            if size % _devices(names, mesh) or (names and not size):
                _refuse(shape, names, mesh)
        wanted: Names = ()
    elif token_axes is not None:
        if unknown := [name for name in token_axes if name not in mesh.shape]:
            raise InvalidInput(
                f"token_axes must name axes of the mesh {dict(mesh.shape)}, got {unknown[0]!r}; leave it out"
            )
        wanted = tuple(name for name in token_axes if name in free)
        needed = (*wanted, *needed)
    else:
        spec = spec_of(x)
        if spec is not None:
            *rows, features = (*map(as_names, spec), *((),) * (x.ndim - len(spec)))
            if held := [name for name in features if free.get(name, 1) > 1]:
                raise Unsupported(
                    f"x must be whole along its last axis, got {x.shape} split over {', '.join(held)}: its features "
                    "would be gathered; reshard x along its batch axes"
                )
            dims = [tuple(name for name in names if name in free) for names in rows]
        kinds, is_traced = dict(zip(mesh.axis_names, mesh.axis_types, strict=True)), isinstance(x, Tracer)
        wanted = tuple(name for name in free if spec is None or (is_traced and kinds[name] == AxisType.Auto))
    for name in dict.fromkeys((*wanted, *needed)):
        if not any(name in names for names in dims):
            _assign(shape, dims, name, mesh, must=name in needed)
    typed = set(sum(map(as_names, spec_of(x) or ()), ())) if isinstance(x, Tracer) else set()
    split = tuple(
        tuple(name for name in names if name in needed or name in typed or mesh.shape[name] > 1) for names in dims
    )
    is_known = token_axes is not None or not moves.is_hidden(x, mesh)
    return Split(mesh, tuple(free), split, _is_consecutive(batch, split, mesh), is_known)


def _assign(shape: tuple[int, ...], dims: list[Names], name: str, mesh: AbstractMesh, must: bool) -> None:
    """Let an axis split the first batch axis that it divides."""
    size = mesh.shape[name]
    for number, names in enumerate(dims):
        if shape[number] and shape[number] // _devices(names, mesh) % size == 0:
            dims[number] = (*names, name)
            return
    if must:
        _refuse(shape, (*sum(dims, ()), name), mesh)


def _devices(names: Iterable[str], mesh: AbstractMesh) -> int:
    return math.prod(mesh.shape[name] for name in names)


def _refuse(shape: tuple[int, ...], names: Names, mesh: AbstractMesh) -> None:
    tokens, devices = math.prod(shape[:-1]), _devices(names, mesh)
    if tokens and tokens % devices == 0:
        fix = f"reshape x to [{tokens}, {shape[-1]}], since they divide its {tokens} tokens"
    else:
        fix = f"pad its {tokens} tokens to {max(1, -(-tokens // devices)) * devices} and pass a token_mask"
    raise InvalidInput(
        f"x must have batch axes that the {devices} devices of {names} divide, got {shape}; {fix}, or name fewer axes "
        "as token_axes"
    )


def _is_consecutive(batch: tuple[int, ...], dims: Sequence[Names], mesh: AbstractMesh) -> bool:
    before = 1
    for size, names in zip(batch, dims, strict=True):
        if names and before > 1:
            return False
        before *= size // _devices(names, mesh)
    return True


@dataclass(frozen=True)
class Program:
    """One shard_map, a key of jit's cache. local: hashable, with `out_specs`. specs: of the flat arguments."""

    local: Callable[..., Any]
    split: Split
    structure: Any
    specs: tuple[PartitionSpec, ...]
    out_specs: Any
    targets: Any


def opened(local: Callable[..., Any], split: Split, out_specs: Any, *arguments: tuple[Any, Any]) -> Any:
    """`local` of the parts of arguments, pairs of (pytree, its PartitionSpecs, or one for all its arrays). Calls with
    equal local, split and shapes are traced and compiled once."""
    arrays = tuple(tree for tree, _ in arguments)
    flat, structure = jax.tree.flatten(arrays)
    specs = jax.tree.leaves(
        tuple(jax.tree.broadcast(spec, tree, is_leaf=_is_spec) for tree, spec in arguments), is_leaf=_is_spec
    )
    return _run(Program(local, split, structure, tuple(specs), out_specs, platforms.targets()), *flat)


@dataclass(frozen=True)
class OnRows:
    """An op on each device's rows, a key of jit's cache. summed: results. grouped: the argument with groups' sizes."""

    op: Callable[..., Any]
    options: tuple[tuple[str, Any], ...]
    over: Names
    summed: Names
    grouped: tuple[str, str] | None = None

    def __call__(self, arrays: dict[str, Any]) -> Any:
        if self.grouped is not None and self.over:
            x, sizes = self.grouped
            arrays = arrays | {sizes: _here(arrays[sizes], arrays[x].shape[0], self.over)}
        if "lora" in arrays:
            arrays = arrays | {"lora": seeded_here(arrays["lora"], self.over)}
        result = self.op(**arrays, **dict(self.options))
        if not self.summed or not self.over:
            return result
        return result._replace(**{name: jax.lax.psum(getattr(result, name), self.over) for name in self.summed})


def seeded_here(lora: Any, over: Names) -> Any:
    """Factors with a seed of each device, as tokens are numbered on each, and masks of a dropout by token."""
    if not over or lora.seed is None:
        return lora
    return dataclasses.replace(lora, seed=lora.seed + jax.lax.axis_index(over).astype(lora.seed.dtype))


def _here(sizes: jax.Array, rows: int, over: Names) -> jax.Array:
    """The rows of each group among those of this device."""
    first = jax.lax.axis_index(over) * rows
    ends = jnp.clip(jnp.cumsum(sizes) - first, 0, rows).astype(sizes.dtype)
    return jnp.diff(ends, prepend=jax.lax.full_like(ends[:1], 0))


def over_rows(
    *rows: str, summed: Names = (), sizes: str | None = None, total: str | None = None
) -> Callable[[_Op], _Op]:
    """Decorate an op that may run on each device's rows alone: arguments with rows, the first one x `[T, N]`, and
    results that count over all of them.  sizes: the argument with the sizes of consecutive groups. total: the option
    for the token axes over which the op itself sums its result.
    """

    def decorate(op: _Op) -> _Op:
        signature = inspect.signature(op)
        first = next(iter(signature.parameters))

        @functools.wraps(op)
        def spread(*arrays: Any, **options: Any) -> Any:
            x = arrays[0] if arrays else options.get(first)
            is_spread = is_on_mesh(x)
            if not is_spread and not jax.sharding.get_abstract_mesh().empty:
                # x may be a constant of a program for several devices.
                is_spread = any(map(is_on_mesh, jax.tree.leaves((arrays, options))))
            if not is_spread:
                return op(*arrays, **options)
            given = signature.bind(*arrays, **options).arguments
            return _spread(op, x, given, rows, (summed, sizes, total))

        return cast(_Op, spread)

    return decorate


def is_on_mesh(x: Any) -> bool:
    """True for an array of several devices or of a program for them, and for axes of one device in a tracer's type."""
    if isinstance(x, Tracer):
        mesh = jax.sharding.get_abstract_mesh()
        mesh = jax.typeof(x).sharding.mesh if mesh.empty else mesh
        return not mesh.empty and (mesh.size > 1 or any(spec_of(x) or ()))
    return isinstance(x, jax.Array) and isinstance(x.sharding, NamedSharding) and x.sharding.mesh.size > 1


def _spread(op: Callable[..., Any], x: Any, given: dict[str, Any], rows: Names, of_rows: Any) -> Any:
    summed, sizes, total = of_rows
    leaves = jax.tree.leaves(given)
    mesh = mesh_of(leaves)
    if mesh is None or x.ndim != 2:
        return op(**given)
    split, visible = split_tokens(x, mesh), not any(moves.is_hidden(one, mesh) for one in leaves)
    if visible and not split.over:
        return op(**given)
    arrays, options = parted(given)
    specs = {name: specs_of(name, value, name in rows, split) for name, value in arrays.items()}
    arrays = {name: held(name, value, specs[name], mesh) for name, value in arrays.items()}
    options += ((total, split.over),) if total else ()
    local = OnRows(op, options, split.over, summed, sizes and (rows[0], sizes))
    results = PartitionSpec() if total else split.tokens
    if summed:
        results = MoEOutput(*(PartitionSpec() if name in summed else split.tokens for name in MoEOutput._fields))
    return opened(local, split, results, (arrays, specs))


def parted(given: dict[str, Any]) -> tuple[dict[str, Any], tuple[tuple[str, Any], ...]]:
    """(arguments with arrays, the others)."""
    arrays = {
        name: value
        for name, value in given.items()
        if jax.tree.leaves(value) and isinstance(jax.tree.leaves(value)[0], (jax.Array, np.ndarray))
    }
    return arrays, tuple((name, value) for name, value in given.items() if name not in arrays)


def held(name: str, value: Any, specs: Any, mesh: AbstractMesh, fix: str | None = None) -> Any:
    """The argument, with a check of `moves.stays` for arrays of hidden splits."""

    def of(path: Any, array: Any, spec: PartitionSpec) -> Any:
        if array is None or not moves.is_hidden(array, mesh):
            return array
        full = ".".join([name, *(str(getattr(key, "name", key)) for key in path)])
        return moves.stays(array, spec, full, fix or "reshard it, or call this inside a jax.shard_map of your own")

    return jax.tree_util.tree_map_with_path(of, value, specs, is_leaf=lambda one: one is None)


def specs_of(name: str, value: Any, has_rows: bool, split: Split) -> Any:
    """The PartitionSpecs of an argument. Biases of routers have rows if they have two axes."""

    def of(path: Any, array: Any) -> PartitionSpec:
        field = getattr(path[-1], "name", "") if path else ""
        if field in ("ids", "weights", "logits") or ((field or name) == "correction_bias" and array.ndim == 2):
            return split.tokens
        if has_rows and not path:
            return split.tokens
        split.whole(f"{name}.{field}" if field else name, spec_of(array) or ())
        return PartitionSpec()

    return jax.tree_util.tree_map_with_path(of, value)


def _is_spec(value: Any) -> bool:
    return isinstance(value, PartitionSpec)


@functools.partial(jax.jit, static_argnums=0, inline=True)
def _run(program: Program, *arrays: Any) -> Any:
    mesh, structure = program.split.mesh, program.structure
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    if AxisType.Explicit in kinds.values():

        def placed(array: Any, spec: PartitionSpec) -> Any:
            # Types of arrays have shardings, and shard_map moves no array.
            shown = [tuple(name for name in as_names(entry) if kinds[name] == AxisType.Explicit) for entry in spec]
            return jax.sharding.reshard(array, NamedSharding(mesh, PartitionSpec(*(names or None for names in shown))))

        arrays = tuple(map(placed, arrays, program.specs))
    call = jax.shard_map(
        lambda *parts: program.local(*jax.tree.unflatten(structure, parts)),
        mesh=mesh, in_specs=program.specs, out_specs=program.out_specs, axis_names=frozenset(program.split.names),
    )  # fmt: skip
    return call(*arrays)
