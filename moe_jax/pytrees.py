"""Makes the core's operand bundles JAX pytrees, so that they pass through jit, scan, vmap and shard_map."""

from __future__ import annotations

import dataclasses

import jax

from moe_core.operands import (
    ExpertWeights,
    MatmulOperands,
    RaggedLayout,
    RouterLogits,
    RouterWeights,
    SharedExpert,
    TopK,
)


def _register() -> None:
    for bundle in (ExpertWeights, MatmulOperands, RaggedLayout, RouterLogits, RouterWeights, SharedExpert, TopK):
        names = [field.name for field in dataclasses.fields(bundle)]
        static = [name for name in names if name == "spec"]
        arrays = [name for name in names if name != "spec"]
        jax.tree_util.register_dataclass(bundle, data_fields=arrays, meta_fields=static)


_register()
