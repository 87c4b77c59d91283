"""The names of a block's tensors in the state_dict of a layer on its weights."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from moe_torch.layers.casts import at_least_float32


@dataclass(frozen=True)
class BlockArray:
    """One array of a layer, held by the block's tensors `names` of `shape` and `dtype`: one, or gate and up. turned:
    transposed. num_experts: of tensors with the F rows of one expert below another's, else 0.
    """

    name: str
    names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    turned: bool = False
    num_experts: int = 0

    def join(self, tensors: list[torch.Tensor]) -> torch.Tensor:
        """The layer's array: `tensors[0]` itself where nothing changes."""
        if self.num_experts:
            tensors = [tensor.unflatten(0, (self.num_experts, -1)) for tensor in tensors]
        whole = tensors[0]
        if self.name in ("router.table", "router.correction_bias"):
            return whole.int() if self.name == "router.table" else at_least_float32(whole.reshape(-1))
        if len(tensors) > 1:
            whole = torch.cat(tensors, -2)
        return whole.transpose(-1, -2).contiguous() if self.turned else whole

    def split(self, array: torch.Tensor) -> list[torch.Tensor]:
        """The inverse, row-major as writers of files want it: views where they are."""
        if self.name in ("router.table", "router.correction_bias"):
            return [array.to(self.dtype) if self.name == "router.table" else array.reshape(self.shape)]
        whole = array.transpose(-1, -2) if self.turned else array
        count = len(self.names)
        parts = whole.chunk(count, -2) if count > 1 else (whole,)
        parts = [part.flatten(0, 1) for part in parts] if self.num_experts else parts
        return [part.contiguous() for part in parts]


class _Tensors:
    """Stands for the block's tensors where torch.distributed.checkpoint walks along the names of a state_dict."""

    def __getattr__(self, name: str) -> _Tensors:
        if name.startswith("_"):
            raise AttributeError(name)
        return self


def keep_names(layer: Any, arrays: tuple[BlockArray, ...]) -> None:
    """Let the layer save and load the names of `arrays` in a model's state_dict. It loads its own names, too."""
    layer.block_arrays, layer.block_tensors = arrays, _Tensors()
    # torch.distributed.checkpoint's names of attributes.
    layer._fqn_modifiers = partial(
        dict.fromkeys, {name.split(".")[0] for a in arrays for name in a.names}, "block_tensors"
    )
    layer.register_state_dict_post_hook(_rename)
    layer.register_load_state_dict_pre_hook(_accept)


def _rename(layer: Any, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    """A layer alone, without prefix, keeps its own names, which other layers load."""
    for array in layer.block_arrays if prefix else ():
        held = state.pop(prefix + array.name, None)
        if held is not None:
            # Writers of files take views of one storage for tied weights, and leave out all but one.
            parts = [part.clone() if len(array.names) > 1 else part for part in array.split(held)]
            state |= {prefix + name: part for name, part in zip(array.names, parts, strict=True)}


def _accept(layer: Any, state: dict[str, Any], prefix: str, metadata: Any, strict: bool, *errors: list[str]) -> None:
    for array in layer.block_arrays:
        names = [prefix + name for name in array.names]
        given = [name for name in names if name in state]
        if not given:
            continue
        held = layer._tensors()[array.name].detach()
        if given != names:  # one of gate and up, as a shard of a file holds it
            if held.is_meta:
                errors[2].append(f"{names} must be in one state for a layer on meta, got {given}; load them together")
                continue
            state |= {name: part for name, part in zip(names, array.split(held), strict=True) if name not in state}
            errors[0].extend(name for name in names if name not in given)
        wrong = [name for name in names if tuple(state[name].shape) != array.shape]
        for name in wrong:
            errors[2].append(
                f"{name} must be {list(array.shape)}, got {list(state[name].shape)}; load the state of this model"
            )
        if not wrong:
            whole = array.join([state.pop(name) for name in names])
            state[prefix + array.name] = _as_held(whole, held)


def _as_held(whole: torch.Tensor, held: Any) -> torch.Tensor:
    """A whole array as the layer's: `full_state_dict` of torch.distributed.checkpoint knows the layer's names alone."""
    if not hasattr(held, "device_mesh") or hasattr(whole, "device_mesh"):
        return whole
    from torch.distributed.tensor import DTensor, distribute_tensor

    if type(held) is not DTensor:
        return whole
    return distribute_tensor(whole, held.device_mesh, held.placements, src_data_rank=None)
