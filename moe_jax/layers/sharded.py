"""Shardings of parameters, and a forward, for layers with experts split over a mesh axis."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from moe_core.errors import InvalidInput
from moe_core.layers import MoEAux, MoELayerSpec
from moe_jax.layers.parameters import Leaf, Parameters, is_prepacked, leaves, nested
from moe_jax.parallel.axis import ExpertAxis, require_divisible


def expert_specs(
    spec: MoELayerSpec, axis: str = "ep", *, num_layers: int | None = None, prepacked: bool = False
) -> dict[str, Any]:
    """PartitionSpecs of a layer's parameters, for example for `in_specs` of `jax.shard_map`.

    Experts are split over the mesh axis, all else is whole. num_layers: of a stack.
    """
    every = leaves(spec, num_layers, prepacked)
    return nested((leaf.path, P(*(axis if split else None for split in _split(leaf)))) for leaf in every)


def expert_sharding(
    spec: MoELayerSpec, mesh: Mesh, axis: str = "ep", *, num_layers: int | None = None, prepacked: bool = False
) -> dict[str, Any]:
    """`expert_specs` as NamedShardings of a mesh, for `jax.device_put`, `out_shardings` and checkpoints.

    Raises InvalidInput unless the mesh has the axis and it divides the experts.
    """
    if axis not in mesh.shape or spec.num_experts % mesh.shape[axis]:
        raise InvalidInput(
            f"axis must be one of the mesh's {dict(mesh.shape)} that divides the {spec.num_experts} experts, got "
            f"{axis!r}; name another axis, or make a mesh with one"
        )
    specs = expert_specs(spec, axis, num_layers=num_layers, prepacked=prepacked)
    return jax.tree.map(lambda one: NamedSharding(mesh, one), specs, is_leaf=lambda one: isinstance(one, P))


def local_leaf(leaf: Leaf, axis: ExpertAxis) -> Leaf:
    ranks = jax.lax.axis_size(axis.name)
    sizes = zip(leaf.shape, _split(leaf), strict=True)
    return dataclasses.replace(leaf, shape=tuple(size // ranks if split else size for size, split in sizes))


def _split(leaf: Leaf) -> list[bool]:
    axes = (*(None,) * (len(leaf.shape) - len(leaf.parameter.axes)), *leaf.parameter.axes)
    return [axis == "experts" and leaf.parameter.name.startswith("experts.") for axis in axes]


def over_mesh(
    forward: Callable[..., Any],
    axis: ExpertAxis,
    mesh: AbstractMesh,
    spec: MoELayerSpec,
    whole: tuple[Parameters, Any],
    by_token: dict[str, Any],
    return_aux: bool,
) -> Any:
    """Call `forward(parameters, layer_index, by_token)` on local parts. whole: parameters and layer_index. by_token:
    arrays with the batch as first axis."""
    axis = axis if axis.tokens is not None else dataclasses.replace(axis, tokens=tuple(mesh.shape))
    ranks, rows = 1, by_token["x"].shape[0] if by_token["x"].ndim > 1 else 0
    for name in axis.over:
        if name not in mesh.shape:
            raise InvalidInput(f"tokens must name axes of the mesh {dict(mesh.shape)}, got {name!r}; leave it out")
        ranks *= mesh.shape[name]
    if rows % ranks or not rows:
        raise InvalidInput(
            f"x must have a first axis that the {ranks} devices of {axis.over} divide, got {by_token['x'].shape}; pad "
            "it and pass a token_mask, or name fewer axes as ExpertAxis(tokens=...)"
        )
    require_divisible(spec.num_experts, mesh.shape[axis.name], axis.name)
    parameters, layer_index = whole
    num_layers = None if layer_index is None else 1  # only the leading axis counts
    specs = expert_specs(spec, axis.name, num_layers=num_layers, prepacked=is_prepacked(parameters))
    tokens = P(axis.over)
    aux = MoEAux(*(tokens if name in ("ids", "weights", "logits") else P() for name in MoEAux._fields))

    def local(parameters: Parameters, layer_index: Any, by_token: dict[str, Any]) -> Any:
        result = forward(parameters, layer_index, by_token, axis)
        return (result[0], of_batch(result[1], axis)) if return_aux else result

    inputs = {name: array for name, array in by_token.items() if array is not None}
    if mesh.are_all_axes_explicit:
        # Types of arrays have shardings, and shard_map moves no array.
        inputs = jax.tree.map(lambda array: jax.sharding.reshard(array, tokens), inputs)
        parameters = jax.tree.map(jax.sharding.reshard, parameters, specs)
    call = jax.shard_map(
        local, in_specs=(specs, P(), tokens), out_specs=(tokens, aux) if return_aux else tokens, mesh=mesh
    )
    return call(parameters, layer_index, inputs)


def of_batch(aux: MoEAux, axis: ExpertAxis) -> MoEAux:
    others = tuple(name for name in axis.over if name != axis.name)
    return aux._replace(
        load_balance_loss=jax.lax.pmean(aux.load_balance_loss, axis.over),
        z_loss=jax.lax.pmean(aux.z_loss, axis.over),
        tokens_per_expert=jax.lax.psum(aux.tokens_per_expert, axis.over),
        invalid_ids=jax.lax.psum(aux.invalid_ids, axis.over),
        overflow=jax.lax.psum(aux.overflow, others) if others else aux.overflow,
    )
