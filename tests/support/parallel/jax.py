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
from moe_core.parallel.reference import moe as twin
from moe_core.parallel.shards import gather_experts, shard_experts
from moe_core.specs.moe import MoESpec
from moe_core.specs.operands import ExpertWeights, named_fields
from moe_jax import parallel
from moe_jax.parallel.forward import Group, run
from tests.support.jax import running_on, to_jax
from tests.support.parallel.twins import Problem

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

    def step(x: Any, experts: Any, routing: Any, mask: Any, d_output: Any, shared: Any) -> Any:
        def forward(x: Any, experts: Any, weights: Any) -> Any:
            given = dataclasses.replace(routing, **weights)
            found = run(x, experts, given, spec, Group("ep", placement, exchange), mask, shared)
            return found.output, found

        if not differentiated:
            return forward(x, experts, {})[1], ()
        output, pull, found = jax.vjp(forward, x, experts, _trained(routing), has_aux=True)
        return found._replace(output=output), pull(d_output.astype(output.dtype))

    fields = {name: P() if name == "overflow" else RANKS for name in parallel.ParallelOutput._fields}
    of_routing = RANKS if spec.router is None else P()
    gradients = (RANKS, RANKS, of_routing) if differentiated else ()
    return jax.jit(
        jax.shard_map(
            step,
            mesh=ep_mesh(placement.num_ranks, platform=platform),
            in_specs=(RANKS, RANKS, of_routing, RANKS, RANKS, P()),
            out_specs=(parallel.ParallelOutput(**fields), gradients),
            check_vma=check_vma,
        )
    )


def _trained(routing: Any) -> dict[str, Any]:
    return {name: array for name, array in named_fields(routing) if name not in ("ids", "correction_bias")}


def run_alone(problem: Problem, engine: str) -> dict[str, np.ndarray]:
    """Output and gradients of all tokens and experts, by `moe_jax.moe` on an engine."""
    with running_on(engine):
        x, experts, routing, d_output = to_jax((problem.x, problem.experts, problem.routing, problem.d_output))

        def forward(x: Any, experts: Any, weights: Any) -> Any:
            given = dataclasses.replace(routing, **weights)
            extras = {"token_mask": problem.token_mask, "shared": to_jax(problem.shared)}
            found = moe_jax.moe(x, experts, given, problem.spec, **extras)
            return found.output, found

        output, pull, found = jax.vjp(forward, x, experts, _trained(routing), has_aux=True)
        d_x, d_experts, d_routing = pull(d_output.astype(output.dtype))
    found = {name: array for name, array in found._asdict().items() if array is not None} | {"output": output}
    found |= {"d_x": d_x} | {f"d_experts.{name}": array for name, array in named_fields(d_experts)}
    found |= {f"d_routing.{name}": array for name, array in d_routing.items()}
    return {name: np.asarray(array) for name, array in found.items()}


def run_group(problem: Problem, exchange: ExchangeSpec, engine: str = "reference", **options: Any) -> dict[str, Any]:
    """Every result of all ranks in NumPy, by the names of the twins; gradients of experts are of all experts, those of
    a router summed over ranks."""
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
        d_x, d_experts, d_routing = gradients
        results["d_x"] = np.asarray(d_x)
        for name, array in named_fields(d_experts):
            results[f"d_experts.{name}"] = gather_experts([np.asarray(array)], placement)
        results |= {f"d_routing.{name}": np.asarray(array) for name, array in d_routing.items()}
    return results


def require_same(found: np.ndarray, expected: np.ndarray, label: str) -> None:
    """Equal numbers, NaN where NaN is expected, of one dtype."""
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape), label
    np.testing.assert_array_equal(found.astype(np.float32), expected.astype(np.float32), label)


def compare_with_one_device(problem: Problem, exchange: ExchangeSpec, label: str, **options: Any) -> None:
    """Raise unless every result is the one of all tokens and experts on one device."""
    found, stages = run_group(problem, exchange, **options), problem.alone()
    alone = stages if (engine := options.get("engine")) is None else run_alone(problem, engine)
    require_same(found["output"], alone["output"], f"output, {label}")
    assert found["overflow"].tolist() == [0], label
    counts = found["tokens_per_expert"].reshape(-1, problem.placement.num_experts).sum(axis=0)
    np.testing.assert_array_equal(counts, alone["tokens_per_expert"], label)
    assert found["invalid_ids"].sum() == alone["invalid_ids"][0], label
    held, received = problem.placement.tables.expert_of_place, found["received_per_expert"]
    by_expert = np.bincount(held[held >= 0], received[held >= 0], problem.placement.num_experts)
    np.testing.assert_array_equal(by_expert, alone["tokens_per_expert"], label)
    if "d_x" not in found:
        return
    expected = problem.alone_backward(stages) if alone is stages else alone
    assert "d_x" in expected
    for name in expected:
        if name in ("d_x", "d_routing.weights") or name.startswith("d_experts."):
            require_same(found[name], expected[name], f"{name}, {label}")
        elif name.startswith("d_routing."):
            scale = np.abs(expected[name].astype(np.float32)).max() + 1e-3
            slack = (2e-6 if problem.x.dtype == np.float32 else 2e-2) * len(problem.x) * scale
            np.testing.assert_allclose(
                found[name].astype(np.float32), expected[name].astype(np.float32), 0, slack, err_msg=f"{name}, {label}"
            )


def compare_with_twin(problem: Problem, exchange: ExchangeSpec, label: str) -> int:
    """Raise unless the forward is the twin's, NaN and all; returns the overflow."""
    expected = twin(problem.ranks(), problem.spec, problem.placement, exchange)
    found = run_group(problem, exchange, differentiated=False)
    require_same(found["output"], np.concatenate([own.output for own in expected.outputs]), f"output, {label}")
    assert found["overflow"].tolist() == expected.overflow.tolist(), label
    return int(found["overflow"][0])
