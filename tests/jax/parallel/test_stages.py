"""`dispatch` and `combine` of `moe_jax.parallel`: two micro-batches that overlap, with the bits of `moe`."""

from __future__ import annotations

from typing import Any
from unittest import mock

import numpy as np
import pytest

pytest.importorskip("jax")

import jax

import moe_jax
from moe_core.errors import InvalidInput, Unsupported
from moe_core.parallel import ExchangeSpec
from moe_core.specs.operands import TopK
from moe_jax.parallel import combine, dispatch, forward, function
from tests.support.jax import running_on, to_jax
from tests.support.parallel.jax import RANKS, by_place, ep_mesh, group_step
from tests.support.parallel.placements import placement_of
from tests.support.parallel.twins import PLAIN, Problem, draw_problem

WAYS = (ExchangeSpec(), ExchangeSpec(rows="slots"), ExchangeSpec("padded"), ExchangeSpec("all_gather"))
PLACEMENT = placement_of("round_robin", 6, 2)


def problems_of(load: str, dtype: str) -> list[Problem]:
    return [draw_problem(seed, PLACEMENT, (7, 7), 3, load, dtype, PLAIN) for seed in range(2)]


def arrays_of(problem: Problem) -> Any:
    experts = by_place(problem.experts, PLACEMENT)
    return to_jax((problem.x, experts, problem.routing, problem.token_mask, problem.d_output))


def overlapped(problems: list[Problem], way: ExchangeSpec, calls: list[str] | None = None) -> Any:
    """Outputs and gradients of each micro-batch. All rows are sent before the first experts."""
    calls = [] if calls is None else calls

    def step(batches: Any) -> Any:
        def forward(trained: Any) -> Any:
            sent, homing = [], []
            for (x, _, weights), (_, _, routing, mask, _) in zip(trained, batches, strict=True):
                sent.append(dispatch(x, routing.ids, weights, placement=PLACEMENT, exchange=way, token_mask=mask))
            for arrived, (_, experts, _) in zip(sent, trained, strict=True):
                calls.append("experts")
                routing = TopK(arrived.ids, arrived.weights)
                found = moe_jax.moe(arrived.rows, experts, routing, arrived.spec(PLAIN)).output
                homing.append(combine(found, arrived))
            return homing

        output, pull = jax.vjp(forward, [(x, experts, routing.weights) for x, experts, routing, *_ in batches])
        return output, pull([d_output.astype(y.dtype) for y, (*_, d_output) in zip(output, batches, strict=True)])[0]

    call = jax.shard_map(step, mesh=ep_mesh(2), in_specs=RANKS, out_specs=RANKS)
    return jax.jit(call)([arrays_of(problem) for problem in problems])


@pytest.mark.parametrize("way", WAYS, ids=lambda way: f"{way.mode}-{way.rows}")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_micro_batches_that_overlap_have_the_bits_of_moe(way: ExchangeSpec, dtype: str) -> None:
    for load in ("random", "hot_rank", "absent", "masked") if way == WAYS[0] else ("random",):
        problems = problems_of(load, dtype)
        with running_on("reference"):
            outputs, gradients = overlapped(problems, way)
            for problem, output, found in zip(problems, outputs, gradients, strict=True):
                whole, (d_x, d_experts, d_routing, _) = group_step(PLAIN, PLACEMENT, way)(*arrays_of(problem), None)
                expected = [whole.output, d_x, d_experts, d_routing["weights"]]
                for one, other in zip(*map(jax.tree.leaves, ([output, *found], expected)), strict=True):
                    assert np.asarray(one).tobytes() == np.asarray(other).tobytes(), load


def test_rows_travel_while_experts_compute() -> None:
    """The order in which the program is written: both dispatches, then experts and a way home each."""
    calls: list[str] = []
    real_push, real_pull = function.push, function.pull

    def push(*arguments: Any) -> Any:
        calls.append("push")
        return real_push(*arguments)

    def pull(*arguments: Any) -> Any:
        calls.append("pull")
        return real_pull(*arguments)

    with running_on("reference"), mock.patch.object(function, "push", push), mock.patch.object(function, "pull", pull):
        overlapped(problems_of("random", "float32"), ExchangeSpec("padded"), calls)
    assert [call for call in calls if call != "experts"][:2] == ["push", "push"]
    assert calls.index("experts") > 1 and calls.index("pull") > calls.index("experts")
    assert calls[: calls.index("pull")].count("experts") == 1


def test_what_is_refused() -> None:
    problem = problems_of("random", "float32")[0]
    x, _, routing, *_ = arrays_of(problem)
    with pytest.raises(InvalidInput, match="axis_name must be a mesh axis that is manual here, got 'ep'"):
        dispatch(x, routing.ids, routing.weights, placement=PLACEMENT)

    def call(step: Any) -> None:
        program = jax.shard_map(step, mesh=ep_mesh(2), in_specs=RANKS, out_specs=RANKS)
        jax.eval_shape(program, x, routing.ids, routing.weights)

    def sent(*arguments: Any, **options: Any) -> Any:
        return dispatch(*arguments, **{"placement": PLACEMENT, **options})

    with pytest.raises(Unsupported, match=r"exchange\.mode must not be 'peer'"):
        call(lambda *arguments: sent(*arguments, exchange=ExchangeSpec("peer")).rows)
    with pytest.raises(Unsupported, match="placement must have no replicas in dispatch"):
        call(lambda *arguments: sent(*arguments, placement=placement_of("replicas", 6, 2)).rows)
    with pytest.raises(InvalidInput, match=r"rows must be float32\["):
        call(lambda *arguments: combine(sent(*arguments).rows[:-1], sent(*arguments)))
    # 7 tokens of a rank go to both ranks.
    few = mock.patch.object(forward, "_memory", lambda: 1000)
    with few, pytest.raises(InvalidInput, match=r"exchange\.receive must bound the rows .* pass receive=28, twice"):
        call(lambda *arguments: sent(*arguments).rows)
