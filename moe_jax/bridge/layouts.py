"""Ops on layouts over the devices of a mesh. A layout orders the slots of all tokens, and is whole on every device.

- Products and sums from tokens or slots to tokens or slots are split by token: each device orders its slots anew.
  Products from layout rows to layout rows are split by row: each device has some of the groups.
- Weights that are visibly split by expert stay. Each device multiplies the rows of its experts, and zeros of the others
  are added to them.
- Others need rows of every device. They run whole on each, on arrays that are whole. Ids, masks and counts, which make
  a layout, are small, and gathered for it.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from types import NoneType
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, PartitionSpec

from moe_core.errors import InvalidInput, Unsupported
from moe_core.formats import QuantizedTensor
from moe_core.ops.routing.layout import plan_layout
from moe_core.specs import LayoutSpec, MatmulSpec
from moe_core.specs.operands import MatmulOperands, RaggedLayout, named_fields
from moe_jax.bridge import moves
from moe_jax.bridge.calls import OpCall
from moe_jax.bridge.mesh import (
    Names,
    OnRows,
    Split,
    as_names,
    free_axes,
    held,
    is_on_mesh,
    mesh_of,
    opened,
    parted,
    spec_of,
    split_tokens,
)

_Op = TypeVar("_Op", bound=Callable[..., Any])
_WHOLE = PartitionSpec()
_OF_EXPERTS = tuple(f"operands.{name}" for name in ("weight", "up", "bias", "up_bias"))


def _on_mesh(run: Callable[[Callable[..., Any], dict[str, Any], AbstractMesh], Any]) -> Callable[[_Op], _Op]:
    """Decorate an op so that `run` (the op, its arguments by name, the mesh) takes its place on a mesh."""

    def decorate(op: _Op) -> _Op:
        signature = inspect.signature(op)

        @functools.wraps(op)
        def spread(*arrays: Any, **options: Any) -> Any:
            if not any(map(is_on_mesh, jax.tree.leaves((arrays, options)))):
                return op(*arrays, **options)
            given = signature.bind(*arrays, **options).arguments
            mesh = mesh_of(jax.tree.leaves(given))
            return op(**given) if mesh is None else run(op, given, mesh)

        return cast(_Op, spread)

    return decorate


def on_every_device(fix: str, *small: str) -> Callable[[_Op], _Op]:
    """Decorate an op that needs all of its arrays. small: arguments that a mesh gathers for it. fix: for others that
    are split, the end of the message."""
    return _on_mesh(lambda op, given, mesh: _whole(op, given, mesh, small, fix))


def _whole(op: Callable[..., Any], given: dict[str, Any], mesh: AbstractMesh, small: Names, fix: str) -> Any:
    arrays, options = parted(given)
    leaves = jax.tree.leaves(arrays)
    if not any(any(spec_of(one) or ()) or moves.is_hidden(one, mesh) for one in leaves):
        return op(**given)
    for name, value in arrays.items():
        if name in small or isinstance(value, RaggedLayout):
            continue
        for one in jax.tree.leaves(value):
            if any(mesh.shape[axis] > 1 for entry in spec_of(one) or () for axis in as_names(entry)):
                raise Unsupported(
                    f"{name} must be whole on every device, got {one.shape} split as {spec_of(one)}: rows of a layout "
                    f"come from all tokens, so arrays would move; {fix}"
                )
        arrays[name] = held(name, value, jax.tree.map(lambda _: _WHOLE, value), mesh, fix)
    split = Split(mesh, tuple(free_axes(mesh)), (), True, True)
    return opened(OnRows(op, options, (), ()), split, _WHOLE, (arrays, _WHOLE))


def over_slots(of_layout: Callable[[dict[str, Any]], _Way | None], fix: str) -> Callable[[_Op], _Op]:
    """Decorate an op that reads a layout. of_layout: (its arguments) -> how its rows are split."""

    def run(op: Callable[..., Any], given: dict[str, Any], mesh: AbstractMesh) -> Any:
        # The op itself refuses other types.
        if not isinstance(given["layout"], (RaggedLayout, NoneType)):
            return op(**given)
        way = of_layout(given)
        return _whole(op, given, mesh, (), fix) if way is None else way.run(op, given, mesh)

    return _on_mesh(run)


@dataclass(frozen=True)
class _Way:
    """Arrays with rows: paths `argument` or `argument.field`. tokens: rows are of tokens or slots, and divide as the
    tokens do. None: rows of the layout. orders: the op reads the order of rows. over: the axes of rows. by_expert: of
    experts, the axis `expert_axis` of weights."""

    rows: Names
    tokens: int | None
    orders: bool = True
    over: Names = ()
    by_expert: Names = ()
    expert_axis: int = 0

    def run(self, op: Callable[..., Any], given: dict[str, Any], mesh: AbstractMesh) -> Any:
        arrays, options = parted(given)
        x = _rows_of(arrays, self.rows[0])
        shape = x.shape if self.tokens is None else (self.tokens, x.shape[-1])
        axis, experts = _experts_axes(arrays)
        split = split_tokens(x, mesh, shape=shape)
        if experts and not any(spec_of(x) or ()):
            dims = tuple(tuple(name for name in names if name not in experts) for names in split.dims)
            split = dataclasses.replace(split, dims=dims)
        if not all(name in split.names and name not in split.over for name in experts):
            experts = ()
        way = dataclasses.replace(self, over=split.over, by_expert=experts, expert_axis=axis)
        if not (split.over or experts or any(moves.is_hidden(one, mesh) for one in jax.tree.leaves(arrays))):
            return op(**given)
        if (count := shape[0]) % (devices := math.prod(mesh.shape[name] for name in split.over)):
            raise InvalidInput(
                f"{self.rows[0]} must have rows that {devices} devices divide by "
                f"{'token' if self.tokens is not None else 'row'}, got {count} over {split.over}; reshard it over fewer"
            )
        specs = {name: way._specs(name, value, split) for name, value in arrays.items()}
        arrays = {
            name: value if name == "layout" else held(name, value, specs[name], mesh) for name, value in arrays.items()
        }
        return opened(_Local(op, options, way), split, split.tokens, (arrays, specs))

    def _specs(self, name: str, value: Any, split: Split) -> Any:
        if name == "layout":
            by_slot = "row_of_slot" if self.tokens is not None else "slot_of_row"
            fields = {field: split.tokens if field == by_slot else _WHOLE for field, _ in named_fields(value)}
            return dataclasses.replace(value, **fields)

        def of(path: Any, array: Any) -> PartitionSpec:
            full = ".".join([name, *(str(getattr(key, "name", key)) for key in path)])
            first = ".".join(full.split(".")[:2])
            # One scale of all rows is no row.
            if first in self.rows and not (full.endswith(".scales") and array.shape[0] == 1):
                return split.tokens
            entries = [*(spec_of(array) or ()), *(None,) * array.ndim][: array.ndim]
            if self.by_expert and first in _OF_EXPERTS:
                entries[self.expert_axis] = None
                split.whole(full, entries)
                return PartitionSpec(
                    *(self.by_expert if axis == self.expert_axis else None for axis in range(array.ndim))
                )
            split.whole(full, entries)
            return _WHOLE

        return jax.tree_util.tree_map_with_path(of, value)

    def local_layout(self, layout: RaggedLayout) -> RaggedLayout:
        """The layout of this device's slots, or of its rows of the layout."""
        spec = layout.spec
        experts = spec.num_experts // math.prod(map(jax.lax.axis_size, self.by_expert))
        first_expert = jax.lax.axis_index(self.by_expert) * experts if self.by_expert else 0
        if self.tokens is not None:
            rows, top_k = layout.row_of_slot, spec.top_k
            if not self.orders:
                here = LayoutSpec(len(rows) // top_k, top_k, spec.num_experts)
                slots = jnp.where(rows >= 0, jnp.arange(len(rows), dtype=jnp.int32), -1)
                return RaggedLayout(here, None, None, None, slots, None)
            expert = jnp.searchsorted(layout.group_start, rows, side="right").astype(jnp.int32) - 1 - first_expert
            # Slots without a row are before the first expert.
            ids = jnp.where((expert >= 0) & (expert < experts), expert, -1).reshape(-1, top_k)
            call, here = OpCall("make_layout"), LayoutSpec(ids.shape[0], top_k, experts)
            return RaggedLayout(here, *call.run(plan_layout, call.array("ids", ids), here))
        (count,) = layout.slot_of_row.shape
        first = jax.lax.axis_index(self.over) * count if self.over else 0
        start = jax.lax.dynamic_slice_in_dim(layout.group_start, first_expert, experts + 1)
        end = start[:-1] + jax.lax.dynamic_slice_in_dim(layout.group_sizes, first_expert, experts)
        start, end = (jnp.clip(one - first, 0, count).astype(jnp.int32) for one in (start, end))
        row = jnp.arange(count, dtype=jnp.int32)
        row = jnp.where((layout.slot_of_row >= 0) & (row >= start[0]) & (row < start[-1]), row, -1)
        return RaggedLayout(LayoutSpec(count, 1, experts), end - start[:-1], start, row, row, None)


def _experts_axes(arrays: dict[str, Any]) -> tuple[int, Names]:
    """(the experts' axis of weights, the mesh axes that visibly split it)."""
    operands = arrays.get("operands")
    if operands is None or "layout" not in arrays:
        return 0, ()
    axis = 0 if operands.layer_index is None else 1
    entries = [*(spec_of(_rows_of(arrays, "operands.weight")) or ()), None, None]
    return axis, as_names(entries[axis])


def _rows_of(arrays: dict[str, Any], path: str) -> Any:
    name, _, field = path.partition(".")
    x = getattr(arrays[name], field) if field else arrays[name]
    return x.values if isinstance(x, QuantizedTensor) else x


@dataclass(frozen=True)
class _Local:
    """The op on one device's rows, a key of jit's cache."""

    op: Callable[..., Any]
    options: tuple[tuple[str, Any], ...]
    way: _Way

    def __call__(self, arrays: dict[str, Any]) -> Any:
        layout = arrays.get("layout")
        if layout is not None:
            arrays = arrays | {"layout": self.way.local_layout(layout)}
            operands = arrays.get("operands")
            if self.way.tokens is None and operands is not None and operands.row_weight is not None:
                # Of slots, on every device, and here of rows.
                slots = layout.slot_of_row
                weight = jnp.where(slots >= 0, operands.row_weight.reshape(-1)[slots], 0)
                arrays["operands"] = dataclasses.replace(operands, row_weight=weight)
        y = self.op(**arrays, **dict(self.options))
        return jax.lax.psum(y, self.way.by_expert) if self.way.by_expert else y


def way_of_product(given: dict[str, Any]) -> _Way | None:
    """How `matmul_ogs` is split: by token, by row of the layout, or not."""
    operands, layout, spec = given["operands"], given["layout"], given["spec"]
    if not isinstance(operands, MatmulOperands) or not isinstance(spec, MatmulSpec):
        return None
    if layout is None or (spec.gather, spec.scatter) == ("row", "row"):
        return _Way(("operands.x",), None)
    if spec.gather == "row" or spec.scatter == "row":
        return None
    return _Way(("operands.x", "operands.row_weight"), layout.spec.num_tokens)


def way_of_sum(given: dict[str, Any]) -> _Way | None:
    """How `reduce` is split: by token, or not."""
    if given.get("order", "slot") == "row":
        return None
    return _Way(("y", "shared", "shared_gate"), given["layout"].spec.num_tokens, orders=False)
