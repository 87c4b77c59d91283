"""Float64 on the reference engine: gradients beside differences of ops and layers, and what float64 is refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from moe_core.errors import InvalidInput, Unsupported
from moe_core.specs import Activation, MatmulSpec, MoESpec, RouterSpec
from moe_core.specs.operands import ExpertWeights, MatmulOperands, RouterWeights, TopK
from tests.support.frontends import Frontend

T, D, F, E, K, S = 3, 4, 3, 6, 2, 2
ACTIVATIONS = [
    Activation("silu"),
    Activation("gelu"),
    Activation("gelu_tanh"),
    Activation("relu2", gated=False),
    Activation("silu", limit=0.7),
    Activation("clamped_silu", limit=0.4),
    Activation("swiglu_oai", limit=1.1, gate_layout="interleaved"),
    Activation("softcapped_silu"),
    Activation("silu", gate_layout="separate"),
]


@pytest.fixture(autouse=True)
def reference(frontend: Frontend) -> Iterator[None]:
    with frontend.x64(True), frontend.running_on("reference"):
        yield


def draw(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([sum(shape), seed]).standard_normal(shape)


def weights_of(activation: Activation, with_bias: bool = True) -> dict[str, np.ndarray]:
    separate = activation.gate_layout == "separate"
    width = F if separate else activation.input_width(F)
    arrays = {"gate_up": draw(E, D, width), "down": draw(E, F, D, seed=1)}
    arrays |= {"up": draw(E, D, F, seed=2)} if separate else {}
    if with_bias:
        arrays |= {"gate_up_bias": draw(E, width), "down_bias": draw(E, D)}
        arrays |= {"up_bias": draw(E, F, seed=3)} if separate else {}
    return arrays


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=lambda one: f"{one.name}-{one.gate_layout}-{one.limit}")
def test_moe(frontend: Frontend, activation: Activation) -> None:
    def outputs(x: Any, router: Any, router_bias: Any, **experts: Any) -> Any:
        routing = RouterWeights(router, router_bias)
        found = frontend.ops.moe(x, ExpertWeights(**experts), routing, MoESpec(activation, RouterSpec(K)))
        return found.output, found.weights, found.logits

    arrays = {"x": draw(T, D), "router": draw(D, E, seed=4), "router_bias": draw(E, seed=5)}
    frontend.check_gradients(outputs, arrays | weights_of(activation))


def test_given_ids_and_recompute(frontend: Frontend) -> None:
    ids = frontend.arrays(np.array([[0, 3], [5, -1], [2, 2]], np.int32))

    def output(x: Any, weights: Any, **experts: Any) -> Any:
        spec = MoESpec(Activation("gelu"), recompute=True)
        return frontend.ops.moe(x, ExpertWeights(**experts), TopK(ids, weights), spec).output

    frontend.check_gradients(output, {"x": draw(T, D), "weights": draw(T, K)} | weights_of(Activation("gelu")))


def test_stage_ops(frontend: Frontend) -> None:
    ops, spec = frontend.ops, RouterSpec(K, scoring="sigmoid", renormalize=True)
    layout = ops.make_layout(frontend.arrays(np.array([[0, 3], [5, -1], [2, 1]], np.int32)), E)

    def output(x: Any, weight: Any, bias: Any, row_weight: Any) -> Any:
        operands = MatmulOperands(x, weight, bias=bias, row_weight=row_weight)
        slots = ops.matmul_ogs(operands, layout, MatmulSpec("in_out", "token", "slot"))
        return ops.reduce(ops.activation(slots, Activation("silu"), out_dtype=frontend.dtype("float64")), layout)

    arrays = {"x": draw(T, D), "weight": draw(E, D, 2 * F), "bias": draw(E, 2 * F), "row_weight": draw(T, K).ravel()}
    frontend.check_gradients(output, arrays)

    def routed(x, weight, bias):
        return ops.route(ops.router(x, weight, bias=bias), spec).weights

    frontend.check_gradients(routed, {"x": draw(T, D), "weight": draw(D, E), "bias": draw(E)})


def test_what_is_refused(frontend: Frontend) -> None:
    ops, spec = frontend.ops, MoESpec(Activation("silu"), RouterSpec(K))
    experts, routing = ExpertWeights(draw(E, D, 2 * F), draw(E, F, D)), RouterWeights(draw(D, E))
    x, experts, routing, matrix = frontend.arrays((draw(T, D), experts, routing, draw(D, F)))
    with frontend.running_on("interpreter"), pytest.raises(Unsupported, match="float64 runs on the CPU's reference"):
        ops.moe(x, experts, routing, spec)
    single = RouterWeights(frontend.cast(routing.weight, "float32"))
    message = r"routing.weight must be float64 like x, got float32; cast every array or none"
    with pytest.raises(InvalidInput, match=message):
        ops.moe(x, experts, single, spec)
    for call in (
        lambda: ops.activation(x, Activation("silu"), out_dtype=frontend.dtype("float32")),
        lambda: ops.matmul_ogs(MatmulOperands(x, matrix), None, MatmulSpec("in_out", out_dtype="float32")),
    ):
        with pytest.raises(InvalidInput, match="out_dtype must be left out for float64 arrays, got float32"):
            call()


def test_losses_are_computed_in_float64(frontend: Frontend) -> None:
    logits = np.array([[-34.0, -20.0, 25.0], [-30.0, -33.0, -18.0]])
    scores = np.sqrt(np.log1p(np.exp(logits)))
    wanted = 3 * (np.array([0.5, 0.5, 0.0]) * (scores / scores.sum(1, keepdims=True)).mean(0)).sum()
    given, ids = frontend.arrays((logits, np.array([[0], [1]], np.int32)))
    found = frontend.losses.load_balance_loss(given, ids, scoring="sqrt_softplus")
    np.testing.assert_allclose(frontend.numpy(found), wanted, rtol=1e-13)
