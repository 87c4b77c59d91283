"""The modular kernel against the composed op and the reference: every class, chunks, ranks, memory, refusals."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import moe_torch
from moe_core.base.arrays import ArraySpec
from moe_core.base.target import Target
from moe_core.errors import InvalidInput, Unsupported
from moe_core.modular.types import ProblemSize
from moe_core.modular.weights import tuning_of_whole
from moe_core.parity.tolerance import assert_close
from moe_core.specs.moe import MoESpec
from moe_core.specs.operands import ExpertWeights
from moe_torch import modular
from moe_torch.modular import FusedMoEModularKernel, MoEPrepareAndFinalizeNoEP
from tests.support.modular.problems import (
    TOPK,
    E,
    F,
    K,
    Problem,
    as_in_out,
    draw_problem,
    expected_output,
    expected_stages,
    expert_maps,
    output_tolerance,
)
from tests.support.torch import REAL_KERNELS, on_engines, require_equal, running_on, to_numpy, to_torch


class OwnRouting(modular.OAITritonExperts):
    """Runs stage by stage on what an overridden `_make_routing_data` returns."""

    def _make_routing_data(self, *arguments: Any) -> Any:
        return modular.make_routing_data(*arguments)


STANDARD = (modular.TritonExperts, modular.OAITritonExperts, modular.UnfusedOAITritonExperts)
CLASSES = (*STANDARD, modular.BatchedTritonExperts)
#: Where each rounds, see `expected_output`.
ROUNDS = dict(zip(CLASSES, ("fused", "fused", "stages", "rows"), strict=True))
SILU = moe_torch.Activation("silu")


def kernel_of(experts: type, tokens: int = 40, num_experts: int = E, **options: Any) -> FusedMoEModularKernel:
    if experts is modular.BatchedTritonExperts:
        parts = modular.BatchedPrepareAndFinalize(tokens, num_experts), experts(tokens)
    else:
        parts = MoEPrepareAndFinalizeNoEP(), experts()
    return FusedMoEModularKernel(*parts, **options)


def tensors(experts: type, problem: Problem, device: Any) -> tuple[Any, ...]:
    """The problem in the experts' layout."""
    in_out = issubclass(experts, modular.BaseOAITritonExperts)
    return to_torch(tuple(as_in_out(problem) if in_out else problem), device)


def composed(arguments: tuple[Any, ...], layout: str, **options: Any) -> Any:
    x, w1, w2, weights, ids = arguments
    spec = MoESpec(SILU, weight_layout=layout)
    return moe_torch.moe(x, moe_torch.ExpertWeights(w1, w2), moe_torch.TopK(ids, weights), spec, **options).output


@on_engines
@pytest.mark.parametrize("experts", [modular.TritonExperts, modular.OAITritonExperts])
def test_fused_experts_are_the_composed_op(experts: type, engine: str) -> None:
    with running_on(engine) as device, torch.no_grad():
        arguments = tensors(experts, draw_problem("bfloat16"), device)
        kernel = kernel_of(experts)
        for _ in range(2):
            expected = composed(arguments, kernel.fused_experts.weight_layout)
            require_equal(kernel(*arguments), expected, experts.__name__)
            kernel.workspaces.take("workspace2", (40, TOPK, F), torch.bfloat16, device).fill_(float("nan"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("experts", CLASSES)
def test_every_class_agrees_with_the_reference(experts: type, dtype: str) -> None:
    problem, rounds = draw_problem(dtype), ROUNDS[experts]
    with running_on(REAL_KERNELS) as device, torch.no_grad():
        result = kernel_of(experts)(*tensors(experts, problem, device))
    expected = expected_output(problem, rounds)
    assert_close(to_numpy(result), expected, output_tolerance(dtype, rounds), experts.__name__)


@pytest.mark.parametrize("experts", STANDARD)
def test_chunks_equal_the_whole_bitwise(experts: type) -> None:
    """Two whole chunks and a short one; the workspaces are those of a chunk."""
    with running_on(REAL_KERNELS) as device, torch.no_grad():
        arguments = tensors(experts, draw_problem("bfloat16"), device)
        whole, chunked = kernel_of(experts), kernel_of(experts, chunk_size=16)
        require_equal(chunked(*arguments), whole(*arguments), experts.__name__)
        assert chunked.workspaces.nbytes * 40 == whole.workspaces.nbytes * 16


def test_experts_of_chunks_have_the_tiles_of_the_whole() -> None:
    with running_on(REAL_KERNELS) as device:
        x, w1, w2, _, ids = tensors(modular.TritonExperts, draw_problem("bfloat16"), device)
        experts = modular.TritonExperts()
        size = experts.moe_problem_size(x, w1, w2, ids)
        tuning = experts.chunked_as_whole(x, w1, w2, size, "silu").tuning
        assert tuning is not None and tuning.matmul_1 is not None and tuning.matmul_2 is not None
        assert experts.tuning is None


def test_chunks_inherit_the_tiles_of_the_whole() -> None:
    """Planned for a GPU: other tiles for few tokens, those of the batch for its chunks."""
    target, experts, found = Target("cuda", 90, 132), modular.TritonExperts(), {}
    weights = ExpertWeights(ArraySpec((64, 1536, 2048), "bfloat16"), ArraySpec((64, 2048, 768), "bfloat16"))

    def tuning(tokens: int, products: Any) -> Any:
        size = ProblemSize(64, tokens, 1536, 2048, 8)
        return tuning_of_whole(ArraySpec((tokens, 2048), "bfloat16"), weights, size, products, target)

    for tokens in (4096, 16):
        found[tokens] = tuning(tokens, experts.products("silu"))
    assert found[4096] != found[16]
    # A chunk that is given the configuration of the whole takes it.
    experts.tuning = found[4096]
    assert tuning(16, experts.products("silu")) == found[4096]
    experts.tuning = moe_torch.Tuning(batch_invariant=True)
    assert tuning(4096, experts.products("silu")) is None


@pytest.mark.parametrize("experts", CLASSES)
def test_four_ranks_sum_to_the_unsplit_result(experts: type) -> None:
    """Each rank has its experts and a map; ids of others, and -1, add nothing."""
    problem = draw_problem(experts=8)
    with running_on("reference") as device, torch.no_grad():
        whole = kernel_of(experts, num_experts=8)(*tensors(experts, problem, device))
        total = torch.zeros_like(whole)
        for expert_map in expert_maps(8, 4):
            own = np.flatnonzero(expert_map >= 0)
            part = problem._replace(w1=problem.w1[own], w2=problem.w2[own])
            kernel = kernel_of(experts, num_experts=2)
            options = {"expert_map": to_torch(expert_map, device), "global_num_experts": 8}
            total += kernel(*tensors(experts, part, device), **options)
    torch.testing.assert_close(total, whole, rtol=1e-5, atol=1e-6)


def test_ranks_of_the_batched_format_need_no_map() -> None:
    """Neighbouring experts: rank r has E ids from r * E on, in prepare and in finalize."""
    problem = draw_problem(experts=8)
    with running_on("reference") as device, torch.no_grad():
        whole = kernel_of(modular.TritonExperts)(*to_torch(tuple(problem), device))
        total = torch.zeros_like(whole)
        for rank in range(4):
            own = slice(2 * rank, 2 * rank + 2)
            part = to_torch(tuple(problem._replace(w1=problem.w1[own], w2=problem.w2[own])), device)
            prepare = modular.BatchedPrepareAndFinalize(40, 2, rank=rank)
            kernel = FusedMoEModularKernel(prepare, modular.BatchedTritonExperts(40))
            total += kernel(*part, global_num_experts=8)
            # Without what prepare knows, the rows are found again.
            impl = modular.TopKWeightAndReduceNaiveBatched(rank)
            x, _, _, weights, ids = part
            prepared = prepare.prepare(x, None, None, weights, ids, 8, None, False)
            unused = torch.arange(40, device=device) >= prepared.expert_num_tokens[:, None]
            assert unused.any() and not prepared.a1q[unused].any()
            once = prepared.a1q.clone()
            again = impl.apply(None, once, weights, ids, False)
            expected = torch.empty_like(x)
            prepare.finalize(expected, once, weights, ids, False, prepared=prepared)
            require_equal(again, expected, f"rank {rank}")
    torch.testing.assert_close(total, whole, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("experts", CLASSES)
def test_biases_and_the_weight_on_the_input(experts: type) -> None:
    random = np.random.default_rng(3)
    problem = draw_problem(topk=1)
    biases = (random.standard_normal((E, 2 * F)).astype(np.float32), random.standard_normal((E, K)).astype(np.float32))
    expected = expected_stages(problem, on_input=True, biases=biases)["output"]
    with running_on("reference") as device, torch.no_grad():
        arguments = tensors(experts, problem, device)
        before = [argument.clone() for argument in arguments]
        config = modular.FusedMoEQuantConfig.make(w1_bias=to_torch(biases[0]), w2_bias=to_torch(biases[1]))
        kernel = kernel_of(experts)
        kernel.fused_experts.quant_config = config
        result = kernel(*arguments, apply_router_weight_on_input=True)
        for name, one, other in zip(Problem._fields, arguments, before, strict=True):
            require_equal(one, other, name)
        plain = kernel(*arguments)
        require_equal(kernel(*arguments, inplace=True), plain, "inplace")
        require_equal(arguments[0], plain, "hidden_states after inplace")
    np.testing.assert_allclose(to_numpy(result), expected, rtol=2e-5, atol=2e-5)
    assert not np.allclose(to_numpy(plain), expected)


@pytest.mark.parametrize("experts", [*CLASSES, OwnRouting])
def test_every_call_gets_what_it_asks_for(experts: type) -> None:
    """Calls whose tensors look alike, one after the other."""
    problem = draw_problem(topk=1)
    with running_on("reference") as device, torch.no_grad():
        arguments, kernel = tensors(experts, problem, device), kernel_of(experts)
        for activation in ("silu", "gelu", "swiglu_oai"):
            for on_input in (False, True):
                found = kernel(*arguments, activation=activation, apply_router_weight_on_input=on_input)
                expected = expected_stages(problem, activation, on_input=on_input)["output"]
                np.testing.assert_allclose(to_numpy(found), expected, rtol=1e-4, atol=1e-5, err_msg=activation)


def test_no_tokens_and_no_experts() -> None:
    with running_on(REAL_KERNELS) as device, torch.no_grad():
        for experts in CLASSES:
            x, w1, w2, weights, ids = tensors(experts, draw_problem(tokens=3), device)
            kernel = kernel_of(experts, 3)
            assert kernel(x[:0], w1, w2, weights[:0], ids[:0]).shape == (0, K)
            nothing = kernel(x, w1, w2, weights, torch.full_like(ids, -1))
            assert not nothing.any() and nothing.isfinite().all(), experts


def test_scratch_is_owned_shared_and_not_copied() -> None:
    with running_on("reference") as device:
        arguments = tensors(modular.TritonExperts, draw_problem(), device)
        shared = modular.Workspaces()
        layers = [kernel_of(modular.TritonExperts, workspaces=shared) for _ in range(2)]
        for layer in layers:
            layer(*arguments)
        assert shared.nbytes == 0, "autograd may keep what it sees"
        with torch.no_grad():
            first = shared.take("workspace2", (40, TOPK, F), torch.float32, device)
            for layer in layers:
                layer(*arguments)
            assert shared.nbytes == 40 * TOPK * (F + K) * 4
            assert shared.take("workspace2", (4, F), torch.float32, device).data_ptr() == first.data_ptr()
        assert copy.deepcopy(layers[0]).workspaces.nbytes == 0
        with torch.inference_mode():
            inside = shared.take("workspace2", (4, F), torch.float32, device)
        with torch.no_grad():
            assert inside.is_inference() and not shared.take("workspace2", (4, F), torch.float32, device).is_inference()
        shared.clear()
        assert shared.nbytes == 0


def test_routing_of_ones_own() -> None:
    """The bits of the composed op, in chunks too."""
    with running_on(REAL_KERNELS) as device, torch.no_grad():
        arguments = tensors(OwnRouting, draw_problem("bfloat16"), device)
        expected = composed(arguments, "in_out")
        require_equal(kernel_of(OwnRouting)(*arguments), expected, "whole")
        require_equal(kernel_of(OwnRouting, chunk_size=32)(*arguments), expected, "chunks")


def test_routing_put_on_the_object() -> None:
    seen: list[Any] = []

    def recorded(*arguments: Any) -> Any:
        seen.append(modular.make_routing_data(*arguments))
        return seen[-1]

    with running_on("reference") as device, torch.no_grad():
        arguments = tensors(modular.OAITritonExperts, draw_problem(), device)
        kernel = kernel_of(modular.OAITritonExperts)
        expected = kernel(*arguments)
        kernel.fused_experts._make_routing_data = recorded
        torch.testing.assert_close(kernel(*arguments), expected)
    assert len(seen) == 1


class TwoRanksInOne(MoEPrepareAndFinalizeNoEP):
    """Expert parallelism as one class: tokens of two ranks are brought together, and each gets its half back."""

    def prepare(self, a1: Any, a1_scale: Any, a2_scale: Any, topk_weights: Any, topk_ids: Any, *rest: Any) -> Any:
        twice = [torch.cat([array, array]) for array in (a1, topk_ids, topk_weights)]
        return modular.PreparedTokens(twice[0], None, None, twice[1], twice[2], handle=a1.shape[0])

    def finalize(self, output: Any, fused: Any, *rest: Any) -> None:
        output.copy_(fused[rest[-1].handle :])

    def writes_output(self, impl: Any) -> bool:
        return False


def test_a_class_of_ones_own_may_dispatch_tokens() -> None:
    with running_on("reference") as device, torch.no_grad():
        arguments = tensors(modular.TritonExperts, draw_problem(), device)
        kernel = FusedMoEModularKernel(TwoRanksInOne(), modular.TritonExperts())
        torch.testing.assert_close(kernel(*arguments), kernel_of(modular.TritonExperts)(*arguments))


def test_published_triple_and_default_finalize() -> None:
    """prepare unpacks to three, and finalize with the published arguments weights and reduces."""
    parts = MoEPrepareAndFinalizeNoEP()
    problem = draw_problem()
    stages = expected_stages(problem._replace(topk_weights=np.ones_like(problem.topk_weights)))
    x, _, _, weights, ids = to_torch(tuple(problem))
    with running_on("reference"), torch.no_grad():
        a1q, scale, counts = parts.prepare(x, None, None, weights, ids, E, None, False)
        assert a1q is x and scale is None and counts is None
        output = torch.empty_like(x)
        slots = to_torch(stages["matmul2"]).view(*ids.shape, K)
        # Nobody writes the rows of slots without an expert.
        slots[ids < 0] = torch.nan
        parts.finalize(output, slots, weights, ids, False)
    torch.testing.assert_close(output, to_torch(expected_stages(problem)["output"]), rtol=1e-5, atol=1e-5)


def refusals(device: Any) -> dict[str, tuple[Any, str]]:
    x, w1, w2, weights, ids = tensors(modular.TritonExperts, draw_problem(), device)
    kernel, batched = kernel_of(modular.TritonExperts), kernel_of(modular.BatchedTritonExperts)
    scale = torch.ones(E)
    grad = x.clone().requires_grad_()
    return {
        "formats": (lambda: FusedMoEModularKernel(MoEPrepareAndFinalizeNoEP(), modular.BatchedTritonExperts(4)),
            "Standard of MoEPrepareAndFinalizeNoEP and BatchedExperts of BatchedTritonExperts"),
        "chunk_size": (lambda: kernel_of(modular.TritonExperts, chunk_size=20), "multiple of 16, got 20"),
        "no chunks": (lambda: kernel_of(modular.BatchedTritonExperts, chunk_size=16), "supports no chunking"),
        "scale": (lambda: kernel(x, w1, w2, weights, ids, w1_scale=scale), "w1_scale must not be given without"),
        "layout": (lambda: kernel(x, w2, w1, weights, ids), "hidden_states must have the 64 columns"),
        "rank": (lambda: kernel(x[None], w1, w2, weights, ids), r"must be \[num_tokens, hidden\]"),
        "ids": (lambda: kernel(x, w1, w2, weights, ids.float()), "topk_ids must be integers"),
        "rows": (lambda: kernel(x, w1, w2, weights[:3], ids[:3]), "a row for each of the 40 tokens"),
        "weights": (lambda: kernel(x, w1, w2, weights[:3], ids), "topk_weights must be floats"),
        "dtype": (lambda: kernel(x.half(), w1, w2, weights, ids), "the dtype of w1, torch.float32"),
        "experts": (lambda: kernel(x, w1, w2, weights, ids, global_num_experts=9), "pass expert_map"),
        "name": (lambda: kernel(x, w1, w2, weights, ids, activation="tanh"), "activation must be one of"),
        "on input": (lambda: kernel(x, w1, w2, weights, ids, apply_router_weight_on_input=True),
            "topk must be 1 with apply_router_weight_on_input, got 2"),
        "strides": (lambda: kernel(x.t().contiguous().t(), w1, w2, weights, ids, inplace=True), "must be contiguous"),
        "gradient": (lambda: kernel(grad, w1, w2, weights, ids, inplace=True), "a backward would read"),
        "placed rows": (lambda: batched.prepare_finalize.prepare(x[:3], None, None, weights, ids, E, None, False),
            "a row for each of the 3 tokens of a1"),
        "too many": (lambda: batched(torch.cat([x, x]), w1, w2, torch.cat([weights] * 2), torch.cat([ids] * 2)), "40"),
        "delegate": (lambda: modular.TopKWeightAndReduceDelegate().apply(None, x, weights, ids, False),
            "leaves the choice to prepare_finalize"),
    }  # fmt: skip


@pytest.mark.parametrize("name", refusals("cpu"))
def test_wrong_calls_are_refused(name: str) -> None:
    with running_on("reference"):
        call, message = refusals("cpu")[name]
        with pytest.raises((InvalidInput, Unsupported), match=message):
            call()


def test_reductions_compare_by_value() -> None:
    assert modular.TopKWeightAndReduceNoOP() == modular.TopKWeightAndReduceNoOP()
    assert modular.TopKWeightAndReduceContiguous() != modular.TopKWeightAndReduceDelegate()
    assert modular.TopKWeightAndReduceNaiveBatched(1) == modular.TopKWeightAndReduceNaiveBatched(1)
    assert modular.TopKWeightAndReduceNaiveBatched(1) != modular.TopKWeightAndReduceNaiveBatched(2)
