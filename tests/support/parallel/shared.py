"""Ranks that are processes with shared memory: each stores and loads at the others' blocks, at addresses of its own."""

from __future__ import annotations

import multiprocessing
import os
import time
from multiprocessing.shared_memory import SharedMemory
from typing import Any, NamedTuple

import numpy as np

from moe_core.base.arrays import ArraySpec, host_array
from moe_core.base.target import Target
from moe_core.ops.exchange.operands import Places
from moe_core.ops.exchange.push import plan_combine_push, plan_dispatch_push, plan_push_counts, plan_push_slots
from moe_core.ops.exchange.tables import plan_peer_places
from moe_core.ops.reduction.reference import reduce
from moe_core.ops.routing.reference import layout_of_runs
from moe_core.plan.steps import LaunchPlan
from moe_core.specs.operands import MoEOperands, TopK
from tests.support.harness import run_plan, spec_of
from tests.support.parallel.twin.arithmetic import physical_ids, sends
from tests.support.parallel.twin.ranks import _at_owner, numpy_forward
from tests.support.parallel.twins import Problem

#: Seconds until a barrier counts as hanging.
TIMEOUT = 120


class Block(NamedTuple):
    """Memory of a rank, as `run_plan` wants to know it."""

    name: str
    address: int
    span: int
    image: np.ndarray

    def check(self, image: np.ndarray) -> None:
        """Blocks have no guard zones."""


class Rank:
    """A rank's view of all blocks. shapes: of the arrays of a block by name, in order, with their dtypes."""

    def __init__(self, rank: int, blocks: list[SharedMemory], shapes: dict[str, tuple[tuple[int, ...], str]]) -> None:
        self.rank, self.specs = rank, {name: ArraySpec(*one) for name, one in shapes.items()}
        images = [np.ndarray((block.size,), np.uint8, block.buf) for block in blocks]
        self.blocks = [Block(f"rank {rank}", own.ctypes.data, own.size, own) for rank, own in enumerate(images)]
        sizes = [-(-spec.nbytes // 16) * 16 for spec in self.specs.values()]
        self.offsets = dict(zip(self.specs, np.cumsum([0, *sizes]).tolist(), strict=False))

    def at(self, name: str) -> np.ndarray:
        return np.array([block.address + self.offsets[name] for block in self.blocks], np.int64)

    def own(self, name: str) -> np.ndarray:
        return host_array(self.blocks[self.rank].address + self.offsets[name], self.specs[name])

    def run(self, plan: LaunchPlan, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return run_plan(plan, arrays, others=self.blocks)  # pyright: ignore[reportArgumentType]


def _forward(rank: Rank, problem: Problem, num_rows: int, wait: Any, target: Target) -> np.ndarray:
    """The output of a rank's tokens."""
    number, operands = rank.rank, problem.ranks()[rank.rank]
    assert isinstance(operands.routing, TopK)
    first = sum(problem.tokens[:number])
    ids = physical_ids(operands.routing.ids, problem.placement, first_token=first).places
    layout = sends(ids, problem.placement.num_places)
    arrays = {"counts": layout.group_sizes, "counts_at": rank.at("counts")}
    rank.run(plan_push_counts(*map(spec_of, arrays.values()), target, rank=number), arrays)
    wait()
    arrays = {"ids": ids, "group_start": layout.group_start, "row_of_slot": layout.row_of_slot}
    arrays["counts"] = rank.own("counts")
    plan = plan_peer_places(*map(spec_of, arrays.values()), target, rank=number, receive=num_rows)
    found = rank.run(plan, arrays)
    places = {name: found[name] for name in ("owners", "rows")}
    arrays = {"x": operands.x, **places, "rows_at": rank.at("rows")}
    at = Places(*map(spec_of, places.values()))
    rank.run(plan_dispatch_push(spec_of(operands.x), at, spec_of(rank.at("rows")), target, num_rows=num_rows), arrays)
    arrays = {"weights": operands.routing.weights, **places}
    arrays |= {"weights_at": rank.at("weights"), "sources_at": rank.at("sources")}
    specs = {name: spec_of(array) for name, array in arrays.items() if name not in places}
    rank.run(plan_push_slots(**specs, places=at, target=target, rank=number, num_rows=num_rows), arrays)
    wait()
    local_ids, _, group_start, *_ = layout_of_runs(found["received"], num_rows=num_rows)
    arrived = int(group_start[-1])
    routing = TopK(local_ids[:arrived], rank.own("weights")[:arrived])
    received = MoEOperands(rank.own("rows")[:arrived].copy(), operands.experts, routing)
    rank.own("results")[:arrived] = numpy_forward(received, _at_owner(problem.spec))["matmul2"]
    num_slots = rank.specs["slots"].shape[0]
    arrays = {"y": rank.own("results"), "sources": rank.own("sources"), "group_start": group_start}
    arrays["slots_at"] = rank.at("slots")
    rank.run(plan_combine_push(*map(spec_of, arrays.values()), target, num_slots=num_slots), arrays)
    wait()
    order = places["rows"]
    output = reduce(rank.own("slots")[: order.size], order.reshape(-1), top_k=order.shape[1], order="slot")
    wait()
    return output


def _serve(number: int, problem: Problem, num_rows: int, kind: str, names: list[str], barrier: Any, pipe: Any) -> None:
    blocks = [SharedMemory(name) for name in names]
    rank = Rank(number, blocks, shapes_of(problem, num_rows))

    def wait() -> None:
        barrier.wait(TIMEOUT)

    found = []
    for turn in range(2):
        # Nobody stores before all are ready; the first and the last rank are late by turns.
        rank.blocks[number].image[:] = 0xFF
        wait()
        time.sleep(0.05 * ((number + turn) % 2))
        found.append(_forward(rank, problem, num_rows, wait, Target(kind)))
    pipe.send(found)
    pipe.close()
    # Views of the blocks are alive, and the parent removes them.
    os._exit(0)


def shapes_of(problem: Problem, num_rows: int) -> dict[str, tuple[tuple[int, ...], str]]:
    """The arrays of a block."""
    placement, (width, dtype) = problem.placement, (problem.x.shape[1], problem.x.dtype.name)
    slots = max(problem.tokens) * problem.routing.ids.shape[1]
    return {
        "counts": ((placement.num_ranks, placement.num_places), "int32"),
        "rows": ((num_rows, width), dtype),
        "weights": ((num_rows, 1), "float32"),
        "sources": ((num_rows, 2), "int32"),
        "results": ((num_rows, width), dtype),
        "slots": ((slots, width), dtype),
    }


def forward_on_processes(problem: Problem, num_rows: int, kind: str) -> list[list[np.ndarray]]:
    """Of every rank, a process each, its output, twice. kind: of the target."""
    context, ranks = multiprocessing.get_context("forkserver"), problem.placement.num_ranks
    # Forks of a process that has imported everything and has run nothing.
    context.set_forkserver_preload(["tests.support.parallel.shared"])
    size = sum(ArraySpec(*one).nbytes + 16 for one in shapes_of(problem, num_rows).values())
    blocks = [SharedMemory(create=True, size=size) for _ in range(ranks)]
    barrier, found, started = context.Barrier(ranks), [], []
    try:
        for number in range(ranks):
            ours, theirs = context.Pipe()
            arguments = (number, problem, num_rows, kind, [block.name for block in blocks], barrier, theirs)
            process = context.Process(target=_serve, args=arguments)
            process.start()
            theirs.close()
            started.append((process, ours))
        for _, pipe in started:
            assert pipe.poll(TIMEOUT), "a rank hangs"
            found.append(pipe.recv())
        return found
    finally:
        for process, _ in started:
            process.join(1)
            process.kill()
        for block in blocks:
            block.close()
            block.unlink()
