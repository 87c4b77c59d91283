"""Classes written as other systems write theirs, of public names alone: they run inside our kernel as they stand."""

from __future__ import annotations

import enum
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from moe_core.errors import InvalidInput
from moe_torch import modular
from moe_torch.compat.triton_kernels.matmul_ogs import FnSpecs, FusedActivation, PrecisionConfig, matmul_ogs
from moe_torch.compat.triton_kernels.numerics_details.mxfp import downcast_to_mxfp, upcast_from_mxfp
from moe_torch.compat.triton_kernels.routing import routing_from_bitmatrix
from moe_torch.compat.triton_kernels.swiglu import swiglu_fn
from moe_torch.compat.triton_kernels.tensor import FP4, Bitmatrix, wrap_torch_tensor
from tests.support.modular.problems import E, K, as_in_out, draw_problem, expected_stages
from tests.support.torch import REAL_KERNELS, require_equal, running_on, to_numpy, to_torch

Standard = modular.FusedMoEActivationFormat.Standard
ENGINES = ["reference", REAL_KERNELS]


class Kind(enum.Enum):
    """Activations as members of an enumeration."""

    SILU = "silu"
    SWIGLUOAI = "swigluoai"


def routing_of(ids: Any, weights: Any, num_experts: int) -> Any:
    """A routing-data maker of one's own: a packed bitmatrix, sorted."""
    rows, topk = ids.shape
    words = -(-num_experts // 32)
    bits = torch.zeros(rows, words, dtype=torch.uint32, device=ids.device)
    modular.pack_bitmatrix(bits, ids, rows, words, topk)
    bitmatrix = Bitmatrix(bits, shape=[rows, words * 32], shape_max=[rows, None])
    weights = torch.where(ids == -1, -1.0, weights)
    return routing_from_bitmatrix(bitmatrix, weights, ids.to(torch.int16), num_experts, topk)


class Ported(modular.FusedMoEExpertsModular):
    """The newest generation: a static activation_format, sizes as a tuple, `(moe_config, quant_config)`."""

    @staticmethod
    def activation_format() -> Any:
        return Standard

    def moe_problem_size(self, a1: Any, w1: Any, w2: Any, topk_ids: Any) -> tuple[int, ...]:
        return w1.shape[0], a1.shape[0], w1.shape[2], a1.shape[1], topk_ids.shape[1]

    def finalize_weight_and_reduce_impl(self) -> Any:
        return modular.TopKWeightAndReduceNoOP()

    def workspace_shapes(self, M: int, N: int, K: int, topk: int, *others: Any) -> Any:
        return (M * topk, N // 2), (M * topk, max(N, K)), (M, K)

    def local(self, ids: Any, expert_map: Any) -> Any:
        return ids if expert_map is None else torch.where(ids >= 0, expert_map[ids.clamp(min=0).long()], -1)

    def apply(
        self, output, hidden_states, w1, w2, topk_weights, topk_ids, activation, global_num_experts, expert_map,
        a1q_scale, a2_scale, workspace13, workspace2, expert_tokens_meta, apply_router_weight_on_input,
    ) -> None:  # fmt: skip
        """Two fused products."""
        assert activation is Kind.SWIGLUOAI
        config = self.quant_config
        ids = self.local(topk_ids, expert_map)
        data, gather, scatter = routing_of(ids, topk_weights, w1.shape[0])
        fused = FusedActivation(FnSpecs("swiglu", swiglu_fn, ("alpha", "limit")), (1.702, 7.0), 2)
        rows = matmul_ogs(
            hidden_states, w1, config.w1_bias, data, gather_indx=gather, precision_config=config.w1_precision,
            fused_activation=fused,
        )  # fmt: skip
        output.copy_(
            matmul_ogs(
                rows, w2, config.w2_bias, data, scatter_indx=scatter, precision_config=config.w2_precision,
                gammas=data.gate_scal,
            )
        )  # fmt: skip


class PortedUnfused(Ported):
    """Open between the stages; the sum is switched off by assigning to a field of the routing."""

    def delta(self, rows: Any) -> Any:
        return rows

    def apply(
        self, output, hidden_states, w1, w2, topk_weights, topk_ids, activation, global_num_experts, expert_map,
        a1q_scale, a2_scale, workspace13, workspace2, expert_tokens_meta, apply_router_weight_on_input,
    ) -> None:  # fmt: skip
        config, topk = self.quant_config, topk_ids.shape[1]
        ids = self.local(topk_ids, expert_map)
        data, gather, scatter = routing_of(ids, topk_weights, w1.shape[0])
        before = matmul_ogs(
            hidden_states, w1, config.w1_bias, data, gather_indx=gather, precision_config=config.w1_precision
        )
        by_slot = self.delta(before[gather.dst_indx.long()])
        activated = by_slot.new_empty(by_slot.shape[0], self.adjust_N_for_activation(by_slot.shape[1], activation))
        self.activation(activation, activated, by_slot)
        data.n_expts_act = 1
        rows = matmul_ogs(
            activated[gather.src_indx.long()], w2, config.w2_bias, data, scatter_indx=scatter,
            precision_config=config.w2_precision, gammas=data.gate_scal,
        )  # fmt: skip
        rows = torch.where((ids >= 0)[..., None], rows.view(*ids.shape, -1), 0)
        output.copy_(rows.float().sum(1).to(output.dtype))
        assert topk == rows.shape[1]


class WithAdapter(PortedUnfused):
    """Adds what an adapter would to the rows that the activation reads."""

    def delta(self, rows: Any) -> Any:
        return rows + 1


class Gathering(modular.FusedMoEPrepareAndFinalizeModular):
    """Sends tokens elsewhere, as ranks do, here into another order; published argument lists of the newest kind."""

    activation_format = property(lambda self: Standard)
    asynchronous = False

    def topk_indices_dtype(self) -> Any:
        return torch.int64

    def supports_async(self) -> bool:
        return self.asynchronous

    def prepare(
        self, a1, topk_weights, topk_ids, num_experts, expert_map, apply_router_weight_on_input, quant_config,
        defer_input_quant,
    ) -> Any:  # fmt: skip
        assert topk_ids.dtype == torch.int64 and isinstance(quant_config, modular.FusedMoEQuantConfig)
        order = torch.arange(a1.shape[0] - 1, -1, -1)
        return a1[order], None, None, topk_ids[order], topk_weights[order]

    def finalize(
        self, output, fused_expert_output, topk_weights, topk_ids, apply_router_weight_on_input, weight_and_reduce_impl
    ) -> None:
        assert weight_and_reduce_impl == modular.TopKWeightAndReduceNoOP()
        output.copy_(fused_expert_output.flip(0))


class Overlapping(Gathering):
    """The same in two halves: a hook, then a receiver; finalize has a receiver alone and five arguments."""

    asynchronous = True
    hooks = 0

    def _hook(self) -> None:
        self.hooks += 1

    def prepare_async(self, *arguments: Any, quant_config: Any, defer_input_quant: bool, **named: Any) -> Any:
        raise AssertionError("replaced below")

    def finalize_async(self, output, fused_expert_output, topk_weights, topk_ids, apply_router_weight_on_input) -> Any:
        return lambda: output.copy_(fused_expert_output.flip(0))


def _prepare_async(
    self: Any, a1, topk_weights, topk_ids, num_experts, expert_map, apply_router_weight_on_input, quant_config,
    defer_input_quant,
) -> Any:  # fmt: skip
    arguments = (a1, topk_weights, topk_ids, num_experts, expert_map, apply_router_weight_on_input)
    return self._hook, lambda: self.prepare(*arguments, quant_config, defer_input_quant)


Overlapping.prepare_async = _prepare_async  # type: ignore[method-assign]
CASES = {"fused": (Ported, "fused"), "unfused": (PortedUnfused, "stages")}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize("kind", CASES)
def test_ported_experts_run(kind: str, mapped: bool, engine: str) -> None:
    """bf16, with ids of -1 and an expert map, behind every kind of prepare."""
    problem = draw_problem("bfloat16", tokens=9)
    ids = problem.topk_ids.copy()
    ids[0, 1] = ids[3] = -1
    problem = problem._replace(topk_ids=ids)
    expert_map = np.array([2, -1, 0, 1, -1, 4, 3], np.int32) if mapped else None
    local = ids if expert_map is None else np.where(ids >= 0, expert_map[np.maximum(ids, 0)], -1).astype(np.int32)
    expected = expected_stages(problem._replace(topk_ids=local), "swiglu_oai")["output"].astype(np.float32)
    with running_on(engine) as device, torch.no_grad():
        arguments = to_torch(tuple(as_in_out(problem)), device)
        options = {
            "activation": Kind.SWIGLUOAI,
            "expert_map": None if expert_map is None else to_torch(expert_map, device),
        }
        config = modular.FusedMoEQuantConfig()
        found = []
        for parts in (modular.MoEPrepareAndFinalizeNoEP(), Gathering(), Overlapping()):
            experts = CASES[kind][0](object(), config)
            kernel = modular.FusedMoEModularKernel(parts, experts)
            found.append(kernel(*arguments, **options))
            if isinstance(parts, Overlapping):
                assert parts.hooks == 1
    np.testing.assert_allclose(to_numpy(found[0]).astype(np.float32), expected, rtol=0.05, atol=0.05)
    for other in found[1:]:
        require_equal(other, found[0], "another prepare")


@pytest.mark.parametrize("engine", ENGINES)
def test_quantised_weights_as_they_are_passed(engine: str) -> None:
    """mxfp4 in Tensors with precision objects as scales: in ported classes, in ours, and in the functions."""
    problem, expert_map = draw_problem("bfloat16", tokens=9), np.array([2, 3, 0, 1, 4], np.int32)
    problem.topk_ids[0, 1] = problem.topk_ids[3] = -1
    problem = problem._replace(w1=np.tile(problem.w1, (1, 1, 4))[:, :, :64], w2=np.tile(problem.w2, (1, 2, 1))[:, :64])
    problem = problem._replace(hidden_states=np.tile(problem.hidden_states, (1, 2))[:, :64])
    with running_on(engine) as device, torch.no_grad():
        x, w1, w2, weights, ids = to_torch(tuple(as_in_out(problem)), device)
        held, plain, precisions = [], [], []
        for weight in (w1, w2):
            values, scales = downcast_to_mxfp(weight, torch.uint8, axis=1)
            plain.append(upcast_from_mxfp(values, scales, torch.bfloat16, axis=1))
            held.append(wrap_torch_tensor(values, FP4))
            precisions.append(PrecisionConfig(weight_scale=wrap_torch_tensor(scales)))
        config = modular.FusedMoEQuantConfig("mxfp4_w4a16", w1_scale=precisions[0], w2_scale=precisions[1])
        local, ids = ids, to_torch(np.where(problem.topk_ids < 0, -1, expert_map[problem.topk_ids]), device)
        # The map is its own inverse.
        options = {"activation": Kind.SWIGLUOAI, "expert_map": to_torch(expert_map, device)}
        parts = modular.MoEPrepareAndFinalizeNoEP()
        wanted = modular.FusedMoEModularKernel(parts, modular.OAITritonExperts())(
            x, *(weight.contiguous() for weight in plain), weights, ids, **options
        )
        results = [
            modular.FusedMoEModularKernel(parts, experts(config))(x, *held, weights, ids, **options)
            for experts in (Ported, PortedUnfused, modular.OAITritonExperts, modular.UnfusedOAITritonExperts)
        ]
        routing = modular.make_routing_data(local, weights, E)
        larger = torch.zeros(1, 12, 64, dtype=torch.bfloat16, device=device)
        results.append(
            modular.triton_kernel_fused_experts(
                larger, x, *held, *routing, topk=2, activation=Kind.SWIGLUOAI, quant_config=config
            )
        )
        logits = torch.randn(9, E, generator=torch.Generator().manual_seed(3)).to(device)
        forward = [
            modular.triton_kernel_moe_forward(x, *given, logits, 2, True, Kind.SWIGLUOAI, quantised)
            for given, quantised in ((held, config), ([weight.contiguous() for weight in plain], None))
        ]
        a, b = (to_numpy(output).astype(np.float32) for output in forward)
        np.testing.assert_allclose(a, b, rtol=0.05, atol=0.06)
        assert results[-1].data_ptr() == larger.data_ptr() and results[-1].shape == x.shape
    for found in results:
        a, b = to_numpy(found).astype(np.float32), to_numpy(wanted).astype(np.float32)
        np.testing.assert_allclose(a, b, rtol=0.05, atol=0.06)


def test_views_of_the_other_layout_are_read_by_their_strides() -> None:
    """`.mT` of bf16 weights in either family, without a copy; one transposed weight alone is refused."""
    problem = draw_problem("bfloat16", tokens=5)
    x, w1, w2, weights, ids = to_torch(tuple(problem))
    parts = modular.MoEPrepareAndFinalizeNoEP()
    with running_on("reference"), torch.no_grad():
        kernel = modular.FusedMoEModularKernel(parts, modular.TritonExperts())
        expected = kernel(x, w1, w2, weights, ids)
        require_equal(kernel(x, w1.mT.contiguous().mT, w2.mT.contiguous().mT, weights, ids), expected, "out_in")
        gpt_oss = modular.FusedMoEModularKernel(parts, modular.OAITritonExperts())
        require_equal(gpt_oss(x, w1.mT, w2.mT, weights, ids, activation="silu"), expected, "in_out")
        with pytest.raises(InvalidInput, match="w1 and w2 must lie in memory alike"):
            gpt_oss(x, w1.mT, w2.mT.contiguous(), weights, ids, activation="silu")


def test_an_adapter_changes_what_the_activation_reads() -> None:
    problem = draw_problem("bfloat16", tokens=5)
    with running_on("reference"), torch.no_grad():
        arguments = to_torch(tuple(as_in_out(problem)))
        run = lambda experts: modular.FusedMoEModularKernel(modular.MoEPrepareAndFinalizeNoEP(), experts)(  # noqa: E731
            *arguments, activation=Kind.SILU
        )
        ones = torch.ones(E, arguments[1].shape[2])
        biased = modular.FusedMoEQuantConfig(w1_bias=ones)
        found, expected = run(WithAdapter()), run(PortedUnfused(biased))
    np.testing.assert_allclose(to_numpy(found.float()), to_numpy(expected.float()), rtol=0.05, atol=0.05)


class NoFormat(Ported):
    activation_format = modular.FusedMoEExpertsModular.activation_format


def test_what_a_class_lacks_is_said() -> None:
    parts = modular.MoEPrepareAndFinalizeNoEP()
    with pytest.raises(InvalidInput, match="NoFormat must say what tokens it takes"):
        modular.FusedMoEModularKernel(parts, NoFormat())
    assert modular.OAITritonExperts.activation_format() == Standard
    assert modular.BatchedTritonExperts.activation_format() == modular.FusedMoEActivationFormat.BatchedExperts
    assert modular.TritonExperts().activation_formats == (Standard, Standard)
    assert Ported().default_weight_layout == "out_in" and not Ported().supports_chunking()


def test_experts_behind_a_prepare_that_maps_get_the_local_number() -> None:
    """Four of eight experts are here; the caller names all eight."""
    problem = draw_problem(tokens=6, experts=4)
    ids = np.where(problem.topk_ids >= 0, problem.topk_ids + 4, -1)
    parts, experts = modular.BatchedPrepareAndFinalize(6, 4, rank=1), modular.BatchedTritonExperts(6)
    kernel = modular.FusedMoEModularKernel(parts, experts)
    assert parts.max_num_tokens_per_rank() == 6 and parts.num_dispatchers() == 1 and not parts.output_is_reduced()
    with running_on("reference"), torch.no_grad():
        arguments = to_torch(tuple(problem._replace(topk_ids=ids.astype(np.int32))))
        found = kernel(*arguments, global_num_experts=8)
    np.testing.assert_allclose(to_numpy(found), expected_stages(problem)["output"], rtol=1e-5, atol=1e-5)
    assert found.shape[1] == K


def test_signed_int8_weights_have_a_scale_per_channel() -> None:
    problem = draw_problem(tokens=6)
    scales = {f"w{n}_scale": np.abs(w).max(axis=2) / 127 for n, w in ((1, problem.w1), (2, problem.w2))}
    codes = [
        np.clip(np.rint(w / scales[f"w{n}_scale"][..., None]), -127, 127).astype(np.int8)
        for n, w in ((1, problem.w1), (2, problem.w2))
    ]
    rounded = [c.astype(np.float32) * scales[f"w{n}_scale"][..., None] for n, c in enumerate(codes, 1)]
    expected = expected_stages(problem._replace(w1=rounded[0], w2=rounded[1]))["output"]
    config = modular.FusedMoEQuantConfig.make(use_int8_w8a16=True, **{n: to_torch(s) for n, s in scales.items()})
    with running_on("reference"), torch.no_grad():
        x, _, _, weights, ids = to_torch(tuple(problem))
        kernel = modular.FusedMoEModularKernel(modular.MoEPrepareAndFinalizeNoEP(), modular.TritonExperts(config))
        found = kernel(x, *to_torch(tuple(codes)), weights, ids)
        with pytest.raises(InvalidInput, match="w1 must be unsigned codes"):
            grouped = modular.FusedMoEQuantConfig.make(use_int8_w8a16=True, block_shape=[0, 16])
            modular.TritonExperts(grouped).weights(*to_torch(tuple(codes)))
    np.testing.assert_allclose(to_numpy(found), expected, rtol=1e-4, atol=1e-4)
