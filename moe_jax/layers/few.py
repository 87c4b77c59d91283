"""Batches that the expert axis does not divide, as in decoding: masked tokens are added, which no expert visits."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, PartitionSpec

from moe_core.errors import InvalidInput
from moe_core.layers import MoELayerSpec
from moe_jax.bridge.mesh import spec_of
from moe_jax.layers.stages import RoutedBy
from moe_jax.parallel.axis import ExpertAxis


def tokens_to_add(x: Any, spec: MoELayerSpec, axis: ExpertAxis, mesh: AbstractMesh) -> int:
    """0 where x can be split, and in other modes than `all_gather`, where each token travels. A capacity counts T."""
    devices, tokens = mesh.shape[axis.name], math.prod(x.shape[:-1])
    fits = any(size and size % devices == 0 for size in x.shape[:-1])
    if fits or not tokens or axis.exchange.mode != "all_gather" or spec.capacity_factor is not None:
        return 0
    return 0 if any(spec_of(x) or ()) else -tokens % devices


def of_more_tokens(call: Callable[..., Any], by_token: dict[str, Any], more: int, return_aux: bool) -> Any:
    """`call(x, token_mask=, routed_by=)` with more tokens, and its results without them."""
    shape = by_token["x"].shape[:-1]
    tokens = math.prod(shape)
    given = by_token if by_token["token_mask"] is not None else by_token | {"token_mask": jnp.ones(shape, bool)}

    def longer(name: str, array: Any) -> jax.Array:
        array = jnp.asarray(array)
        if array.shape[: len(shape)] != shape:
            raise InvalidInput(f"{name} must begin with the batch axes {shape} of x, got {array.shape}; reshape it")
        rows = array.reshape(tokens, *array.shape[len(shape) :])
        return jnp.pad(rows, ((0, more), *((0, 0),) * (rows.ndim - 1)))

    def shorter(array: jax.Array) -> jax.Array:
        # Slices of arrays whose type is split must divide.
        is_split = any(spec_of(array) or ())
        return (jax.sharding.reshard(array, PartitionSpec()) if is_split else array)[:tokens]

    arrays = {name: None if array is None else longer(name, array) for name, array in given.items()}
    x, mask = arrays.pop("x"), arrays.pop("token_mask")
    result = call(x, token_mask=mask, routed_by=RoutedBy(**arrays))
    y, aux = result if return_aux else (result, None)
    y = shorter(y).reshape(*shape, y.shape[-1])
    if aux is None:
        return y
    return y, aux._replace(**{name: shorter(getattr(aux, name)) for name in ("ids", "weights", "logits")})
