"""Parameters of experts that lie on ranks in any order."""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
from torch.distributed.tensor import DTensor

from moe_core.errors import InvalidInput, Unsupported
from moe_core.parallel.placement import HOLE, Placement
from moe_core.parallel.tensor import Cut, TensorSplit
from moe_torch.bridge.private import (
    dtensor_like,
    is_mutable,
    takes_lists,
    to_copy,
    tree_leaves,
    tree_map,
    wrapper_subclass,
)
from moe_torch.layers.listed import is_of_lists, is_whole_norm, part_of, run_on_lists, whole_norm
from moe_torch.layers.shards import Own
from moe_torch.parallel.group import ranks_of

aten: Any = torch.ops.aten
#: Other operations that keep the axis of experts.
_NAMES = "detach alias clone copy_ empty_like zeros_like ones_like full_like zero_"
_ALIKE = {to_copy, aten.fill_.Scalar, aten.view.dtype, *[getattr(aten, name).default for name in _NAMES.split()]}


def _is_elementwise(func: Any) -> bool:
    return func in _ALIKE or torch.Tag.pointwise in func.tags


class Slice(NamedTuple):
    """A rank's slice of every expert's array, on a tensor axis. cut: None: all of it."""

    mesh: Any
    cut: Cut | None
    split: TensorSplit


@takes_lists
class PlacedTensor(torch.Tensor):
    """An array `[E, ...]` by logical expert, of adapters `[slots, E, ...]`. This rank holds the experts of its places.

    It is like a DTensor for experts in any order. Elementwise operations, such as optimizers', run on this rank's part,
    `to_local()` `[held, ...]`, in the order of `placement.owners[rank]`. `torch.distributed.checkpoint` saves and loads
    it and optimizer states by expert, for every placement and number of ranks. Other operations raise Unsupported.

    With a tensor axis, `part` is this rank's slice of each expert.
    """

    _local: torch.Tensor
    #: The mesh, this rank, the placement, and the axis of experts unless it is the first.
    _where: tuple[Any, ...]
    part: Slice | None

    @staticmethod
    def __new__(cls, local: torch.Tensor, where: tuple[Any, ...], part: Slice | None = None) -> PlacedTensor:
        shape = [*local.shape]
        shape[sum(where[3:])] = where[2].num_experts
        if part is not None and part.cut is not None:
            shape[part.cut.axis] *= part.split.size
        made = wrapper_subclass(cls, shape, dtype=local.dtype, device=local.device)
        made._local, made._where, made.part = local, where, part
        return made

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        _, rank, placement, *_ = self._where
        return f"PlacedTensor({list(self.shape)}, {self.dtype}, rank {rank} of {placement})"

    @property
    def axis(self) -> int:
        return sum(self._where[3:])

    @property
    def held(self) -> list[int]:
        return held_experts(self._where[2], self._where[1])

    def to_local(self) -> torch.Tensor:
        """This rank's experts, `[held, ...]`; differentiable."""
        return cast(Any, _ToLocal.apply(self))

    def of_local(self, local: torch.Tensor) -> PlacedTensor:
        return PlacedTensor(local, self._where, self.part)

    @torch.no_grad()
    def full_tensor(self) -> torch.Tensor:
        """All experts, `[E, ...]`, on every rank. A collective, not differentiable."""
        mesh, _, placement, *_ = self._where
        local = self._local.movedim(self.axis, 0).contiguous()
        filled = filled_up(local, placement.per_rank - len(local))
        places = ranks_of(mesh, None, "full_tensor").all_gather(filled, "experts").flatten(0, 1)
        _, by_expert, start = placement.tables
        whole = places[torch.tensor(by_expert[start[:-1]], dtype=torch.long, device=places.device)]
        whole = whole.movedim(0, self.axis).contiguous()
        if self.part is None or self.part.cut is None:
            return whole
        slices, (axis, parts) = ranks_of(self.part.mesh, None, "full_tensor").all_gather(whole, "slices"), self.part.cut
        pieces = [one.chunk(parts, axis) for one in slices]
        return torch.cat([piece[number] for number in range(parts) for piece in pieces], axis)

    # For compilers, `Module.to_empty` and swaps of parameters.
    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["_local"], (self._where, self.part)

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], where: Any, size: Any, stride: Any) -> PlacedTensor:
        return PlacedTensor(inner["_local"], *where)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if is_of_lists(func):
            return run_on_lists(func, args, kwargs or {})
        if is_whole_norm(func, args, kwargs or {}):
            return whole_norm(*args, **kwargs or {})
        leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        first = next(leaf for leaf in leaves if isinstance(leaf, PlacedTensor))
        if not _is_elementwise(func):
            raise Unsupported(
                f"{func} cannot be had of experts in the order of a placement ({first._where[2]}); use to_local(), the "
                "experts of this rank, full_tensor(), or Placement.linear, which makes DTensors"
            )

        def local(leaf: Any) -> Any:
            if isinstance(leaf, PlacedTensor):
                if (leaf._where[1:], leaf.part) != (first._where[1:], first.part):
                    raise InvalidInput(f"both arrays must have one placement, got {first!r} and {leaf!r}; load it anew")
                return leaf._local
            if isinstance(leaf, torch.Tensor) and leaf.dim():
                # A whole array, as of a checkpoint of one process.
                if func is not aten.copy_.default or type(leaf) is not torch.Tensor or leaf.shape != first.shape:
                    raise InvalidInput(
                        f"arrays beside {first!r} must have its placement, got {type(leaf).__name__} "
                        f"{list(leaf.shape)} in {func}; use to_local()"
                    )
                part = first.part
                owned = Own(first._local) if part is None else Own(first._local, None, part.cut, part.split)
                held = torch.tensor(first.held, dtype=torch.long, device=leaf.device)
                return owned.taken(leaf.index_select(first.axis, held))
            return leaf

        positional, named = tree_map(local, (args, kwargs or {}))
        result = func(*positional, **named)
        if is_mutable(func):
            return (kwargs or {}).get("out", args[0])
        return tree_map(first.of_local, result)

    # For torch.distributed.checkpoint.
    def __create_write_items__(self, fqn: str, tensor: Any) -> list[Any]:
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        _, rank, placement, *_ = self._where
        properties = TensorProperties.create_from_tensor(self._local)
        items, part = [], self.part
        if part is not None and part.cut is None and part.split.index > 0:
            # The first rank of the axis writes shared arrays.
            return items
        for chunk in self.__create_chunk_list__():
            # One rank writes an expert with replicas.
            if placement.places_of(chunk.offsets[self.axis])[0] // placement.per_rank == rank:
                data = TensorWriteData(chunk=chunk, properties=properties, size=self.size())
                items.append(WriteItem(MetadataIndex(fqn, chunk.offsets), WriteItemType.SHARD, tensor_data=data))
        return items

    def __create_chunk_list__(self) -> list[Any]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        chunks, cut = [], None if self.part is None else self.part.cut
        for expert in self.held:
            offset, size = [0] * self.dim(), [*self.shape]
            offset[self.axis], size[self.axis] = expert, 1
            if cut is None:
                chunks.append(ChunkStorageMetadata(torch.Size(offset), torch.Size(size)))
                continue
            assert self.part is not None
            for piece in cut.slices(self.shape[cut.axis], self.part.split):
                offset[cut.axis], size[cut.axis] = piece.start, piece.stop - piece.start
                chunks.append(ChunkStorageMetadata(torch.Size(offset), torch.Size(size)))
        return chunks

    def __get_tensor_shard__(self, index: Any) -> torch.Tensor:
        array = self._local.narrow(self.axis, self.held.index(index.offset[self.axis]), 1)
        if self.part is None or self.part.cut is None:
            return array
        cut, split = self.part.cut, self.part.split
        starts = [piece.start for piece in cut.slices(self.shape[cut.axis], split)]
        return array.chunk(cut.parts, cut.axis)[starts.index(index.offset[cut.axis])]


@takes_lists
class ExpertTensor(DTensor):
    """A DTensor of experts. Operators on lists, such as optimizers', also take it beside whole tensors."""

    __slots__ = ()

    def of_local(self, local: torch.Tensor) -> ExpertTensor:
        return dtensor_like(ExpertTensor, self, local)

    def to_part(self) -> torch.Tensor:
        """`to_local`, with gradients of this class."""
        return cast(Any, _ToLocal.apply(self))

    @staticmethod
    def __tensor_unflatten__(inner: Any, spec: Any, size: Any, stride: Any) -> ExpertTensor:
        made: Any = DTensor.__tensor_unflatten__(inner, spec, size, stride)
        return dtensor_like(ExpertTensor, made).requires_grad_(made.requires_grad)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if is_of_lists(func):
            return run_on_lists(func, args, kwargs)
        if is_whole_norm(func, args, kwargs):
            return whole_norm(*args, **kwargs)
        if func == aten.view.default and len(args[1]) == 1 and args[0].dim() > 1:
            raise Unsupported(
                f"experts of several ranks cannot be flattened beside whole tensors, got {list(args[0].shape)}; before "
                "DistributedDataParallel call moe_torch.parallel.ignore_experts(model), else use full_tensor()"
            )
        leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        first = next(leaf for leaf in leaves if isinstance(leaf, ExpertTensor))
        alike = [
            leaf.device_mesh is first.device_mesh and leaf.placements == first.placements and leaf.shape == first.shape
            for leaf in leaves
            if isinstance(leaf, DTensor)
        ]
        whole = [leaf for leaf in leaves if leaf.dim() and not isinstance(leaf, DTensor)]
        if not _is_elementwise(func) or whole or not all(alike):
            plain = tree_map(lambda leaf: dtensor_like(DTensor, leaf) if type(leaf) is cls else leaf, (args, kwargs))
            return func(*plain[0], **plain[1])
        positional, named = tree_map(part_of, (args, kwargs))
        result = func(*positional, **named)
        if is_mutable(func):
            return kwargs.get("out", args[0])
        return tree_map(first.of_local, result)


class _ToLocal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, placed: PlacedTensor | ExpertTensor) -> torch.Tensor:
        ctx.of_local, part = placed.of_local, part_of(placed)
        return part.view_as(part)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return ctx.of_local(gradient)


def held_experts(placement: Placement, rank: int) -> list[int]:
    return [expert for expert in placement.owners[rank] if expert != HOLE]


def filled_up(array: torch.Tensor, missing: int) -> torch.Tensor:
    return torch.cat([array, array.new_zeros((missing, *array.shape[1:]))]) if missing else array
