"""A block's own router in front of a layer: the experts that the block chooses, in its own rounding."""

from __future__ import annotations

from typing import Any

import torch

from moe_core.errors import Unsupported
from moe_torch.layers.block_names import BlockArray
from moe_torch.layers.parameters import has_own_call


class BlockRouter:
    """The router of a block, on the arrays that the layer holds now. No module, so that no parameter is held twice."""

    def __init__(self, block: torch.nn.Module, arrays: tuple[BlockArray, ...]) -> None:
        self.arrays = tuple(array for array in arrays if array.name.startswith("router."))
        self.prefix = self.arrays[0].names[0].partition(".")[0] + "."
        self.module = getattr(block, self.prefix[:-1])
        bias = next((array for array in arrays if array.name == "router.correction_bias"), None)
        self.bias, self.bias_dtype = ((), torch.float32) if bias is None else (bias.names, bias.dtype)

    def ids(self, layer: Any, rows: torch.Tensor) -> torch.Tensor:
        """The block's choice int64 `[T, K]` for rows `[T, D]`. Raises Unsupported if its router does not tell it."""
        if has_own_call(layer.router) or (layer.lora is not None and "router" in layer.lora.options.targets):
            raise Unsupported(
                "block_router must be False where layer.router has an adapter, a hook or another forward, which the "
                f"block's choice would not follow, got {type(layer.router).__name__}; leave block_router out, or leave "
                "the router as it is (target_modules without it, merge_and_unload)"
            )
        held = layer._tensors()
        parts = [part for array in self.arrays for part in zip(array.names, array.split(held[array.name]), strict=True)]
        if self.bias_dtype != torch.float32:
            # The layer's is fp32, and sums would be.
            parts = [(name, part.to(self.bias_dtype) if name in self.bias else part) for name, part in parts]
        inside = {name.removeprefix(self.prefix): part for name, part in parts if name.startswith(self.prefix)}
        # Some blocks hold the correction bias, and pass it.
        beside = [part for name, part in parts if not name.startswith(self.prefix)]
        result = torch.func.functional_call(self.module, inside, (rows, *beside))
        shape = (rows.shape[0], layer.spec.top_k)
        for one in result if isinstance(result, tuple) else ():
            if isinstance(one, torch.Tensor) and one.shape == shape and one.dtype == torch.int64:
                return one
        raise Unsupported(
            f"block_router must be False for {type(self.module).__name__}, which does not return ids of experts; use "
            "moe_torch.transformers.use(model), which keeps the block's routing, or leave it out"
        )


def choose_as_block(layer: Any, block: torch.nn.Module, arrays: tuple[BlockArray, ...]) -> None:
    """Let the block's router choose. Raises Unsupported."""
    if layer.spec.sparse_mixer is not None or layer.spec.token_table:
        kind = "a sparse mixer" if layer.spec.sparse_mixer is not None else "a table of ids"
        raise Unsupported(f"block_router must be False for a block with {kind}, got True; leave it out")
    layer.block_router = BlockRouter(block, arrays)
    weight = layer._tensors()["router.weight"]
    try:
        with torch.no_grad():
            layer.block_router.ids(layer, weight.new_zeros(1, layer.spec.d_model))
    except (RuntimeError, TypeError, ValueError) as error:
        if isinstance(error, Unsupported):
            raise
        name = type(layer.block_router.module).__name__
        raise Unsupported(
            f"block_router must be False for {name}, which does not take rows [T, D], got: {error}; use "
            "moe_torch.transformers.use(model), which keeps the block's routing, or leave it out"
        ) from error
    layer.register_forward_pre_hook(_give_ids, with_kwargs=True)


def _give_ids(layer: Any, positional: Any, named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    if named.get("expert_ids") is not None:
        return positional, named
    x = positional[0] if positional else named["x"]
    scored = x if named.get("gate_inputs") is None else named["gate_inputs"]
    with torch.no_grad():
        ids = layer.block_router.ids(layer, scored.reshape(-1, scored.shape[-1]))
    return positional, named | {"expert_ids": ids.view(*x.shape[:-1], -1)}
