"""Checks of routings and experts before anything travels."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Any

from moe_core.base import ArraySpec, Recent, require_spec
from moe_core.base.dtypes import ID_DTYPES, ROUTER_WEIGHT_DTYPES
from moe_core.errors import InvalidInput
from moe_core.ops.moe.checks import check_weights
from moe_core.parallel.placement import Placement
from moe_core.specs import ExpertWeights, MoESpec, SharedExpert, map_arrays, named_arrays, named_fields

_known: Recent[int] = Recent()


def experts_digest(
    x: Any,
    experts: ExpertWeights,
    shared: SharedExpert | None,
    spec: MoESpec,
    spec_of: Callable[[str, Any], ArraySpec],
) -> int:
    """Return a digest, not 0, of what a rank's experts compute: F, the activation, and the rounding of products.

    experts, shared: arrays with shapes and dtypes. spec_of: makes an array's ArraySpec from (name, array). Raises
    InvalidInput if arrays do not fit each other, before other ranks wait.
    """
    bundles = experts, *(() if shared is None else (shared,))
    formats = tuple(getattr(value, "spec", None) for bundle in bundles for _, value in named_fields(bundle))
    arrays = tuple((name, array.shape, array.dtype) for bundle in bundles for name, array in named_arrays(bundle))
    key = x.shape[1], x.dtype, spec, formats, arrays
    digest = _known.get(key) or _known.find(key)
    if digest is None:

        def dense(array: Any) -> ArraySpec:
            full = spec_of("experts", array)
            return ArraySpec(full.shape, full.dtype)

        expert_specs, shared_specs = map_arrays(experts, dense), None if shared is None else map_arrays(shared, dense)
        check_weights(ArraySpec((0, x.shape[1]), spec_of("x", x).dtype), expert_specs, shared_specs, spec)
        width = expert_specs.down.shape[-2 if spec.weight_layout == "in_out" else -1]
        common = width, spec.activation, spec.activations, spec.allow_tf32, spec.fast_accumulate
        digest = zlib.crc32(repr(common).encode()) | 1
        _known.put(key, digest)
    return digest


def require_given(ids: ArraySpec, weights: ArraySpec, tokens: int) -> None:
    require_spec("routing.ids", ids, (tokens, "top_k"), ID_DTYPES)
    require_spec("routing.weights", weights, ids.shape, ROUTER_WEIGHT_DTYPES)


def require_scores(shape: Sequence[int], tokens: int, placement: Placement) -> None:
    wanted = [tokens, placement.num_experts]
    if list(shape) != wanted:
        raise InvalidInput(
            f"routing must score the tokens of x for all experts of placement, {wanted}, got {list(shape)}; pass what "
            "was made for these"
        )
