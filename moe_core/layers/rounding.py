"""Checks of layers with token rounding, and of ids that a caller gives."""

from __future__ import annotations

from typing import Any

from moe_core.errors import InvalidInput, Unsupported


def check_token_rounding(spec: Any) -> None:
    """Raises InvalidInput, Unsupported."""
    tuning, scheme = spec.tuning, spec.experts.scheme
    contradictions = {
        "capacity_factor": (spec.capacity_factor is not None, "both say how many tokens an expert keeps"),
        "token_table": (spec.token_table > 0, "rounding chooses tokens by the router's scores"),
        "sparse_mixer": (spec.sparse_mixer is not None, "it has its own weights"),
        "apply_router_weight_on_input": (spec.apply_router_weight_on_input, "a token may visit several experts"),
        "tuning.batch_invariant": (tuning is not None and tuning.batch_invariant, "it depends on the other tokens"),
        "a scheme that quantises activations": (
            scheme is not None and scheme.activations is not None,
            "it is training",
        ),
    }
    for name, (wrong, reason) in contradictions.items():
        if wrong:
            raise InvalidInput(f"{name} must be left out with token_rounding: {reason}; leave one of the two out")
    for name, value in {"latent": spec.latent, "a norm of each expert's result": spec.norm_of_experts}.items():
        if value is not None:
            raise Unsupported(f"token_rounding is not there for a layer with {name}; leave one of the two out")
    spec.token_rounding.wide(spec.router, spec.num_experts, spec.correction_bias)


def refuse_expert_parallel(parallel: bool) -> None:
    """Raise Unsupported for tokens or experts on several ranks."""
    if parallel:
        raise Unsupported(
            "token_rounding is not there for a layer on several ranks, whose counts of tokens no rank knows while it "
            "routes; make the layer without token_rounding, or call it on each rank by itself"
        )


def require_ids(spec: Any, expert_ids: Any, input_ids: Any) -> None:
    """Raise InvalidInput for ids that a layer does not take, and for none or both with a table of ids."""
    if spec.sparse_mixer is not None and expert_ids is not None:
        raise InvalidInput("expert_ids must be None for a layer with a sparse_mixer, got an array; leave them out")
    if not spec.token_table and input_ids is not None:
        raise InvalidInput("input_ids must be None for a layer without a table of ids, got an array; leave them out")
    if spec.token_table and (input_ids is None) == (expert_ids is None):
        raise InvalidInput(
            "input_ids or expert_ids must be given for a layer with a table of ids, got "
            f"{'neither' if input_ids is None else 'both'}; pass the ids of the tokens as input_ids"
        )


def refuse_given_ids(given: bool) -> None:
    """Raise InvalidInput for ids that the caller gives."""
    if given:
        raise InvalidInput(
            "expert_ids must be None for a layer with token_rounding in training, got an array; leave them out, or "
            "evaluate the layer"
        )
