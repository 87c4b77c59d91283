"""Expert-parallel calls over two axes, experts and tensor, on JAX's host devices."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from moe_core.parallel import ExchangeSpec
from moe_core.parallel.tensor import cut_of
from moe_core.specs.operands import named_fields
from moe_jax import parallel
from moe_jax.parallel.forward import Group, run
from tests.support.jax import running_on, to_jax
from tests.support.parallel.grid import Grid
from tests.support.parallel.jax import trained

_BOTH, _SLICES, _WHOLE = P(("ep", "tp")), P("tp", "ep"), P("ep")


def run_grid(
    grid: Grid, way: ExchangeSpec, engine: str = "reference", *, platform: str = "cpu", tensor_axis: str = "tp"
) -> list[dict[str, Any]]:
    """Every result and gradient of every rank, row by row, by the names of the twins; but for gradients of a router and
    a shared expert, which are sums over all ranks."""
    problem, ranks = grid.problem, grid.ranks()
    rows, size, spec, placement = problem.placement.num_ranks, grid.size, problem.spec, problem.placement
    fields: dict[str, Any] = {}
    for name, _ in named_fields(ranks[0][0].experts):
        slices = [np.concatenate([getattr(row[index].experts, name) for row in ranks]) for index in range(size)]
        fields[name] = np.stack(slices) if cut_of(name, *grid.layouts()) else slices[0]
    experts = dataclasses.replace(ranks[0][0].experts, **fields)
    of_experts = dataclasses.replace(
        experts, **{name: _SLICES if cut_of(name, *grid.layouts()) else _WHOLE for name in fields}
    )
    of_routing = _BOTH if spec.router is None else P()
    mask = problem.token_mask if problem.token_mask is not None else np.ones(len(problem.x), bool)

    def own(experts: Any) -> Any:
        return dataclasses.replace(
            experts, **{name: one[0] if cut_of(name, *grid.layouts()) else one for name, one in named_fields(experts)}
        )

    def step(x: Any, experts: Any, routing: Any, mask: Any, d_output: Any, shared: Any) -> Any:
        def forward(x: Any, experts: Any, weights: Any, shared: Any) -> Any:
            given, group = dataclasses.replace(routing, **weights), Group("ep", placement, way, tensor_axis)
            found = run(x, own(experts), given, spec, group, mask, shared)
            return found.output, found

        output, pull, found = jax.vjp(forward, x, experts, trained(routing), shared, has_aux=True)
        return found._replace(output=output), pull(d_output.astype(output.dtype))

    outputs = parallel.ParallelOutput(
        *(P("tp") if name == "overflow" else _BOTH for name in parallel.ParallelOutput._fields)
    )
    mesh = jax.make_mesh(
        (rows, size), ("ep", "tp"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices(platform)[: rows * size]
    )
    call = jax.shard_map(
        step,
        mesh=mesh,
        in_specs=(_BOTH, of_experts, of_routing, _BOTH, _BOTH, P()),
        out_specs=(outputs, (_BOTH, of_experts, of_routing, P())),
    )
    with running_on(engine):
        given = to_jax((problem.x, experts, problem.routing, mask, problem.d_output, problem.shared))
        found, (d_x, d_experts, d_routing, _) = jax.jit(call)(*given)
    whole = {name: np.asarray(one) for name, one in found._asdict().items() if one is not None} | {
        "d_x": np.asarray(d_x)
    }
    if spec.router is None:
        whole |= {f"d_routing.{name}": np.asarray(one) for name, one in d_routing.items()}
    results = []
    for row in range(rows):
        for index in range(size):
            number, mine = row * size + index, {}
            for name, one in whole.items():
                mine[name] = one[index : index + 1] if name == "overflow" else np.split(one, rows * size)[number]
            for name, one in named_fields(d_experts):
                one = one[index] if cut_of(name, *grid.layouts()) else one
                mine[f"d_experts.{name}"] = np.split(np.asarray(one), rows)[row]
            results.append(mine)
    return results
