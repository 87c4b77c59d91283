"""Uses of expert parallelism beyond one forward: hosts, micro-batches, adapters, and training with FSDP2.

    torchrun --nproc-per-node 4 -m benchmarks.parallel_uses --parts hosts,batches,adapters --output uses.json
    torchrun --nproc-per-node 4 -m benchmarks.parallel_uses --parts training --checkpoint folder --output uses.json
    torchrun --nproc-per-node 2 -m benchmarks.parallel_uses --parts resumed --checkpoint folder --output uses.json

Every row says if its bits are one device's; times are medians of the slowest rank. See benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import moe_torch
from benchmarks.options import chosen_names, numbers_of_tokens
from benchmarks.parallel_cell import Cell, Setting
from benchmarks.parallel_rank import Bench, _Problem
from benchmarks.parallel_serve import joined
from benchmarks.provenance import provenance
from benchmarks.shapes import ALL_SHAPES, Shape
from moe_core.parallel import ExchangeSpec, Placement
from moe_core.specs.operands import LoRAFactors, TopK, map_arrays
from moe_core.specs.tuning import Tuning
from moe_torch import MoE
from moe_torch.parallel import ExpertParallel, clip_grad_norm_, combine, dispatch, moe, parallelize

_dcp: Any = checkpoint
_TINY = Shape("tiny", 64, 32, 8, 2, ALL_SHAPES["qwen3"].activation, False)
#: Parts of a batch, at least one for each rank, micro-batches of each part, steps, and the step that is saved.
PARTS, MICRO, STEPS, SAVED = 4, 2, 8, 4
#: Below the norm of gradients of every shape.
CLIP = 0.01
_ADAPTERS, _RANK = 8, 16
Row = dict[str, Any]


class Uses:
    """A rank with its weights and options."""

    def __init__(self, bench: Bench, options: Any) -> None:
        self.bench, self.options = bench, options
        self.cells = [(shape, tokens) for shape in options.shapes for tokens in options.tokens]

    def us(self, call: Callable[[], Any]) -> float:
        """Microseconds of the slowest rank, the median over repeats."""
        times = torch.tensor(self.bench.times(call), dtype=torch.float64, device=self.bench.device)
        dist.all_reduce(times, dist.ReduceOp.MAX)
        return statistics.median(times.tolist())

    def everywhere(self, good: bool) -> bool:
        flag = torch.tensor([int(good)], device=self.bench.device)
        dist.all_reduce(flag, dist.ReduceOp.MIN)
        return bool(flag.item())

    def total(self, value: int) -> int:
        number = torch.tensor([value], device=self.bench.device)
        dist.all_reduce(number)
        return int(number.item())

    def problem(self, shape: Shape, tokens: int, mode: str = "all_to_all", training: bool = False) -> _Problem:
        self.bench.take(shape)
        return _Problem(self.bench, Cell(shape, tokens, mode, "tokens", training))

    def given(self, problem: _Problem) -> TopK:
        """Ids and weights of the problem's logits, which it has no router for any more."""
        logits, ids = problem.logits.topk(problem.cell.shape.top_k)
        problem.spec = dataclasses.replace(problem.spec, router=None)
        return TopK(ids.int(), logits.softmax(1))

    def gathered(self, rows: torch.Tensor) -> torch.Tensor:
        found = rows.new_empty(self.bench.size * len(rows), *rows.shape[1:])
        dist.all_gather_into_tensor(found, rows)
        return found


@torch.no_grad()
def hosts(uses: Uses) -> Iterator[Row]:
    """The exchange of two levels beside the flat one, all ranks pretending to be on two hosts, with and without
    replicas of every expert on both."""
    bench = uses.bench
    half = bench.size // 2
    mesh = DeviceMesh(bench.device.type, torch.arange(bench.size).view(2, half), mesh_dim_names=("host", "local"))
    for shape, tokens in uses.cells:
        linear, of_host = (Placement.linear(shape.num_experts, ranks) for ranks in (bench.size, half))
        for replicas, placement in ((False, linear), (True, Placement(shape.num_experts, of_host.owners * 2))):
            for levels in (1, 2):
                problem = uses.problem(shape, tokens)
                problem.placement = placement
                mine = torch.tensor(placement.owners[bench.rank], device=bench.device)
                problem.own = map_arrays(bench.weights, lambda array, mine=mine: array[mine].contiguous())
                problem.parallel = ExpertParallel(mesh if levels == 2 else bench.group)
                problem.exchange = ExchangeSpec(hosts=levels)
                expected = problem.alone(as_in_a_group=True).output
                same = uses.everywhere(torch.equal(problem.together().output, expected))
                row = {"shape": shape.name, "tokens": tokens, "replicas": replicas, "hosts": levels, "equal": same}
                if not (replicas and levels == 1):
                    row["rows_between_hosts"] = uses.total(0 if replicas else _crossing(problem, levels))
                yield row | {"us": uses.us(problem.together)}
                del problem, expected


def _crossing(problem: _Problem, hosts: int) -> int:
    """Rows of this rank's tokens that leave its pretended host: one for each other rank, or host, with an expert."""
    half, rank = problem.bench.size // 2, problem.bench.rank
    owners = problem.logits.topk(problem.cell.shape.top_k).indices // problem.placement.per_rank
    if hosts == 2:
        return int((owners // half != rank // half).any(1).sum())
    return sum(int((owners == other).any(1).sum()) for other in range(2 * half) if other // half != rank // half)


@torch.no_grad()
def batches(uses: Uses) -> Iterator[Row]:
    """`dispatch` and `combine` of two micro-batches, one after the other and overlapped, beside one call of `moe`."""
    for shape, tokens in uses.cells:
        problem = uses.problem(shape, tokens)
        x, options = problem.x, {"parallel": ExpertParallel(uses.bench.group), "placement": problem.placement}
        routing = uses.given(problem)
        ids, weights, spec = routing.ids, routing.weights, problem.spec
        parts = list(zip(*(one.chunk(2) for one in (x, ids, weights)), strict=True))

        def experts(arrived: Any, problem: _Problem = problem, spec: Any = spec) -> torch.Tensor:
            routing = TopK(arrived.ids, arrived.weights)
            return moe_torch.moe(arrived.rows, problem.own, routing, arrived.spec(spec)).output

        def one_by_one(parts: Any = parts, options: Any = options, experts: Any = experts) -> list[torch.Tensor]:
            found = []
            for number, part in enumerate(parts):
                arrived = dispatch(*part, **options, number=number).wait()
                found.append(combine(experts(arrived), arrived).wait())
            return found

        def overlapped(parts: Any = parts, options: Any = options, experts: Any = experts) -> list[torch.Tensor]:
            sent = [dispatch(*part, **options, number=number) for number, part in enumerate(parts)]
            homing = []
            for one in sent:
                arrived = one.wait()
                homing.append(combine(experts(arrived), arrived))
            return [one.wait() for one in homing]

        def at_once(
            x: Any = x, routing: Any = routing, problem: _Problem = problem, o: Any = options, s: Any = spec
        ) -> list[torch.Tensor]:
            return [moe(x, problem.own, routing, s, **o).output]

        for name, call in (("one call", at_once), ("one by one", one_by_one), ("overlapped", overlapped)):
            # Sums of a micro-batch are in the order of its tokens on all ranks.
            given = [(x, ids, weights)] if name == "one call" else parts
            of = dataclasses.replace(spec, tuning=Tuning(expected_tokens=uses.bench.size * len(given[0][0])))
            wanted = [moe_torch.moe(a, uses.bench.weights, TopK(b, c), of).output for a, b, c in given]
            same = all(torch.equal(y, one) for y, one in zip(call(), wanted, strict=True))
            row = {"shape": shape.name, "tokens": tokens, "way": name, "equal": uses.everywhere(same)}
            yield row | {"us": uses.us(call)}


def adapters(uses: Uses) -> Iterator[Row]:
    """Eight LoRA adapters of rank 16 on experts of several ranks: bits of outputs and gradients, times, memory."""
    bench = uses.bench
    for shape, tokens in uses.cells:
        generator = torch.Generator(bench.device).manual_seed(bench.seed)
        layout: Any = {"generator": generator, "device": bench.device, "dtype": torch.bfloat16}
        d, f, e = shape.d_model, shape.d_ff, shape.num_experts
        sizes = {"a1": (d, _RANK), "b1": (_RANK, 2 * f), "a2": (f, _RANK), "b2": (_RANK, d)}
        factors = {n: torch.randn(_ADAPTERS, e, *size, **layout) * size[0] ** -0.5 for n, size in sizes.items()}
        scale = torch.rand(_ADAPTERS, e, generator=generator, device=bench.device) + 0.5
        ranks = torch.full((_ADAPTERS, e), _RANK, dtype=torch.int32, device=bench.device)
        every = torch.randint(-1, _ADAPTERS, (bench.size * tokens,), generator=generator, device=bench.device).int()
        mine = slice(bench.rank * tokens, (bench.rank + 1) * tokens)

        def lora_of(held: slice, training: bool, factors: Any = factors, scale: Any = scale, ranks: Any = ranks) -> Any:
            own = {name: one[:, held].contiguous().requires_grad_(training) for name, one in factors.items()}
            return LoRAFactors(**own, scale=scale, ranks=ranks)

        for mode in uses.options.modes:
            problem = uses.problem(shape, tokens, mode)
            routing = uses.given(problem)
            per_rank = problem.placement.per_rank
            held = slice(bench.rank * per_rank, (bench.rank + 1) * per_rank)
            options: Any = {"parallel": problem.parallel, "placement": problem.placement}

            def together(
                x: Any, lora: Any, p: Any = problem, r: Any = routing, ids: Any = every[mine], o: Any = options
            ) -> Any:
                more = {} if lora is None else {"lora": lora, "adapter_ids": ids}
                return moe(x, p.own, r, p.spec, **o, **more).output

            def alone(
                x: Any, lora: Any, r: Any = routing, ids: Any = every[mine], spec: Any = problem.group_spec
            ) -> Any:
                more = {} if lora is None else {"lora": lora, "adapter_ids": ids}
                return moe_torch.moe(x, bench.weights, r, spec, **more).output

            lora, x = lora_of(held, True), problem.x.clone().requires_grad_()
            y = together(x, lora)
            y.backward(problem.d_output)
            wanted, all_x = lora_of(slice(None), True), uses.gathered(problem.x).requires_grad_()
            arrays: Any = (x, slice(None)), (all_x, mine)
            of_all = TopK(uses.gathered(routing.ids), uses.gathered(routing.weights))
            all_y = alone(all_x, wanted, of_all, every)
            all_y.backward(uses.gathered(problem.d_output))
            same = {"y": torch.equal(y, all_y[mine]), "d_x": torch.equal(*(one.grad[part] for one, part in arrays))}
            same |= {f"d_{n}": torch.equal(getattr(lora, n).grad, getattr(wanted, n).grad[:, held]) for n in sizes}
            differ = [name for name, one in same.items() if not uses.everywhere(one)]
            row: Row = {"shape": shape.name, "tokens": tokens, "mode": mode, "adapters": _ADAPTERS, "rank": _RANK}
            row |= {"equal": not differ, "differ": differ}
            del y, all_y, all_x, x, lora, wanted, arrays
            bench.free()
            with torch.no_grad():
                for prefix, call, part in (("", together, held), ("alone_", alone, slice(None))):
                    lora = lora_of(part, False)
                    row[f"{prefix}us"] = uses.us(lambda c=call, one=lora, x=problem.x: c(x, one))
                    row[f"{prefix}base_us"] = uses.us(lambda c=call, x=problem.x: c(x, None))
                    if bench.is_gpu:
                        row[f"{prefix}factor_bytes"] = sum(getattr(lora, n).nbytes for n in sizes)
                        for name, given in (("", lora), ("base_", None)):
                            before = torch.cuda.memory_allocated()
                            torch.cuda.reset_peak_memory_stats()
                            call(problem.x, given)
                            row[f"{prefix}{name}peak_bytes"] = torch.cuda.max_memory_allocated() - before
                    del lora
            yield row | {"scaling": row["alone_us"] / row["us"]}
            bench.free()


class Block(torch.nn.Module):
    """A dense layer and experts."""

    def __init__(self, shape: Shape, device: torch.device, parallel: ExpertParallel | None) -> None:
        super().__init__()
        self.dense = torch.nn.Linear(shape.d_model, shape.d_model, device=device)
        self.moe = MoE(shape.d_model, shape.d_ff, shape.num_experts, shape.top_k, device=device)
        if parallel is not None:
            parallelize(self.moe, parallel)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.dense(x)
        return x + self.moe(torch.nn.functional.rms_norm(x, x.shape[-1:]))


class Run:
    """A model in bf16 with fp32 masters and AdamW. ranks: those that share it, 1 for one process."""

    def __init__(self, uses: Uses, shape: Shape, tokens: int, ranks: int) -> None:
        self.shape, self.tokens, self.ranks, self.device = shape, tokens, ranks, uses.bench.device
        size, kind = uses.bench.size, self.device.type
        self.rank = uses.bench.rank if ranks > 1 else 0
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        numbers = torch.arange(size)
        if ranks > 1:
            both = DeviceMesh(kind, numbers.view(size // 2, 2), mesh_dim_names=("efsdp", "ep"))
            dense, experts = DeviceMesh(kind, numbers, mesh_dim_names=("dp",)), both["efsdp"]
            parallel = ExpertParallel(both["ep"], gradients="mean")
        else:
            dense = experts = DeviceMesh(kind, numbers.view(size, 1), mesh_dim_names=("other", "dp"))["dp"]
            parallel = None
        torch.manual_seed(0)
        self.net: Any = torch.nn.Sequential(*(Block(shape, self.device, parallel) for _ in range(2)))
        for block in self.net:
            fully_shard(block.moe.experts, mesh=experts, mp_policy=policy)
            fully_shard(block, mesh=dense, mp_policy=policy)
        fully_shard(self.net, mesh=dense, mp_policy=policy)
        self.optimizer = torch.optim.AdamW(self.net.parameters(), 1e-3, foreach=False)

    def batch(self, part: int, micro: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(part * MICRO + micro)
        return torch.randn(self.tokens, self.shape.d_model, generator=generator).to(self.device)

    def step(self) -> float:
        """Accumulate gradients over this rank's parts. Returns the loss of all."""
        own = [(part, micro) for part in range(self.rank, PARTS, self.ranks) for micro in range(MICRO)]
        total = torch.zeros((), device=self.device)
        for number, (part, micro) in enumerate(own):
            self.net.set_requires_gradient_sync(number == len(own) - 1)
            x = self.batch(part, micro)
            loss = (self.net(x).float() - x.roll(1, 1).tanh()).square().mean() / len(own)
            loss.backward()
            total += loss.detach()
        norm: Any = clip_grad_norm_(self.net.parameters(), CLIP)
        assert float(norm) > CLIP, "clipping is at work"
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.ranks > 1:
            dist.all_reduce(total)
            total /= self.ranks
        return total.item()

    def state(self) -> Row:
        model, optimizer = get_state_dict(self.net, self.optimizer)
        return {"model": model, "optimizer": optimizer}


def training(uses: Uses) -> Iterator[Row]:
    """FSDP2 around expert parallelism, clipped and accumulated, beside one process. Saves in the middle."""
    for shape, tokens in uses.cells:
        folder = Path(uses.options.checkpoint) / f"{shape.name}-{tokens}"
        run, losses = Run(uses, shape, tokens, uses.bench.size), []
        for step in range(STEPS):
            if step == SAVED:
                _dcp.save(run.state(), checkpoint_id=str(folder))
            losses.append(run.step())
        del run
        uses.bench.free()
        alone = Run(uses, shape, tokens, 1)
        expected = [alone.step() for _ in range(STEPS)]
        del alone
        uses.bench.free()
        if uses.bench.rank == 0:
            (folder / "losses.json").write_text(json.dumps(losses))
        yield _losses(shape, tokens, losses, expected)


def resumed(uses: Uses) -> Iterator[Row]:
    """The same on fewer ranks from the checkpoint in the middle, beside the ranks that saved it."""
    for shape, tokens in uses.cells:
        folder = Path(uses.options.checkpoint) / f"{shape.name}-{tokens}"
        run = Run(uses, shape, tokens, uses.bench.size)
        state = run.state()
        _dcp.load(state, checkpoint_id=str(folder))
        set_state_dict(run.net, run.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        losses = [run.step() for _ in range(SAVED, STEPS)]
        expected = json.loads((folder / "losses.json").read_text())[SAVED:]
        del run, state
        uses.bench.free()
        yield _losses(shape, tokens, losses, expected)


def _losses(shape: Shape, tokens: int, losses: list[float], expected: list[float]) -> Row:
    apart = max(abs(one - other) / other for one, other in zip(losses, expected, strict=True))
    found: Row = {"shape": shape.name, "tokens": tokens, "equal": apart < 2e-3 and losses[-1] < losses[0]}
    return found | {"losses": losses, "expected": expected, "apart": apart}


PARTS_BY_NAME = {one.__name__: one for one in (hosts, batches, adapters, training, resumed)}


def parse(arguments: Sequence[str] | None) -> Any:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default="hosts,batches,adapters")
    parser.add_argument("--shapes", default="qwen3", help="(default: %(default)s; on a CPU a tiny one)")
    parser.add_argument("--tokens", default="4096", help="of a rank (default: %(default)s)")
    parser.add_argument("--modes", default="all_to_all,peer", help="of adapters (default: %(default)s)")
    parser.add_argument("--checkpoint", type=Path, help="folder of `training` and `resumed`")
    parser.add_argument("--cell-seconds", type=float, default=0.05, help="of each median (default: %(default)s)")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds until ranks hang (default: %(default)s)")
    kinds = ("cuda", "shared", "cpu")
    parser.add_argument("--device", default="cuda", choices=kinds, help="shared: GPU 0 for all ranks; bits, no times")
    parser.add_argument("--output", type=Path)
    found = parser.parse_args(arguments)
    if not dist.is_torchelastic_launched():
        parser.error("ranks must be started by torchrun, got one process; add torchrun --nproc-per-node 4")
    found.parts = chosen_names(parser, "--parts", found.parts, list(PARTS_BY_NAME))
    found.modes = chosen_names(parser, "--modes", found.modes, ("all_to_all", "padded", "all_gather", "peer"))
    found.tokens = numbers_of_tokens(parser, found.tokens)
    names = chosen_names(parser, "--shapes", found.shapes, list(ALL_SHAPES))
    found.shapes = [_TINY] if found.device == "cpu" else [ALL_SHAPES[name] for name in names]
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run on every rank of torchrun. Returns 1 if bits differ."""
    options, bad = parse(arguments), 0
    setting = Setting(int(os.environ["WORLD_SIZE"]), options.device, 0, options.cell_seconds, options.limit)
    with joined(setting, int(os.environ["LOCAL_RANK"])) as bench:
        uses = Uses(bench, options)
        for part in options.parts:
            for row in PARTS_BY_NAME[part](uses):
                bad += not row["equal"]
                if bench.rank == 0:
                    add(options.output, {"part": part, "ranks": bench.size, "device": options.device} | row)
        dist.destroy_process_group()
    return int(bad > 0)


def add(output: Path | None, row: Row) -> None:
    print(json.dumps(row), flush=True)
    if output is not None:
        record = json.loads(output.read_text()) if output.exists() else {"schema": 1, "rows": []}
        record["provenance"] = provenance("benchmarks.parallel_uses")
        record["rows"].append(row)
        output.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
