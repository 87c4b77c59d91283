"""Parameters of experts that lie on ranks in any order."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from moe_core.errors import InvalidInput, Unsupported
from moe_core.parallel.placement import HOLE, Placement
from moe_torch.parallel.group import ranks_of

aten: Any = torch.ops.aten
#: Beside elementwise operations, those that keep the axis of experts.
_ALIKE = frozenset(
    (
        aten.detach.default,
        aten.alias.default,
        aten.clone.default,
        aten._to_copy.default,
        aten.copy_.default,
        aten.empty_like.default,
        aten.zeros_like.default,
        aten.ones_like.default,
        aten.full_like.default,
        aten.zero_.default,
        aten.fill_.Scalar,
        aten.view.dtype,
    )
)


class PlacedTensor(torch.Tensor):
    """An array `[E, ...]` by logical expert, of which this rank holds the experts that a placement gives it.

    What a DTensor is for consecutive experts. Elementwise operations, such as those of optimizers, run on this rank's
    part, `to_local()` `[held, ...]`, in the order of `placement.owners[rank]`. `full_tensor()` is the whole, a
    collective. `torch.distributed.checkpoint` saves and loads it, and what an optimizer keeps of it, expert by expert,
    so that checkpoints fit every other placement and number of ranks. All other operations raise Unsupported.
    """

    _local: torch.Tensor
    #: The mesh or process group, this rank in it, and what lies where.
    _where: tuple[Any, int, Placement]

    @staticmethod
    def __new__(cls, local: torch.Tensor, where: tuple[Any, int, Placement]) -> PlacedTensor:
        own: Any = torch.Tensor
        shape = (where[2].num_experts, *local.shape[1:])
        made = own._make_wrapper_subclass(cls, shape, dtype=local.dtype, device=local.device)
        made._local, made._where = local, where
        return made

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        _, rank, placement = self._where
        return f"PlacedTensor({list(self.shape)}, {self.dtype}, rank {rank} of {placement})"

    @property
    def held(self) -> list[int]:
        """The logical experts of this rank, in local order."""
        return held_experts(self._where[2], self._where[1])

    def to_local(self) -> torch.Tensor:
        """This rank's experts, `[held, ...]`; differentiable."""
        found: Any = _ToLocal.apply(self)
        return found

    def of_local(self, local: torch.Tensor) -> PlacedTensor:
        """Another array of the same experts, from this rank's part `[held, ...]`."""
        return PlacedTensor(local, self._where)

    @torch.no_grad()
    def full_tensor(self) -> torch.Tensor:
        """All experts, `[E, ...]`, on every rank; a collective, and not differentiable."""
        mesh, _, placement = self._where
        filled = filled_up(self._local, placement.per_rank - len(self._local))
        places = ranks_of(mesh, None, "full_tensor").all_gather(filled, "experts").flatten(0, 1)
        _, by_expert, start = placement.tables
        return places[torch.tensor(by_expert[start[:-1]], dtype=torch.long, device=places.device)]

    # What compilers, `Module.to_empty` and swaps of parameters ask for.
    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["_local"], self._where

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], where: Any, size: Any, stride: Any) -> PlacedTensor:
        return PlacedTensor(inner["_local"], where)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        first = next(leaf for leaf in leaves if isinstance(leaf, PlacedTensor))
        if func not in _ALIKE and torch.Tag.pointwise not in func.tags:
            raise Unsupported(
                f"{func} cannot be had of experts in the order of a placement ({first._where[2]}); use to_local(), the "
                "experts of this rank, full_tensor(), or Placement.linear, which makes DTensors"
            )

        def local(leaf: Any) -> Any:
            if isinstance(leaf, PlacedTensor):
                if leaf._where[1:] != first._where[1:]:
                    raise InvalidInput(f"both arrays must have one placement, got {first!r} and {leaf!r}; load it anew")
                return leaf._local
            if isinstance(leaf, torch.Tensor) and leaf.dim():
                # A whole array, such as of a checkpoint that one process wrote.
                if func is not aten.copy_.default or type(leaf) is not torch.Tensor or leaf.shape != first.shape:
                    raise InvalidInput(
                        f"arrays beside {first!r} must have its placement, got {type(leaf).__name__} "
                        f"{list(leaf.shape)} in {func}; use to_local()"
                    )
                return leaf[first.held]
            return leaf

        given, named = tree_map(local, (args, kwargs or {}))
        found = func(*given, **named)
        if func._schema.is_mutable:
            return (kwargs or {}).get("out", args[0])
        return tree_map(first.of_local, found)

    # torch.distributed.checkpoint asks for these three.
    def __create_write_items__(self, fqn: str, tensor: Any) -> list[Any]:
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        _, rank, placement = self._where
        properties = TensorProperties.create_from_tensor(self._local)
        items = []
        for expert, chunk in zip(self.held, self.__create_chunk_list__(), strict=True):
            # One rank writes an expert that lies on several.
            if placement.places_of(expert)[0] // placement.per_rank == rank:
                data = TensorWriteData(chunk=chunk, properties=properties, size=self.size())
                items.append(WriteItem(MetadataIndex(fqn, chunk.offsets), WriteItemType.SHARD, tensor_data=data))
        return items

    def __create_chunk_list__(self) -> list[Any]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        rest = self.shape[1:]
        offsets = (torch.Size((expert, *[0] * len(rest))) for expert in self.held)
        return [ChunkStorageMetadata(offset, torch.Size((1, *rest))) for offset in offsets]

    def __get_tensor_shard__(self, index: Any) -> torch.Tensor:
        row = self.held.index(index.offset[0])
        return self._local[row : row + 1]


class _ToLocal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, placed: PlacedTensor) -> torch.Tensor:
        ctx.where = placed._where
        return placed._local.view_as(placed._local)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return PlacedTensor(gradient, ctx.where)


def held_experts(placement: Placement, rank: int) -> list[int]:
    """The logical experts of a rank, in local order."""
    return [expert for expert in placement.owners[rank] if expert != HOLE]


def filled_up(array: torch.Tensor, missing: int) -> torch.Tensor:
    """Places without an expert at the end; no product reads them."""
    return torch.cat([array, array.new_zeros((missing, *array.shape[1:]))]) if missing else array
