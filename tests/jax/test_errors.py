"""Complaints of the JAX front-end: its own, and that those of planners arrive, eagerly and while tracing."""

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
    ExpertWeights,
    InvalidInput,
    LayoutSpec,
    MatmulOperands,
    MatmulSpec,
    MoESpec,
    RaggedLayout,
    RouterLogits,
    RouterSpec,
    TopK,
    Unsupported,
    modular,
)
from tests.support import bad_arguments
from tests.support.bad_arguments.case import case_id
from tests.support.jax import Case, D, E, F, K, T, check_error, floats, integers, running_on, untyped

SILU = Activation("silu")
LAYOUT = LayoutSpec(T, K, E)
SPEC = MoESpec(SILU, RouterSpec(K))
LAYER = (floats(T, D), floats(E, D, 2 * F), floats(E, F, D))
#: Types of arguments that are not traced.
STATIC = (int, str, Activation, MatmulSpec, MoESpec, RouterSpec, moe_jax.LogitsSpec, type(None))


def layout_of(row_of_slot: Any, sizes: Any = None, spec: LayoutSpec = LAYOUT) -> RaggedLayout:
    return RaggedLayout(
        spec, integers(E) if sizes is None else sizes, integers(E + 1), integers(LAYOUT.capacity), row_of_slot,
        integers(1),
    )  # fmt: skip


#: What no planner sees, or sees of arrays alone.
CASES = (
    Case("spec type", lambda x: moe_jax.router(x, x, spec=untyped(RouterSpec(2))), (floats(D, D),),
        "spec must be LogitsSpec, got RouterSpec.*moe_jax.LogitsSpec"),
    Case("operands type", lambda x: moe_jax.matmul_ogs(untyped((x, x)), None, MatmulSpec("in_out")), (floats(D, D),),
        "operands must be MatmulOperands, got tuple; build it with moe_jax.MatmulOperands"),
    Case("layout type", lambda x: moe_jax.matmul_ogs(MatmulOperands(x, x), untyped(LAYOUT), MatmulSpec("in_out")),
        (floats(D, D),), "layout must be RaggedLayout, got LayoutSpec"),
    Case("no weight", lambda x: moe_jax.matmul_ogs(MatmulOperands(x, None), None, MatmulSpec("in_out")),
        (floats(T, D),), "operands.weight must be an array, got None; pass it"),
    Case("layout sizes", lambda x, sizes: moe_jax.matmul_ogs(
        MatmulOperands(x, floats(E, D, F)), layout_of(integers(T * K), sizes), MatmulSpec("in_out", "token")),
        (floats(T, D), integers(E + 1)), r"layout.group_sizes must be \[4\], got \(5,\)"),
    Case("activation type", lambda x: moe_jax.activation(x, untyped("silu")), (floats(T, F),),
        "activation must be Activation, got 'silu'; build it"),
    Case("reduce rows", lambda y, rows: moe_jax.reduce(y, layout_of(rows), order="row"),
        (floats(T, D), integers(T * K)), r"y must be \[12, d_model\], got \(6, 16\)"),
    Case("row_of_slot", lambda y, rows: moe_jax.reduce(y, layout_of(rows)), (floats(T * K, D), integers(T)),
        r"layout.row_of_slot must be \[12\], got \(6,\)"),
    Case("routing type", lambda x, *w: moe_jax.moe(x, ExpertWeights(*w), untyped(ExpertWeights(*w)), SPEC), LAYER,
        "routing must be RouterWeights or RouterLogits or TopK, got ExpertWeights; build it with moe_jax.RouterW"),
    Case("spec type of a layer", lambda x, *w: moe_jax.moe(x, ExpertWeights(*w), RouterLogits(x),
        untyped(RouterSpec(2))), LAYER, "spec must be MoESpec, got RouterSpec"),
)  # fmt: skip


both_ways = pytest.mark.parametrize("jitted", [False, True], ids=["eager", "jitted"])


@both_ways
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name.replace(" ", "-"))
def test_wrong_arguments(case: Case, jitted: bool) -> None:
    check_error(case, jitted)


@both_ways
@pytest.mark.parametrize("case", bad_arguments.sample(without=("strides", "missing")), ids=case_id)
def test_complaints_of_planners_arrive(case: bad_arguments.Case, jitted: bool) -> None:
    """Their type and their text. JAX arrays have no strides, and for a missing one it has words of its own."""
    arguments = case.given(lambda spec: jnp.zeros(spec.shape, spec.dtype))
    # What is no tree of arrays is static, as options are.
    arrays = {name: value for name, value in arguments.items() if not isinstance(value, STATIC)}
    options = {name: value for name, value in arguments.items() if name not in arrays}

    def call(arrays: dict[str, Any]) -> Any:
        return getattr(moe_jax, case.op)(**arrays, **options)

    engine = "interpreter" if case.kind == "unsupported" else "reference"
    with running_on(engine), pytest.raises(case.error, match=case.text) as caught:
        (jax.jit(call) if jitted else call)(arrays)
    assert type(caught.value) is case.error


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([[1.0]], "x must be a jax.Array, got builtins.list; convert it with jax.numpy.asarray"),
        (None, "x must be a jax.Array, got builtins.NoneType"),
        (jnp.ones((6, 1), jnp.complex64), "x has dtype complex64, which no op takes: .*convert the array first"),
        (jnp.ones((6, 1), jnp.int4), "x has dtype int4, which no op takes"),
        (jax.random.key(0), "x has dtype key.*which no op takes"),
        (np.ones((6, 1)), "x must have a dtype that JAX keeps, got float64, .*float32; convert"),
        (np.ones((6, 1), ">f4"), r"x must have native byte order, got >f4; call \.astype\('float32'\) on it"),
        (np.ma.ones((6, 1), np.float32), r"x must have no mask of its own, got a MaskedArray; call \.filled\(\)"),
        (jax.ShapeDtypeStruct((6, 1), jnp.float32), "x must be an array, got ShapeDtypeStruct.*only explain"),
    ],
    ids=["list", "None", "complex", "int4", "key", "float64", "big_endian", "masked", "shape"],
)
def test_what_is_no_array(value: Any, message: str) -> None:
    with running_on("reference"), pytest.raises(InvalidInput, match=message):
        moe_jax.scale_rows(value, floats(6, 1))


def test_big_endian_arrays_after_native_ones() -> None:
    """XLA would read the bytes as they are: after a native call of the same shape nothing is traced again."""
    native, big = np.ones((6, 4), np.float32), np.ones((6, 4), ">f4")
    weights, ids = np.ones((6, 1), np.float32), np.zeros((6, 1), np.int32)
    w1, w2 = np.ones((2, 6, 4), np.float32), np.ones((2, 4, 3), np.float32)
    fp8 = moe_jax.format_named("fp8_channel")
    calls: list[tuple[str, Callable[[Any], Any]]] = [
        ("x", lambda x: moe_jax.scale_rows(x, weights)),
        ("weight", lambda x: moe_jax.quantize(x, fp8)),
        ("x", lambda x: moe_jax.quantize_rows(x, moe_jax.format_named("fp8_tensor"))),
        ("a1", lambda x: modular.prepare(x, weights, ids)),
        ("a1", lambda x: modular.prepare_batched(x, weights, ids, 2, 8)),
        ("topk_weights", lambda x: modular.prepare(native, x[:, :1], ids)),
        ("topk_ids", lambda x: modular.prepare(native, weights, ids.astype(x.dtype.str.replace("f", "i")))),
        ("fused_expert_output", lambda x: modular.finalize(x[:, None], weights, ids)),
        ("x", lambda x: modular.fused_experts(x, w1, w2, weights, ids)),
        ("hidden_states", lambda x: modular.unfused_experts(x, w1, w2, weights, ids, weight_layout="out_in")),
        ("w1", lambda x: modular.fused_experts(native, w1.astype(x.dtype), w2, weights, ids)),
        ("hidden_states", lambda x: modular.batched_experts(x[None].repeat(2, 0), w1, w2, np.full(2, 3, np.int32))),
    ]
    with running_on("reference"):
        for name, call in calls:
            call(native)
            with pytest.raises(InvalidInput, match=rf"{name} must have native byte order, got >[fi]4; call \.astype"):
                call(big)


def test_arrays_without_memory() -> None:
    deleted = floats(6, 1) + 1
    deleted.delete()
    with running_on("reference"), pytest.raises(InvalidInput, match=r"x must have memory, got .* deleted or donated;"):
        moe_jax.scale_rows(deleted, floats(6, 1))


def test_blocks_of_other_sizes_are_refused() -> None:
    """A gather of JAX stays inside of its array, whatever it is asked for."""
    weights, ids = np.ones((6, 1), np.float32), np.zeros((6, 1), np.int32)
    with running_on("reference"):
        prepared = modular.prepare_batched(floats(6, 4), weights, ids, 2, 8)
        assert modular.finalize_batched(floats(2, 8, 4), weights, prepared).shape == (6, 4)
        with pytest.raises(InvalidInput, match=r"fused_expert_output must be .* \(2, 8\) .*, got \(2, 7, 4\); pass"):
            modular.finalize_batched(floats(2, 7, 4), weights, prepared)


@pytest.mark.parametrize("name", ["make_layout", "pack_bitmatrix", "moe"])
def test_checked_calls_are_refused_while_tracing(name: str) -> None:
    def call(ids: jax.Array) -> Any:
        if name != "moe":
            return getattr(moe_jax, name)(ids, E, checked=True)
        experts = ExpertWeights(floats(E, D, 2 * F), floats(E, F, D))
        return moe_jax.moe(floats(T, D), experts, TopK(ids, floats(T, K)), MoESpec(SILU), checked=True)

    message = rf"checked=True of {name} looks at the result on the host.*return invalid_ids and check it outside"
    with running_on("reference"), pytest.raises(Unsupported, match=message):
        jax.jit(call)(integers(T, K))


def test_an_unknown_engine() -> None:
    message = "cpu_engine kind must be 'interpreter' or 'reference', got 'fast'; name one"
    with pytest.raises(InvalidInput, match=message), moe_jax.cpu_engine("fast"):
        raise AssertionError("not reached")


@pytest.mark.parametrize("transform", [jax.grad, jax.jit])
def test_trained_numbers(transform: Callable[..., Any]) -> None:
    with pytest.raises(InvalidInput, match=r"scale must be a number, because options have no gradient, got an array"):
        transform(lambda scale: RouterSpec(K, scale=scale).scale)(2.0)
