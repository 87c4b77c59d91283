"""The classes on a caller's DeepEP buffer, against one device: what they call, and what they refuse."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from moe_core.base.dtypes import numpy_dtype
from moe_core.errors import Unsupported
from moe_core.formats import format_named
from moe_core.ops.quantize.reference import quantize
from moe_torch import modular
from moe_torch.modular import FusedMoEModularKernel, FusedMoEQuantConfig, MoEPrepareAndFinalizeNoEP
from tests.support.modular.deep_ep_ranks import failing_call, run_rank, tensors_of
from tests.support.modular.problems import Problem
from tests.support.parallel.pool import Pool, ranks
from tests.support.torch import running_on, to_numpy, to_torch

__all__ = ["ranks"]

E, F, RANKS = 4, 128, 2


def problem_of(columns: int, tokens: tuple[int, ...], topk: int, fp8: bool, seed: int = 0) -> tuple[Any, Any]:
    """(problem of all ranks, scales of its weights by name); ids are distinct, some -1, all outside of rank 1's."""
    random = np.random.default_rng(seed)
    bf16 = numpy_dtype("bfloat16")
    x = random.standard_normal((sum(tokens), columns)).astype(bf16)
    ids = np.stack([random.permutation(E)[:topk] for _ in range(sum(tokens))]).astype(np.int32)
    ids[random.random(ids.shape) < 0.2] = -1
    weights, scales = [], {}
    for name, shape in (("w1", (E, 2 * F, columns)), ("w2", (E, columns, F))):
        weight = (random.standard_normal(shape) * shape[2] ** -0.5).astype(np.float32)
        if fp8:
            found = quantize(weight, format_named("fp8_block"), layout="out_in")
            weight, scales[f"{name}_scale"] = found.values, found.scales
        weights.append(weight if fp8 else weight.astype(bf16))
    return Problem(x, *weights, random.random(ids.shape).astype(np.float32), ids), scales


def parts_of(problem: Any, scales: Any, tokens: tuple[int, ...]) -> list[tuple[Any, Any]]:
    """The problem and the scales of each rank."""
    found, first, each = [], 0, E // RANKS
    for rank, count in enumerate(tokens):
        own, mine = slice(first, first + count), slice(rank * each, (rank + 1) * each)
        first += count
        part = Problem(
            problem.hidden_states[own],
            problem.w1[mine],
            problem.w2[mine],
            problem.topk_weights[own],
            problem.topk_ids[own],
        )
        found.append((part, {name: array[mine] for name, array in scales.items()}))
    return found


@pytest.mark.parametrize("tokens, topk", [((4, 3), 2), ((0, 4), 3), ((3, 0), 1)])
@pytest.mark.parametrize("kind, fp8", [(kind, fp8) for kind in ("high_throughput", "low_latency") for fp8 in (0, 1)])
def test_the_results_of_one_device(ranks: Pool, kind: str, fp8: int, tokens: tuple[int, ...], topk: int) -> None:
    columns = 256 if kind == "high_throughput" else 2048
    problem, scales = problem_of(columns, tokens, topk, bool(fp8), seed=sum(tokens))
    problem.topk_ids[0, 0] = E + 3  # of no expert
    options = {"apply_router_weight_on_input": topk == 1, "global_num_experts": E if fp8 else -1}
    arguments = [(kind, bool(fp8), *part, options) for part in parts_of(problem, scales, tokens)]
    found = np.concatenate(ranks.call(run_rank, arguments))
    alone = FusedMoEModularKernel(
        MoEPrepareAndFinalizeNoEP(), modular.DeepGemmExperts() if fp8 else modular.TritonExperts()
    )
    with running_on("reference"), torch.no_grad():
        named = {name: to_torch(array) for name, array in scales.items()}
        expected = to_numpy(alone(*tensors_of(problem), **named, apply_router_weight_on_input=topk == 1).float())
    # Rows are rounded to bf16 before their weight or before ranks are added up, and activations to e4m3 after that.
    np.testing.assert_allclose(found, expected, 2e-2, 2e-2 * np.abs(expected).max())
    assert np.abs(found).max() > 0


FP8 = FusedMoEQuantConfig.make(use_fp8_w8a8=True)
GROUPED = FusedMoEQuantConfig.make(use_fp8_w8a8=True, block_shape=[128, 128])
HT, LL = "high_throughput", "low_latency"
WRONG: tuple[tuple[dict[str, Any], str, str], ...] = (
    ({"kind": HT}, "", ""),
    ({"kind": LL}, "", ""),
    ({"kind": HT, "buffer": object()}, "Unsupported", "DeepEPHTPrepareAndFinalize needs the package deep_ep, which is"),
    ({"kind": LL, "buffer": None}, "Unsupported", "DeepEPLLPrepareAndFinalize needs the package deep_ep"),
    ({"kind": HT, "num_dispatchers": 3}, "InvalidInput", "num_dispatchers must be 1, the ranks of buffer, got 3"),
    ({"kind": HT, "columns": 40}, "Unsupported", "a1 must have a multiple of 16 columns for this buffer, got 40"),
    (
        {"kind": HT, "columns": 2880, "group_size": 16, "num_dispatchers": 16},
        "Unsupported",
        "a1 must have a multiple of 256 columns",
    ),
    ({"kind": HT, "columns": 144, "fp8": True}, "Unsupported", "a1 must have a multiple of 128 columns"),
    ({"kind": HT, "offset": 2}, "InvalidInput", "rank_expert_offset must be 0, the first of rank 0, got 2"),
    ({"kind": HT, "topk": 33}, "Unsupported", "topk must be at most 32, which DeepEP has room for, got 33"),
    ({"kind": HT, "dtype": torch.float32}, "Unsupported", "a1 must be bf16, which DeepEP moves, got torch.float32"),
    ({"kind": HT, "trained": True}, "Unsupported", "a1 and topk_weights must need no gradient"),
    ({"kind": HT, "ids": 3}, "InvalidInput", "topk_weights must be floats"),
    ({"kind": HT, "num_experts": 6}, "InvalidInput", "num_experts must be 1 times those of w1, 4, got 6"),
    ({"kind": HT, "quant_config": FP8}, "Unsupported", "activations of fp8_w8a8 must have a scale for each row"),
    (
        {"kind": LL, "columns": 2880},
        "Unsupported",
        "a1 must have one of 2048, 2560, 3072, 4096, 5120, 6144, 7168, 8192",
    ),
    ({"kind": LL, "rows": 5}, "Unsupported", "a1 must have at most max_tokens_per_rank = 4 rows, got 5"),
    ({"kind": LL, "topk": 12}, "Unsupported", "topk must be at most 11"),
    ({"kind": LL, "most": 3}, "Unsupported", "max_tokens_per_rank times num_dispatchers must be a multiple of 4"),
    ({"kind": LL, "room": 1000}, "Unsupported", "buffer must have at least "),
    ({"kind": LL, "mode": False}, "InvalidInput", "buffer must be in low-latency mode"),
    ({"kind": HT, "impl": None}, "InvalidInput", "prepared must be what prepare of DeepEPHTPrepareAndFinalize gave"),
)


@pytest.mark.parametrize("fp8, config, fits", [(True, GROUPED, True), (True, FP8, False), (False, GROUPED, False)])
def test_experts_may_leave_quantising_to_a_dispatch_in_fp8_groups(fp8: bool, config: Any, fits: bool) -> None:
    kind = modular.DeepEPHTPrepareAndFinalize
    buffer = SimpleNamespace(group_size=1, **dict.fromkeys(kind.methods, print))
    experts = SimpleNamespace(quant_config=config, expects_unquantized_inputs=False)
    refused = pytest.raises(Unsupported, match="must quantise tokens for DeepEPHTPrepareAndFinalize")
    with contextlib.nullcontext() if fits else refused:
        kind(buffer, 1, use_fp8_dispatch=fp8).post_init_setup(experts)


@pytest.mark.parametrize("change, kind, text", WRONG, ids=[f"{change['kind']}-{text}" for change, _, text in WRONG])
def test_what_a_buffer_cannot_take_is_refused(ranks: Pool, change: dict[str, Any], kind: str, text: str) -> None:
    found = ranks.call(failing_call, [(change,)])[0]
    assert found[0] == kind and text in found[1], found
