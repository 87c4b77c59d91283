"""Both products of the experts in one call of the reference engine."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

import tests.support.moe
from moe_core.base import threads
from moe_core.base.target import Target
from moe_core.ops.moe import forward
from moe_core.plan.steps import ReferenceCall
from tests.support.moe import plan_of, run_layer, simple_layer


@pytest.mark.parametrize("count", [1, 3, 16])
@pytest.mark.parametrize(("num_tokens", "dtype"), [(9, "float32"), (600, "float32"), (40, "bfloat16")])
def test_both_products_in_one_call_have_the_bits_of_one_after_the_other(
    num_tokens: int, dtype: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threads, "_WAKE_NANOSECONDS", 1)
    layer = dataclasses.replace(simple_layer(num_tokens, dtype), token_mask=np.arange(num_tokens) % 5 > 0)
    target, name = Target("reference"), "moe.reference.experts:both_products"
    functions = [step.function for step in plan_of(layer, target).steps if isinstance(step, ReferenceCall)]
    assert functions.count(name) == 1
    with threads.use(count):
        joined = run_layer(layer, target)
        monkeypatch.setattr(forward, "join_twins", lambda plan: plan)
        monkeypatch.setattr(tests.support.moe, "plan_moe", forward.plan_moe.__wrapped__)
        apart = run_layer(layer, target)
    assert {key: array.tobytes() for key, array in joined.items()} == {
        key: array.tobytes() for key, array in apart.items()
    }
