"""Every architecture gets a legal configuration, and an illegal one a reason."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from moe_core import InvalidInput, Unsupported, dtypes
from moe_core.activation import plan_activation
from moe_core.arrays import ArraySpec
from moe_core.plan import Scalar
from moe_core.specs import Activation
from moe_core.target import Target
from moe_core.tuning import MatmulProblem, TileConfig, choose_config, hopper_config, require_legal, why_illegal

ARCHITECTURES = (80, 86, 87, 88, 89, 90, 100, 103, 120, 121)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_the_choice_is_legal_everywhere(arch: int) -> None:
    target = Target("cuda", arch, 128)
    sizes = itertools.product((0, 1, 8, 128, 1024, 4096, 65536, 131072), (16, 768, 7168), (1, 2), dtypes.MATMUL_DTYPES)
    for rows, n, buffers, dtype in sizes:
        described = MatmulProblem(rows, 128, 2048, n, dtype, buffers)
        problems = [described] if dtype == "float32" else [described, dataclasses.replace(described, not_hopper="")]
        for problem in problems:
            config = choose_config(problem, target)
            assert why_illegal(config, problem, target) is None, (problem, config)
            assert config.family == "portable" or (arch == 90 and not problem.not_hopper)


def test_an_h200_keeps_what_was_measured() -> None:
    problem = MatmulProblem(131072, 128, 2048, 768, "bfloat16", 2)
    assert choose_config(problem, Target("cuda", 90, 132)) == TileConfig(128, 128, 32, 8, 5, 4)
    problem = dataclasses.replace(problem, not_hopper="")
    assert choose_config(problem, Target("cuda", 90, 132)) == TileConfig(128, 128, 64, 4, 4, 4, "hopper")


def test_many_rows_take_the_hopper_family_on_sm_90() -> None:
    target = Target("cuda", 90, 132)
    enough = MatmulProblem(48 * 8, 8, 2048, 768, "bfloat16", 2, not_hopper="")
    assert choose_config(enough, target) == hopper_config(enough, 4, 4)
    assert choose_config(dataclasses.replace(enough, rows=48 * 8 - 1), target).family == "portable"
    assert choose_config(enough, Target("cuda", 100, 148)).family == "portable"
    assert choose_config(dataclasses.replace(enough, not_hopper="a reason"), target).family == "portable"
    long = dataclasses.replace(enough, d=4096, rows=256 * 8)
    assert choose_config(long, target) == hopper_config(long, 3, 4), "blocks stay together over a long reduction"
    assert choose_config(dataclasses.replace(long, rows=257 * 8), target).num_stages == 4


def test_a_product_without_operands_says_so() -> None:
    problem = MatmulProblem(131072, 128, 2048, 768, "bfloat16")
    reason = why_illegal(hopper_config(problem), problem, Target("cuda", 90, 132))
    assert reason is not None and reason.endswith("the product was described without its operands")


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (TileConfig(24, 64, 64), "block_m must be a power of two of at least 16"),
        (TileConfig(16, 64, 8), "block_k must be a power of two of at least 16"),
        (TileConfig(16, 64, 64, 3), "num_warps must be 4, 8 or 16"),
        (TileConfig(16, 64, 64, 4, 0), "num_stages must be at least 1"),
        (TileConfig(16, 64, 64, 4, 2, 0), "group_m must be at least 1"),
        (TileConfig(128, 256, 128, 8, 4), "bytes of shared memory"),
        (TileConfig(128, 256, 32, 4, 2), "accumulator registers"),
    ],
)
def test_reasons(config: TileConfig, reason: str) -> None:
    problem, target = MatmulProblem(1024, 8, 2048, 768, "bfloat16"), Target("cuda", 90, 132)
    found = why_illegal(config, problem, target)
    assert found is not None and reason in found
    with pytest.raises(InvalidInput, match="config must be legal on cuda sm_90"):
        require_legal(config, problem, target)


def test_counts_beyond_32_bits_are_refused() -> None:
    with pytest.raises(Unsupported, match=r"must fit into 32 bits, got 2147483648; split the batch"):
        Scalar(2**31)
    with pytest.raises(Unsupported, match="32 bits"):
        plan_activation(ArraySpec((2**31, 2), "bfloat16"), Activation("silu"), Target("cuda", 90, 132))
    with pytest.raises(Unsupported, match="would need a grid"):
        plan_activation(ArraySpec((1, 2**28), "bfloat16"), Activation("silu"), Target("cuda", 90, 132))
