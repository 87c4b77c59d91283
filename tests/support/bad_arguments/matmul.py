"""Wrong arguments of grouped products, activations and reductions."""

from __future__ import annotations

from typing import Any

from moe_core.specs import Activation, LayoutSpec, MatmulSpec
from moe_core.specs.operands import MatmulOperands
from tests.support.bad_arguments.case import LAYOUT, Case, D, E, F, K, T, array, ids

SILU, SEPARATE = Activation("silu"), Activation("silu", gate_layout="separate")
BY_TOKEN = MatmulSpec("in_out", "token", "slot")
DENSE = MatmulSpec("in_out")


def matmul(
    name: str, kind: str, text: str, *, layout: Any = LAYOUT, spec: MatmulSpec = BY_TOKEN, **operands: Any
) -> Case:
    bundle = MatmulOperands(**({"x": array(T, D), "weight": array(E, D, F)} | operands))
    return Case(name, kind, "matmul_ogs", text, {"operands": bundle, "layout": layout, "spec": spec})


def activation(name: str, kind: str, text: str, **changes: Any) -> Case:
    return Case(name, kind, "activation", text, {"x": array(T, F), "activation": SILU} | changes)


def reduce(name: str, kind: str, text: str, **changes: Any) -> Case:
    return Case(name, kind, "reduce", text, {"y": array(T * K, D), "layout": LAYOUT} | changes)


CASES = (
    matmul("weight", "dtype", r"weight must be float32, got bfloat16; cast it to float32",
        weight=array(E, D, F, dtype="bfloat16")),
    matmul("weight of the other layout", "shape",
        r"weight must be \[4, n, 16\], got \(4, 16, 8\); pass an array of that shape",
        spec=MatmulSpec("out_in", "token", "slot")),
    matmul("dense weight of the other layout", "shape",
        r"weight must be \[n, 16\], got \(16, 8\); pass an array of that shape", layout=None, spec=MatmulSpec("out_in"),
        weight=array(D, F)),
    matmul("weight of other experts", "shape",
        r"weight must be \[7, 16, n\], got \(4, 16, 8\); pass an array of that shape", layout=LayoutSpec(T, K, 7)),
    matmul("x of another layout", "shape", r"x must be \[5, 16\], got \(6, 16\); pass an array of that shape",
        layout=LayoutSpec(5, K, E)),
    matmul("x of tokens by slot", "shape", r"x must be \[12, 16\], got \(6, 16\); pass an array of that shape",
        spec=MatmulSpec("in_out", "slot")),
    matmul("row weight", "shape", r"row_weight must be \[12\], got \(6,\); pass an array of that shape",
        row_weight=array(T)),
    matmul("weight, transposed", "strides",
        r"weight must be row-major contiguous, got strides \(128, 1, 16\); make it contiguous first",
        weight=array(E, D, F, strides=(D * F, 1, D))),
    matmul("gather without a layout", "option",
        r"gather and scatter must be 'row' without a layout, got 'token' and 'slot'; pass a layout", layout=None,
        weight=array(D, F)),
    matmul("up without separate", "option",
        r"up must be None unless a gate_layout='separate' activation is fused; leave it out", up=array(E, D, F)),
    activation("odd width", "shape", r"x must have an even width \(gate and up\), got 7; pass both halves",
        x=array(T, 7)),
    activation("x of one row", "rank", r"x must be \[num_rows, width\], got \(7,\); reshape it", x=array(7)),
    activation("x", "dtype", r"x must be bfloat16 or .*got int32; cast it to bfloat16", x=ids(T, F)),
    activation("up", "missing", r"up must be \[6, 8\] of float32, got None; pass the array", activation=SEPARATE),
    activation("up of another width", "shape", r"up must be \[6, 8\], got \(6, 4\); pass an array of that shape",
        activation=SEPARATE, up=array(T, 4)),
    activation("up in one buffer", "option", r"up must be None.*; leave it out", up=array(T, F)),
    activation("out_dtype of integers", "option",
        r"out_dtype must be one of bfloat16, float16, float32, got 'int32'; name one of these", out_dtype="int32"),
    activation("out_dtype of 64 bits", "option",
        r"out_dtype must be one of bfloat16, float16, float32, got 'float64'; name one of these", out_dtype="float64"),
    reduce("slots", "shape", r"y must be \[12, d_model\], got \(6, 16\); pass an array of that shape", y=array(T, D)),
    reduce("order", "option", r"order must be one of slot, row, got 'token'; name one of these", order="token"),
    reduce("shared", "shape", r"shared must be \[6, 16\], got \(5, 16\); pass an array of that shape",
        shared=array(5, D)),
    reduce("gate without shared", "option",
        r"shared_gate must be None without shared, got an array; pass shared or leave it out", shared_gate=array(T, 1)),
    Case("weights of rows", "rank", "scale_rows", r"weights must be \[6, 1\], got \(6,\); reshape it",
        {"x": array(T, D), "weights": array(T)}),
)  # fmt: skip
