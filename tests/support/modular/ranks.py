"""Modular kernels on gloo ranks, and the same kernels on one device."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, cast
from unittest import mock

import numpy as np
import torch

from moe_core.errors import InvalidInput
from moe_core.parallel import ExchangeSpec
from moe_core.parallel.placement import gather_experts
from moe_core.specs.tuning import Tuning
from moe_torch import modular
from moe_torch.modular import FusedMoEModularKernel
from moe_torch.parallel.group import Ranks
from tests.support.parallel.pool import Pool
from tests.support.parallel.torch import broken, poisoned
from tests.support.parallel.twins import Problem
from tests.support.parallel.ways import require_same
from tests.support.torch import running_on, to_numpy, to_torch

PARTS: dict[str, Any] = {
    "peer": modular.PeerPrepareAndFinalize,
    "all_to_all": modular.MoEPrepareAndFinalizeAllToAll,
    "all_gather": modular.MoEPrepareAndFinalizeNaiveEP,
}


class SlotExperts(modular.FusedMoEExpertsModular):
    """Experts as ported ones are: rows of slots, neither weighted nor reduced, each with bits of its own. tuned: what
    the last call was to add up as."""

    tuned: Tuning | None = None

    @staticmethod
    def activation_format() -> modular.FusedMoEActivationFormat:
        return modular.FusedMoEActivationFormat.Standard

    def finalize_weight_and_reduce_impl(self) -> modular.TopKWeightAndReduce:
        return modular.TopKWeightAndReduceContiguous()

    def workspace_shapes(self, M: int, N: int, K: int, topk: int, *_: Any) -> Any:
        return (0,), (0,), (M, topk, K)

    def apply(self, output: torch.Tensor, hidden_states: torch.Tensor, w1: Any, w2: Any, *others: Any) -> None:
        SlotExperts.tuned = self.tuning
        for (token, slot), expert in np.ndenumerate(to_numpy(others[1])):
            if expert < 0:
                continue
            gate, up = (hidden_states[token] @ w1[expert]).chunk(2)
            output[token, slot] = (torch.nn.functional.silu(gate) * up) @ w2[expert]


class TokenExperts(SlotExperts):
    """The same, weighted and reduced: where no row comes, nothing that has a gradient is touched."""

    def finalize_weight_and_reduce_impl(self) -> modular.TopKWeightAndReduce:
        return modular.TopKWeightAndReduceNoOP()

    def workspace_shapes(self, M: int, N: int, K: int, topk: int, *_: Any) -> Any:
        return (0,), (0,), (M, K)

    def apply(self, output: torch.Tensor, hidden_states: torch.Tensor, w1: Any, w2: Any, *others: Any) -> None:
        weights, ids = others[:2]
        slots = hidden_states.new_zeros(*ids.shape, output.shape[1])
        super().apply(slots, hidden_states, w1, w2, *others)
        for token in range(len(ids)):
            rows = (slots[token].float() * weights[token, :, None]).to(output.dtype).float()
            output[token] = sum(row for row, expert in zip(rows, ids[token].tolist(), strict=True) if expert >= 0)


#: Experts of weights in layout `in_out`.
EXPERTS: dict[str, Callable[[], modular.FusedMoEExpertsModular]] = {
    "triton": lambda: modular.TritonExperts(weight_layout="in_out"),
    "oai": modular.OAITritonExperts,
    "unfused": modular.UnfusedOAITritonExperts,
    "slots": lambda: SlotExperts(weight_layout="in_out"),
    "tokens": lambda: TokenExperts(weight_layout="in_out"),
}


def part_of(group: Any, problem: Problem, way: ExchangeSpec, experts: str = "triton") -> Any:
    """Of a rank, with memory for as many tokens as any has."""
    kind = modular.PeerBatchedPrepareAndFinalize if experts == "batched" else PARTS[way.mode]
    return kind(group, problem.placement, exchange=way, max_tokens=max(1, *problem.tokens))


def experts_of(problem: Problem, experts: str) -> Any:
    """By name; in the batched format for as many tokens."""
    if experts != "batched":
        return EXPERTS[experts]()
    most, ranks = max(1, *problem.tokens), problem.placement.num_ranks
    return modular.BatchedTritonExperts(most, ranks, weight_layout="in_out")


def tensors_of(
    problem: Problem, number: int | None, trained: bool, device: torch.device | str = "cpu"
) -> list[torch.Tensor]:
    """The arguments of a kernel, of a rank or, with None, of all tokens and experts."""
    x, experts, routing = problem.x, problem.experts, problem.routing
    if number is not None:
        own = problem.ranks()[number]
        x, experts, routing = own.x, own.experts, own.routing
    tensors = list(to_torch((x, experts.gate_up, experts.down, routing.weights, routing.ids), device))
    return [tensor.requires_grad_(trained and tensor.is_floating_point()) for tensor in tensors]


def results_of(kernel: Any, tensors: list[torch.Tensor], d_output: np.ndarray | None, **options: Any) -> dict[str, Any]:
    """The output and, where there is a gradient of it, those of hidden states, weights and routing."""
    with contextlib.nullcontext() if d_output is not None else torch.no_grad():
        output = kernel(*tensors, **options)
    if d_output is None:
        return {"output": to_numpy(output)}
    output.backward(to_torch(d_output, output.device))
    found = {"output": to_numpy(output)}
    for name, tensor in zip(("d_x", "d_w1", "d_w2", "d_weights"), tensors, strict=False):
        # Experts of others leave no gradient where no row has come.
        found[name] = to_numpy(torch.zeros_like(tensor) if tensor.grad is None else tensor.grad)
    return found


def run_rank(
    group: Any, problem: Problem, way: ExchangeSpec, engine: str, experts: str, trained: bool, fault: str | None
) -> dict[str, Any]:
    number = torch.distributed.get_rank(group)
    with running_on(engine) as device, poisoned(), broken(fault):
        # A rank's GPU is its current one.
        own = torch.device("cuda", torch.cuda.current_device()) if engine == "cuda" else device
        kernel = FusedMoEModularKernel(part_of(group, problem, way, experts), experts_of(problem, experts))
        d_output = problem.gradients()[number].output if trained else None
        return results_of(kernel, tensors_of(problem, number, trained, own), d_output)


def compare_with_one_device(
    pool: Pool,
    problem: Problem,
    way: ExchangeSpec,
    label: str,
    *,
    engine: str = "reference",
    experts: str = "triton",
    trained: bool = False,
    fault: str | None = None,
) -> None:
    """Raise unless the ranks' results are those of one device, bit by bit."""
    placement = problem.placement
    found = pool.call(run_rank, [(problem, way, engine, experts, trained, fault)] * placement.num_ranks)
    with running_on(engine) as device:
        if experts == "batched":
            most = max(1, sum(problem.tokens))
            part: Any = modular.BatchedPrepareAndFinalize(most, placement.num_experts)
            alone = FusedMoEModularKernel(part, modular.BatchedTritonExperts(most, weight_layout="in_out"))
        else:
            alone = FusedMoEModularKernel(modular.MoEPrepareAndFinalizeNoEP(), EXPERTS[experts]())
        tensors = tensors_of(problem, None, trained, device)
        expected = results_of(alone, tensors, problem.d_output if trained else None)
    for name, array in expected.items():
        parts = [rank[name] for rank in found]
        together = gather_experts(parts, placement) if name in ("d_w1", "d_w2") else np.concatenate(parts)
        require_same(together, array, f"{name}, {label}")


def tuning_of_rank(group: Any, problem: Problem, way: ExchangeSpec) -> Tuning | None:
    """What the experts of a rank are to add up as."""
    run_rank(group, problem, way, "reference", "slots", False, None)
    return SlotExperts.tuned


def kernel_of_rank(group: Any, problem: Problem, way: ExchangeSpec) -> Any:
    """A kernel of a rank, and the tensors of its call."""
    part = part_of(group, problem, way)
    kernel = FusedMoEModularKernel(part, EXPERTS["triton"]())
    return kernel, tensors_of(problem, torch.distributed.get_rank(group), False)


@contextlib.contextmanager
def watched(events: list[str]) -> Iterator[None]:
    """What happens to messages, in order: `start` and `wait` of each."""
    real = Ranks._start

    def start(ranks: Ranks, collective: str, what: str, *others: Any) -> Any:
        events.append(f"start {what}")
        wait = real(ranks, collective, what, *others)

        def waited() -> torch.Tensor:
            events.append(f"wait {what}")
            return wait()

        return waited

    with mock.patch.object(Ranks, "_start", start):
        yield


def run_beside_a_shared_expert(group: Any, problem: Problem, way: ExchangeSpec) -> tuple[list[str], bool]:
    """The order of messages and of a shared expert, and whether both results are what they should be."""
    events: list[str] = []

    def shared(x: torch.Tensor) -> torch.Tensor:
        events.append("shared expert")
        return 2 * x

    kernel, tensors = kernel_of_rank(group, problem, way)
    beside = FusedMoEModularKernel(kernel.prepare_finalize, kernel.fused_experts, shared_experts=shared)
    with running_on("reference"), torch.no_grad():
        alone = kernel(*tensors)
        with watched(events):
            found = beside(*tensors)
    return events, torch.equal(found[0], 2 * tensors[0]) and torch.equal(found[1], alone)


def run_by_hand(group: Any, problem: Problem) -> bool:
    """Whether the halves, and the methods without halves, give what a kernel gives, as a caller uses them, and no
    gradient to hidden states of rows that have none."""
    kernel, (x, w1, w2, weights, ids) = kernel_of_rank(group, problem, ExchangeSpec())
    part = kernel.prepare_finalize
    with running_on("reference"), torch.no_grad():
        expected = kernel(x, w1, w2, weights, ids)
        outputs = []
        for halves in (True, False):
            given = (x, weights, ids, problem.placement.num_experts)
            if halves:
                hook, receiver = part.prepare_async(*given)
                hook()
                prepared = receiver()
            else:
                prepared = part.prepare(*given)
            rows = FusedMoEModularKernel(modular.MoEPrepareAndFinalizeNoEP(), kernel.fused_experts)(
                prepared.a1q, w1, w2, prepared.topk_weights, prepared.topk_ids
            )
            output = torch.full_like(x, torch.nan)
            finalize = part.finalize_async if halves else part.finalize
            impl = kernel.fused_experts.finalize_weight_and_reduce_impl()
            wait = finalize(output, rows, weights, ids, False, impl, prepared)
            if halves:
                assert output.isnan().all(), "the output is written before anybody waits"
                wait()
            outputs.append(output)
    # What experts without a gradient made has none, and every rank's backward runs.
    output = torch.empty_like(x.requires_grad_())
    with running_on("reference"):
        part.finalize(output, rows, weights, ids, False, impl, part.prepare(*given))
        output.sum().backward()
    return all(torch.equal(output, expected) for output in [*outputs, output]) and not cast(Any, x.grad).any()


def failing_call(group: Any, problem: Problem, change: dict[str, Any]) -> tuple[str, str]:
    """What a call raises, its class and text. change: `part`, options of prepare and finalize; `experts`, of the
    experts; `call`, of the kernel's call; `broken`, a rank whose hidden states are a row short."""
    number = torch.distributed.get_rank(group)
    x, *others = tensors_of(problem, number, False)
    part, call = change.get("part", {}), change.get("call", {})
    try:
        made = PARTS[change.get("mode", "all_to_all")](
            group,
            part.get("placement", problem.placement),
            **{name: value for name, value in part.items() if name != "placement"},
        )
        experts = modular.TritonExperts(weight_layout="in_out", **change.get("experts", {}))
        call = {name: to_torch(value) if isinstance(value, np.ndarray) else value for name, value in call.items()}
        with torch.no_grad(), running_on("reference"):
            FusedMoEModularKernel(made, experts)(x[1:] if change.get("broken") == number else x, *others, **call)
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


def answers_of(group: Any, problem: Problem, mode: str) -> tuple[Any, ...]:
    """What a part says of itself, and that it takes no tokens that it has not prepared."""
    part = PARTS[mode](group, problem.placement, max_tokens=9)
    try:
        part.finalize(torch.zeros(1, 1), torch.zeros(1, 1), torch.zeros(1, 1), torch.zeros(1, 1), False)
    except InvalidInput as error:
        assert f"prepared must be what prepare of {type(part).__name__} gave" in str(error)
    answers = part.supports_async(), part.max_num_tokens_per_rank(), part.num_dispatchers(), part.output_is_reduced()
    return *answers, part.topk_indices_dtype(), part.activation_format.name


def adapters_of(problem: Problem, number: int | None) -> modular.MoELoRAContext:
    """Adapters of 2 slots, for gate and up apart, of a rank or, with None, of all tokens and experts."""
    (_, hidden), experts, tokens = problem.x.shape, problem.placement.num_experts, len(problem.x)
    width, random = problem.experts.down.shape[1], torch.Generator().manual_seed(3)
    shapes = [[(16, hidden)] * 2, [(width, 16)] * 2, [(16, width)], [(hidden, 16)]]
    stacked = [[torch.randn(2, experts, *one, generator=random) / 4 for one in side] for side in shapes]
    ids = torch.randint(-1, 2, (tokens,), dtype=torch.int32, generator=random)
    if number is not None:
        owners = [max(expert, 0) for expert in problem.placement.owners[number]]
        owners += [0] * (problem.placement.per_rank - len(owners))
        stacked, experts = [[one[:, owners] for one in side] for side in stacked], len(owners)
        ids = ids[sum(problem.tokens[:number]) :][: problem.tokens[number]]
    enabled, sides = torch.ones(3, dtype=torch.int32), [tuple(side) for side in stacked]
    top_k = problem.routing.ids.shape[1]
    return modular.MoELoRAContext(*sides, enabled, 2, top_k, 2, False, 0, 1, experts, local_token_lora_mapping=ids)


def run_adapted_rank(group: Any, problem: Problem, way: ExchangeSpec, experts: str) -> np.ndarray:
    number = torch.distributed.get_rank(group)
    with running_on("reference"), poisoned(), torch.no_grad():
        kernel = FusedMoEModularKernel(part_of(group, problem, way, experts), experts_of(problem, experts))
        kernel.fused_experts.set_lora_context(adapters_of(problem, number))
        return to_numpy(kernel(*tensors_of(problem, number, False)))


def compare_adapted_with_one_device(pool: Pool, problem: Problem, way: ExchangeSpec, experts: str) -> None:
    """Raise unless the ranks' results are those of one device."""
    found = pool.call(run_adapted_rank, [(problem, way, experts)] * problem.placement.num_ranks)
    with running_on("reference"), torch.no_grad():
        alone = FusedMoEModularKernel(modular.MoEPrepareAndFinalizeNoEP(), EXPERTS["triton"]())
        plain = to_numpy(alone(*tensors_of(problem, None, False)))
        alone.fused_experts.set_lora_context(adapters_of(problem, None))
        expected = to_numpy(alone(*tensors_of(problem, None, False)))
    assert not np.array_equal(plain, expected)
    np.testing.assert_allclose(np.concatenate(found), expected, rtol=1e-5, atol=1e-5, err_msg=f"{way}, {experts}")
