"""The modular functions of JAX across four host devices: the bits of one device, forward and every gradient."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

jax = pytest.importorskip("jax")

from jax.sharding import PartitionSpec as P

from moe_core.errors import InvalidInput, Unsupported
from moe_core.parallel import ExchangeSpec, Placement
from moe_core.parallel.placement import gather_experts
from moe_core.specs.tuning import Tuning
from moe_jax import modular
from moe_jax.parallel import routes
from tests.support.jax import running_on, to_jax
from tests.support.parallel.jax import by_place, ep_mesh
from tests.support.parallel.placements import placement_of
from tests.support.parallel.twins import PLAIN, Problem, draw_problem
from tests.support.parallel.ways import require_same


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that nothing was received into hold NaN, which no result may show."""
    monkeypatch.setattr(routes, "UNUSED", np.nan)


def experts_of(experts: str, tokens: Any, w1: Any, w2: Any, weights: Any, ids: Any, tuning: Any = None) -> Any:
    """What `fused` and `unfused` experts return of tokens."""
    function = modular.fused_experts if experts == "fused" else modular.unfused_experts
    return function(tokens, w1, w2, weights, ids, weight_layout="in_out", tuning=tuning)


def across_ranks(placement: Placement, way: ExchangeSpec, experts: str) -> Any:
    """The jitted call `(x, w1, w2, weights, ids, d_output) -> (output, gradients)` of all ranks."""

    def step(x: Any, w1: Any, w2: Any, weights: Any, ids: Any, d_output: Any) -> Any:
        def forward(x: Any, w1: Any, w2: Any, weights: Any) -> Any:
            sent = modular.prepare_expert_parallel(x, weights, ids, placement=placement, exchange=way)
            rows = experts_of(experts, sent.a1q, w1, w2, sent.topk_weights, sent.topk_ids, sent.tuning)
            return modular.finalize_expert_parallel(rows, sent)

        output, pull = jax.vjp(forward, x, w1, w2, weights)
        return output, pull(d_output)

    return jax.jit(jax.shard_map(step, mesh=ep_mesh(placement.num_ranks), in_specs=P("ep"), out_specs=P("ep")))


def arrays_of(problem: Problem) -> Any:
    experts = by_place(problem.experts, problem.placement)
    weights, ids = problem.routing.weights, problem.routing.ids
    return to_jax((problem.x, experts.gate_up, experts.down, weights, ids, problem.d_output))


@pytest.mark.parametrize(
    "mode, experts, dtype", [("all_to_all", "fused", "bfloat16"), ("all_gather", "unfused", "float32")]
)
def test_every_bit_of_one_device(mode: str, experts: str, dtype: str) -> None:
    placement = placement_of("round_robin", 7, 4)
    call = across_ranks(placement, ExchangeSpec(mode), experts)
    for seed, load in enumerate(("random", "hot_expert", "empty_rank", "absent", "invalid", "nothing")):
        problem = draw_problem(seed, placement, (3,) * 4, 2, load, dtype, PLAIN)
        with running_on("reference"):
            output, gradients = call(*arrays_of(problem))
            x, all_experts, routing, d_output = to_jax((problem.x, problem.experts, problem.routing, problem.d_output))
            expected, pull = jax.vjp(
                lambda *given: experts_of(experts, *given, routing.ids),  # noqa: B023
                *(x, all_experts.gate_up, all_experts.down, routing.weights),
            )
            expected_gradients = pull(d_output)
        require_same(np.asarray(output), np.asarray(expected), f"output, {load}")
        for name, found, wanted in zip(["x", "w1", "w2", "weights"], gradients, expected_gradients, strict=True):
            array = np.asarray(found)
            if name in ("w1", "w2"):
                array = gather_experts([array], placement)
            require_same(array, np.asarray(wanted), f"gradient of {name}, {load}")


def test_slots_that_are_not_weighted_and_a_weight_on_the_input() -> None:
    """Experts that are the identity: finalize weights rows, unless the weight is on the input."""
    placement = Placement.linear(4, 2)
    problem = draw_problem(0, placement, (3, 3), 1, "random", "float32", PLAIN)

    def step(x: Any, weights: Any, ids: Any) -> Any:
        found = []
        for on_input in (False, True):
            sent = modular.prepare_expert_parallel(x, weights, ids, on_input, placement=placement)
            assert sent.tuning == Tuning(expected_tokens=6, expected_experts=4)
            found.append(modular.finalize_expert_parallel(sent.a1q[:, None], sent, on_input))
        return tuple(found), sent.overflow

    out_specs = ((P("ep"), P("ep")), P())
    call = jax.jit(jax.shard_map(step, mesh=ep_mesh(2), in_specs=P("ep"), out_specs=out_specs))
    with running_on("reference"):
        (after, before), overflow = call(*to_jax((problem.x, problem.routing.weights, problem.routing.ids)))
    expected = problem.x * problem.routing.weights
    for found in (after, before):
        np.testing.assert_array_equal(np.asarray(found), expected)
    assert np.asarray(overflow).tolist() == [0]


def test_wrong_arguments_are_named() -> None:
    x, weights, ids = to_jax((np.zeros((2, 4), np.float32), np.ones((2, 1), np.float32), np.zeros((2, 1), np.int32)))

    def refused(error: Any, text: str, placement: Any = Placement.linear(4, 1), **options: Any) -> None:  # noqa: B008
        def step(x: Any, weights: Any, ids: Any) -> Any:
            sent = modular.prepare_expert_parallel(x, weights, ids, placement=placement, **options)
            return modular.finalize_expert_parallel(sent.a1q[1:], sent)

        with pytest.raises(error, match=text):
            jax.eval_shape(jax.shard_map(step, mesh=ep_mesh(1), in_specs=P("ep"), out_specs=P("ep")), x, weights, ids)

    refused(InvalidInput, r"fused_expert_output must be \[2, K\] or \[2, 1, K\]")
    refused(InvalidInput, "placement must be of the 1 ranks of the axis 'ep'", Placement.linear(4, 2))
    refused(Unsupported, "placement must have every expert once", placement_of("replicas", 4, 2))
    refused(Unsupported, "exchange.mode must not be 'peer'", exchange=ExchangeSpec("peer"))
    with pytest.raises(InvalidInput, match="axis_name must be a mesh axis that is manual here"):
        modular.prepare_expert_parallel(x, weights, ids, placement=Placement.linear(4, 1))
