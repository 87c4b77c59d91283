"""Inputs that every entry takes alike: ids of every integer type, router weights in three dtypes, maps, fp16 rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import moe_torch
from moe_core.base.dtypes import ID_DTYPES, ROUTER_WEIGHT_DTYPES
from moe_core.errors import InvalidInput
from moe_torch import modular, ops
from tests.support.modular.problems import TOPK, E, as_in_out, draw_problem
from tests.support.torch import ENGINES, REAL_KERNELS, require_equal, running_on, to_numpy, to_torch

STANDARD = (modular.TritonExperts, modular.OAITritonExperts, modular.UnfusedOAITritonExperts)
ROUTER = moe_torch.RouterSpec(TOPK)


def ids_in(dtype: str, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(ids in the dtype, the same as int32). The largest number of a wide type is among them, and no -1 in unsigned."""
    plain = np.where(ids < 0, E, ids) if dtype.startswith("u") else ids.copy()
    wide = plain.astype(dtype)
    wide[0, 0], plain[0, 0] = np.iinfo(dtype).max, 100
    return wide, plain.astype(np.int32)


def torch_entries(device: Any) -> dict[str, Any]:
    x, w1, w2, weights, _ = to_torch(tuple(draw_problem()), device)
    experts, spec = moe_torch.ExpertWeights(w1, w2), moe_torch.MoESpec(moe_torch.Activation("silu"), None, "out_in")
    logits = torch.rand(40, E, generator=torch.Generator().manual_seed(0)).to(device)
    layer = moe_torch.MoE(w1.shape[2], w2.shape[2], E, TOPK).to(device)

    contiguous = modular.TopKWeightAndReduceContiguous()

    def kernel(parts: Any, experts: Any) -> Any:
        call = modular.FusedMoEModularKernel(parts, experts)
        return lambda ids: call(x, w1, w2, weights, ids)

    return {
        "moe": lambda ids: ops.moe(x, experts, moe_torch.TopK(ids, weights), spec).output,
        "make_layout": lambda ids: ops.make_layout(ids, E).slot_of_row,
        "pack_bitmatrix": lambda ids: ops.pack_bitmatrix(ids, E).view(torch.int32),
        "route": lambda ids: ops.route(logits, ROUTER, ids=ids).weights,
        "layer": lambda ids: layer(x, expert_ids=ids),
        "layer.experts": lambda ids: layer.experts(x, ids, weights),
        "standard": kernel(modular.MoEPrepareAndFinalizeNoEP(), modular.TritonExperts()),
        "batched": kernel(modular.BatchedPrepareAndFinalize(40, E), modular.BatchedTritonExperts(40)),
        "make_routing_data": lambda ids: modular.make_routing_data(ids, weights, E)[0].gate_scal,
        "reduce": lambda ids: contiguous.apply(None, x.repeat_interleave(TOPK, 0), weights, ids, False),
    }


@pytest.mark.parametrize("dtype", ID_DTYPES)
def test_every_integer_type_of_ids(dtype: str) -> None:
    """Ids beyond int32 are invalid as others are, and never wrap."""
    wide, plain = ids_in(dtype, draw_problem().topk_ids)
    with running_on("reference") as device, torch.no_grad():
        for name, entry in torch_entries(device).items():
            found, expected = (to_numpy(entry(torch.from_numpy(ids).to(device))) for ids in (wide, plain))
            np.testing.assert_array_equal(found, expected, err_msg=name)


@pytest.mark.parametrize("dtype", ID_DTYPES)
def test_kernels_read_every_integer_type(dtype: str) -> None:
    wide, plain = ids_in(dtype, draw_problem().topk_ids)
    with running_on(REAL_KERNELS) as device:
        found, expected = (ops.make_layout(torch.from_numpy(ids).to(device), E) for ids in (wide, plain))
        for name in ("slot_of_row", "row_of_slot", "group_sizes", "invalid_ids"):
            require_equal(getattr(found, name), getattr(expected, name), name)


@pytest.mark.parametrize("dtype", ID_DTYPES)
def test_every_integer_type_of_ids_in_jax(dtype: str) -> None:
    jax = pytest.importorskip("jax")
    import moe_jax
    from moe_jax import modular as other
    from moe_jax import ops as jax_ops
    from tests.support import jax as jax_support

    wide, plain = ids_in(dtype, draw_problem().topk_ids)
    with jax_support.running_on("reference"):
        x, w1, w2, weights, _ = jax_support.to_jax(tuple(draw_problem()))
        experts, spec = moe_jax.ExpertWeights(w1, w2), moe_jax.MoESpec(moe_jax.Activation("silu"), None, "out_in")
        logits = jax.random.uniform(jax.random.key(0), (40, E))

        def batched(ids: Any) -> Any:
            prepared: Any = other.prepare_batched(x, weights, ids, E, 40)
            return other.finalize_batched(
                other.batched_experts(prepared.a1q, w1, w2, prepared.expert_num_tokens), weights, prepared
            )

        entries = {
            "moe": lambda ids: jax_ops.moe(x, experts, moe_jax.TopK(ids, weights), spec).output,
            "make_layout": lambda ids: jax_ops.make_layout(ids, E).slot_of_row,
            "pack_bitmatrix": lambda ids: jax_ops.pack_bitmatrix(ids, E),
            "route": lambda ids: jax_ops.route(logits, moe_jax.RouterSpec(TOPK), ids=ids).weights,
            "fused_experts": lambda ids: other.fused_experts(x, w1, w2, weights, ids),
            "unfused_experts": lambda ids: other.unfused_experts(x, w1, w2, weights, ids, weight_layout="out_in"),
            "batched": batched,
        }
        for name, entry in entries.items():
            given = (wide, plain) if np.dtype(dtype).itemsize == 8 else (wide, jax.numpy.asarray(wide), plain)
            *found, expected = (np.asarray(entry(ids)) for ids in given)
            for result in found:
                np.testing.assert_array_equal(result, expected, err_msg=name)


def test_ids_that_are_no_integers_are_refused() -> None:
    with running_on("reference") as device:
        for entry in torch_entries(device).values():
            with pytest.raises(InvalidInput, match=r"must be|must have"):
                entry(torch.zeros(40, TOPK, dtype=torch.float32, device=device))


@pytest.mark.parametrize("dtype", ROUTER_WEIGHT_DTYPES)
def test_apply_takes_router_weights_in_every_dtype(dtype: str) -> None:
    """Also where another kernel calls it, in all classes."""
    with running_on("reference") as device, torch.no_grad():
        for experts in STANDARD:
            problem = draw_problem() if experts.default_weight_layout == "out_in" else as_in_out(draw_problem())
            x, w1, w2, weights, ids = to_torch(tuple(problem), device)
            results, rounded = [], weights.to(getattr(torch, dtype))
            for given in (rounded, rounded.float()):
                made, output = experts(), torch.empty_like(x)
                size = made.moe_problem_size(x, w1, w2, ids)
                shapes = made.workspace_shapes(size.M, size.N, size.K, size.topk, E, E, None, "silu")
                scratch = [torch.empty(shape, device=device) for shape in shapes[:2]]
                made.apply(output, x, w1, w2, given, ids.long(), "silu", E, None, None, None, *scratch, None, False)
                results.append(output)
            require_equal(results[0], results[1], experts.__name__)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("on_input", [False, True])
def test_fp16_rows_beyond_its_range_come_back_with_their_weights(engine: str, on_input: bool) -> None:
    """All classes hold a row of 77,000 times its weight, and so does JAX, with the same bits."""
    topk, tokens, width = 1 if on_input else 2, 3, 16
    w1 = np.full((E, 2 * width, 32), 2 / 32, np.float16)
    w2, x = np.full((E, 32, width), 2400.0, np.float16), np.ones((tokens, 32), np.float16)
    ids = np.array([[0, 1], [2, -1], [4, 2]], np.int32)[:, :topk]
    weights = np.full((tokens, topk), 0.01 if on_input else 0.05, np.float32)
    arrays, results = (x, w1, w2, weights, ids), {}
    pairs = {
        "standard": (modular.MoEPrepareAndFinalizeNoEP(), modular.TritonExperts()),
        "batched": (modular.BatchedPrepareAndFinalize(tokens, E), modular.BatchedTritonExperts(tokens)),
    }
    with running_on(engine) as device, torch.no_grad():
        for name, pair in pairs.items():
            kernel = modular.FusedMoEModularKernel(*pair)
            results[name] = to_numpy(kernel(*to_torch(arrays, device), apply_router_weight_on_input=on_input))
    pytest.importorskip("jax")
    from moe_jax import modular as other
    from tests.support import jax as jax_support

    with jax_support.running_on(engine):
        x, w1, w2, weights, ids = jax_support.to_jax(arrays)
        prepared: Any = other.prepare_batched(x, weights, ids, E, tokens, apply_router_weight_on_input=on_input)
        blocks = other.batched_experts(prepared.a1q, w1, w2, prepared.expert_num_tokens)
        results["jax"] = np.asarray(other.finalize_batched(blocks, weights, prepared, on_input))
        assert on_input or np.asarray(blocks).max() > 65504
    for name, result in results.items():
        assert result.dtype == np.float16 and np.isfinite(result).all() and result.any(), name
        np.testing.assert_allclose(result, results["standard"], rtol=2e-3, err_msg=name)
    np.testing.assert_array_equal(results["jax"], results["batched"])


def test_a_map_must_have_an_entry_for_every_id() -> None:
    """A 0/1 mask with a sentinel is one entry longer."""
    with running_on("reference") as device, torch.no_grad():
        x, w1, w2, weights, ids = to_torch(tuple(draw_problem()), device)
        longer = torch.arange(E + 3, dtype=torch.int32, device=device).where(torch.arange(E + 3) < E, -1)
        for parts, experts in (
            (modular.MoEPrepareAndFinalizeNoEP(), modular.TritonExperts()),
            (modular.BatchedPrepareAndFinalize(40, E), modular.BatchedTritonExperts(40)),
        ):
            kernel = modular.FusedMoEModularKernel(parts, experts)
            right = kernel(x, w1, w2, weights, ids, global_num_experts=E + 3, expert_map=longer)
            require_equal(kernel(x, w1, w2, weights, ids, expert_map=longer), right, "-1")
            with pytest.raises(InvalidInput, match="expert_map must have an entry for each of global_num_experts = 5"):
                kernel(x, w1, w2, weights, ids, global_num_experts=E, expert_map=longer)
    jax = pytest.importorskip("jax")
    from moe_jax import modular as other
    from tests.support import jax as jax_support

    with jax_support.running_on("reference"):
        arrays = jax_support.to_jax(tuple(draw_problem()))
        with pytest.raises(InvalidInput, match="expert_map must have an entry"):
            other.fused_experts(*arrays, global_num_experts=E, expert_map=jax.numpy.arange(E + 1, dtype="int32"))
