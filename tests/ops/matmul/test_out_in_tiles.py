"""Tiles of few rows with out_in weights: they read long pieces of rows, and in_out keeps its own."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from benchmarks.shapes import ALL_SHAPES
from moe_core.base.arrays import ArraySpec
from moe_core.base.target import Target
from moe_core.ops.matmul.families import why_illegal
from moe_core.ops.matmul.portable.plan import PORTABLE
from moe_core.ops.matmul.problem import MatmulProblem
from moe_core.ops.matmul.tile_choice import heuristic_tile
from moe_core.ops.moe.fuse import CHAINED, MULTIPLY_AND_REDUCE
from moe_core.plan.steps import KernelLaunch
from moe_core.specs import Activation, MatmulSpec, MatmulTuning, TileConfig, Tuning
from moe_core.specs.operands import ExpertWeights, MatmulOperands
from tests.support.harness import H200, engine_target
from tests.support.matmul.problems import plain_problem
from tests.support.moe import plan_of, run_layer, simple_layer

#: A product of 64 experts: rows, D, columns and buffers, with the tile of each weight layout.
CHOSEN = [
    ((64, 2048, 1024, 2), TileConfig(16, 128, 64, 4, 4), TileConfig(16, 64, 128, 4, 4)),
    ((640, 2048, 1024, 1), TileConfig(16, 128, 64, 4, 4), TileConfig(16, 128, 128, 4, 4)),
    ((1, 4096, 4096, 1), TileConfig(16, 64, 64, 4, 6), TileConfig(16, 64, 128, 4, 6)),
    ((64, 768, 2048, 1), TileConfig(16, 128, 64, 4, 4), TileConfig(16, 128, 128, 4, 4)),
    ((1, 768, 2048, 1), TileConfig(16, 64, 64, 4, 6), TileConfig(16, 64, 128, 4, 6)),
    ((5, 768, 2048, 1), TileConfig(16, 64, 64, 4, 6), TileConfig(16, 128, 128, 4, 4)),
    ((64, 2880, 2880, 2), TileConfig(16, 128, 64, 4, 4), TileConfig(16, 128, 64, 4, 4)),
    ((704, 2048, 768, 2), TileConfig(32, 128, 64, 4, 4), TileConfig(32, 64, 128, 4, 3)),
    ((1536, 768, 2048, 1), TileConfig(32, 128, 64, 4, 4), TileConfig(32, 128, 128, 4, 3)),
    ((1, 2048, 8192, 2), TileConfig(16, 64, 64, 4, 6), TileConfig(16, 64, 128, 4, 4)),
    ((1600, 2048, 768, 2), TileConfig(64, 64, 64, 4, 4), TileConfig(64, 64, 64, 4, 4)),
]


@pytest.mark.parametrize(("sizes", "in_out", "out_in"), CHOSEN, ids=[str(sizes) for sizes, *_ in CHOSEN])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_tiles_by_layout(sizes: tuple[int, ...], in_out: TileConfig, out_in: TileConfig, dtype: str) -> None:
    rows, d, n, buffers = sizes
    for layout, wanted in (("in_out", in_out), ("out_in", out_in)):
        problem = plain_problem(rows, 64, d, n, dtype, buffers, weight_layout=layout)
        assert heuristic_tile(problem).config == wanted


@pytest.mark.parametrize("arch", [80, 86, 89, 90, 100, 120])
def test_steps_are_even_long_and_leave_room(arch: int) -> None:
    longer = 0
    for shape in ALL_SHAPES.values():
        for tokens in (1, 4, 16, 64, 256, 1024):
            for d, n, buffers in ((shape.d_model, shape.d_ff, 2), (shape.d_ff, shape.d_model, 1)):
                rows = tokens * shape.top_k
                target = Target("cuda", arch, 132)
                problem = plain_problem(rows, shape.num_experts, d, n, buffers=buffers, target=target)
                other = plain_problem(
                    rows, shape.num_experts, d, n, buffers=buffers, target=target, weight_layout="out_in"
                )
                config, of_in_out = PORTABLE.tile(other), PORTABLE.tile(problem)
                assert why_illegal(config, other) is None and config.block_m == of_in_out.block_m
                if config == of_in_out:
                    assert d % 128 or problem.rows_per_group > 24
                    continue
                longer += 1
                assert d % config.block_k == 0 and config.num_warps == of_in_out.num_warps, "they share launches"
                if arch == 90:
                    assert 2 * config.block_k >= 256, "bytes of a row that a step reads"
                    # Of S stages Triton holds S - 1: two blocks share a multiprocessor's 228 KB.
                    stage = 2 * config.block_k * (config.block_m + buffers * config.block_n)
                    assert 2 * ((config.num_stages - 1) * stage + 1024) <= 228 * 1024
    assert longer > 50


def test_what_looks_at_no_rows_and_fp32_keep_their_tiles() -> None:
    invariant = MatmulTuning(batch_invariant=True)
    kept: tuple[dict[str, Any], ...] = ({"tuning": invariant}, {"dtype": "float32"}, {"target": Target("interpreter")})
    for options in kept:
        found = [
            heuristic_tile(plain_problem(64, 64, 2048, 768, weight_layout=layout, **options)).config
            for layout in ("in_out", "out_in")
        ]
        assert found[0] == found[1], options
    dense = []
    for layout, shape in (("in_out", (7168, 4096)), ("out_in", (4096, 7168))):
        operands = MatmulOperands(ArraySpec((64, 7168), "bfloat16"), ArraySpec(shape, "bfloat16"))
        spec = MatmulSpec(layout, activation=Activation("silu"))
        dense.append(heuristic_tile(MatmulProblem(operands, None, spec, H200)).config)
    assert dense[0] == dense[1], "a dense product spills registers with the others"


@pytest.mark.parametrize(("num_tokens", "rows"), [(1, 1), (9, 5), (40, 20)])
def test_layouts_have_equal_bits_with_these_tiles(num_tokens: int, rows: int) -> None:
    """The same sums from either layout, in the launches that stages share; other tiles agree within a tolerance."""
    layer = simple_layer(num_tokens, "bfloat16", d_model=1152)
    first, second = (
        PORTABLE.tile(plain_problem(4 * rows, 4, d, n, buffers=buffers, weight_layout="out_in", target=H200))
        for d, n, buffers in ((1152, 24, 2), (128, 1152, 1))
    )
    spec = dataclasses.replace(layer.spec, tuning=Tuning(matmul_1=first, matmul_2=second))
    experts = ExpertWeights(
        *(np.ascontiguousarray(m.swapaxes(1, 2)) for m in (layer.experts.gate_up, layer.experts.down))
    )
    in_out = dataclasses.replace(layer, spec=spec)
    out_in = dataclasses.replace(layer, spec=dataclasses.replace(spec, weight_layout="out_in"), experts=experts)
    last = plan_of(out_in, engine_target()).steps[-1]
    assert isinstance(last, KernelLaunch) and last.kernel == (MULTIPLY_AND_REDUCE if num_tokens == 1 else CHAINED)
    found, wanted = run_layer(out_in), run_layer(in_out)
    assert {name: value.tobytes() for name, value in found.items()} == {
        name: value.tobytes() for name, value in wanted.items()
    }
    other = run_layer(layer)["output"].astype(np.float32)
    difference = np.linalg.norm(found["output"].astype(np.float32) - other)
    assert np.linalg.norm(other) > 0 and difference < 1e-2 * np.linalg.norm(other)
