"""Which configurations `moebius-tune` times: legal ones of every family that can run, the heuristics' own first."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from moe_core.base import dtypes
from moe_core.base.target import Target
from moe_core.ops.matmul.families import why_illegal
from moe_core.ops.matmul.portable.plan import CHOICES
from moe_core.ops.matmul.sm90.plan import CHOICES as SM90_CHOICES
from moe_core.ops.matmul.sm90.plan import sm90_config
from moe_core.ops.matmul.tile_choice import heuristic_tile
from moe_core.specs.tile import TileConfig
from moe_core.tools.tune.search import candidates
from tests.support.matmul.problems import plain_problem


def test_every_field_has_values_to_try() -> None:
    assert {*CHOICES, "family"} == {field.name for field in dataclasses.fields(TileConfig)}
    assert set(SM90_CHOICES) < set(CHOICES), "the family's other tile sides and warps are fixed"


#: Every number of rows on every architecture, each with every dtype in turn.
PROBLEMS = [
    (arch, rows, dtypes.MATMUL_DTYPES[(place + number) % len(dtypes.MATMUL_DTYPES)])
    for place, arch in enumerate((80, 89, 90, 100))
    for number, rows in enumerate((1, 100, 4096, 131072))
]


@pytest.mark.parametrize(("arch", "rows", "dtype"), PROBLEMS)
def test_candidates_are_legal_and_bounded(arch: int, rows: int, dtype: str) -> None:
    out_dtype = "bfloat16" if dtype == "float32" else "float32"
    problem = plain_problem(rows, 16, 2048, 768, dtype, 2, target=Target("cuda", arch, 100), out_dtype=out_dtype)
    found = candidates(problem, 30)
    assert len(found) == len(set(found)) == 30
    assert found[0] == heuristic_tile(problem).config
    assert candidates(problem, 1) == found[:1]
    for config in found:
        assert why_illegal(config, problem) is None
    # One step in every direction that exists.
    for name in ("block_n", "num_stages"):
        assert len({getattr(config, name) for config in found}) > 1


@pytest.mark.parametrize("buffers", [1, 2])
@pytest.mark.parametrize("rows", [1, 16 * 47, 16 * 48, 131072])
def test_candidates_of_both_families(rows: int, buffers: int) -> None:
    problem = plain_problem(rows, 16, 2048, 768, buffers=buffers)
    found = candidates(problem, 60)
    assert len(found) == len(set(found)) == 60 and found[0] == heuristic_tile(problem).config
    assert all(why_illegal(config, problem) is None for config in found)
    sm90 = {config for config in found[:48] if config.family == "sm90"}
    tiles = itertools.product((2, 3, 4), (2, 4, 8), (128, 160, 192))
    assert sm90 == {sm90_config(problem, *tile) for tile in tiles if tile[0] < 4 or tile[2] != 192}
    unable = plain_problem(rows, 16, 2048, 768, buffers=buffers, out_dtype="float32")
    portable = [config for config in found if config.family == "portable"]
    assert tuple(portable) == candidates(unable, len(portable))
    assert {config.family for config in found[:4]} == {"sm90", "portable"}
    others = candidates(dataclasses.replace(problem, target=Target("cuda", 100, 148)), 40)
    assert {config.family for config in others} == {"portable"}


def test_candidates_of_small_problems() -> None:
    for config in candidates(plain_problem(4, 2, 16, 16, "float32"), 50):
        assert config.block_n <= 16 and config.block_k <= 16
