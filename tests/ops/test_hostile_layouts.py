"""Portable kernels on layouts, ids and indices of garbage: whatever they hold, nothing outside of a plan's buffers is
read or written. `run_plan` watches both: every read of the interpreter, and guard zones around what is written."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from moe_core.base import dtypes
from moe_core.base.arrays import ArraySpec
from moe_core.base.target import Target
from moe_core.formats import QuantizedSpec, format_named, quantized_specs
from moe_core.ops.activation.backward import plan_expert_activation_backward
from moe_core.ops.matmul.backward import plan_matmul_ogs_backward
from moe_core.ops.matmul.forward import plan_matmul_ogs
from moe_core.ops.moe.backward import gradient_names, plan_moe_backward
from moe_core.ops.moe.forward import plan_moe
from moe_core.ops.moe.options import BackwardOptions, ForwardOptions
from moe_core.ops.quantize.rows import plan_quantize_rows
from moe_core.ops.reduction.reduce import plan_reduce
from moe_core.ops.routing.backward import plan_routing_backward
from moe_core.ops.routing.bitmatrix import plan_pack_bitmatrix, plan_unpack_bitmatrix
from moe_core.ops.routing.layout import plan_layout, plan_schedule
from moe_core.ops.routing.topk import plan_routing
from moe_core.plan.steps import LaunchPlan
from moe_core.specs import Activation, LayoutSpec, MatmulSpec, MoESpec, RouterSpec
from moe_core.specs.operands import (
    ExpertActivationOperands,
    ExpertWeights,
    MatmulOperands,
    MoEOperands,
    OutputGradients,
    RouterLogits,
    RoutingGradients,
    TopK,
)
from tests.support.harness import engine_target, run_plan
from tests.support.strategies import layout_arrays

pytestmark = pytest.mark.skipif(
    engine_target().kind != "interpreter", reason="a GPU's own checker (make memcheck) sees what kernels touch"
)
HERE = Target("interpreter")
T, K, E, D, F = 5, 3, 4, 40, 24
PADDED, BLOCKS = LayoutSpec(T, K, E, alignment=4), LayoutSpec(T, K, E, max_rows=6)
ROUTER, SILU = RouterSpec(K), Activation("silu")
LOWEST, HIGHEST = -(2**31), 2**31 - 1


def floats(*shape: int) -> ArraySpec:
    return ArraySpec(shape, "float32")


def integers(*shape: int) -> ArraySpec:
    return ArraySpec(shape, "int32")


def experts(num_layers: int = 2, **changes: object) -> ExpertWeights:
    lead = (num_layers, E)
    given = {"gate_up": floats(*lead, D, 2 * F), "down": floats(*lead, F, D), "layer_index": integers(1)}
    return ExpertWeights(**(given | changes))  # pyright: ignore[reportArgumentType]


def product(layout: LayoutSpec, gather: str, scatter: str) -> LaunchPlan:
    rows = {"row": layout.capacity, "slot": layout.num_slots, "token": layout.num_tokens}[gather]
    operands = MatmulOperands(
        floats(rows, D), floats(2, E, D, F), bias=floats(2, E, F), row_weight=floats(T, K), layer_index=integers(1)
    )
    return plan_matmul_ogs(operands, layout, MatmulSpec("in_out", gather, scatter), HERE)


def product_backward(layout: LayoutSpec, gather: str, scatter: str) -> LaunchPlan:
    rows = {"row": layout.capacity, "slot": layout.num_slots, "token": layout.num_tokens}[gather]
    out = {"row": layout.capacity, "slot": layout.num_slots}[scatter]
    row_weight, wanted = None, ("d_x", "d_weight", "d_bias")
    if scatter == "slot":
        row_weight, wanted = floats(T * K), (*wanted, "d_row_weight")
    operands = MatmulOperands(floats(rows, D), floats(E, D, F), bias=floats(E, F), row_weight=row_weight)
    spec = MatmulSpec("in_out", gather, scatter)
    return plan_matmul_ogs_backward(floats(out, F), operands, layout, spec, HERE, wanted=wanted)


def layer_backward(routing: RouterLogits | TopK) -> LaunchPlan:
    biases = {"gate_up_bias": floats(2, E, 2 * F), "down_bias": floats(2, E, D)}
    operands = MoEOperands(floats(T, D), experts(**biases), routing, expert_map=integers(E + 2))
    spec = MoESpec(SILU, ROUTER if isinstance(routing, RouterLogits) else None)
    names = gradient_names(operands)
    return plan_moe_backward(OutputGradients(floats(T, D)), operands, spec, HERE, options=BackwardOptions(wanted=names))


def quantized(format: str) -> object:
    return quantized_specs(QuantizedSpec(format_named(format), "in_out"), (E, 64, F))


def quantized_product(format: str) -> LaunchPlan:
    operands = MatmulOperands(floats(T, 64), quantized(format), row_weight=floats(T, K))
    return plan_matmul_ogs(operands, PADDED, MatmulSpec("in_out", "token", "slot"), HERE)


def quantized_backward(format: str) -> LaunchPlan:
    operands = MatmulOperands(floats(T, 64), quantized(format), row_weight=floats(T * K))
    spec = MatmulSpec("in_out", "token", "slot")
    return plan_matmul_ogs_backward(floats(T * K, F), operands, PADDED, spec, HERE, wanted=("d_x",))


PLANS: dict[str, Callable[[], LaunchPlan]] = {
    "reduce by slot": lambda: plan_reduce(floats(T * K, D), integers(T * K), PADDED, HERE),
    "reduce by row": lambda: plan_reduce(floats(PADDED.capacity, D), integers(T * K), PADDED, HERE, order="row"),
    "reduce in a loop": lambda: plan_reduce(
        floats(T * 17, D), integers(T * 17), LayoutSpec(T, 17, E), HERE, order="row"
    ),
    "schedule": lambda: plan_schedule(PADDED, 16, HERE),
    "matmul from tokens to slots": lambda: product(PADDED, "token", "slot"),
    "matmul from rows to rows": lambda: product(PADDED, "row", "row"),
    "matmul from slots to rows": lambda: product(BLOCKS, "slot", "row"),
    "matmul of mxfp4": lambda: quantized_product("mxfp4"),
    "matmul of int8": lambda: quantized_product("int8_channel"),
    "backward from tokens to slots": lambda: product_backward(PADDED, "token", "slot"),
    "backward from rows to rows": lambda: product_backward(BLOCKS, "row", "row"),
    "backward of mxfp4": lambda: quantized_backward("mxfp4"),
    "activation between products": lambda: plan_expert_activation_backward(
        ExpertActivationOperands(
            floats(PADDED.capacity, F), floats(PADDED.capacity, 2 * F), integers(T * K), floats(T, K), floats(T * K)
        ),
        SILU,
        HERE,
        slot_of_row=integers(PADDED.capacity),
    ),
    "quantised rows": lambda: plan_quantize_rows(
        floats(T, D), format_named("fp8_tensor"), HERE, used_by=integers(T * K)
    ),
    "layout": lambda: plan_layout(integers(T, K), PADDED, HERE, expert_map=integers(E + 2), block_ms=(16,)),
    "layout in several launches": lambda: plan_layout(integers(150, K), LayoutSpec(150, K, E), HERE, block_ms=(16, 32)),
    "blocks": lambda: plan_layout(integers(T, K), BLOCKS, HERE, block_ms=(16,)),
    "route of given ids": lambda: plan_routing(floats(T, E), ROUTER, HERE, given=integers(T, K)),
    "route backward": lambda: plan_routing_backward(
        RoutingGradients(floats(T, K), load_balance=floats(1), tokens_per_expert=integers(E)),
        floats(T, E),
        integers(T, K),
        ROUTER,
        HERE,
    ),
    "bitmatrix": lambda: plan_pack_bitmatrix(integers(T, K), 40, HERE),
    "ids of a bitmatrix": lambda: plan_unpack_bitmatrix(ArraySpec((T, 2), "uint32"), 40, K, HERE),
    "layer": lambda: plan_moe(
        floats(T, D),
        experts(),
        TopK(integers(T, K), floats(T, K)),
        MoESpec(SILU),
        HERE,
        options=ForwardOptions(expert_map=integers(E + 2)),
    ),
    "layer of one token": lambda: plan_moe(
        floats(1, D), experts(), TopK(integers(1, K), floats(1, K)), MoESpec(SILU), HERE
    ),
    "layer backward": lambda: layer_backward(TopK(integers(T, K), floats(T, K))),
    "layer backward with its routing": lambda: layer_backward(RouterLogits(floats(T, E + 2))),
}  # fmt: skip


def draw(random: np.random.Generator, spec: ArraySpec, garbage: str) -> np.ndarray:
    """An input of a plan: numbers, or garbage where it holds integers that say where something lies."""
    if spec.dtype in ("int32", "uint32"):
        size = max(spec.size, 2)
        near = np.array([LOWEST, -size, -2, -1, 0, 1, size - 2, size - 1, size, size + 1, 2**20, HIGHEST])
        drawn = {
            "lowest": lambda: np.full(spec.shape, LOWEST),
            "highest": lambda: np.full(spec.shape, HIGHEST),
            "one past the end": lambda: np.full(spec.shape, size),
            "random": lambda: random.integers(LOWEST, HIGHEST, spec.shape),
            "ends": lambda: random.choice(near, spec.shape),
            "a few wrong": lambda: np.where(
                random.random(spec.shape) < 0.3, random.choice(near, spec.shape), random.integers(0, 6, spec.shape)
            ),
            "ascending": lambda: np.sort(random.integers(0, 60, spec.shape)),
        }[garbage]()
        return drawn.astype(np.int64).astype(dtypes.numpy_dtype(spec.dtype))
    if spec.dtype in ("uint8", "int8", "bool"):
        return random.integers(0, 2 if spec.dtype == "bool" else 120, spec.shape).astype(dtypes.numpy_dtype(spec.dtype))
    return random.standard_normal(spec.shape, np.float32).astype(dtypes.numpy_dtype(spec.dtype))


GARBAGE = ("lowest", "highest", "one past the end", "random", "ends", "a few wrong", "ascending")


@pytest.mark.parametrize("name", PLANS)
def test_garbage_leads_nowhere(name: str) -> None:
    plan = PLANS[name]()
    for garbage in GARBAGE:
        for seed in range(1 if garbage in GARBAGE[:3] else 3):
            random = np.random.default_rng([seed, GARBAGE.index(garbage)])
            arrays = {buffer.name: draw(random, buffer.spec, garbage) for buffer in plan.inputs}
            if garbage == "ascending" and "experts.layer_index" in arrays:
                arrays["experts.layer_index"][0] = (-1, 2, LOWEST)[seed]
            try:
                run_plan(plan, arrays)
            except AssertionError as error:
                raise AssertionError(f"{garbage}, seed {seed}: {error}") from error


@pytest.mark.parametrize("outside", [LOWEST, -2, T * K, HIGHEST])
@pytest.mark.parametrize("weights", ["plain", "mxfp4"])
def test_slots_outside_are_padding(weights: str, outside: int) -> None:
    """A row whose slot is no slot is written nowhere: neither the first nor the last slot gets it."""
    random, ids = np.random.default_rng(0), np.arange(T * K, dtype=np.int32).reshape(T, K) % E
    plan = product(PADDED, "token", "slot") if weights == "plain" else quantized_product("mxfp4")
    arrays = {buffer.name: draw(random, buffer.spec, "ascending") for buffer in plan.inputs}
    arrays |= {name: one for name, one in layout_arrays(ids, PADDED).items() if name in arrays}
    arrays |= {"layer_index": np.ones(1, np.int32)} if weights == "plain" else {}
    # The last row, whose program is the last to write.
    row, found = np.flatnonzero(arrays["slot_of_row"] >= 0)[-1], []
    for slot in (-1, outside):
        arrays["slot_of_row"][row] = slot
        found.append(run_plan(plan, arrays)["y"].view(np.int32))
    np.testing.assert_array_equal(*found)


@pytest.mark.parametrize("outside", [-2, E, E + 3, HIGHEST])
def test_ids_outside_have_no_gradient(outside: int) -> None:
    """Such a token counts as masked, in the kernel and in its NumPy twin."""
    random = np.random.default_rng(1)
    arrays = {"logits": random.standard_normal((T, E), np.float32)}
    arrays |= {"gradients.weights": random.standard_normal((T, K), np.float32)}
    arrays |= {"ids": np.tile(np.arange(K, dtype=np.int32), (T, 1))}
    arrays["ids"][2, 1] = outside
    found = []
    for target in (HERE, Target("reference")):
        plan = plan_routing_backward(RoutingGradients(floats(T, K)), floats(T, E), integers(T, K), ROUTER, target)
        found.append(run_plan(plan, arrays)["d_logits"])
    np.testing.assert_allclose(*found, rtol=1e-5, atol=1e-6)
    assert not found[0][2].any() and found[0][[0, 1, 3, 4]].any(axis=1).all()
