"""Wrong arguments of `moe`: the error's type, and a message with name, expectation, value and fix."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import moe_jax
from moe_jax import (
    Activation,
    ExpertWeights,
    InvalidInput,
    MoESpec,
    RouterLogits,
    RouterSpec,
    RouterWeights,
    SharedExpert,
    TopK,
    Unsupported,
)
from tests.jax_support import Case, D, E, F, K, T, check_error, floats, integers, running_on

SILU = Activation("silu")
SPEC = MoESpec(SILU, RouterSpec(K))


def experts(**changes: Any) -> ExpertWeights:
    return dataclasses.replace(ExpertWeights(floats(E, D, 2 * F), floats(E, F, D)), **changes)


def moe_case(name: str, message: str, error: type[Exception] = InvalidInput, **changes: Any) -> Case:
    """A call of `moe` in which one argument is wrong."""
    arguments = {"x": floats(T, D), "experts": experts(), "routing": RouterLogits(floats(T, E)), "spec": SPEC} | changes
    names = tuple(name for name in arguments if name != "spec")
    spec = arguments["spec"]

    def call(*values: Any) -> Any:
        given = dict(zip(names, values, strict=True))
        return moe_jax.moe(given.pop("x"), given.pop("experts"), given.pop("routing"), spec, **given)

    return Case(name, call, tuple(arguments[name] for name in names), message, error)


MOE_CASES = (
    moe_case(
        "x rank", r"x must be \[num_tokens, d_model\], got \(1, 6, 16\); flatten the leading axes", x=floats(1, T, D)
    ),
    moe_case("x dtype", "x must be bfloat16 or float16 or float32, got int8; cast", x=integers(T, D, dtype=jnp.int8)),
    moe_case(
        "experts dtype", "experts.gate_up must be bfloat16, got float32; cast", x=floats(T, D, dtype=jnp.bfloat16)
    ),
    moe_case(
        "experts layout",
        r"experts.gate_up must be \[.*16, .*\], got \(4, 8, 16\)",
        experts=experts(gate_up=floats(E, 8, D)),
    ),
    moe_case(
        "down shape",
        r"experts.down must be \[4, 8, 16\], got \(4, 9, 16\); pass",
        experts=experts(down=floats(E, 9, D)),
    ),
    moe_case(
        "unwanted up", "experts.up must be None for gate_layout='halves'.*separate", experts=experts(up=floats(E, D, F))
    ),
    moe_case(
        "missing up",
        r"experts.up must be .*got None",
        spec=MoESpec(Activation("silu", gate_layout="separate"), RouterSpec(K)),
    ),
    moe_case(
        "bias shape", r"experts.down_bias must be \[4, 16\], got \(4, 8\)", experts=experts(down_bias=floats(E, F))
    ),
    moe_case(
        "stacked without layer",
        r"experts.gate_up must be .*got \(1, 4, 16, 16\)",
        experts=ExpertWeights(floats(1, E, D, 2 * F), floats(1, E, F, D)),
    ),
    moe_case(
        "layer",
        r"experts.layer must be \[1\], got \(\); reshape",
        experts=ExpertWeights(floats(2, E, D, 2 * F), floats(2, E, F, D), layer=integers()),
    ),
    moe_case(
        "number of logits",
        "routing must score the 4 experts .*got 5; pass expert_map",
        routing=RouterLogits(floats(T, 5)),
    ),
    moe_case(
        "router weight", r"weight must be \[16, num_experts\], got \(4, 16\)", routing=RouterWeights(floats(E, D))
    ),
    moe_case(
        "ids and a router",
        "spec.router must be None when ids and weights are given; remove",
        routing=TopK(integers(T, K), floats(T, K)),
    ),
    moe_case("no router", "spec.router must be a RouterSpec .*got None; pass one", spec=MoESpec(SILU)),
    moe_case("K > E", "top_k must be at most num_experts = 4, got 7; lower top_k", spec=MoESpec(SILU, RouterSpec(7))),
    moe_case(
        "input weighting",
        "top_k must be 1 with apply_router_weight_on_input, got 2; weight the output",
        routing=TopK(integers(T, K), floats(T, K)),
        spec=MoESpec(SILU, apply_router_weight_on_input=True),
    ),
    moe_case(
        "weights shape",
        r"routing.weights must be \[6, 2\], got \(6, 1\)",
        routing=TopK(integers(T, K), floats(T, 1)),
        spec=MoESpec(SILU),
    ),
    moe_case("token mask", "token_mask must be bool, got int32; cast", token_mask=integers(T)),
    moe_case("expert map", r"expert_map must be \[4\], got \(5,\)", expert_map=integers(5)),
    moe_case(
        "shared", r"shared.down must be \[8, 16\], got \(7, 16\)", shared=SharedExpert(floats(D, 2 * F), floats(7, D))
    ),
    moe_case(
        "routing type",
        "routing must be RouterWeights or RouterLogits or TopK, got ExpertWeights; build it with moe_jax.RouterWeights",
        routing=experts(),
    ),
    moe_case("spec type", "spec must be MoESpec, got RouterSpec", spec=RouterSpec(2)),
)


@pytest.mark.parametrize("jitted", [False, True], ids=["eager", "jitted"])
@pytest.mark.parametrize("case", MOE_CASES, ids=lambda case: case.name.replace(" ", "-"))
def test_wrong_arguments(case: Case, jitted: bool) -> None:
    check_error(case, jitted)


def test_a_checked_call_is_refused_while_tracing() -> None:
    def checked(ids: jax.Array) -> moe_jax.MoEOutput:
        return moe_jax.moe(floats(T, D), experts(), TopK(ids, floats(T, K)), MoESpec(SILU), checked=True)

    message = r"checked=True of moe looks at the result on the host.*return invalid_ids and check it outside"
    with running_on("reference"), pytest.raises(Unsupported, match=message):
        jax.jit(checked)(integers(T, K))
