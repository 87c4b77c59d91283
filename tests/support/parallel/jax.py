"""Expert-parallel calls on JAX's host devices, and what they are compared with."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

import moe_jax
from moe_core.parallel import ExchangeSpec, Placement
from moe_core.parallel.placement import gather_experts, shard_experts
from moe_core.specs.moe import MoESpec
from moe_core.specs.operands import ExpertWeights, named_fields
from moe_jax import parallel
from moe_jax.parallel.forward import group_of, run
from tests.support.jax import running_on, to_jax
from tests.support.parallel.twins import Problem
from tests.support.parallel.ways import require_one_device, require_twin

RANKS = P("ep")


def ep_mesh(ranks: int, kind: AxisType = AxisType.Auto, platform: str = "cpu") -> Mesh:
    return jax.make_mesh((ranks,), ("ep",), axis_types=(kind,), devices=jax.devices(platform)[:ranks])


def by_place(experts: ExpertWeights, placement: Placement) -> ExpertWeights:
    """The experts of all ranks behind each other: NaN in empty places."""
    parts = shard_experts(experts, placement)
    joined = {name: np.concatenate([getattr(part, name) for part in parts]) for name, _ in named_fields(experts)}
    return dataclasses.replace(experts, **joined)


@functools.cache
def group_step(
    spec: MoESpec,
    placement: Placement,
    exchange: ExchangeSpec,
    *,
    differentiated: bool = True,
    check_vma: bool = True,
    platform: str = "cpu",
) -> Any:
    """The jitted call `(x, experts, routing, mask, d_output, shared) -> (outputs, gradients)` of all ranks."""

    # Where there are hosts, ranks pretend to be on them.
    hosts, count = exchange.hosts, placement.num_ranks
    mesh, axis = ep_mesh(count, platform=platform), "ep"
    if hosts > 1:
        axis, kinds = ("host", "local"), (AxisType.Auto,) * 2
        mesh = jax.make_mesh((hosts, count // hosts), axis, axis_types=kinds, devices=jax.devices(platform)[:count])
    ranks = P(axis)

    def step(x: Any, experts: Any, routing: Any, mask: Any, d_output: Any, shared: Any) -> Any:
        def forward(x: Any, experts: Any, weights: Any, shared: Any) -> Any:
            given = dataclasses.replace(routing, **weights)
            found = run(x, experts, given, spec, group_of(axis, placement, exchange), mask, shared)
            return found.output, found

        if not differentiated:
            return forward(x, experts, {}, shared)[1], ()
        output, pull, found = jax.vjp(forward, x, experts, trained(routing), shared, has_aux=True)
        return found._replace(output=output), pull(d_output.astype(output.dtype))

    fields = {name: P() if name == "overflow" else ranks for name in parallel.ParallelOutput._fields}
    of_routing = ranks if spec.router is None else P()
    gradients = (ranks, ranks, of_routing, P()) if differentiated else ()
    return jax.jit(
        jax.shard_map(
            step,
            mesh=mesh,
            in_specs=(ranks, ranks, of_routing, ranks, ranks, P()),
            out_specs=(parallel.ParallelOutput(**fields), gradients),
            check_vma=check_vma,
        )
    )


def trained(routing: Any) -> dict[str, Any]:
    """The arrays of a routing that have gradients."""
    return {name: array for name, array in named_fields(routing) if name not in ("ids", "correction_bias")}


def run_alone(problem: Problem, engine: str) -> dict[str, np.ndarray]:
    """Output and gradients of all tokens and experts, by `moe_jax.moe` on an engine."""
    with running_on(engine):
        x, experts, routing, d_output = to_jax((problem.x, problem.experts, problem.routing, problem.d_output))

        def forward(x: Any, experts: Any, weights: Any, shared: Any) -> Any:
            given = dataclasses.replace(routing, **weights)
            found = moe_jax.moe(x, experts, given, problem.spec, token_mask=problem.token_mask, shared=shared)
            return found.output, found

        output, pull, found = jax.vjp(forward, x, experts, trained(routing), to_jax(problem.shared), has_aux=True)
        d_x, d_experts, d_routing, d_shared = pull(d_output.astype(output.dtype))
    found = {name: array for name, array in found._asdict().items() if array is not None} | {"output": output}
    found |= {"d_x": d_x} | {f"d_experts.{name}": array for name, array in named_fields(d_experts)}
    found |= {f"d_routing.{name}": array for name, array in d_routing.items()}
    found |= {} if d_shared is None else {f"d_shared.{name}": array for name, array in named_fields(d_shared)}
    return {name: np.asarray(array) for name, array in found.items()}


def run_group(problem: Problem, exchange: ExchangeSpec, engine: str = "reference", **options: Any) -> dict[str, Any]:
    """Every result of all ranks in NumPy, by the names of the twins; gradients of experts are of all experts, those of
    a router or a shared expert summed over ranks."""
    placement = problem.placement
    mask = problem.token_mask if problem.token_mask is not None else np.ones(len(problem.x), bool)
    if engine == "cuda":
        options["platform"] = "cuda"
    with running_on(engine):
        arrays = problem.x, by_place(problem.experts, placement), problem.routing, mask, problem.d_output
        given = to_jax((*arrays, problem.shared))
        found, gradients = group_step(problem.spec, placement, exchange, **options)(*given)
    results = {name: np.asarray(array) for name, array in found._asdict().items() if array is not None}
    if gradients:
        d_x, d_experts, d_routing, d_shared = gradients
        results["d_x"] = np.asarray(d_x)
        for name, array in named_fields(d_experts):
            results[f"d_experts.{name}"] = gather_experts([np.asarray(array)], placement)
        results |= {f"d_routing.{name}": np.asarray(array) for name, array in d_routing.items()}
        if d_shared is not None:
            results |= {f"d_shared.{name}": np.asarray(array) for name, array in named_fields(d_shared)}
    return results


def compare_with_one_device(problem: Problem, exchange: ExchangeSpec, label: str, **options: Any) -> None:
    """`require_one_device` of a group's results, and of the same engine on one device."""
    alone = run_alone(problem, options["engine"]) if "engine" in options else None
    require_one_device(run_group(problem, exchange, **options), problem, alone, label)


def compare_with_twin(problem: Problem, exchange: ExchangeSpec, label: str) -> int:
    """`require_twin` of a group's forward."""
    return require_twin(run_group(problem, exchange, differentiated=False), problem, exchange, label)
