"""Wrong arguments of the whole layer."""

from __future__ import annotations

from typing import Any

from moe_core.base.arrays import ArraySpec
from moe_core.specs import Activation, MoESpec, RouterSpec
from moe_core.specs.operands import ExpertWeights, RouterLogits, RouterWeights, SharedExpert, TopK
from tests.support.bad_arguments.case import Case, D, E, F, K, T, array, ids

SILU = Activation("silu")


def experts(**changes: Any) -> ExpertWeights:
    return ExpertWeights(**({"gate_up": array(E, D, 2 * F), "down": array(E, F, D)} | changes))


def moe(name: str, kind: str, text: str, **changes: Any) -> Case:
    arguments = {
        "x": array(T, D),
        "experts": experts(),
        "routing": RouterLogits(array(T, E)),
        "spec": MoESpec(SILU, RouterSpec(K)),
    }
    return Case(name, kind, "moe", text, arguments | changes)


CASES = (
    moe("x", "rank", r"x must be \[num_tokens, d_model\], got \(1, 6, 16\); flatten the leading axes first",
        x=array(1, T, D)),
    moe("x", "dtype", r"x must be bfloat16 or float16 or float32, got int8; cast it to bfloat16",
        x=ids(T, D, dtype="int8")),
    moe("columns of x", "strides", r"x must .*, got strides \(1, 6\).*; make it contiguous",
        x=array(T, D, strides=(1, T))),
    moe("overlapping rows of x", "strides",
        r"x must not have overlapping rows, got strides \(0, 1\).*; make it contiguous", x=array(T, D, strides=(0, 1))),
    moe("experts of another dtype", "dtype", r"experts\.gate_up must be bfloat16 like x, got float32; cast it to",
        x=array(T, D, dtype="bfloat16")),
    moe("one expert", "rank", r"experts\.gate_up must be \[num_experts, 16, width\], got \(16, 16\); reshape it",
        experts=experts(gate_up=array(D, 2 * F))),
    moe("stacked experts without a layer index", "rank", r"experts\.gate_up must be .*got \(1, 4, 16, 16\); ",
        experts=ExpertWeights(array(1, E, D, 2 * F), array(1, E, F, D))),
    moe("experts of another d_model", "shape",
        r"experts\.gate_up must be \[.*16, .*\], got \(4, 8, 16\); pass an array of that shape",
        experts=experts(gate_up=array(E, F, D))),
    moe("down", "shape", r"experts\.down must be \[4, 8, 16\], got \(4, 9, 16\); pass an array of that shape",
        experts=experts(down=array(E, 9, D))),
    moe("down, transposed", "shape",
        r"experts\.down must be \[4, 8, 16\], got \(4, 16, 8\); pass an array of that shape",
        experts=experts(down=array(E, D, F))),
    moe("bias", "shape", r"experts\.down_bias must be \[4, 16\], got \(4, 8\); pass an array of that shape",
        experts=experts(down_bias=array(E, F))),
    moe("layer index", "rank", r"experts\.layer_index must be \[1\], got \(\); reshape it",
        experts=ExpertWeights(array(2, E, D, 2 * F), array(2, E, F, D), layer_index=ArraySpec((), "int32"))),
    moe("unwanted up", "option", r"experts\.up must be None for gate_layout='halves'.*; ",
        experts=experts(up=array(E, D, F))),
    moe("up", "missing", r"experts\.up must be .*got None; ",
        spec=MoESpec(Activation("silu", gate_layout="separate"), RouterSpec(K))),
    moe("down", "missing", r"experts\.down must be \[4, 8, 16\] of float32, got None; pass the array",
        experts=experts(down=None)),
    moe("logits of other tokens", "shape", r"logits must be \[6, .*\], got \(5, 4\); ",
        routing=RouterLogits(array(5, E))),
    moe("logits", "dtype", r"logits must be float32, got float16; cast it to float32",
        routing=RouterLogits(array(T, E, dtype="float16"))),
    moe("more logits than experts", "option",
        r"routing must score the 4 experts of experts\.gate_up, got 5; pass expert_map",
        routing=RouterLogits(array(T, 5))),
    moe("router weight, transposed", "shape",
        r"weight must be \[16, num_experts\], got \(4, 16\); pass an array of that shape",
        routing=RouterWeights(array(E, D))),
    moe("ids and a router", "option",
        r"spec\.router must be None when ids and weights are given; remove one of the two",
        routing=TopK(ids(), array(T, K))),
    moe("no router", "option", r"spec\.router must be a RouterSpec when routing from x or logits, got None; pass one",
        spec=MoESpec(SILU)),
    moe("K above E", "option", r"top_k must be at most num_experts = 4, got 7; lower top_k",
        spec=MoESpec(SILU, RouterSpec(7))),
    moe("weighted input with K = 2", "option",
        r"top_k must be 1 with apply_router_weight_on_input, got 2; weight the output instead",
        routing=TopK(ids(), array(T, K)), spec=MoESpec(SILU, apply_router_weight_on_input=True)),
    moe("ids of another batch", "shape",
        r"routing\.ids must be \[6, top_k\], got \(5, 2\); pass an array of that shape",
        routing=TopK(ids(5, K), array(5, K)), spec=MoESpec(SILU)),
    moe("weights of other ids", "shape",
        r"routing\.weights must be \[6, 2\], got \(6, 1\); pass an array of that shape",
        routing=TopK(ids(), array(T, 1)), spec=MoESpec(SILU)),
    moe("token mask", "dtype", r"token_mask must be bool, got int32; cast it to bool", token_mask=ids(T)),
    moe("token mask of other tokens", "shape", r"token_mask must be \[6\], got \(5,\); pass an array of that shape",
        token_mask=array(5, dtype="bool")),
    moe("expert map of other experts", "shape", r"expert_map must be \[4\], got \(5,\); pass an array of that shape",
        expert_map=ids(5)),
    moe("activation of no shared expert", "option",
        r"spec\.shared_activation must be None without a shared expert, got Activation\(.*; pass shared or leave",
        spec=MoESpec(SILU, RouterSpec(K), shared_activation=Activation("gelu"))),
    moe("shared", "shape", r"shared\.down must be \[8, 16\], got \(7, 16\); pass an array of that shape",
        shared=SharedExpert(array(D, 2 * F), array(7, D))),
)  # fmt: skip
