"""One rank of the benchmark of expert parallelism: it measures cells, all ranks the same one at a time."""

from __future__ import annotations

import dataclasses
import gc
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import moe_torch
from benchmarks.draws import draw_logits
from benchmarks.parallel_cell import Cell
from benchmarks.record import reason_of
from benchmarks.shapes import Shape
from benchmarks.weights import draw_weights
from moe_core.parallel import Placement, plan_exchange
from moe_core.specs.moe import MoESpec
from moe_core.specs.operands import (
    ExpertWeights,
    RouterLogits,
    SharedExpert,
    TopK,
    map_arrays,
)
from moe_core.specs.tuning import Tuning
from moe_torch.parallel import ExpertParallel
from moe_torch.parallel.forward import moe
from moe_torch.parallel.owner import owner_spec

_FLUSH_BYTES, _FEWEST, _MOST = 256 * 2**20, 5, 30
#: Flushes of the cache before a call: while they run, the hosts of all ranks get ahead. Of few tokens a rank whose host
#: is late would be measured as the exchange.
_FLUSHES = 4
#: How far an output that is not one device's may be from it, relative to its norm.
_NEAR = 0.05


class Bench:
    """A rank, with the weights of the shape at hand and what has been timed of it: of one device, and of NCCL."""

    def __init__(self, device: torch.device, seed: int, seconds: float) -> None:
        self.device, self.seed, self.seconds = device, seed, seconds
        self.group: Any = dist.group.WORLD
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.shape: Shape | None = None
        self.weights: Any = None
        self.known: dict[Any, dict[str, Any]] = {}
        self._flush = torch.empty(_FLUSH_BYTES if self.is_gpu else 1, dtype=torch.uint8, device=device)
        self._mark = torch.zeros(1, device=device)

    @property
    def is_gpu(self) -> bool:
        return self.device.type == "cuda"

    def measure(self, cell: Cell) -> dict[str, Any]:
        """This rank's figures: lists of microseconds, one for each repeat, and numbers."""
        try:
            with torch.set_grad_enabled(cell.training):
                self.take(cell.shape)
                return self._measure(cell)
        finally:
            self.free()

    def take(self, shape: Shape) -> None:
        """Draw the weights of a shape: every rank has all of them, for the times of one device."""
        if shape != self.shape:
            self.shape = self.weights = None
            self.known = {}
            self.free()
            generator = torch.Generator(self.device).manual_seed(self.seed)
            with torch.no_grad():
                self.weights, self.shape = draw_weights(shape, generator), shape

    def free(self) -> None:
        gc.collect()
        if self.is_gpu:
            torch.cuda.empty_cache()

    def _measure(self, cell: Cell) -> dict[str, Any]:
        problem = _Problem(self, cell)
        found: dict[str, Any] = {}
        y = problem.together()
        assert int(y.overflow) == 0, "a routing of distinct ids fits"
        same = torch.tensor([int(problem.agrees(y.output))], device=self.device)
        dist.all_reduce(same, dist.ReduceOp.MIN)
        if not same.item():
            raise AssertionError("parity is red: the output of a rank differs from one device's")
        del y
        key = cell.tokens, cell.training
        if key not in self.known:
            self.known[key] = self._one_device(problem)
        found |= self.known[key]
        found["us"] = self.times(problem.step(problem.together))
        found |= problem.memory()
        if self.is_gpu and cell.mode != "all_to_all" and not cell.training:
            try:
                found["graph_us"] = self.graph_times(problem.together)
            except RuntimeError as error:
                found["not_captured"] = reason_of(error)
        return found

    def _one_device(self, problem: _Problem) -> dict[str, Any]:
        """Figures that all modes share: one device's, the owner's products alone, and the framework's all-to-all."""
        found: dict[str, Any] = {"alone_us": self.times(problem.step(problem.alone))}
        if self.is_gpu and not problem.cell.training:
            found["alone_graph_us"] = self.graph_times(problem.alone)
        found["experts_us"] = self.times(problem.step(problem.owner_call()))
        send, sent, received = problem.plain_all_to_all()
        into = send.new_empty(sum(received), send.shape[1])
        found["plain_us"] = self.times(lambda: dist.all_to_all_single(into, send, received, sent))
        found["received_slots"] = sum(received)
        found["plain_bytes"] = (sum(sent) - sent[self.rank]) * send.shape[1] * send.itemsize
        return found

    def times(self, call: Callable[[], Any]) -> list[float]:
        """Microseconds of calls that all ranks begin together, after a flush of the cache, the host being ahead."""
        first = [self._time(call) for _ in range(2)][-1]
        # Calls may hold collectives, so every rank makes as many.
        slowest = torch.tensor([first], dtype=torch.float64, device=self.device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        repeats = int(min(_MOST, max(_FEWEST, self.seconds * 1e6 / slowest.item())))
        return [self._time(call) for _ in range(repeats)]

    def graph_times(self, call: Callable[[], Any]) -> list[float]:
        """`times` of replays of a CUDA graph of one call."""
        call()
        torch.cuda.synchronize()
        # A capture cannot give back what calls before it kept.
        self.free()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        try:
            return self.times(graph.replay)
        finally:
            graph.reset()

    def _time(self, call: Callable[[], Any]) -> float:
        if not self.is_gpu:
            dist.barrier()
            start = time.perf_counter()
            call()
            return (time.perf_counter() - start) * 1e6
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        for _ in range(_FLUSHES):
            self._flush.zero_()
        dist.all_reduce(self._mark)
        start.record()
        call()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e3


class _Problem:
    """The arrays of one cell on one rank."""

    def __init__(self, bench: Bench, cell: Cell) -> None:
        self.bench, self.cell, shape = bench, cell, cell.shape
        self.placement = Placement.linear(shape.num_experts, bench.size)
        self.exchange = cell.exchange
        self.parallel = ExpertParallel(bench.group, self.exchange, max(1, cell.tokens))
        self.spec = MoESpec(shape.activation, shape.router, shape.weight_layout)
        first = bench.rank * self.placement.per_rank
        first_expert = {"gate_up": bench.weights.gate_up[0], "down": bench.weights.down[0]}
        self.shared = SharedExpert(**first_expert) if cell.shared else None
        self.own = map_arrays(bench.weights, lambda array: array[first : first + self.placement.per_rank])
        generator = torch.Generator(bench.device).manual_seed(bench.seed + 1 + bench.rank)
        size = (cell.tokens, shape.d_model)
        self.x = torch.randn(size, generator=generator, device=bench.device, dtype=torch.bfloat16)
        logits = [draw_logits("balanced", cell.tokens, shape.num_experts, bench.seed + n) for n in range(bench.size)]
        top = np.argpartition(-np.stack(logits), shape.top_k - 1, axis=2)[:, :, : shape.top_k]
        ids, owners = top // self.placement.per_rank, np.arange(bench.size)
        #: Slots, and tokens that have any, from every home to every owner.
        self.slots = (ids[..., None] == owners).sum(axis=(1, 2))
        self.tokens = (ids[..., None] == owners).any(axis=2).sum(axis=1)
        self.logits = torch.from_numpy(logits[bench.rank]).to(bench.device)
        self.d_output = torch.randn(size, generator=generator, device=bench.device, dtype=torch.bfloat16)

    def together(self) -> Any:
        """The expert-parallel forward."""
        given = self._leaves(self.own)
        options: dict[str, Any] = {"parallel": self.parallel, "placement": self.placement, "shared": given["shared"]}
        return moe(given["x"], given["experts"], RouterLogits(given["logits"]), self.spec, **options)

    def alone(self, *, as_in_a_group: bool = False) -> Any:
        """This rank's tokens on one device that has all experts; as_in_a_group: in the order of sums of all tokens."""
        given, spec = self._leaves(self.bench.weights), self.spec
        if as_in_a_group:
            spec = self.group_spec
        return moe_torch.moe(given["x"], given["experts"], RouterLogits(given["logits"]), spec, shared=given["shared"])

    def agrees(self, output: torch.Tensor) -> bool:
        """Whether it is the output of one device, bit by bit where the plan promises that."""
        alone = self.alone(as_in_a_group=True).output
        # BLAS adds up one row in another order than several.
        if self._plan().exact and (self.bench.is_gpu or self.exchange.chunks == 1):
            return torch.equal(output, alone)
        return bool((output.float() - alone.float()).norm() <= _NEAR * alone.float().norm())

    def owner_call(self) -> Callable[..., Any]:
        """The products of the slots that this rank receives, without messages."""
        count, device = int(self.slots[:, self.bench.rank].sum()), self.bench.device
        rows = torch.randn(count, self.cell.shape.d_model, device=device, dtype=torch.bfloat16)
        ids = torch.arange(count, dtype=torch.int32, device=device)[:, None] % self.placement.per_rank
        routing, spec = TopK(ids, torch.ones(count, 1, device=device)), self.owner_spec

        def call() -> Any:
            x = rows.detach().requires_grad_() if self.cell.training else rows
            return moe_torch.moe(x, self._leaves(self.own)["experts"], routing, spec)

        return call

    @property
    def group_spec(self) -> MoESpec:
        """The options of one device with the tokens of all ranks."""
        return dataclasses.replace(self.spec, tuning=Tuning(expected_tokens=self.bench.size * self.cell.tokens))

    @property
    def owner_spec(self) -> MoESpec:
        return owner_spec(self.spec, self.bench.size * self.cell.tokens * self.cell.shape.top_k, self.placement)

    def _leaves(self, experts: ExpertWeights) -> dict[str, Any]:
        """x, logits and experts, which ask for gradients where a step is trained."""

        def leaf(array: torch.Tensor) -> torch.Tensor:
            return array.detach().requires_grad_() if self.cell.training else array

        shared = self.shared and map_arrays(self.shared, leaf)
        return {"x": leaf(self.x), "logits": leaf(self.logits), "experts": map_arrays(experts, leaf), "shared": shared}

    def step(self, forward: Callable[..., Any]) -> Callable[[], Any]:
        """What is timed: a forward, and its backward where a step is trained."""
        if not self.cell.training:
            return forward

        def step() -> None:
            output = forward().output
            rows = self.d_output if len(output) == len(self.d_output) else torch.ones_like(output)
            output.backward(rows)

        return step

    def plain_all_to_all(self) -> tuple[torch.Tensor, list[int], list[int]]:
        """Rows of this rank's slots, how many go to every rank, and how many come."""
        rank = self.bench.rank
        rows = self.x.new_zeros(self.cell.tokens * self.cell.shape.top_k, self.cell.shape.d_model)
        return rows, self.slots[rank].tolist(), self.slots[:, rank].tolist()

    def memory(self) -> dict[str, Any]:
        """Bytes that a call sends, and those that it takes at its peak beside its arguments."""
        found: dict[str, Any] = {"link_bytes": self._link_bytes()}
        if self.bench.is_gpu:
            self.bench.free()
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            self.step(self.together)()
            torch.cuda.synchronize()
            found["peak_bytes"] = torch.cuda.max_memory_allocated() - before
        return found

    def _plan(self) -> Any:
        sizes = self.cell.tokens, self.cell.shape.top_k, self.cell.shape.d_model, "bfloat16"
        return plan_exchange(*sizes, self.placement, self.exchange, training=self.cell.training)

    def _link_bytes(self) -> int:
        """Bytes of rows that this rank sends to others in a forward: tokens or slots out, results back."""
        rank, size = self.bench.rank, self.bench.size
        bounds, row = self._plan().bounds, self.cell.shape.d_model * 2
        if bounds.block is not None and bounds.back is not None:
            return (size - 1) * (bounds.block + bounds.back) * row
        out = self.slots if self.cell.rows == "slots" else self.tokens
        away, sent = np.arange(size) != rank, row
        if self.exchange.format is not None:
            sent = self.cell.shape.d_model + 4 * -(-self.cell.shape.d_model // 128)
        return int(out[rank, away].sum() * sent + self.slots[away, rank].sum() * row)
