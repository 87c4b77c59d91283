"""Owners that run the real kernels: all ranks in one process against one device, bit by bit."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
import pytest

from moe_core.base.target import Target
from moe_core.parallel import ExchangeSpec, plan_exchange
from moe_core.parallel.placement import gather_experts
from moe_core.specs import MoESpec, Tuning
from moe_core.specs.operands import MoEOperands, OutputGradients
from tests.support.harness import engine_target
from tests.support.parallel.placements import placement_of
from tests.support.parallel.twin.ranks import moe, moe_backward
from tests.support.parallel.twins import PLAIN, draw_problem
from tests.support.training.moe_backward import Problem

#: An owner's kernels give results by row: a row is a slot.
WAYS = (ExchangeSpec("all_to_all", "slots"), ExchangeSpec("padded", "slots"), ExchangeSpec("peer", "slots"))


def forward(operands: MoEOperands, spec: MoESpec, *, target: Target) -> dict[str, np.ndarray]:
    """A training step's forward."""
    nothing = OutputGradients(operands.x)
    found = Problem(operands, spec, nothing).forward(target)[1]
    return found | {"matmul2": found["output"]}


def backward(
    gradients: OutputGradients, operands: MoEOperands, spec: MoESpec, kept: dict[str, np.ndarray], *, target: Target
) -> dict[str, np.ndarray]:
    kept = {name: array for name, array in kept.items() if name != "matmul2"}
    found = Problem(operands, spec, gradients).backward(target, kept=kept)
    return found | {"d_slots": found["d_x"]}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_kernels_give_every_bit_of_one_device(dtype: str) -> None:
    target = engine_target()
    for seed, way in enumerate(WAYS):
        ranks, load = 2 + seed % 2, ("random", "hot_rank", "invalid")[seed]
        placement = placement_of(("linear", "round_robin", "balanced")[seed], 5, ranks)
        tokens = (7,) * ranks if way.mode == "padded" else (11, 0, 6)[:ranks]
        problem = draw_problem(seed, placement, tokens, 3, load, dtype, PLAIN)
        whole = Problem(
            MoEOperands(problem.x, problem.experts, problem.routing), PLAIN, OutputGradients(problem.d_output)
        )
        output = whole.forward(target)[1]
        expected = whole.backward(target, kept=output) | {"output": output["output"]}
        plan = plan_exchange(max(tokens), 3, problem.x.shape[1], dtype, placement, way, training=True)
        plan = plan.of_group(sum(tokens))
        assert plan.exact
        tuning = Tuning(expected_tokens=plan.expected_tokens, expected_experts=plan.expected_experts)
        spec = dataclasses.replace(PLAIN, tuning=tuning)
        operands = problem.ranks()
        made = moe(operands, spec, placement, way, run=functools.partial(forward, target=target))
        back = moe_backward(problem.gradients(), operands, spec, made, run=functools.partial(backward, target=target))
        found = {"output": np.concatenate([own.output for own in made.outputs])}
        for name in expected:
            if name.startswith("d_experts."):
                found[name] = gather_experts([own[name] for own in back], placement)
            elif name != "output":
                found[name] = np.concatenate([own[name] for own in back])
        for name, array in expected.items():
            assert found[name].dtype == array.dtype, name
            np.testing.assert_array_equal(found[name].astype(np.float32), array.astype(np.float32), f"{name}, {way}")
