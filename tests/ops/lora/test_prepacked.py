"""Adapters of prepacked experts: the twin's bits of published ones, and what sm_90's kernels compute."""

from __future__ import annotations

import dataclasses
from unittest import mock

import numpy as np
import pytest

from moe_core import Unsupported
from moe_core.ops.lora.adapters import Dropout
from moe_core.ops.matmul.sm90_packed.plan import why_not
from moe_core.ops.moe.forward import plan_moe
from moe_core.ops.moe.options import ForwardOptions
from moe_core.specs import Activation
from tests.support.harness import H200, engine_target
from tests.support.matmul.sm90 import needs_sm_90
from tests.support.training.lora import OAI, REFERENCE, TOLERANCE, drawn_in_tiles, effective, error, oracle, prepacked

SILU = Activation("silu")


@pytest.mark.parametrize("activation", [OAI, SILU, Activation("relu2", gated=False)], ids=str)
def test_the_twin_has_the_bits_of_published_weights(activation: Activation) -> None:
    problem = drawn_in_tiles(activation, sizes=(64, 64, 3, 2), ranks=(3, 0, 16))
    one, other = (each.forward(REFERENCE)["output"] for each in (problem, prepacked(problem)))
    assert one.tobytes() == other.tobytes()


#: Every height of tiles, with tiles of several adapters, many slots and ranks, and scales of integers.
ON_HOPPER = {
    "one token": (OAI, {"tokens": 1}),
    "few rows": (SILU, {"tokens": 14, "ranks": (3, 64, 1, 0), "padded": 64}),
    "few rows, many slots": (OAI, {"tokens": 15, "ranks": (5,) * 40, "factor_dtype": "float32"}),
    "16 rows": (OAI, {"tokens": 33, "ranks": (8, 33, 0), "padded": 48}),
    "32 rows": (SILU, {"tokens": 80, "shared": True}),
    "64 rows": (OAI, {"tokens": 150, "ranks": (3, 16, 1, 9)}),
    "tall": (SILU, {"tokens": 600, "ranks": (8, 64, 33, 0), "padded": 64}),
    "both tall": (OAI, {"tokens": 500, "ranks": (16, 2, 16, 16, 5, 16)}),
    "128 rows": (OAI, {"tokens": 1500}),
    "integers": (SILU, {"tokens": 20, "scheme": "int4_w4a16_zp", "sizes": (384, 256, 8, 2)}),
    "many rows of integers": (OAI, {"tokens": 700, "scheme": "int8_w8a16", "sizes": (384, 256, 8, 2)}),
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", ON_HOPPER)
def test_hopper_kernels(name: str) -> None:
    needs_sm_90()
    activation, options = ON_HOPPER[name]
    problem = drawn_in_tiles(activation, **options)
    ours, target = prepacked(problem), engine_target()
    made = ours.forward(target)["output"]
    assert error(made, oracle(problem)["output"]) < TOLERANCE["bfloat16"]
    none = effective(problem) < 0
    assert made[none].tobytes() == ours.forward(target, lora=False)["output"][none].tobytes()
    problem.lora.b1[1, :, 0, 5], problem.lora.b2[1, :, 0, 7] = np.nan, np.inf
    spoiled, mine = ours.forward(target)["output"], problem.adapter_ids == 1
    assert spoiled[~mine].tobytes() == made[~mine].tobytes()
    assert np.isnan(spoiled[mine].astype(np.float32)).all()


def test_explain_says_what_adds_tails_and_training_is_refused() -> None:
    problem = prepacked(drawn_in_tiles(OAI))
    specs = problem.specs
    options = ForwardOptions(lora=specs.lora, adapter_ids=specs.adapter_ids)
    with mock.patch("moe_core.ops.matmul.sm90_packed.few_rows_plan.why_not", side_effect=why_not) as asked:
        plan = plan_moe(specs.x, specs.experts, specs.routing, problem.spec, H200, options=options)
    assert [step.kernel.function for step in plan.steps].count("matmul_few_rows") == 2
    assert "then ranks of each row's adapter" in plan.explain()
    product = asked.call_args.args[0]
    adapters = dataclasses.replace(product.tail.adapters, dropout=Dropout(0.5, "token"))
    product = dataclasses.replace(product, tail=dataclasses.replace(product.tail, adapters=adapters))
    assert "dropout" in str(why_not(product))
    with pytest.raises(Unsupported, match="train with the weights that restore_weights gives"):
        training = dataclasses.replace(options, save=True)
        plan_moe(specs.x, specs.experts, specs.routing, problem.spec, H200, options=training)
