"""Shardings of a layer's parameters, and its forward over the devices of a mesh.

The `jax.shard_map` of a layer is that of `moe_jax.bridge.mesh`, with parameters besides:

- Experts: `expert_axis`, else the first mesh axis that visibly splits the experts' axis, exchanges rows of tokens. It
  always splits tokens too. If it does not divide E, every device holds all experts and uses its share.
- Any other split of a parameter is gathered for the call, as in FSDP, if tokens are split over that axis too. Gradients
  are scattered back. Otherwise every device would read all of it without being asked to: Unsupported.
- The split of a parameter is that of its sharding, else `parameter_specs`. Under automatic axes a jitted function sees
  no sharding, and takes parameters without a spec to be whole. XLA's compiler raises if they are not.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from jax.sharding import PartitionSpec as P

from moe_core.errors import InvalidInput, Unsupported
from moe_core.layers import MoEAux, MoELayerSpec
from moe_core.parallel import Placement
from moe_core.specs.operands import LoRAFactors, named_fields
from moe_jax.bridge.mesh import Names, Split, as_names, free_axes, mesh_of, opened, seeded_here, spec_of, split_tokens
from moe_jax.bridge.moves import is_hidden, stays
from moe_jax.layers.parameters import Leaf, Parameters, find, is_prepacked, leaves, nested
from moe_jax.parallel.axis import ExpertAxis


def expert_specs(
    spec: MoELayerSpec, axis: str = "ep", *, num_layers: int | None = None, prepacked: bool = False
) -> dict[str, Any]:
    """PartitionSpecs of a layer's or stack's parameters, experts split over axis, as for `in_specs` of `shard_map`."""
    every = leaves(spec, num_layers, prepacked)
    return nested((leaf.path, P(*(axis if split else None for split in _split(leaf)))) for leaf in every)


def expert_sharding(
    spec: MoELayerSpec, mesh: Mesh, axis: str = "ep", *, num_layers: int | None = None, prepacked: bool = False
) -> dict[str, Any]:
    """`expert_specs` as NamedShardings of a mesh, for `jax.device_put`, `out_shardings` and checkpoints.

    Experts are whole on every device if the axis does not divide them. Raises InvalidInput unless the mesh has it.
    """
    if axis not in mesh.shape:
        raise InvalidInput(
            f"axis must be one of the mesh's {dict(mesh.shape)}, got {axis!r}; name another, or make a mesh with it"
        )
    specs = expert_specs(spec, axis, num_layers=num_layers, prepacked=prepacked)
    if spec.num_experts % mesh.shape[axis]:
        specs = jax.tree.map(lambda one: P(*(None,) * len(one)), specs, is_leaf=_is_spec)
    return jax.tree.map(lambda one: NamedSharding(mesh, one), specs, is_leaf=_is_spec)


def local_leaf(leaf: Leaf, axis: ExpertAxis) -> Leaf:
    ranks = jax.lax.axis_size(axis.name)
    sizes = zip(leaf.shape, _split(leaf), strict=True)
    shape = tuple(size // ranks if split and size % ranks == 0 else size for size, split in sizes)
    return dataclasses.replace(leaf, shape=shape)


def _is_spec(value: Any) -> bool:
    return isinstance(value, PartitionSpec)


def _split(leaf: Leaf) -> list[bool]:
    axes = (*(None,) * (len(leaf.shape) - len(leaf.parameter.axes)), *leaf.parameter.axes)
    return [axis == "experts" and leaf.parameter.name.startswith("experts.") for axis in axes]


@dataclass(frozen=True)
class Ranks:
    """Inside a shard_map. axis: of experts. over: of tokens, for losses and capacities. consecutive: as of a Split."""

    axis: ExpertAxis | None
    over: Names
    consecutive: bool = True


def ranks_of(axis: ExpertAxis | None, arrays: Sequence[Any], *, eager: bool = True) -> Ranks | AbstractMesh | None:
    """Ranks of the caller's shard_map over the expert axis, else the mesh to open one over. None: one device."""
    if axis is not None and axis.is_manual:
        return Ranks(axis, axis.over)
    current = jax.sharding.get_abstract_mesh()
    mesh = mesh_of(arrays, eager)
    if mesh is None and axis is not None and axis.name in free_axes(current):
        mesh = current
    require_axis(axis, mesh)
    return mesh


def require_axis(axis: ExpertAxis | None, mesh: AbstractMesh | None = None) -> None:
    """Raise InvalidInput if the mesh, by default the current one, if any, lacks the expert axis."""
    mesh = jax.sharding.get_abstract_mesh() if mesh is None else mesh
    if axis is not None and not mesh.empty and axis.name not in mesh.shape:
        raise InvalidInput(
            f"expert_axis must be an axis of the mesh {dict(mesh.shape)}, got {axis.name!r}; name one of "
            f"{', '.join(mesh.shape)}, or leave it out"
        )


@dataclass(frozen=True)
class Part:
    """A parameter in the shard_map. gathers: (axis of the array, mesh axes). is_known: its split shows, or is named."""

    leaf: Leaf
    spec: PartitionSpec
    gathers: tuple[tuple[int, Names], ...]
    is_known: bool

    def of(self, parameters: Parameters) -> Any:
        array, name = find(parameters, self.leaf.path), "/".join(self.leaf.path)
        fix = "name its split by parameter_specs or logical rules, which gather it as in FSDP, or reshard it"
        return array if self.is_known else stays(array, self.spec, name, fix)


@dataclass(frozen=True)
class Division:
    """How a layer is divided over a mesh."""

    split: Split
    axis: ExpertAxis | None
    parts: tuple[Part, ...]

    def explain(self, parameters: Parameters) -> str:
        shape = self.split.mesh.shape
        idle = [name for name in self.split.names if name not in self.split.over and shape[name] > 1]
        result = [f"mesh {dict(shape)}: x is split as {self.split.tokens}, and y as x"]
        result += [f"  every device along {name} repeats the call" for name in idle]
        if self.axis is not None:
            mode = self.axis.exchange.mode
            result.append(f"  rows travel over {self.axis.name} and back ({mode}), in a backward once more")
            if all(part.spec == P(*(None,) * len(part.spec)) for part in self.parts):
                result.append("  experts are whole on every device, which uses its share of them")
        for part in self.parts:
            array = find(parameters, part.leaf.path)
            for _, names in part.gathers:
                share = math.prod(shape[name] for name in names)
                size = math.prod(array.shape) * array.dtype.itemsize * (share - 1) // share
                result.append(
                    f"  {'/'.join(part.leaf.path)} is gathered over {', '.join(names)}: {size} bytes a device"
                )
        return "\n".join(result)


def hidden_splits(division: Division, axis: ExpertAxis | None, parameter_specs: Any) -> str:
    """Lines on parameters with splits that a jitted forward of these options does not see. axis: the named one."""
    mesh, lines = division.split.mesh, ""
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    seen = set() if axis is None else {axis.name}
    for part in division.parts:
        known = () if parameter_specs is None else find(parameter_specs, part.leaf.path)
        told = seen.union(*map(as_names, known))
        names = [one for entry in part.spec for one in as_names(entry) if kinds[one] == AxisType.Auto]
        if hidden := [name for name in names if name not in told]:
            path = "/".join(part.leaf.path)
            lines += f"\n  jit hides the split of {path} over {', '.join(hidden)}, and XLA's compiler refuses it: "
            lines += "name it by parameter_specs, logical rules or expert_axis"
    return lines


def divide(
    spec: MoELayerSpec,
    mesh: AbstractMesh,
    parameters: Parameters,
    x: Any,
    axis: ExpertAxis | None,
    token_axes: Sequence[str] | PartitionSpec | None,
    parameter_specs: Any = None,
) -> Division:
    """Choose the axes of tokens and experts. Arrays may be ShapeDtypeStructs. Raises InvalidInput, Unsupported."""
    stacked = find(parameters, leaves(spec, prepacked=is_prepacked(parameters))[0].path).ndim
    every = leaves(spec, None, is_prepacked(parameters))
    every = every if stacked == len(every[0].shape) else leaves(spec, 1, is_prepacked(parameters))
    free = free_axes(mesh)

    def held(leaf: Leaf) -> tuple[Names, ...]:
        shown = spec_of(find(parameters, leaf.path))
        if shown is None and parameter_specs is not None:
            shown = find(parameter_specs, leaf.path)
        entries = (*map(as_names, shown or ()), *((),) * len(leaf.shape))[: len(leaf.shape)]
        return tuple(tuple(name for name in names if free.get(name, 1) > 1) for names in entries)

    splits = {leaf.path: held(leaf) for leaf in every}
    experts = [splits[leaf.path][_split(leaf).index(True)] for leaf in every if any(_split(leaf))]
    if axis is None:
        axis = next((ExpertAxis(names[0]) for names in experts if names), None)
    if axis is not None and axis.tokens is not None:
        if token_axes is not None:
            raise InvalidInput(
                f"token_axes must be None with ExpertAxis(tokens=...), got {token_axes} and {axis.tokens}; keep one"
            )
        token_axes = axis.tokens
    split = split_tokens(x, mesh, token_axes, () if axis is None else (axis.name,))

    def part(leaf: Leaf) -> Part:
        is_known = parameter_specs is not None or not is_hidden(find(parameters, leaf.path), mesh)
        return Part(leaf, *_part(leaf, splits[leaf.path], axis, split, spec.num_experts), is_known)

    parts = tuple(map(part, every))
    return Division(split, axis, parts)


def _part(
    leaf: Leaf, held: tuple[Names, ...], axis: ExpertAxis | None, split: Split, num_experts: int
) -> tuple[PartitionSpec, tuple[tuple[int, Names], ...]]:
    entries, gathers, shape, path = [], [], split.mesh.shape, "/".join(leaf.path)
    for number, (names, is_experts) in enumerate(zip(held, _split(leaf), strict=True)):
        here: Names = ()
        if is_experts and axis is not None:
            here = (axis.name,) if num_experts % shape[axis.name] == 0 else ()
            if names and names[0] != axis.name:
                raise Unsupported(
                    f"{path} must have its experts split over {axis.name!r}, the expert_axis, got {names}; name "
                    f"{names[0]!r} as expert_axis, or reshard it"
                )
            names = names[1:]
        if names and number == 0 and len(leaf.shape) > len(leaf.parameter.axes):
            raise Unsupported(
                f"{path} must have each layer whole, got layers split over {names}: every call would gather the stack; "
                "call a pipeline's stages inside jax.shard_map"
            )
        if idle := [name for name in names if name not in split.over]:
            raise Unsupported(
                f"{path} must be whole over {', '.join(map(repr, idle))}, where x has no tokens of their own, got "
                f"{P(*(held or None for held in held))}: each call would gather it; reshard it, or split tokens there "
                "as well, by token_axes for example, and it is gathered as in FSDP"
            )
        entries.append((*here, *names) or None)
        gathers += [(number, names)] if names else []
    return P(*entries), tuple(gathers)


@dataclass(frozen=True)
class _Local:
    """The forward of one device, a key of jit's cache."""

    forward: Callable[..., Any]
    division: Division
    options: tuple[tuple[str, Any], ...]
    return_aux: bool

    def __call__(self, parameters: Parameters, layer_index: Any, adapters: Any, by_token: dict[str, Any]) -> Any:
        division, split, exists = self.division, self.division.split, None
        arrays = {part.leaf.path: find(parameters, part.leaf.path) for part in division.parts}
        cut = layer_index is not None and any(part.gathers for part in division.parts)
        if cut:
            num_layers, index = next(iter(arrays.values())).shape[0], jnp.asarray(layer_index, jnp.int32).reshape(())
            exists, layer_index = (index >= 0) & (index < num_layers), None
            arrays = {path: jax.lax.dynamic_index_in_dim(one, index, keepdims=False) for path, one in arrays.items()}
        for part in division.parts:
            for number, names in part.gathers:
                array = arrays[part.leaf.path]
                arrays[part.leaf.path] = jax.lax.all_gather(array, names, axis=number - cut, tiled=True)
        ranks = Ranks(division.axis, split.over, split.consecutive)
        if adapters is not None:
            adapters = dataclasses.replace(adapters, factors=seeded_here(adapters.factors, split.over))
        options = dict(self.options) | {"adapters": adapters}
        result = self.forward(nested(arrays.items()), layer_index, by_token, ranks, **options)
        y, aux = result if self.return_aux else (result, None)
        y = y if exists is None else jnp.where(exists, y, jnp.nan)
        if aux is None:
            return y
        return y, _by_batch(_of_all(aux, ranks), lambda one: one.reshape(*y.shape[:-1], -1))


def _by_batch(aux: MoEAux, change: Callable[[jax.Array], jax.Array]) -> MoEAux:
    return aux._replace(**{name: change(getattr(aux, name)) for name in ("ids", "weights", "logits")})


def _of_all(aux: MoEAux, ranks: Ranks) -> MoEAux:
    over = ranks.over
    if not over:
        return aux
    others = tuple(name for name in over if ranks.axis is None or name != ranks.axis.name)
    return aux._replace(
        load_balance_loss=jax.lax.pmean(aux.load_balance_loss, over),
        z_loss=jax.lax.pmean(aux.z_loss, over),
        tokens_per_expert=jax.lax.psum(aux.tokens_per_expert, over),
        invalid_ids=jax.lax.psum(aux.invalid_ids, over),
        overflow=jax.lax.psum(aux.overflow, others) if others and aux.overflow is not None else aux.overflow,
    )


def over_mesh(
    forward: Callable[..., Any],
    division: Division,
    whole: tuple[Parameters, Any, Any],
    by_token: dict[str, Any],
    options: Mapping[str, Any],
) -> Any:
    """Call `forward(parameters, layer_index, by_token, ranks, **options)` on each device's parts. whole: parameters,
    layer_index and adapters. by_token: arrays with x's batch axes first."""
    parameters, layer_index, adapters = whole
    split, x, return_aux = division.split, by_token["x"], options["return_aux"]
    for name, array in by_token.items():
        if array is not None and getattr(array, "shape", ())[: x.ndim - 1] != x.shape[:-1]:
            got = getattr(array, "shape", type(array).__name__)
            raise InvalidInput(f"{name} must begin with the batch axes {x.shape[:-1]} of x, got {got}; reshape it")
    specs = nested((part.leaf.path, part.spec) for part in division.parts)
    parameters = nested((part.leaf.path, part.of(parameters)) for part in division.parts)
    rows = split.tokens
    fields = {name: rows if name in ("ids", "weights", "logits") else P() for name in MoEAux._fields}
    local = _Local(forward, division, tuple(options.items()), return_aux)
    inputs = {name: array for name, array in by_token.items() if array is not None}
    if not split.is_known:
        inputs["x"] = stays(x, rows, "x", "name its axes by token_axes or logical rules, or reshard it")
    of_adapters = adapters and dataclasses.replace(adapters, factors=_of_factors(adapters.factors, division), ids=rows)
    arguments = (parameters, specs), (layer_index, P()), (adapters, of_adapters), (inputs, rows)
    result = opened(local, split, (rows, MoEAux(**fields)) if return_aux else rows, *arguments)
    if not return_aux:
        return result
    y, aux = result
    return y, _by_batch(aux, lambda one: _flat(one, split))


def _of_factors(factors: LoRAFactors, division: Division) -> LoRAFactors:
    """Factors are split with their experts where the axis divides them, scale and ranks are whole."""
    axis, experts = division.axis, factors.scale.shape[1]
    splits = axis is not None and experts % division.split.mesh.shape[axis.name] == 0
    specs = {
        name: P(None, axis.name) if axis and splits and name[0] in "ab" and one.shape[1] == experts else P()
        for name, one in named_fields(factors)
    }
    return dataclasses.replace(factors, **specs)


def _flat(array: jax.Array, split: Split) -> jax.Array:
    """`[..., N]` as `[T, N]`, split over all token axes."""
    shape = (-1, array.shape[-1])
    if not split.mesh.are_all_axes_explicit:
        return array.reshape(shape)
    return jnp.reshape(array, shape, out_sharding=NamedSharding(split.mesh, P(split.over or None)))


def own_experts(parameters: Parameters, spec: MoELayerSpec, axis: ExpertAxis) -> dict[str, Any]:
    """The places of this rank from all experts, for numbers that the axis does not divide."""
    placement = Placement.linear(spec.num_experts, jax.lax.axis_size(axis.name))
    places = jnp.asarray(np.maximum(np.array(placement.owners, np.int32), 0))[jax.lax.axis_index(axis.name)]
    every = leaves(spec, prepacked=is_prepacked(parameters))

    def own(leaf: Leaf) -> Any:
        array = find(parameters, leaf.path)
        if not any(_split(leaf)):
            return array
        return jnp.take(array, places, axis=array.ndim - len(leaf.shape) + _split(leaf).index(True))

    return nested((leaf.path, own(leaf)) for leaf in every)


def require_layer(layer_index: Any, num_layers: int) -> None:
    """Raise InvalidInput for a known index outside of a stack."""
    known = isinstance(layer_index, (int, np.generic, np.ndarray, jax.Array)) and not isinstance(layer_index, Tracer)
    if known and np.size(layer_index) == 1 and not 0 <= int(layer_index) < num_layers:
        raise InvalidInput(
            f"layer_index must be in [0, {num_layers}), got {int(layer_index)}; pass the index of a stacked layer"
        )
