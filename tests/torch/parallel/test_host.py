"""What a call across ranks costs the host: how many operations of torch it runs."""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from torch.utils._python_dispatch import TorchDispatchMode

import moe_torch
from moe_core.base.recent import Recent
from moe_core.base.target import Target
from moe_core.formats import format_named
from moe_core.parallel import ExchangeSpec
from moe_core.parallel.header import CALLS
from moe_core.plan.steps import KernelLaunch
from moe_core.specs.operands import MoEOperands, TopK
from moe_torch.bridge.operator import Operator
from moe_torch.operators import routes as operators
from moe_torch.parallel import ExpertParallel
from moe_torch.parallel import moe as parallel_moe
from moe_torch.parallel.calls import counted, joined, known
from moe_torch.parallel.calls.compiled import Calls
from moe_torch.parallel.calls.known import Call, Step
from moe_torch.parallel.forward import exchanged
from moe_torch.parallel.group import Ranks
from moe_torch.parallel.peer import again
from moe_torch.parallel.peer.symmetric import Symmetric
from moe_torch.parallel.route import ExchangeCall
from moe_torch.parallel.routes import rounded
from tests.support.parallel.lora import draw_lora, of_rank
from tests.support.parallel.placements import placement_of
from tests.support.parallel.pool import Pool, ranks
from tests.support.parallel.torch import run_rank
from tests.support.parallel.twins import PLAIN, Problem, draw_problem
from tests.support.parallel.ways import STATIC, TORCH_WAYS, every_way, over, sizes_of
from tests.support.torch import running_on, to_torch

__all__ = ["ranks"]

#: Operations of torch at most: of a forward, of one that gradients are asked of, and of its backward. Views count.
FORWARD, TRAINING, BACKWARD = 33, 38, 32


class _Counting(TorchDispatchMode):
    """Every operation, by name. Changing a dtype's view counts once: torch's mode sees a detach beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        self.found[str(function)] += 1
        return function(*arguments, **(options or {}))


def operations(group: Any, problem: Problem, way: ExchangeSpec) -> list[Counter[str]]:
    """Of a forward, of one with gradients, and of its backward; the second call of each."""
    own = problem.ranks()[torch.distributed.get_rank(group)]
    parallel, found = ExpertParallel(group, way), []
    # A CPU compares headers ahead of all else, and a GPU does not.
    with running_on("reference"), mock.patch.object(ExchangeCall, "check"):
        x, experts, routing, d_output = to_torch((own.x, own.experts, own.routing, own.x))

        def forward() -> Any:
            placed: Any = {"parallel": parallel, "placement": problem.placement}
            return parallel_moe(x, experts, routing, problem.spec, **placed).output

        forward()
        with _Counting() as plain:
            forward()
        found.append(plain.found)
        routing = TopK(routing.ids, routing.weights.requires_grad_())
        for leaf in (x, experts.gate_up, experts.down):
            leaf.requires_grad_()
        forward().backward(d_output)
        with _Counting() as training:
            output = forward()
        with _Counting() as backward:
            output.backward(d_output)
    return [*found, training.found, backward.found]


def unaligned(array: Any) -> Any:
    """The same numbers behind an address that is no multiple of 16."""
    return array.new_empty(array.numel() + 1)[1:].view(array.shape).copy_(array)


def like_calls(group: Any, problem: Problem, way: ExchangeSpec, adapters: Any = None) -> list[bool]:
    """Calls like earlier ones, whose plans are found by steps: bits of first calls, and whether steps have plans."""
    rank = torch.distributed.get_rank(group)
    own, same, more, lora = problem.ranks()[rank], [], {}, None
    if adapters is not None:
        lora = to_torch(of_rank(adapters[0], problem.placement, rank, own.experts.down.shape[0]))
        more = {"lora": lora, "adapter_ids": to_torch(problem.of_rank(rank, adapters[1]))}
    most = max(problem.tokens) if way.mode == "peer" else None
    parallel = ExpertParallel(group, way, most)
    used, devices = mock.patch.object(again, "kept", wraps=again.kept), mock.patch.object(joined, "DEVICES", {"cpu"})
    whole: list[bool] = []

    def run_again(*arguments: Any) -> Any:
        whole.append((found := joined.run_again(*arguments)) is not None)
        return found

    seen = mock.patch("moe_torch.parallel.forward.run_again", run_again)
    steps = mock.patch.object(Step, "run", autospec=True, side_effect=Step.run)
    made = mock.patch.object(joined, "joined", wraps=joined.joined)
    with running_on("reference"), torch.no_grad(), devices, seen, used as used, steps as ran, made as made:
        for turn in range(9):
            x, experts, routing = to_torch((own.x * (1 + turn), own.experts, own.routing))
            routing.weights.mul_(1 - turn / 9)
            if turn in (1, 3):
                # Other numbers of rows than expected, then the same again, and twice.
                routing.ids.copy_(routing.ids.flip(0))
                routing.ids[turn:, 1:] = -1
            # Plans that were compiled for aligned arrays do not run on others.
            x = unaligned(x) if turn == 6 else x
            if lora is not None:
                # Other adapters, one of which was evicted, in the memory of a like call.
                more["adapter_ids"] = more["adapter_ids"].roll(1)
                lora.scale.mul_(1.25)
                lora.ranks[turn % 3] = 16 * (turn % 2)
            ids, weights = routing.ids, routing.weights
            routing = TopK(unaligned(ids) if turn == 7 else ids, unaligned(weights) if turn == 8 else weights)
            options: Any = {"placement": problem.placement, **more}
            found = parallel_moe(x, experts, routing, problem.spec, parallel=parallel, **options)
            first = ExpertParallel(group, way, most)
            wanted = parallel_moe(x, experts, routing, problem.spec, parallel=first, **options)
            same += [torch.equal(*pair) for pair in zip(found, wanted, strict=True) if pair[0] is not None]
    # Arrays that a graph keeps: headers of calls without a layer, and the places of experts.
    kept = [len(call.args[0]) for call in used.call_args_list]
    peers, blocks = (way.rows == "tokens" and way.mode == mode for mode in ("peer", "padded"))
    if adapters is not None:
        return [*same, not kept, not any(whole), ran.call_count >= 3]
    once = made.call_count == (peers or blocks)
    return [*same, kept == [CALLS + 1] * 4 * peers, sum(whole) == 4 * (peers or blocks), once]


@over(TORCH_WAYS)
def test_like_calls_have_the_same_bits(ranks: Pool, way: ExchangeSpec) -> None:
    tokens, sizes = (9, 9) if way in STATIC else (7, 9), sizes_of(way)
    problem = draw_problem(3, placement_of("round_robin", 6, 2), tokens, 3, "random", "bfloat16", PLAIN, sizes=sizes)
    assert all(all(found) for found in ranks.call(like_calls, [(problem, way)] * 2))
    # Rows of one column have the shape of the adapters' ids.
    thin = draw_problem(3, problem.placement, tokens, 1, "random", "bfloat16", PLAIN, sizes=(1, 8))
    for one in (problem, *[thin] * (way.mode != "peer")):
        found = ranks.call(like_calls, [(one, way, draw_lora(one, dtype="bfloat16"))] * 2)
        assert all(all(some) for some in found), [[n for n, good in enumerate(some) if not good] for some in found]


def like_calls_of_wide_rows(group: Any, problem: Problem) -> list[bool]:
    """Of x, and of like calls with its rows in wider ones: whether they have the bits of the first call."""
    own, outputs = problem.ranks()[torch.distributed.get_rank(group)], []
    placed: Any = {"parallel": ExpertParallel(group, ExchangeSpec("padded")), "placement": problem.placement}
    with running_on("reference"), torch.no_grad():
        x, experts, routing = to_torch((own.x, own.experts, own.routing))
        wide = torch.cat([x, x + 1], dim=1)[:, : x.shape[1]]
        for one in (x, wide, wide):
            outputs.append(parallel_moe(one, experts, routing, problem.spec, **placed).output)
    return [torch.equal(one, outputs[0]) for one in outputs]


def test_like_calls_of_wide_rows_have_the_same_bits(ranks: Pool) -> None:
    """As many rows leave, and arrive, as there are tokens."""
    problem = draw_problem(3, placement_of("linear", 6, 1), (8,), 1, "random", "bfloat16", PLAIN, sizes=(16, 8))
    assert ranks.call(like_calls_of_wide_rows, [(problem,)]) == [[True] * 3]


def disagreements(group: Any, problem: Problem) -> list[bool]:
    """Of like calls with blocks: all NaN, once a rank counts another number of calls."""
    rank, found = torch.distributed.get_rank(group), []
    own, parallel = problem.ranks()[rank], ExpertParallel(group, ExchangeSpec("padded"))
    with running_on("reference"), torch.no_grad(), mock.patch.object(joined, "DEVICES", {"cpu"}):
        x, experts, routing = to_torch((own.x, own.experts, own.routing))
        for turn in range(4):
            calls, operands = Calls(), MoEOperands(x, experts, routing, None)
            calls.number = rank * (turn == 3)
            output = exchanged(operands, problem.spec, parallel, problem.placement, calls).output
            found.append(bool(output.isnan().all()))
    return found


def test_like_calls_of_ranks_that_disagree_are_nan(ranks: Pool) -> None:
    problem = draw_problem(3, placement_of("linear", 6, 2), (9, 9), 3, "random", "bfloat16", PLAIN, sizes=(16, 8))
    assert ranks.call(disagreements, [(problem,)] * 2) == [[False, False, False, True]] * 2


def waits(group: Any, problem: Problem, way: ExchangeSpec) -> list[int]:
    """Of a like call without and one with masked slots: how often it reads counts, and waits at barriers."""
    own, found = problem.ranks()[torch.distributed.get_rank(group)], []
    placed: Any = {"parallel": ExpertParallel(group, way, 9), "placement": problem.placement}
    with running_on("reference"), torch.no_grad(), mock.patch.object(joined, "DEVICES", {"cpu"}):
        for turn in range(4):
            x, experts, routing = to_torch((own.x, own.experts, own.routing))
            routing.ids[: 2 * (turn == 3)] = -1
            read = mock.patch.object(counted, "read_by_host", wraps=counted.read_by_host)
            gather = mock.patch.object(Ranks, "start_all_gather", autospec=True, side_effect=Ranks.start_all_gather)
            with read as reads, gather as messages, mock.patch.object(ExchangeCall, "check"):
                output = parallel_moe(x, experts, routing, problem.spec, **placed).output
            found += [reads.call_count, messages.call_count]
            if len(problem.tokens) == 1:
                assert torch.equal(output, moe_torch.moe(x, experts, routing, problem.spec).output)
    return found[4:]


@over((ExchangeSpec(), ExchangeSpec(rows="slots"), ExchangeSpec("peer")))
def test_one_rank_waits_for_nothing(ranks: Pool, way: ExchangeSpec) -> None:
    for size in (1, 2):
        problem = draw_problem(
            1, placement_of("linear", 6, size), (5,) * size, 3, "random", "bfloat16", PLAIN, sizes=(16, 8)
        )
        for found in ranks.call(waits, [(problem, way)] * size):
            assert found == [size - 1 if way.mode == "all_to_all" else 0, 2 * (size - 1) * (way.mode == "peer")] * 2


@every_way
def test_a_call_runs_few_operations(ranks: Pool, way: ExchangeSpec) -> None:
    """Index arithmetic is one kernel of a home and one of an owner, whatever the sizes."""
    for experts, tokens in ((6, 5), (16, 40)):
        problem = draw_problem(
            1, placement_of("round_robin", experts, 2), (tokens,) * 2, 3, "random", "bfloat16", PLAIN
        )
        for counts in ranks.call(operations, [(problem, way)] * 2):
            for count, most in zip(counts, (FORWARD, TRAINING, BACKWARD), strict=True):
                assert 10 < count.total() <= most, dict(count)
                ours = {name: number for name, number in count.items() if name.startswith("moebius.")}
                assert sum(ours.values()) <= 8, ours


#: What a forward with mode `peer` does on a CPU alone: messages for its barriers, and the tokens of all ranks.
ON_A_CPU = {
    **{f"aten.{name}": 2 for name in ("zeros.default", "empty.memory_format", "_local_scalar_dense.default")},
    **{"c10d._allgather_base_.default": 2, "aten.sum.default": 1},
}


#: The owner's op, and what is around it. Few tokens' products and the sums of owners are one launch.
PRODUCTS = ("layout_at_once", "matmul_ogs", "matmul_ogs")
LAUNCHES: tuple[tuple[dict[str, Any], tuple[str, ...]], ...] = (
    ({}, ("push_tokens_once", *PRODUCTS, "sum_results")),
    (
        {"format": format_named("fp8_group")},
        ("push_tokens_once", "push_quantized_rows", "take_rows", *PRODUCTS, "sum_results"),
    ),
)


def launches(group: Any, problem: Problem, way: ExchangeSpec) -> tuple[list[str], int, dict[str, int]]:
    """Of the second forward with mode `peer`, planned for an H100: kernels in order; barriers; and other operations
    but views."""
    own = problem.ranks()[torch.distributed.get_rank(group)]
    parallel, steps, barriers = ExpertParallel(group, way, len(own.x)), [], []
    real, barrier, check = Operator.run, Symmetric.barrier, mock.patch.object(ExchangeCall, "check")

    def called(self: Operator, arguments: tuple[Any, ...]) -> Any:
        plan = self.plan(arguments, Target("cuda", 90, 132))
        steps.extend(step.kernel.function for step in plan.steps if isinstance(step, KernelLaunch))
        return real(self, arguments)

    def waited(self: Symmetric, *arguments: Any) -> None:
        barriers.append(barrier(self, *arguments))

    with running_on("reference"), torch.no_grad(), check:
        x, experts, routing = to_torch((own.x, own.experts, own.routing))
        placed: Any = {"parallel": parallel, "placement": problem.placement}
        parallel_moe(x, experts, routing, problem.spec, **placed)
        seen = mock.patch.object(Operator, "run", called), mock.patch.object(Symmetric, "barrier", waited)
        with seen[0], seen[1], _Counting() as counting:
            parallel_moe(x, experts, routing, problem.spec, **placed)
    views = ("moebius", "detach", "alias", "slice", "select", "view")
    others = {name: count for name, count in counting.found.items() if not any(view in name for view in views)}
    return steps, len(barriers), others


@pytest.mark.parametrize(("options", "expected"), LAUNCHES, ids=("slots", "fp8"))
def test_few_kernels_make_a_forward_of_peers(ranks: Pool, options: dict[str, Any], expected: tuple[str, ...]) -> None:
    """Two barriers, and few launches beside the owner's op."""
    placement, way = placement_of("round_robin", 16, 2), ExchangeSpec("peer", **options)
    problem = draw_problem(1, placement, (5, 5), 3, "random", "bfloat16", PLAIN, sizes=(64, 32))
    for kernels, barriers, others in ranks.call(launches, [(problem, way)] * 2):
        assert tuple(kernels) == expected
        assert (barriers, others) == (2, ON_A_CPU)


def operations_of_a_step(group: Any, problem: Problem) -> list[tuple[int, Counter[str]]]:
    """Of the second step with mode `peer`, forward and backward: barriers, and operations but views."""
    own = problem.ranks()[torch.distributed.get_rank(group)]
    parallel, found = ExpertParallel(group, ExchangeSpec("peer"), len(own.x)), []
    views = ("detach", "alias", "slice.", "select", "view", "expand")
    with running_on("reference"), mock.patch.object(ExchangeCall, "check"):
        x, experts, routing = to_torch((own.x, own.experts, own.routing))
        x.requires_grad_()
        placed: Any = {"parallel": parallel, "placement": problem.placement}

        def counted(call: Any) -> Any:
            with mock.patch.object(Symmetric, "barrier") as barrier, _Counting() as counting:
                result = call()
            names = {name: n for name, n in counting.found.items() if not any(view in name for view in views)}
            found.append((barrier.call_count, Counter(names)))
            torch.distributed.barrier(group)
            return result

        for _ in range(2):
            given = TopK(routing.ids, routing.weights.detach().requires_grad_())
            output = counted(functools.partial(parallel_moe, x, experts, given, problem.spec, **placed)).output
            counted(output.sum().backward)
    return found[2:]


def test_few_operations_make_a_step_of_peers(ranks: Pool) -> None:
    """Three barriers each way, and no pass over rows but a copy of those received."""
    problem = draw_problem(1, placement_of("linear", 6, 2), (5, 5), 3, "random", "bfloat16", PLAIN, sizes=(16, 8))
    for (forth, forward), (back, backward) in ranks.call(operations_of_a_step, [(problem,)] * 2):
        assert (forth, back) == (3, 3)
        # Rows and weights; what stands for x and for the owner's output; what a CPU reads of the numbers of tokens.
        assert forward["aten.clone.default"] == 2 and forward.total() <= 11, forward
        assert "aten.slice_backward.default" not in backward and backward.total() <= 14, backward


def plans_made(group: Any, problems: list[Problem], way: ExchangeSpec) -> list[int]:
    """How many plans each call makes, of a forward and a backward."""
    made, counts, real = [], [], Operator.plan

    def planned(self: Operator, *arguments: Any) -> Any:
        made.append(self.name)
        return real(self, *arguments)

    with mock.patch.object(Operator, "plan", planned):
        for problem in problems:
            made.clear()
            run_rank(group, problem, way, "reference", True, None)
            counts.append(len(made))
    return counts


@every_way
def test_other_counts_make_few_plans(ranks: Pool, way: ExchangeSpec) -> None:
    """Numbers of rows change with every routing; those that plans see are rounded, so that most have been seen."""
    placement = placement_of("linear", 6, 2)
    problems = [
        draw_problem(seed, placement, (150, 150), 3, "random", "bfloat16", PLAIN, sizes=(16, 16)) for seed in range(30)
    ]
    for counts in ranks.call(plans_made, [(problems, way)] * 2):
        assert sum(counts[15:]) <= 15, counts


def test_rounded_numbers_of_rows() -> None:
    rows = np.arange(5000)
    found = np.array([rounded(int(one)) for one in rows])
    assert (found >= rows).all() and (found <= rows + rows // 31).all()
    assert (found[:64] == rows[:64]).all() and rounded(1000) == 1008
    assert len(np.unique(found)) < 64 + 7 * 33


def test_calls_are_known_beyond_the_last_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known, "_known", Recent(1))
    call: Any = Call.__new__(Call)
    like: Any = SimpleNamespace(is_like=lambda *tensors: not tensors)
    for key in ("first", "earlier", "latest"):
        known._known.put(key, like)
    for key, tensors, expected in (("earlier", [], like), ("first", [], None), (None, [], None), ("latest", [1], None)):
        call.key, call.tensors = key, tensors
        assert call.find() is expected


def test_steps_hold_no_address_of_another_array() -> None:
    """An array that a call made itself has another address in the next one."""
    with running_on("reference"):
        x, slots = torch.zeros(4, 8), torch.arange(4, dtype=torch.int32)
        operator, given = operators.TAKE_ROWS, {"x": x, "slot_of_row": slots, "table": None, "each": 1}
        arguments = operator.arguments(**given)
        operator.call(**given)
        assert Step.of(operator, arguments, ("x",), [torch.zeros(2)]) is None
        for step in (Step.of(operator, arguments, ("x",), [slots]), Step.of(operator, arguments, ("x",), ())):
            assert step is not None
            other = x + 1
            (found,) = step.run([slots], other.data_ptr())
            assert torch.equal(found, other)
        # Of a rank's GPU, which need not be the first.
        there = step._replace(ready=dataclasses.replace(step.ready, device=torch.device("cuda", 1)))
        with mock.patch.object(joined, "prepare") as prepare:
            joined.joined([there], {}, [f"0.{one.name}" for one in step.ready.prepared.plan.outputs], ["0.x"])
        assert prepare.call_args.args[1] == 1
