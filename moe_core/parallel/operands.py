"""Checks of routings and experts before anything travels."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Any

from moe_core.base import ArraySpec, Recent, require_spec
from moe_core.base.dtypes import ID_DTYPES, ROUTER_WEIGHT_DTYPES
from moe_core.errors import InvalidInput, Unsupported
from moe_core.ops.lora.beyond import refuse_beyond_experts
from moe_core.ops.moe.checks import check_weights
from moe_core.ops.moe.lora import check_lora
from moe_core.parallel.placement import HOLE, Placement
from moe_core.specs import ExpertWeights, MoESpec, SharedExpert, map_arrays, named_arrays, named_fields
from moe_core.specs.operands import LoRAFactors

_known: Recent[int] = Recent()


def experts_digest(
    x: Any,
    experts: ExpertWeights,
    shared: SharedExpert | None,
    spec: MoESpec,
    spec_of: Callable[[str, Any], ArraySpec],
    lora: LoRAFactors | None = None,
) -> int:
    """Return a digest, not 0, of what a rank's experts compute: F, the activation, and the rounding of products.

    experts, shared, lora (of this rank): arrays with shapes and dtypes. spec_of: makes an array's ArraySpec from (name,
    array). Raises InvalidInput if arrays do not fit each other, before other ranks wait.
    """
    bundles = experts, *(one for one in (shared, lora) if one is not None)
    formats = tuple(getattr(value, "spec", None) for bundle in bundles for _, value in named_fields(bundle))
    arrays = tuple((name, array.shape, array.dtype) for bundle in bundles for name, array in named_arrays(bundle))
    key = x.shape[1], x.dtype, spec, formats, arrays
    digest = _known.get(key) or _known.find(key)
    if digest is None:

        def dense(array: Any) -> ArraySpec:
            full = spec_of("experts", array)
            return ArraySpec(full.shape, full.dtype)

        expert_specs, shared_specs = map_arrays(experts, dense), None if shared is None else map_arrays(shared, dense)
        rows = ArraySpec((0, x.shape[1]), spec_of("x", x).dtype)
        check_weights(rows, expert_specs, shared_specs, spec)
        width = expert_specs.down.shape[-2 if spec.weight_layout == "in_out" else -1]
        common: Any = width, spec.activation, spec.activations, spec.allow_tf32, spec.fast_accumulate
        if lora is not None:
            factors = map_arrays(lora, dense)
            check_lora(factors, ArraySpec((0,), "int32"), rows, expert_specs, spec)
            sizes = [(name, one.shape[0], one.shape[-1 if name[0] == "a" else -2], one.dtype)
                     for name, one in named_fields(factors) if name[0] in "ab"]  # fmt: skip
            common += tuple(sizes), spec.lora_dropout
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


def require_adapters(lora: Any, adapter_ids: Any, tokens: int, placement: Placement, ranks: int) -> None:
    """Raise InvalidInput unless scale and ranks are of all experts, and ids of the tokens, and Unsupported for dropout
    on `ranks` that split each expert. Arrays have shapes."""
    refuse_beyond_experts(lora)
    if adapter_ids is None or lora.scale is None or lora.ranks is None:
        raise InvalidInput("adapter_ids, lora.scale and lora.ranks must be arrays with lora, got None; pass all three")
    slots, experts = (*lora.scale.shape, 0)[0] or 1, placement.num_experts
    whole = [slots, experts]
    shapes = {"lora.scale": whole, "lora.ranks": whole, "adapter_ids": [tokens]}
    for (name, shape), array in zip(shapes.items(), (lora.scale, lora.ranks, adapter_ids), strict=True):
        if list(array.shape) != shape:
            raise InvalidInput(
                f"{name} must be {shape} across ranks, got {list(array.shape)}; pass scale and ranks of all experts, "
                "factors of this rank's, and an id of each token here"
            )
    if ranks > 1 and lora.seed is not None:
        raise Unsupported(
            f"lora_dropout must be 0 with experts split over {ranks} ranks, as their masks would differ, got a seed; "
            "leave it out"
        )


def held_columns(placement: Placement, rank: int, count: int) -> tuple[int, ...]:
    """The experts of a rank's first places, in arrays of all experts. An empty place reads expert 0."""
    return tuple(0 if expert == HOLE else expert for expert in placement.owners[rank][:count])


def require_row_scales(spec: MoESpec, experts: ExpertWeights) -> None:
    """Raise Unsupported for activations with one scale of all rows, which each rank would choose for its own rows."""
    activations = spec.activations
    if activations is not None and activations.group_rows is None and experts.gate_up_input_scale is None:
        raise Unsupported(
            f"activations must have a scale for each row across ranks, or given scales, got {activations}: one of "
            "all rows would be each rank's own; pass experts.gate_up_input_scale and down_input_scale"
        )
