"""A forward in one launch whose sum has several tiles along both axes, of 16 tokens and 1024 columns."""

from __future__ import annotations

import numpy as np

from moe_core.base.target import Target
from moe_core.ops.moe.fuse import CHAINED
from moe_core.plan.steps import KernelLaunch
from tests.support.harness import engine_target
from tests.support.moe import plan_of, run_layer, simple_layer


def test_every_tile_of_the_sum_is_written() -> None:
    layer = simple_layer(20, d_model=1025)
    last = plan_of(layer, engine_target()).steps[-1]
    assert isinstance(last, KernelLaunch) and last.kernel == CHAINED
    wanted = run_layer(layer, Target("reference"))["output"]
    np.testing.assert_allclose(run_layer(layer)["output"], wanted, rtol=1e-4, atol=1e-4)
