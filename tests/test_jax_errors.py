"""Wrong arguments of every JAX op: the error's type, and a message with name, expectation, value and fix."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import moe_jax
from moe_jax import (
    Activation,
    InvalidInput,
    LayoutSpec,
    MatmulOperands,
    MatmulSpec,
    RaggedLayout,
    RouterSpec,
    Unsupported,
)
from tests.jax_support import Case, D, E, F, K, T, check_error, floats, integers, running_on, untyped

SILU = Activation("silu")
LAYOUT = LayoutSpec(T, K, E)


def layout_of(row_of_slot: Any, sizes: Any = None, spec: LayoutSpec = LAYOUT) -> RaggedLayout:
    return RaggedLayout(
        spec,
        integers(E) if sizes is None else sizes,
        integers(E + 1),
        integers(LAYOUT.capacity),
        row_of_slot,
        integers(1),
    )


ROUTER_CASES = (
    Case(
        "x rank",
        moe_jax.router,
        (floats(2, T, D), floats(D, E)),
        r"x must be \[num_tokens, d_model\], got \(2, 6, 16\); flatten",
    ),
    Case(
        "x dtype",
        moe_jax.router,
        (integers(T, D), floats(D, E)),
        r"x must be bfloat16 or float16 or float32, got int32; cast",
    ),
    Case(
        "weight shape",
        moe_jax.router,
        (floats(T, D), floats(E, D)),
        r"weight must be \[16, num_experts\], got \(4, 16\); pass",
    ),
    Case(
        "weight layout",
        lambda x, weight: moe_jax.router(x, weight, spec=moe_jax.LogitsSpec("out_in")),
        (floats(T, D), floats(D, E)),
        r"weight must be \[num_experts, 16\], got \(16, 4\)",
    ),
    Case(
        "bias shape",
        lambda x, weight, bias: moe_jax.router(x, weight, bias=bias),
        (floats(T, D), floats(D, E), floats(E + 1)),
        r"bias must be \[4\], got \(5,\)",
    ),
    Case(
        "spec type",
        lambda x: moe_jax.router(x, x, spec=untyped(RouterSpec(2))),
        (floats(D, D),),
        "spec must be LogitsSpec, got RouterSpec.*moe_jax.LogitsSpec",
    ),
    Case(
        "logits dtype",
        lambda x: moe_jax.route(x, RouterSpec(2)),
        (floats(T, E, dtype=jnp.bfloat16),),
        "logits must be float32, got bfloat16; cast it",
    ),
    Case(
        "logits rank",
        lambda x: moe_jax.route(x, RouterSpec(2)),
        (floats(E),),
        r"logits must be \[num_tokens, num_experts\], got \(4,\); reshape",
    ),
    Case(
        "K > E",
        lambda x: moe_jax.route(x, RouterSpec(5)),
        (floats(T, E),),
        "top_k must be at most num_experts = 4, got 5; lower top_k",
    ),
    Case(
        "groups",
        lambda x: moe_jax.route(x, RouterSpec(1, num_groups=3)),
        (floats(T, E),),
        "num_groups must divide num_experts = 4, got 3; choose a divisor",
    ),
    Case(
        "correction bias",
        lambda x, bias: moe_jax.route(x, RouterSpec(1, "sigmoid"), correction_bias=bias),
        (floats(T, E), floats(E, dtype=jnp.float16)),
        "correction_bias must be float32, got float16; cast",
    ),
    Case(
        "token mask",
        lambda x, mask: moe_jax.route(x, RouterSpec(1), token_mask=mask),
        (floats(T, E), floats(T)),
        "token_mask must be bool, got float32; cast",
    ),
)

LAYOUT_CASES = (
    Case("ids dtype", lambda ids: moe_jax.make_layout(ids, E), (floats(T, K),), "ids must be int32, got float32; cast"),
    Case(
        "ids rank",
        lambda ids: moe_jax.make_layout(ids, E),
        (integers(T),),
        r"ids must be \[num_tokens, top_k\], got \(6,\); reshape",
    ),
    Case(
        "num_experts",
        lambda ids: moe_jax.make_layout(ids, 0),
        (integers(T, K),),
        "num_experts must be an integer of at least 1, got 0",
    ),
    Case(
        "alignment",
        lambda ids: moe_jax.make_layout(ids, E, alignment=0),
        (integers(T, K),),
        "alignment must be an integer of at least 1, got 0",
    ),
    Case(
        "max_rows",
        lambda ids: moe_jax.make_layout(ids, E, alignment=8, max_rows=4),
        (integers(T, K),),
        "alignment must be 1 when max_rows is given, got 8; round",
    ),
    Case(
        "expert_map",
        lambda ids, expert_map: moe_jax.make_layout(ids, E, expert_map=expert_map),
        (integers(T, K), floats(E)),
        "expert_map must be int32, got float32; cast",
    ),
    Case(
        "bitmatrix dtype",
        lambda bits: moe_jax.unpack_bitmatrix(bits, E, K),
        (integers(T, 1),),
        "bitmatrix must be uint32, got int32; cast",
    ),
    Case(
        "bitmatrix width",
        lambda bits: moe_jax.unpack_bitmatrix(bits, 40, K),
        (integers(T, 1, dtype=jnp.uint32),),
        r"bitmatrix must be \[num_tokens, 2\], got \(6, 1\)",
    ),
    Case(
        "packed ids",
        lambda ids: moe_jax.pack_bitmatrix(ids, E),
        (integers(T, K, dtype=jnp.uint32),),
        "ids must be int32, got uint32; cast",
    ),
)

MATMUL_CASES = (
    Case(
        "operands type",
        lambda x: moe_jax.matmul_ogs(untyped((x, x)), None, MatmulSpec("in_out")),
        (floats(D, D),),
        "operands must be MatmulOperands, got tuple; build it with moe_jax.MatmulOperands",
    ),
    Case(
        "layout type",
        lambda x: moe_jax.matmul_ogs(MatmulOperands(x, x), untyped(LAYOUT), MatmulSpec("in_out")),
        (floats(D, D),),
        "layout must be RaggedLayout, got LayoutSpec",
    ),
    Case(
        "no weight",
        lambda x: moe_jax.matmul_ogs(MatmulOperands(x, None), None, MatmulSpec("in_out")),
        (floats(T, D),),
        "operands.weight must be an array, got None; pass it",
    ),
    Case(
        "weight dtype",
        lambda x, weight: moe_jax.matmul_ogs(MatmulOperands(x, weight), None, MatmulSpec("in_out")),
        (floats(T, D), floats(D, F, dtype=jnp.bfloat16)),
        "weight must be float32, got bfloat16; cast it to float32",
    ),
    Case(
        "weight layout of a matmul",
        lambda x, weight: moe_jax.matmul_ogs(MatmulOperands(x, weight), None, MatmulSpec("out_in")),
        (floats(T, D), floats(D, F)),
        r"weight must be \[n, 16\], got \(16, 8\)",
    ),
    Case(
        "layout sizes",
        lambda x, sizes: moe_jax.matmul_ogs(
            MatmulOperands(x, floats(E, D, F)), layout_of(integers(T * K), sizes), MatmulSpec("in_out", "token")
        ),
        (floats(T, D), integers(E + 1)),
        r"layout.group_sizes must be \[4\], got \(5,\)",
    ),
    Case(
        "rows of x",
        lambda x: moe_jax.matmul_ogs(
            MatmulOperands(x, floats(E, D, F)), layout_of(integers(T * K)), MatmulSpec("in_out", "slot")
        ),
        (floats(T, D),),
        r"x must be \[12, 16\], got \(6, 16\)",
    ),
    Case(
        "activation type",
        lambda x: moe_jax.activation(x, untyped("silu")),
        (floats(T, F),),
        "activation must be Activation, got 'silu'; build it",
    ),
    Case(
        "odd width",
        lambda x: moe_jax.activation(x, SILU),
        (floats(T, 7),),
        "x must have an even width .*got 7; pass both halves",
    ),
    Case(
        "out_dtype",
        lambda x: moe_jax.activation(x, SILU, out_dtype="float64"),
        (floats(T, F),),
        "out_dtype must be one of bfloat16, float16, float32, got 'float64'",
    ),
    Case(
        "up",
        lambda x: moe_jax.activation(x, Activation("silu", gate_layout="separate")),
        (floats(T, F),),
        "up must be .*got None; pass the array",
    ),
    Case(
        "reduce order",
        lambda y, rows: moe_jax.reduce(y, layout_of(rows), order="token"),
        (floats(T * K, D), integers(T * K)),
        "order must be one of slot, row, got 'token'",
    ),
    Case(
        "reduce slots",
        lambda y, rows: moe_jax.reduce(y, layout_of(rows)),
        (floats(T, D), integers(T * K)),
        r"y must be \[12, d_model\], got \(6, 16\)",
    ),
    Case(
        "reduce rows",
        lambda y, rows: moe_jax.reduce(y, layout_of(rows), order="row"),
        (floats(T, D), integers(T * K)),
        r"y must be \[12, d_model\], got \(6, 16\)",
    ),
    Case(
        "row_of_slot",
        lambda y, rows: moe_jax.reduce(y, layout_of(rows)),
        (floats(T * K, D), integers(T)),
        r"layout.row_of_slot must be \[12\], got \(6,\)",
    ),
    Case(
        "row weights", moe_jax.scale_rows, (floats(T, D), floats(T)), r"weights must be \[6, 1\], got \(6,\); reshape"
    ),
)


CASES = (*ROUTER_CASES, *LAYOUT_CASES, *MATMUL_CASES)


@pytest.mark.parametrize("jitted", [False, True], ids=["eager", "jitted"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name.replace(" ", "-"))
def test_wrong_arguments(case: Case, jitted: bool) -> None:
    check_error(case, jitted)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([[1.0]], "x must be a jax.Array, got builtins.list; convert it with jax.numpy.asarray"),
        (None, "x must be a jax.Array, got builtins.NoneType"),
        (jnp.ones((6, 1), jnp.complex64), "x has dtype complex64, which no op takes: .*convert the array first"),
        (jnp.ones((6, 1), jnp.int4), "x has dtype int4, which no op takes"),
        (jax.random.key(0), "x has dtype key.*which no op takes"),
        (np.ones((6, 1)), "x must have a dtype that JAX keeps, got float64, .*float32; convert"),
        (jax.ShapeDtypeStruct((6, 1), jnp.float32), "x must be an array, got ShapeDtypeStruct.*only explain"),
    ],
    ids=["list", "None", "complex", "int4", "key", "float64", "shape"],
)
def test_what_is_no_array(value: Any, message: str) -> None:
    with running_on("reference"), pytest.raises(InvalidInput, match=message):
        moe_jax.scale_rows(value, floats(6, 1))


@pytest.mark.parametrize(
    "call",
    [
        lambda ids: moe_jax.make_layout(ids, E, checked=True),
        lambda ids: moe_jax.pack_bitmatrix(ids, E, checked=True),
    ],
    ids=["make_layout", "pack_bitmatrix"],
)
def test_checked_calls_are_refused_while_tracing(call: Callable[..., Any]) -> None:
    message = "checked=True of .* looks at the result on the host.*return invalid_ids and check it outside"
    with running_on("reference"), pytest.raises(Unsupported, match=message):
        jax.jit(call)(integers(T, K))


def test_an_unknown_engine() -> None:
    message = "cpu_engine kind must be 'interpreter' or 'reference', got 'fast'; name one"
    with pytest.raises(InvalidInput, match=message), moe_jax.cpu_engine("fast"):
        raise AssertionError("not reached")
