"""Wrong arguments of the router, of routing, of layouts and of the bitmatrix."""

from __future__ import annotations

from typing import Any

from moe_core.errors import Unsupported
from moe_core.ops.routing.layout import MAX_EXPERTS
from moe_core.specs.routing import LogitsSpec, RouterSpec
from tests.support.bad_arguments.case import Case, D, E, K, T, array, ids


def router(name: str, kind: str, text: str, **changes: Any) -> Case:
    return Case(name, kind, "router", text, {"x": array(T, D), "weight": array(D, E)} | changes)


def route(name: str, kind: str, text: str, **changes: Any) -> Case:
    return Case(name, kind, "route", text, {"logits": array(T, E), "spec": RouterSpec(K)} | changes)


def make_layout(name: str, kind: str, text: str, **changes: Any) -> Case:
    return Case(name, kind, "make_layout", text, {"ids": ids(), "num_experts": E} | changes)


def pack(name: str, kind: str, text: str, **changes: Any) -> Case:
    return Case(name, kind, "pack_bitmatrix", text, {"ids": ids(), "num_experts": E} | changes)


def unpack(name: str, kind: str, text: str, **changes: Any) -> Case:
    arguments = {"bitmatrix": array(T, 2, dtype="uint32"), "num_experts": 40, "top_k": K}
    return Case(name, kind, "unpack_bitmatrix", text, arguments | changes)


CASES = (
    router("rank of x", "rank", r"x must be \[num_tokens, d_model\], got \(2, 6, 16\); flatten the leading axes first",
        x=array(2, T, D)),
    router("dtype of x", "dtype", r"x must be bfloat16 or float16 or float32, got int32; cast it to bfloat16",
        x=ids(T, D)),
    router("dtype of weight", "dtype", r"weight must be bfloat16 .*, got int8; cast it",
        weight=ids(D, E, dtype="int8")),
    router("weight, transposed", "shape",
        r"weight must be \[16, num_experts\], got \(4, 16\); pass an array of that shape", weight=array(E, D)),
    router("weight of the other layout", "shape",
        r"weight must be \[num_experts, 16\], got \(16, 4\); pass an array of that shape", spec=LogitsSpec("out_in")),
    router("bias", "shape", r"bias must be \[4\], got \(5,\); pass an array of that shape", bias=array(E + 1)),
    router("no experts", "shape", r"weight must have no empty axis, got \(16, 0\); .*", weight=array(D, 0)),
    router("no columns", "shape", r"weight must have no empty axis, got \(0, 4\); .*", x=array(T, 0),
        weight=array(0, E)),
    router("columns of x", "strides",
        r"x must have dense rows \(last stride 1\), got strides \(1, 6\); make it contiguous",
        x=array(T, D, strides=(1, T))),
    router("overlapping rows of x", "strides",
        r"x must not have overlapping rows, got strides \(2, 1\).*; make it contiguous", x=array(T, D, strides=(2, 1))),
    router("strides of weight", "strides",
        r"weight must be row-major contiguous, got strides \(1, 16\); make it contiguous first",
        weight=array(D, E, strides=(1, D))),
    router("weight", "missing", r"weight must be \[16, num_experts\] of bfloat16 .*, got None; pass the array",
        weight=None),
    route("logits of a batch", "rank",
        r"logits must be \[num_tokens, num_experts\], got \(2, 6, 4\); flatten the leading axes first",
        logits=array(2, T, E)),
    route("logits of a token", "rank", r"logits must be \[num_tokens, num_experts\], got \(4,\); reshape it",
        logits=array(E)),
    route("logits", "dtype", r"logits must be float32, got bfloat16; cast it to float32",
        logits=array(T, E, dtype="bfloat16")),
    route("logits, transposed", "strides",
        r"logits must be row-major contiguous, got strides \(1, 6\); make it contiguous first",
        logits=array(T, E, strides=(1, T))),
    route("K above E", "option", r"top_k must be at most num_experts = 4, got 5; lower top_k", spec=RouterSpec(5)),
    route("no K", "option",
        r"top_k must be an integer of at least 1, got None \(a layer's own\); pass RouterSpec\(top_k=\.\.\.\)",
        spec=RouterSpec(None)),
    route("groups", "option", r"num_groups must divide num_experts = 4, got 3; choose a divisor",
        spec=RouterSpec(1, num_groups=3)),
    route("K above the chosen groups", "option", r"top_k must be at most topk_group.*; ", logits=array(T, 8),
        spec=RouterSpec(3, num_groups=4, topk_group=1)),
    route("groups of one expert", "option", r"num_groups must leave at least two experts.*; ",
        spec=RouterSpec(1, num_groups=E, topk_group=1), correction_bias=array(E)),
    route("correction bias", "dtype", r"correction_bias must be float32, got float16; cast it to float32",
        correction_bias=array(E, dtype="float16")),
    route("correction bias of other experts", "shape",
        r"correction_bias must be \[4\], got \(3,\); pass an array of that shape", correction_bias=array(3)),
    route("token mask", "dtype", r"token_mask must be bool, got float32; cast it to bool", token_mask=array(T)),
    route("token mask of other tokens", "shape", r"token_mask must be \[6\], got \(5,\); pass an array of that shape",
        token_mask=array(5, dtype="bool")),
    route("too many slots", "size",
        r"num_tokens \* top_k must stay below 2\*\*31, got 1073741824 \* 2; split the batch", logits=array(2**30, E)),
    Case("more experts than kernels take", "unsupported", "route",
        rf"take at most {MAX_EXPERTS}, got {MAX_EXPERTS + 1}; use the NumPy reference engine",
        {"logits": array(2, MAX_EXPERTS + 1), "spec": RouterSpec(K)}, Unsupported),
    make_layout("ids", "dtype", r"ids must be int32 or .*, got float32; cast it to int32", ids=array(T, K)),
    make_layout("ids, transposed", "strides",
        r"ids must be row-major contiguous, got strides \(1, 6\); make it contiguous first",
        ids=array(T, K, dtype="int32", strides=(1, T))),
    make_layout("ids of slots", "rank", r"ids must be \[(num_tokens, top_k|6, 2)\], got \(12,\); reshape it",
        ids=ids(T * K)),
    make_layout("number of experts", "option",
        r"num_experts must be an integer of at least 1, got 0; pass such a number", num_experts=0),
    make_layout("number of experts is a number", "option",
        r"num_experts must be an integer of at least 1, got True; pass such a number", num_experts=True),
    make_layout("alignment", "option", r"alignment must be an integer of at least 1, got 0; pass such a number",
        alignment=0),
    make_layout("alignment with max_rows", "option",
        r"alignment must be 1 when max_rows is given, got 8; round max_rows up instead", alignment=8, max_rows=4),
    make_layout("expert map", "dtype", r"expert_map must be int32, got float32; cast it to int32", expert_map=array(E)),
    make_layout("expert map of two axes", "rank", r"expert_map must be \[num_global_experts\], got \(2, 2\); .*",
        expert_map=ids(2, 2)),
    make_layout("empty expert map", "shape", r"expert_map must have an entry .*; ", expert_map=ids(0)),
    make_layout("token mask of other tokens", "shape",
        r"token_mask must be \[6\], got \(12,\); pass an array of that shape", token_mask=array(T * K, dtype="bool")),
    make_layout("token mask", "dtype", r"token_mask must be bool, got int32; cast it to bool", token_mask=ids(T)),
    pack("too many slots", "size", r"num_tokens \* top_k must stay below 2\*\*31, got 1073741824 \* 2; split the batch",
        ids=ids(2**30, 2)),
    pack("ids", "dtype", r"ids must be int32, got float32; cast it to int32", ids=array(T, K)),
    pack("ids of slots", "rank", r"ids must be \[num_tokens, top_k\], got \(12,\); reshape it", ids=ids(T * K)),
    pack("number of experts", "option", r"num_experts must be an integer of at least 1, got 0; pass such a number",
        num_experts=0),
    unpack("bitmatrix", "dtype", r"bitmatrix must be uint32, got int32; cast it to uint32", bitmatrix=ids(T, 2)),
    unpack("words of the bitmatrix", "shape",
        r"bitmatrix must be \[num_tokens, 2\], got \(6, 1\); pass an array of that shape",
        bitmatrix=array(T, 1, dtype="uint32")),
    unpack("K", "option", r"top_k must be an integer of at least 1, got 0; pass such a number", top_k=0),
    unpack("number of experts", "option", r"num_experts must be an integer of at least 1, got 0; pass such a number",
        num_experts=0),
)  # fmt: skip
