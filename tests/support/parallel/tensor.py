"""Expert-parallel calls over two axes, experts and tensor, on the ranks of a pool."""

from __future__ import annotations

import contextlib
import datetime
import functools
from collections.abc import Iterator
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist

from moe_core.parallel import ExchangeSpec
from moe_core.parallel import tensor as slices
from moe_torch.parallel import ExpertParallel
from moe_torch.parallel import moe as parallel_moe
from moe_torch.parallel import tensor as module
from tests.support.parallel.grid import Grid
from tests.support.parallel.pool import GLOO_TIMEOUT, Pool
from tests.support.parallel.torch import poisoned, trained
from tests.support.torch import running_on, to_numpy, to_torch


class Axes(NamedTuple):
    """The groups of both axes of a grid of the first ranks, and this one's row and index."""

    experts: Any
    tensor: Any
    row: int
    index: int


@functools.cache
def axes(rows: int, size: int) -> Axes | None:
    """Those of a rank of the grid; None of others, which have to call it too."""
    timeout = datetime.timedelta(seconds=GLOO_TIMEOUT)
    row, index = divmod(dist.get_rank(), size)
    found: dict[str, Any] = {}
    for kind, number, count in (("experts", index, size), ("tensor", row, rows)):
        for other in range(count):
            members = range(other, rows * size, size) if kind == "experts" else range(other * size, (other + 1) * size)
            group = dist.new_group(list(members), timeout=timeout)
            if other == number:
                found[kind] = group
    return Axes(**found, row=row, index=index) if row < rows else None


@contextlib.contextmanager
def broken(fault: str | None) -> Iterator[None]:
    """A planted fault, by name."""
    if fault in (None, "without_tensor"):
        yield
        return
    owner, name = {
        "bias_added_twice": (module, "bias_once"),
        "parts_of_others": (module.TensorRanks, "pull"),
        "tokens_of_others": (module.TensorRanks, "push"),
        "part_left_out": (module.TensorRanks, "pull"),
        "halves_as_one": (slices, "cut_of"),
    }[fault]
    real = getattr(owner, name)

    def wrong(*arguments: Any, **options: Any) -> Any:
        if fault == "bias_added_twice":
            return arguments[0]
        found = real(*arguments, **options)
        if fault == "halves_as_one":
            return found and found._replace(parts=1)
        if fault == "part_left_out":
            found[-1] = 0
            return found
        return found.flip(1 if fault == "parts_of_others" else 0)

    targets = [mock.patch.object(owner, name, wrong)]
    if fault == "bias_added_twice":
        from moe_torch.parallel import forward

        targets.append(mock.patch.object(forward, name, wrong))
    with contextlib.ExitStack() as stack:
        for target in targets:
            stack.enter_context(target)
        yield


def run_rank(
    group: Any, grid: Grid, way: ExchangeSpec, engine: str, differentiated: bool, fault: str | None
) -> dict[str, Any]:
    """Every result and gradient of one rank, in NumPy, by the names of the twins."""
    rows = grid.problem.placement.num_ranks
    found_axes = axes(rows, grid.size)
    if found_axes is None:
        return {}
    experts_axis, tensor_axis, row, index = found_axes
    problem = grid.problem
    engines = contextlib.nullcontext() if engine == "cuda" else running_on(engine)
    device = torch.device("cuda", torch.cuda.current_device()) if engine == "cuda" else "cpu"
    with engines, poisoned(), broken(fault):
        own = grid.ranks()[row][index]
        given: Any = (own.x, own.experts, own.routing, own.token_mask, grid.gradients()[row][index].output, own.shared)
        x, experts, routing, mask, d_output, shared = to_torch(given, device)
        leaves = {}
        if differentiated:
            leaves = {"x": x.requires_grad_()}
            for prefix, bundle in (("experts", experts), ("routing", routing), ("shared", shared)):
                leaves |= {f"{prefix}.{name}": array for name, array in trained(bundle).items()}
        over: Any = {"tensor": tensor_axis, "tensor_tokens": grid.tokens} if fault != "without_tensor" else {}
        # Of all ranks of the axis, which is more than any of them has.
        parallel = ExpertParallel(experts_axis, way, max(problem.tokens) + 1, **over)
        options: Any = {"parallel": parallel, "placement": problem.placement, "token_mask": mask, "shared": shared}
        found = parallel_moe(x, experts, routing, problem.spec, **options)
        if differentiated:
            found.output.backward(d_output.to(found.output.dtype))
        results = {name: to_numpy(array) for name, array in found._asdict().items() if array is not None}
        return results | {f"d_{name}": to_numpy(array.grad) for name, array in leaves.items()}


def run_grid(
    pool: Pool,
    grid: Grid,
    way: ExchangeSpec,
    engine: str = "reference",
    *,
    differentiated: bool = True,
    fault: str | None = None,
) -> list[dict[str, Any]]:
    """Of every rank, row by row."""
    count = grid.problem.placement.num_ranks * grid.size
    return pool.call(run_rank, [(grid, way, engine, differentiated, fault)] * len(pool.processes))[:count]
