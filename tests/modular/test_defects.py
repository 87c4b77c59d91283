"""What the systems that this family comes from do wrong in places, and what is right here; one test each."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from moe_core.errors import InvalidInput, Unsupported
from moe_torch import modular
from moe_torch.modular import FusedMoEModularKernel, MoEPrepareAndFinalizeNoEP
from moe_torch.modular.stages import batches_of
from tests.support.modular.problems import E, K, as_in_out, draw_problem, expected_stages
from tests.support.torch import require_equal, running_on, to_numpy, to_torch

STANDARD = (modular.TritonExperts, modular.OAITritonExperts, modular.UnfusedOAITritonExperts)


class OwnRouting(modular.OAITritonExperts):
    """Runs on what an overridden `_make_routing_data` returns."""

    def _make_routing_data(self, *arguments: Any) -> Any:
        return modular.make_routing_data(*arguments)


def run(experts: Any, problem: Any, expert_map: Any = None, **options: Any) -> Any:
    in_out = isinstance(experts, modular.BaseOAITritonExperts)
    arguments = to_torch(tuple(as_in_out(problem) if in_out else problem))
    kernel = FusedMoEModularKernel(MoEPrepareAndFinalizeNoEP(), experts)
    with running_on("reference"), torch.no_grad():
        return kernel(*arguments, expert_map=to_torch(expert_map), **options)


@pytest.mark.parametrize("experts", [*STANDARD, OwnRouting])
def test_an_id_of_minus_one_is_no_index_into_expert_map(experts: Any) -> None:
    """The original reads expert_map[-1], the last expert's entry."""
    problem = draw_problem(tokens=6)
    ids = problem.topk_ids.copy()
    ids[:, 1] = -1
    problem = problem._replace(topk_ids=ids)
    expert_map = np.arange(E, dtype=np.int32)
    result = run(experts(), problem, expert_map=expert_map)
    np.testing.assert_allclose(to_numpy(result), expected_stages(problem)["output"], rtol=1e-5, atol=1e-5)


def test_minus_one_sets_no_bit() -> None:
    """The original shifts by a negative number, or sets the last word's bit."""
    ids = torch.tensor([[0, -1, 33], [-1, -1, -1], [31, 32, 63]], dtype=torch.int16)
    bitmatrix = torch.full((3, 2), 7, dtype=torch.int32).view(torch.uint32)
    with running_on("reference"):
        modular.pack_bitmatrix(bitmatrix, ids, 3, 2, 3, BLOCK_SIZE_M=512, BLOCK_SIZE_K=32)
    assert bitmatrix.view(torch.int32).tolist() == [[1, 2], [0, 0], [-(2**31), -(2**31) + 1]]


def test_moe_sum_adds_no_unwritten_slots() -> None:
    """Slots without an expert are zeros when moe_sum sees them, whatever the workspaces held before."""
    seen = []

    class Watching(modular.UnfusedOAITritonExperts):
        def moe_sum(self, input: Any, output: Any) -> None:
            seen.append(input.clone())
            super().moe_sum(input, output)

    problem = draw_problem(tokens=16)
    arguments = to_torch(tuple(as_in_out(problem)))
    kernel = FusedMoEModularKernel(MoEPrepareAndFinalizeNoEP(), Watching())
    with running_on("reference"), torch.no_grad():
        for name in ("workspace13", "workspace2"):
            kernel.workspaces.take(name, (16, 2, 4 * K), torch.float32, torch.device("cpu")).fill_(float("nan"))
        result = kernel(*arguments)
    absent = problem.topk_ids < 0
    assert absent.any() and not to_numpy(seen[0])[absent].any()
    np.testing.assert_allclose(to_numpy(result), expected_stages(problem)["output"], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("topk", [3, 33])
def test_any_topk(topk: int) -> None:
    """The original packs at most 32 choices, and wants powers of two."""
    problem = draw_problem(tokens=4, topk=topk, experts=40)
    for experts in STANDARD:
        expected = expected_stages(problem)["output"]
        np.testing.assert_allclose(to_numpy(run(experts(), problem)), expected, rtol=1e-4, atol=1e-5)
    words = torch.empty(4, 2, dtype=torch.uint32)
    modular.pack_bitmatrix(words, to_torch(problem.topk_ids), 4, 2, topk)
    bits = to_numpy(words.view(torch.int32)).view(np.uint32)[:, :, None] >> np.arange(32, dtype=np.uint32) & 1
    assert bits.sum() == (problem.topk_ids >= 0).sum()


@pytest.mark.parametrize(
    "parts",
    [MoEPrepareAndFinalizeNoEP(), modular.BatchedPrepareAndFinalize(40, E)],
    ids=lambda parts: type(parts).__name__,
)
def test_prepare_leaves_its_input_alone(parts: Any) -> None:
    x, _, _, weights, ids = to_torch(tuple(draw_problem(topk=1)))
    before = x.clone()
    with running_on("reference"):
        prepared = parts.prepare(x, None, None, weights, ids, E, None, True)
    require_equal(x, before, "a1")
    assert prepared.a1q.data_ptr() != x.data_ptr()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_ids_beyond_int16(dtype: Any) -> None:
    """40000 global experts, two of them here; an int64 id that int32 cannot hold is no expert's."""
    problem = draw_problem(tokens=6, experts=2, topk=1)
    ids = problem.topk_ids.astype(np.int64)
    expert_map = np.full(40000, -1, np.int32)
    expert_map[[33000, 39999]] = 0, 1
    far = np.where(ids >= 0, np.array([33000, 39999])[ids], -1)
    x, w1, w2, weights, _ = to_torch(tuple(problem))
    kernel = FusedMoEModularKernel(MoEPrepareAndFinalizeNoEP(), modular.TritonExperts())
    with running_on("reference"), torch.no_grad():
        result = kernel(x, w1, w2, weights, to_torch(far).to(dtype), expert_map=to_torch(expert_map))
        np.testing.assert_allclose(to_numpy(result), expected_stages(problem)["output"], rtol=1e-5, atol=1e-5)
        routing_data, _, _ = modular.make_routing_data(to_torch(far).to(dtype), weights, 40000)
        assert int(routing_data.expt_hist[39999]) == (ids == 1).sum()
        if dtype == torch.int64:
            wrapping = torch.full((6, 1), 2**32, dtype=torch.int64)
            assert not kernel(x, w1, w2, weights, wrapping).any()


def test_gate_weights_stay_fp32() -> None:
    weights = torch.tensor([[1 / 3, 2 / 3]])
    with running_on("reference"):
        routing_data, gather, scatter = modular.make_routing_data(torch.tensor([[1, 0]]), weights, 2)
    assert routing_data.gate_scal.dtype == torch.float32
    assert routing_data.gate_scal.tolist() == [weights[0, 1].item(), weights[0, 0].item()]
    assert gather.src_indx.tolist() == scatter.dst_indx.tolist() == [1, 0]


def test_the_activation_is_not_ignored() -> None:
    """Asked for by name it is that one; unknown names are a ValueError; left out, gpt-oss's as in the original."""
    problem = draw_problem(tokens=8)
    x, w1, w2, weights, ids = to_torch(tuple(as_in_out(problem)))
    with running_on("reference"), torch.no_grad():
        routing = modular.make_routing_data(ids, weights, E)
        for name, options in (("silu", {"activation": "silu"}), ("swiglu_oai", {}), ("gelu", {"activation": "gelu"})):
            result = modular.triton_kernel_fused_experts(None, x, w1, w2, *routing, 2, **options)
            expected = expected_stages(problem, name)["output"]
            np.testing.assert_allclose(to_numpy(result), expected, rtol=1e-4, atol=1e-5, err_msg=name)
        with pytest.raises(ValueError, match="activation must be one of"):
            modular.triton_kernel_fused_experts(None, x, w1, w2, *routing, 2, activation="swish")
        with pytest.raises(InvalidInput, match="swiglu_alpha and swiglu_limit belong to"):
            modular.triton_kernel_fused_experts(None, x, w1, w2, *routing, 2, activation="silu", swiglu_alpha=1.0)
        with pytest.raises(ValueError, match="activation must be one of"):
            modular.UnfusedOAITritonExperts().activation("swish", x[:, :8], x[:, :16])


def test_the_weight_follows_the_activation_or_is_on_the_input() -> None:
    """Weighting what the activation reads, as a split reduction tempts to, is neither: activations are not linear."""
    problem = draw_problem(topk=1)
    doubled = problem._replace(topk_weights=2 * problem.topk_weights)
    for experts in STANDARD:
        require_equal(run(experts(), doubled), 2 * run(experts(), problem), experts.__name__)
    x, w1, w2, weights, ids = to_torch(tuple(as_in_out(problem)))
    with running_on("reference"), torch.no_grad():
        routing = modular.make_routing_data(ids, weights, E)
        options = {"activation": "silu", "apply_router_weight_on_input": True}
        result = modular.triton_kernel_fused_experts(None, x, w1, w2, *routing, 1, **options)
        plain = modular.make_routing_data(ids, torch.ones_like(weights), E)
        weighted = modular.triton_kernel_fused_experts(None, x * weights, w1, w2, *plain, 1, activation="silu")
    require_equal(result, weighted, "weighted input")


@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("weighted_after", [True, False])
def test_a_token_may_name_an_expert_twice(mapped: bool, weighted_after: bool) -> None:
    """In the batched format all of its slots count, where the original drops rows beyond an expert's block."""
    problem = draw_problem(tokens=7, topk=3)
    ids = np.random.default_rng(1).integers(-1, 2, problem.topk_ids.shape).astype(np.int32)
    expert_map = np.array([1, 1, 0, -1, 3], np.int32) if mapped else None
    local = ids if expert_map is None else np.where(ids >= 0, expert_map[ids], -1)
    problem = problem._replace(topk_ids=ids)
    if not weighted_after:
        problem = problem._replace(topk_weights=np.ones_like(problem.topk_weights))
    expected = expected_stages(problem._replace(topk_ids=local))["output"]
    experts, parts = modular.BatchedTritonExperts(7), modular.BatchedPrepareAndFinalize(7, E)
    kernel = FusedMoEModularKernel(parts, experts)
    with running_on("reference"), torch.no_grad():
        result = kernel(*to_torch(tuple(problem)), expert_map=to_torch(expert_map))
        np.testing.assert_allclose(to_numpy(result), expected, rtol=1e-5, atol=1e-5)
        prepared = parts.prepare(
            *to_torch((problem.hidden_states, None, None, problem.topk_weights, local)), E, None, False
        )
        rows = torch.randn(E, 7, K)
        given = parts.finalize, modular.TopKWeightAndReduceNaiveBatched()
        outputs = [torch.empty(7, K), torch.empty(7, K)]
        arguments = (rows, *to_torch((problem.topk_weights, local)), not weighted_after)
        given[0](outputs[0], *arguments, prepared=prepared)
        given[1].apply(outputs[1], *arguments)
        require_equal(outputs[1], outputs[0], "both ways to find rows")


class _Injects:
    def activation(self, *arguments: Any) -> None:
        raise AssertionError("never called")


def test_overrides_that_nobody_would_call_are_refused() -> None:
    """Wherever they come from: a mixin, the class, the object."""
    nothing = {"moe_sum": lambda *arguments: None}
    refused = {
        "B must not override activation": lambda: type("B", (_Injects, modular.TritonExperts), {}),
        r"A must not override activation alone.*UnfusedOAITritonExperts": lambda: type(
            "A", (modular.BatchedTritonExperts,), {"activation": lambda self, activation, output, input: None}
        ),
        "C must not override moe_sum": lambda: type("C", (modular.OAITritonExperts,), nothing),
        "D must not override weights": lambda: type("D", (modular.TritonOrDeepGemmExperts,), {"weights": print}),
        "TritonExperts must not override activation": lambda: setattr(modular.TritonExperts(), "activation", print),
    }
    for message, make in refused.items():
        with pytest.raises(Unsupported, match=message):
            make()
    allowed = type("Own", (_Injects, modular.TritonExperts), {"apply": lambda self, *arguments: None})
    assert isinstance(allowed(), modular.TritonExperts)
    problem, seen = draw_problem(tokens=4), []
    experts = modular.UnfusedOAITritonExperts()
    own = experts.activation
    experts.activation = lambda *arguments: seen.append(own(*arguments))
    np.testing.assert_allclose(
        to_numpy(run(experts, problem)), expected_stages(problem)["output"], rtol=1e-5, atol=1e-5
    )
    assert len(seen) == 1


def test_weights_of_a_subclass_may_change() -> None:
    """A known call runs with the tensors that an overridden `weights` returns, not with those of the first call."""
    problem, factor = draw_problem(tokens=4), [1.0]

    class Scaled(modular.TritonExperts):
        def weights(self, w1: Any, w2: Any) -> Any:
            return super().weights(w1, w2 * factor[0])

    experts, expected = Scaled(), expected_stages(problem)["output"]
    for factor[0] in (1.0, 2.0, 0.5):
        result = to_numpy(run(experts, problem))
        np.testing.assert_allclose(result, factor[0] * expected, rtol=1e-5, atol=1e-5)


def test_one_token_that_names_an_expert_twice_has_one_row() -> None:
    layout = batches_of(torch.tensor([[1, 1]], dtype=torch.int32), 3, 4)
    assert layout.group_sizes.tolist() == [0, 1, 0]
    first, second = layout.row_of_slot.tolist()
    assert first == second >= 0


def test_constructors_refuse_what_they_cannot_be() -> None:
    with pytest.raises(InvalidInput, match=r"rank must be .*, got -1"):
        modular.BatchedPrepareAndFinalize(40, E, rank=-1)
    for experts in STANDARD:
        with pytest.raises(InvalidInput, match=r"quant_config must be .*FusedMoEQuantConfig"):
            experts(quant_config=3)
