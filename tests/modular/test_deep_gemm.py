"""DeepGEMM's contract: the grouped products against loops, its experts against the others, in torch and in JAX."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import moe_torch
from moe_core.errors import InvalidInput
from moe_core.formats import FP8_BLOCK, FP8_GROUP, FP8_GROUP_POW2
from moe_core.parity.tolerance import assert_close, quantized_matmul_tolerance
from moe_core.specs.matmul import MatmulSpec
from moe_torch import modular
from moe_torch.modular import FusedMoEModularKernel, MoEPrepareAndFinalizeNoEP
from tests.support.modular.deep_gemm import (
    Experts,
    G,
    K,
    N,
    config_of,
    draw_experts,
    draw_products,
    draw_side,
    looped_product,
    pair,
    tensors,
)
from tests.support.modular.problems import expert_maps
from tests.support.torch import REAL_KERNELS, on_engines, require_equal, running_on, to_numpy, to_torch

CONTIGUOUS, MASKED = modular.m_grouped_fp8_gemm_nt_contiguous, modular.m_grouped_fp8_gemm_nt_masked


def tolerance(dtype: str) -> Any:
    return quantized_matmul_tolerance(dtype, K, FP8_BLOCK, MatmulSpec("out_in", out_dtype=dtype), rows=FP8_GROUP)


def contiguous(a: Any, b: Any, m_indices: Any, dtype: Any, device: Any) -> Any:
    d = torch.full((len(m_indices), N), float("nan"), dtype=dtype, device=device)
    CONTIGUOUS(pair(a, device), pair(b, device), d, to_torch(m_indices, device))
    return d


@pytest.mark.parametrize(
    ("engine", "format"), [(REAL_KERNELS, FP8_GROUP), ("reference", FP8_GROUP), ("reference", FP8_GROUP_POW2)], ids=str
)
def test_contiguous_products_are_those_of_the_loops(engine: str, format: Any) -> None:
    a, b, m_indices = draw_products(format)
    expected = looped_product(a, b, m_indices)
    with running_on(engine) as device:
        for name in ("float32", "bfloat16"):
            d = contiguous(a, b, m_indices, getattr(torch, name), device)
            found = to_numpy(d)
            assert_close(found.astype(np.float64), expected, tolerance(name), name)
            assert not found[m_indices < 0].any()
        # An order of one's own, without padding, and numbers of no group.
        order = np.random.default_rng(0).permutation(len(m_indices))
        moved = type(a)(a.spec, a.values[order], a.scales[order])
        strange = np.where(m_indices < 0, 7, m_indices)[order].astype(np.int32)
        again = contiguous(moved, b, strange, torch.bfloat16, device)
        require_equal(again, d[to_torch(order, device)], "rows in another order")


@on_engines
def test_masked_products_are_those_of_the_loops(engine: str) -> None:
    """Counts that are none, some and too many; scales that lie the other way round; a wrong guess of the rows."""
    random, rows, counts = np.random.default_rng(4), 24, np.array([0, 9, 99], np.int32)
    a, b = draw_side(random, (G * rows, K), FP8_GROUP), draw_side(random, (G, N, K), FP8_BLOCK)
    used = (np.arange(rows) < counts[:, None]).reshape(-1)
    a.values[~used] = np.nan
    expected = looped_product(a, b, np.where(used, np.arange(G * rows) // rows, -1)).reshape(G, rows, N)
    with running_on(engine) as device:
        values, scales = (part.view(G, rows, -1) for part in pair(a, device))
        turned = scales.mT.contiguous().mT
        results = []
        for own_scales, expected_m in ((scales, 3), (turned, 3), (scales, 4000)):
            d = torch.full((G, rows, N), float("nan"), dtype=torch.bfloat16, device=device)
            MASKED((values, own_scales), pair(b, device), d, to_torch(counts, device), expected_m)
            assert_close(to_numpy(d).astype(np.float64), expected, tolerance("bfloat16"), "masked")
            results.append(d)
        require_equal(results[1], results[0], "strides of scales")


def test_a_wrong_scale_shows() -> None:
    """The planted fault: the scale of the next block, of either side."""
    a, b, m_indices = draw_products()
    expected, last = looped_product(a, b, m_indices), {"a": (1,), "b": (0, 1, 2)}
    with running_on("reference") as device:
        for side, axes in last.items():
            for axis in axes:
                wrong = {"a": a, "b": b}
                kept = wrong[side]
                wrong[side] = type(a)(kept.spec, kept.values, np.roll(kept.scales, 1, axis))
                found = to_numpy(contiguous(wrong["a"], wrong["b"], m_indices, torch.float32, device))
                with pytest.raises(AssertionError, match="worst element"):
                    assert_close(found, expected.astype(np.float32), tolerance("float32"), f"{side}, axis {axis}")


def test_tiles_of_the_masked_layout_follow_the_expected_rows() -> None:
    from moe_core.base.target import Target
    from moe_core.modular.deep_gemm import tile_for_rows

    few, many = (tile_for_rows((64, 4096, 7168), rows, "bfloat16", Target("cuda", 90, 132)) for rows in (8, 512))
    assert few is not None and many is not None and few.block_m < many.block_m
    assert tile_for_rows((64, 4096, 7168), 8, "bfloat16", Target("reference")) is None


def run(experts: Any, case: Experts, engine: str = "reference", expert_map: Any = None, **options: Any) -> Any:
    """A modular kernel around the experts; the scales come with the call."""
    prepare: Any = MoEPrepareAndFinalizeNoEP()
    if isinstance(experts, modular.BatchedDeepGemmExperts):
        prepare = modular.BatchedPrepareAndFinalize(experts.max_num_tokens, len(case.problem.w1))
    kernel = FusedMoEModularKernel(prepare, experts, **options)
    with running_on(engine) as device, torch.no_grad():
        arguments, scales = tensors(case, device)
        size = -1 if expert_map is None else len(expert_map)
        return kernel(*arguments, global_num_experts=size, expert_map=to_torch(expert_map, device), **scales)


def unfused(case: Experts, engine: str) -> Any:
    """What rounds where DeepGemmExperts round, on rows that are not padded."""
    with running_on(engine) as device:
        config = config_of(tensors(case, device)[1])
    experts = modular.UnfusedOAITritonExperts(config, weight_layout="out_in")
    with running_on(engine) as device, torch.no_grad():
        return FusedMoEModularKernel(MoEPrepareAndFinalizeNoEP(), experts)(*tensors(case, device)[0])


@on_engines
def test_experts_have_the_bits_of_the_stages(engine: str) -> None:
    """Padding changes no bit, nor do chunks; in fp32 the batched format is the same too."""
    case = draw_experts("bfloat16")
    expected = unfused(case, engine)
    require_equal(run(modular.DeepGemmExperts(), case, engine), expected, "whole")
    require_equal(run(modular.DeepGemmExperts(), case, engine, chunk_size=16), expected, "chunks")
    exact = draw_experts("float32", tokens=9)
    whole, batched = (
        run(modular.DeepGemmExperts(), exact, engine),
        run(modular.BatchedDeepGemmExperts(9), exact, engine),
    )
    require_equal(batched, whole, "batched")


def test_experts_agree_with_the_composed_op() -> None:
    """In fp32 a stage more or less rounds nothing: on the reference, bit by bit."""
    case = draw_experts()
    require_equal(run(modular.DeepGemmExperts(), case), run(modular.TritonExperts(config_of({})), case), "output")
    powers = run(modular.DeepGemmExperts(e8m0=True), case)
    assert 0 < (powers - run(modular.DeepGemmExperts(), case)).norm() < 0.1 * powers.norm()


class Quantising(MoEPrepareAndFinalizeNoEP):
    """Hidden states quantised while they are dispatched."""

    def prepare(self, a1: Any, *arguments: Any) -> Any:
        rows = moe_torch.quantize_rows(a1, FP8_GROUP)
        return modular.PreparedTokens(rows.values, rows.scales.mT.contiguous().mT)


class QuantisingBatches(modular.BatchedPrepareAndFinalize):
    def prepare(self, a1: Any, *arguments: Any) -> Any:
        prepared = super().prepare(a1, *arguments)
        blocks = prepared.a1q
        rows = moe_torch.quantize_rows(blocks.reshape(-1, blocks.shape[2]), FP8_GROUP)
        counts = prepared.expert_num_tokens
        values, scales = (part.view(*blocks.shape[:2], -1) for part in (rows.values, rows.scales))
        return modular.PreparedTokens(values, scales, counts, handle=prepared.handle)


def test_hidden_states_may_come_quantised() -> None:
    case = draw_experts("bfloat16", tokens=9)
    with running_on("reference") as device, torch.no_grad():
        arguments, scales = tensors(case, device)
        for prepare, experts in (
            (Quantising(), modular.DeepGemmExperts()),
            (QuantisingBatches(9, 3), modular.BatchedDeepGemmExperts(9)),
        ):
            found = FusedMoEModularKernel(prepare, experts)(*arguments, **scales)
            require_equal(found, run(experts, case), type(experts).__name__)
        with pytest.raises(InvalidInput, match="must not be quantised where they are taken in chunks"):
            experts = modular.DeepGemmExperts(config_of(scales))
            rows = moe_torch.quantize_rows(arguments[0], FP8_GROUP).values
            size = experts.moe_problem_size(*arguments[:3], arguments[4])
            experts.chunked_as_whole(rows, *arguments[1:3], size, "silu")


def members() -> dict[str, Any]:
    return {
        "DeepGemmExperts": modular.DeepGemmExperts,
        "TritonOrDeepGemmExperts": lambda: modular.TritonOrDeepGemmExperts(
            True, block_shape=[128, 128], allow_deep_gemm=True
        ),
        "BatchedDeepGemmExperts": lambda: modular.BatchedDeepGemmExperts(20),
    }


@pytest.mark.parametrize("name", members())
def test_four_ranks_sum_to_the_unsplit_result(name: str) -> None:
    case, total = draw_experts(tokens=20, experts=8), 0
    problem = case.problem
    whole = run(members()[name](), case)
    for expert_map in expert_maps(8, 4):
        own = np.flatnonzero(expert_map >= 0)
        part = problem._replace(w1=problem.w1[own], w2=problem.w2[own])
        scales = {key: array[own] for key, array in case.scales.items()}
        total = total + run(members()[name](), Experts(part, scales), expert_map=expert_map)
    torch.testing.assert_close(total, whole, rtol=1e-5, atol=1e-5)


def test_biases_ungated_activations_and_no_tokens() -> None:
    case = draw_experts(tokens=9)
    random = np.random.default_rng(2)
    with running_on("reference") as device, torch.no_grad():
        arguments, scales = tensors(case, device)
        biases = {"w1_bias": to_torch(random.standard_normal((3, 256)).astype(np.float32))}
        biases["w2_bias"] = to_torch(random.standard_normal((3, 256)).astype(np.float32))
        config = config_of(scales | biases)
        kernels = [
            FusedMoEModularKernel(MoEPrepareAndFinalizeNoEP(), experts)
            for experts in (modular.DeepGemmExperts(config), modular.TritonExperts(config))
        ]
        require_equal(*(kernel(*arguments) for kernel in kernels), "biases")
        x, _, w2, *routing = arguments
        narrow = tensors(draw_experts(width=64), device)  # w1 [3, 128, 256]: ungated, 128 columns wide
        config = config_of({"w1_scale": narrow[1]["w1_scale"], "w2_scale": scales["w2_scale"]})
        found = [
            FusedMoEModularKernel(MoEPrepareAndFinalizeNoEP(), experts)(
                x, narrow[0][1], w2, *routing, activation="relu2_no_mul"
            )
            for experts in (modular.DeepGemmExperts(config), modular.TritonExperts(config))
        ]
        require_equal(*found, "ungated")
        weights, ids = routing
        assert kernels[0](x[:0], *arguments[1:3], weights[:0], ids[:0]).shape == (0, 256)
        assert not run(
            modular.DeepGemmExperts(), Experts(case.problem._replace(topk_ids=np.full((9, 2), -1)), case.scales)
        ).any()


def test_one_program_for_every_number_of_tokens() -> None:
    torch._dynamo.reset()
    with running_on("reference"), torch.no_grad():
        scales = tensors(draw_experts())[1]
        experts: Any = modular.TritonOrDeepGemmExperts(True, block_shape=[128, 128], allow_deep_gemm=True, **scales)
        # A choice that is always DeepGEMM's: valid sizes are slow.
        experts.triton_expert = experts.deep_gemm_expert
        kernel = FusedMoEModularKernel(MoEPrepareAndFinalizeNoEP(), experts)
        compiled = torch.compile(kernel, fullgraph=True, backend="aot_eager")
        for number, tokens in enumerate((9, 13)):
            arguments = tensors(draw_experts(tokens=tokens))[0]
            for index in (0, 3, 4):
                torch._dynamo.mark_dynamic(arguments[index], 0)
            with torch._dynamo.config.patch(error_on_recompile=number > 0):
                require_equal(compiled(*arguments), kernel(*arguments), f"{tokens} tokens")

        def masked(values: Any, scales: Any, b: Any, b_scales: Any, counts: Any) -> Any:
            d = torch.empty(G, 8, N)
            MASKED((values, scales), (b, b_scales), d, counts, 4)
            return d

        random = np.random.default_rng(5)
        a = tuple(part.view(G, 8, -1) for part in pair(draw_side(random, (G * 8, K), FP8_GROUP)))
        arguments = (*a, *pair(draw_side(random, (G, N, K), FP8_BLOCK)), torch.tensor([8, 0, 3], dtype=torch.int32))
        found = torch.compile(masked, fullgraph=True, backend="eager")(*arguments)
        require_equal(found, masked(*arguments), "masked")


def bits(array: Any) -> np.ndarray:
    return np.asarray(array).view(np.uint8)


def test_jax_gives_the_same_bits() -> None:
    engine = REAL_KERNELS
    jax = pytest.importorskip("jax")
    from moe_jax import modular as other
    from tests.support import jax as jax_support

    a, b, m_indices = draw_products(rows=256)
    case, counts = draw_experts("bfloat16", tokens=9), np.array([3, 0, 9], np.int32)
    blocks = np.stack([np.roll(case.problem.hidden_states, shift, 0) for shift in range(3)])
    row = draw_side(np.random.default_rng(6), (9, 256), FP8_GROUP)
    with running_on(engine) as device, torch.no_grad():
        a_blocks = tuple(part.view(2, 128, -1) for part in pair(a, device))
        d = torch.empty(2, 128, N, dtype=torch.bfloat16, device=device)
        MASKED(a_blocks, tuple(part[:2] for part in pair(b, device)), d, to_torch(counts[1:], device), 5)
        (x, w1, w2, weights, ids), scales = tensors(case, device)
        batched = modular.BatchedDeepGemmExperts(9, quant_config=config_of(scales))
        y = torch.empty(blocks.shape, dtype=torch.bfloat16, device=device)
        sizes = (9, 256, 256, 2, 3, 3, None, "silu")
        scratch = [y.new_empty(shape) for shape in batched.workspace_shapes(*sizes)[:2]]
        meta = modular.ExpertTokensMetadata(to_torch(counts, device))
        arguments = (to_torch(blocks, device), w1, w2, weights, ids, "silu", 3, None, None, None)
        batched.apply(y, *arguments, *scratch, meta, False)
        z, quantised = torch.empty_like(x), pair(row, device)
        plain = modular.DeepGemmExperts(config_of(scales), e8m0=True)
        scratch = [y.new_empty(shape) for shape in plain.workspace_shapes(*sizes)[:2]]
        rows = (quantised[0], w1, w2, weights, ids, "silu", 3, None, quantised[1], None)
        plain.apply(z, *rows, *scratch, None, False)
        expected = {
            "contiguous": contiguous(a, b, m_indices, torch.bfloat16, device),
            "masked": d,
            "deep_gemm_experts": run(modular.DeepGemmExperts(), case, engine),
            "batched_deep_gemm_experts": y,
            "quantised, e8m0": z,
        }
    with jax_support.running_on(engine):
        left, right, (x, w1, w2, weights, ids) = jax_support.to_jax(
            ((a.values, a.scales), (b.values, b.scales), tuple(case.problem))
        )
        config = config_of(jax_support.to_jax(case.scales))
        halves = [part.reshape(2, 128, -1) for part in left], [part[:2] for part in right]

        @jax.jit
        def everything(values: Any, scales: Any) -> Any:
            options = {"quant_config": config}
            return {
                "contiguous": other.m_grouped_fp8_gemm_nt_contiguous(left, right, m_indices),
                "masked": other.m_grouped_fp8_gemm_nt_masked(*halves, jax.numpy.asarray(counts[1:]), 5),
                "deep_gemm_experts": other.deep_gemm_experts(x, w1, w2, weights, ids, **options),
                "batched_deep_gemm_experts": other.batched_deep_gemm_experts(blocks, w1, w2, counts, **options),
                "quantised, e8m0": other.deep_gemm_experts(
                    values, w1, w2, weights, ids, a1q_scale=scales, e8m0=True, **options
                ),
            }

        found = everything(row.values, row.scales)
        for wrong in (m_indices[1:], m_indices.astype(np.int16)):
            with pytest.raises(InvalidInput, match=r"m_indices must be int32 \[\d+\], got"):
                other.m_grouped_fp8_gemm_nt_contiguous(left, right, jax.numpy.asarray(wrong))
    for name, result in found.items():
        np.testing.assert_array_equal(bits(result), bits(to_numpy(expected[name])), err_msg=name)
