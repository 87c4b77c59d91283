"""Which configurations `moebius-tune` times: legal ones of every family that can run, the heuristics' own first."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from moe_core import dtypes
from moe_core.target import Target
from moe_core.tune.candidates import CHOICES, HOPPER_CHOICES, candidates
from moe_core.tuning import MatmulProblem, TileConfig, choose_config, hopper_config, why_illegal

H200 = Target("cuda", 90, 132)


def test_every_field_has_values_to_try() -> None:
    assert {*CHOICES, "family"} == {field.name for field in dataclasses.fields(TileConfig)}
    assert set(HOPPER_CHOICES) < set(CHOICES), "the family's other tile sides and warps are fixed"


@pytest.mark.parametrize("arch", [80, 89, 90, 100])
@pytest.mark.parametrize("rows", [1, 100, 4096, 131072])
@pytest.mark.parametrize("dtype", dtypes.MATMUL_DTYPES)
def test_candidates_are_legal_and_bounded(arch: int, rows: int, dtype: str) -> None:
    target, problem = Target("cuda", arch, 100), MatmulProblem(rows, 16, 2048, 768, dtype, 2)
    found = candidates(problem, target, 30)
    assert len(found) == len(set(found)) == 30
    assert found[0] == choose_config(problem, target)
    assert candidates(problem, target, 1) == found[:1]
    for config in found:
        assert why_illegal(config, problem, target) is None
    # One step in every direction that exists.
    for name in ("block_n", "num_stages"):
        assert len({getattr(config, name) for config in found}) > 1


@pytest.mark.parametrize("buffers", [1, 2])
@pytest.mark.parametrize("rows", [1, 16 * 47, 16 * 48, 131072])
def test_candidates_of_both_families(rows: int, buffers: int) -> None:
    problem = MatmulProblem(rows, 16, 2048, 768, "bfloat16", buffers, not_hopper="")
    found = candidates(problem, H200, 60)
    assert len(found) == len(set(found)) == 60 and found[0] == choose_config(problem, H200)
    assert all(why_illegal(config, problem, H200) is None for config in found)
    hopper = {config for config in found[:32] if config.family == "hopper"}
    tiles = itertools.product((2, 3, 4), (2, 4, 8), (128, 192))
    assert hopper == {hopper_config(problem, *tile) for tile in tiles if tile[0] < 4 or tile[2] == 128}
    unable = dataclasses.replace(problem, not_hopper="a reason")
    portable = [config for config in found if config.family == "portable"]
    assert tuple(portable) == candidates(unable, H200, len(portable))
    assert {config.family for config in found[:4]} == {"hopper", "portable"}
    others = candidates(problem, Target("cuda", 100, 148), 40)
    assert {config.family for config in others} == {"portable"}


def test_candidates_of_small_problems() -> None:
    for config in candidates(MatmulProblem(4, 2, 16, 16, "float32"), H200, 50):
        assert config.block_n <= 16 and config.block_k <= 16
