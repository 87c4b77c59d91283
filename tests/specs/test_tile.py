"""Sizes beyond what kernels count in are refused."""

from __future__ import annotations

import pytest

from moe_core import Unsupported
from moe_core.base.arrays import ArraySpec
from moe_core.base.target import Target
from moe_core.ops.activation.forward import plan_activation
from moe_core.plan.steps import Scalar
from moe_core.specs.matmul import Activation


def test_counts_beyond_32_bits_are_refused() -> None:
    with pytest.raises(Unsupported, match=r"must fit into 32 bits, got 2147483648; split the batch"):
        Scalar(2**31)
    with pytest.raises(Unsupported, match="32 bits"):
        plan_activation(ArraySpec((2**31, 2), "bfloat16"), Activation("silu"), Target("cuda", 90, 132))
    with pytest.raises(Unsupported, match="would need a grid"):
        plan_activation(ArraySpec((1, 2**28), "bfloat16"), Activation("silu"), Target("cuda", 90, 132))
