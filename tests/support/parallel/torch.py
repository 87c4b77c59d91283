"""Expert-parallel calls on gloo ranks, and what they are compared with."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch.distributed.device_mesh import DeviceMesh

import moe_torch
from moe_core.formats import format_named
from moe_core.ops.quantize.reference import quantize_rows
from moe_core.parallel import ExchangeSpec
from moe_core.parallel.placement import Placement, gather_experts
from moe_core.specs.operands import MoEOperands, map_arrays, named_fields
from moe_torch.parallel import ExpertParallel, group, routes
from moe_torch.parallel import moe as parallel_moe
from moe_torch.parallel.calls import counted
from moe_torch.parallel.calls.compiled import Calls, across_ranks, traceable
from moe_torch.parallel.forward import called
from tests.support.modular.deep_ep import Buffer, ElasticBuffer
from tests.support.parallel.peer import (
    CHUNK_FAULTS,
    DIRECT_FAULTS,
    PEER_FAULTS,
    broken_direct,
    broken_peer,
    poisoned_peer,
)
from tests.support.parallel.pool import Pool
from tests.support.parallel.twins import Problem
from tests.support.parallel.ways import require_one_device, require_twin
from tests.support.torch import running_on, to_numpy, to_torch

#: Gradients of what every rank has a part of.
_SUMMED = ("d_routing.weight", "d_routing.bias", "d_shared.")


def parallel_of(group: Any, way: ExchangeSpec, problem: Problem) -> ExpertParallel:
    """Of a call; where memory is made ahead, for more tokens than any rank has."""
    mesh = group if way.hosts == 1 else mesh_of_hosts(way.hosts)
    buffer = None
    if way.other:
        # In turn the newest generation and the one before.
        most = max(problem.tokens) * 8 + 1
        buffer = ElasticBuffer(group, most) if sum(problem.tokens) % 2 else Buffer(group)
    return ExpertParallel(mesh, way, max(problem.tokens) + 1 if way.mode == "peer" else None, buffer=buffer)


@functools.cache
def mesh_of_hosts(hosts: int) -> DeviceMesh:
    """All ranks on so many hosts, as which they pretend to be."""
    ranks = torch.arange(torch.distributed.get_world_size()).view(hosts, -1)
    kind = "cuda" if torch.distributed.get_backend() == "nccl" else "cpu"
    return DeviceMesh(kind, ranks, mesh_dim_names=("host", "local"))


def rounded_to_fp8(x: np.ndarray) -> np.ndarray:
    """Rows as they are once they have travelled in e4m3 with a scale for each 128 columns."""
    codes, scales = quantize_rows(x, format=format_named("fp8_group"))
    return (codes.astype(np.float32) * np.repeat(scales, 128, axis=1)[:, : x.shape[1]]).astype(x.dtype)


def mesh_of(group: Any) -> DeviceMesh:
    """The ranks of a group as the axis of a mesh."""
    return DeviceMesh.from_group(group, "cpu", mesh_dim_names=("ep",))


@contextlib.contextmanager
def poisoned() -> Iterator[None]:
    """Memory that messages are received into holds NaN, and -1 in integers."""
    real = group.buffer

    def filled(*arguments: Any) -> torch.Tensor:
        found = real(*arguments)
        return found.fill_(torch.nan if found.is_floating_point() else -1)

    with mock.patch.object(group, "buffer", filled), poisoned_peer():
        yield


def trained(bundle: Any) -> dict[str, torch.Tensor]:
    """The arrays of a bundle, or of None, that have gradients."""
    if bundle is None:
        return {}
    return {
        name: array.requires_grad_() for name, array in named_fields(bundle) if name not in ("ids", "correction_bias")
    }


@contextlib.contextmanager
def broken(fault: str | None) -> Iterator[None]:
    """A planted fault, by name."""
    if fault is None or fault in (*PEER_FAULTS, *DIRECT_FAULTS, *CHUNK_FAULTS, "weight_gradient_of_another"):
        yield
        return
    owner, name = {
        "wrong_place": (routes.RoutesPlanner, "tables"),
        "wrong_rows": (routes.RoutesPlanner, "tables"),
        "other_owner": (routes, "placement_tables"),
        "permuted_weights": (routes.RoutesPlanner, "received"),
        "counts_off_by_one": (counted.Counted, "counted"),
        "slots_not_in_order": (routes.CollectiveRoutes, "start_total"),
        "gradient_not_returned": (routes.CollectiveRoutes, "gradients"),
        "output_gradient_of_another": (routes.CollectiveRoutes, "start_push"),
    }[fault]
    real = getattr(owner, name)

    def wrong(*arguments: Any, **options: Any) -> Any:
        if fault == "counts_off_by_one":
            own, tables, counts, *rest = arguments
            head, behind = counts.tensor_split([counted._HEADER], dim=-1)
            return real(own, tables, torch.cat([head, (behind - 1).clamp(min=0)], -1), *rest)
        if fault == "slots_not_in_order":
            own, *rest = arguments
            order = own.at_home.row_of_slot.view(own.plan.tokens, -1).flip(1).reshape(-1)
            layout = dataclasses.replace(own.at_home, row_of_slot=order)
            return real(dataclasses.replace(own, at_home=layout), *rest)
        if fault == "output_gradient_of_another":
            own, values, what = arguments
            return real(own, values.flip(0) if what == "d_output" else values, what)
        found = real(*arguments, **options)
        if fault == "wrong_place":
            return found._replace(row_of_slot=found.row_of_slot.flip(0))
        if fault == "wrong_rows":
            return found._replace(slot_of_row=found.slot_of_row.roll(1))
        if fault == "other_owner":
            return found[0] ^ 1, found[1]
        if fault == "permuted_weights":
            return [found[0], found[1].flip(0), *found[2:]]
        return found._replace(rows=found.rows.flip(0))

    with mock.patch.object(owner, name, wrong):
        yield


def run_rank(
    ranks: Any,
    problem: Problem,
    way: ExchangeSpec,
    engine: str,
    differentiated: bool,
    fault: str | None,
    traced: bool = False,
) -> dict[str, Any]:
    """Every result and gradient of one rank, in NumPy, by the names of the twins. traced: by the operator of traced
    code."""
    rank = torch.distributed.get_rank(ranks)
    own = problem.ranks()[rank]
    # A rank's GPU is its current one.
    engines = contextlib.nullcontext() if engine == "cuda" else running_on(engine)
    device = torch.device("cuda", torch.cuda.current_device()) if engine == "cuda" else "cpu"
    planted: Any = broken_peer if differentiated else broken_direct
    planted = planted if way.mode == "peer" else contextlib.nullcontext
    # Without gradients chunks run side by side; one chunk takes the way of a call whose arguments ask for none.
    recorded = torch.set_grad_enabled(differentiated or way.chunks == 1)
    with engines, recorded, poisoned(), broken(fault), planted(fault):
        given: Any = (own.x, own.experts, own.routing, own.token_mask, problem.gradients()[rank].output, own.shared)
        x, experts, routing, mask, d_output, shared = to_torch(given, device)
        leaves = {}
        if differentiated:
            leaves = {"x": x.requires_grad_()}
            leaves |= {f"experts.{name}": array for name, array in trained(experts).items()}
            leaves |= {f"routing.{name}": array for name, array in trained(routing).items()}
            leaves |= {f"shared.{name}": array for name, array in trained(shared).items()}
        parallel = parallel_of(ranks, way, problem)
        operands = MoEOperands(x, experts, routing, mask, None, shared)
        assert traceable(operands, parallel, problem.placement) or not traced
        run = across_ranks if traced else called
        found = run(operands, problem.spec, parallel, problem.placement, Calls())
        if differentiated:
            found.output.backward(d_output.to(found.output.dtype))
        results = {name: to_numpy(array) for name, array in found._asdict().items() if array is not None}
        return results | {f"d_{name}": to_numpy(array.grad) for name, array in leaves.items()}


def parallel_call(
    ranks: Any, options: dict[str, Any], problem: Problem, changes: Mapping[str, Any] | None = None
) -> tuple[str, str]:
    """What a call with other options of ExpertParallel, another placement or changed fields of a rank's routing raises:
    its class and text."""
    options = dict(options)
    own = problem.ranks()[torch.distributed.get_rank(ranks)]
    placement = options.pop("placement", problem.placement)
    try:
        parallel = ExpertParallel(ranks, **options)
        changes = dict(changes or {})
        x, spec = changes.pop("x", own.x), changes.pop("spec", problem.spec)
        routing = dataclasses.replace(own.routing, **changes)
        # As they are in memory.
        x = torch.from_numpy(x)
        routing = map_arrays(routing, lambda array: array if array is None else torch.from_numpy(array))
        experts = to_torch(own.experts)
        parallel_moe(x, experts, routing, spec, parallel=parallel, placement=placement)
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


def run_group(
    pool: Pool,
    problem: Problem,
    exchange: ExchangeSpec,
    engine: str = "reference",
    *,
    differentiated: bool = True,
    fault: str | None = None,
    traced: bool = False,
) -> dict[str, Any]:
    """Of all ranks: by token, by place, or summed; gradients of experts are of all experts."""
    arguments = (problem, exchange, engine, differentiated, fault, traced)
    ranks = pool.call(run_rank, [arguments] * problem.placement.num_ranks)
    return of_all_ranks(ranks, problem.placement)


def of_all_ranks(ranks: Sequence[dict[str, Any]], placement: Placement) -> dict[str, Any]:
    """See `run_group`."""
    results = {}
    for name in ranks[0]:
        parts = [rank[name] for rank in ranks]
        if name.startswith("d_experts."):
            results[name] = gather_experts(parts, placement)
        elif name.startswith(_SUMMED) and name != "d_routing.weights":
            results[name] = np.sum([part.astype(np.float32) for part in parts], axis=0)
        elif name == "overflow":
            assert len({part.item() for part in parts}) == 1, "ranks disagree about the overflow"
            results[name] = parts[0]
        else:
            results[name] = np.concatenate(parts)
    return results


def run_alone(problem: Problem, engine: str) -> dict[str, np.ndarray]:
    """Output and gradients of all tokens and experts, by `moe_torch.moe` on an engine."""
    with running_on(engine) as device:
        given: Any = (problem.x, problem.experts, problem.routing, problem.token_mask, problem.d_output, problem.shared)
        x, experts, routing, mask, d_output, shared = to_torch(given, device)
        leaves = {"x": x.requires_grad_()}
        leaves |= {f"experts.{name}": array for name, array in trained(experts).items()}
        leaves |= {f"routing.{name}": array for name, array in trained(routing).items()}
        leaves |= {f"shared.{name}": array for name, array in trained(shared).items()}
        output = moe_torch.moe(x, experts, routing, problem.spec, token_mask=mask, shared=shared).output
        output.backward(d_output.to(output.dtype))
        return {"output": to_numpy(output)} | {f"d_{name}": to_numpy(array.grad) for name, array in leaves.items()}


def compare_with_one_device(pool: Pool, problem: Problem, exchange: ExchangeSpec, label: str, **options: Any) -> None:
    """`require_one_device` of a group's results, and of the same engine on one device."""
    alone = run_alone(problem, options["engine"]) if "engine" in options else None
    require_one_device(run_group(pool, problem, exchange, **options), problem, alone, label)


def compare_with_twin(pool: Pool, problem: Problem, exchange: ExchangeSpec, label: str) -> int:
    """`require_twin` of a group's forward."""
    return require_twin(run_group(pool, problem, exchange, differentiated=False), problem, exchange, label)
