"""Experts that are split over a tensor axis, on host devices: the bits of the twin, one device but for its bounds."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from moe_core.errors import InvalidInput
from moe_core.parallel import ExchangeSpec
from moe_core.specs import Activation, MoESpec, RouterSpec
from moe_jax import parallel
from moe_jax.parallel import tensor
from tests.support.jax import REAL_KERNELS
from tests.support.parallel.grid import Grid, require_close, require_grid_twin
from tests.support.parallel.jax import run_alone
from tests.support.parallel.jax_grid import run_grid
from tests.support.parallel.placements import placement_of
from tests.support.parallel.twins import PLAIN, draw_problem
from tests.support.parallel.ways import WAYS

#: W ranks of experts, ranks of the tensor axis.
SHAPES = ((2, 2), (1, 4), (1, 3), (1, 2), (2, 2))


def grid_of(
    shape: tuple[int, int], seed: int, load: str, dtype: str, spec: MoESpec = PLAIN, *, extras: bool = False
) -> Grid:
    rows, size = shape
    placement = placement_of(("linear", "round_robin", "balanced")[seed % 3], 5, rows, seed)
    tokens = (4,) * (rows * size)
    problem = draw_problem(seed, placement, tokens, 2, load, dtype, spec, extras=extras, sizes=(12, 24))
    return Grid(problem, size)


@pytest.mark.parametrize("number", range(5))
def test_the_bits_of_the_twin_and_nearly_one_device(number: int) -> None:
    load, dtype = ("random", "hot_rank", "masked", "invalid", "absent")[number], ("float32", "bfloat16")[number % 2]
    grid, way = grid_of(SHAPES[number], number, load, dtype), WAYS[number]
    found = run_grid(grid, way)
    require_grid_twin(found, grid, way, f"{way}, {load}, {dtype}")
    stages = grid.problem.alone()
    alone = grid.problem.alone_backward(stages) | {"output": stages["output"]}
    require_close(grid.whole(found), grid, alone, load)


@pytest.mark.parametrize("number", range(3))
def test_routers_biases_and_layouts(number: int) -> None:
    spec = (
        MoESpec(Activation("swiglu_oai", gate_layout="interleaved"), RouterSpec(2, renormalize=True)),
        MoESpec(Activation("silu", gate_layout="separate"), RouterSpec(2, "sigmoid"), out_dtype="float32"),
        MoESpec(Activation("silu"), RouterSpec(2), "out_in", "out_in"),
    )[number]
    grid = grid_of((2, 2), number, "random", "float32", spec, extras=True)
    grid = dataclasses.replace(grid, problem=dataclasses.replace(grid.problem, shared=None))
    found = run_grid(grid, WAYS[1 + number])
    require_grid_twin(found, grid, WAYS[1 + number], str(spec))


@pytest.mark.skipif(REAL_KERNELS != "interpreter", reason="host devices run kernels in the interpreter alone")
def test_interpreted_kernels_are_nearly_those_of_one_device() -> None:
    grid = grid_of((1, 2), 1, "random", "bfloat16")
    require_close(grid.whole(run_grid(grid, WAYS[1], "interpreter")), grid, run_alone(grid.problem, "interpreter"), "")


@pytest.mark.parametrize("fault", ["bias_once", "_pulled"])
def test_planted_faults_are_found(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    from moe_jax.parallel import forward

    grid = grid_of((1, 2), 0, "random", "float32", extras=True)
    real = getattr(tensor, fault)
    jax.clear_caches()

    def wrong(axis: str, given: Any) -> Any:
        return given if fault == "bias_once" else real(axis, given)[::-1]

    monkeypatch.setattr(forward if fault == "bias_once" else tensor, fault, wrong)
    with pytest.raises(AssertionError):
        require_grid_twin(run_grid(grid, WAYS[1]), grid, WAYS[1], fault)
    jax.clear_caches()


def test_an_axis_that_is_none_is_refused() -> None:
    grid = grid_of((1, 2), 0, "random", "float32")
    with pytest.raises(InvalidInput, match="tensor_axis must be a mesh axis that is manual here, got 'nope'"):
        run_grid(grid, WAYS[1], tensor_axis="nope")


def test_the_public_call_takes_the_axis() -> None:
    grid = grid_of((1, 2), 0, "random", "float32")
    rank, problem = grid.ranks()[0], grid.problem
    experts = [np.stack([getattr(own.experts, name) for own in rank]) for name in ("gate_up", "down")]
    mesh = jax.make_mesh((1, 2), ("ep", "tp"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices("cpu")[:2])

    def call(x: Any, gate_up: Any, down: Any, ids: Any, weights: Any) -> Any:
        own = dataclasses.replace(rank[0].experts, gate_up=gate_up[0], down=down[0])
        routing = type(problem.routing)(ids, weights)
        options: Any = {"placement": problem.placement, "exchange": ExchangeSpec(), "tensor_axis": "tp"}
        return parallel.moe(x, own, routing, problem.spec, **options).output

    rows, slices = P(("ep", "tp")), P("tp")
    specs = rows, slices, slices, rows, rows
    given = problem.x, *experts, problem.routing.ids, problem.routing.weights
    output = jax.jit(jax.shard_map(call, mesh=mesh, in_specs=specs, out_specs=P(("ep", "tp"))))(*given)
    require_close({"output": np.asarray(output)}, grid, {"output": problem.alone()["output"]}, "public")
